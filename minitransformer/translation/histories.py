"""Which beams share which tokens, so that little is copied when beams are selected.

Beams of one sentence begin with the same tokens, and so with the same keys and values.
When a beam is replaced by another one, only the rest has to be copied.
"""

from __future__ import annotations

import numpy as np

from minitransformer.model.kv_cache import CacheEntries


class Histories:
    """A number for each token of each beam: equal ones have equal keys and values.

    They are compared with those of the same position and sentence only.
    """

    def __init__(self, beams: int) -> None:
        self._numbers = np.empty((0, beams), int)  # [tokens, beams]

    def add_token(self) -> None:
        """Add a token to each beam, which no other beam shares."""
        own = np.arange(self._numbers.shape[1])
        self._numbers = np.concatenate([self._numbers, own[None]])

    def select(self, rows: np.ndarray) -> CacheEntries | None:
        """Replace beam i by the beam in row `rows[i]`.

        Returns: the entries of a cache that differ then (positions and beams), or None
        if the number of beams has changed

        Shapes: rows [beams] -> two arrays [n]
        """
        before, self._numbers = self._numbers, self._numbers[:, rows]
        if len(rows) != before.shape[1]:
            return None
        return np.divmod(np.flatnonzero(self._numbers != before), len(rows))

    def join(self, other: Histories) -> None:
        """Add the beams of other histories, which are as long."""
        self._numbers = np.concatenate([self._numbers, other._numbers], axis=1)
