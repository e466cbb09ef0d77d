"""Training that is killed at any moment, over and over, ends as if it never was."""

import json
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from minitransformer.runs import checkpoint
from minitransformer.runs.run_directory import RunDirectory

TRAIN = [sys.executable, str(Path(__file__).parents[2] / "train.py")]
SMALL = (
    "--encoder-layers 1 --decoder-layers 1 --d-model 16 --d-ff 16 --num-heads 2 "
    "--vocab-size 60 --max-tokens 120 --warmup 10 --threads 1 --validate-every 25 "
    "--validate-bleu 0 --save-every 3 --log-every 10 --keep-last 2 --average 1"
).split()
RESUME = ["--resume", "broken", "--threads", "1"]
TIMINGS = {"seconds", "source_tokens_per_second", "target_tokens_per_second"}


def text(folder: Path, validation: int = 10) -> list[str]:
    """Write a small text of made-up sentences; return the flags that name it."""
    rng = np.random.default_rng(0)
    words = ["red", "green", "blue", "one", "two", "three", "cat", "dog", "house"]
    flags = []
    for split, count in (("train", 300), ("val", validation)):
        for side in ("source", "target"):
            lines = [
                " ".join(rng.choice(words, rng.integers(2, 7))) for _ in range(count)
            ]
            path = folder / f"{split}.{side}"
            path.write_text("".join(line + "\n" for line in lines))
            flags += [f"--{split}-{side}", str(path)]
    return flags


def metrics(run: RunDirectory) -> list[dict[str, float]]:
    lines = run.metrics.read_text().splitlines()
    return [
        {k: v for k, v in json.loads(line).items() if k not in TIMINGS}
        for line in lines
    ]


def survive(folder: Path, steps: int, kills: int) -> int:
    """Kill a run of `steps` up to `kills` times; return how often it was."""
    data, cut = text(folder), random.Random(1)
    flags = [*data, *SMALL, "--steps", str(steps)]
    started = time.monotonic()
    subprocess.run(
        [*TRAIN, *flags, "--run", "whole"],
        cwd=folder,
        check=True,
        stdout=subprocess.DEVNULL,
    )
    whole, broken = RunDirectory(folder / "whole"), RunDirectory(folder / "broken")
    # So long a life at most that the run is not done before the last kill.
    life, done = 1.2 * (time.monotonic() - started) / kills, 0
    newest = 0
    while done < kills:
        known = broken.config.exists()
        if not known and broken.path.exists():
            shutil.rmtree(broken.path)  # killed before it began
        how = RESUME if known else [*flags, "--run", "broken"]
        process = subprocess.Popen(
            [*TRAIN, *how],
            cwd=folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        try:
            _, error = process.communicate(timeout=0.35 + life * cut.random())
            assert process.returncode == 0, error.decode()
            break
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.communicate()
        done += 1
        paths = broken.steps()
        for path in paths:
            checkpoint.load(path, with_moments=True)
        found = int(paths[-1].stem.split("-")[1]) if paths else 0
        assert found >= newest, "a checkpoint was lost"
        newest = found
    subprocess.run(
        [*TRAIN, *RESUME],
        cwd=folder,
        check=True,
        stdout=subprocess.DEVNULL,
    )
    final = whole.step(steps).name
    ours, theirs = (load_file(run.path / final) for run in (broken, whole))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        np.testing.assert_array_equal(ours[name], tensor)
    assert metrics(broken) == metrics(whole)
    assert not [p for p in broken.path.iterdir() if p.name.endswith(".partial")]
    return done


def test_a_few_kills(tmp_path):
    assert survive(tmp_path, steps=200, kills=4) >= 1


@pytest.mark.stress
def test_two_hundred_kills(tmp_path):
    kills = survive(tmp_path, steps=40_000, kills=200)
    print(f"kills survived: {kills}")
    assert kills == 200
