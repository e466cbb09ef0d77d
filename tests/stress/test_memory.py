"""Memory that runs out at any array: one line, whole files, and nothing is lost.

A training, a resume and a translation are repeated; each time another allocation of
NumPy fails, the k-th: a sample of all, or with `-m stress` every one.
"""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

import train
import translate
from minitransformer.runs import checkpoint
from minitransformer.training.lifecycle import TrainingRun
from minitransformer.training.parallel import CpuModel
from support.failing_allocator import failing_allocator
from support.in_process import run_main
from support.models import CAT_LINES
from support.runs import assert_same_parameters, metrics, steps
from support.scripts import write_random_text

FLAGS = (
    "--encoder-layers 1 --decoder-layers 1 --d-model 16 --d-ff 16 --num-heads 2 "
    "--vocab-size 60 --max-tokens 120 --warmup 10 --threads 1 --validate-every 3 "
    "--validate-bleu 2 --beam 2 --save-every 4 --log-every 2 --average 2 --steps 6"
).split()

HOW_MANY = [
    pytest.param(40, id="sample", marks=pytest.mark.slow),
    pytest.param(None, id="all", marks=pytest.mark.stress),
]


@pytest.fixture(scope="module")
def fails_at(tmp_path_factory):
    return failing_allocator(tmp_path_factory.mktemp("allocator"))


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Flags that name a text of three splits; its test text is the validation text."""
    flags = write_random_text(tmp_path_factory.mktemp("text"), validation=3)
    test = [x.replace("--val", "--test") for x in flags[-4:]]
    return [*flags, *test, *FLAGS]


@pytest.fixture
def runs(monkeypatch):
    """The runs that are trained, all in this thread, whose allocations are counted."""
    found, init = [], TrainingRun.__init__

    def noted(self, *arguments, **options):
        init(self, *arguments, **options)
        found.append(self)

    monkeypatch.setattr(TrainingRun, "__init__", noted)
    monkeypatch.setattr(CpuModel, "map", lambda self, do, items: [*map(do, items)])
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # for speed
    return found


def numbers(total, sample):
    """Which allocations fail: all, or some of each kind."""
    every = np.arange(1, total + 1)
    return every if sample is None else np.unique(every[:: -(-total // sample)])


def assert_whole(folder):
    """Nothing is left unfinished, and all that there is can be read."""
    assert not [x for x in folder.rglob("*") if "partial" in x.name]
    for path in folder.rglob("*.safetensors"):
        checkpoint.load(path)


def assert_told(found):
    code, _, error = found
    assert (code, error.count("\n")) == (1, 1), error
    assert "error: out of memory" in error


def validations(run):
    """What a run recorded but for its reports, which a failure may divide otherwise."""
    return [x for x in metrics(run) if "loss" not in x]


def go_on(run, text):
    """Resume a run until its last step, or begin it if there is none."""
    flags = [*text, "--run", run]
    if (run / "config.json").exists():
        flags = ["--resume", run, "--threads", 1, "--steps", 6]
    return run_main(train.main, *flags, "--cache", run.parent / "cache")


def survive(k, fails_at, runs, run, text):
    """Train with a failure, and go on; return how many updates were lost."""
    runs.clear()
    with fails_at(k):
        found = go_on(run, text)
    assert_whole(run.parent)
    if found[0] == 0:  # what failed was not needed
        return 0
    assert_told(found)
    lost = runs[-1].state.step - max(steps(run), default=0) if runs else 0
    code, _, error = go_on(run, text)
    assert code == 0, error
    return lost


@pytest.mark.parametrize("sample", HOW_MANY)
@pytest.mark.parametrize("what", ["training", "resume"])
def test_a_training(tmp_path, text, fails_at, runs, sample, what):
    whole, before = tmp_path / "whole" / "run", tmp_path / "before"
    with fails_at(0) as count:
        assert go_on(whole, text)[0] == 0
        total = count()
    before.mkdir()
    if what == "resume":
        assert go_on(before / "run", [*text, "--steps", 3])[0] == 0
        total = int(total * 0.8)
    lost, tried = 0, numbers(total, sample)
    for k in tried.tolist():
        run = Path(shutil.copytree(before, tmp_path / f"{k}"), "run")
        lost += survive(k, fails_at, runs, run, text)
        assert_same_parameters(run, whole)
        assert validations(run) == validations(whole)
        shutil.rmtree(run.parent)
    print(f"{what}: {len(tried)} of {total} allocations failed, {lost} updates lost")
    assert lost == 0


@pytest.mark.parametrize("sample", HOW_MANY)
def test_a_translation(tmp_path, model_path, fails_at, sample):
    (tmp_path / "in").write_text("".join(f"{line}\n" for line in CAT_LINES[:5]))
    flags = "--model", model_path, "--threads", 1, "--input", tmp_path / "in"
    flags = *flags, "--alignment", "--max-len-a", 0, "--max-len-b", 8, "--output"
    with fails_at(0) as count:
        assert run_main(translate.main, *flags, tmp_path / "expected")[0] == 0
        total = count()
    expected, out = (tmp_path / "expected").read_bytes(), tmp_path / "out"
    tried, failed = numbers(total, sample), 0
    for k in tried.tolist():
        out.write_bytes(b"old")
        with fails_at(k):
            found = run_main(translate.main, *flags, out)
        assert_whole(tmp_path)
        if found[0]:
            assert_told(found)
            failed += 1
        assert out.read_bytes() == (b"old" if found[0] else expected)
    print(f"translation: {len(tried)} of {total} allocations failed, {failed} ended it")
    assert failed


def test_the_allocator_fails_where_it_is_told(fails_at):
    with fails_at(2) as count:
        np.zeros(100)
        with pytest.raises(MemoryError):
            np.zeros(100)
        assert np.zeros(100).sum() == 0
        assert count() == 3
