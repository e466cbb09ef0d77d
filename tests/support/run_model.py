"""What the directory of a training run must hold, after whatever was done to it.

The model knows a reference, a training that was never interrupted, and the order in
which a training writes its files. After a kill the directory must be as it was after
one of these writes.
"""

import functools
import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
from safetensors import safe_open

from minitransformer.runs.average import average_checkpoints
from minitransformer.runs.run_directory import RunDirectory
from minitransformer.text.cache import encoded_corpus
from minitransformer.text.lines import TextPair
from minitransformer.training.evaluation import validate
from minitransformer.training.parallel import ThreadedModel
from support.scripts import TIMINGS

MAX_TOKENS = 120  # of a batch
MOMENTS = ("adam.mean", "adam.square")


def digest(tensors: dict[str, np.ndarray]) -> str:
    total = hashlib.sha256()
    for name in sorted(tensors):
        total.update(name.encode() + tensors[name].tobytes())
    return total.hexdigest()


@dataclass(frozen=True)
class Saved:
    """A checkpoint: the step, and what the run knew of its validations."""

    step: int
    best_loss: float = math.inf
    validations_since_best: int = 0


class CheckpointFile:
    """The tensors and the state in a checkpoint, read without the package."""

    def __init__(self, path: Path) -> None:
        with safe_open(path, framework="np") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            state = json.loads(file.metadata()["state"])
        held = {name: tensors.pop(name) for name in MOMENTS if name in tensors}
        self.moments = digest(held) if held else None
        self.tensors, self.parameters = tensors, digest(tensors)
        loss = math.inf if state["best_loss"] is None else state["best_loss"]
        self.saved = Saved(state["step"], loss, state["validations_since_best"])
        self.model = self.parameters, self.saved.best_loss


def read_metrics(path: Path) -> list[dict[str, object]]:
    """Return the lines of metrics.jsonl that are whole."""
    records = []
    for line in path.read_text().split("\n") if path.exists() else ():
        try:
            records.append(json.loads(line))
        except ValueError:
            continue
    return records


def kind(record: dict[str, object]) -> str:
    if "validation_loss" in record:
        return "validation"
    return "test" if "test_bleu" in record else "report"


@dataclass(frozen=True)
class Contents:
    """What a run directory holds: checkpoints by step, lines of metrics, best, mean.

    A run that has begun is unsaved until its first checkpoint is complete. The mean is
    known by a digest of its parameters and by its validation loss.
    """

    begun: bool = False
    unsaved: bool = False
    checkpoints: tuple[Saved, ...] = ()
    metrics: tuple[tuple[int, str], ...] = ()
    best: int | None = None
    averaged: tuple[str, float] | None = None

    def pruned(self, plan: "Plan") -> Iterator["Contents"]:
        """Say what is there after each step of pruning.

        Of what is not the newest, only what was saved in due course is kept.
        """
        due = [s for s in self.checkpoints[:-1] if s.step % plan.save_every == 0]
        kept = (*due, *self.checkpoints[-1:])[-max(plan.keep_last, plan.average) :]
        left = self.checkpoints
        for saved in self.checkpoints:
            if saved not in kept:
                left = tuple(s for s in left if s != saved)
                yield replace(self, checkpoints=left)
        if self.checkpoints:
            yield replace(self, checkpoints=kept, unsaved=False)


@dataclass(frozen=True)
class Plan:
    """The flags of a training that decide what it writes, and when."""

    steps: int
    save_every: int
    validate_every: int
    keep_last: int
    average: int
    patience: int | None = None

    @classmethod
    def of_run(cls, run: Path) -> "Plan":
        """Return the flags that a run goes on with."""
        stored = json.loads((run / "config.json").read_text())["training"]
        return cls(**{field.name: stored[field.name] for field in fields(cls)})

    def flags(self) -> list[str]:
        named = {k: v for k, v in vars(self).items() if v is not None}
        pairs = ((f"--{k.replace('_', '-')}", str(v)) for k, v in named.items())
        return [text for pair in pairs for text in pair]


