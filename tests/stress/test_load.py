"""Long streams and trainings: memory and open files do not grow, order is kept."""

import os
import random
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

from support.scripts import LONG_RUN, TRAIN, TRANSLATE, memory_of, write_random_text

QUICK = "--beam 1 --max-len-a 0 --max-len-b 3 --threads 1".split()

linux = pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="reads memory from /proc"
)


def stream(model, folder, count):
    """Send `count` lines through; return memory early and late on."""
    rng = random.Random(0)
    known = [f"the cat {i} sat " + "on the mat " * (i % 3) for i in range(500)]
    (folder / "known").write_text("".join(line + "\n" for line in known))
    flags = ["--model", model, *QUICK]
    answers = subprocess.run(
        [*TRANSLATE, *flags, "--input", "known"],
        cwd=folder,
        check=True,
        capture_output=True,
    ).stdout.split(b"\n")
    order = [rng.randrange(500) for _ in range(count)]
    with open(folder / "in", "w") as file:
        file.writelines(known[i] + "\n" for i in order)
    early = 0
    with (
        open(folder / "in", "rb") as lines,
        subprocess.Popen(
            [*TRANSLATE, *flags], cwd=folder, stdin=lines, stdout=subprocess.PIPE
        ) as process,
    ):
        late = 0
        for number, i in enumerate(order):
            assert process.stdout.readline() == answers[i] + b"\n", number
            if number == count // 10:
                early = memory_of(process.pid)
            elif number == count - 3000:
                late = memory_of(process.pid)
        assert process.stdout.read() == b""
    assert process.returncode == 0
    return early, late


@linux
@pytest.mark.parametrize(
    "count",
    [
        pytest.param(4000, id="sample"),
        pytest.param(1_000_000, id="all", marks=pytest.mark.stress),
    ],
)
def test_a_stream_keeps_its_order_and_its_memory(tmp_path, model_path, count):
    started = time.monotonic()
    early, late = stream(model_path, tmp_path, count)
    print(f"memory after {count // 10:,} lines {early:,} B, near the end {late:,} B")
    print(f"{time.monotonic() - started:.0f} s")
    assert late < early + ((8 if count == 1_000_000 else 32) << 20)


@linux
@pytest.mark.stress
def test_the_memory_of_a_hundred_thousand_steps_does_not_grow(tmp_path):
    """Nor do its open files and its checkpoints."""
    often = "--save-every 50 --validate-every 5000 --log-every 500 --run run".split()
    # A report more than is looked at: at the last one the process may be ending.
    flags = [*write_random_text(tmp_path), *LONG_RUN, *often, "--steps", "100500"]
    memory, files, checkpoints = [], [], []
    with subprocess.Popen(
        [*TRAIN, *flags], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    ) as process:
        for line in process.stdout:
            if line.startswith("step") and "tokens/s" in line and len(memory) < 200:
                memory.append(memory_of(process.pid))
                files.append(len(os.listdir(f"/proc/{process.pid}/fd")))
                checkpoints.append(len([*(tmp_path / "run").glob("step*")]))
    assert process.returncode == 0
    early, late = np.mean(memory[20:40]), np.mean(memory[-20:])
    print(f"memory after 10,000 steps {early:,.0f} B, at the end {late:,.0f} B")
    print(f"open files {min(files)} to {max(files)}, checkpoints {max(checkpoints)}")
    assert late < early + (8 << 20)
    assert max(files) - min(files) <= 3
    assert max(checkpoints) <= 3
