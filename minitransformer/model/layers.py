"""The layers of the model (sections 3.1 to 3.5).

A forward pass takes `rng`, the source of dropout noise; None means evaluation, without
dropout. Shapes: B batch, S source, T target, D d_model, H heads, V vocabulary.
"""

from __future__ import annotations

import math
from types import ModuleType

import numpy as np

from minitransformer.engine import ops
from minitransformer.engine.autograd import Tensor
from minitransformer.engine.backend import Array, array_module
from minitransformer.engine.ops import RandomStream
from minitransformer.model.parameters import Initializer, Module
from minitransformer.settings.config import ModelConfig


class AddAndNorm(Module):
    """Dropout, residual connection and layer normalisation (3.1 and 5.4).

    Elsewhere: tensor2tensor's later versions normalise before the sub-layer, and the
    annotated Transformer divides by std + eps.
    """

    def __init__(self, init: Initializer, config: ModelConfig) -> None:
        self.gain = init.constant(1, config.d_model)
        self.bias = init.constant(0, config.d_model)
        self.dropout = config.dropout

    def __call__(self, x: Tensor, residual: Tensor, rng: RandomStream | None) -> Tensor:
        """LayerNorm(residual + Dropout(x)). Shapes: x, residual [..., D] -> [..., D]"""
        rate = self.dropout
        return ops.add_layer_norm(x, residual, self.gain, self.bias, rate=rate, rng=rng)


class MultiHeadAttention(Module):
    """Concat(head_1, ..., head_h) W^O, head_i = Attention(Q W_i^Q, K W_i^K, V W_i^V).

    Section 3.2.2. The projections have no bias, and one matrix holds those of all heads
    side by side. The query, key and value matrices are drawn with the Glorot bound of
    one matrix that holds all three. Separate bounds would be sqrt(2) larger. With them,
    the encoder was seen to give all words of a sentence nearly the same vector before
    the decoder learned to attend to them.

    Elsewhere: fairseq, PyTorch and tensor2tensor's first versions add biases.
    """

    def __init__(self, init: Initializer, config: ModelConfig) -> None:
        self.num_heads = config.num_heads
        self.dropout = config.attention_dropout
        d_model = config.d_model
        keys = config.num_heads * config.key_width
        values = config.num_heads * config.value_width
        fan_out = 2 * keys + values
        self.query = init.glorot_uniform(d_model, keys, fan_out=fan_out)
        self.key = init.glorot_uniform(d_model, keys, fan_out=fan_out)
        self.value = init.glorot_uniform(d_model, values, fan_out=fan_out)
        self.output = init.glorot_uniform(values, d_model)

    def __call__(
        self,
        queries: Tensor,
        memory: Tensor,
        mask: Array | None,
        rng: RandomStream | None,
    ) -> Tensor:
        """Attend from `queries` to `memory` (the same tensor in self-attention).

        Shapes: queries [B, T, D], memory [B, S, D], mask broadcasting to [B, H, T, S]
        -> [B, T, D]
        """
        if queries is memory:
            query, keys, values = self.project(queries)
        else:
            query = ops.linear(queries, self.query)
            keys, values = self.project_memory(memory)
        return self.attend(query, keys, values, mask, rng)

    def project(self, x: Tensor) -> list[Tensor]:
        """Return x W^Q, x W^K and x W^V. Shapes: x [B, T, D] -> each [B, T, any]"""
        return ops.projections(x, [self.query, self.key, self.value])

    def project_memory(self, memory: Tensor) -> list[Tensor]:
        """Shapes: memory [B, S, D] -> keys [B, S, H d_k], values [B, S, H d_v]"""
        return ops.projections(memory, [self.key, self.value])

    def attend(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Array | None,
        rng: RandomStream | None,
    ) -> Tensor:
        """Attend to projected keys and values, such as those in a cache.

        Shapes: queries [B, T, H d_k], keys [B, S, H d_k], values [B, S, H d_v]
        -> [B, T, D]
        """
        attended = ops.attention(
            queries,
            keys,
            values,
            mask,
            num_heads=self.num_heads,
            rate=self.dropout,
            rng=rng,
        )
        return ops.linear(attended, self.output)


