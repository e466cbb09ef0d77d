"""The steps of a beam search on a GPU: decoder, best tokens and next beams in a graph.

A CUDA graph reads and writes arrays that stay where they are. Its sizes are rounded up,
so that few graphs serve all batches of a file. Numbers that change (the position, the
lengths of sentences) are on the GPU.

Shapes: B sentences of a batch, B' rows for those that are left, K beams, n hypotheses,
C capacity of the caches, S source, V vocabulary, L decoder layers
"""

from __future__ import annotations

import importlib
import math
import warnings
from types import SimpleNamespace
from typing import Any, NamedTuple
from weakref import proxy

import numpy as np

from minitransformer.backends.cuda import device
from minitransformer.backends.cuda.device import WARP, address
from minitransformer.backends.cuda.graphs import Recording
from minitransformer.engine import ops
from minitransformer.engine.autograd import Tensor
from minitransformer.engine.backend import Array, array_module
from minitransformer.model.kv_cache import DecoderState, KeyValueCache
from minitransformer.model.transformer import Transformer
from minitransformer.settings.config import BOS_ID, EOS_ID
from minitransformer.translation.beam_search import length_penalty

# An array begins at a multiple of so many bytes, and is read in vectors of so many.
ALIGNMENT, VECTOR_BYTES = 256, 16

# The smallest capacity of a cache, of the decoder or of the source: a tile of keys.
MIN_CAPACITY = 16

# What `beam_search_step` reads and writes: Search in beam_search.cu.
POINTERS = (
    "log_probs next tokens origins done sentences limits penalties end_scores "
    "end_log_probs end_steps end_beams end_counts all_origins all_tokens position"
).split()
SEARCH = np.dtype(
    [
        *((name, np.uint64) for name in POINTERS),
        ("all_sentences", np.int32),
        ("nbest", np.int32),
        ("beams", np.int32),
        ("eos", np.int32),
    ],
    align=True,
)


class Shape(NamedTuple):
    """The sizes of a search: B, K, n, C and S."""

    sentences: int
    beams: int
    nbest: int
    capacity: int
    source: int

    def rounded_up(self) -> Shape:
        """Round up what differs from batch to batch."""
        return self._replace(
            sentences=rounded_up(self.sentences),
            capacity=power_of_two(self.capacity),
            source=power_of_two(self.source),
        )


class Placement(NamedTuple):
    """An array in a block of memory: the bytes from `start` to before `end`."""

    start: int
    end: int
    shape: tuple[int, ...]
    dtype: Any


