"""The model of section 3: encoder and decoder stacks, and the Transformer.

Read from the top: masks, one encoder layer and one decoder layer (3.1), the model with
its shared embedding (3.4), and decoding one position at a time with cached keys and
values. Shapes: B batch, S source, T target, D d_model, H heads, V vocabulary, K beams.
"""

from __future__ import annotations

from minitransformer.engine import ops
from minitransformer.engine.autograd import Tensor
from minitransformer.engine.backend import Array, array_module
from minitransformer.engine.random_streams import RandomStream
from minitransformer.model.kv_cache import DecoderState, KeyValueCache
from minitransformer.model.layers import (
    Embedding,
    FeedForward,
    Initializer,
    LayerNorm,
    Module,
    MultiHeadAttention,
)
from minitransformer.settings.config import PAD_ID, ModelConfig


def padding_mask(ids: Array) -> Array:
    """True at the keys that are words. Shapes: ids [B, S] -> [B, 1, 1, S]"""
    return (ids != PAD_ID)[:, None, None, :]


def causal_mask(like: Array, length: int) -> Array:
    """True where a position may look: at itself and before. Shapes: -> [T, T]"""
    xp = array_module(like)
    return xp.tri(length, dtype=bool)


def _attention(
    init: Initializer,
    config: ModelConfig,
    neighbourhood: tuple[int, int] | None = None,
) -> MultiHeadAttention:
    return MultiHeadAttention(
        init,
        config.d_model,
        config.num_heads,
        config.key_width,
        config.value_width,
        config.attention_dropout,
        neighbourhood,
    )


def _feed_forward(init: Initializer, config: ModelConfig) -> FeedForward:
    return FeedForward(init, config.d_model, config.d_ff, config.relu_dropout)


class EncoderLayer(Module):
    """Self-attention and feed-forward: LayerNorm(x + Dropout(Sublayer(x))) (3.1)."""

    def __init__(self, init: Initializer, config: ModelConfig) -> None:
        self.dropout = config.dropout
        near = config.neighbourhood(causal=False)
        self.self_attention = _attention(init, config, near)
        self.self_attention_norm = LayerNorm(init, config.d_model)
        self.feed_forward = _feed_forward(init, config)
        self.feed_forward_norm = LayerNorm(init, config.d_model)

    def __call__(
        self, x: Tensor, source_mask: Array, rng: RandomStream | None
    ) -> Tensor:
        """Shapes: x [B, S, D], source_mask [B, 1, 1, S] -> [B, S, D]"""
        attended = self.self_attention(x, x, source_mask, rng)
        x = self.self_attention_norm(attended, x, self.dropout, rng)
        return self.feed_forward_norm(self.feed_forward(x, rng), x, self.dropout, rng)


class DecoderLayer(Module):
    """Masked self-attention, attention to the encoder's output, feed-forward (3.1)."""

    def __init__(self, init: Initializer, config: ModelConfig) -> None:
        self.dropout = config.dropout
        near = config.neighbourhood(causal=True)
        self.self_attention = _attention(init, config, near)
        self.self_attention_norm = LayerNorm(init, config.d_model)
        self.cross_attention = _attention(init, config)
        self.cross_attention_norm = LayerNorm(init, config.d_model)
        self.feed_forward = _feed_forward(init, config)
        self.feed_forward_norm = LayerNorm(init, config.d_model)

    def __call__(
        self,
        x: Tensor,
        memory: Tensor,
        target_mask: Array | None,
        source_mask: Array,
        rng: RandomStream | None,
    ) -> Tensor:
        """Shapes: x [B, T, D], memory [B, S, D], masks [T, T], [B, 1, 1, S]

        A restricted layer takes no `target_mask`: its neighbourhood has no future.
        """
        attended = self.self_attention(x, x, target_mask, rng)
        x = self.self_attention_norm(attended, x, self.dropout, rng)
        attended = self.cross_attention(x, memory, source_mask, rng)
        x = self.cross_attention_norm(attended, x, self.dropout, rng)
        return self.feed_forward_norm(self.feed_forward(x, rng), x, self.dropout, rng)

    def step(self, x: Tensor, cache: KeyValueCache, source_mask: Array) -> Tensor:
        """Decode one position of every beam. Shapes: x [B K, 1, D] -> the same"""
        rows, _, d_model = x.shape
        keys, values = cache.append(*self.self_attention.project_keys_values(x))
        attended = self.self_attention.attend(x, keys, values, cache.mask, None)
        x = self.self_attention_norm(attended, x, 0, None)
        # All beams of a sentence share its memory, so they attend as its K queries.
        beams = Tensor(x.data.reshape(len(cache.memory_keys), -1, d_model))
        attended = self.cross_attention.attend(
            beams,
            Tensor(cache.memory_keys),
            Tensor(cache.memory_values),
            source_mask,
            None,
        )
        attended = Tensor(attended.data.reshape(rows, 1, d_model))
        x = self.cross_attention_norm(attended, x, 0, None)
        return self.feed_forward_norm(self.feed_forward(x, None), x, 0, None)


