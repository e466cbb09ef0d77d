"""What happens to a run's directory, against a model of it that fits a page."""

import os
import shutil
import signal

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    get_state_machine_test,
    invariant,
    precondition,
    rule,
)

import train
from minitransformer.commands import average, runs
from minitransformer.runs import checkpoint
from minitransformer.runs.run_directory import RunDirectory
from minitransformer.training.parallel import CpuModel
from support.in_process import run_main
from support.low_precision import write_corpus
from support.runs import steps

FLAGS = (
    "--encoder-layers 1 --decoder-layers 1 --d-model 8 --d-ff 8 --num-heads 2 "
    "--vocab-size 12 --dropout 0.2 --max-tokens 60 --warmup 3 --log-every 1 "
    "--average-by number --save-every 3"
).split()
LONGEST = 16
STEPS = st.integers(1, LONGEST)
COUNTS = st.integers(1, 4)
# What may differ when a run is resumed.
CHANGING = st.fixed_dictionaries({"keep_last": COUNTS, "average": COUNTS})


class Killed(BaseException):
    """The process ends here."""


class Unbroken:
    """A folder with text, and what a run of it that nothing interrupts would write."""

    def __init__(self, folder):
        self.folder, self.run = folder, RunDirectory(folder / "run")
        write_corpus(folder)
        self.always = ["--cache", folder / "cache", "--threads", 1]
        self.new = ["--run", self.run.path, *self.always, *FLAGS]
        self.new += ["--train-source", folder / "train.en"]
        self.new += ["--train-target", folder / "train.de"]
        all_steps = {"save_every": 1, "keep_last": LONGEST, "average": 1}
        assert self.train(LONGEST, all_steps) == 0
        every = range(1, LONGEST + 1)
        self.parameters = {x: self.read(self.run.checkpoint(x)) for x in every}
        self.losses = self.recorded()

    @staticmethod
    def read(path):
        return checkpoint.load(path).parameters.data.copy()

    def recorded(self):
        """The loss of each update, in the order of the file."""
        lines = self.run.read_metrics()
        return [(x["step"], x["loss"]) for x in lines if "loss" in x]

    def train(self, end, flags, stop=None, kill=None):
        """Begin or resume, perhaps with a signal after `stop` or a kill; the code."""
        where = ["--resume", self.run.path, *self.always]
        if not self.run.checkpoints():
            where = self.new
            shutil.rmtree(self.run.path, ignore_errors=True)
        forward_backward, synced = CpuModel.forward_backward, []

        def signalled(model, batches, smoothing, key):
            if key[1] == stop:
                os.kill(os.getpid(), signal.SIGTERM)
            return forward_backward(model, batches, smoothing, key)

        def killed(descriptor):
            synced.append(descriptor)
            if len(synced) == kill:
                raise Killed

        for name, value in {"steps": end, **flags}.items():
            where = [*where, f"--{name.replace('_', '-')}", value]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(CpuModel, "forward_backward", signalled)
            patch.setattr(os, "fsync", killed)
            code, _, error = run_main(train.main, *where)
        assert (code == 1) == ("expected Adam's moments" in error), error
        return code


class History(RuleBasedStateMachine):
    """The steps of the checkpoints that there should be, and of those with moments."""

    unbroken: Unbroken

    def __init__(self):
        super().__init__()
        self.run = self.unbroken.run
        shutil.rmtree(self.run.path, ignore_errors=True)
        self.steps, self.with_moments = [], set()

    @property
    def now(self):
        return self.steps[-1] if self.steps else 0

    def prune(self, flags):
        """Keep the newest, and before it some of those that were due."""
        due = [step for step in self.steps[:-1] if step % 3 == 0]
        kept = max(flags["keep_last"], flags["average"])
        self.steps = [*due, *self.steps[-1:]][-kept:]
        self.with_moments &= {*self.steps[-2:]}

    def save_until(self, last, flags):
        self.prune(flags)
        for step in range(self.now + 1, last + 1):
            if step % 3 == 0 or step == last:
                self.steps.append(step)
                self.with_moments.add(step)
                self.prune(flags)

    @rule(end=STEPS, flags=CHANGING, stop=st.none() | STEPS)
    def train(self, end, flags, stop, kill=None):
        """Begin or resume, perhaps with a signal in one of its steps."""
        refused = self.steps and self.now not in self.with_moments
        stop = stop if self.now < (stop or 0) <= end else None
        code = self.unbroken.train(end, flags, stop, kill)
        assert code == (1 if refused else 143 if stop else 0)
        if not refused:
            self.save_until(stop or end, flags)
            assert self.unbroken.recorded() == self.unbroken.losses[: self.now]
            if not stop:
                self.is_mean(self.run.averaged, flags["average"])

    @rule(end=STEPS, flags=CHANGING, call=st.integers(1, 30))
    def kill(self, end, flags, call):
        """What was saved stays, unless newer checkpoints took its place."""
        try:
            self.train(end, flags, None, call)
        except Killed:
            found = self.saved()
            assert (found or [0])[-1] >= self.now
            assert {*found} <= {*self.steps, *range(3, end + 1, 3), end}
            self.steps, self.with_moments = found, self.saved_with_moments()

    @precondition(lambda self: self.steps)
    @rule(number=st.integers(0, 4))
    def delete(self, number):
        step = self.steps.pop(number % len(self.steps))
        self.run.checkpoint(step).unlink()

    @precondition(lambda self: self.steps)
    @rule()
    def delete_all(self):
        flags = self.unbroken.folder, "--delete", self.run.path.name
        assert run_main(runs.main, *flags)[0] == 0
        assert not any(self.run.path.glob("*"))
        self.steps = []

    @precondition(lambda self: self.steps)
    @rule(count=COUNTS)
    def average(self, count):
        mean = self.unbroken.folder / "mean.safetensors"
        mean.unlink(missing_ok=True)
        code, *_ = run_main(average.main, mean, self.run.path, "--last", count)
        assert code == (count > len(self.steps))
        if not code:
            self.is_mean(mean, count)

    def is_mean(self, path, count):
        last = [self.unbroken.parameters[step] for step in self.steps[-count:]]
        mean = np.mean(last, axis=0, dtype=float).astype("float32")
        np.testing.assert_array_equal(self.unbroken.read(path), mean)

    def saved(self):
        """The steps of the checkpoints, which are those of an unbroken run."""
        saved = steps(self.run.path)
        for step in saved:
            found = self.unbroken.read(self.run.checkpoint(step))
            np.testing.assert_array_equal(found, self.unbroken.parameters[step])
        return saved

    def saved_with_moments(self):
        saved = steps(self.run.path)
        return {x for x in saved if checkpoint.has_moments(self.run.checkpoint(x))}

    @invariant()
    def checkpoints_are_those_of_the_model(self):
        assert self.saved() == self.steps
        assert self.saved_with_moments() == self.with_moments & {*self.steps}


@pytest.fixture(scope="module", autouse=True)
def unbroken(tmp_path_factory):
    History.unbroken = Unbroken(tmp_path_factory.mktemp("runs"))


test_any_history_leaves_the_checkpoints_of_an_unbroken_run = pytest.mark.properties(
    share=4
)(
    get_state_machine_test(
        History, settings=settings(max_examples=12, stateful_step_count=8)
    )
)
