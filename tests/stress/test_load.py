"""Long streams and trainings: memory and open files do not grow, order is kept."""

import os
import random
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.models import save_small_model
from support.scripts import LONG_RUN, TRAIN, TRANSLATE, write_random_text

QUICK = "--beam 1 --max-len-a 0 --max-len-b 3 --threads 1".split()

linux = pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="reads memory from /proc"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return save_small_model(tmp_path_factory.mktemp("model") / "x.safetensors")


def resident(process: int | str) -> int:
    """Resident memory of a process. Units: bytes"""
    status = Path(f"/proc/{process}/status").read_text()
    line = next(x for x in status.splitlines() if x.startswith("VmRSS"))
    return int(line.split()[1]) * 1024


def stream(model: str, folder: Path, count: int) -> tuple[int, int]:
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
                early = resident(process.pid)
            elif number == count - 3000:
                late = resident(process.pid)
        assert process.stdout.read() == b""
    assert process.returncode == 0
    return early, late


@linux
def test_a_stream_keeps_its_order(tmp_path, model):
    early, late = stream(model, tmp_path, 6000)
    assert late < early + (32 << 20)


@linux
@pytest.mark.stress
def test_the_memory_of_a_million_lines_does_not_grow(tmp_path, model):
    started = time.monotonic()
    early, late = stream(model, tmp_path, 1_000_000)
    seconds = time.monotonic() - started
    print(f"memory after 100,000 lines {early:,} B, near the end {late:,} B")
    print(f"{seconds:.0f} s")
    assert late < early + (8 << 20)


def drawn_batches(model: str, count: int) -> int:
    """Send `count` batches of any text to one process; return how much it grew."""
    flags = "--beam 2 --max-len-a 0 --max-len-b 2 --max-input 30 --threads 1".split()
    sizes: list[int] = []
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([*TRANSLATE, "--model", model, *flags], **pipes) as process:

        @settings(
            max_examples=count,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(
            st.lists(
                st.text(
                    st.characters(codec="utf-8", exclude_characters="\n"), max_size=60
                ),
                max_size=6,
            )
        )
        def batch(lines: list[str]) -> None:
            process.stdin.write("".join(line + "\n" for line in lines).encode())
            process.stdin.flush()
            answers = [process.stdout.readline() for _ in lines]
            assert all(answer.endswith(b"\n") for answer in answers)
            blank = [a for a, line in zip(answers, lines, strict=True) if line == ""]
            assert blank == [b"\n"] * len(blank)
            sizes.append(resident(process.pid))

        batch()
        assert process.communicate() == (b"", None)
    assert process.returncode == 0
    return max(sizes) - sizes[len(sizes) // 10]


@linux
def test_arbitrary_text_is_answered_line_by_line(model):
    assert drawn_batches(model, 50) < 64 << 20


@linux
@pytest.mark.stress
def test_the_memory_of_ten_thousand_batches_does_not_grow(model):
    growth = drawn_batches(model, 10_000)
    print(f"memory grew by {growth:,} B")
    assert growth < 16 << 20


def long_training(folder: Path, steps: int) -> dict[str, list[int]]:
    """Watch memory, open files and checkpoints of a training of `steps` steps."""
    flags = [
        *write_random_text(folder),
        *LONG_RUN,
        "--save-every",
        "50",
        "--validate-every",
        "5000",
    ]
    # A report more than is looked at: at the last one the process may be ending.
    command = [*TRAIN, *flags, "--steps", str(steps + 500), "--log-every", "500"]
    seen: dict[str, list[int]] = {"memory": [], "files": [], "checkpoints": []}
    with subprocess.Popen(
        [*command, "--run", "run"], cwd=folder, stdout=subprocess.PIPE, text=True
    ) as process:
        for line in process.stdout:
            looked_at = len(seen["memory"]) < steps // 500
            if line.startswith("step") and "tokens/s" in line and looked_at:
                proc = Path(f"/proc/{process.pid}")
                seen["memory"].append(resident(process.pid))
                seen["files"].append(len(os.listdir(proc / "fd")))
                seen["checkpoints"].append(len(list((folder / "run").glob("step*"))))
    assert process.returncode == 0
    return seen


@linux
@pytest.mark.stress
def test_the_memory_of_a_hundred_thousand_steps_does_not_grow(tmp_path):
    seen = long_training(tmp_path, 100_000)
    early = np.array(seen["memory"])[20:40]
    late = np.array(seen["memory"])[-20:]
    print(f"memory after 10,000 steps {early.mean():,.0f} B, at the end ", end="")
    print(f"{late.mean():,.0f} B")
    print(f"open files {min(seen['files'])} to {max(seen['files'])}")
    print(f"checkpoints at most {max(seen['checkpoints'])}")
    assert late.mean() < early.mean() + (8 << 20)
    assert max(seen["files"]) - min(seen["files"]) <= 3
    assert max(seen["checkpoints"]) <= 3
