"""The key/value cache of incremental decoding.

The decoder caches the keys and values of each position, so that a new position attends
to all earlier ones without computing them again. Shapes: B batch, K beams of each
sentence, S source, H heads of widths d_k and d_v.
"""

from __future__ import annotations

import sys

import numpy as np

from minitransformer.engine.autograd import Tensor
from minitransformer.engine.backend import Array, array_module

# The positions that a cache has room for at first. It doubles when it is full.
FIRST_CAPACITY = 16


class KeyValueCache:
    """The keys and values of one decoder layer: of its own positions and of the memory.

    Position is the first axis: the positions in use are one piece of memory, which the
    processor reads from one end to the other. Attention to them is up to four times as
    fast as where each beam has a piece of its own.

    Shapes: keys [capacity, B K, H d_k], values [capacity, B K, H d_v],
    memory_keys [S, B, H d_k], memory_values [S, B, H d_v]
    """

    def __init__(
        self, memory_keys: Array, memory_values: Array, reach: int | None = None
    ) -> None:
        xp = array_module(memory_keys)
        rows = memory_keys.shape[1]
        self.memory_keys = memory_keys
        self.memory_values = memory_values
        self.reach = sys.maxsize if reach is None else reach
        self.keys, self.values = (
            xp.empty((FIRST_CAPACITY, rows, m.shape[-1]), dtype=m.dtype)
            for m in (memory_keys, memory_values)
        )
        self.length = 0  # the positions in use

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Array | None]:
        """Add a position. Return the n keys and values in reach, and a mask, None here.

        A cache in a CUDA graph has a fixed size, so its mask hides unused positions.

        Shapes: key [B K, 1, H d_k], value [B K, 1, H d_v]
        -> keys [B K, n, H d_k], values [B K, n, H d_v], mask [1, 1, 1, n]
        """
        # Double the capacity if the cache is full.
        if self.length == len(self.keys):
            xp = array_module(self.keys)
            self.keys, self.values = (
                xp.concatenate([array, xp.empty_like(array)])
                for array in (self.keys, self.values)
            )
        self.keys[self.length] = key.data[:, 0]
        self.values[self.length] = value.data[:, 0]
        self.length += 1
        # With restricted attention (section 4), only the last positions are in reach.
        keys, values = self.first(self.length)
        near = slice(max(self.length - 1 - self.reach, 0), None)
        return Tensor(keys[:, near]), Tensor(values[:, near]), None

    def first(self, count: int) -> tuple[Array, Array]:
        """View the first `count` keys and values. Shapes: -> each [B K, count, any]"""
        return self.keys[:count].swapaxes(0, 1), self.values[:count].swapaxes(0, 1)

    def memory(self) -> tuple[Array, Array]:
        """View the memory's keys and values. Shapes: -> each [B, S, any]"""
        return self.memory_keys.swapaxes(0, 1), self.memory_values.swapaxes(0, 1)

    def select_beams(self, rows: Array) -> None:
        """Replace beam i by the beam in row `rows[i]`. Shapes: rows [B' K']"""
        self.keys = self._selected(self.keys, rows)
        self.values = self._selected(self.values, rows)

    def _selected(self, array: Array, rows: Array) -> Array:
        if not isinstance(array, np.ndarray):
            return array[:, rows]
        selected = np.empty((len(array), len(rows), array.shape[-1]), array.dtype)
        used = slice(self.length)
        out = selected[used]
        array[used].take(rows, axis=1, out=out, mode="clip")  # "raise" would buffer
        return selected

    def select_sentences(self, sentences: Array) -> None:
        """Keep the memory of `sentences` only. Shapes: sentences [B']"""
        xp = array_module(self.memory_keys)
        self.memory_keys = xp.take(self.memory_keys, sentences, axis=1)
        self.memory_values = xp.take(self.memory_values, sentences, axis=1)

    def join(self, other: KeyValueCache) -> None:
        """Add the beams and the memory of a cache that has as many positions."""
        used = self.length
        capacity = len(self.keys)
        self.keys = _joined(self.keys[:used], other.keys[:used], capacity)
        self.values = _joined(self.values[:used], other.values[:used], capacity)
        self.memory_keys = _joined(self.memory_keys, other.memory_keys)
        self.memory_values = _joined(self.memory_values, other.memory_values)


def _joined(a: Array, b: Array, length: int = 0) -> Array:
    """Put arrays side by side, with zeros below their last rows.

    Shapes: a [S, B, ...], b [S', B', ...] -> [max(S, S', length), B + B', ...]
    """
    length = max(len(a), len(b), length)
    columns = a.shape[1] + b.shape[1]
    joined = array_module(a).zeros((length, columns, *a.shape[2:]), a.dtype)
    joined[: len(a), : a.shape[1]] = a
    joined[: len(b), a.shape[1] :] = b
    return joined


class DecoderState:
    """The caches of all decoder layers for a batch of sentences.

    Each sentence starts with one beam. From the first `select` on it may have K beams,
    in rows side by side. `position` counts the tokens decoded so far.

    Shapes: source_mask [B, 1, 1, S]
    """

    def __init__(self, caches: list[KeyValueCache], source_mask: Array) -> None:
        self.caches = caches
        self.source_mask = source_mask
        self.beam_size = 1
        self.position = 0

    def select(self, rows: Array, beam_size: int) -> None:
        """Continue with `rows` of the current beams, `beam_size` of each sentence.

        Sentences of which no row is left leave the batch.

        Shapes: rows [B' beam_size]
        """
        count = len(self.source_mask) * self.beam_size
        is_on_host = isinstance(rows, np.ndarray)
        if is_on_host and len(rows) == count and (rows == np.arange(count)).all():
            self.beam_size = beam_size
            return  # all go on as before, as in greedy search
        for cache in self.caches:
            cache.select_beams(rows)
        # Forget the sentences of which no beam is left.
        if len(rows) < len(self.source_mask) * beam_size:
            sentences = rows[::beam_size] // self.beam_size
            self.source_mask = self.source_mask[sentences]
            for cache in self.caches:
                cache.select_sentences(sentences)
        self.beam_size = beam_size

    def join(self, other: DecoderState) -> None:
        """Add the sentences of a state with the same position and beam size."""
        here = self.source_mask[:, 0, 0].T  # [S, B]
        there = other.source_mask[:, 0, 0].T
        self.source_mask = _joined(here, there).T[:, None, None]
        for cache, joining in zip(self.caches, other.caches, strict=True):
            cache.join(joining)
