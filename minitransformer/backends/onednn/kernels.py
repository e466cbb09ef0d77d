"""What the kernels in bfloat16 and int8 share: roundings are cached, rows are padded.

Shapes: N rows, n inputs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from minitransformer.backends.onednn.library import address_of

# Numbers of rows are rounded up to a multiple of at most so many: then few different
# products have to be compiled.
ROWS_STEP = 64


class CacheByOwner:
    """Values computed from arrays, each cached as long as the array's owner lives.

    An owner is an array that owns memory. Views of the same numbers share a value.
    """

    def __init__(self) -> None:
        self._values: dict[int, tuple[Any, dict[tuple[Any, ...], Any]]] = {}

    def get(self, owner: Any, compute: Callable[..., Any], *arrays: np.ndarray) -> Any:
        """Return `compute(*arrays)`, or what it returned before."""
        # Forget the values of an owner together with it.
        if (key := id(owner)) not in self._values:
            ended = weakref.ref(owner, lambda _: self._values.pop(key, None))
            self._values.setdefault(key, (ended, {}))
        _, values = self._values[key]
        # Views are told apart by where they lie, and how.
        place = tuple([(address_of(a), a.shape, a.strides) for a in arrays])
        if place not in values:
            values.setdefault(place, compute(*arrays))  # another thread may be first
        return values[place]

    def forget(self, owner: Any) -> None:
        """Drop the values of the arrays of an owner."""
        self._values.pop(id(owner), None)


def more_rows(count: int) -> int:
    """Round a number of rows up to a multiple of 16, of 32 from 256 on, of 64 from 512.

    Each different number of rows costs the time to compile a product.
    """
    step = min(max(16, 1 << count.bit_length() >> 4), ROWS_STEP)
    return -(-count // step) * step


def with_more_rows(x: np.ndarray, dtype: DTypeLike) -> np.ndarray:
    """Return an array with room for a matrix, padded with rows of zeros.

    Shapes: x [N, n] -> [more_rows(N), n]
    """
    out: np.ndarray = np.empty((more_rows(len(x)), x.shape[1]), dtype)
    out[len(x) :] = 0
    return out


def is_parameter(weight: np.ndarray) -> bool:
    """Whether a matrix is one in a flat vector of float32 parameters."""
    in_vector = weight.base is not None and weight.base.ndim == 1
    return in_vector and weight.dtype == np.float32
