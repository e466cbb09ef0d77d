"""Beam search whose bookkeeping stays on the GPU; the host learns who is done.

Shapes: B sentences, K beams, V vocabulary, n hypotheses kept of a sentence.
"""

from __future__ import annotations

from types import ModuleType

import numpy as np

from minitransformer.cuda import device
from minitransformer.cuda.device import THREADS, WARP
from minitransformer.engine.backend import Array, array_module, to_host
from minitransformer.settings.config import BOS_ID, EOS_ID, PAD_ID
from minitransformer.translation.beam_search import Hypothesis, length_penalty
from minitransformer.translation.steppers import Stepper

# The batch goes on with the sentences left when they are no more than this share.
MOST_LEFT = 0.75


class FinishedHypotheses:
    """The n best hypotheses of each sentence that have ended: where, and how good.

    Shapes: counts [B], the others [B, n]
    """

    def __init__(self, xp: ModuleType, batch: int, nbest: int) -> None:
        shape = batch, nbest
        self.scores, self.log_probs = (xp.zeros(shape, np.float64) for _ in range(2))
        self.steps, self.beams = (xp.zeros(shape, np.int32) for _ in range(2))
        self.counts = xp.zeros(batch, np.int32)
        self.arrays = (
            *(self.scores, self.log_probs, self.steps, self.beams, self.counts),
            nbest,
        )


def beam_search(
    stepper: Stepper,
    max_lengths: np.ndarray,
    beam_size: int,
    alpha: float,
    nbest: int = 1,
) -> list[list[Hypothesis]]:
    """Find what `translation.beam_search.beam_search` finds, with all beams on the GPU.

    The first step computes one beam of each sentence, all others K.

    Shapes: max_lengths [B]
    """
    penalties = length_penalty(np.arange(max_lengths.max() + 1), alpha)
    gpu = device.current()
    xp = gpu.xp
    batch, count, beams = len(max_lengths), 2 * beam_size, 1
    limits, divisors = xp.asarray(max_lengths, np.int32), xp.asarray(penalties)
    finished = FinishedHypotheses(xp, batch, nbest)
    kept = np.arange(batch)
    sentences, done = xp.arange(batch, dtype=np.int32), xp.zeros(batch, bool)
    log_probs = xp.zeros((batch, 1), np.float64)
    tokens = xp.full(batch, BOS_ID, np.int32)
    history: list[tuple[np.ndarray, Array, Array]] = []
    while True:
        blocks = list(stepper.step(tokens.reshape(-1)))
        logits = blocks[0] if len(blocks) == 1 else xp.concatenate(blocks, axis=1)
        found = _best_tokens(xp.ascontiguousarray(logits), count)
        shape = len(kept), beam_size
        following = xp.empty(shape, np.float64)
        origins, rows, chosen = (xp.empty(shape, np.int32) for _ in range(3))
        gpu.launch(
            "beam_step",
            np.float32,
            len(kept),
            WARP,
            *(
                following,
                origins,
                rows,
                chosen,
                done,
                *finished.arrays,
                log_probs,
                *found,
            ),
            *(sentences, limits, divisors),
            *(beams, beam_size, count, len(history) + 1, EOS_ID),
        )
        history.append((kept, origins, chosen))
        log_probs, tokens, beams = following, chosen, beam_size
        left = np.flatnonzero(~to_host(done))  # the only wait
        if not len(left):
            return _hypotheses(history, finished, batch)
        if len(left) <= len(kept) * MOST_LEFT:
            chosen_rows = xp.asarray(left)
            kept, sentences, done = (
                kept[left],
                sentences[chosen_rows],
                done[chosen_rows],
            )
            log_probs, tokens, rows = (
                x[chosen_rows] for x in (log_probs, tokens, rows)
            )
        stepper.select(rows.reshape(-1))


def _best_tokens(logits: Array, count: int) -> tuple[Array, Array, Array]:
    """The best tokens of each row but padding and BOS, and log(sum(exp(logits))).

    Shapes: logits [N, V] -> values, tokens [N, count], totals [N]
    """
    xp, (rows, vocab_size) = array_module(logits), logits.shape
    values = xp.empty((rows, count), np.float32)
    tokens, totals = xp.empty(values.shape, np.int32), xp.empty(rows, np.float32)
    device.current().launch(
        "best_tokens",
        logits.dtype,
        rows,
        THREADS,
        *(values, tokens, totals, logits, count, PAD_ID, BOS_ID, vocab_size),
    )
    return values, tokens, totals


def _hypotheses(
    history: list[tuple[np.ndarray, Array, Array]],
    finished: FinishedHypotheses,
    batch: int,
) -> list[list[Hypothesis]]:
    """Follow each finished hypothesis back from its last token."""
    steps = [(kept, to_host(o), to_host(c)) for kept, o, c in history]
    scores, log_probs, last, beams = (to_host(a) for a in finished.arrays[:4])
    counts = to_host(finished.counts)
    found: list[list[Hypothesis]] = []
    for sentence in range(batch):
        found.append([])
        for n in range(min(counts[sentence], scores.shape[1])):
            tokens, beam = [], beams[sentence, n]
            for kept, origins, chosen in reversed(steps[: last[sentence, n]]):
                row = np.searchsorted(kept, sentence)
                tokens.append(int(chosen[row, beam]))
                beam = origins[row, beam]
            score, log_prob = float(scores[sentence, n]), float(log_probs[sentence, n])
            found[-1].append(Hypothesis(tuple(tokens[::-1]), score, log_prob))
    return found