class Transformer(Module):
    """The encoder-decoder of Figure 1, with one matrix for both embeddings and logits.

    Parameters are drawn from `seed`, or zero where it is None, to be loaded.
    """

    def __init__(
        self, config: ModelConfig, seed: int | None = 1, dtype: str = "float32"
    ) -> None:
        init = Initializer(seed, dtype)
        self.config = config
        self.embedding = Embedding(
            init,
            config.vocab_size,
            config.d_model,
            config.position_limit,
            config.dropout,
        )
        self.encoder = [
            EncoderLayer(init, config) for _ in range(config.encoder_layers)
        ]
        self.decoder = [
            DecoderLayer(init, config) for _ in range(config.decoder_layers)
        ]

    def encode(
        self, source: Array, rng: RandomStream | None = None
    ) -> tuple[Tensor, Array]:
        """Run the encoder stack.

        Shapes: source ids [B, S] -> memory [B, S, D], its mask [B, 1, 1, S]
        """
        mask = padding_mask(source)
        x = self.embedding(source, rng)
        for layer in self.encoder:
            x = layer(x, mask, rng)
        return x, mask

    def __call__(
        self, source: Array, target: Array, rng: RandomStream | None = None
    ) -> Tensor:
        """Run both stacks: output t has seen the source and target[: t + 1].

        Shapes: source ids [B, S], target ids [B, T] -> [B, T, D]
        """
        memory, source_mask = self.encode(source, rng)
        x = self.embedding(target, rng)
        restricted = self.config.attention_window is not None
        target_mask = None if restricted else causal_mask(target, target.shape[1])
        for layer in self.decoder:
            x = layer(x, memory, target_mask, source_mask, rng)
        return x

    def logits(self, x: Tensor) -> Tensor:
        """The pre-softmax transformation (3.4). Shapes: x [..., D] -> [..., V]"""
        return ops.linear(x, Tensor(self.embedding.table.data.T))

    def start_decoding(self, source: Array) -> DecoderState:
        """Encode, and compute each layer's memory keys and values once.

        Shapes: source ids [B, S]
        """
        memory, mask = self.encode(source)
        caches = []
        for layer in self.decoder:
            keys, values = layer.cross_attention.project_keys_values(memory)
            near = layer.self_attention.neighbourhood
            caches.append(KeyValueCache(keys.data, values.data, near))
        return DecoderState(caches, mask)

    def decode_step(self, tokens: Array, state: DecoderState) -> Array:
        """Feed the next token of every beam and return what `logits` takes.

        Shapes: tokens [B K] -> [B K, D]
        """
        x = self.embedding(tokens[:, None], None, state.position)  # [B K, 1, D]
        for layer, cache in zip(self.decoder, state.caches, strict=True):
            x = layer.step(x, cache, state.source_mask)
        state.position += 1
        return x.data[:, 0]
