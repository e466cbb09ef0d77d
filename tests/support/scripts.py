"""train.py and translate.py: how to run them, and small text to run them on."""

import os
import re
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[2]
TRAIN = [sys.executable, str(ROOT / "train.py")]
TRANSLATE = [sys.executable, str(ROOT / "translate.py")]

# Short translations, for models that never learned to end one.
SHORT = ("--max-len-a", "0", "--max-len-b", "5", "--threads", "1")

# The flags of a training run of seconds, with a report, a checkpoint and a validation
# every few steps.
SMALL_RUN = (
    "--encoder-layers 1 --decoder-layers 1 --d-model 16 --d-ff 32 --num-heads 2 "
    "--vocab-size 60 --dropout 0.2 --max-tokens 200 --warmup 10 --threads 2 "
    "--validate-every 10 --save-every 10 --log-every 4 --validate-bleu 4 --average 2 "
    "--average-by number"
).split()

# The flags of a run of many quick steps, with frequent checkpoints.
LONG_RUN = (
    "--encoder-layers 1 --decoder-layers 1 --d-model 16 --d-ff 16 --num-heads 2 "
    "--vocab-size 60 --max-tokens 120 --warmup 10 --threads 1 --validate-every 25 "
    "--validate-bleu 0 --save-every 3 --log-every 10 --keep-last 2 --average 1"
).split()

# What two equal runs differ in.
TIMINGS = {"seconds", "source_tokens_per_second", "target_tokens_per_second"}


def is_running(process):
    """Whether a process, by its number, has not ended yet."""
    try:
        state = Path(f"/proc/{process}/stat").read_text(encoding="ascii")
    except OSError:
        return False
    return state.rpartition(")")[2].split()[0] != "Z"


def memory_of(process, kind="VmRSS"):
    """The memory of a process, resident or the peak of it, VmHWM. Units: bytes"""
    status = Path(f"/proc/{process}/status").read_text()
    return int(re.search(rf"{kind}:\s+(\d+)", status)[1]) * 1024


WORDS = ["red", "green", "blue", "one", "two", "three", "cat", "dog", "house"]


def with_tests_on_path():
    """The environment of a new process that imports from this folder."""
    path = os.pathsep.join((str(ROOT), str(ROOT / "tests")))
    return {**os.environ, "PYTHONPATH": path}


def write_random_text(folder, validation=10):
    """Write a small text of made-up sentences; return the flags that name it."""
    rng = np.random.default_rng(0)
    flags = []
    for split, count in (("train", 300), ("val", validation)):
        for side in ("source", "target"):
            lines = [
                " ".join(rng.choice(WORDS, rng.integers(2, 7))) for _ in range(count)
            ]
            path = folder / f"{split}.{side}"
            path.write_text("".join(line + "\n" for line in lines))
            flags += [f"--{split}-{side}", str(path)]
    return flags
