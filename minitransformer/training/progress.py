"""The progress of a run: the state that checkpoints hold, and reports of it."""

from __future__ import annotations

import dataclasses
import math
import reprlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from minitransformer.engine.backend import Array, array_module
from minitransformer.settings.config import (
    PAD_ID,
    UNK_ID,
    RunConfig,
    TrainingConfig,
)
from minitransformer.text.batches import Batch, BatchStream, ParallelCorpus
from minitransformer.text.pairs import TextPair
from minitransformer.text.prefetch import Prefetcher
from minitransformer.training.cost import (
    parameters_by_block,
    training_flops,
    training_memory,
)
from minitransformer.training.loss_scale import LossScale
from minitransformer.training.parallel import ParallelModel

# The numbers in a state that are whole.
COUNTERS = {"step", "epoch", "position", "skipped", "finite_steps"}
COUNTERS |= {"validations_since_best", "pending_validations"}

# The numbers that older states lack, which then have their defaults.
ADDED = ("best_bleu", "lowest_cost", "pending_validations")

# What null stands for in a state, since JSON has only finite numbers.
NULLS = {"best_loss": math.inf, "lowest_cost": math.inf, "gradient_norm": math.nan}

# The share of unknown pieces that is reported, and in how many pairs they are counted.
UNKNOWN_SHARE, PAIRS_SEEN = 1e-3, 10_000


@dataclass
class Window:
    """Sums over the updates since the last report: loss in nats, tokens, and seconds.

    `left_out` counts the target tokens of skipped updates, which `loss` leaves out.
    """

    loss: Array = 0.0
    source: float = 0.0
    target: float = 0.0
    seconds: float = 0.0
    left_out: Array = 0.0


@dataclass
class TrainingState:
    """What a run needs to continue, besides the parameters and Adam's moments.

    `text` has the digest of each split's text, and `decoding` the settings that
    translations of the model begin with. The next batch is number `position` of
    `epoch`; a validation of this step is pending if the run was stopped before it.
    `best_loss` and `best_bleu` are those of the best model that could be saved; a BLEU
    that was not measured is -1, as in older states. `lowest_cost` is the lowest loss,
    or the negative of the highest BLEU, of all validations, by which patience goes.
    `loss_scale` is fp16's factor with its number of finite steps. The fields of type
    Array are scalars, on a GPU until `Progress.synchronize` makes them numbers. The
    names of all fields are part of the checkpoint format.
    """

    text: dict[str, str]
    step: int = 0
    epoch: int = 0
    position: int = 0
    seconds: float = 0.0
    best_loss: float = math.inf
    best_bleu: float = -1.0
    lowest_cost: float = math.inf
    validations_since_best: int = 0
    pending_validations: int = 0
    skipped: Array = 0
    learning_rate: float = 0.0
    gradient_norm: Array = 0.0
    loss_scale: tuple[float, int] | None = None
    decoding: dict[str, Any] = field(default_factory=dict)
    window: Window = field(default_factory=Window)

    @classmethod
    def at_start(cls, settings: RunConfig) -> TrainingState:
        """Return the state before the first update."""
        return cls({}, decoding=dataclasses.asdict(settings.decoding))

    def used_up(self, training: TrainingConfig) -> str | None:
        """Return the limit that ends the run, if one is reached, resumes included."""
        if self.step >= training.steps:
            return f"--steps {training.steps}"
        if self.seconds >= 60 * (training.minutes or math.inf):
            return f"--minutes {training.minutes:g}"
        if self.validations_since_best >= (training.patience or math.inf):
            return f"--patience {training.patience}"
        return None

    def count_validation(self, loss: float, bleu: float, best_by: str | None) -> bool:
        """Count a validation, and say if it beats the best saved model (--best-by)."""
        cost, saved = loss, self.best_loss
        if best_by == "bleu":
            cost, saved = -bleu, -self.best_bleu
        self.validations_since_best += 1
        if cost < min(saved, self.lowest_cost):  # older states have only the former
            self.lowest_cost, self.validations_since_best = cost, 0
        return cost < saved

    def to_json(self) -> dict[str, Any]:
        """Return the state as a JSON object, after `Progress.synchronize`."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> TrainingState:
        """Read what `to_json` returned.

        Raises: ValueError if it is not the state of a run.
        """
        try:
            text, scale = stored["text"], stored["loss_scale"]
            if isinstance(text, str):  # older states have that of the training text
                text = {"train": text}
            if scale is not None:
                factor, finite_steps = scale
                scale = _number("factor", factor), _number("finite_steps", finite_steps)
            window = Window(**_numbers(Window, stored["window"]))
            added = {name: getattr(cls, name) for name in ADDED}
            numbers = _numbers(cls, {**added, **stored})
            decoding = dict(stored.get("decoding", {}))
            others = {"loss_scale": scale, "window": window}
            state = cls(dict(text), decoding=decoding, **others, **numbers)
            if state.skipped > state.step:
                raise ValueError(f"{state.skipped} skipped of {state.step}")
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"expected the state of a run, got {error!r}") from error
        return state


def _numbers(cls: type, stored: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of `cls` that are numbers. Raises: KeyError, ValueError"""
    others = {"text", "loss_scale", "decoding", "window"}
    names = {f.name for f in dataclasses.fields(cls)} - others
    return {name: _number(name, stored[name]) for name in names}


