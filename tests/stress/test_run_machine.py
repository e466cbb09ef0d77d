"""Anything done to run directories, in any order, leaves in them what it should.

Hypothesis draws trainings, kills, signals, resumed trainings, means, translations,
edits and copies, and compares the directories with a model of them after each.
"""

import json
import math
import os
import shutil
import signal
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import train
import translate
from minitransformer.runs import average
from minitransformer.text.lines import TextPair
from support.forked import Forked, run_forked
from support.in_process import run_main
from support.run_model import MAX_TOKENS, CheckpointFile, Contents, Plan, Reference
from support.scripts import write_random_text

LONGEST = 16  # steps of the reference; no training is longer
NAMES = "abc"
RUNS = Path("runs")

MODEL = (
    "--encoder-layers 1 --decoder-layers 1 --d-model 8 --d-ff 8 --num-heads 2 "
    f"--vocab-size 60 --max-tokens {MAX_TOKENS} --warmup 5 --validate-bleu 0 "
    "--beam 1 --max-len-a 0 --max-len-b 3"
).split()

# What two trainings may differ in for good. The learning rates are so high that the
# validation loss goes up and down.
VARIANTS = (
    "--seed 1 --log-every 1 --learning-rate 0.1",
    "--seed 2 --log-every 2 --learning-rate 0.05 --dropout 0.2 --accumulate 2",
)

DECODING = "--json --beam 2 --max-len-a 0 --max-len-b 5 --threads 1".split()

plans = st.builds(
    Plan,
    steps=st.integers(1, 12),
    save_every=st.integers(1, 6),
    validate_every=st.integers(1, 6),
    keep_last=st.integers(1, 4),
    average=st.integers(1, 3),
    patience=st.none() | st.integers(1, 3),
)
# What a resumed training may change.
changes = st.fixed_dictionaries(
    {},
    optional={
        "steps": st.integers(1, LONGEST),
        "keep_last": st.integers(1, 4),
        "average": st.integers(1, 3),
        "patience": st.integers(1, 3),
    },
)
# Before which operation on files a training gets which signals.
moments = st.integers(1, 100)
signals = st.sampled_from(
    [
        (signal.SIGKILL,),
        (signal.SIGTERM,),
        (signal.SIGINT,),
        (signal.SIGTERM, signal.SIGTERM),
    ]
)
interruptions = st.just((0, ())) | st.tuples(moments, signals)
lines = st.lists(
    st.sampled_from(["", "red cat", "one two " * 9, "\u00e9 x"]), max_size=4
)


@dataclass
class Run:
    """A directory as it should be: its flags for good, and what it holds."""

    variant: int
    plan: Plan
    contents: Contents
    torn: bool = False  # whether lines of its metrics were cut off by hand


@dataclass
class World:
    """What all examples share: the text, its cache and the references."""

    folder: Path
    data: list[str]
    references: list[Reference]
    done: Counter


def make_world(folder: Path) -> World:
    data = write_random_text(folder, validation=5)
    data += ["--test-source", str(folder / "val.source")]
    data += ["--test-target", str(folder / "val.target")]
    data += ["--cache", str(folder / "cache"), "--threads", "1"]
    everything = Plan(LONGEST, 1, 1, LONGEST, 1)
    references = []
    for number, variant in enumerate(VARIANTS):
        run = folder / f"reference-{number}"
        flags = [*data, *MODEL, *variant.split(), *everything.flags()]
        # Not forked, so that this process has imported all that its forks need.
        code, _, error = run_main(train.main, *flags, "--run", str(run))
        assert code == 0, error
        text = TextPair(folder / "val.source", folder / "val.target")
        log_every = int(variant.split()[3])
        references.append(Reference(run, log_every, text, folder / "cache"))
    return World(folder, data, references, Counter())


def tree(folder: Path = RUNS) -> dict[Path, bytes | None]:
    """Return all files and folders, but for those of the processes that train."""
    names = (p for p in folder.rglob("*") if not p.name.startswith("."))
    return {path: path.read_bytes() if path.is_file() else None for path in names}


def assert_one_line(code: int, error: str, expected: tuple[int, ...] = (1,)) -> None:
    assert code in expected, (code, error)
    assert error.count("\n") == 1, error
    assert ": error: " in error, error


