"""Beam search (section 6.1).

The search knows nothing of the model: it feeds the newest token of each beam to an
`IncrementalDecoder` and reads the logits of the next one.

Shapes: B sentences, K beams, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from minitransformer.engine.backend import Array
from minitransformer.settings.config import BOS_ID, EOS_ID
from minitransformer.translation.candidates import best_candidates, exponentials
from minitransformer.translation.incremental_decoding import (
    CachedDecoder,
    IncrementalDecoder,
)


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
        newest = tokens[:, :, -1].reshape(-1)
        weights = (
            decoder.weights(newest)
            if isinstance(decoder, CachedDecoder)
            else map(exponentials, decoder.step(newest))
        )
        candidates, origins, chosen = best_candidates(weights, log_probs, 2 * beam_size)
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
