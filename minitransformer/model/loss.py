"""The training loss (section 5.4) and the log-probabilities of given translations."""

from __future__ import annotations

import numpy as np

from minitransformer.engine import ops
from minitransformer.engine.autograd import Tensor, no_grad
from minitransformer.engine.backend import Array, array_module, as_float32, fused_kernel
from minitransformer.engine.random_streams import RandomStream
from minitransformer.model.transformer import Transformer
from minitransformer.settings.config import PAD_ID


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


def token_log_probs(
    model: Transformer, source: Array, target: Array
) -> tuple[Array, Array]:
    """Score each target token given those before it, without dropout.

    Returns: the log-probability of each token, and whether it is the first of the most
    probable tokens. At padding, they are 0 and False.

    Shapes: source [B, S], target [B, T + 1], from BOS to EOS and padded
    -> [B, T] float, [B, T] bool
    Units: nats
    """
    xp = array_module(source)
    expected = target[:, 1:]
    with no_grad():
        outputs = model(source, target[:, :-1]).data
        dtype = np.promote_types(outputs.dtype, np.float32)
        log_probs, is_best = (xp.zeros(expected.shape, t) for t in (dtype, bool))
        used = expected != PAD_ID
        rows, ids = outputs[used], expected[used]  # [N, D], [N]
        row_log_probs, row_is_best = (xp.empty(len(ids), t) for t in (dtype, bool))
        most = fused_kernel("logits_to_score", (outputs,), lambda: ops.LOGITS_PER_CHUNK)
        chunk = max(most() // model.config.vocab_size, 1)
        for start in range(0, len(ids), chunk):
            part = slice(start, start + chunk)
            logits = as_float32(model.logits(Tensor(rows[part])).data)  # [chunk, V]
            row_is_best[part] = logits.argmax(axis=-1) == ids[part]
            logits -= logits.max(axis=-1, keepdims=True)
            token_logits = logits[xp.arange(len(logits)), ids[part]]
            totals = xp.exp(logits, out=logits).sum(axis=-1)
            row_log_probs[part] = token_logits - xp.log(totals)
        log_probs[used] = row_log_probs
        is_best[used] = row_is_best
    return log_probs, is_best
