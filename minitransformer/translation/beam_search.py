"""Beam search (section 6.1), and scores of given translations.

The search knows nothing of the model: it sees a `Stepper`, which feeds one token to
each beam and returns what may follow. Shapes: B sentences, K beams, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import TypeVar

import numpy as np

from minitransformer.engine.backend import Array, array_module, to_host
from minitransformer.settings.config import BOS_ID, EOS_ID, PAD_ID
from minitransformer.translation.steppers import Stepper

A = TypeVar("A")
R = TypeVar("R")


@dataclass(frozen=True)
class Hypothesis:
    """One translation: its tokens without EOS, and how good it is.

    `log_prob` is the sum of the tokens' log-probabilities, EOS included; `score` is
    log_prob / ((5 + length) / 6)^alpha with EOS counted in the length.

    Units: nats
    """

    tokens: tuple[int, ...]
    score: float
    log_prob: float


def length_penalty(length: Array, alpha: float) -> Array:
    """((5 + length) / 6)^alpha (Wu et al., 2016, equation 14).

    Differs: fairseq and Marian divide by length^p.
    """
    return ((5.0 + length) / 6.0) ** alpha


def beam_search(
    stepper: Stepper,
    max_lengths: np.ndarray,
    beam_size: int,
    alpha: float,
    nbest: int = 1,
) -> list[list[Hypothesis]]:
    """Find the `nbest` best hypotheses of each sentence, best first.

    Every step extends each sentence's K live beams to its 2 K best candidates. Those of
    the first K that end are finished hypotheses; the best K that do not end live on. A
    sentence is done, and leaves the batch, when K hypotheses have finished, when no
    live beam can still beat the nbest-th finished one, or at its longest output in
    tokens, EOS counted, where beams that never ended stand as they are. With K = 1 this
    is greedy search. Neither padding nor BOS is ever produced.

    Differs: tensor2tensor lets any of the 2 K candidates finish and has no limit of K.

    Shapes: max_lengths [B]
    """
    results = [FinishedHypotheses(beam_size, nbest) for _ in max_lengths]
    sentences = np.arange(len(max_lengths))  # the sentences still searched
    limits = np.asarray(max_lengths)
    tokens = np.full((len(limits), 1, 1), BOS_ID)  # [B, K, 1 + length]; K = 1 at first
    scores = np.zeros((len(limits), 1))  # [B, K] log-probabilities
    length = 0
    while len(sentences):
        length += 1
        beams = scores.shape[1]
        blocks = stepper.step(tokens[:, :, -1].reshape(-1))
        candidates, origins, choices = _best_candidates(blocks, scores, 2 * beam_size)
        ends = choices == EOS_ID
        finished = ends & np.isfinite(candidates)
        finished[:, beam_size:] = False
        at_limit = limits == length
        penalty = length_penalty(length, alpha)
        for b, k in zip(*np.nonzero(finished), strict=True):
            log_prob = float(candidates[b, k])
            found = tokens[b, origins[b, k], 1:]
            results[sentences[b]].add(log_prob / penalty, log_prob, found)
        # The K best candidates that go on, in order of score.
        going_on = np.where(ends, -np.inf, candidates)
        order = np.argsort(-going_on, axis=1, kind="stable")[:, :beam_size]
        scores = np.take_along_axis(going_on, order, 1)
        origins = np.take_along_axis(origins, order, 1)
        chosen = np.take_along_axis(choices, order, 1)
        tokens = np.concatenate(
            [np.take_along_axis(tokens, origins[:, :, None], 1), chosen[:, :, None]], 2
        )
        # A log-probability only falls, so this bounds what a live beam can reach.
        reachable = scores[:, 0] / length_penalty(limits, alpha)
        to_beat = np.array([results[s].to_beat for s in sentences])
        done = at_limit | (to_beat >= reachable) | ~np.isfinite(scores[:, 0])
        for b in np.flatnonzero(at_limit):
            if not len(results[sentences[b]]):
                for k in np.flatnonzero(np.isfinite(scores[b])):
                    log_prob = float(scores[b, k])
                    found = tokens[b, k, 1:]
                    results[sentences[b]].add(log_prob / penalty, log_prob, found)
        kept = np.flatnonzero(~done)
        rows = kept[:, None] * beams + origins[kept]
        sentences, limits = sentences[kept], limits[kept]
        tokens, scores = tokens[kept], scores[kept]
        if len(kept):
            stepper.select(rows.reshape(-1))
    return [result.best() for result in results]


class FinishedHypotheses:
    """The `nbest` best finished hypotheses of a sentence."""

    def __init__(self, beam_size: int, nbest: int) -> None:
        self._beam_size, self._nbest = beam_size, nbest
        self._found: list[Hypothesis] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, score: float, log_prob: float, tokens: np.ndarray) -> None:
        self._count += 1
        self._found.append(Hypothesis(tuple(tokens.tolist()), score, log_prob))
        self._found.sort(key=lambda hypothesis: -hypothesis.score)
        del self._found[self._nbest :]

    @property
    def to_beat(self) -> float:
        """The score that a live beam must exceed to change the result."""
        if self._count >= self._beam_size:
            return math.inf
        return self._found[-1].score if self._count >= self._nbest else -math.inf

    def best(self) -> list[Hypothesis]:
        return self._found


def _best_candidates(
    blocks: Iterable[Array], scores: np.ndarray, count: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Extend each beam by each token and take the best of a sentence, best first.

    Where there are fewer than `count`, log-probabilities of -inf fill up. Ties go to
    the lower beam and token. Overwrites the logits.

    Shapes: logits [B K, V] in blocks of columns, scores [B, K] -> log-probabilities,
    beams of origin and tokens, [B, count] each
    """
    batch, beams = scores.shape
    log_totals = np.full(batch * beams, -np.inf)
    least: Array = log_totals
    found, first = [], 0
    for logits in blocks:
        never = [
            i - first for i in (PAD_ID, BOS_ID) if 0 <= i - first < logits.shape[1]
        ]
        rows, tokens, values, log_total, least = _best_of_rows(
            logits, never, count, least
        )
        found.append((rows, tokens + first, values))
        log_totals = np.logaddexp(log_totals, log_total)
        first += logits.shape[1]
    row, token, value = map(np.concatenate, zip(*found, strict=True))
    log_prob = value + (scores.reshape(-1) - log_totals)[row]
    sentence = row // beams
    order = np.lexsort((token, row, -log_prob, sentence))
    starts = np.searchsorted(sentence[order], np.arange(batch + 1))
    position = starts[:-1, None] + np.arange(count)
    best = order[np.minimum(position, len(order) - 1)]
    missing = position >= starts[1:, None]
    return np.where(missing, -np.inf, log_prob[best]), row[best] % beams, token[best]