def _number(name: str, value: Any) -> Any:
    """Return a number of a state. Raises: ValueError if it cannot be one."""
    value = NULLS.get(name) if value is None else value
    if name in COUNTERS:
        valid = type(value) is int and 0 <= value < 1 << 53
    elif name == "gradient_norm":  # that of a skipped update need not be finite
        valid = type(value) is float
    else:
        limit = NULLS.get(name, 1e300)
        least = {"best_bleu": -1, "lowest_cost": -1e300}.get(name, 0)
        valid = type(value) in (int, float) and least <= value <= limit
    if not valid:
        raise ValueError(f"{name} {reprlib.repr(value)}")
    return value if name in COUNTERS else float(value)


class Progress:
    """Counts the updates of a run in its state, and reports means over a window."""

    def __init__(self, state: TrainingState, scale: LossScale) -> None:
        self.state, self.scale = state, scale
        self._skipped = int(state.skipped)

    def add(
        self,
        batches: Sequence[Batch],
        stream: BatchStream | Prefetcher,
        rate: float,
        loss: Array,
        norm: Array,
        finite: Array,
    ) -> None:
        """Count an update. Shapes: loss, norm, finite scalars, on any device"""
        state, window = self.state, self.state.window
        xp = array_module(self.scale.factor)
        state.step += 1
        state.epoch, state.position = stream.epoch, stream.position
        state.learning_rate, state.gradient_norm = rate, norm
        state.skipped = state.skipped + xp.where(finite, 0, 1)
        tokens = sum(batch.target_tokens for batch in batches)
        window.loss += xp.where(finite, loss * tokens, 0.0)
        window.left_out += xp.where(finite, 0, tokens)
        window.target += tokens
        window.source += sum(batch.source_tokens for batch in batches)

    def synchronize(self) -> int:
        """Wait for the device, and turn the scalars of the state into numbers.

        Returns: how many updates since the last call were skipped because their loss or
        gradient was not finite; 0 as long as a smaller loss scale may help
        """
        state, window, started = self.state, self.state.window, time.monotonic()
        window.loss, window.left_out = float(window.loss), float(window.left_out)
        state.gradient_norm = float(state.gradient_norm)
        state.skipped = int(state.skipped)
        factor = float(self.scale.factor)
        if self.scale.dynamic:
            state.loss_scale = factor, int(self.scale.finite_steps)
        window.seconds += time.monotonic() - started
        skipped, self._skipped = state.skipped - self._skipped, state.skipped
        return skipped if not self.scale.dynamic or factor < 1 else 0

    def describe_skipped(self, count: int, parameter: str | None) -> str:
        """Say at which update it was noticed that `count` updates were skipped.

        `parameter` has a gradient that is not finite, if one is known.
        """
        state = self.state
        update = f"step {state.step:,}, epoch {state.epoch}, batch {state.position}"
        where = f" (the last: in {parameter})" if parameter else ""
        expected = "expected finite losses and gradients"
        return f"{update}: {expected}, got {count} not finite{where}"

    def report(self) -> tuple[dict[str, float], str]:
        """Return mean loss and speed as values and as a line; begin a new window."""
        state, window = self.state, self.state.window
        counted = window.target - window.left_out
        loss = window.loss / counted if counted else math.nan
        seconds = max(window.seconds, 1e-9)  # of coarse clocks, it may be 0
        source, target = (n / seconds for n in (window.source, window.target))
        rate, norm = state.learning_rate, state.gradient_norm
        state.window = Window()
        values = {
            "epoch": state.epoch,
            "loss": loss,
            "learning_rate": rate,
            "gradient_norm": norm,
            "source_tokens_per_second": round(source),
            "target_tokens_per_second": round(target),
            "source_tokens": window.source,
            "target_tokens": window.target,
            "seconds": round(state.seconds, 3),
        }
        line = (
            f"step {state.step:>6,}  epoch {state.epoch:>3}  loss {loss:.4f}  "
            f"lr {rate:.2e}  norm {norm:.2f}  {source:,.0f} source + {target:,.0f} "
            f"target tokens/s  {state.seconds:,.0f} s"
        )
        if state.loss_scale is not None and self.scale.dynamic:
            values.update(loss_scale=state.loss_scale[0], skipped=state.skipped)
            line += f"  loss scale {state.loss_scale[0]:,.0f}, "
            line += f"{state.skipped:,} skipped"
        return values, line


