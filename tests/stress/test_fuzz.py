"""Mutated files get one clear error: no crash, no hang, no memory."""

import json
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from support.fuzzing import mutated
from support.scripts import with_tests_on_path


def run(folder: Path, count: int, seed: int) -> dict[str, float]:
    """Load mutated files in a process of its own, which may crash without the tests."""
    code = (
        "import json, sys; from support.fuzzing import load_mutated_files\n"
        "found = load_mutated_files(sys.argv[1], *map(int, sys.argv[2:]))\n"
        "print(json.dumps(found))"
    )
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder), str(count), str(seed)],
        env=with_tests_on_path(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, (
        f"seed {seed}: {done.returncode}\n{done.stderr[-3000:]}"
    )
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["slowest_seconds"] < 1
    assert figures["memory_growth_bytes"] < 10 * figures["file_bytes"] + (16 << 20)
    return figures


def test_mutated_files_get_one_error_each(tmp_path):
    figures = run(tmp_path / "0", 400, seed=0)
    assert figures["refused"] > 200


@pytest.mark.stress
def test_a_hundred_thousand_mutated_files_get_one_error_each(tmp_path):
    found = [run(tmp_path / str(seed), 5000, seed) for seed in range(1, 21)]
    total = {
        "inputs": sum(f["inputs"] for f in found),
        "refused": sum(f["refused"] for f in found),
        "slowest_seconds": max(f["slowest_seconds"] for f in found),
        "memory_growth_bytes": max(f["memory_growth_bytes"] for f in found),
    }
    print(total)
    assert total["inputs"] == 100_000


def test_mutations_change_the_data():
    rng = random.Random(0)
    data = bytes(range(256)) * 4
    assert np.mean([mutated(data, rng) != data for _ in range(200)]) > 0.9
