"""The progress of a run: its state, update by update, and its log lines."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from minitransformer.engine.backend import Array, array_module
from minitransformer.runs.state import RunState, Window
from minitransformer.text.batches import Batch, Batches, BatchStream, ParallelCorpus
from minitransformer.text.pairs import TextPair
from minitransformer.training.cost import parameters_by_block, training_flops
from minitransformer.training.loss_scale import LossScale
from minitransformer.training.parallel import ParallelModel


class Update(NamedTuple):
    """An update: its batches, learning rate, mean loss and norm of the gradient.

    It was made if loss and norm are `finite`. A GPU may still be computing these three
    scalars and the loss scale.
    """

    batches: list[Batch]
    rate: float
    loss: Array
    norm: Array
    finite: Array
    scale: LossScale | None = None


class Progress:
    """Counts the updates of a run in its `state`, and reports means over a window.

    Losses and norms are scalars that a GPU may still be computing. They become part of
    the state when it is waited for, by `synchronize`.
    """

    def __init__(self, state: RunState) -> None:
        self.state = state
        self._scale: LossScale | None = None
        self._skipped: Array = state.skipped
        self._norm: Array = state.gradient_norm
        self._sums: dict[str, Array] = {**vars(state.window)}

    def change(self, **values: Any) -> None:
        """Replace some values of the state."""
        self.state = replace(self.state, **values)

    def add(self, update: Update, stream: Batches) -> None:
        """Count an update, after which `stream` goes on."""
        self.change(
            step=self.state.step + 1,
            epoch=stream.epoch,
            position=stream.position,
            learning_rate=update.rate,
        )

        # Counted where the scalars are, without waiting for them.
        finite = update.finite
        xp = array_module(finite)
        tokens = sum(x.target_tokens for x in update.batches)
        self._scale = update.scale
        self._norm = update.norm
        self._skipped = self._skipped + xp.where(finite, 0, 1)
        self._sums["loss"] += xp.where(finite, update.loss * tokens, 0.0)
        self._sums["target"] += xp.where(finite, tokens, 0)
        self._sums["source"] += sum(x.source_tokens for x in update.batches)

    def add_seconds(self, seconds: float) -> None:
        """Count the time of updates, from which speeds are computed."""
        self._sums["seconds"] += seconds

    def synchronize(self) -> int:
        """Wait for the device, and make its scalars numbers of the state.

        Returns: how many updates since the last call were skipped because their loss or
        gradient was not finite; 0 as long as a smaller loss scale may help
        """
        # Each conversion to a number waits until the device has computed it.
        started = time.monotonic()
        before = self.state.skipped
        factor = 0.0  # no smaller scale may help
        if self._scale and self._scale.dynamic:
            factor = float(self._scale.factor)
            self.change(loss_scale=(factor, int(self._scale.finite_steps)))
        self.change(skipped=int(self._skipped), gradient_norm=float(self._norm))
        self._sums = {name: float(value) for name, value in self._sums.items()}

        # The wait is time of the updates, too.
        self.add_seconds(time.monotonic() - started)
        self.change(window=Window(**self._sums))
        return self.state.skipped - before if factor < 1 else 0

    def report(self) -> tuple[dict[str, float], str]:
        """Return mean loss and speed as values and as a line; begin a new window."""
        # Means over the window. A coarse clock may have measured no time.
        state = self.state
        window = state.window
        loss = window.loss / window.target if window.target else math.nan
        seconds = max(window.seconds, 1e-9)
        source, target = (n / seconds for n in (window.source, window.target))

        # A new window begins.
        self.change(window=Window())
        self._sums = {**vars(Window())}

        # The same as values and as a line.
        values = {
            "epoch": state.epoch,
            "loss": loss,
            "learning_rate": state.learning_rate,
            "gradient_norm": state.gradient_norm,
            "source_tokens_per_second": round(source),
            "target_tokens_per_second": round(target),
            "source_tokens": window.source,
            "target_tokens": window.target,
            "seconds": round(state.seconds, 3),
        }
        line = (
            f"epoch {state.epoch:>3}  loss {loss:.4f}  "
            f"lr {state.learning_rate:.2e}  norm {state.gradient_norm:.2f}  "
            f"{source:,.0f} source + {target:,.0f} target tokens/s  "
            f"{state.seconds:,.0f} s"
        )
        if state.loss_scale and self._scale and self._scale.dynamic:
            factor, _ = state.loss_scale
            values.update(loss_scale=factor, skipped=state.skipped)
            line += f"  loss scale {factor:,.0f}, {state.skipped:,} skipped"
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
    corpus = stream.corpus
    training = stream.training
    config = parallel.model.config
    val = corpora.get("val", corpus)

    # The mean of an update: its pairs, and their tokens with EOS.
    pairs = stream.pairs
    num_pairs = len(pairs) / len(stream) * training.accumulate
    source = float(corpus.source.lengths[pairs].mean() + 1)
    target = float(corpus.target.lengths[pairs].mean() + 1)
    flops = training_flops(config, source, target) * num_pairs

    # Pairs that are too long for training are left out of a validation, too.
    limit = training.max_length
    left_out = 0 if val is corpus else len(val) - len(val.filter_by_length(limit))
    ignored = f" ({left_out:,} of them longer than {limit} tokens: left out)"

    held_out = {
        split: f"{pair}, {len(corpora[split]):,} pairs" for split, pair in text.items()
    }

    blocks = parameters_by_block(parallel.model)
    parts = ", ".join(f"{name} {count:,}" for name, count in blocks.items())
    return [
        f"parameters  {sum(blocks.values()):,}: {parts}",
        f"text        {len(pairs):,} pairs, {len(stream):,} batches an epoch, "
        f"left out: {corpus.dropped_blank:,} blank, "
        f"{len(corpus) - len(stream.pairs):,} longer than {limit} tokens",
        *corpus.notes,
        f"held out    for validation {held_out.get('val', 'none')}"
        f"{ignored if left_out else ''}; "
        f"for the test {held_out.get('test', 'none')}",
        f"update      {source * num_pairs:,.0f} source + {target * num_pairs:,.0f} "
        f"target tokens, {flops / 1e9:,.1f} GFLOP",
    ]
