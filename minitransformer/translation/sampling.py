"""Samples: translations drawn at random from the model (beyond the paper).

Each token is drawn from the probabilities that the model gives to the next one. These
may be sharpened or flattened by a temperature, and cut to the likeliest tokens (top-k:
Fan et al., 2018; top-p: Holtzman et al., 2020). Back-translation with samples is due to
Edunov et al. (2018).

A sample depends on the model, the settings, the seed, the word pieces of the sentence
and the number of the sample; on the processor, and on the versions of NumPy and its
matrix library, which decide the last digits of the logits. Those digits also differ
with the other sentences of a batch; where they could decide a draw, the sentence is
translated again on its own. With `--precision bf16` and `int8`, and in 16 bits on a
GPU, the digits differ by more, and other sentences may change a sample.

Shapes: B samples, V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from minitransformer.engine.backend import Array, to_host
from minitransformer.model.transformer import Transformer
from minitransformer.settings.config import BOS_ID, PAD_ID, UNK_ID
from minitransformer.settings.decoding_config import TranslationConfig
from minitransformer.translation.batch_translation import translate_ids
from minitransformer.translation.beam_search import Hypothesis
from minitransformer.translation.constraints import (
    Constraints,
    Prefix,
    WatchedDecoder,
)
from minitransformer.translation.ensemble import Ensemble
from minitransformer.translation.incremental_decoding import IncrementalDecoder

# How much the logits of a sentence may differ between batches, in float32. The most
# that was seen is 1e-5.
TOLERANCE = 1e-4

# Arrays of the logits' size that a step needs: a batch is smaller by this factor.
ARRAYS = 4


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
    tokens = max(config.decode_tokens // ARRAYS, 1)
    search = replace(config, beam=1, nbest=1, decode_tokens=tokens)
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

    def unsure(self, decoder: IncrementalDecoder) -> set[int]:
        """Return the sentences of which the batch may have decided a close draw."""
        assert isinstance(decoder, SamplingDecoder)
        return decoder.unsure


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
        noise = np.empty_like(values)
        for row, sentence in zip(noise, self.sentences, strict=True):
            self._streams[sentence].standard_exponential(out=row, dtype=np.float32)
        tolerance = 2 * TOLERANCE / min(draws.temperature, 1.0)
        weights, least, below, above = likeliest(
            values, draws.top_k, draws.top_p, tolerance
        )
        tokens, close = draw(weights, noise, least, below, above, tolerance)
        self.unsure.update(self.sentences[close].tolist())
        result = np.ones(values.shape, dtype=bool)
        possible = np.flatnonzero(weights.any(axis=1))
        result[possible, tokens[possible]] = False
        return result


def likeliest(
    logits: np.ndarray, top_k: int | None, top_p: float | None, tolerance: float = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return weights in proportion to probabilities, and the least that is kept.

    Top-k comes first: it keeps the k likeliest tokens. Of these, top-p keeps the
    fewest of the likeliest that together have at least the probability p. Tokens that
    are as likely as the last one that is kept are kept, too.

    Shapes: logits [B, V] -> weights [B, V], the least that is kept [B], and two limits
    [B]: whether a token with a weight between them is kept is in doubt, because logits
    that differ by `tolerance` could change it
    """
    highest = logits.max(axis=1, keepdims=True)
    weights = np.exp(logits - np.where(highest == -np.inf, 0, highest))
    rows, size = np.arange(len(logits)), logits.shape[1]
    count = min(top_k or size, size)
    if count == size and top_p in (None, 1.0):
        least = np.zeros(len(logits))
        return weights, least, least + 1, least  # none is in doubt
    descending = np.sort(weights, axis=1)[:, ::-1]
    first = last = np.full(len(logits), count - 1)  # of what may be the last one kept
    if top_p is not None:
        sums = np.cumsum(descending[:, :count], axis=1, dtype=np.float64)
        share = sums / np.maximum(sums[:, -1:], np.finfo(np.float64).tiny)
        first, kept, last = (
            np.minimum((share < p).sum(axis=1), count - 1)
            for p in (top_p - tolerance, top_p, top_p + tolerance)
        )
    else:
        kept = first
    following = descending[rows, np.minimum(last + 1, size - 1)]
    lowest = descending[rows, last]
    near = (last + 1 < size) & (following >= lowest * (1 - tolerance))
    in_doubt = near | (first < last)
    below = np.where(near, following, lowest) * (1 - tolerance)
    above = np.where(in_doubt, descending[rows, first] * (1 + tolerance), -1)  # or none
    return weights, descending[rows, kept], below, above


def draw(
    weights: np.ndarray,
    noise: np.ndarray,
    least: np.ndarray,
    below: np.ndarray,
    above: np.ndarray,
    tolerance: float,
) -> tuple[np.ndarray, np.ndarray]:
    """Draw a token of each row, with probabilities in proportion to the weights.

    Of independent numbers from exponential distributions, the one of rate w is the
    smallest of all with a probability in proportion to w. So the token is drawn that
    has the largest quotient of its weight and `noise`.

    Shapes: weights, exponential noise [B, V]; `least`, `below` and `above` as in
    `likeliest` [B] -> tokens [B], and which draws are so close that weights that differ
    by the factor 1 + tolerance could change them [B] bool
    """
    rows = np.arange(len(weights))
    quotients = weights / np.maximum(noise, np.finfo(noise.dtype).tiny)
    tokens = np.where(weights >= least[:, None], quotients, 0).argmax(axis=1)
    quotients[weights < np.minimum(least, below)[:, None]] = 0
    best = quotients[rows, tokens]
    quotients[rows, tokens] = 0
    close = quotients.max(axis=1) >= best * (1 - tolerance)
    return tokens, (close & (best > 0)) | (weights[rows, tokens] <= above)
