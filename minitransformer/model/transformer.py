"""The model of section 3: encoder and decoder stacks, the Transformer and its loss.

In this order: the padding mask and the causal mask, an encoder layer and a decoder
layer (3.1), the model with its shared embedding (3.4), the loss of training (5.4) and
scores. Training computes all target positions at once; incremental decoding computes
one at a time with a key/value cache. Masks are True where attention is allowed.
Shapes: B batch, S source, T target, D d_model, V vocabulary, K beams of each sentence.
"""

from __future__ import annotations

import numpy as np

from minitransformer.engine import ops
from minitransformer.engine.autograd import Tensor, no_grad
from minitransformer.engine.backend import Array, array_module, as_float32, backend_of
from minitransformer.engine.ops import RandomStream
from minitransformer.model.kv_cache import DecoderState, KeyValueCache
from minitransformer.model.layers import (
    AddAndNorm,
    Embedding,
    FeedForward,
    MultiHeadAttention,
)
from minitransformer.model.parameters import Initializer, Module
from minitransformer.settings.config import PAD_ID, ModelConfig


def padding_mask(ids: Array) -> Array:
    """Return a mask that hides padding. Shapes: ids [B, S] -> [B, 1, 1, S] bool"""
    return (ids != PAD_ID)[:, None, None, :]


def causal_mask(ids: Array) -> Array:
    """Return a mask that hides later positions. Shapes: ids [B, T] -> [T, T] bool"""
    return array_module(ids).tri(ids.shape[1], dtype=bool)


def restricted(mask: Array, reach: int | None) -> Array:
    """Hide positions that are more than `reach` away, if it is given (section 4).

    Shapes: mask [..., 1 or T, T] -> [..., 1 or T, T]
    """
    if reach is None:
        return mask
    position = array_module(mask).arange(mask.shape[-1])
    distance = position[:, None] - position
    return mask & (distance <= reach) & (distance >= -reach)


class EncoderLayer(Module):
    """Self-attention and feed-forward: LayerNorm(x + Dropout(Sublayer(x))) (3.1)."""

    def __init__(self, init: Initializer, config: ModelConfig) -> None:
        self.self_attention = MultiHeadAttention(init, config)
        self.self_attention_norm = AddAndNorm(init, config)
        self.feed_forward = FeedForward(init, config)
        self.feed_forward_norm = AddAndNorm(init, config)

    def __call__(
        self, x: Tensor, source_mask: Array, rng: RandomStream | None
    ) -> Tensor:
        """Shapes: x [B, S, D], source_mask [B, 1, 1 or S, S] -> [B, S, D]"""
        attended = self.self_attention(x, x, source_mask, rng)
        x = self.self_attention_norm(attended, x, rng)
        return self.feed_forward_norm(self.feed_forward(x, rng), x, rng)


class DecoderLayer(Module):
    """Masked self-attention, attention to the encoder's output, feed-forward (3.1)."""

    def __init__(self, init: Initializer, config: ModelConfig) -> None:
        self.self_attention = MultiHeadAttention(init, config)
        self.self_attention_norm = AddAndNorm(init, config)
        self.cross_attention = MultiHeadAttention(init, config)
        self.cross_attention_norm = AddAndNorm(init, config)
        self.feed_forward = FeedForward(init, config)
        self.feed_forward_norm = AddAndNorm(init, config)

    def __call__(
        self,
        x: Tensor,
        memory: Tensor,
        target_mask: Array,
        source_mask: Array,
        rng: RandomStream | None,
    ) -> Tensor:
        """Decode all positions at once.

        Shapes: x [B, T, D], memory [B, S, D], target_mask [T, T],
        source_mask [B, 1, 1, S] -> [B, T, D]
        """
        attended = self.self_attention(x, x, target_mask, rng)
        x = self.self_attention_norm(attended, x, rng)
        attended = self.cross_attention(x, memory, source_mask, rng)
        x = self.cross_attention_norm(attended, x, rng)
        return self.feed_forward_norm(self.feed_forward(x, rng), x, rng)

    def step(self, x: Tensor, cache: KeyValueCache, source_mask: Array) -> Tensor:
        """Decode the next position of every beam; `cache` has the earlier ones.

        Shapes: x [B K, 1, D], source_mask [B, 1, 1, S] -> [B K, 1, D]
        """
        queries, keys, values = self.self_attention.project(x)
        keys, values, mask = cache.append(keys, values)
        attended = self.self_attention.attend(queries, keys, values, mask, None)
        x = self.self_attention_norm(attended, x, None)
        # The K beams of a sentence attend to the same memory, as K queries: [B, K, D].
        rows = Tensor(x.data.reshape(len(source_mask), -1, x.shape[-1]))
        queries = ops.linear(rows, self.cross_attention.query)
        keys, values = map(Tensor, cache.memory())
        attended = self.cross_attention.attend(queries, keys, values, source_mask, None)
        attended = Tensor(attended.data.reshape(x.shape))
        x = self.cross_attention_norm(attended, x, None)
        return self.feed_forward_norm(self.feed_forward(x, None), x, None)


