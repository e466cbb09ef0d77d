"""Beam search on a GPU (section 6.1): one launch computes a step, decoder and all.

A step is a CUDA graph, which reads and writes arrays that stay where they are. Its
sizes are rounded up, so that few graphs serve all batches of a file. Numbers that
change (the position, the lengths of sentences) are on the GPU. The host queues a step
while it reads, of the one before, which sentences are done.

Shapes: B sentences of a batch, B' rows for those that are left, K beams, n hypotheses,
C capacity of the caches, S source, V vocabulary, L decoder layers
"""

from __future__ import annotations

import importlib
import math
import warnings
from collections import deque
from types import SimpleNamespace
from typing import Any, NamedTuple
from weakref import proxy

import numpy as np

from minitransformer.backends.cuda import device
from minitransformer.backends.cuda.device import WARP, address
from minitransformer.engine import ops
from minitransformer.engine.autograd import Tensor
from minitransformer.engine.backend import Array, array_module, to_host
from minitransformer.model.kv_cache import DecoderState, KeyValueCache
from minitransformer.model.transformer import Transformer
from minitransformer.settings.config import BOS_ID, EOS_ID
from minitransformer.translation.beam_search import (
    NOT_FINITE,
    BeamSearch,
    Hypothesis,
    length_penalty,
)
from minitransformer.translation.incremental_decoding import (
    CachedDecoder,
    IncrementalDecoder,
)

# A piece of memory begins at a multiple of so many bytes.
ALIGNMENT = 256

# The smallest capacity of a cache, of the decoder or of the source: a tile of keys.
MIN_CAPACITY = 16

# The threads of a block of `select_beams`, at least one for each beam.
THREADS = 256