def layout(model: Transformer, of: Shape) -> dict[str, Placement]:
    """Return the arrays of a search. Those of POINTERS are explained in beam_search.cu.

    A row of a cache has a position's key and, behind it, its value.
    """
    rows, beams, nbest, capacity, source = of
    attention = model.decoder[0].self_attention
    real = model.embedding.table.data.dtype
    vector = VECTOR_BYTES // real.itemsize
    width = attention.key.shape[1] + attention.value.shape[1]
    width = -(-width // vector) * vector
    layers = len(model.decoder)
    groups: tuple[tuple[str, tuple[int, ...], Any], ...] = (
        ("cache", (layers, rows, beams, capacity, width), real),
        ("memory", (layers, rows, source, width), real),
        ("source_lengths", (rows, 1, 1, 1), np.int32),
        ("log_probs next", (rows, beams), np.float64),
        ("tokens origins", (rows, beams), np.int32),
        ("done", (rows,), bool),
        ("sentences limits end_counts", (rows,), np.int32),
        ("penalties", (capacity + 1,), np.float64),
        ("end_scores end_log_probs", (rows, nbest), np.float64),
        ("end_steps end_beams", (rows, nbest), np.int32),
        ("all_origins all_tokens", (capacity, rows, beams), np.int32),
        ("position", (1,), np.int32),
    )
    parts, end = {}, 0
    for names, shape, dtype in groups:
        for name in names.split():
            start = -(-end // ALIGNMENT) * ALIGNMENT
            end = start + math.prod(shape) * np.dtype(dtype).itemsize
            parts[name] = Placement(start, end, shape, dtype)
    return parts


def num_bytes(model: Transformer, shape: Shape) -> int:
    """Return the size of the block that a search's arrays need."""
    return max(part.end for part in layout(model, shape).values())


class SearchSteps:
    """The arrays of searches of a shape, and the graphs of their steps.

    A graph serves for one number of rows. It is recorded when that number first occurs,
    after a step whose kernels were launched one by one, which compiles them. The arrays
    lie in `block`, a vector of bytes.
    """

    def __init__(self, model: Transformer, shape: Shape, block: Array) -> None:
        self._xp = array_module(block)
        self._shape = shape
        self._model = proxy(model)  # whose searches end with it
        self._graphs: dict[int, Any] = {}

        # Lay the arrays out in the block.
        self.arrays = SimpleNamespace()
        for name, part in layout(model, shape).items():
            array = block[part.start : part.end].view(part.dtype).reshape(part.shape)
            setattr(self.arrays, name, array)
        self._struct = device.struct(
            SEARCH,
            **{name: address(array) for name, array in vars(self.arrays).items()},
            all_sentences=shape.sentences,
            nbest=shape.nbest,
            beams=shape.beams,
            eos=EOS_ID,
        )

        # Beside them, what no step changes, and room on the host for two copies.
        self._positions = model.embedding.reserve(shape.capacity).data
        self._columns = self._xp.arange(shape.capacity, dtype=np.int32)
        empty_pinned = importlib.import_module("cupyx").empty_pinned
        self._pinned = empty_pinned((2, shape.sentences), dtype=bool)

    def start(self, state: DecoderState, max_lengths: np.ndarray, alpha: float) -> None:
        """Begin to search for the translations of an encoded batch.

        Each sentence has one beam, which has no token but BOS: the others have a
        log-probability of -infinity.

        Shapes: max_lengths [B]
        """
        xp, arrays = self._xp, self.arrays
        count, _, _, length = state.source_mask.shape

        # Nothing is left of another search: not a number, times 0, is not a number.
        arrays.cache.fill(0)
        arrays.memory.fill(0)
        arrays.source_lengths.fill(1)  # of rows without a sentence

        # Take over the encoder's output, as keys and values of each layer.
        arrays.source_lengths[:count, ..., 0] = state.source_mask.sum(axis=-1)
        for layer, cache in enumerate(state.caches):
            keys, values = cache.memory()  # [B, S, any]
            rows, end = arrays.memory[layer, :count, :length], keys.shape[-1]
            rows[..., :end] = keys
            rows[..., end : end + values.shape[-1]] = values

        # Of all lengths, know the penalty; of the sentences, the longest output.
        lengths = np.arange(self._shape.capacity + 1)
        arrays.penalties[...] = xp.asarray(length_penalty(lengths, alpha))
        arrays.limits[:count] = xp.asarray(max_lengths, np.int32)
        arrays.sentences[...] = xp.arange(len(arrays.sentences), dtype=np.int32)
        arrays.done[:count] = False
        arrays.done[count:] = True
        arrays.log_probs.fill(-np.inf)
        arrays.log_probs[:, 0] = 0
        arrays.tokens.fill(BOS_ID)
        for zeros in (arrays.origins, arrays.end_counts, arrays.position):
            zeros.fill(0)

    def run(self, size: int) -> None:
        """Queue a step of the first `size` rows of sentences."""
        if (graph := self._graphs.get(size)) is not None:
            graph.launch()
            return
        cuda = self._xp.cuda
        with cuda.using_allocator(device.current().decoding_memory.malloc):
            self.compute(size)
            if size in self._graphs:
                return
            try:
                with Recording(cuda.get_current_stream()) as recording:
                    self.compute(size)
                [self._graphs[size]] = recording.graphs
            except Exception as error:  # of the driver, of cuBLAS, of CuPy: many kinds
                warnings.warn(f"decoding without CUDA graphs: {error}", stacklevel=2)
                self._graphs[size] = None

    def compute(self, size: int) -> None:
        """Compute a step: logits of the beams, their best tokens, the next beams."""
        values, tokens, totals = top_tokens(self.logits(size), 2 * self._shape.beams)
        device.current().launch(
            "beam_search_step",
            np.float32,
            size,
            self._struct,
            values,
            tokens,
            totals,
            block=WARP,
        )
        self.arrays.position += 1

    def logits(self, size: int) -> Array:
        """Feed the newest token of each beam. Shapes: -> [B' K, V]"""
        arrays, model = self.arrays, self._model
        _, _, beams, capacity, width = arrays.cache.shape
        count = size * beams
        if beams > 1:
            self._follow_beams(size)
        in_use = self._positions_in_use()
        x = ops.embedding(
            model.embedding.table,
            arrays.tokens[:size].reshape(count, 1),
            Tensor(self._positions[arrays.position]),
            scale=model.embedding.scale,
        )
        for layer, rows, source_rows in zip(
            model.decoder, arrays.cache, arrays.memory, strict=True
        ):
            attention = layer.self_attention
            cache = GraphCache(
                rows[:size].reshape(count, capacity, width),
                source_rows[:size],
                widths=(attention.key.shape[1], attention.value.shape[1]),
                position=arrays.position,
                in_use=in_use,
            )
            x = layer.step(x, cache, arrays.source_lengths[:size])
        table = model.embedding.table.data
        return ops.linear(Tensor(x.data[:, 0]), Tensor(table.T)).data

    def _follow_beams(self, size: int) -> None:
        """Have the caches of all layers follow the beams that the search has chosen."""
        cache = self.arrays.cache
        _, _, beams, capacity, width = cache.shape
        vectors = capacity * width * cache.itemsize // VECTOR_BYTES
        across = max(device.THREADS // beams, 1)
        device.current().launch(
            "select_beams",
            cache.dtype,
            (-(-vectors // across), size, len(cache)),
            cache,
            self.arrays.origins,
            self.arrays.position,
            np.int64(cache[0].size),
            capacity,
            width,
            block=(across, beams),
        )

    def _positions_in_use(self) -> Array:
        """Return the number of positions so far, or with a window a mask of those near.

        Shapes: -> [1, 1, 1, any]
        """
        position, reach = self.arrays.position, self._model.reach
        if reach is None:
            return (position + 1).reshape(1, 1, 1, 1)
        near = self._columns >= position - reach
        return (near & (self._columns <= position))[None, None, None]

    def flags(self, step: int, count: int) -> tuple[Any, np.ndarray]:
        """Queue a copy of `done` to the host; return what to wait for, and where it is.

        A place is used again two steps later.
        """
        flags = self._pinned[step % 2, :count]
        self.arrays.done[:count].get(out=flags, blocking=False)
        return self._xp.cuda.get_current_stream().record(), flags

    def keep(self, rows: np.ndarray, step: int) -> None:
        """Move some rows of sentences together, after so many steps."""
        chosen, size, arrays = self._xp.asarray(rows), len(rows), self.arrays
        for array in (
            arrays.log_probs,
            arrays.tokens,
            arrays.origins,
            arrays.done,
            arrays.sentences,
            arrays.source_lengths,
            *arrays.memory,
        ):
            array[:size] = array[chosen]
        for layer in arrays.cache:
            layer[:size, :, :step] = layer[:, :, :step][chosen]


class GraphCache(KeyValueCache):
    """A `KeyValueCache` of a layer whose arrays stay where they are.

    Shapes: _rows [any, C, any], _source_rows [any, S, any], _position [1]
    """

    def __init__(
        self,
        rows: Array,
        source_rows: Array,
        *,
        widths: tuple[int, int],
        position: Array,
        in_use: Array,
    ) -> None:
        self._rows, self._source_rows, self._widths = rows, source_rows, widths
        self._position, self._in_use = position, in_use

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Array | None]:
        """Add a position. Return all that there is room for, and what is in use.

        Shapes: key [B K, 1, H d_k], value [B K, 1, H d_v]
        -> keys [B K, C, H d_k], values [B K, C, H d_v], in_use [1, 1, 1, any]
        """
        count, capacity, width = self._rows.shape
        device.current().launch(
            "append_to_cache",
            self._rows.dtype,
            device.num_blocks(count * sum(self._widths)),
            self._rows,
            key.data,
            value.data,
            self._position,
            count,
            capacity,
            width,
            *self._widths,
        )
        keys, values = map(Tensor, self._parts(self._rows))
        return keys, values, self._in_use

    def memory(self) -> tuple[Array, Array]:
        return self._parts(self._source_rows)

    def _parts(self, rows: Array) -> tuple[Array, Array]:
        keys, values = self._widths
        return rows[..., :keys], rows[..., keys : keys + values]


class ModelSteps:
    """The `SearchSteps` of a model by shape, which all begin in the same memory."""

    def __init__(self, table: Array) -> None:
        self.table = table
        self.block = array_module(table).empty(0, np.uint8)
        self.by_shape: dict[Shape, SearchSteps] = {}


def search_steps(model: Transformer, shape: Shape) -> SearchSteps:
    """Return the steps of a shape; their arrays may hold those of another search."""
    table, all_steps = model.embedding.table.data, device.current().searches
    of_model = all_steps.get(model)
    if of_model is None or address(of_model.table) != address(table):
        of_model = all_steps[model] = ModelSteps(table)
    if shape not in of_model.by_shape:
        size = num_bytes(model, shape)
        if size > len(of_model.block):
            # Graphs write to the block that they were recorded with.
            of_model.by_shape.clear()
            of_model.block = None
            of_model.block = array_module(table).empty(size, np.uint8)
        of_model.by_shape[shape] = SearchSteps(model, shape, of_model.block)
    return of_model.by_shape[shape]


def rounded_up(count: int) -> int:
    """Return the next of the numbers 1, 2, 3, 4, 6, 8, 12, 16, 24, ..."""
    power = 1 << max(count - 1, 0).bit_length()
    return power * 3 // 4 if 1 < count <= power * 3 // 4 else power


def power_of_two(count: int) -> int:
    """Return the next power of two, at least MIN_CAPACITY."""
    return max(1 << max(count - 1, 0).bit_length(), MIN_CAPACITY)


def top_tokens(logits: Array, count: int) -> tuple[Array, Array, Array]:
    """Return each row's best logits, their tokens, and log(sum(exp(logits))).

    Padding, the unknown token and BOS, whose ids are below EOS_ID, are never the best.

    Shapes: logits [N, V] -> best, tokens [N, count], sums [N]
    """
    xp, (rows, vocab_size) = array_module(logits), logits.shape
    values = xp.empty((rows, count), np.float32)
    tokens = xp.empty((rows, count), np.int32)
    log_totals = xp.empty(rows, np.float32)
    device.current().launch(
        "top_tokens",
        logits.dtype,
        rows,
        values,
        tokens,
        log_totals,
        xp.ascontiguousarray(logits),
        count,
        EOS_ID,
        vocab_size,
    )
    return values, tokens, log_totals
