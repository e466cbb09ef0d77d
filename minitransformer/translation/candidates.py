"""The weights of tokens, and the best candidates of a step of beam search.

Weights are probabilities that are not normalised, mostly exp(logit): divided by their
sum, those of all tokens that may follow a beam are its softmax.

Shapes: B sentences, K beams, V vocabulary, G groups of tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from minitransformer.engine import ops
from minitransformer.engine.autograd import Tensor
from minitransformer.engine.backend import (
    Array,
    array_module,
    as_float32,
    fused_kernel,
    to_host,
)
from minitransformer.settings.config import EOS_ID, PAD_ID

NOT_FINITE = "expected a model whose outputs are finite: this one's training diverged"

# About how many weights a processor's cache holds.
VALUES_IN_CACHE = 1 << 17

# The number of groups of tokens, whose maxima bound the best weights of a row.
MAX_GROUPS = 256


class TokenWeights(NamedTuple):
    """The weights of the tokens after each beam, their sums, and the maxima of groups.

    Token i is in group i % G. The values of padding, the unknown token and BOS, whose
    ids are below EOS_ID, are 0, so that no search produces them; the sums count them.

    Shapes: values [N, V], sums [N], maxima [N, G]
    """

    values: Array
    sums: Array
    maxima: Array


class Candidates(NamedTuple):
    """The best candidates of each sentence, best first: extended beams and tokens.

    Shapes: log_probs, origins (the beams that they extend), tokens [B, count]
    """

    log_probs: np.ndarray
    origins: np.ndarray
    tokens: np.ndarray


def token_weights(rows: Array, table: Array) -> TokenWeights:
    """Return the weights of the tokens that follow, whose vectors are in a table.

    Shapes: rows [N, D], table [V, D]
    """
    kernel = fused_kernel("exponentials", (rows, table), _logits)
    if kernel is _logits:
        weights = with_sums(_logits(rows, table), exponents=True)
    else:
        weights = with_sums(*kernel(rows, table))
    moderate = ops.moderate(weights.sums)
    return weights if moderate else weights_of(_logits(rows, table))


def weights_of(logits: Array) -> TokenWeights:
    """Return exp(logits - the maximum of each row), in place. Shapes: logits [N, V]"""
    logits -= logits.max(axis=1, keepdims=True)
    return with_sums(logits, exponents=True)


def _logits(rows: Array, table: Array) -> Array:
    return as_float32(ops.linear(Tensor(rows), Tensor(table.T)).data)


def with_sums(
    values: Array, parts: Iterable[slice] | None = None, exponents: bool = False
) -> TokenWeights:
    """Return weights with their sums and maxima, some rows at a time.

    `parts` yields slices of rows as soon as their weights are there; by default these
    are as many rows as a processor's cache holds. If the values are `exponents`, their
    exponentials replace them.

    Shapes: values [N, V]
    """
    xp, (count, size) = array_module(values), values.shape
    sums, ones = xp.empty(count, values.dtype), xp.ones(size, values.dtype)
    maxima = xp.empty((count, min(MAX_GROUPS, size)), values.dtype)
    if parts is None:
        at_once = VALUES_IN_CACHE // size + 1 if xp is np else count
        parts = (slice(n, n + at_once) for n in range(0, count, at_once))
    for part in parts:
        weights = values[part]
        if exponents:
            xp.exp(weights, out=weights)
        sums[part] = weights @ ones
        weights[:, :EOS_ID] = 0
        maxima[part] = group_maxima(weights)
    return TokenWeights(values, sums, maxima)


def group_maxima(values: Array) -> Array:
    """Return the largest value of each group of tokens. Shapes: [N, V] -> [N, G]"""
    count, size = values.shape
    groups = min(MAX_GROUPS, size)
    rest = size % groups  # the first groups have one token more
    rows = values[:, : size - rest].reshape(count, -1, groups)
    maxima = rows.max(axis=1)
    last = array_module(values).maximum(maxima[:, :rest], values[:, size - rest :])
    maxima[:, :rest] = last
    return maxima


def best_candidates(
    chunks: Iterable[TokenWeights], log_probs: np.ndarray, count: int
) -> Candidates:
    """Extend each beam by each token; return each sentence's `count` best, best first.

    Candidates of -inf fill up what is missing. Ties go to the lower beam, then to the
    lower token. A weight of 0 excludes a token. Raises: ValueError if a sum is NaN, inf
    or 0.

    Example: two beams have log-probabilities -1 and -2, and the log-probabilities of
    the tokens (7, 8) are (-0.1, -2.5) after the first and (-0.7, -0.7) after the
    second. The three best candidates have log-probabilities -1.1, -2.7 and -2.7; they
    extend the beams 0, 1 and 1 by the tokens 7, 7 and 8.

    Shapes: weights of [B K] beams in chunks, those of a sentence in one chunk,
    log_probs [B, K] -> [B, count]
    """
    found, first = list[Candidates](), 0
    for weights in chunks:
        last = first + len(weights.sums) // log_probs.shape[1]
        found.append(_best_of_chunk(weights, log_probs[first:last], count))
        first = last
        del weights  # the next chunk takes their memory, which is in the cache
    return Candidates._make(map(np.concatenate, zip(*found, strict=True)))


def _best_of_chunk(
    weights: TokenWeights, log_probs: np.ndarray, count: int
) -> Candidates:
    """Find the best candidates without sorting all.

    At least `count` candidates reach the `count`-th largest of the maxima of all groups
    of all beams. Only groups whose maximum reaches it are searched. Example: one beam
    has the weights (5, 1, 4, 3). For a count of 2 and the groups {0, 2} and {1, 3}, the
    maxima are 5 and 3. The tokens 0, 2 and 3 reach 3; the two best are among them.
    """
    values, xp = weights.values, array_module(weights.values)
    (batch, beams), (_, size) = log_probs.shape, values.shape
    log_sums = np.log(to_host(weights.sums), dtype=np.float64)
    if not np.isfinite(log_sums).all():
        raise ValueError(NOT_FINITE)
    offsets = log_probs.ravel() - log_sums

    # Probabilities are compared as multiples of that of a sentence's best beam.
    highest = log_probs.max(axis=1).repeat(beams)
    with np.errstate(invalid="ignore"):  # there may be no beam: -inf - -inf
        factors = np.exp(offsets - highest)[:, None]  # [B K, 1]
    maxima = to_host(weights.maxima) * factors  # [B K, G]
    bounds = np.full(batch, np.finfo(np.float64).tiny)  # 0 never reaches it
    of_sentence = maxima.reshape(batch, -1)
    if count <= of_sentence.shape[1]:
        least = np.partition(of_sentence, -count)[:, -count]
        bounds = np.maximum(bounds, least)
    bounds = bounds.repeat(beams)[:, None]

    # Search the groups that may hold candidates.
    row, group = _places(maxima >= bounds)
    tokens = group[:, None] + np.arange(0, size, maxima.shape[1])  # [groups, V // G]
    tokens[tokens >= size] = PAD_ID  # of weight 0
    searched = to_host(values[xp.asarray(row)[:, None], xp.asarray(tokens)])
    i, place = _places(searched * factors[row] >= bounds[row])
    row, token = row[i], tokens[i, place]
    log_prob = np.log(searched[i, place], dtype=np.float64) + offsets[row]

    # Rank what was found in each sentence.
    order = np.lexsort((token, row, -log_prob, row // beams))
    row, token, log_prob = row[order], token[order], log_prob[order]
    sentence = row // beams
    rank = np.arange(len(row)) - np.searchsorted(sentence, sentence)
    best = rank < count
    places, shape = (sentence[best], rank[best]), (batch, count)
    candidates = Candidates(
        np.full(shape, -np.inf), np.zeros(shape, int), np.zeros(shape, int)
    )
    columns = log_prob, row % beams, token
    for array, column in zip(candidates, columns, strict=True):
        array[places] = column[best]
    return candidates


def _places(mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows and columns of what is True, faster than `np.nonzero`."""
    rows, columns = np.divmod(np.flatnonzero(mask), mask.shape[1])
    return rows, columns
