"""What happens to a run's directory, against a model of it that fits a page."""

import os
import shutil
import signal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import train
from minitransformer.runs import checkpoint
from minitransformer.runs.run_directory import RunDirectory
from minitransformer.training.parallel import CpuModel
from support.in_process import run_main
from support.low_precision import write_corpus

FLAGS = (
    "--encoder-layers 1 --decoder-layers 1 --d-model 8 --d-ff 8 --num-heads 2 "
    "--vocab-size 12 --dropout 0.2 --max-tokens 60 --warmup 3 --log-every 1 "
    "--average-by number --save-every 3"
).split()
LONGEST = 16


class Killed(BaseException):
    """The process ends here."""


class Runs:
    """A folder with text, and what a run of it that nothing interrupts would write."""

    def __init__(self, folder):
        self.folder, self.run = folder, RunDirectory(folder / "run")
        write_corpus(folder)
        self.new = ["--run", self.run.path, "--cache", folder / "cache"]
        self.new += ["--threads", 1, *FLAGS]
        for side, language in (("source", "en"), ("target", "de")):
            self.new += [f"--train-{side}", folder / f"train.{language}"]
        self.parameters = {0: None}
        for step in range(1, LONGEST + 1):
            assert self.train(step, keep_last=9, average=1) == 0
            self.parameters[step] = self.read(self.run.checkpoint(step))

    @staticmethod
    def read(path):
        return checkpoint.load(path).parameters.data.copy()

    def saved(self):
        """The steps of the checkpoints, which are those of an unbroken run."""
        steps = [int(path.stem[5:]) for path in self.run.checkpoints()]
        for step in steps:
            found = self.read(self.run.checkpoint(step))
            np.testing.assert_array_equal(found, self.parameters[step])
        return steps

    def train(self, steps, keep_last, average, stop=None, kill=None):
        """Begin or resume, perhaps with a signal after `stop` or a kill; the code."""
        begun = self.run.checkpoints()
        where = ["--resume", self.run.path, *self.new[2:6]] if begun else self.new
        if not begun:
            shutil.rmtree(self.run.path, ignore_errors=True)
        forward_backward, synced, sync = CpuModel.forward_backward, [], os.fsync

        def signalled(model, batches, smoothing, key):
            if key[1] == stop:
                os.kill(os.getpid(), signal.SIGTERM)
            return forward_backward(model, batches, smoothing, key)

        def killed(descriptor):
            synced.append(descriptor)
            if len(synced) == kill:
                raise Killed
            sync(descriptor)

        limits = "--steps", steps, "--keep-last", keep_last, "--average", average
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(CpuModel, "forward_backward", signalled)
            patch.setattr(os, "fsync", killed)
            code, _, error = run_main(train.main, *where, *limits)
        assert (code == 1) == ("expected Adam's moments" in error), error
        return code


class Model:
    """The steps of the checkpoints that there should be, and of those with moments."""

    def __init__(self):
        self.steps, self.with_moments = [], set()

    @property
    def now(self):
        return self.steps[-1] if self.steps else 0

    def prune(self, count):
        """Keep the newest, and before it some of those that were due."""
        due = [step for step in self.steps[:-1] if step % 3 == 0]
        self.steps = [*due, *self.steps[-1:]][-count:]
        self.with_moments &= {*self.steps[-2:]}

    def train(self, last, count):
        self.prune(count)
        for step in range(self.now + 1, last + 1):
            if step % 3 == 0 or step == last:
                self.steps.append(step)
                self.with_moments.add(step)
                self.prune(count)


STEPS = st.integers(1, LONGEST)
COUNTS = st.integers(1, 4)
TRAIN = st.tuples(st.just("train"), STEPS, COUNTS, COUNTS, st.none() | STEPS)
KILL = st.tuples(st.just("kill"), STEPS, COUNTS, COUNTS, st.integers(1, 30))
DELETE = st.tuples(st.just("delete"), st.integers(0, 4))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return Runs(tmp_path_factory.mktemp("runs"))


@pytest.mark.properties(share=4)
@settings(max_examples=6)
@given(st.lists(TRAIN | KILL | DELETE, min_size=1, max_size=6))
def test_any_history_leaves_the_checkpoints_of_an_unbroken_run(runs, history):
    shutil.rmtree(runs.run.path, ignore_errors=True)
    model = Model()
    for kind, *values in history:
        if kind == "delete":
            if values[0] < len(model.steps):
                runs.run.checkpoint(model.steps.pop(values[0])).unlink()
            continue
        end, keep_last, average, event = values
        refused = model.steps and model.now not in model.with_moments
        stop = event if kind == "train" and model.now < (event or 0) <= end else None
        try:
            kill = event if kind == "kill" else None
            code = runs.train(end, keep_last, average, stop, kill)
        except Killed:
            # What was saved stays, unless newer ones took its place.
            found = runs.saved()
            assert (found or [0])[-1] >= model.now
            assert {*found} <= {*model.steps, *range(3, end + 1, 3), end}
            kept = (s for s in found if checkpoint.has_moments(runs.run.checkpoint(s)))
            model.steps, model.with_moments = found, {*kept}
            continue
        assert code == (1 if refused else 143 if stop else 0)
        if refused:
            continue
        model.train(stop or end, max(keep_last, average))
        assert runs.saved() == model.steps
        if not stop:
            last = [runs.parameters[step] for step in model.steps[-average:]]
            mean = np.mean(last, axis=0, dtype=float).astype("float32")
            np.testing.assert_array_equal(runs.read(runs.run.averaged), mean)
