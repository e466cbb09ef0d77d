"""The building blocks of the model (sections 3.2 to 3.5), and their parameters.

A forward pass takes `rng`, the source of dropout noise; None means evaluation, without
dropout. Shapes: B batch, S source, T target, D d_model, H heads, V vocabulary.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from types import ModuleType
from typing import Any, TypeVar

import numpy as np

from minitransformer.engine import ops
from minitransformer.engine.autograd import Tensor
from minitransformer.engine.backend import Array, array_module
from minitransformer.engine.random_streams import RandomStream

M = TypeVar("M", bound="Module")


class Module:
    """Something with parameters: tensors that are its attributes, or its modules'."""

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (dotted name, parameter) in order of construction, tied ones once."""
        seen: set[int] = set()
        for name, parameter in self._walk(""):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield name, parameter

    def _walk(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        for name, value in vars(self).items():
            if isinstance(value, Tensor) and value.requires_grad:
                yield prefix + name, value
            elif isinstance(value, Module):
                yield from value._walk(f"{prefix}{name}.")
            elif isinstance(value, list):
                for i, item in enumerate(value):
                    yield from item._walk(f"{prefix}{name}.{i}.")

    def num_parameters(self) -> int:
        return sum(p.data.size for _, p in self.named_parameters())


class ParameterBuffer:
    """All parameters of a module in one contiguous array, their gradients in another.

    The parameters become views into `data` and `grad`, so that the optimizer, the
    gradient norm and an all-reduce see one vector each. On a GPU there may be a copy of
    16 bits, `low_precision`, which the matrices are then views of. Shapes: data, grad, low_precision
    [number of parameters].
    """

    def __init__(self, module: Module) -> None:
        self.parameters = dict(module.named_parameters())
        arrays = [p.data for p in self.parameters.values()]
        xp = array_module(arrays[0])
        self.data = xp.concatenate([array.reshape(-1) for array in arrays])
        self.move_to(xp)

    def move_to(
        self, xp: ModuleType, low_precision: np.dtype[Any] | None = None
    ) -> None:
        """Put parameters and (zero) gradients into arrays of library `xp`.

        With a type `low_precision`, matrices are read in it; vectors are few, and stay as exact
        as `data` is.
        """
        self.data = xp.asarray(self.data)
        self.grad = xp.zeros_like(self.data)
        self.low_precision = (
            None if low_precision is None else self.data.astype(low_precision)
        )
        read = self.views(self.data)
        if self.low_precision is not None:
            halves = self.views(self.low_precision)
            read.update(
                {
                    n: low_precision
                    for n, low_precision in halves.items()
                    if low_precision.ndim == 2
                }
            )
        for name, view in read.items():
            self.parameters[name].data = view
        for name, view in self.views(self.grad).items():
            self.parameters[name].grad = view

    def update_low_precision(self) -> None:
        """Copy what has been written to `data` to where the layers read it."""
        if self.low_precision is not None:
            self.low_precision[...] = self.data

    def first_nonfinite_gradient(self) -> str | None:
        """Name the first parameter whose gradient holds a NaN or an infinity."""
        xp = array_module(self.grad)
        for name, view in self.views(self.grad).items():
            if not bool(xp.isfinite(view).all()):
                return name
        return None

    def views(self, flat: Array) -> dict[str, Array]:
        """Cut a vector laid out like `data` into arrays by parameter name."""
        views, start = {}, 0
        for name, parameter in self.parameters.items():
            end = start + parameter.data.size
            views[name] = flat[start:end].reshape(parameter.data.shape)
            start = end
        return views


def replicate(module: M) -> M:
    """Copy a module that shares the parameter arrays but not the gradients.

    Threads that work on different sentences each need gradients of their own.
    """
    shared = {id(p.data): p.data for _, p in module.named_parameters()}
    twin = copy.deepcopy(module, shared)
    for _, parameter in twin.named_parameters():
        parameter.grad = None
    return twin


class Initializer:
    """Makes parameters of one dtype; without a seed all are zero, to be loaded into."""

    def __init__(self, seed: int | None, dtype: str) -> None:
        self.dtype = np.dtype(dtype)
        self._rng = None if seed is None else np.random.default_rng(seed)

    def constant(self, value: float, *shape: int) -> Tensor:
        values = np.zeros(shape, self.dtype)
        if value:
            values.fill(value)
        return Tensor(values, requires_grad=True)

    def normal(self, deviation: float, *shape: int) -> Tensor:
        """Draw from N(0, deviation^2)."""
        if self._rng is None:
            return self.constant(0, *shape)
        return self._parameter(self._rng.normal(0, deviation, shape))

    def glorot_uniform(self, *shape: int, fan_out: int | None = None) -> Tensor:
        """Draw a weight from U(-a, a), a = sqrt(6 / (fan_in + fan_out))."""
        if self._rng is None:
            return self.constant(0, *shape)
        bound = math.sqrt(6 / (shape[0] + (fan_out or shape[1])))
        return self._parameter(self._rng.uniform(-bound, bound, shape))

    def _parameter(self, values: np.ndarray) -> Tensor:
        return Tensor(values.astype(self.dtype), requires_grad=True)


class LayerNorm(Module):
    """Dropout, residual connection and layer normalisation (3.1 and 5.4).

    Differs: tensor2tensor's later versions normalise before the sub-layer, the
    annotated Transformer divides by std + eps.
    """

    def __init__(self, init: Initializer, d_model: int) -> None:
        self.gain = init.constant(1, d_model)
        self.bias = init.constant(0, d_model)

    def __call__(
        self, x: Tensor, residual: Tensor, rate: float, rng: RandomStream | None
    ) -> Tensor:
        """LayerNorm(residual + Dropout(x)). Shapes: [..., D] -> [..., D]"""
        return ops.add_layer_norm(x, residual, self.gain, self.bias, rate=rate, rng=rng)


class MultiHeadAttention(Module):
    """Concat(head_1, ..., head_h) W^O, head_i = Attention(Q W_i^Q, K W_i^K, V W_i^V).

    Section 3.2.2: the projections are matrices without bias, those of all heads side
    by side in one. Queries, keys and values are drawn as one Glorot matrix of d_model
    rows: drawn apart, sqrt(2) larger, post-norm encoders were seen to make all words of
    a sentence alike before the decoder learned to look at them.

    Given a neighbourhood (positions before, positions after), self-attention of whole
    sentences is restricted to it (section 4).

    Differs: tensor2tensor, fairseq and PyTorch add biases to the projections.
    """

    def __init__(
        self,
        init: Initializer,
        d_model: int,
        num_heads: int,
        d_k: int,
        d_v: int,
        dropout: float,
        neighbourhood: tuple[int, int] | None = None,
    ) -> None:
        self.num_heads = num_heads
        self.dropout = dropout
        self.neighbourhood = neighbourhood
        fan_out = num_heads * (2 * d_k + d_v)
        self.query = init.glorot_uniform(d_model, num_heads * d_k, fan_out=fan_out)
        self.key = init.glorot_uniform(d_model, num_heads * d_k, fan_out=fan_out)
        self.value = init.glorot_uniform(d_model, num_heads * d_v, fan_out=fan_out)
        self.output = init.glorot_uniform(num_heads * d_v, d_model)

    def __call__(
        self,
        queries: Tensor,
        memory: Tensor,
        mask: Array | None,
        rng: RandomStream | None,
    ) -> Tensor:
        """Attend from `queries` to `memory` (the same tensor in self-attention).

        Shapes: queries [B, T, D], memory [B, S, D], mask True where allowed,
        broadcasting to [B, H, T, S], or of keys alone with a neighbourhood
        -> [B, T, D]
        """
        keys, values = self.project_keys_values(memory)
        return self.attend(queries, keys, values, mask, rng, self.neighbourhood)

    def project_keys_values(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [B, S, H d_k] and values [B, S, H d_v], which decoding caches."""
        return ops.linear(memory, self.key), ops.linear(memory, self.value)

    def attend(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Array | None,
        rng: RandomStream | None,
        neighbourhood: tuple[int, int] | None = None,
    ) -> Tensor:
        """Attend with projected keys and values. Shapes: as `project_keys_values` gives."""
        inputs = ops.linear(queries, self.query), keys, values, mask
        options = {"num_heads": self.num_heads, "rate": self.dropout, "rng": rng}
        if neighbourhood is None:
            heads = ops.attention(*inputs, **options)
        else:
            before, after = neighbourhood
            heads = ops.restricted_attention(
                *inputs, before=before, after=after, **options
            )
        return ops.linear(heads, self.output)


