"""Beam search (section 6.1).

The search knows nothing of the model: it feeds the newest token of each beam to an
`IncrementalDecoder` and reads the logits of the next one.

Shapes: B sentences, K beams, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from minitransformer.engine.backend import Array, array_module, to_host
from minitransformer.settings.config import BOS_ID, EOS_ID, PAD_ID, UNK_ID
from minitransformer.translation.incremental_decoding import IncrementalDecoder

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


@dataclass(frozen=True)
class Hypothesis:
    """One translation: its tokens without EOS, and how good the model finds it.

    `log_prob` is the sum of the log-probabilities of the tokens and, unless the search
    was cut off, EOS; `score` is log_prob / ((5 + n) / 6)^alpha for n of these.
    `alignment` has pairs of a source word and a target word, if it was asked for.

    Units: nats
    """

    tokens: tuple[int, ...]
    score: float
    log_prob: float
    alignment: tuple[tuple[int, int], ...] = ()


def length_penalty(length: Array, alpha: float) -> Array:
    """Return ((5 + length) / 6)^alpha (Wu et al., 2016, equation 14).

    Elsewhere: fairseq and Marian divide by length^p.
    """
    return ((5.0 + length) / 6.0) ** alpha


def beam_search(
    decoder: IncrementalDecoder,
    max_lengths: np.ndarray,
    beam_size: int,
    alpha: float,
    nbest: int,
) -> list[list[Hypothesis]]:
    """Find the `nbest` best hypotheses of each sentence, best first.

    At every step, the 2 K best candidates are the best extensions of a sentence's K
    live beams by one token. Those of the first K that end are finished hypotheses; the
    best K that do not end are the next live beams. The search for a sentence ends, and
    the sentence leaves the batch, when K hypotheses are finished, when no live beam can
    still beat the nbest-th finished one, or when its beams have `max_lengths` tokens,
    EOS counted. If none has finished by then, the live beams are the result; if fewer
    than `nbest` have, these alone are. With K = 1 this is greedy search. Padding, the
    unknown token and BOS are never produced.

    Elsewhere: tensor2tensor lets any of the 2 K candidates finish, so more than K may.

    Shapes: max_lengths [B]
    """
    results = [FinishedHypotheses(beam_size, alpha, nbest) for _ in max_lengths]
    sentences = np.arange(len(max_lengths))  # those whose search has not ended
    limits = np.asarray(max_lengths)
    tokens = np.full((len(limits), 1, 1), BOS_ID)  # [B, K, 1 + length]; K = 1 at first
    log_probs = np.zeros((len(limits), 1))  # [B, K]
    length = 0
    while len(sentences):
        length += 1
        beams = log_probs.shape[1]
        logits = decoder.step(tokens[:, :, -1].reshape(-1))
        candidates, origins, chosen = _best_candidates(logits, log_probs, 2 * beam_size)
        ends = chosen == EOS_ID
        finished = ends & np.isfinite(candidates)
        finished[:, beam_size:] = False
        for b, k in zip(*np.nonzero(finished), strict=True):
            hypothesis = tokens[b, origins[b, k], 1:]
            results[sentences[b]].add(hypothesis, candidates[b, k], length)
        # The K best candidates that do not end become the live beams.
        live = np.where(ends, -np.inf, candidates)
        order = np.argsort(-live, kind="stable")[:, :beam_size]
        log_probs, origins, chosen = (
            np.take_along_axis(x, order, 1) for x in (live, origins, chosen)
        )
        tokens = np.concatenate(
            [np.take_along_axis(tokens, origins[:, :, None], 1), chosen[:, :, None]], 2
        )
        at_limit = limits == length
        for b in np.flatnonzero(at_limit):
            if not results[sentences[b]].count:
                for k in np.flatnonzero(np.isfinite(log_probs[b])):
                    results[sentences[b]].add(tokens[b, k, 1:], log_probs[b, k], length)
        # Log-probabilities only fall, so no descendant of a beam can score more.
        reachable = log_probs[:, 0] / length_penalty(limits, alpha)
        to_beat = np.array([results[s].to_beat for s in sentences])
        done = at_limit | (to_beat >= reachable) | ~np.isfinite(log_probs[:, 0])
        left = np.flatnonzero(~done)
        rows = left[:, None] * beams + origins[left]
        sentences, limits = sentences[left], limits[left]
        tokens, log_probs = tokens[left], log_probs[left]
        if len(left):
            decoder.select(rows.reshape(-1))
    return [result.best for result in results]


class FinishedHypotheses:
    """The `nbest` best finished hypotheses of one sentence, best first."""

    def __init__(self, beam_size: int, alpha: float, nbest: int) -> None:
        self._beam_size, self._alpha, self._nbest = beam_size, alpha, nbest
        self.best: list[Hypothesis] = []
        self.count = 0  # of all that have finished

    def add(self, tokens: np.ndarray, log_prob: float, length: int) -> None:
        self.count += 1
        score = float(log_prob / length_penalty(length, self._alpha))
        self.best.append(Hypothesis(tuple(tokens.tolist()), score, float(log_prob)))
        self.best.sort(key=lambda hypothesis: -hypothesis.score)
        del self.best[self._nbest :]

    @property
    def to_beat(self) -> float:
        """The score that a live beam must exceed to change the result."""
        if self.count >= self._beam_size:
            return math.inf
        return self.best[-1].score if self.count >= self._nbest else -math.inf


def _best_candidates(
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
        grouped.max(axis=1, out=best)
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
