"""Translation of token ids, in batches of similar length and by several workers."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np

from minitransformer.engine.autograd import no_grad
from minitransformer.engine.backend import array_module, fused_kernel
from minitransformer.machine import one_blas_thread
from minitransformer.model.transformer import Transformer
from minitransformer.settings.decoding_config import DecodingConfig
from minitransformer.text.ids import Ragged
from minitransformer.translation.beam_search import Hypothesis, beam_search
from minitransformer.translation.constraints import Constraints
from minitransformer.translation.incremental_decoding import (
    Ensemble,
    incremental_decoder,
)
from minitransformer.workers import parallel_map

R = TypeVar("R")


def translate_ids(
    model: Transformer | Ensemble,
    sources: Sequence[Sequence[int]],
    config: DecodingConfig,
    num_threads: int = 1,
    shortlist: Callable[[np.ndarray], np.ndarray] | None = None,
    constraints: Constraints | None = None,
) -> list[list[Hypothesis]]:
    """Return the `config.nbest` best translations of each sentence, best first.

    An empty sentence has one translation, which is empty and scores 0. The longest
    output has max_len_a * (source tokens) + max_len_b tokens and EOS, or another token
    in its place. `shortlist` returns the target tokens that a batch of sources needs,
    sorted and with the special ones first; probabilities are relative to those tokens.
    A sentence that no translation was found for, because of its `constraints`, has
    none.
    """
    encoded = Ragged.from_lists(sources)
    positions = model.position_limit or np.iinfo(int).max
    table = model.embedding.table.data
    xp, search = array_module(table), fused_kernel("beam_search", (table,), beam_search)
    if constraints:
        search = beam_search  # a fused one asks the model for its logits itself
        if constraints.min_len >= positions:
            raise ValueError(
                f"min_len: expected less than the model's {positions} positions, "
                f"got {constraints.min_len}"
            )

    def translate_batch(batch: np.ndarray) -> list[list[Hypothesis]]:
        limits = np.floor(config.max_len_a * encoded.lengths[batch] + config.max_len_b)
        limits = limits.astype(int) + 1  # EOS counts here
        source = encoded.pad(batch)
        tokens = None if shortlist is None else shortlist(source)
        if constraints:
            limits = constraints.limits(limits, batch)
            if tokens is not None:
                tokens = constraints.shortlist(tokens, batch)
        limits = np.minimum(limits, positions)
        with no_grad(), np.errstate(all="ignore"):  # the search refuses what overflows
            decoder = incremental_decoder(
                model, xp.asarray(source), config.beam, tokens
            )
            if constraints:
                decoder = constraints.decoder(decoder, batch, tokens)
            found = search(decoder, limits, config.beam, config.alpha, config.nbest)
        if tokens is not None:
            found = [
                [
                    replace(h, tokens=tuple(tokens[list(h.tokens)].tolist()))
                    for h in hypotheses
                ]
                for hypotheses in found
            ]
        if constraints and len(batch) > 1:
            for n in constraints.unsure(decoder):
                [found[n]] = translate_batch(batch[n : n + 1])
        return found

    results: list[list[Hypothesis]] = [[Hypothesis((), 0.0, 0.0)] for _ in sources]
    max_tokens = config.decode_tokens // config.beam
    for sentence, hypotheses in map_batches(
        translate_batch, encoded.lengths, max_tokens, num_threads
    ):
        results[sentence] = hypotheses
    return results


def map_batches(
    function: Callable[[np.ndarray], Iterable[R]],
    lengths: np.ndarray,
    max_tokens: int,
    num_threads: int,
) -> Iterator[tuple[int, R]]:
    """Apply `function` to batches of sentences of similar length, on several workers.

    `function` takes the indices of a batch and returns a result for each of them. A
    batch holds one sentence, or at most `max_tokens` tokens with padding and EOS. The
    workers, which are `num_threads` threads or processes (`workers.parallel_map`), get
    equally many batches, which are about equally large. Sentences of length 0 are left
    out.

    Yields: indices of sentences and their results, longest sentences first
    """
    order = np.argsort(-lengths, kind="stable")
    order = order[lengths[order] > 0]

    def divide(limit: int) -> list[np.ndarray]:
        batches, first = [], 0
        while first < len(order):
            size = max(1, limit // (int(lengths[order[first]]) + 1))
            batches.append(order[first : first + size])
            first += size
        return batches

    # The least limit that needs no more batches makes them equal.
    count = math.ceil(len(divide(max_tokens)) / num_threads) * num_threads
    limit = bisect.bisect_left(
        range(max_tokens), True, key=lambda limit: len(divide(limit)) <= count
    )
    batches = divide(limit)

    def results(batch: np.ndarray) -> list[R]:
        return list(function(batch))

    count = max(min(num_threads, len(batches)), 1)
    with one_blas_thread(), parallel_map(results, count) as mapped:
        for batch, found in zip(batches, mapped(batches), strict=True):
            yield from zip(batch.tolist(), found, strict=True)