class FeedForward(Module):
    """max(0, x W_1 + b_1) W_2 + b_2 (equation 2), with optional dropout inside."""

    def __init__(
        self,
        init: Initializer,
        d_model: int,
        d_ff: int,
        dropout: float,
    ) -> None:
        self.dropout = dropout
        self.weight_1 = init.glorot_uniform(d_model, d_ff)
        self.bias_1 = init.constant(0, d_ff)
        self.weight_2 = init.glorot_uniform(d_ff, d_model)
        self.bias_2 = init.constant(0, d_model)

    def __call__(self, x: Tensor, rng: RandomStream | None) -> Tensor:
        """Shapes: [..., D] -> [..., D]"""
        hidden = ops.linear(x, self.weight_1, self.bias_1, relu=True)
        if rng is not None and self.dropout > 0:
            hidden = ops.dropout(hidden, rate=self.dropout, rng=rng)
        return ops.linear(hidden, self.weight_2, self.bias_2)


def sinusoids(length: int, d_model: int) -> np.ndarray:
    """PE(pos, 2i) = sin(pos / 10000^(2i / d_model)), PE(pos, 2i + 1) = cos (3.5).

    Shapes: -> [length, D], float64

    Differs: tensor2tensor puts all sines before all cosines and divides i by d/2 - 1.
    """
    position = np.arange(length)[:, None]
    angle = position / 10000.0 ** (np.arange(0, d_model, 2) / d_model)
    table = np.empty((length, d_model))
    table[:, 0::2] = np.sin(angle)
    table[:, 1::2] = np.cos(angle[:, : d_model // 2])
    return table


class Embedding(Module):
    """The matrix shared by source, target and pre-softmax (3.4), and positions (3.5).

    The weights are drawn from N(0, 1 / d_model) and multiplied by sqrt(d_model) on
    input only. Positions are sinusoids of any length, or `num_positions` learned vectors
    (Table 3, row E), drawn as large as sinusoids are, from N(0, 1 / 2): beside words of
    variance 1, smaller ones were learned late.
    """

    def __init__(
        self,
        init: Initializer,
        vocab_size: int,
        d_model: int,
        num_positions: int | None,
        dropout: float,
    ) -> None:
        self.dropout = dropout
        self.scale = math.sqrt(d_model)
        self.table = init.normal(d_model**-0.5, vocab_size, d_model)
        self.learned = num_positions is not None
        if num_positions is not None:
            self.positions = init.normal(math.sqrt(0.5), num_positions, d_model)
        else:
            self.positions = Tensor(sinusoids(256, d_model).astype(init.dtype))

    def __call__(
        self, ids: Array, rng: RandomStream | None, first_position: int = 0
    ) -> Tensor:
        """Embed `ids`, whose first column stands at `first_position`.

        Shapes: ids [B, T] -> [B, T, D]
        Raises: ValueError if positions are learned and the ids are longer.
        """
        end = first_position + ids.shape[-1]
        positions = self._positions(end)
        if first_position:
            positions = Tensor(positions.data[first_position:end])
        return ops.embedding(
            self.table, ids, positions, scale=self.scale, rate=self.dropout, rng=rng
        )

    def reserve(self, length: int) -> None:
        """Have sinusoids for `length` tokens, or all positions that are learned."""
        if not self.learned:
            self._positions(length)

    def _positions(self, length: int) -> Tensor:
        """Positions for `length` tokens at least, where the table is that they meet."""
        available, d_model = self.positions.shape
        if self.learned:
            if length > available:
                raise ValueError(
                    f"expected at most {available} tokens (learned positions), "
                    f"got {length}"
                )
            return self.positions
        table = self.table.data
        if length > available or type(table) is not type(self.positions.data):
            values = sinusoids(max(length, 2 * available), d_model)
            xp, dtype = array_module(table), self.positions.data.dtype
            self.positions = Tensor(xp.asarray(values, dtype=dtype))
        return self.positions
