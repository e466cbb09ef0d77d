"""Samples: translations drawn at random from the model (beyond the paper).

Each token is drawn from the probabilities that the model gives to the next one. These
may be sharpened or flattened by a temperature, and cut to the likeliest tokens (top-k:
Fan et al., 2018; top-p: Holtzman et al., 2020). Back-translation with samples is due to
Edunov et al. (2018).

A sample has its own random numbers, which depend on the seed, the word pieces of the
sentence and the number of the sample. So it depends on no other sentence, with one
exception: logits may differ by 1e-5 with the other sentences of a batch, and by more in
16 bits or int8. A draw that is this close may turn out differently.

Shapes: B samples, V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from minitransformer.engine.backend import Array, to_host
from minitransformer.model.transformer import Transformer
from minitransformer.settings.decoding_config import TranslationConfig
from minitransformer.translation.batch_translation import translate_ids
from minitransformer.translation.beam_search import Hypothesis
from minitransformer.translation.constraints import (
    Constraints,
    FilteringDecoder,
    Prefix,
)
from minitransformer.translation.incremental_decoding import (
    Ensemble,
    IncrementalDecoder,
)


def sample_ids(
    model: Transformer | Ensemble,
    sources: Sequence[Sequence[int]],
    config: TranslationConfig,
    num_threads: int = 1,
    prefixes: Sequence[Prefix | None] = (),
) -> list[list[Hypothesis]]:
    """Draw `config.nbest` translations of each sentence, in the order of drawing.

    Their log-probabilities and scores are those of the model, as in beam search.
    Prefixes are met by drawing among the tokens that write them.
    """
    # Repeat each sentence and its prefix for its samples, with another key for each.
    count = config.nbest
    seed = 1 if config.seed is None else config.seed
    repeated = [source for source in sources for _ in range(count)]
    starts = [x for x in prefixes or [None] * len(sources) for _ in range(count)]
    keys = [(seed, n, _digest(s)) for s in sources for n in range(count)]

    # A sample is a greedy search among weights that leave one token.
    greedy = replace(config, beam=1, nbest=1)
    draws = Draws(config, starts, keys)
    samples = iter(translate_ids(model, repeated, greedy, num_threads, draws))
    return [[h for _ in range(count) for h in next(samples)] for _ in sources]


def _digest(source: Sequence[int]) -> int:
    ids = np.asarray(source, dtype="<i4").tobytes()
    return int.from_bytes(hashlib.blake2b(ids, digest_size=16).digest(), "little")


class Draws(Constraints):
    """The prefixes of some samples, and their random draws."""

    def __init__(
        self,
        config: TranslationConfig,
        prefixes: Sequence[Prefix | None],
        keys: Sequence[tuple[int, ...]],
    ) -> None:
        super().__init__(prefixes)
        self._config = config
        self._keys = keys

    def decoder(
        self, decoder: IncrementalDecoder, batch: np.ndarray
    ) -> IncrementalDecoder:
        constrained = super().decoder(decoder, batch)
        return SamplingDecoder(
            constrained, self._config, [self._keys[i] for i in batch]
        )


class SamplingDecoder(FilteringDecoder):
    """A decoder that draws the next token, and excludes all others.

    Each sample has its own stream of random numbers: others change nothing in it.
    """

    def __init__(
        self,
        decoder: IncrementalDecoder,
        config: TranslationConfig,
        keys: Sequence[tuple[int, ...]],
    ) -> None:
        streams = [
            np.random.Generator(np.random.SFC64(np.random.SeedSequence(key)))
            for key in keys
        ]
        super().__init__(decoder, streams)
        self._config = config

    def excluded(self, beams: list[Any], weights: Array) -> np.ndarray:
        values = to_host(weights).astype(np.float32)
        noise = np.empty_like(values)
        for stream, row in zip(beams, noise, strict=True):
            stream.standard_exponential(out=row, dtype=np.float32)
        drawn = draw(likeliest(values, self._config), noise)
        # The search sees the drawn token alone, with its probability as it was.
        others = np.ones(values.shape, dtype=bool)
        others[np.arange(len(drawn)), drawn] = False
        return others


def likeliest(weights: np.ndarray, config: TranslationConfig) -> np.ndarray:
    """Return the weights with which tokens are drawn; some become 0.

    They are proportional to p^(1 / temperature): the logits are divided by it. Then
    top-k keeps the k likeliest tokens. Of these, top-p keeps as few of the likeliest as
    have at least the probability p together. Tokens that are as likely as the last one
    that is kept are kept, too.

    Shapes: weights [B, V] -> [B, V]
    """
    # The temperature, with the largest weight as 1: powers of it stay finite.
    if config.temperature not in (None, 1.0):
        largest = weights.max(axis=1, keepdims=True)
        scaled = weights / np.where(largest > 0, largest, 1)
        weights = scaled ** np.float32(1 / config.temperature)
    size = weights.shape[1]
    count = min(config.top_k or size, size)
    top_p = config.top_p
    if count == size and top_p in (None, 1.0):
        return weights
    # The rank of the last token that is kept: by top-k, and by top-p if that is less.
    descending = np.sort(weights, axis=1)[:, ::-1]
    last = np.full(len(weights), count - 1)
    if top_p is not None:
        sums = np.cumsum(descending[:, :count], axis=1, dtype=np.float64)
        share = sums / np.maximum(sums[:, -1:], np.finfo(np.float64).tiny)
        last = np.minimum((share < top_p).sum(axis=1), count - 1)
    least = descending[np.arange(len(weights)), last]
    return np.where(weights >= least[:, None], weights, 0)


def draw(weights: np.ndarray, noise: np.ndarray) -> np.ndarray:
    """Draw a token of each row, with probabilities in proportion to the weights.

    Of independent numbers from exponential distributions, the one of rate w is the
    smallest of all with a probability in proportion to w. So the token is drawn that
    has the largest quotient of its weight and such `noise`.

    Shapes: weights, noise [B, V] -> [B]
    """
    return (weights / np.maximum(noise, np.finfo(noise.dtype).tiny)).argmax(axis=1)
