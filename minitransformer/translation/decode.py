"""TODO."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

import numpy as np

from minitransformer.engine.autograd import no_grad
from minitransformer.engine.backend import array_module, fused_kernel
from minitransformer.engine.machine import one_blas_thread
from minitransformer.model.transformer import Transformer
from minitransformer.settings.config import DecodingConfig
from minitransformer.text.ids import Ragged
from minitransformer.text.tokenizer import Tokenizer
from minitransformer.translation.beam_search import (
    Hypothesis,
    beam_search,
)
from minitransformer.translation.steppers import Ensemble, start

A = TypeVar("A")
R = TypeVar("R")


def translate(
    model: Transformer | Ensemble,
    sources: Sequence[Sequence[int]],
    config: DecodingConfig,
    num_threads: int = 1,
    shortlist: Callable[[np.ndarray], np.ndarray] | None = None,
) -> list[list[Hypothesis]]:
    """Translate sentences of ids, in batches of alike lengths; results in order.

    An empty sentence gives one empty hypothesis with score 0. The longest output is
    max_len_a * source tokens + max_len_b tokens, EOS counted on neither side. With
    `shortlist`, a batch is translated by the tokens that it returns for its source ids
    (sorted, the special ones first), and probabilities are relative to those.
    """
    encoded = Ragged.from_lists(sources)
    table = model.embedding.table.data
    xp, search = array_module(table), fused_kernel("beam_search", (table,), beam_search)

    def work(chosen: np.ndarray) -> list[list[Hypothesis]]:
        lengths = encoded.lengths[chosen]
        longest = np.floor(config.max_len_a * lengths + config.max_len_b) + 1
        if model.config.position_limit is not None:
            longest = np.minimum(longest, model.config.position_limit)
        source = encoded.padded(chosen)
        tokens = None if shortlist is None else shortlist(source)
        with no_grad():
            stepper = start(model, xp.asarray(source), config.beam, tokens)
            found = search(
                stepper, longest.astype(int), config.beam, config.alpha, config.nbest
            )
        if tokens is None:
            return found
        return [
            [
                replace(h, tokens=tuple(tokens[list(h.tokens)].tolist()))
                for h in hypotheses
            ]
            for hypotheses in found
        ]

    results: list[list[Hypothesis]] = [[Hypothesis((), 0.0, 0.0)] for _ in sources]
    share = math.ceil((encoded.lengths + 1).sum() / num_threads)
    batches = _batches(encoded, min(config.decode_tokens // config.beam, share))
    for chosen, found in zip(batches, _map(work, batches, num_threads), strict=True):
        for sentence, hypotheses in zip(chosen, found, strict=True):
            results[sentence] = hypotheses
    return results


def encode_lines(
    model: Transformer | Ensemble,
    tokenizer: Tokenizer,
    lines: Sequence[str],
    config: DecodingConfig,
    first_line: int = 1,
) -> list[list[list[int]]]:
    """Cut lines into ids: for each line its parts, one unless it is too long.

    Longer than `max_input`, or than learned positions reach, `long_input` decides.

    Raises: ValueError naming the line where that is "error".
    """
    limit = min(config.max_input, (model.config.position_limit or math.inf) - 1)
    encoded = []
    for number, ids in enumerate(tokenizer.encode(lines), start=first_line):
        if len(ids) > limit and config.long_input == "error":
            raise ValueError(
                f"line {number}: expected at most {limit} word pieces (--max-input, or "
                f"the model's positions), got {len(ids)}"
            )
        parts = tokenizer.split(ids, int(limit))
        encoded.append(parts if config.long_input == "split" else parts[:1])
    return encoded


def translate_lines(
    model: Transformer | Ensemble,
    tokenizer: Tokenizer,
    lines: Sequence[str],
    config: DecodingConfig,
    num_threads: int = 1,
    shortlist: Callable[[np.ndarray], np.ndarray] | None = None,
    first_line: int = 1,
) -> list[list[Hypothesis]]:
    """Translate lines of text: what `translate` returns, for each line.

    A line that was split is translated part by part; its n-th best translation is made
    of the parts' n-th best, and its log-probability and score are their sums.
    """
    encoded = encode_lines(model, tokenizer, lines, config, first_line)
    sources = [part for parts in encoded for part in parts]
    found = iter(translate(model, sources, config, num_threads, shortlist))
    return [_joined([next(found) for _ in parts]) for parts in encoded]


def _joined(parts: list[list[Hypothesis]]) -> list[Hypothesis]:
    """Put the hypotheses of a line's parts together, rank by rank."""
    if len(parts) == 1:
        return parts[0]
    return [
        Hypothesis(
            tuple(itertools.chain.from_iterable(h.tokens for h in ranked)),
            sum(h.score for h in ranked),
            sum(h.log_prob for h in ranked),
        )
        for ranked in zip(*parts, strict=False)
    ]


def _batches(lines: Ragged, max_tokens: int) -> list[np.ndarray]:
    """Group the lines that are not empty by length, longest first."""
    order = np.argsort(-lines.lengths, kind="stable")
    order = order[lines.lengths[order] > 0]
    batches, start = [], 0
    while start < len(order):
        size = max(1, max_tokens // (int(lines.lengths[order[start]]) + 1))
        batches.append(order[start : start + size])
        start += size
    return batches


def _map(
    function: Callable[[A], R], items: Iterable[A], num_threads: int
) -> Iterator[R]:
    with one_blas_thread():
        if num_threads == 1:
            yield from map(function, items)
            return
        with ThreadPoolExecutor(num_threads) as pool:
            yield from pool.map(function, items)
