"""The progress of a run: its state, update by update, and what is said of it."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from minitransformer.engine.backend import Array, array_module
from minitransformer.runs.state import RunState, Window
from minitransformer.settings.decoding_config import DecodingConfig
from minitransformer.text.batches import Batch, Batches, BatchStream, ParallelCorpus
from minitransformer.text.pairs import TextPair
from minitransformer.training.cost import (
    parameters_by_block,
    training_flops,
    training_memory,
    translation_memory,
)
from minitransformer.training.loss_scale import LossScale
from minitransformer.training.parallel import ParallelModel


class Update(NamedTuple):
    """What an update was made of, and by which learning rate.

    The loss, the norm of the gradient, and whether both were finite, so that the update
    was made, are scalars that a GPU may still be computing.
    """

    batches: list[Batch]
    rate: float
    loss: Array
    norm: Array
    finite: Array


class Progress:
    """Counts the updates of a run in its `state`, and reports means over a window.

    Losses and norms are scalars that a GPU may still be computing. They become part of
    the state when it is waited for, by `synchronize`.
    """

    def __init__(self, state: RunState, scale: LossScale) -> None:
        self.state, self.scale = state, scale
        self._skipped: Array = state.skipped
        self._norm: Array = state.gradient_norm
        self._sums: dict[str, Array] = {**vars(state.window)}

    def change(self, **values: Any) -> None:
        """Replace some values of the state."""
        self.state = replace(self.state, **values)

    def add(self, update: Update, stream: Batches) -> None:
        """Count an update, after which `stream` goes on."""
        xp, sums = array_module(self.scale.factor), self._sums
        self.change(
            step=self.state.step + 1,
            epoch=stream.epoch,
            position=stream.position,
            learning_rate=update.rate,
        )
        finite, tokens = update.finite, sum(x.target_tokens for x in update.batches)
        self._norm, self._skipped = update.norm, self._skipped + xp.where(finite, 0, 1)
        sums["loss"] += xp.where(finite, update.loss * tokens, 0.0)
        sums["target"] += xp.where(finite, tokens, 0)
        sums["source"] += sum(x.source_tokens for x in update.batches)

    def add_seconds(self, seconds: float) -> None:
        """Count the time of updates, of which speeds are made."""
        self._sums["seconds"] += seconds

    def synchronize(self) -> int:
        """Wait for the device, and make its scalars numbers of the state.

        Returns: how many updates since the last call were skipped because their loss or
        gradient was not finite; 0 as long as a smaller loss scale may help
        """
        started, before = time.monotonic(), self.state.skipped
        factor, scale = float(self.scale.factor), self.state.loss_scale
        if self.scale.dynamic:
            scale = factor, int(self.scale.finite_steps)
        self.change(
            skipped=int(self._skipped),
            gradient_norm=float(self._norm),
            loss_scale=scale,
        )
        self._sums = {name: float(value) for name, value in self._sums.items()}
        self.add_seconds(time.monotonic() - started)
        self.change(window=Window(**self._sums))
        skipped = self.state.skipped - before
        return skipped if not self.scale.dynamic or factor < 1 else 0

    def report(self) -> tuple[dict[str, float], str]:
        """Return mean loss and speed as values and as a line; begin a new window."""
        state, window = self.state, self.state.window
        loss = window.loss / window.target if window.target else math.nan
        seconds = max(window.seconds, 1e-9)  # of coarse clocks, it may be 0
        source, target = (n / seconds for n in (window.source, window.target))
        rate, norm = state.learning_rate, state.gradient_norm
        self.change(window=Window())
        self._sums = {**vars(Window())}
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
            f"epoch {state.epoch:>3}  loss {loss:.4f}  "
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
    decoding: DecodingConfig,
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
    training, val = stream.training, corpora.get("val", corpus)
    ignored, limit = "", training.max_length
    if (left_out := len(val) - len(val.filter_by_length(limit))) and val is not corpus:
        ignored = f" ({left_out:,} of them longer than {limit} tokens: left out)"
    at_once = min(training.max_tokens, parallel.tokens_at_once)
    sides = corpus.source, corpus.target, val.source, val.target
    longest = min(max(side.lengths.max() + 1 for side in sides), limit)
    longest *= not parallel.asynchronous  # a GPU keeps no weights of attention
    memory = training_memory(config, at_once, parallel.num_processes, longest)
    translated = val.source.lengths[: training.validate_bleu]
    translated = np.append(translated, corpora.get("test", val).source.lengths)
    more = translation_memory(config, decoding, translated, parallel.num_processes)
    more = max(more, 6 * 4 * config.num_parameters)  # to read and sum checkpoints
    return [
        f"parameters  {sum(blocks.values()):,}: {parts}",
        f"text        {len(pairs):,} pairs, {len(stream):,} batches an epoch, "
        f"left out: {corpus.dropped_blank:,} blank, "
        f"{len(corpus) - len(stream.pairs):,} longer than {limit} tokens",
        *corpus.notes,
        f"held out    for validation {_files(text, corpora, 'val')}{ignored}; "
        f"for the test {_files(text, corpora, 'test')}",
        f"update      {source * num_pairs:,.0f} source + {target * num_pairs:,.0f} "
        f"target tokens, {flops / 1e9:,.1f} GFLOP",
        f"memory      about {memory / 1e6:,.0f} MB, at most {more / 1e6:,.0f} MB "
        "more to translate and average",
    ]


def _files(
    text: Mapping[str, TextPair], corpora: Mapping[str, ParallelCorpus], split: str
) -> str:
    """Return which files are the text of a split, and how many pairs they have."""
    if split not in text:
        return "none"
    return f"{text[split]}, {len(corpora[split]):,} pairs"