class Reference:
    """A training that was never interrupted and kept everything, by step."""

    def __init__(self, run: Path, log_every: int, text: TextPair, cache: Path) -> None:
        self.run, self.text, self.cache = run, text, cache
        files = [CheckpointFile(path) for path in sorted(run.glob("step-*"))]
        self.files = {file.saved.step: file for file in files}
        self.log_every = log_every
        self.lines = {
            (line["step"], kind(line)): self.without_timings(line)
            for line in read_metrics(run / "metrics.jsonl")
        }
        self.loss = {
            step: line["validation_loss"]
            for (step, what), line in self.lines.items()
            if what == "validation"
        }

    @staticmethod
    def without_timings(line: dict[str, object]) -> dict[str, object]:
        return {k: v for k, v in line.items() if k not in TIMINGS}

    @functools.cache  # noqa: B019
    def mean_loss(self, *steps: int) -> float:
        """Return the validation loss of a mean, to the last bit."""
        run = RunDirectory(self.run)
        mean = average_checkpoints([run.checkpoint(step) for step in steps])
        threaded = ThreadedModel(mean.model, mean.parameters, 1)
        corpus = encoded_corpus(self.text, mean.tokenizer, self.cache)
        loss = validate(threaded, corpus, MAX_TOKENS).loss
        threaded.close()
        return loss

    def mean(self, steps: list[int]) -> str:
        """Return the digest of the mean of the parameters after these steps."""
        tensors = [self.files[step].tensors for step in steps]
        means = dict(tensors[-1])
        for name, tensor in means.items():
            if tensor.dtype == np.float32:
                each = [t[name].astype(np.float64) for t in tensors]
                means[name] = np.mean(each, axis=0).astype(np.float32)
        return digest(means)

    def observe(self, run: Path) -> Contents:
        """Return what a directory holds; every tensor must be that of its step."""
        checkpoints, best, averaged = [], None, None
        for path in sorted(run.glob("step-*")):
            found = CheckpointFile(path)
            assert path.name == f"step-{found.saved.step:08d}.safetensors"
            expected = self.files[found.saved.step]
            assert found.parameters == expected.parameters, path
            assert found.moments == expected.moments, path
            checkpoints.append(found.saved)
        if (run / "best.safetensors").exists():
            found = CheckpointFile(run / "best.safetensors")
            best = found.saved.step
            assert found.parameters == self.files[best].parameters, "best"
            assert found.saved.best_loss == self.loss[best]
        if (run / "averaged.safetensors").exists():
            averaged = CheckpointFile(run / "averaged.safetensors").model
        begun = (run / "config.json").exists()
        return Contents(
            begun,
            begun and (run / ".unsaved").exists(),
            tuple(checkpoints),
            self.observe_metrics(run / "metrics.jsonl"),
            best,
            averaged,
        )

    def observe_metrics(self, path: Path) -> tuple[tuple[int, str], ...]:
        records = read_metrics(path)
        seconds = [record["seconds"] for record in records if "seconds" in record]
        assert seconds == sorted(seconds), "the clock went back"
        lines = []
        for record in records:
            line = record["step"], kind(record)
            if line[1] != "test":
                assert self.without_timings(record) == self.lines[line]
            lines.append(line)
        assert len(set(lines)) == len(lines), "a step is recorded twice"
        assert [step for step, _ in lines] == sorted(step for step, _ in lines)
        return tuple(lines)

    def training(
        self, now: Contents, plan: Plan
    ) -> tuple[list[Contents], list[Contents]]:
        """Say what a training writes into a directory that holds `now`.

        Returns: the contents after each write, and those with which a signal may leave
        the directory: after each step, or where it began, saved
        """
        moments, stops = [now], []

        def save(now: Contents, saved: Saved) -> list[Contents]:
            others = (s for s in now.checkpoints if s.step != saved.step)
            steps = tuple(sorted((*others, saved), key=lambda s: s.step))
            now = replace(now, checkpoints=steps)
            return [now, *now.pruned(plan)]

        def write(**changes: object) -> None:
            moments.append(replace(moments[-1], **changes))

        def record(step: int, what: str) -> None:
            write(metrics=(*moments[-1].metrics, (step, what)))

        at = now.checkpoints[-1] if now.checkpoints else Saved(0)
        past = (x for x in now.metrics if x[0] <= at.step and x[1] != "test")
        write(begun=True, unsaved=now.unsaved or not now.begun)
        write(metrics=tuple(past))
        moments += moments[-1].pruned(plan)

        def is_finished() -> bool:
            patience = plan.patience or math.inf
            return at.step >= plan.steps or at.validations_since_best >= patience

        finished = is_finished()
        if at.step:
            stops.append(save(moments[-1], at)[-1])
        while not finished:
            at = replace(at, step=at.step + 1)
            finished = is_finished()
            if at.step % self.log_every == 0:
                record(at.step, "report")
            if at.step % plan.validate_every == 0 or finished:
                record(at.step, "validation")
                if self.loss[at.step] < at.best_loss:
                    at = Saved(at.step, self.loss[at.step])
                    write(best=at.step)
                else:
                    since = at.validations_since_best + 1
                    at = replace(at, validations_since_best=since)
                finished = is_finished()
            if at.step % plan.save_every == 0 or finished:
                moments += save(moments[-1], at)
            stops.append(save(moments[-1], at)[-1])
        steps = [saved.step for saved in moments[-1].checkpoints[-plan.average :]]
        means = [steps[first:] for first in reversed(range(len(steps)))]
        losses = [self.mean_loss(*mean) for mean in means]
        best, averaged = moments[-1].best, moments[-1].averaged
        lowest = self.loss.get(best, math.inf)
        if averaged and averaged[1] >= lowest:
            write(averaged=None)
        elif averaged:
            lowest = averaged[1]
        if min(losses) < lowest:
            chosen = means[losses.index(min(losses))]
            write(averaged=(self.mean(chosen), min(losses)))
        record(at.step, "test")
        return moments, stops