class FeedForward(Module):
    """max(0, x W_1 + b_1) W_2 + b_2 (equation 2), with optional dropout inside."""

    def __init__(self, init: Initializer, config: ModelConfig) -> None:
        self.dropout = config.relu_dropout
        self.weight_1 = init.glorot_uniform(config.d_model, config.d_ff)
        self.bias_1 = init.constant(0, config.d_ff)
        self.weight_2 = init.glorot_uniform(config.d_ff, config.d_model)
        self.bias_2 = init.constant(0, config.d_model)

    def __call__(self, x: Tensor, rng: RandomStream | None) -> Tensor:
        """Shapes: x [..., D] -> [..., D]"""
        hidden = ops.linear(x, self.weight_1, self.bias_1, relu=True)
        if rng is not None and self.dropout > 0:
            hidden = ops.dropout(hidden, rate=self.dropout, rng=rng)
        return ops.linear(hidden, self.weight_2, self.bias_2)


def sinusoids(length: int, d_model: int) -> np.ndarray:
    """PE(pos, 2i) = sin(pos / 10000^(2i / d_model)), PE(pos, 2i + 1) = cos (3.5).

    Shapes: -> [length, d_model] float64

    Elsewhere: tensor2tensor puts all sines before all cosines and divides i by d/2 - 1.
    """
    position = np.arange(length)[:, None]
    angle = position / 10000.0 ** (np.arange(0, d_model, 2) / d_model)
    table = np.empty((length, d_model))
    table[:, 0::2] = np.sin(angle)
    table[:, 1::2] = np.cos(angle)
    return table


class Embedding(Module):
    """The matrix shared by source, target and pre-softmax (3.4), and positions (3.5).

    The weights are drawn from N(0, 1 / d_model), and multiplied by sqrt(d_model) where
    they embed tokens. Positions are sinusoids, for text of any length, or learned
    vectors (Table 3, row E). These are drawn from N(0, 1 / 2), as large as sinusoids:
    smaller ones were learned late beside words of variance 1. Encoder and decoder share
    them, too; the paper does not say whether they do in row E.
    """

    def __init__(self, init: Initializer, config: ModelConfig) -> None:
        d_model = config.d_model
        self.dropout = config.dropout
        self.scale = math.sqrt(d_model)
        self.table = init.normal(d_model**-0.5, config.vocab_size, d_model)
        self._transposed: tuple[Array, Array] | None = None
        self.learned = config.positions == "learned"
        if self.learned:
            self.positions = init.normal(math.sqrt(0.5), config.max_positions, d_model)
        else:
            self.positions = Tensor(sinusoids(256, d_model).astype(init.dtype))

    def __call__(
        self, ids: Array, rng: RandomStream | None, first_position: int = 0
    ) -> Tensor:
        """Embed `ids`, whose first column stands at `first_position`.

        Shapes: ids [B, T] -> [B, T, D]
        Raises: ValueError if positions are learned and too few for the ids.
        """
        end = first_position + ids.shape[-1]
        available = self.positions.shape[0]
        if self.learned and end > available:
            raise ValueError(
                f"expected at most {available} tokens (learned positions), got {end}"
            )
        positions = self.reserve(end)
        if first_position:  # in incremental decoding, which needs no gradient
            positions = Tensor(positions.data[first_position:end])
        return ops.embedding(
            self.table, ids, positions, scale=self.scale, rate=self.dropout, rng=rng
        )

    @property
    def xp(self) -> ModuleType:
        """NumPy, or CuPy once the parameters are on a GPU."""
        return array_module(self.table.data)

    @property
    def transposed(self) -> Array:
        """The matrix before the softmax (3.4): the same array for the same table.

        Shapes: -> [D, V]
        """
        table = self.table.data
        if self._transposed is None or self._transposed[0] is not table:
            self._transposed = table, table.T
        return self._transposed[1]

    def reserve(self, length: int) -> Tensor:
        """Return the positions: all that are learned, or `length` sinusoids or more.

        Sinusoids are moved to the device of the embedding table.
        """
        positions = self.positions
        available, d_model = positions.shape
        elsewhere = type(positions.data) is not type(self.table.data)
        if not self.learned and (length > available or elsewhere):
            values = sinusoids(max(length, 2 * available), d_model)
            values = self.xp.asarray(values, dtype=positions.data.dtype)
            positions = self.positions = Tensor(values)
        return positions
