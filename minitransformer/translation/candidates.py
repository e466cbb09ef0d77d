"""The best candidates of a step of beam search, found without sorting all of them.

Shapes: B sentences, K beams, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from minitransformer.engine.backend import Array, array_module, to_host
from minitransformer.settings.config import BOS_ID, PAD_ID, UNK_ID

NOT_FINITE = "expected a model whose outputs are finite: this one's training diverged"

# Stands for the candidates where a constraint excludes them all.
NO_CANDIDATE = tuple(np.array([x]) for x in (0, 0, -np.inf))

# If the largest logit of a row is nearer to 0 than this, the row's exponentials neither
# overflow nor vanish: nothing has to be subtracted from the logits first.
SAFE_EXPONENT = 30

# About how many logits a processor's cache holds.
LOGITS_IN_CACHE = 1 << 18

# The least number of groups of tokens, whose maxima bound the best logits of a row.
MIN_GROUPS = 256


def best_candidates(
    blocks: Iterable[Array], log_probs: np.ndarray, count: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Extend each beam by each token; return each sentence's `count` best, best first.

    Candidates of -inf fill up what is missing. Ties go to the lower beam, then to the
    lower token. The logits are overwritten; -inf excludes a token. Raises: ValueError
    if one is NaN or inf.

    Example: two beams have log-probabilities -1 and -2, and the log-probabilities of
    the tokens (7, 8) are (-0.1, -2.5) after the first and (-0.7, -0.7) after the
    second. The three best candidates have log-probabilities -1.1, -2.7 and -2.7; they
    extend the beams 0, 1 and 1 by the tokens 7, 7 and 8.

    Shapes: logits [B K, V] in blocks of rows, those of a sentence in one block,
    log_probs [B, K] -> log-probabilities, beams that are extended, and tokens, each
    [B, count]
    """
    batch, beams = log_probs.shape
    found, first = [NO_CANDIDATE], 0
    for logits in blocks:
        of_block = log_probs[first : first + len(logits) // beams]
        rows, *rest = _candidates(logits, of_block, count)
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
    logits: Array, log_probs: np.ndarray, count: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Find the `count` best candidates of each sentence, or a few more.

    They are found without sorting all: the tokens are divided into groups, and at least
    `count` candidates reach the `count`-th largest of the maxima of all groups of all
    beams. Only groups whose maximum reaches it are searched. Example: one beam has the
    logits (5, 1, 4, 3). For a count of 2 and the groups {0, 2} and {1, 3}, the maxima
    are 5 and 3. The tokens 0, 2 and 3 reach 3, and the two best are among them.

    Shapes: logits [B K, V], log_probs [B, K] -> rows, tokens and log-probabilities
    """
    xp, (batch, beams), (_, size) = array_module(logits), log_probs.shape, logits.shape
    groups = min(max(count, MIN_GROUPS), size)
    ungrouped = size % groups
    maxima, log_totals = _maxima_and_totals(logits, groups)
    if not np.isfinite(log_totals).all():
        raise ValueError(NOT_FINITE)
    offsets = (log_probs.reshape(-1) - log_totals)[:, None]  # [B K, 1]
    maxima = maxima + offsets
    bounds = np.full(batch, np.finfo(logits.dtype).min)  # -inf never reaches it
    if count <= beams * groups:
        maxima_of_sentence = maxima.reshape(batch, -1)
        least = np.partition(maxima_of_sentence, -count)[:, -count]
        bounds = np.maximum(bounds, least)
    bounds = bounds.repeat(beams)[:, None]  # [B K, 1]

    row, group = (x[:, None] for x in np.nonzero(maxima >= bounds))
    in_groups = row, group + np.arange(ungrouped, size, groups)
    others = np.arange(len(logits))[:, None], np.arange(ungrouped)[None]
    found = []
    for row, token in (in_groups, others):
        row, token = (x.reshape(-1) for x in np.broadcast_arrays(row, token))
        values = to_host(logits[xp.asarray(row), xp.asarray(token)])
        log_prob = values + offsets[row, 0]
        reached = log_prob >= bounds[row, 0]
        found.append((row[reached], token[reached], log_prob[reached]))
    rows, tokens, values = map(np.concatenate, zip(*found, strict=True))
    return rows, tokens, values


def _maxima_and_totals(logits: Array, groups: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the maxima of groups of tokens, and log-sum-exp of each row.

    The first V % groups tokens are in no group. Each of the others is in a group with
    every `groups`-th token from it on. Padding, the unknown token and BOS count in
    log-sum-exp only: their logits become -inf.

    Shapes: logits [N, V] -> [N, groups], [N]
    """
    xp, (count, size) = array_module(logits), logits.shape
    ungrouped, never = size % groups, xp.asarray([PAD_ID, UNK_ID, BOS_ID])
    excluded = logits[:, never]
    logits[:, never] = -xp.inf
    at_once = count
    if isinstance(logits, np.ndarray):
        at_once = min(max(LOGITS_IN_CACHE // size, 1), count)
    maxima = xp.empty((count, groups), logits.dtype)
    log_totals = xp.empty(count, logits.dtype)
    buffer, ones = xp.empty((at_once, size), logits.dtype), xp.ones(size, logits.dtype)
    for first in range(0, count, at_once):
        part = slice(first, first + at_once)
        values, best, others = logits[part], maxima[part], excluded[part]
        grouped = values[:, ungrouped:].reshape(len(values), -1, groups)
        best[...] = grouped.max(axis=1)
        every = best, values[:, :ungrouped], others
        highest = xp.concatenate(every, axis=1).max(axis=1)
        moderate = (highest > -SAFE_EXPONENT) & (highest < SAFE_EXPONENT)
        shift = xp.where(moderate, 0, highest)[:, None]
        if shift.any():
            values = values - shift
        totals = xp.exp(values, out=buffer[: len(values)]) @ ones
        totals += xp.exp(others - shift).sum(axis=1)
        log_totals[part] = xp.log(totals) + shift[:, 0]
    return to_host(maxima), to_host(log_totals).astype(np.float64)
