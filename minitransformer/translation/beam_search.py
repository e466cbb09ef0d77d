"""Beam search (section 6.1).

The search knows nothing of the model: it feeds the newest token of each beam to an
`IncrementalDecoder` and reads the weights of the next one.

Shapes: B sentences, K beams, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from minitransformer.engine.backend import Array, array_module, to_host
from minitransformer.settings.config import BOS_ID, EOS_ID, PAD_ID
from minitransformer.translation.incremental_decoding import (
    IncrementalDecoder,
    TokenWeights,
)

NOT_FINITE = "expected a model whose outputs are finite: this one's training diverged"


# The lowest log-probability of a beam, and the least weight of a candidate.
LOWEST = np.finfo(np.float64).min
LEAST = np.finfo(np.float64).tiny

# A word alignment: pairs of a source word and a target word, counted from 0.
Links: TypeAlias = tuple[tuple[int, int], ...]

# Each sentence of a line, the white space before its translation, and this.
Parts: TypeAlias = "tuple[tuple[str, str, Hypothesis], ...]"

# Each word with its log-probability, the sum over its tokens, or None if copied.
Words: TypeAlias = tuple[tuple[str, float | None], ...]


@dataclass(frozen=True)
class Hypothesis:
    """One translation: its tokens without EOS, and how good the model finds it.

    `log_prob` is the sum of the log-probabilities of the tokens and, unless the search
    was cut off, EOS; `score` is log_prob / ((5 + n) / 6)^alpha for n of these.
    A `Translator` adds the other fields: the detokenised `text`, its word `alignment`,
    and how sure the model is of each of its `words`. `mean_log_prob` is the mean over
    the tokens, and `confidence` is the share of validation sentences of which the model
    was less sure. Both describe the least sure sentence of a line, whose sentences are
    the `parts`. The slots, terms and numbers of the source that the text lacks are
    `missing`.

    Units: nats
    """

    tokens: tuple[int, ...]
    score: float
    log_prob: float
    alignment: Links = ()
    text: str = ""
    words: Words = ()
    mean_log_prob: float = 0.0
    confidence: float | None = None
    missing: tuple[str, ...] = ()
    parts: Parts = ()


def length_penalty(length: Array, alpha: float) -> Array:
    """Return ((5 + length) / 6)^alpha (Wu et al., 2016, equation 14).

    Elsewhere: fairseq and Marian divide by length^p.
    """
    return ((5.0 + length) / 6.0) ** alpha


class BeamSearch:
    """The search for the `nbest` best hypotheses of each sentence.

    At every step, the 2 K best candidates are the best extensions of a sentence's K
    live beams by one token. Those of the first K that end are finished hypotheses; the
    best K that do not end are the next live beams. The search for a sentence ends, and
    the sentence leaves the batch, when K hypotheses are finished, when no live beam can
    still beat the nbest-th finished one, or when its beams have `max_lengths` tokens,
    EOS counted. If none has finished by then, the live beams are the result; if fewer
    than `nbest` have, these alone are. With K = 1 this is greedy search. Padding, the
    unknown token and BOS are never produced.

    `sentences` has the numbers of those whose search has not ended, and `length` counts
    the tokens of their beams.

    Elsewhere: tensor2tensor lets any of the 2 K candidates finish, so more than K may.

    Shapes: sentences, _max_lengths [B]
    """

    def __init__(
        self,
        decoder: IncrementalDecoder,
        sentences: np.ndarray,
        max_lengths: np.ndarray,
        *,
        beam_size: int,
        alpha: float,
        nbest: int,
    ) -> None:
        self.sentences = sentences
        self.length = 0
        self._decoder = decoder
        self._beam_size = beam_size
        self._alpha = alpha
        self._finished = [
            FinishedHypotheses(beam_size, alpha, nbest) for _ in sentences
        ]
        self._max_lengths = np.asarray(max_lengths)
        self._tokens = np.full((len(sentences), 1, 1), BOS_ID)  # [B, K, 1 + length]
        self._log_probs = np.zeros((len(sentences), 1))  # [B, K]; K = 1 at first

    def step(self) -> list[tuple[int, list[Hypothesis]]]:
        """Extend the beams by a token; return sentences that are done, best first."""
        # Of the best extensions, some end, and the others are the next live beams.
        self.length += 1
        beams = self._log_probs.shape[1]
        weights = self._decoder.step(self._tokens[:, :, -1].reshape(-1))
        candidates = best_candidates(weights, self._log_probs, 2 * self._beam_size)
        self._finish(candidates)
        origins = self._extend(candidates)
        rows = np.arange(0, len(origins) * beams, beams)[:, None] + origins

        # Sentences that are done leave the batch.
        ended = []
        done = self._done()
        if done.any():
            numbers = self.sentences.tolist()
            ended = [(numbers[b], self._finished[b].best) for b in np.flatnonzero(done)]
            left = np.flatnonzero(~done)
            rows = rows[left]
            self._tokens = self._tokens[left]
            self._log_probs = self._log_probs[left]
            self.sentences = self.sentences[left]
            self._max_lengths = self._max_lengths[left]
            self._finished = [self._finished[b] for b in left]
        if len(rows):
            self._decoder.select(rows.reshape(-1))
        return ended

    def _finish(self, candidates: Candidates) -> None:
        """Make finished hypotheses of those among the first K candidates that end."""
        log_probs, origins, tokens = candidates
        ends = (tokens == EOS_ID) & np.isfinite(log_probs)
        for b, k in zip(*ends[:, : self._beam_size].nonzero(), strict=True):
            self._keep(b, origins[b, k], log_probs[b, k])

    def _keep(self, sentence: Any, beam: Any, log_prob: float) -> None:
        """Make a finished hypothesis of the beam at two indices."""
        tokens = self._tokens[sentence, beam, 1:]
        self._finished[sentence].add(tokens, log_prob, self.length)

    def _extend(self, candidates: Candidates) -> np.ndarray:
        """Make live beams of the K best candidates that do not end.

        Returns: the beams that they extend [B, K]
        """
        log_probs, origins, tokens = candidates
        # In their order, which is that of their log-probabilities.
        order = (tokens == EOS_ID).argsort(kind="stable")[:, : self._beam_size]
        sentence = np.arange(len(order))[:, None]
        kept = sentence, order
        extended = origins[kept]
        histories = self._tokens[sentence, extended]
        self._tokens = np.concatenate([histories, tokens[kept][:, :, None]], 2)
        self._log_probs = log_probs[kept]
        return extended

    def _done(self) -> np.ndarray:
        """Return a mask of the sentences whose search ends with this step [B].

        If a sentence has reached its length without a finished hypothesis, its live
        beams are the result.
        """
        finished = self._finished
        log_probs = self._log_probs
        at_limit = self._max_lengths == self.length
        for b in at_limit.nonzero()[0]:
            if not finished[b].count:
                for k in np.flatnonzero(np.isfinite(log_probs[b])):
                    self._keep(b, k, log_probs[b, k])
        # Log-probabilities only fall, so no descendant of a beam can score more.
        reachable = log_probs[:, 0] / length_penalty(self._max_lengths, self._alpha)
        to_beat = np.array([hypotheses.to_beat for hypotheses in finished])
        return at_limit | (to_beat >= reachable) | ~np.isfinite(log_probs[:, 0])

    def join(self, other: BeamSearch) -> None:
        """Go on with the sentences of another search of the same `length`, too."""
        self._decoder.join(other._decoder)
        self._finished += other._finished
        self.sentences = np.concatenate([self.sentences, other.sentences])
        self._max_lengths = np.concatenate([self._max_lengths, other._max_lengths])
        self._tokens = np.concatenate([self._tokens, other._tokens])
        self._log_probs = np.concatenate([self._log_probs, other._log_probs])


class FinishedHypotheses:
    """The `nbest` best finished hypotheses of one sentence, best first."""

    def __init__(self, beam_size: int, alpha: float, nbest: int) -> None:
        self._beam_size = beam_size
        self._alpha = alpha
        self._nbest = nbest
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


# The best candidates of a step


class Candidates(NamedTuple):
    """The best candidates of each sentence, best first: origins are the extended beams.

    Shapes: log_probs, origins, tokens [B, count]
    """

    log_probs: np.ndarray
    origins: np.ndarray
    tokens: np.ndarray


def best_candidates(
    chunks: Iterable[TokenWeights], log_probs: np.ndarray, count: int
) -> Candidates:
    """Extend each beam by each token; return each sentence's `count` best, best first.

    Candidates of -inf fill up the rest. Ties go to the lower beam, then to the lower
    token. A weight of 0 excludes a token. Raises: ValueError if a sum is NaN, inf
    or 0.

    Example: two beams have log-probabilities -1 and -2, and the log-probabilities of
    the tokens (7, 8) are (-0.1, -2.5) after the first and (-0.7, -0.7) after the
    second. The three best candidates have log-probabilities -1.1, -2.7 and -2.7; they
    extend the beams 0, 1 and 1 by the tokens 7, 7 and 8.

    The chunks have the weights of B K beams; a sentence's beams are in one chunk.

    Shapes: log_probs [B, K] -> log_probs, origins, tokens [B, count]
    """
    best = list[Candidates]()
    first = 0
    for weights in chunks:
        last = first + len(weights.sums) // log_probs.shape[1]
        best.append(_best_of_chunk(weights, log_probs[first:last], count))
        first = last
        del weights  # the next chunk takes their memory, which is in the cache
    return Candidates._make(map(np.concatenate, zip(*best, strict=True)))


def _best_of_chunk(
    weights: TokenWeights, log_probs: np.ndarray, count: int
) -> Candidates:
    """Find the best candidates without sorting all of them.

    At least `count` candidates reach the `count`-th largest of the maxima of all groups
    of all beams. Only groups whose maximum reaches it are searched. Example: one beam
    has the weights (5, 1, 4, 3). For a count of 2 and the groups {0, 2} and {1, 3}, the
    maxima are 5 and 3. The tokens 0, 2 and 3 reach 3; the two best are among them.
    """
    values = weights.values
    xp = array_module(values)
    batch, beams = log_probs.shape
    size = values.shape[1]
    log_sums = np.log(to_host(weights.sums), dtype=np.float64)
    if not np.isfinite(log_sums).all():
        raise ValueError(NOT_FINITE)
    offsets = log_probs.ravel() - log_sums

    # Probabilities are compared as multiples of that of a sentence's best beam.
    highest = np.maximum(log_probs.max(axis=1), LOWEST)  # there may be no beam
    factors = np.exp(offsets - highest.repeat(beams))[:, None]  # [B K, 1]

    # The bound of a sentence: its `count`-th largest maximum.
    maxima = to_host(weights.maxima) * factors  # [B K, G]
    bounds = np.full(batch, LEAST)
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
    row = row[i]
    log_prob = np.log(searched[i, place], dtype=np.float64) + offsets[row]
    return _ranked(log_prob, row, tokens[i, place], beams, (batch, count))


def _ranked(
    log_prob: np.ndarray,
    row: np.ndarray,
    token: np.ndarray,
    beams: int,
    shape: tuple[int, int],
) -> Candidates:
    """Return the best of some candidates for each sentence; -inf fills up the rest.

    Shapes: log_prob, row, token [any] -> log_probs, origins, tokens [B, count]
    """
    # Sort by sentence, then from the best candidate on, and number them.
    order = np.lexsort((token, row, -log_prob, row // beams))
    sentence, origin = np.divmod(row[order], beams)
    rank = np.arange(len(row)) - np.searchsorted(sentence, sentence)
    best = rank < shape[1]

    ranked = Candidates(
        np.full(shape, -np.inf), np.zeros(shape, int), np.zeros(shape, int)
    )
    place = sentence[best], rank[best]
    columns = log_prob[order], origin, token[order]
    for array, column in zip(ranked, columns, strict=True):
        array[place] = column[best]
    return ranked


def _places(mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows and columns of True elements, faster than `np.nonzero`."""
    [places] = mask.ravel().nonzero()
    rows, columns = np.divmod(places, mask.shape[1])
    return rows, columns
