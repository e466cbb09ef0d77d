"""The weights of tokens, and the best candidates of a step of beam search.

The weight of a token is its probability times a factor that all tokens after one beam
share: mostly exp(logit), whose factor is the sum of all weights.

Shapes: B sentences, K beams, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

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
from minitransformer.settings.config import BOS_ID, PAD_ID, UNK_ID

NOT_FINITE = "expected a model whose outputs are finite: this one's training diverged"

# About how many logits a processor's cache holds.
LOGITS_IN_CACHE = 1 << 18

# Stands for the candidates where a constraint excludes them all.
NO_CANDIDATE = tuple(np.array([x]) for x in (0, 0, -np.inf))

# The least number of groups of tokens, whose maxima bound the best logits of a row.
MIN_GROUPS = 256


def project(rows: Array, table: Array) -> Array:
    """Return logits, in float32 or float64. Shapes: [N, D], [V, D] -> [N, V]"""
    return as_float32(ops.linear(Tensor(rows), Tensor(table.T)).data)


def token_weights(rows: Array, table: Array) -> tuple[Array, Array]:
    """Return exp(logits), some rows times a factor of their own, and the sums of rows.

    A kernel may take the exponentials inside of the product.

    Shapes: rows [N, D], table [V, D] -> [N, V], [N]
    """
    kernel = fused_kernel("exponentials", (rows, table), _token_weights)
    weights, sums = kernel(rows, table)
    return (weights, sums) if ops.moderate(sums) else _token_weights(rows, table)


def _token_weights(rows: Array, table: Array) -> tuple[Array, Array]:
    if isinstance(rows, np.ndarray) and exp2_is_fast(rows.dtype.name):
        # exp(x) = 2^(x log2(e)), and the rows are fewer numbers than the logits.
        rows = rows * rows.dtype.type(math.log2(math.e))
        return exponentials(project(rows, table), np.exp2)
    return exponentials(project(rows, table))


def exponentials(
    logits: Array, power: Callable[..., Array] | None = None
) -> tuple[Array, Array]:
    """Replace logits by exp(logits), and return them with the sums of the rows.

    Rows whose exponentials could overflow or vanish are divided by exp(their maximum).
    `power` is another function than exp, such as exp2.

    Shapes: logits [N, V] -> [N, V], [N]
    """
    xp, (count, size) = array_module(logits), logits.shape
    cached = max(LOGITS_IN_CACHE // size, 1)
    at_once = cached if isinstance(logits, np.ndarray) else count
    sums, ones = xp.empty(count, logits.dtype), xp.ones(size, logits.dtype)
    for first in range(0, count, at_once):
        part = slice(first, first + at_once)
        values = logits[part]
        highest = values.max(axis=1)
        moderate = (highest > -ops.SAFE_EXPONENT) & (highest < ops.SAFE_EXPONENT)
        if not moderate.all():
            values -= xp.where(moderate, 0, highest)[:, None]
        (power or xp.exp)(values, out=values)
        sums[part] = values @ ones
    return logits, sums


def best_candidates(
    blocks: Iterable[tuple[Array, Array]], log_probs: np.ndarray, count: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Extend each beam by each token; return each sentence's `count` best, best first.

    Candidates of -inf fill up what is missing. Ties go to the lower beam, then to the
    lower token. Blocks have the weights of tokens and their sums, by which they are
    divided. Weights are overwritten; 0 excludes a token. Raises: ValueError if a sum is
    NaN, inf or 0.

    Example: two beams have log-probabilities -1 and -2, and the log-probabilities of
    the tokens (7, 8) are (-0.1, -2.5) after the first and (-0.7, -0.7) after the
    second. The three best candidates have log-probabilities -1.1, -2.7 and -2.7; they
    extend the beams 0, 1 and 1 by the tokens 7, 7 and 8.

    Shapes: weights [B K, V] and sums [B K] in blocks of rows, those of a sentence in
    one block, log_probs [B, K] -> log-probabilities, beams that are extended, and
    tokens, each [B, count]
    """
    batch, beams = log_probs.shape
    found, first = [NO_CANDIDATE], 0
    for weights, sums in blocks:
        of_block = log_probs[first : first + len(weights) // beams]
        rows, *rest = _candidates(weights, to_host(sums), of_block, count)
        found.append((rows + first * beams, *rest))
        first += len(of_block)
    row, token, log_prob = map(np.concatenate, zip(*found, strict=True))
    sentence = row // beams
    order = np.lexsort((token, row, -log_prob, sentence))
    starts = np.searchsorted(sentence[order], np.arange(batch + 1))
    position = starts[:-1, None] + np.arange(count)
    best = order[np.minimum(position, len(order) - 1)]
    missing = position >= starts[1:, None]
    return np.where(missing, -np.inf, log_prob[best]), row[best] % beams, token[best]


def _candidates(
    weights: Array, sums: np.ndarray, log_probs: np.ndarray, count: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Find the `count` best candidates of each sentence, or a few more.

    They are found without sorting all: the tokens are divided into groups, and at least
    `count` candidates reach the `count`-th largest of the maxima of all groups of all
    beams. Only groups whose maximum reaches it are searched. Example: one beam has the
    weights (5, 1, 4, 3). For a count of 2 and the groups {0, 2} and {1, 3}, the maxima
    are 5 and 3. The tokens 0, 2 and 3 reach 3, and the two best are among them.

    Shapes: weights [B K, V], sums [B K], log_probs [B, K] -> rows, tokens and
    log-probabilities
    """
    xp, (batch, beams), size = array_module(weights), log_probs.shape, weights.shape[1]
    log_sums = np.log(sums, dtype=np.float64)
    if not np.isfinite(log_sums).all():
        raise ValueError(NOT_FINITE)
    # Probabilities are compared as multiples of that of a sentence's best beam.
    highest = log_probs.max(axis=1, keepdims=True)
    with np.errstate(invalid="ignore"):  # there may be no beam: -inf - -inf
        factors = np.exp((log_probs - highest).ravel() - log_sums)
    weights[:, xp.asarray([PAD_ID, UNK_ID, BOS_ID])] = 0

    # The first tokens, V modulo the number of groups, are in no group. Each of the
    # others is in a group with every `groups`-th token from it on.
    groups = min(max(count, MIN_GROUPS), size)
    ungrouped = size % groups
    grouped = weights[:, ungrouped:].reshape(len(weights), -1, groups)
    maxima = to_host(grouped.max(axis=1)) * factors[:, None]  # [B K, groups]
    bounds = np.full(batch, np.finfo(np.float64).tiny)  # 0 never reaches it
    if count <= beams * groups:
        of_sentence = maxima.reshape(batch, -1)
        least = np.partition(of_sentence, -count)[:, -count]
        bounds = np.maximum(bounds, least)
    bounds = bounds.repeat(beams)  # [B K]

    reaching = np.flatnonzero(maxima >= bounds[:, None])  # faster than for two axes
    row, group = (x[:, None] for x in np.divmod(reaching, groups))
    in_groups = row, group + np.arange(ungrouped, size, groups)
    others = np.arange(len(weights))[:, None], np.arange(ungrouped)[None]
    offsets = log_probs.ravel() - log_sums
    found = []
    for row, token in (in_groups, others):
        row, token = (x.ravel() for x in np.broadcast_arrays(row, token))
        values = to_host(weights[xp.asarray(row), xp.asarray(token)])
        reached = values * factors[row] >= bounds[row]
        row, token, values = (x[reached] for x in (row, token, values))
        found.append((row, token, np.log(values, dtype=np.float64) + offsets[row]))
    rows, tokens, values = map(np.concatenate, zip(*found, strict=True))
    return rows, tokens, values
