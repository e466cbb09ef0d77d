"""Beam search (section 6.1).

The search knows nothing of the model: it feeds the newest token of each beam to an
`IncrementalDecoder` and reads the weights of the next one.

Shapes: B sentences, K beams, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from minitransformer.engine.backend import Array
from minitransformer.settings.config import BOS_ID, EOS_ID
from minitransformer.translation.candidates import Candidates, best_candidates
from minitransformer.translation.incremental_decoding import IncrementalDecoder


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
    the tokens of their beams. A decoder with a shortlist knows tokens by their
    positions in it.

    Elsewhere: tensor2tensor lets any of the 2 K candidates finish, so more than K may.

    Shapes: sentences, max_lengths [B], shortlist of token ids [any]
    """

    def __init__(
        self,
        decoder: IncrementalDecoder,
        sentences: np.ndarray,
        max_lengths: np.ndarray,
        beam_size: int,
        alpha: float,
        nbest: int,
        shortlist: np.ndarray | None = None,
    ) -> None:
        self.sentences, self.length = sentences, 0
        self._decoder, self._beam_size, self._alpha = decoder, beam_size, alpha
        self._shortlist = shortlist
        self._finished = [
            FinishedHypotheses(beam_size, alpha, nbest) for _ in sentences
        ]
        self._max_lengths = np.asarray(max_lengths)
        self._tokens = np.full((len(sentences), 1, 1), BOS_ID)  # [B, K, 1 + length]
        self._log_probs = np.zeros((len(sentences), 1))  # [B, K]; K = 1 at first

    def step(self) -> list[tuple[int, list[Hypothesis]]]:
        """Extend the beams by a token; return sentences that are done, best first."""
        self.length += 1
        beams = self._log_probs.shape[1]
        weights = self._decoder.step(self._tokens[:, :, -1].reshape(-1))
        candidates = best_candidates(weights, self._log_probs, 2 * self._beam_size)
        self._finish(candidates)
        origins = self._extend(candidates)
        done = self._done()
        numbers = self.sentences.tolist()
        ended = [(numbers[b], self._finished[b].best) for b in np.flatnonzero(done)]
        left = np.flatnonzero(~done)
        rows = left[:, None] * beams + origins[left]
        self._tokens, self._log_probs = self._tokens[left], self._log_probs[left]
        self.sentences = self.sentences[left]
        self._max_lengths = self._max_lengths[left]
        self._finished = [self._finished[b] for b in left]
        if len(left):
            self._decoder.select(rows.reshape(-1))
        return ended

    def _finish(self, candidates: Candidates) -> None:
        """Keep as finished hypotheses those of the first K candidates that end."""
        log_probs, origins, tokens = candidates
        ends = (tokens == EOS_ID) & np.isfinite(log_probs)
        for b, k in zip(*np.nonzero(ends[:, : self._beam_size]), strict=True):
            self._keep(b, origins[b, k], log_probs[b, k])

    def _keep(self, sentence: Any, beam: Any, log_prob: float) -> None:
        """Make a finished hypothesis of the beam at two indices."""
        tokens = self._tokens[sentence, beam, 1:]
        tokens = tokens if self._shortlist is None else self._shortlist[tokens]
        self._finished[sentence].add(tokens, log_prob, self.length)

    def _extend(self, candidates: Candidates) -> np.ndarray:
        """Make live beams of the K best candidates that do not end.

        Returns: the beams that they extend [B, K]
        """
        log_probs, origins, tokens = candidates
        live = np.where(tokens == EOS_ID, -np.inf, log_probs)
        order = np.argsort(-live, kind="stable")[:, : self._beam_size]
        sentence = np.arange(len(live))[:, None]
        kept = sentence, order
        extended = self._tokens[sentence, origins[kept]]
        self._tokens = np.concatenate([extended, tokens[kept][:, :, None]], 2)
        self._log_probs = live[kept]
        return origins[kept]

    def _done(self) -> np.ndarray:
        """Return which sentences end here [B].

        If one has reached its length and nothing of it has finished, its live beams are
        the result.
        """
        finished, log_probs = self._finished, self._log_probs
        at_limit = self._max_lengths == self.length
        for b in np.flatnonzero(at_limit):
            if not finished[b].count:
                for k in np.flatnonzero(np.isfinite(log_probs[b])):
                    self._keep(b, k, log_probs[b, k])
        # Log-probabilities only fall, so no descendant of a beam can score more.
        reachable = log_probs[:, 0] / length_penalty(self._max_lengths, self._alpha)
        to_beat = np.array([hypotheses.to_beat for hypotheses in finished])
        return at_limit | (to_beat >= reachable) | ~np.isfinite(log_probs[:, 0])

    def may_join(self, other: BeamSearch) -> bool:
        """Whether beams are equally long, and tokens the same: shortlists differ."""
        return self.length == other.length and self._shortlist is other._shortlist

    def join(self, other: BeamSearch) -> None:
        """Go on with the sentences of another search, too, which `may_join`."""
        self._decoder.join(other._decoder)
        self._finished += other._finished
        self.sentences = np.concatenate([self.sentences, other.sentences])
        self._max_lengths = np.concatenate([self._max_lengths, other._max_lengths])
        self._tokens = np.concatenate([self._tokens, other._tokens])
        self._log_probs = np.concatenate([self._log_probs, other._log_probs])


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