class Transformer(Module):
    """The encoder-decoder of Figure 1, with one matrix for both embeddings and logits.

    `seed` determines the random parameters; with None these are zero, to be loaded.
    `position_limit` is the longest sentence in tokens, EOS counted, or None; ensembles
    have it too. `reach` is how far self-attention sees on either side (section 4), or
    None for all positions.
    """

    def __init__(
        self, config: ModelConfig, seed: int | None = 1, dtype: str = "float32"
    ) -> None:
        init = Initializer(seed, dtype)
        self.config = config
        self.position_limit = config.position_limit
        window = config.attention_window
        self.reach = None if window is None else window // 2
        self.embedding = Embedding(init, config)
        self.encoder = [
            EncoderLayer(init, config) for _ in range(config.encoder_layers)
        ]
        self.decoder = [
            DecoderLayer(init, config) for _ in range(config.decoder_layers)
        ]

    def encode(
        self, source: Array, rng: RandomStream | None = None
    ) -> tuple[Tensor, Array]:
        """Run the encoder stack, and return its output and the padding mask.

        Shapes: source [B, S] -> memory [B, S, D], mask [B, 1, 1, S] bool
        """
        x = self.embedding(source, rng)
        mask = padding_mask(source)
        near = restricted(mask, self.reach)
        for layer in self.encoder:
            x = layer(x, near, rng)
        return x, mask

    def __call__(
        self, source: Array, target: Array, rng: RandomStream | None = None
    ) -> Tensor:
        """Run both stacks. Output t depends on the source and on target[:, : t + 1].

        Shapes: source [B, S], target [B, T] -> [B, T, D]
        """
        memory, source_mask = self.encode(source, rng)
        x = self.embedding(target, rng)
        target_mask = self.target_mask(target)
        for layer in self.decoder:
            x = layer(x, memory, target_mask, source_mask, rng)
        return x

    def target_mask(self, target: Array) -> Array:
        """Return the mask of self-attention. Shapes: target [B, T] -> [T, T] bool"""
        return restricted(causal_mask(target), self.reach)

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits of x (3.4). Shapes: x [..., D] -> [..., V]

        The embedding gets no gradient from here: training uses `training_loss`.
        """
        return ops.linear(x, Tensor(self.embedding.transposed))

    def start_decoding(self, source: Array) -> DecoderState:
        """Encode the source and project it to each layer's memory keys and values.

        This and `decode_step` have no backward pass: call them under `no_grad`.

        Shapes: source [B, S]
        """
        memory, source_mask = self.encode(source)
        # Caches have the position first.
        memory = Tensor(memory.data.swapaxes(0, 1).copy())  # [S, B, D]
        caches = []
        for layer in self.decoder:
            keys, values = layer.cross_attention.project_memory(memory)
            caches.append(KeyValueCache(keys.data, values.data, self.reach))
        return DecoderState(caches, source_mask)

    def decode_step(self, tokens: Array, state: DecoderState) -> Array:
        """Decode the last token of each beam and return the input of `logits`.

        Shapes: tokens [B K] -> [B K, D]
        """
        x = self.embedding(tokens[:, None], None, state.position)  # [B K, 1, D]
        for layer, cache in zip(self.decoder, state.caches, strict=True):
            x = layer.step(x, cache, state.source_mask)
        state.position += 1
        return x.data[:, 0]


def training_loss(
    model: Transformer,
    source: Array,
    target: Array,
    label_smoothing: float,
    rng: RandomStream | None,
) -> Tensor:
    """Label-smoothed cross-entropy, summed over targets, which are from BOS to EOS.

    Shapes: source [B, S], target [B, T + 1] -> scalar
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

    Shapes: source [B, S], target [B, T + 1] -> log_probs [B, T], is_best [B, T] bool
    Units: nats
    """
    xp = array_module(source)
    expected = target[:, 1:]
    with no_grad():
        outputs = model(source, target[:, :-1]).data
        dtype = np.promote_types(outputs.dtype, np.float32)
        log_probs, is_best = (xp.zeros(expected.shape, t) for t in (dtype, bool))
        # Score all tokens but padding, in chunks that bound the memory of the logits.
        used = expected != PAD_ID
        rows, ids = outputs[used], expected[used]  # [N, D], [N]
        row_log_probs, row_is_best = (xp.empty(len(ids), t) for t in (dtype, bool))
        at_once = backend_of(outputs).logits_to_score or ops.LOGITS_PER_CHUNK
        chunk = max(at_once // model.config.vocab_size, 1)
        for start in range(0, len(ids), chunk):
            part = slice(start, start + chunk)
            logits = as_float32(model.logits(Tensor(rows[part])).data)  # [chunk, V]
            row_is_best[part] = logits.argmax(axis=-1) == ids[part]
            # log softmax(z) = z - max - log(sum(exp(z - max))).
            logits -= logits.max(axis=-1, keepdims=True)
            token_logits = logits[xp.arange(len(logits)), ids[part]]
            totals = xp.exp(logits, out=logits).sum(axis=-1)
            row_log_probs[part] = token_logits - xp.log(totals)
        log_probs[used] = row_log_probs
        is_best[used] = row_is_best
    return log_probs, is_best
