"""Sequences of token ids of any length, stored one after another (a ragged array)."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from minitransformer.settings.config import EOS_ID, PAD_ID


class StoredIds:
    """Ids in a file, of which only those that are asked for are read.

    A memory map would keep every page that was ever touched resident.
    """

    def __init__(self, path: Path, dtype: str) -> None:
        self._dtype = np.dtype(dtype)
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115
        weakref.finalize(self, self._file.close)
        self._lock = threading.Lock()  # threads share the position in the file
        self._size = path.stat().st_size // self._dtype.itemsize

    def __len__(self) -> int:
        return self._size

    def read(self, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Concatenate slices of the file. Shapes: starts, lengths [B] -> [total]"""
        file, width, parts = self._file, self._dtype.itemsize, list[bytes]()
        size = int(lengths.sum()) * width
        with self._lock:
            for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
                file.seek(start * width)
                parts.append(file.read(length * width))
        if len(found := b"".join(parts)) < size:
            expected = f"expected {size:,} bytes, read {len(found):,}"
            raise ValueError(f"{file.name}: {expected}: it was cut off while in use")
        return np.frombuffer(found, self._dtype)


class Ragged:
    """Concatenated sequences of ids: sequence i is ids[starts[i]:starts[i + 1]].

    Shapes: ids [total], starts [number of sequences + 1]
    """

    def __init__(self, ids: np.ndarray | StoredIds, starts: np.ndarray) -> None:
        self.ids, self.starts = ids, starts

    @classmethod
    def from_lists(cls, lines: Sequence[Sequence[int]]) -> Ragged:
        ids = np.fromiter((i for line in lines for i in line), np.int64)
        return cls(ids, np.cumsum([0, *map(len, lines)]))

    def __len__(self) -> int:
        return len(self.starts) - 1

    @functools.cached_property
    def lengths(self) -> np.ndarray:
        """The number of ids in each sequence. Shapes: [number of sequences]

        Raises: ValueError if `starts` decreases, or a sequence has 2^31 ids or more.
        """
        lengths = np.empty(len(self), dtype=np.int32)
        for first in range(0, len(self), 1 << 20):
            part = slice(first, first + (1 << 20))
            found = np.diff(self.starts[first : part.stop + 1])
            if not 0 <= found.min() <= found.max() < 1 << 31:
                raise ValueError("the starts of sentences are out of order")
            lengths[part] = found
        return lengths

    def concatenate(self, chosen: np.ndarray) -> np.ndarray:
        """Return the ids of the chosen sequences. Shapes: chosen [B] -> [total]"""
        starts = self.starts[chosen]
        lengths = self.starts[chosen + 1] - starts
        if isinstance(self.ids, StoredIds):
            return self.ids.read(starts, lengths)
        first = np.repeat(starts - (np.cumsum(lengths) - lengths), lengths)
        return self.ids[first + np.arange(len(first))]

    def pad(self, chosen: np.ndarray, first: int | None = None) -> np.ndarray:
        """Stack the chosen sequences, each ended by EOS and padded to the longest.

        With `first`, each sequence begins with that id (BOS).
        Shapes: chosen [B] -> [B, longest], EOS and `first` counted
        """
        lengths = self.lengths[chosen]
        columns = np.arange(lengths.max(initial=0))
        begin = int(first is not None)
        out = np.full((len(chosen), begin + len(columns) + 1), PAD_ID, dtype=np.int64)
        out[:, begin:-1][columns < lengths[:, None]] = self.concatenate(chosen)
        out[np.arange(len(chosen)), begin + lengths] = EOS_ID
        if first is not None:
            out[:, 0] = first
        return out
