"""Training that is killed at random moments ends as if it had never been killed."""

import json
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from minitransformer.runs import checkpoint
from minitransformer.runs.run_directory import RunDirectory
from support.scripts import LONG_RUN, TIMINGS, TRAIN, write_random_text

RESUME = ["--resume", "broken", "--threads", "1"]


def metrics(run: RunDirectory) -> list[dict[str, float]]:
    lines = run.metrics.read_text().splitlines()
    return [
        {k: v for k, v in json.loads(line).items() if k not in TIMINGS}
        for line in lines
    ]


def survive(folder: Path, steps: int, kills: int) -> int:
    """Kill a run of `steps` up to `kills` times; return how often it was."""
    data, cut = write_random_text(folder), random.Random(1)
    flags = [*data, *LONG_RUN, "--steps", str(steps)]
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

    def start_or_resume() -> list[str]:
        if broken.config.exists():
            return [*TRAIN, *RESUME]
        shutil.rmtree(broken.path, ignore_errors=True)  # killed before it began
        return [*TRAIN, *flags, "--run", "broken"]

    while done < kills:
        process = subprocess.Popen(
            start_or_resume(),
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
        paths = broken.checkpoints()
        for path in paths:
            checkpoint.load(path, with_moments=path in paths[-2:])
        found = int(paths[-1].stem.split("-")[1]) if paths else 0
        assert found >= newest, "a checkpoint was lost"
        newest = found
    subprocess.run(start_or_resume(), cwd=folder, check=True, stdout=subprocess.DEVNULL)
    final = whole.checkpoint(steps).name
    ours, theirs = (load_file(run.path / final) for run in (broken, whole))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        np.testing.assert_array_equal(ours[name], tensor)
    assert metrics(broken) == metrics(whole)
    assert not [p for p in broken.path.iterdir() if p.name.endswith(".partial")]
    return done


def test_a_run_killed_a_few_times_ends_like_an_unbroken_one(tmp_path):
    assert survive(tmp_path, steps=200, kills=4) >= 1


@pytest.mark.stress
def test_a_run_killed_two_hundred_times_ends_like_an_unbroken_one(tmp_path):
    kills = survive(tmp_path, steps=40_000, kills=200)
    print(f"kills survived: {kills}")
    assert kills == 200
