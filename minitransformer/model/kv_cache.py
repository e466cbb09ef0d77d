"""TODO."""

from __future__ import annotations

import sys

import numpy as np

from minitransformer.engine.autograd import Tensor
from minitransformer.engine.backend import Array, array_module


class KeyValueCache:
    """What one decoder layer remembers: its own keys and values, and the memory's.

    Restricted to a neighbourhood, it keeps what the newest position may see, in any
    order: attention needs none.

    Shapes: keys, values [B K, capacity, H d], memory_keys, memory_values [B, S, H d]
    """

    mask: Array | None = None  # of what `append` returns, all of it is in use

    def __init__(
        self,
        memory_keys: Array,
        memory_values: Array,
        neighbourhood: tuple[int, int] | None = None,
    ) -> None:
        xp = array_module(memory_keys)
        self.memory_keys, self.memory_values = memory_keys, memory_values
        self.limit = neighbourhood[0] + 1 if neighbourhood else sys.maxsize
        rows, capacity = len(memory_keys), min(16, self.limit)
        self.keys, self.values = (
            xp.empty((rows, capacity, m.shape[-1]), dtype=m.dtype)
            for m in (memory_keys, memory_values)
        )
        self.length = 0

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store one position [B K, 1, H d] and return all in use [B K, used, H d]."""
        place = self.length % self.limit
        if place == self.keys.shape[1]:
            self.keys, self.values = (
                _with_double_capacity(self.keys),
                _with_double_capacity(self.values),
            )
        self.keys[:, place] = key.data[:, 0]
        self.values[:, place] = value.data[:, 0]
        self.length += 1
        return Tensor(self.keys[:, : self.used]), Tensor(self.values[:, : self.used])

    @property
    def used(self) -> int:
        return min(self.length, self.limit)

    def select(self, rows: Array, moved: Array | None, sentences: Array | None) -> None:
        """Keep `rows` of the beams, of which those at `moved` come from elsewhere.

        Without `moved` any may. Unless it is None, keep `sentences` of the memory.
        """
        if moved is None or len(rows) > len(self.keys):  # one beam becomes several
            self.keys, self.values = self.keys[rows], self.values[rows]
        else:
            used, origins = self.used, rows[moved]
            for cache in (self.keys, self.values):
                cache[moved, :used] = cache[origins, :used]
            self.keys, self.values = self.keys[: len(rows)], self.values[: len(rows)]
        if sentences is not None:
            self.memory_keys = self.memory_keys[sentences]
            self.memory_values = self.memory_values[sentences]


def _with_double_capacity(cache: Array) -> Array:
    rows, capacity, width = cache.shape
    xp = array_module(cache)
    longer = xp.empty((rows, 2 * capacity, width), dtype=cache.dtype)
    longer[:, :capacity] = cache
    return longer


class DecoderState:
    """The caches of all decoder layers for a batch of sentences.

    Each sentence starts with one beam and may go on with K, in rows side by side.
    """

    def __init__(self, caches: list[KeyValueCache], source_mask: Array) -> None:
        self.caches = caches
        self.source_mask = source_mask  # [B, 1, 1, S]
        self.beam_size = 1
        self.position = 0

    def select(self, rows: Array, beam_size: int) -> None:
        """Go on with the beams `rows` [B' K], of which each K come from one sentence.

        Sentences without a row leave the batch.
        """
        xp = array_module(self.source_mask)
        rows = xp.asarray(rows)
        moved = None
        if xp is np:  # a GPU copies all sooner than it tells which have moved
            moved = np.flatnonzero(rows != np.arange(len(rows)))
        sentences = None
        if len(rows) < len(self.source_mask) * beam_size:
            sentences = rows[::beam_size] // self.beam_size
            self.source_mask = self.source_mask[sentences]
        self.beam_size = beam_size
        for cache in self.caches:
            cache.select(rows, moved, sentences)
