"""Beam search on a GPU (section 6.1); the host only learns which sentences are done.

Shapes: B sentences, B' of them left, K beams, V vocabulary, n hypotheses of a sentence.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from minitransformer.backends.cuda import device
from minitransformer.backends.cuda.device import WARP
from minitransformer.backends.cuda.incremental_decoding import GraphDecoder
from minitransformer.engine.backend import Array, array_module, to_host
from minitransformer.settings.config import BOS_ID, EOS_ID
from minitransformer.translation.beam_search import (
    NOT_FINITE,
    Hypothesis,
    length_penalty,
)
from minitransformer.translation.incremental_decoding import IncrementalDecoder

# Sentences that are done leave the batch when at most this share of it is left.
MAX_SHARE_LEFT = 0.75


class FinishedHypotheses(NamedTuple):
    """The n best finished hypotheses of each sentence, on the GPU.

    The last token before EOS of a hypothesis was chosen at step `steps` for beam
    `beams`. `counts` counts all that have finished.

    Shapes: scores, log_probs, steps, beams [B, n], counts [B]
    """

    scores: Array
    log_probs: Array
    steps: Array
    beams: Array
    counts: Array


class WholeSearch:
    """A `beam_search` of a batch to its end, in one step: no other search may join."""

    length = 0

    def __init__(
        self, decoder: IncrementalDecoder, sentences: np.ndarray, *settings: Any
    ) -> None:
        self.sentences, self._decoder, self._settings = sentences, decoder, settings

    def step(self) -> list[tuple[int, list[Hypothesis]]]:
        found = beam_search(self._decoder, *self._settings)
        numbers, self.sentences = self.sentences.tolist(), self.sentences[:0]
        return list(zip(numbers, found, strict=True))


def beam_search(
    decoder: IncrementalDecoder,
    max_lengths: np.ndarray,
    beam_size: int,
    alpha: float,
    nbest: int,
) -> list[list[Hypothesis]]:
    """Find what a `translation.beam_search.BeamSearch` finds, with all on the GPU.

    Shapes: max_lengths [B]
    """
    gpu = device.current()
    xp, batch, count = gpu.xp, len(max_lengths), 2 * beam_size
    penalties = length_penalty(np.arange(max_lengths.max() + 1), alpha)
    constants = xp.asarray(max_lengths, np.int32), xp.asarray(penalties)
    scores, places = (xp.zeros((2, batch, nbest), t) for t in (np.float64, np.int32))
    finished = FinishedHypotheses._make((*scores, *places, xp.zeros(batch, np.int32)))
    left = np.arange(batch)  # the sentences in the batch, [B']
    sentences, done = xp.arange(batch, dtype=np.int32), xp.zeros(batch, bool)  # [B']
    beams = 1  # in the first step, then K
    log_probs = xp.zeros((batch, beams), np.float64)
    tokens = xp.full((batch, beams), BOS_ID, np.int32)
    history: list[tuple[np.ndarray, Array, Array]] = []  # left, origins, tokens by step
    while True:
        best = log_probs, *_best_tokens(decoder, tokens.reshape(-1), count)
        log_probs = xp.empty((len(left), beam_size), np.float64)
        origins, rows, tokens = (xp.empty(log_probs.shape, np.int32) for _ in range(3))
        results = log_probs, origins, rows, tokens, done, *finished, nbest
        numbers = beams, beam_size, count, len(history) + 1, EOS_ID
        kernel_args = *results, *best, sentences, *constants, *numbers
        gpu.launch("beam_search_step", np.float32, len(left), *kernel_args, block=WARP)
        history.append((left, origins, tokens))
        beams = beam_size
        going_on = np.flatnonzero(~to_host(done))  # the only wait for the GPU
        if not len(going_on):
            return _hypotheses(history, finished)
        if len(going_on) <= len(left) * MAX_SHARE_LEFT:
            left, chosen = left[going_on], xp.asarray(going_on)
            sentences, done = sentences[chosen], done[chosen]
            log_probs, tokens, rows = (x[chosen] for x in (log_probs, tokens, rows))
        decoder.select(rows.reshape(-1))


def _best_tokens(
    decoder: IncrementalDecoder, tokens: Array, count: int
) -> tuple[Array, Array, Array]:
    """Do a step; return each beam's best tokens as `_top_tokens` does."""
    if isinstance(decoder, GraphDecoder):
        return _top_tokens(decoder.logits(tokens), count)
    weights = list(decoder.step(tokens))
    xp = array_module(weights[0].values)
    values, sums = (xp.concatenate([w[n] for w in weights]) for n in (0, 1))
    best, ids, _ = _top_tokens(xp.log(values), count)
    return best, ids, xp.log(sums)


def _top_tokens(logits: Array, count: int) -> tuple[Array, Array, Array]:
    """Return each row's best logits, their tokens, and log(sum(exp(logits))).

    Padding, the unknown token and BOS, whose ids are below EOS_ID, are never the best.

    Shapes: logits [N, V] -> best, tokens [N, count], sums [N]
    """
    xp, (rows, vocab_size) = array_module(logits), logits.shape
    logits = xp.ascontiguousarray(logits)
    values = xp.empty((rows, count), np.float32)
    tokens, log_totals = xp.empty(values.shape, np.int32), xp.empty(rows, np.float32)
    kernel_args = values, tokens, log_totals, logits, count, EOS_ID, vocab_size
    device.current().launch("top_tokens", logits.dtype, rows, *kernel_args)
    return values, tokens, log_totals


def _hypotheses(
    history: list[tuple[np.ndarray, Array, Array]], finished: FinishedHypotheses
) -> list[list[Hypothesis]]:
    """Collect the tokens of each finished hypothesis, from the last to the first."""
    path = [tuple(map(to_host, step)) for step in history]
    scores, log_probs, steps, beams, counts = map(to_host, finished)
    if not counts.all():  # the kernel keeps no hypothesis where a logit is not finite
        raise ValueError(NOT_FINITE)
    results: list[list[Hypothesis]] = []
    for sentence, count in enumerate(counts):
        results.append([])
        for n in range(min(count, scores.shape[1])):
            hypothesis, beam = [], beams[sentence, n]
            for left, origins, tokens in reversed(path[: steps[sentence, n]]):
                row = np.searchsorted(left, sentence)
                hypothesis.append(int(tokens[row, beam]))
                beam = origins[row, beam]
            score, log_prob = float(scores[sentence, n]), float(log_probs[sentence, n])
            results[-1].append(Hypothesis(tuple(hypothesis[::-1]), score, log_prob))
    return results
