"""Incremental decoding by CUDA graphs: one launch repeats a whole step."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np

from minitransformer.backends.cuda import device
from minitransformer.engine import ops
from minitransformer.engine.autograd import Tensor
from minitransformer.engine.backend import Array, array_module, as_float32
from minitransformer.model.kv_cache import FIRST_CAPACITY, KeyValueCache
from minitransformer.model.transformer import Transformer
from minitransformer.translation.incremental_decoding import (
    CachedDecoder,
    TokenWeights,
    weights_of,
)


class FixedKeyValueCache(KeyValueCache):
    """A `KeyValueCache` whose arrays stay where they are, as a CUDA graph needs it.

    A mask shows which of its positions are in use. The beam is the first axis, and
    `position` is a number on the GPU.

    Shapes: keys [B K, capacity, H d_k], values [B K, capacity, H d_v], _position [1],
    _mask [1, 1, 1, capacity]
    """

    def __init__(
        self, cache: KeyValueCache, used: int, mask: Array, position: Array
    ) -> None:
        self.memory_keys, self.memory_values = cache.memory_keys, cache.memory_values
        self._mask, self._position = mask, position
        xp, capacity = array_module(position), mask.shape[-1]
        keys, values = cache.first(used)
        self.keys, self.values = (
            xp.zeros((len(old), capacity, old.shape[-1]), old.dtype)
            for old in (keys, values)
        )
        self.keys[:, :used], self.values[:, :used] = keys, values

    def first(self, count: int) -> tuple[Array, Array]:
        return self.keys[:, :count], self.values[:, :count]

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Array | None]:
        for cache, new in ((self.keys, key.data), (self.values, value.data)):
            kernel_args = cache, new, self._position, new.size, *cache.shape[1:]
            grid = device.num_blocks(new.size)
            device.current().launch("append_to_cache", cache.dtype, grid, *kernel_args)
        return Tensor(self.keys), Tensor(self.values), self._mask

    def select_beams(self, rows: Array) -> None:
        keys, values = self.keys[rows], self.values[rows]
        if len(rows) == len(self.keys):
            self.keys[...], self.values[...] = keys, values
        else:
            self.keys, self.values = keys, values


class GraphDecoder(CachedDecoder):
    """A `CachedDecoder` that records a step as a CUDA graph and repeats it.

    All logits of a step are one product. A graph serves as long as the number of beams
    and the capacity of the caches stay the same. After a change, the first step is
    computed kernel by kernel, which allocates and compiles what is needed. The second
    one is computed in the same way, then recorded, and the replay is compared with it.
    """

    def __init__(self, model: Transformer, source: Array, beam_size: int) -> None:
        gpu = device.current()
        self._cuda = gpu.xp.cuda
        stream, self._memory = gpu.decoding
        if not self._cuda.get_current_stream().ptr:  # the null stream has no graphs
            self._cuda.Device().synchronize()  # wait for the parameters
            stream.use()
        super().__init__(model, source, beam_size)
        self._capacity, self._beams, self._computed_steps = 0, 0, 0
        self._graph: Any = None
        self._graphs_work = True
        self._logits: Array = None

    def step(self, tokens: Array) -> Iterator[TokenWeights]:
        yield weights_of(as_float32(self.logits(tokens)))

    def logits(self, tokens: Array) -> Array:
        """Return the logits of a step in the activations' type, as kernels read them.

        Shapes: tokens [B K] -> [B K, V]
        """
        if self._state.position == 0:
            return self._project(self._outputs(tokens))
        if self._state.position >= self._capacity or self._beams != len(tokens):
            self._allocate(len(tokens))
        self._tokens[...] = self._xp.asarray(tokens)
        if self._graph is not None:
            self._graph.launch()
        else:
            with self._cuda.using_allocator(self._memory.malloc):
                self._logits = self._compute()
            self._computed_steps += 1
            if self._computed_steps == 2 and self._graphs_work:
                self._record()
        self._position += 1
        self._state.position += 1
        return self._logits

    def _allocate(self, beams: int) -> None:
        """Allocate what the next steps read and write; an older graph is dropped."""
        state, xp = self._state, self._xp
        while state.position >= self._capacity:
            self._capacity = max(2 * self._capacity, FIRST_CAPACITY)
        self._beams, self._computed_steps, self._graph = beams, 0, None
        self._tokens = xp.empty(beams, np.int32)
        self._position = xp.full(1, state.position, np.int32)
        self._columns = xp.arange(self._capacity, dtype=np.int32)[None, None, None]
        self._mask = xp.empty(self._columns.shape, bool)
        self._embeddings = self._model.embedding.reserve(self._capacity).data
        state.caches = [
            FixedKeyValueCache(cache, state.position, self._mask, self._position)
            for cache in state.caches
        ]

    def _compute(self) -> Array:
        """Compute the logits of one step from the arrays that `_allocate` made."""
        xp, embedding = self._xp, self._model.embedding
        xp.less_equal(self._columns, self._position, out=self._mask)
        if (reach := self._model.reach) is not None:
            self._mask &= self._columns >= self._position - reach
        here = Tensor(self._embeddings[self._position])
        ids = self._tokens[:, None]
        x = ops.embedding(embedding.table, ids, here, scale=embedding.scale)
        for layer, cache in zip(self._model.decoder, self._state.caches, strict=True):
            x = layer.step(x, cache, self._state.source_mask)
        return self._project(x.data[:, 0])

    def _project(self, outputs: Array) -> Array:
        return ops.linear(Tensor(outputs), Tensor(self._table.T)).data

    def _record(self) -> None:
        """Record the step that was just computed, or decode without graphs if it fails.

        Appending to a cache again at the same position changes nothing.
        """
        problem = "its replay differs"
        try:
            with self._cuda.using_allocator(self._memory.malloc):
                stream = self._cuda.get_current_stream()
                [graph], logits = device.record(stream, lambda cut: self._compute())
            graph.launch()
            self._graphs_work = bool((logits == self._logits).all())
        except Exception as error:  # of the driver, of cuBLAS, of CuPy: many kinds
            self._graphs_work, problem = False, str(error)
        if self._graphs_work:
            self._graph, self._logits = graph, logits
        else:
            warnings.warn(f"decoding without CUDA graphs: {problem}", stacklevel=2)