def _best_of_rows(
    logits: Array, never: list[int], count: int, least: Array
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, Array]:
    """Find the `count` best tokens of each row, and what ties with them.

    Nothing below `least` is sought. Tokens in `never` count for log-sum-exp only.

    Shapes: logits [N, C], least [N] -> rows, tokens and logits of what was found, the
    log-sum-exp of each row [N], and what the next block has to reach [N]
    """
    xp = array_module(logits)
    kept = logits[:, never]
    logits[:, never] = -xp.inf
    # The best tokens are no worse than the best maxima of as many groups of tokens.
    maxima = _group_maxima(xp, logits)
    width = min(count, maxima.shape[-1])
    reached = xp.partition(maxima, -width, axis=-1)[:, -width]
    least = xp.maximum(reached, xp.asarray(least, dtype=logits.dtype))
    found = xp.flatnonzero(logits >= least[:, None])
    values = to_host(logits.reshape(-1)[found]).astype(np.float64)

    logits[:, never] = kept
    highest = xp.concatenate([maxima, kept], axis=-1).max(axis=-1)
    logits -= highest[:, None]
    totals = xp.exp(logits, out=logits) @ xp.ones(logits.shape[-1], logits.dtype)
    log_totals = to_host(xp.log(totals) + highest).astype(np.float64)
    rows, tokens = np.divmod(to_host(found), logits.shape[-1])
    return rows, tokens, values, log_totals, least


def _group_maxima(xp: ModuleType, logits: Array) -> Array:
    """The maxima of disjoint groups of columns. Shapes: [N, V] -> [N, groups]"""
    maxima = logits
    while (width := maxima.shape[-1]) > 256:
        half = width // 2
        folded = xp.maximum(maxima[:, :half], maxima[:, half : 2 * half])
        if width % 2:
            folded[:, 0] = xp.maximum(folded[:, 0], maxima[:, -1])
        maxima = folded
    return maxima