def run_summary(
    stream: BatchStream,
    text: Mapping[str, TextPair],
    corpora: Mapping[str, ParallelCorpus],
    parallel: ParallelModel,
) -> list[str]:
    """Return log lines about the model, the text, and the costs of an update.

    Tokens and operations are means over all batches, without padding. `text` and
    `corpora` have the splits of the text, as files and encoded.
    """
    corpus, pairs = stream.corpus, stream.pairs_of_epoch()
    blocks = parameters_by_block(parallel.model)
    source = float(corpus.source.lengths[pairs].mean() + 1)
    target = float(corpus.target.lengths[pairs].mean() + 1)
    num_pairs = len(pairs) / len(stream) * stream.training.accumulate
    config = parallel.model.config
    flops = training_flops(config, source, target) * num_pairs
    parts = ", ".join(f"{name} {count:,}" for name, count in blocks.items())
    at_once = min(stream.training.max_tokens, parallel.tokens_at_once)
    memory = training_memory(config, at_once, parallel.num_processes)
    return [
        f"parameters  {sum(blocks.values()):,}: {parts}",
        f"text        {len(pairs):,} pairs, {len(stream):,} batches an epoch, "
        f"{stream.padding_share():.1%} padding; left out: {corpus.dropped_blank:,} "
        f"blank, {len(corpus) - len(stream.pairs):,} longer than "
        f"{stream.training.max_length} tokens",
        *_unknown_pieces(stream),
        f"held out    for validation {_files(text, corpora, 'val')}; "
        f"for the test {_files(text, corpora, 'test')}",
        f"update      {source * num_pairs:,.0f} source + {target * num_pairs:,.0f} "
        f"target tokens, {flops / 1e9:,.1f} GFLOP",
        f"memory      about {memory / 1e6:,.0f} MB",
    ]


def _unknown_pieces(stream: BatchStream) -> list[str]:
    """Return a log line if much of the text is not in the vocabulary."""
    batch = stream.corpus.batch(stream.pairs[:: len(stream.pairs) // PAIRS_SEEN + 1])
    source, target = (
        (ids == UNK_ID).sum() / (ids != PAD_ID).sum()
        for ids in (batch.source, batch.target)
    )
    if max(source, target) < UNKNOWN_SHARE:
        return []
    return [
        f"unknown     {source:.1%} of the source and {target:.1%} of the target: "
        "characters that the vocabulary does not have"
    ]


def _files(
    text: Mapping[str, TextPair], corpora: Mapping[str, ParallelCorpus], split: str
) -> str:
    """Return which files are the text of a split, and how many pairs they have."""
    if split not in text:
        return "none"
    return f"{text[split]}, {len(corpora[split]):,} pairs"