forks = pytest.mark.skipif(sys.platform != "linux", reason="forks, as on Linux")


class RunMachine(RuleBasedStateMachine):
    """Three run directories at most, each with its model."""

    world: World

    def __init__(self) -> None:
        super().__init__()
        self.home = os.getcwd()
        self.folder = Path(tempfile.mkdtemp(dir=self.world.folder))
        os.chdir(self.folder)
        RUNS.mkdir()
        self.runs: dict[str, Run] = {}
        self.translated: dict[tuple[str | None, ...], str | None] = {}
        self.world.done["examples"] += 1

    def teardown(self) -> None:
        os.chdir(self.home)
        shutil.rmtree(self.folder)

    # Helpers

    def some_run(self, number: int) -> tuple[str, Run]:
        name = sorted(self.runs)[number % len(self.runs)]
        return name, self.runs[name]

    def reference(self, run: Run) -> Reference:
        return self.world.references[run.variant]

    def observe(self, name: str, run: Run) -> Contents:
        return self.reference(run).observe(RUNS / name)

    def begin_flags(self, name: str, run: Run) -> list[str]:
        variant = VARIANTS[run.variant].split()
        flags = [*self.world.data, *MODEL, *variant, *run.plan.flags()]
        return [*flags, "--run", str(RUNS / name)]

    def resume_flags(self, name: str, **changed: int) -> list[str]:
        flags = [f"--{k.replace('_', '-')}={v}" for k, v in changed.items()]
        return ["--resume", str(RUNS / name), *self.world.data[-4:], *flags]

    def check(self, name: str, run: Run, plan: Plan, ended) -> None:
        """Compare a training that has ended, in whatever way, with the model."""
        found = self.observe(name, run)
        moments, stops = self.reference(run).training(run.contents, plan)
        stopped = "stopped     and saved" in ended.out
        if ended.code == 0:
            assert found == moments[-1]
            hidden = {path.name for path in (RUNS / name).glob(".*")}
            assert hidden == {".lock", ".processes"}  # no unfinished files are left
            self.check_best(run, found)
        elif stopped:
            assert ended.code in (128 + signal.SIGTERM, 128 + signal.SIGINT)
            assert found in stops
        else:
            by_signal = -signal.SIGKILL, -signal.SIGTERM, 128 + signal.SIGINT
            assert ended.code in by_signal, ended
            assert found in moments
        if ended.err:
            assert_one_line(ended.code, ended.err, (128 + signal.SIGINT,))
        if found.begun:  # the settings are the first that a training writes
            kept = Plan.of_run(RUNS / name)
            changed = ended.code == 0 or found != run.contents
            assert kept in ([plan] if changed else [run.plan, plan])
            run.plan = kept
        killed = "killed" if ended.code < 0 else "interrupted"
        end = "finished" if ended.code == 0 else "stopped" if stopped else killed
        self.world.done[f"trainings {end}"] += 1
        run.contents = found

    def check_best(self, run: Run, found: Contents) -> None:
        """Where no line was lost, the best model has the lowest loss on record."""
        losses = self.reference(run).loss
        validated = [step for step, what in found.metrics if what == "validation"]
        ahead = found.best is not None and found.best > found.checkpoints[-1].step
        if validated and not run.torn and not ahead:
            assert found.best == min(validated, key=losses.get)

    def preferred(self, run: Run) -> str | None:
        """Return the digest of the parameters that this directory translates with."""
        now, files = run.contents, self.reference(run).files
        loss = self.reference(run).loss.get(now.best, math.inf)
        if now.averaged and now.averaged[1] <= loss:
            return now.averaged[0]
        if now.best:
            return files[now.best].parameters
        return files[now.checkpoints[-1].step].parameters if now.checkpoints else None

    def translate(self, text: list[str], path: Path, at_once: int = 0) -> str | None:
        """Translate to JSON, `at_once` times in processes too.

        Returns: the output, or None if the model was refused
        """
        Path("in").write_text("".join(line + "\n" for line in text))
        command = ["--input", "in", "--model", str(path), *DECODING]
        others = [Forked(translate.main, command) for _ in range(at_once)]
        code, out, error = run_main(translate.main, *command)
        for other in others:
            ended = other.end()
            assert (ended.code, ended.out, ended.err) == (code, out, error)
        if code:
            assert_one_line(code, error)
            return None
        answers = [json.loads(line) for line in out.split("\n")[:-1]]
        for line, answer in zip(text, answers, strict=True):
            assert line or answer["translations"][0]["text"] == ""
        return out

    def assert_translated(
        self, parameters: str | None, text: list[str], out: str | None
    ) -> None:
        """The same parameters give the same translations and scores everywhere."""
        assert (out is None) == (parameters is None)
        assert out == self.translated.setdefault((parameters, *text), out)

    # What a user does

    @rule(
        name=st.sampled_from(NAMES),
        variant=st.integers(0, len(VARIANTS) - 1),
        plan=plans,
        interruption=interruptions,
    )
    def begin(self, name, variant, plan, interruption):
        known = self.runs.get(name)
        run = Run(variant, plan, Contents())
        flags, before = self.begin_flags(name, run), tree()
        if known and known.contents.begun:
            ended = run_forked(train.main, flags)
            assert_one_line(ended.code, ended.err)
            assert tree() == before
            return
        ended = run_forked(train.main, flags, str(RUNS / name), *interruption)
        self.runs[name] = run
        self.check(name, run, plan, ended)

    @precondition(lambda self: self.runs)
    @rule(number=st.integers(0, 2), changed=changes)
    def resume(self, number, changed):
        self.resume_until(number, changed, 0, ())

    @precondition(lambda self: self.runs)
    @rule(number=st.integers(0, 2), changed=changes, at=moments, numbers=signals)
    def resume_and_interrupt(self, number, changed, at, numbers):
        self.resume_until(number, changed, at, numbers)

    def resume_until(self, number, changed, at, numbers):
        name, run = self.some_run(number)
        before, now = tree(), run.contents
        flags = self.resume_flags(name, **changed)
        ended = run_forked(train.main, flags, str(RUNS / name), at, numbers)
        results = "metrics.jsonl", "best.safetensors", "averaged.safetensors"
        loses = not (now.checkpoints or now.unsaved) and any(
            RUNS / name / result in before for result in results
        )
        if loses or not now.begun:  # neither goes on nor begins again
            assert ended.code
            assert tree() == before
            if ended.code == 1:
                assert_one_line(ended.code, ended.err)
                self.world.done["resumes refused"] += 1
                return
        self.check(name, run, replace(run.plan, **changed), ended)

    @precondition(lambda self: self.runs)
    @rule(
        number=st.integers(0, 2),
        flag=st.sampled_from(
            [
                "--seed=9",
                "--save-every=7",
                "--d-model=16",
                "--dropout=0.5",
                "--source=x",
            ]
        ),
    )
    def resume_with_what_cannot_change(self, number, flag):
        name, run = self.some_run(number)
        before = tree()
        ended = run_forked(train.main, [*self.resume_flags(name), flag])
        code = 2 if run.contents.begun else 1
        assert_one_line(ended.code, ended.err, (code,))
        assert tree() == before

    @precondition(lambda self: self.runs)
    @rule(number=st.integers(0, 2), changed=changes, at=moments, text=lines)
    def two_at_once(self, number, changed, at, text):
        """While one training is paused, a second is refused; translating goes on."""
        name, run = self.some_run(number)
        now = run.contents
        if not (now.begun and now.checkpoints):
            return
        flags, prefix = self.resume_flags(name, **changed), str(RUNS / name)
        first = Forked(train.main, flags, prefix, at)
        if first.wait_until_paused():
            holder = (RUNS / name / ".processes").read_text()
            before = tree()
            if holder == f"[{first.process}]":  # not paused before it has the lock
                for command in (flags, self.begin_flags(name, run)):
                    ended = run_forked(train.main, command)
                    assert_one_line(ended.code, ended.err)
                    assert f"process {first.process}" in ended.err
                self.world.done["refused beside another"] += 1
            self.translate(text, RUNS / name)
            assert tree() == before
            first.release()
        self.check(name, run, replace(run.plan, **changed), first.end())

    @precondition(lambda self: self.runs)
    @rule(number=st.integers(0, 2), last=st.integers(1, 4))
    def average(self, number, last):
        name, run = self.some_run(number)
        steps = [saved.step for saved in run.contents.checkpoints][-last:]
        before, mean = tree(), Path("mean.safetensors")
        mean.unlink(missing_ok=True)
        command = [str(mean), str(RUNS / name), "--last", str(last)]
        code, _, error = run_main(average.main, *command)
        if len(steps) < last:
            assert_one_line(code, error)
            assert not mean.exists()
        else:
            assert code == 0, error
            expected = self.reference(run).mean(steps)
            assert CheckpointFile(mean).parameters == expected
        assert tree() == before

    @precondition(lambda self: self.runs)
    @rule(number=st.integers(0, 2), text=lines, at_once=st.integers(0, 1))
    def translate_with_a_run(self, number, text, at_once):
        name, run = self.some_run(number)
        before, parameters = tree(), self.preferred(run)
        out = self.translate(text, RUNS / name, at_once)
        self.assert_translated(parameters, text, out)
        assert tree() == before

    @precondition(lambda self: self.runs)
    @rule(number=st.integers(0, 2), which=st.integers(0, 9), text=lines)
    def translate_with_a_checkpoint(self, number, which, text):
        name, _ = self.some_run(number)
        paths = sorted((RUNS / name).glob("*.safetensors"))
        if paths:
            path = paths[which % len(paths)]
            out = self.translate(text, path)
            self.assert_translated(CheckpointFile(path).parameters, text, out)

    @precondition(lambda self: any(map(self.preferred, self.runs.values())))
    @rule()
    def translate_with_the_newest(self):
        code, out, error = run_main(translate.main, *DECODING, "red cat")
        assert code == 0, error
        path = Path(error.removeprefix("translate.py: using ").rstrip("\n"))
        self.assert_translated(CheckpointFile(path).parameters, ["red cat"], out)

    @precondition(lambda self: self.runs)
    @rule(number=st.integers(0, 2), gone=st.sets(st.integers(0, 3)))
    def prune(self, number, gone):
        name, run = self.some_run(number)
        saved = run.contents.checkpoints
        for i in gone & set(range(len(saved))):
            (RUNS / name / f"step-{saved[i].step:08d}.safetensors").unlink()
        left = (s for i, s in enumerate(saved) if i not in gone)
        run.contents = replace(run.contents, checkpoints=tuple(left))

    @precondition(lambda self: self.runs)
    @rule(
        number=st.integers(0, 2),
        how=st.sampled_from(["key", "cut", "list", "bytes", "text", "number"]),
        text=lines,
    )
    def spoil_the_settings(self, number, how, text):
        """With a config.json that cannot be read, nothing is trained or lost."""
        name, run = self.some_run(number)
        if not run.contents.begun:
            return
        path = RUNS / name / "config.json"
        good = path.read_bytes()
        stored = json.loads(good)
        if how == "key":
            stored["model"]["colour"] = 1
        elif how == "text":
            del stored["text"]["train"]
        elif how == "number":
            stored["training"]["seed"] = "one"
        spoiled = {"cut": good[:-9], "list": b"[]", "bytes": b"\xff"}
        path.write_bytes(spoiled.get(how, json.dumps(stored).encode()))
        before = tree()
        ended = run_forked(train.main, self.resume_flags(name))
        assert_one_line(ended.code, ended.err)
        self.translate(text, RUNS / name)
        assert tree() == before
        path.write_bytes(good)

    @precondition(lambda self: self.runs)
    @rule(number=st.integers(0, 2), name=st.sampled_from(["d_model", "num_heads"]))
    def edit_a_size(self, number, name):
        """Sizes that are not those of the checkpoint are refused."""
        directory, run = self.some_run(number)
        if not (run.contents.begun and run.contents.checkpoints):
            return
        path = RUNS / directory / "config.json"
        good = path.read_bytes()
        stored = json.loads(good)
        stored["model"][name] *= 2
        path.write_text(json.dumps(stored))
        before = tree()
        ended = run_forked(train.main, self.resume_flags(directory))
        path.write_bytes(good)
        assert_one_line(ended.code, ended.err)
        assert tree() == {**before, path: good}

    @precondition(lambda self: self.runs)
    @rule(number=st.integers(0, 2), cut=st.integers(1, 400))
    def cut_the_metrics(self, number, cut):
        """Lose the end of metrics.jsonl, as a full disk may; a line may be torn."""
        name, run = self.some_run(number)
        path = RUNS / name / "metrics.jsonl"
        if path.exists():
            path.write_bytes(path.read_bytes()[:-cut])
            left = self.reference(run).observe_metrics(path)
            assert left == run.contents.metrics[: len(left)]
            run.contents, run.torn = replace(run.contents, metrics=left), True

    @precondition(lambda self: self.runs)
    @rule(number=st.integers(0, 2), name=st.sampled_from(NAMES))
    def copy(self, number, name):
        """Copy a directory; both go on from there."""
        original, run = self.some_run(number)
        if name not in self.runs and (RUNS / original).exists():
            shutil.copytree(RUNS / original, RUNS / name)
            self.runs[name] = replace(run)

    @invariant()
    def holds(self):
        self.world.done["steps"] += 1
        for name, run in self.runs.items():
            assert self.observe(name, run) == run.contents, name


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return make_world(tmp_path_factory.mktemp("world"))


