"""Incremental decoding as a CUDA graph: all arrays keep their addresses and shapes."""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np

from minitransformer.cuda import device
from minitransformer.cuda.device import THREADS, blocks
from minitransformer.engine import ops
from minitransformer.engine.autograd import Tensor
from minitransformer.engine.backend import Array, array_module, as_float32
from minitransformer.model.kv_cache import KeyValueCache
from minitransformer.model.transformer import Transformer
from minitransformer.translation.steppers import TransformerStepper

# Positions that the caches have room for at first; then it is doubled.
FIRST_CAPACITY = 16


class FixedKeyValueCache(KeyValueCache):
    """A `KeyValueCache` of fixed capacity, in which a mask shows the positions in use.

    Shapes: position [1], on the device; mask [1, 1, 1, capacity]
    """

    def __init__(
        self, cache: KeyValueCache, used: int, mask: Array, position: Array
    ) -> None:
        self.memory_keys, self.memory_values = cache.memory_keys, cache.memory_values
        self.mask, self._position = mask, position
        xp = array_module(position)
        self.keys, self.values = (
            xp.zeros((len(old), mask.shape[-1], old.shape[-1]), old.dtype)
            for old in (cache.keys, cache.values)
        )
        self.keys[:, :used] = cache.keys[:, :used]
        self.values[:, :used] = cache.values[:, :used]

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        for cache, new in ((self.keys, key.data), (self.values, value.data)):
            kernel_args = cache, new, self._position, new.size, *cache.shape[1:]
            device.current().launch(
                "put_position", cache.dtype, blocks(new.size), THREADS, *kernel_args
            )
        return Tensor(self.keys), Tensor(self.values)

    def select(self, rows: Array, moved: Array | None, sentences: Array | None) -> None:
        if len(rows) == len(self.keys):
            self.keys[...], self.values[...] = self.keys[rows], self.values[rows]
        else:
            super().select(rows, None, sentences)


class GraphStepper(TransformerStepper):
    """A `TransformerStepper` whose steps are replayed while batch and capacity last.

    The first step after a change is computed kernel by kernel, the second is recorded,
    too, and its replay compared with it.
    """

    def __init__(
        self,
        model: Transformer,
        source: Array,
        beam_size: int,
        shortlist: np.ndarray | None = None,
    ) -> None:
        xp = array_module(source)
        self._records = xp is not np
        if self._records:
            stream, self._memory = _of_thread(xp, threading.get_ident())
            if not xp.cuda.get_current_stream().ptr:
                xp.cuda.Device().synchronize()  # the parameters have arrived
                stream.use()
        super().__init__(model, source, beam_size, shortlist)
        self._capacity, self._rows, self._runs = 0, 0, 0
        self._graph: Any = None
        self._logits: Array = None

    def step(self, tokens: Array) -> Iterator[Array]:
        if self._state.position == 0:
            yield from super().step(tokens)
            return
        if self._state.position >= self._capacity or self._rows != len(tokens):
            self._place(len(tokens))
        known = self._shortlist
        self._tokens[...] = tokens if known is None else known[tokens]
        if self._graph is not None:
            self._graph.launch()
        else:
            with self._allocator():
                self._logits = self._compute()
            self._runs += 1
            if self._runs == 2 and self._records:
                self._record()
        self._position += 1
        self._state.position += 1
        yield self._logits

    def _place(self, rows: int) -> None:
        """Make room for what follows; a graph of the old arrays is of no use."""
        state, xp = self._state, self._xp
        while state.position >= self._capacity:
            self._capacity = max(2 * self._capacity, FIRST_CAPACITY)
        self._rows, self._runs, self._graph = rows, 0, None
        self._tokens = xp.empty(rows, np.int32)
        self._position = xp.full(1, state.position, np.int32)
        self._columns = xp.arange(self._capacity, dtype=np.int32)[None, None, None]
        self._mask = xp.empty(self._columns.shape, bool)
        self._model.embedding.reserve(self._capacity)
        self._embeddings = self._model.embedding.positions.data  # others may replace it
        state.caches = [
            FixedKeyValueCache(cache, state.position, self._mask, self._position)
            for cache in state.caches
        ]

    def _compute(self) -> Array:
        xp, embedding = self._xp, self._model.embedding
        xp.less_equal(self._columns, self._position, out=self._mask)
        here = Tensor(self._embeddings[self._position])
        ids = self._tokens[:, None]
        x = ops.embedding(embedding.table, ids, here, scale=embedding.scale)
        for layer, cache in zip(self._model.decoder, self._state.caches, strict=True):
            x = layer.step(x, cache, self._state.source_mask)
        return as_float32(ops.linear(Tensor(x.data[:, 0]), Tensor(self._table.T)).data)

    def _allocator(self) -> Any:
        """Memory that a graph may keep to itself."""
        if not self._records:
            return contextlib.nullcontext()
        return self._xp.cuda.using_allocator(self._memory.malloc)

    def _record(self) -> None:
        """Record the step that was just computed; decode on without, if that fails."""
        stream = self._xp.cuda.get_current_stream()
        found = "its replay differs"
        try:
            with self._allocator():
                stream.begin_capture()
                try:
                    logits = self._compute()
                finally:
                    graph = stream.end_capture()
            graph.launch()
            self._records = bool((logits == self._logits).all())
        except Exception as error:  # of the driver, of cuBLAS, of CuPy: many kinds
            self._records, found = False, str(error)
        if self._records:
            self._graph, self._logits = graph, logits
        else:
            warnings.warn(f"decoding without CUDA graphs: {found}", stacklevel=2)


@functools.cache
def _of_thread(xp: Any, thread: int) -> tuple[Any, Any]:
    """A stream that can be recorded, and memory for its graphs.

    A thread's steppers follow one another, so that all may use the same memory.
    """
    return xp.cuda.Stream(non_blocking=True), device.graph_memory(xp)


def graph_stepper(
    model: Transformer,
    source: Array,
    beam_size: int,
    shortlist: np.ndarray | None = None,
) -> TransformerStepper:
    """Return a stepper of graphs, except for restricted attention.

    The key/value cache of restricted attention is a ring buffer, which has no graph.
    """
    restricted = model.config.attention_window is not None
    kind = TransformerStepper if restricted else GraphStepper
    return kind(model, source, beam_size, shortlist)
