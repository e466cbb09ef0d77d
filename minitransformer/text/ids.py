"""Sequences of token ids of any length, stored one after another (a ragged array)."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import numpy as np

from minitransformer.settings.config import EOS_ID, PAD_ID


class Ragged:
    """Concatenated sequences of ids: sequence i is ids[starts[i]:starts[i + 1]].

    Shapes: ids [total], starts [sequences + 1]
    """

    def __init__(self, ids: np.ndarray, starts: np.ndarray) -> None:
        self.ids = ids
        self.starts = starts

    @classmethod
    def from_lists(cls, lines: Sequence[Sequence[int]]) -> Ragged:
        ids = np.fromiter(itertools.chain.from_iterable(lines), np.int64)
        return cls(ids, np.cumsum([0, *map(len, lines)]))

    def __len__(self) -> int:
        return len(self.starts) - 1

    @functools.cached_property
    def lengths(self) -> np.ndarray:
        """The number of ids in each sequence. Shapes: -> [sequences]"""
        return np.diff(self.starts).astype(np.int32)

    def concatenate(self, chosen: np.ndarray) -> np.ndarray:
        """Return the ids of the chosen sequences. Shapes: chosen [B] -> [total]"""
        starts = self.starts[chosen]
        lengths = self.starts[chosen + 1] - starts
        # `arange` counts through all chosen sequences. For each id, `first` moves the
        # count to the place of its sequence in `ids`.
        first = np.repeat(starts - (np.cumsum(lengths) - lengths), lengths)
        return self.ids[first + np.arange(len(first))]

    def pad(self, chosen: np.ndarray, first: int | None = None) -> np.ndarray:
        """Stack the chosen sequences, each ended by EOS and padded to the longest.

        With `first`, each sequence begins with that id (BOS).

        Shapes: chosen [B] -> [B, longest]
        """
        # Where a row has ids, they come in the order of the concatenated sequences.
        lengths = self.lengths[chosen]
        columns = np.arange(lengths.max(initial=0))
        begin = int(first is not None)
        out = np.full((len(chosen), begin + len(columns) + 1), PAD_ID, dtype=np.int64)
        out[:, begin:-1][columns < lengths[:, None]] = self.concatenate(chosen)
        out[np.arange(len(chosen)), begin + lengths] = EOS_ID
        if first is not None:
            out[:, 0] = first
        return out
