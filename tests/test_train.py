"""train.py as a user runs it, in a process of its own.

What needs none is in test_train_flags.py and test_train_in_process.py.
"""

import json
import os
import subprocess

import numpy as np
import pytest

from support.scripts import SMALL_RUN, TIMINGS, TRAIN, WORDS


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    rng = np.random.default_rng(0)
    for split, count in (("train", 300), ("val", 20), ("test", 20)):
        lines = [" ".join(rng.choice(WORDS, rng.integers(2, 9))) for _ in range(count)]
        (folder / f"{split}.en").write_text("\n".join(lines) + "\n")
        reverse = [" ".join(line.split()[::-1]) for line in lines]
        (folder / f"{split}.de").write_text("\n".join(reverse) + "\n")
    return folder


def data_flags(folder):
    return ["--data", str(folder), "--source", "en", "--target", "de"]


def train(cwd, *flags):
    return subprocess.run(
        [*TRAIN, *flags], cwd=cwd, capture_output=True, text=True, check=False
    )


def train_small(cwd, folder, run, *flags):
    result = train(cwd, *data_flags(folder), *SMALL_RUN, "--run", run, *flags)
    assert result.returncode == 0, result.stderr
    return result


def metrics(run):
    lines = [json.loads(x) for x in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in TIMINGS} for line in lines]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory, folder):
    cwd = tmp_path_factory.mktemp("unbroken")
    result = train_small(cwd, folder, "run", "--steps", "40")
    return cwd / "run", result


def test_a_run_writes_what_it_promises(unbroken):
    run, result = unbroken
    names = {path.name for path in run.iterdir()}
    assert names >= {"config.json", "tokenizer.model", "metrics.jsonl", "train.log"}
    assert names >= {"best.safetensors", "averaged.safetensors"}
    steps = [f"step-{step:08d}.safetensors" for step in (10, 20, 30, 40)]
    assert sorted(n for n in names if n.startswith("step")) == steps
    assert (run / "train.log").read_text() == result.stdout
    for word in ("parameters", "padding", "GFLOP", "source +", "perplexity", "BLEU"):
        assert word in result.stdout
    lines = metrics(run)
    losses = [line["loss"] for line in lines if "loss" in line]
    assert len(losses) == 10
    assert losses[-1] < losses[0]
    assert {"validation_loss", "validation_accuracy", "validation_bleu"} <= {
        line for entry in lines for line in entry
    }


@pytest.mark.skipif(os.name != "posix", reason="needs a shell")
@pytest.mark.parametrize("output", ["| head -n 1", "2> /dev/full >&2"])
def test_a_closed_or_broken_output_ends_no_training(tmp_path, folder, output):
    flags = map(str, [*data_flags(folder), *SMALL_RUN, "--steps", 30, "--run", "run"])
    script = f'"$@" {output}; exit "${{PIPESTATUS[0]}}"'
    command = ["bash", "-c", script, "bash", *TRAIN, *flags]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "done" in (tmp_path / "run" / "train.log").read_text()
    assert (tmp_path / "run" / "step-00000030.safetensors").exists()
    json.loads((tmp_path / "run" / "config.json").read_text())


def limited(cwd, blocks, *flags):
    """Run train.py where no file may grow beyond `blocks` of 1,024 bytes."""
    script = f'ulimit -f {blocks}; exec "$@"'
    return subprocess.run(
        ["bash", "-c", script, "bash", *TRAIN, *flags],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.skipif(os.name != "posix", reason="needs ulimit")
def test_a_full_disk_stops_or_not_and_harms_no_checkpoint(tmp_path, folder):
    ended = train_small(tmp_path, folder, "whole", "--steps", "10")
    size = (tmp_path / "whole" / "step-00000010.safetensors").stat().st_size
    blocks = size // 1024 - 9
    assert "done" in ended.stdout
    stopped = limited(
        tmp_path,
        blocks,
        *data_flags(folder),
        *SMALL_RUN,
        "--steps",
        "20",
        "--run",
        "run",
    )
    assert stopped.returncode == 1
    assert "step-00000010.safetensors" in stopped.stderr
    assert len(stopped.stderr.splitlines()) == 1
    assert not list((tmp_path / "run").glob("step*"))
    assert not list((tmp_path / "run").glob(".*partial"))
    for name in ("best.safetensors", "metrics.jsonl"):  # of the run that failed
        (tmp_path / "run" / name).unlink()
    train(tmp_path, "--resume", "run", "--steps", "10")
    before = (tmp_path / "run" / "step-00000010.safetensors").read_bytes()
    flags = ["--resume", "run", "--steps", "20", "--on-save-error", "continue"]
    going_on = limited(tmp_path, blocks, *flags)
    assert "training continues" in going_on.stdout
    assert going_on.returncode == 1
    assert "but not all of it could be saved" in going_on.stderr
    assert "step     20" in going_on.stdout
    assert (tmp_path / "run" / "step-00000010.safetensors").read_bytes() == before
