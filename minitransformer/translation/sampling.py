"""Samples: translations drawn at random from the model (beyond the paper).

Each token is drawn from the probabilities that the model gives to the next one. These
may be sharpened or flattened by a temperature, and cut to the likeliest tokens (top-k:
Fan et al., 2018; top-p: Holtzman et al., 2020). Back-translation with samples is due to
Edunov et al. (2018).

A sample depends on the model, the processor that computes it, the settings, the seed,
the word pieces of the sentence and the number of the sample, and on nothing else. The
computed logits of a sentence, however, differ in their last bits with the other
sentences of a batch. Where a draw is so close that they could decide it, the sentence
is translated again on its own.

Shapes: B samples, V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from minitransformer.engine.backend import Array, to_host
from minitransformer.model.transformer import Transformer
from minitransformer.settings.config import (
    BOS_ID,
    PAD_ID,
    UNK_ID,
    TranslationConfig,
)
from minitransformer.translation.batch_translation import translate_ids
from minitransformer.translation.beam_search import Hypothesis
from minitransformer.translation.constraints import (
    Constraints,
    Prefix,
    WatchedDecoder,
)
from minitransformer.translation.incremental_decoding import (
    Ensemble,
    IncrementalDecoder,
)

# What logits of a sentence may differ by in other batches. They were seen to differ by
# 1e-5 at most.
TOLERANCE = 1e-4


def sample_ids(
    model: Transformer | Ensemble,
    sources: Sequence[Sequence[int]],
    config: TranslationConfig,
    num_threads: int = 1,
    prefixes: Sequence[Prefix | None] = (),
) -> list[list[Hypothesis]]:
    """Draw `config.nbest` translations of each sentence, in the order of drawing.

    Their log-probabilities and scores are those of the model, as in beam search.
    Constraints are met by drawing among the tokens that meet them.
    """
    count = config.nbest
    repeated = [source for source in sources for _ in range(count)]
    seed = 1 if config.seed is None else config.seed
    keys = [sample_key(seed, s, n) for s in sources for n in range(count)]
    each = [prefix for prefix in prefixes for _ in range(count)]
    search = replace(config, beam=1, nbest=1)
    draws = Draws(config, each, keys)
    found = translate_ids(model, repeated, search, num_threads, None, draws)
    drawn = iter(found)
    return [[h for _ in range(count) for h in next(drawn)] for _ in sources]


def sample_key(seed: int, source: Sequence[int], number: int) -> tuple[int, ...]:
    """Return the key of the random numbers for one sample of a sentence."""
    ids = np.asarray(source, dtype="<i4").tobytes()
    digest = hashlib.blake2b(ids, digest_size=16).digest()
    return seed, number, int.from_bytes(digest, "little")


class Draws(Constraints):
    """Constraints, and the random draws of some samples."""

    def __init__(
        self,
        config: TranslationConfig,
        prefixes: Sequence[Prefix | None],
        keys: Sequence[tuple[int, ...]],
    ) -> None:
        super().__init__(config, prefixes)
        self._keys = keys
        self.temperature = config.temperature or 1.0
        self.top_k, self.top_p = config.top_k, config.top_p

    def __bool__(self) -> bool:
        return True

    def decoder(
        self,
        decoder: IncrementalDecoder,
        batch: np.ndarray,
        shortlist: np.ndarray | None = None,
    ) -> SamplingDecoder:
        if super().__bool__():
            decoder = super().decoder(decoder, batch, shortlist)
        return SamplingDecoder(decoder, self, [self._keys[i] for i in batch])


class SamplingDecoder(WatchedDecoder):
    """A decoder that draws the next token, and excludes all others.

    `unsure` has the sentences of which a draw was too close.
    """

    def __init__(
        self,
        decoder: IncrementalDecoder,
        draws: Draws,
        keys: Sequence[tuple[int, ...]],
    ) -> None:
        super().__init__(decoder, len(keys))
        self._draws = draws
        self._streams = [
            np.random.Generator(np.random.SFC64(np.random.SeedSequence(key)))
            for key in keys
        ]
        self.unsure: set[int] = set()

    def excluded(self, logits: Array) -> np.ndarray:
        draws, values = self._draws, to_host(logits).astype(np.float32, copy=True)
        values[:, [PAD_ID, UNK_ID, BOS_ID]] = -np.inf
        values /= np.float32(draws.temperature)
        uniform = np.array([self._streams[s].random() for s in self.sentences])
        tolerance = TOLERANCE / min(draws.temperature, 1.0)
        weights, doubt = kept_weights(values, draws.top_k, draws.top_p, tolerance)
        tokens, close = draw(weights, uniform, doubt + tolerance)
        self.unsure.update(self.sentences[close].tolist())
        result = np.ones(values.shape, dtype=bool)
        possible = np.flatnonzero(weights.any(axis=1))
        result[possible, tokens[possible]] = False
        return result


def kept_weights(
    logits: np.ndarray, top_k: int | None, top_p: float | None, tolerance: float = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Return exp(logits - their maximum), with 0 for tokens that are cut off.

    Top-k comes first: it keeps the k likeliest tokens. Of these, top-p keeps the
    fewest of the likeliest that together have at least the probability p. Tokens that
    are as likely as the last one that is kept are kept, too.

    Shapes: logits [B, V] -> weights [B, V], and the probability of the tokens of which
    logits that differ by `tolerance` could change whether they are kept [B]
    """
    highest = logits.max(axis=1, keepdims=True)
    weights = np.exp(logits - np.where(highest == -np.inf, 0, highest))
    rows, size = np.arange(len(logits)), logits.shape[1]
    doubt = np.zeros(len(logits))
    count = min(top_k or size, size)
    if count == size and top_p in (None, 1.0):
        return weights, doubt
    descending = np.sort(weights, axis=1)[:, ::-1]
    sums = np.cumsum(descending[:, :count], axis=1, dtype=np.float64)
    total = np.maximum(sums[:, -1], np.finfo(np.float64).tiny)
    kept, unsure = np.full(len(logits), count), np.zeros(len(logits), dtype=bool)
    if top_p is not None:
        share = sums / total[:, None]
        kept = np.minimum((share < top_p).sum(axis=1) + 1, count)
        unsure = (np.abs(share - top_p) < tolerance).any(axis=1)
    lowest = descending[rows, kept - 1]
    following = np.where(kept < size, descending[rows, np.minimum(kept, size - 1)], 0)
    unsure |= following > lowest * (1 - tolerance)
    for row in np.flatnonzero(unsure):
        ratio = weights[row] / lowest[row]
        near = weights[row, np.abs(ratio - 1) <= tolerance].sum() + following[row]
        doubt[row] = near / total[row] + 2 * tolerance
    weights[weights < lowest[:, None]] = 0
    return weights, doubt


def draw(
    weights: np.ndarray, uniform: np.ndarray, tolerance: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Draw a token for each row, with probabilities in proportion to the weights.

    The tokens divide the numbers from 0 to 1 into intervals, in the order of their ids.
    The token whose interval has the number `uniform` is drawn. The draw is close if
    there is another token's interval within `tolerance`.

    Shapes: weights [B, V], uniform [B] from 0 to below 1, tolerance [B]
    -> tokens [B], and which draws are close [B] bool
    """
    rows, last = np.arange(len(weights)), weights.shape[1] - 1
    sums = np.cumsum(weights, axis=1, dtype=np.float64)
    total = sums[:, -1]
    place = np.minimum(uniform * total, np.nextafter(total, 0))
    tokens = np.minimum((sums <= place[:, None]).sum(axis=1), last)
    high = sums[rows, tokens]
    low = high - weights[rows, tokens]
    margin = tolerance * total
    close = (low > 0) & (place - low < margin)
    return tokens, close | (high < total) & (high - place < margin)