# What `beam_search_step` reads and writes: Search in beam_search.cu.
SEARCH = np.dtype(
    [
        *(
            (name, np.uint64)
            for name in (
                "log_probs next tokens origins done sentences limits penalties "
                "end_scores end_log_probs end_steps end_beams end_counts "
                "all_origins all_tokens position"
            ).split()
        ),
        *((name, np.int32) for name in "all_sentences nbest beams eos".split()),
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


def start_search(
    decoder: IncrementalDecoder,
    sentences: np.ndarray,
    max_lengths: np.ndarray,
    *,
    beam_size: int,
    alpha: float,
    nbest: int,
) -> GraphSearch | BeamSearch:
    """Return the search for the translations of a batch, as `BeamSearch` is made.

    Decoders that are constrained, or of several models, are asked for their weights.
    """
    if not isinstance(decoder, CachedDecoder):
        return BeamSearch(
            decoder,
            sentences,
            max_lengths,
            beam_size=beam_size,
            alpha=alpha,
            nbest=nbest,
        )
    device.current().use_recordable_stream()
    shape = Shape(
        sentences=rounded_up(len(sentences)),
        beams=beam_size,
        nbest=nbest,
        capacity=power_of_two(int(max_lengths.max())),
        source=power_of_two(decoder.state.source_mask.shape[-1]),
    )
    steps = decoding_steps(decoder.model, shape)
    steps.begin(decoder.state)
    return GraphSearch(steps, sentences, max_lengths, alpha)


class GraphSearch:
    """A `BeamSearch` of a batch to its end, in one step: no other search may join."""

    length = 0

    def __init__(
        self,
        steps: SearchSteps,
        sentences: np.ndarray,
        max_lengths: np.ndarray,
        alpha: float,
    ) -> None:
        self.sentences, self._steps = sentences, steps
        self._max_lengths, self._alpha = max_lengths, alpha

    def step(self) -> list[tuple[int, list[Hypothesis]]]:
        numbers, self.sentences = self.sentences.tolist(), self.sentences[:0]
        last = self._search()
        return list(
            zip(numbers, self._steps.hypotheses(len(numbers), last), strict=True)
        )

    def _search(self) -> int:
        """Run steps until all sentences are done. Return how many were run."""
        steps, last = self._steps, int(self._max_lengths.max())
        steps.start(self._max_lengths, self._alpha)
        rows = np.arange(len(self._max_lengths))  # the sentence of each row
        size, done = len(steps.arrays.done), np.zeros(len(rows), bool)
        pending = deque[tuple[Any, np.ndarray, np.ndarray]]()
        for step in range(1, last + 1):
            steps.run(size)
            pending.append((*steps.flags(step, len(rows)), rows))
            # The host waits for the step before, while the GPU computes this one.
            if len(pending) == 1 and step < last:
                continue
            copied, flags, of_rows = pending.popleft()
            copied.synchronize()
            done[of_rows] |= flags
            if done.all():
                return step
            # Once half of the sentences are done, the others move together.
            left = np.flatnonzero(~done[rows])
            if (smaller := rounded_up(len(left))) <= size / 2:
                finished = np.flatnonzero(done[rows])[0]
                padding = np.full(smaller - len(left), finished)
                steps.keep(np.concatenate([left, padding]), step)
                size, rows = smaller, rows[left]
        return last


class GraphCache(KeyValueCache):
    """A `KeyValueCache` of a layer whose arrays stay where they are.

    A row has a position's key and, behind it, its value.

    Shapes: _rows [any, C, any], _source_rows [any, S, any], _position [1]
    """

    def __init__(
        self,
        rows: Array,
        source_rows: Array,
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


class SearchSteps:
    """The arrays of searches of a shape, and the graphs of their steps.

    `compute` runs a step's kernels one by one. A graph serves for one number of rows.
    It is recorded when that number first occurs, after a step that has compiled the
    kernels.
    """

    def __init__(self, model: Transformer, shape: Shape, block: Array) -> None:
        gpu = device.current()
        self._xp, self._shape = gpu.xp, shape
        self._model = proxy(model)  # whose searches end with it
        self.arrays = SimpleNamespace()
        self._graphs: dict[int, Any] = {}
        self._pinned = importlib.import_module("cupyx").empty_pinned(
            (2, shape.sentences), dtype=bool
        )
        for name, (sizes, dtype, place) in layout(model, shape)[0].items():
            part = block[place : place + math.prod(sizes) * np.dtype(dtype).itemsize]
            setattr(self.arrays, name, part.view(dtype).reshape(sizes))
        self._positions = model.embedding.reserve(shape.capacity).data
        self._columns = self._xp.arange(shape.capacity, dtype=np.int32)
        pointers = {name: address(x) for name, x in vars(self.arrays).items()}
        self._struct = device.struct(
            SEARCH,
            **pointers,
            all_sentences=shape.sentences,
            nbest=shape.nbest,
            beams=shape.beams,
            eos=EOS_ID,
        )

    def begin(self, state: DecoderState) -> None:
        """Take over the memory of an encoded batch."""
        count, _, _, length = state.source_mask.shape
        self.arrays.memory.fill(0)  # not a number times a weight of 0 is not a number
        self.arrays.source_lengths.fill(1)  # of rows without a sentence
        self.arrays.source_lengths[:count, ..., 0] = state.source_mask.sum(axis=-1)
        for layer, cache in enumerate(state.caches):
            keys, values = cache.memory()  # [B, S, any]
            rows, end = self.arrays.memory[layer, :count, :length], keys.shape[-1]
            rows[..., :end] = keys
            rows[..., end : end + values.shape[-1]] = values

    def start(self, max_lengths: np.ndarray, alpha: float) -> None:
        """Begin a search: each sentence has one beam, which has no token but BOS."""
        xp, count = self._xp, len(max_lengths)
        self.arrays.limits[:count] = xp.asarray(max_lengths, np.int32)
        lengths = np.arange(self._shape.capacity + 1)
        self.arrays.penalties[...] = xp.asarray(length_penalty(lengths, alpha))
        self.arrays.sentences[...] = xp.arange(
            len(self.arrays.sentences), dtype=np.int32
        )
        self.arrays.done[:count] = False
        self.arrays.done[count:] = True
        self.arrays.cache.fill(0)
        self.arrays.log_probs.fill(-np.inf)
        self.arrays.log_probs[:, 0] = 0
        self.arrays.tokens.fill(BOS_ID)
        for zeros in (
            self.arrays.origins,
            self.arrays.end_counts,
            self.arrays.position,
        ):
            zeros.fill(0)

    def run(self, size: int) -> None:
        """Queue a step of the first `size` rows of sentences."""
        if (graph := self._graphs.get(size)) is not None:
            graph.launch()
            return
        stream, memory = (
            self._xp.cuda.get_current_stream(),
            device.current().decoding[1],
        )
        with self._xp.cuda.using_allocator(memory.malloc):
            self.compute(size)
            if size in self._graphs:
                return
            try:
                [graph], _ = device.record(stream, lambda cut: self.compute(size))
            except Exception as error:  # of the driver, of cuBLAS, of CuPy: many kinds
                warnings.warn(f"decoding without CUDA graphs: {error}", stacklevel=2)
                graph = None
        self._graphs[size] = graph

    def compute(self, size: int) -> None:
        """Compute a step: logits of the beams, their best tokens, the next beams."""
        gpu, beams = device.current(), self._shape.beams
        values, tokens, totals = top_tokens(self.logits(size), 2 * beams)
        arrays = self._struct, values, tokens, totals
        gpu.launch("beam_search_step", np.float32, size, *arrays, block=WARP)
        self.arrays.position += 1

    def logits(self, size: int) -> Array:
        """Feed the newest token of each beam. Shapes: -> [B' K, V]"""
        gpu, model, shape = device.current(), self._model, self._shape
        count, width = size * shape.beams, self.arrays.cache.shape[-1]

        # The caches follow their beams, in all layers at once.
        if shape.beams > 1:
            vectors = shape.capacity * width * self.arrays.cache.itemsize // 16
            across = max(THREADS // shape.beams, 1)
            gpu.launch(
                "select_beams",
                self.arrays.cache.dtype,
                (-(-vectors // across), size, len(self.arrays.cache)),
                self.arrays.cache,
                self.arrays.origins,
                self.arrays.position,
                np.int64(self.arrays.cache[0].size),
                shape.capacity,
                width,
                block=(across, shape.beams),
            )

        # The layers read the positions in use, and those of each source sentence.
        in_use = (self.arrays.position + 1).reshape(1, 1, 1, 1)
        if model.reach is not None:
            near = self._columns >= self.arrays.position - model.reach
            in_use = (near & (self._columns <= self.arrays.position))[None, None, None]
        embedding = model.embedding
        x = ops.embedding(
            embedding.table,
            self.arrays.tokens[:size].reshape(count, 1),
            Tensor(self._positions[self.arrays.position]),
            scale=embedding.scale,
        )
        for layer, rows, source_rows in zip(
            model.decoder, self.arrays.cache, self.arrays.memory, strict=True
        ):
            attention = layer.self_attention
            cache = GraphCache(
                rows[:size].reshape(count, shape.capacity, width),
                source_rows[:size],
                widths=(attention.key.shape[1], attention.value.shape[1]),
                position=self.arrays.position,
                in_use=in_use,
            )
            x = layer.step(x, cache, self.arrays.source_lengths[:size])
        return ops.linear(Tensor(x.data[:, 0]), Tensor(embedding.table.data.T)).data

    def flags(self, step: int, count: int) -> tuple[Any, np.ndarray]:
        """Queue a copy of `done` to the host; return what to wait for, and where it is.

        A place is used again two steps later.
        """
        flags = self._pinned[step % 2, :count]
        self.arrays.done[:count].get(out=flags, blocking=False)
        return self._xp.cuda.get_current_stream().record(), flags

    def keep(self, rows: np.ndarray, step: int) -> None:
        """Move some rows of sentences together, after so many steps."""
        chosen, size = self._xp.asarray(rows), len(rows)
        for array in (
            self.arrays.log_probs,
            self.arrays.tokens,
            self.arrays.origins,
            self.arrays.done,
            self.arrays.sentences,
            self.arrays.source_lengths,
            *self.arrays.memory,
        ):
            array[:size] = array[chosen]
        for layer in self.arrays.cache:
            layer[:size, :, :step] = layer[:, :, :step][chosen]

    def hypotheses(self, count: int, steps: int) -> list[list[Hypothesis]]:
        """Collect the finished hypotheses of the first `count` sentences.

        Raises: ValueError if a sentence has none, as a logit was not finite.
        """
        ends = (
            self.arrays.end_scores,
            self.arrays.end_log_probs,
            self.arrays.end_steps,
            self.arrays.end_beams,
        )
        scores, log_probs, lengths, beams = (to_host(x[:count]) for x in ends)
        counts = to_host(self.arrays.end_counts[:count])
        if not counts.all():
            raise ValueError(NOT_FINITE)
        history = (
            self.arrays.all_origins[:steps, :count],
            self.arrays.all_tokens[:steps, :count],
        )
        origins, tokens = map(to_host, history)

        # Follow all hypotheses at once, from their last token to the first.
        sentence = np.arange(count)[:, None]
        used = np.arange(scores.shape[1]) < counts[:, None]  # [B, n]
        lengths, beam = np.where(used, lengths, 0), np.where(used, beams, 0)
        paths = np.zeros((*used.shape, steps), np.int32)
        for step in reversed(range(steps)):
            inside = step < lengths
            paths[..., step] = tokens[step, sentence, beam]
            beam = np.where(inside, origins[step, sentence, beam], beam)
        return [
            [
                Hypothesis(
                    tokens=tuple(paths[b, n, : lengths[b, n]].tolist()),
                    score=float(scores[b, n]),
                    log_prob=float(log_probs[b, n]),
                )
                for n in np.flatnonzero(used[b])
            ]
            for b in range(count)
        ]


class ModelSteps:
    """The `SearchSteps` of a model by shape, which all begin in the same memory."""

    def __init__(self, table: Array) -> None:
        self.table, self.block = table, array_module(table).empty(0, np.uint8)
        self.by_shape: dict[Shape, SearchSteps] = {}


def decoding_steps(model: Transformer, shape: Shape) -> SearchSteps:
    """Return the steps of a shape; their arrays may hold those of another search."""
    table, all_steps = model.embedding.table.data, device.current().searches
    of_model = all_steps.get(model)
    if of_model is None or address(of_model.table) != address(table):
        of_model = all_steps[model] = ModelSteps(table)
    if shape not in of_model.by_shape:
        size = layout(model, shape)[1]
        if size > len(of_model.block):
            # Graphs write to the block that they were recorded with.
            of_model.by_shape.clear()
            of_model.block = None
            of_model.block = array_module(table).empty(size, np.uint8)
        of_model.by_shape[shape] = SearchSteps(model, shape, of_model.block)
    return of_model.by_shape[shape]


def layout(
    model: Transformer, shape: Shape
) -> tuple[dict[str, tuple[tuple[int, ...], Any, int]], int]:
    """Return the size, type and place of each array, and the bytes of all."""
    rows, beams, nbest, capacity, source = shape
    attention = model.decoder[0].self_attention
    activations = model.embedding.table.data.dtype
    vector = 16 // activations.itemsize
    width = attention.key.shape[1] + attention.value.shape[1]
    width = -(-width // vector) * vector
    layers = len(model.decoder)
    of_beams = (rows, beams)
    sizes: dict[str, tuple[tuple[int, ...], Any]] = {
        "cache": ((layers, rows, beams, capacity, width), activations),
        "memory": ((layers, rows, source, width), activations),
        "source_lengths": ((rows, 1, 1, 1), np.int32),
        "log_probs": (of_beams, np.float64),
        "next": (of_beams, np.float64),
        "tokens": (of_beams, np.int32),
        "origins": (of_beams, np.int32),
        "done": ((rows,), bool),
        "sentences": ((rows,), np.int32),
        "limits": ((rows,), np.int32),
        "penalties": ((capacity + 1,), np.float64),
        "end_scores": ((rows, nbest), np.float64),
        "end_log_probs": ((rows, nbest), np.float64),
        "end_steps": ((rows, nbest), np.int32),
        "end_beams": ((rows, nbest), np.int32),
        "end_counts": ((rows,), np.int32),
        "all_origins": ((capacity, *of_beams), np.int32),
        "all_tokens": ((capacity, *of_beams), np.int32),
        "position": ((1,), np.int32),
    }
    placed, place = {}, 0
    for name, (size, dtype) in sizes.items():
        placed[name] = size, dtype, place
        num_bytes = math.prod(size) * np.dtype(dtype).itemsize
        place += -(-num_bytes // ALIGNMENT) * ALIGNMENT
    return placed, place


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
    tokens, log_totals = xp.empty(values.shape, np.int32), xp.empty(rows, np.float32)
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
