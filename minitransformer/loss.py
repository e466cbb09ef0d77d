"""The training loss (section 5.4) and the figures of a validation (Table 3, PPL)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from minitransformer import ops
from minitransformer.autograd import Tensor, no_grad
from minitransformer.backend import Array, RandomStream, array_module, widened
from minitransformer.config import PAD_ID
from minitransformer.transformer import Transformer


def training_loss(
    model: Transformer,
    source: Array,
    target: Array,
    label_smoothing: float,
    rng: RandomStream | None,
) -> Tensor:
    """Label-smoothed cross-entropy, summed over the target tokens.

    Shapes: source [B, S], target [B, T + 1], from BOS to EOS and padded -> scalar
    Units: nats; divide by the tokens of the whole update for the paper's loss
    """
    outputs = model(source, target[:, :-1], rng)
    return ops.projected_cross_entropy(
        outputs,
        model.embedding.table,
        target[:, 1:],
        label_smoothing=label_smoothing,
        padding_id=PAD_ID,
    )


@dataclass
class TokenStatistics:
    """Sums over target tokens: negative log-likelihood in nats, and right guesses."""

    nll: float = 0.0
    correct: int = 0
    tokens: int = 0

    @property
    def loss(self) -> float:
        """Mean negative log-likelihood. Units: nats a token"""
        return self.nll / self.tokens

    @property
    def perplexity(self) -> float:
        """e to the loss, a word piece as in Table 3, at most e^700."""
        return math.exp(min(self.loss, 700.0))

    @property
    def accuracy(self) -> float:
        return self.correct / self.tokens

    def __iadd__(self, other: TokenStatistics) -> TokenStatistics:
        self.nll += other.nll
        self.correct += other.correct
        self.tokens += other.tokens
        return self


def token_log_probs(
    model: Transformer, source: Array, target: Array
) -> tuple[Array, Array]:
    """Log-probability of each target token given those before, and if it is the best.

    Shapes: source [B, S], target [B, T + 1] -> [B, T] float, zero at padding, and
    [B, T] bool
    Units: nats
    """
    xp = array_module(source)
    expected = target[:, 1:]
    with no_grad():
        outputs = model(source, target[:, :-1]).data
        dtype = np.promote_types(outputs.dtype, np.float32)
        log_probs = xp.zeros(expected.shape, dtype=dtype)
        best = xp.zeros(expected.shape, dtype=bool)
        used = expected != PAD_ID
        rows, ids = outputs[used], expected[used]
        found, hits = xp.empty(len(ids), dtype=dtype), []
        chunk = max(ops.LOGITS_PER_CHUNK // model.config.vocab_size, 1)
        for start in range(0, len(ids), chunk):
            part = slice(start, start + chunk)
            logits = widened(model.logits(Tensor(rows[part])).data)
            hits.append(logits.argmax(axis=-1) == ids[part])
            logits -= logits.max(axis=-1, keepdims=True)
            picked = logits[xp.arange(len(logits)), ids[part]]
            found[part] = picked - xp.log(xp.exp(logits, out=logits).sum(axis=-1))
        log_probs[used] = found
        best[used] = xp.concatenate(hits)
    return log_probs, best


def evaluate(model: Transformer, source: Array, target: Array) -> TokenStatistics:
    """Sum up a batch without dropout or smoothing. Shapes: as `token_log_probs`."""
    log_probs, best = token_log_probs(model, source, target)
    return TokenStatistics(
        nll=-float(log_probs.sum(dtype="float64")),
        correct=int(best.sum()),
        tokens=int((target[:, 1:] != PAD_ID).sum()),
    )
