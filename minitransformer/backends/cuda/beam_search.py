"""Beam search on a GPU (section 6.1): one launch computes a step, decoder and all.

The host queues a step while it reads, of the one before, which sentences are done. The
steps themselves are in `search_steps.py`.

Shapes: B sentences, K beams, n hypotheses
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from minitransformer.backends.cuda import device
from minitransformer.backends.cuda.search_steps import (
    SearchSteps,
    Shape,
    rounded_up,
    search_steps,
)
from minitransformer.engine.backend import to_host
from minitransformer.model.kv_cache import DecoderState
from minitransformer.translation.beam_search import (
    NOT_FINITE,
    BeamSearch,
    Hypothesis,
)
from minitransformer.translation.incremental_decoding import (
    CachedDecoder,
    IncrementalDecoder,
)


def start_search(
    decoder: IncrementalDecoder,
    sentences: np.ndarray,
    max_lengths: np.ndarray,
    *,
    beam_size: int,
    alpha: float,
    nbest: int,
) -> GraphSearch | BeamSearch:
    """Return the search for the translations of a batch, as `BeamSearch` is made.

    Decoders that are constrained, or of several models, are asked for their weights.
    """
    if not isinstance(decoder, CachedDecoder):
        return BeamSearch(
            decoder,
            sentences,
            max_lengths,
            beam_size=beam_size,
            alpha=alpha,
            nbest=nbest,
        )
    device.current().use_recordable_stream()
    shape = Shape(
        sentences=len(sentences),
        beams=beam_size,
        nbest=nbest,
        capacity=int(max_lengths.max()),
        source=decoder.state.source_mask.shape[-1],
    )
    steps = search_steps(decoder.model, shape.rounded_up())
    return GraphSearch(steps, decoder.state, sentences, max_lengths, alpha)


class GraphSearch:
    """A `BeamSearch` of a batch to its end, in one step: no other search may join.

    Shapes: sentences, _max_lengths [B]
    """

    length = 0

    def __init__(
        self,
        steps: SearchSteps,
        state: DecoderState,
        sentences: np.ndarray,
        max_lengths: np.ndarray,
        alpha: float,
    ) -> None:
        self.sentences, self._steps, self._state = sentences, steps, state
        self._max_lengths, self._alpha = max_lengths, alpha

    def step(self) -> list[tuple[int, list[Hypothesis]]]:
        numbers, self.sentences = self.sentences.tolist(), self.sentences[:0]
        self._steps.start(self._state, self._max_lengths, self._alpha)
        num_steps = self._run_steps()
        found = hypotheses(self._steps.arrays, len(numbers), num_steps)
        return list(zip(numbers, found, strict=True))

    def _run_steps(self) -> int:
        """Run steps until all sentences are done. Return how many were run."""
        steps, last = self._steps, int(self._max_lengths.max())
        rows = np.arange(len(self._max_lengths))  # the sentence of each row
        size, done = len(steps.arrays.done), np.zeros(len(rows), bool)
        pending = deque[tuple[Any, np.ndarray, np.ndarray]]()
        for step in range(1, last + 1):
            # Queue a step. The host waits for the step before, while the GPU computes
            # this one.
            steps.run(size)
            pending.append((*steps.flags(step, len(rows)), rows))
            if len(pending) == 1 and step < last:
                continue
            copied, flags, of_rows = pending.popleft()
            copied.synchronize()
            done[of_rows] |= flags
            if done.all():
                return step

            # Once half of the sentences are done, the others move together. A row
            # without a sentence is that of one that is done.
            left = np.flatnonzero(~done[rows])
            if (smaller := rounded_up(len(left))) <= size / 2:
                finished = np.flatnonzero(done[rows])[0]
                padding = np.full(smaller - len(left), finished)
                steps.keep(np.concatenate([left, padding]), step)
                size, rows = smaller, rows[left]
        return last


def hypotheses(arrays: Any, count: int, num_steps: int) -> list[list[Hypothesis]]:
    """Collect the finished hypotheses of the first `count` sentences, best first.

    Raises: ValueError if a sentence has none, as a logit was not finite.
    """
    counts = to_host(arrays.end_counts[:count])
    if not counts.all():
        raise ValueError(NOT_FINITE)
    scores = to_host(arrays.end_scores[:count])
    log_probs = to_host(arrays.end_log_probs[:count])
    used = np.arange(scores.shape[1]) < counts[:, None]  # [B, n]
    lengths = np.where(used, to_host(arrays.end_steps[:count]), 0)
    beams = np.where(used, to_host(arrays.end_beams[:count]), 0)

    # Follow all hypotheses at once, from their last token to the first.
    origins = to_host(arrays.all_origins[:num_steps, :count])
    tokens = to_host(arrays.all_tokens[:num_steps, :count])
    sentence = np.arange(count)[:, None]
    paths = np.zeros((*used.shape, num_steps), np.int32)
    for step in reversed(range(num_steps)):
        paths[..., step] = tokens[step, sentence, beams]
        beams = np.where(step < lengths, origins[step, sentence, beams], beams)
    return [
        [
            Hypothesis(
                tokens=tuple(paths[b, n, : lengths[b, n]].tolist()),
                score=float(scores[b, n]),
                log_prob=float(log_probs[b, n]),
            )
            for n in np.flatnonzero(used[b])
        ]
        for b in range(count)
    ]
