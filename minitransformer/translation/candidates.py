"""The weights of tokens, and the best candidates of a step of beam search.

Weights are probabilities that are not normalised, mostly exp(logit): divided by their
sum, those of all tokens that may follow a beam are its softmax.

Shapes: B sentences, K beams, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
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
from minitransformer.machine import exp2_is_fast
from minitransformer.settings.config import EOS_ID

NOT_FINITE = "expected a model whose outputs are finite: this one's training diverged"

# About how many weights a processor's cache holds.
VALUES_IN_CACHE = 1 << 17

# A placeholder of log-probability -inf: there is something to index even if constraints
# exclude all candidates.
NO_CANDIDATE = tuple(np.array([x]) for x in (0, 0, -np.inf))

# The number of groups of tokens, whose maxima bound the best weights of a row.
MAX_GROUPS = 256


def project(rows: Array, table: Array) -> Array:
    """Return logits, in float32 or float64. Shapes: [N, D], [V, D] -> [N, V]"""
    return as_float32(ops.linear(Tensor(rows), Tensor(table.T)).data)


class TokenWeights(NamedTuple):
    """The weights of tokens after each beam, their sums, and the maxima of groups.

    Each token from `first` on is in a group with every G-th token after it. Those
    before it are in no group; among them are padding, the unknown token and BOS, whose
    ids are below EOS_ID.

    Shapes: values [N, V], sums [N], maxima [N, G]
    """

    values: Array
    sums: Array
    maxima: Array
    first: int


class Candidates(NamedTuple):
    """The best candidates of each sentence, best first: extended beams and tokens.

    Shapes: log_probs, origins (the beams that they extend), tokens [B, count]
    """

    log_probs: np.ndarray
    origins: np.ndarray
    tokens: np.ndarray


def token_weights(rows: Array, table: Array) -> TokenWeights:
    """Return the weights of the tokens that follow, whose vectors are in a table.

    A kernel may compute the exponentials as part of the product, some rows at a time.

    Shapes: rows [N, D], table [V, D]
    """
    kernel = fused_kernel("exponentials", (rows, table), project)
    if kernel is not project:
        weights = summed(*kernel(rows, table))
    elif isinstance(rows, np.ndarray) and exp2_is_fast(rows.dtype.name):
        # exp(x) = 2^(x log2(e)), and the rows are fewer numbers than the logits.
        logits = project(rows * rows.dtype.type(math.log2(math.e)), table)
        weights = summed(logits, replaced(logits, np.exp2))
    else:
        logits = project(rows, table)
        weights = summed(logits, replaced(logits, array_module(rows).exp))
    moderate = ops.moderate(weights.sums)
    return weights if moderate else exponentials(project(rows, table))


def exponentials(logits: Array) -> TokenWeights:
    """Return exp(logits - the maximum of each row). Shapes: logits [N, V]"""
    logits -= logits.max(axis=1, keepdims=True)
    return summed(logits, replaced(logits, array_module(logits).exp))


def replaced(values: Array, function: Callable[..., Array]) -> Iterator[slice]:
    """Replace values by a function of them, and yield the slices of rows that are done.

    Shapes: values [N, V]
    """
    for part in row_slices(values):
        function(values[part], out=values[part])
        yield part


def row_slices(values: Array) -> Iterator[slice]:
    """Yield slices of rows, which the cache of a processor holds. Shapes: [N, V]"""
    count, size = values.shape
    cached = max(VALUES_IN_CACHE // size, 1)
    at_once = cached if isinstance(values, np.ndarray) else count
    return (slice(n, n + at_once) for n in range(0, count, at_once))


def summed(values: Array, parts: Iterable[slice] | None = None) -> TokenWeights:
    """Return weights with their sums and maxima, some rows at a time.

    `parts` yields slices of rows as soon as their weights are there.

    Shapes: values [N, V]
    """
    xp, (count, size) = array_module(values), values.shape
    groups = min(MAX_GROUPS, size - EOS_ID)
    first = EOS_ID + (size - EOS_ID) % groups
    sums, ones = xp.empty(count, values.dtype), xp.ones(size, values.dtype)
    maxima = xp.empty((count, groups), values.dtype)
    for part in parts or row_slices(values):
        weights = values[part]
        sums[part] = weights @ ones
        grouped = weights[:, first:].reshape(len(weights), -1, groups)
        maxima[part] = grouped.max(axis=1)
    return TokenWeights(values, sums, maxima, first)


def best_candidates(
    chunks: Iterable[TokenWeights], log_probs: np.ndarray, count: int
) -> Candidates:
    """Extend each beam by each token; return each sentence's `count` best, best first.

    Candidates of -inf fill up what is missing. Ties go to the lower beam, then to the
    lower token. Weights are divided by their sums, and 0 excludes a token. Raises:
    ValueError if a sum is NaN, inf or 0.

    Example: two beams have log-probabilities -1 and -2, and the log-probabilities of
    the tokens (7, 8) are (-0.1, -2.5) after the first and (-0.7, -0.7) after the
    second. The three best candidates have log-probabilities -1.1, -2.7 and -2.7; they
    extend the beams 0, 1 and 1 by the tokens 7, 7 and 8.

    Shapes: weights of [B K] beams in chunks, those of a sentence in one chunk,
    log_probs [B, K] -> [B, count]
    """
    batch, beams = log_probs.shape
    found, first = [NO_CANDIDATE], 0
    for weights in chunks:
        of_chunk = log_probs[first : first + len(weights.sums) // beams]
        rows, *rest = _candidates(weights, of_chunk, count)
        found.append((rows + first * beams, *rest))
        first += len(of_chunk)
        del weights  # the next chunk takes their memory, which is in the cache
    row, token, log_prob = map(np.concatenate, zip(*found, strict=True))
    sentence = row // beams
    order = np.lexsort((token, row, -log_prob, sentence))
    starts = np.searchsorted(sentence[order], np.arange(batch + 1))
    position = starts[:-1, None] + np.arange(count)
    best = order[np.minimum(position, len(order) - 1)]
    missing = position >= starts[1:, None]
    best_log_probs = np.where(missing, -np.inf, log_prob[best])
    return Candidates(best_log_probs, row[best] % beams, token[best])


def _candidates(
    weights: TokenWeights, log_probs: np.ndarray, count: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Find the `count` best candidates of each sentence, or a few more.

    They are found without sorting all: at least `count` candidates reach the `count`-th
    largest of the maxima of all groups of all beams. Only groups whose maximum reaches
    it are searched. Example: one beam has the weights (5, 1, 4, 3). For a count of 2
    and the groups {0, 2} and {1, 3}, the maxima are 5 and 3. The tokens 0, 2 and 3
    reach 3, and the two best are among them.

    Shapes: weights of [B K] beams, log_probs [B, K] -> rows, tokens and
    log-probabilities
    """
    xp, (batch, beams) = array_module(weights.values), log_probs.shape
    groups = weights.maxima.shape[1]
    log_sums = np.log(to_host(weights.sums), dtype=np.float64)
    if not np.isfinite(log_sums).all():
        raise ValueError(NOT_FINITE)
    # Probabilities are compared as multiples of that of a sentence's best beam.
    highest = log_probs.max(axis=1, keepdims=True)
    with np.errstate(invalid="ignore"):  # there may be no beam: -inf - -inf
        factors = np.exp((log_probs - highest).ravel() - log_sums)
    maxima = to_host(weights.maxima) * factors[:, None]  # [B K, G]
    bounds = np.full(batch, np.finfo(np.float64).tiny)  # 0 never reaches it
    if count <= beams * groups:
        of_sentence = maxima.reshape(batch, -1)
        least = np.partition(of_sentence, -count)[:, -count]
        bounds = np.maximum(bounds, least)
    bounds = bounds.repeat(beams)  # [B K]

    # The weights of the groups that are searched, and of the tokens in no group.
    values, first = weights.values, weights.first
    row, group = _places(maxima >= bounds[:, None])
    in_groups = values[:, first:].reshape(batch * beams, -1, groups)
    searched = to_host(in_groups[xp.asarray(row), :, xp.asarray(group)])  # [.., V // G]
    i, place = _places(searched * factors[row, None] >= bounds[row, None])
    found = [(row[i], first + place * groups + group[i], searched[i, place])]
    others = to_host(values[:, EOS_ID:first])
    row, place = _places(others * factors[:, None] >= bounds[:, None])
    found.append((row, EOS_ID + place, others[row, place]))
    rows, tokens, reached = map(np.concatenate, zip(*found, strict=True))
    offsets = log_probs.ravel() - log_sums
    return rows, tokens, np.log(reached, dtype=np.float64) + offsets[rows]


def _places(mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows and columns of what is True, faster than `np.nonzero`."""
    rows, columns = np.divmod(np.flatnonzero(mask), mask.shape[1])
    return rows, columns
