"""Where a training run is: what its checkpoints keep of that, and what its log says."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from minitransformer.engine.backend import Array, array_module
from minitransformer.text.batches import Batch, BatchStream
from minitransformer.text.prefetch import Prefetcher
from minitransformer.training.cost import (
    parameters_by_block,
    training_flops,
    training_memory,
)
from minitransformer.training.loss_scale import LossScale
from minitransformer.training.parallel import ParallelModel


@dataclass
class Window:
    """Sums since the last report: loss in nats, tokens, and seconds of updates.

    `left_out` counts the target tokens of updates that were skipped.
    """

    loss: Array = 0.0
    source: float = 0.0
    target: float = 0.0
    seconds: float = 0.0
    left_out: Array = 0.0


@dataclass
class TrainingState:
    """What a run needs to know to continue, besides parameters and moments.

    `text` is the digest of the training text, (epoch, position) the place of the next
    batch, `loss_scale` the factor of fp16 and its number of good steps. Between two
    calls of `Progress.synchronize`, what updates have found may be scalars on a GPU.
    """

    text: str
    step: int = 0
    epoch: int = 0
    position: int = 0
    seconds: float = 0.0
    best_loss: float = math.inf
    validations_since_best: int = 0
    skipped: Array = 0
    learning_rate: float = 0.0
    gradient_norm: Array = 0.0
    loss_scale: tuple[float, int] | None = None
    window: Window = field(default_factory=Window)

    def to_json(self) -> dict[str, Any]:
        """Return the state as a JSON object. Everything must be synchronized."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> TrainingState:
        """Raises: ValueError if something is missing, unknown or of another type."""
        try:
            window = Window(**stored["window"])
            state = cls(**{**stored, "window": window})
            if state.loss_scale is not None:
                factor, good = state.loss_scale
                state.loss_scale = float(factor), int(good)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"expected the state of a run, got {error!r}") from error
        return state


class Progress:
    """Counts updates in the state of a run, and reports means over a window of them."""

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
        """Count an update. Shapes: loss, norm, finite scalars, of any library"""
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
        """Wait for the device, and turn what updates have found into numbers.

        Returns: how many updates were skipped since the last time, because their loss
        or gradient was not finite and no smaller loss scale is left to try
        """
        state, window, started = self.state, self.state.window, time.monotonic()
        window.loss, window.left_out = float(window.loss), float(window.left_out)
        state.gradient_norm = float(state.gradient_norm)
        state.skipped = int(state.skipped)
        factor = float(self.scale.factor)
        if self.scale.adapts:
            state.loss_scale = factor, int(self.scale.good)
        window.seconds += time.monotonic() - started
        skipped, self._skipped = state.skipped - self._skipped, state.skipped
        return skipped if not self.scale.adapts or factor < 1 else 0

    @property
    def place(self) -> str:
        """Where the last update was."""
        state = self.state
        return f"step {state.step:,}, epoch {state.epoch}, batch {state.position}"

    def report(self) -> tuple[dict[str, float], str]:
        """Return mean loss and speed since the last report, as values and as a line."""
        state, window = self.state, self.state.window
        counted = window.target - window.left_out
        loss = window.loss / counted if counted else math.nan
        source, target = (n / window.seconds for n in (window.source, window.target))
        rate, norm = state.learning_rate, state.gradient_norm
        state.window = Window()
        values = {
            "epoch": state.epoch,
            "loss": loss,
            "learning_rate": rate,
            "gradient_norm": norm,
            "source_tokens_per_second": round(source),
            "target_tokens_per_second": round(target),
            "seconds": round(state.seconds, 3),
        }
        line = (
            f"step {state.step:>6,}  epoch {state.epoch:>3}  loss {loss:.4f}  "
            f"lr {rate:.2e}  norm {norm:.2f}  {source:,.0f} source + {target:,.0f} "
            f"target tokens/s  {state.seconds:,.0f} s"
        )
        if state.loss_scale is not None and self.scale.adapts:
            values.update(loss_scale=state.loss_scale[0], skipped=state.skipped)
            line += f"  loss scale {state.loss_scale[0]:,.0f}, "
            line += f"{state.skipped:,} skipped"
        return values, line


def run_summary(
    stream: BatchStream, accumulate: int, parallel: ParallelModel
) -> list[str]:
    """Return lines that say what training on these batches takes.

    Tokens and operations are means of an update, padding not counted.
    """
    corpus, pairs = stream.corpus, stream.pairs
    blocks = parameters_by_block(parallel.model)
    source = float(corpus.source.lengths[pairs].mean() + 1)
    target = float(corpus.target.lengths[pairs].mean() + 1)
    sentences = len(pairs) / len(stream) * accumulate
    config = parallel.model.config
    flops = training_flops(config, source, target) * sentences
    parts = ", ".join(f"{name} {count:,}" for name, count in blocks.items())
    at_once = min(stream.training.max_tokens, parallel.tokens_at_once)
    memory = training_memory(config, at_once, parallel.num_threads)
    return [
        f"parameters  {sum(blocks.values()):,}: {parts}",
        f"text        {len(pairs):,} pairs, {len(stream):,} batches an epoch, "
        f"{stream.padding_share():.1%} padding; left out: {corpus.dropped_blank:,} "
        f"blank, {len(corpus) - len(pairs):,} longer than "
        f"{stream.training.max_length} tokens",
        f"update      {source * sentences:,.0f} source + {target * sentences:,.0f} "
        f"target tokens, {flops / 1e9:,.1f} GFLOP",
        f"memory      about {memory / 1e6:,.0f} MB",
    ]