@pytest.fixture
def state(world):
    """A machine for a history that failed once, in the lines that Hypothesis prints."""
    machine = type("RunMachine", (RunMachine,), {"world": world})()
    yield machine
    machine.holds()
    machine.teardown()


def drive(world: World, parent: settings, examples: int, steps: int) -> None:
    """Let Hypothesis do `steps` things in each of `examples` folders."""
    world.done.clear()
    machine = type("RunMachine", (RunMachine,), {"world": world})
    chosen = settings(
        parent,
        max_examples=examples,
        stateful_step_count=steps,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(machine, settings=chosen)
    print(f"{examples} examples of {steps} steps: {dict(world.done)}")


@forks
def test_run_directories_hold_what_their_histories_say(world):
    # A history that fails is not made shorter here, which may take minutes.
    chosen = settings(settings.get_profile("repeatable"), phases=[Phase.generate])
    drive(world, chosen, examples=6, steps=15)


@forks
@pytest.mark.stress
def test_run_directories_survive_long_histories(world):
    drive(world, settings.get_profile("long"), examples=100, steps=40)


@forks
def test_what_was_lost_is_done_again_and_nothing_twice(state):
    plan = Plan(steps=9, save_every=2, validate_every=3, keep_last=3, average=2)
    state.begin(name="a", variant=1, plan=plan, interruption=(40, (signal.SIGKILL,)))
    state.cut_the_metrics(number=0, cut=30)
    state.copy(number=0, name="b")
    state.prune(number=0, gone={1})
    state.resume(number=0, changed={})
    state.resume(number=1, changed={"steps": 12})
    state.translate_with_the_newest()


@forks
def test_a_stopped_run_goes_on_and_keeps_others_out(state):
    plan = Plan(steps=9, save_every=2, validate_every=2, keep_last=3, average=3)
    state.world.done.clear()
    state.begin(name="a", variant=0, plan=plan, interruption=(30, (signal.SIGTERM,)))
    assert state.world.done == {"trainings stopped": 1}
    state.two_at_once(number=0, changed={}, at=30, text=["red cat"])
    assert state.world.done["refused beside another"] == 1
    state.begin(name="a", variant=0, plan=plan, interruption=(0, ()))
    for which in range(5):  # averaged, best and three by their steps
        state.translate_with_a_checkpoint(number=0, which=which, text=["red cat", ""])
    state.translate_with_a_run(number=0, text=["red cat", ""], at_once=1)
    state.average(number=0, last=2)


@forks
def test_the_newest_run_is_one_that_has_a_checkpoint(state):
    plan = Plan(steps=2, save_every=2, validate_every=2, keep_last=1, average=1)
    state.begin(name="a", variant=0, plan=plan, interruption=(0, ()))
    state.begin(name="b", variant=0, plan=plan, interruption=(20, (signal.SIGKILL,)))
    assert state.runs["b"].contents.begun
    assert not state.runs["b"].contents.checkpoints
    state.translate_with_the_newest()


@forks
def test_settings_that_do_not_fit_are_refused(state):
    plan = Plan(steps=2, save_every=2, validate_every=2, keep_last=1, average=1)
    state.begin(name="a", variant=0, plan=plan, interruption=(0, ()))
    state.edit_a_size(number=0, name="num_heads")
    state.spoil_the_settings(number=0, how="text", text=[])
