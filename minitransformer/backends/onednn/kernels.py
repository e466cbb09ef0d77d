"""The base class of oneDNN's kernels: which products they compute, and rounding once.

The operations of `engine/ops.py` call `round_for` to round the factor of a matrix of
parameters, and `matmul` to multiply both. NumPy computes everything else.

Shapes: N rows, n inputs.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import DTypeLike

from minitransformer.engine.backend import Backend

R = TypeVar("R")

# Numbers of rows are rounded up to a multiple of at most so many: then few different
# products have to be compiled.
ROWS_STEP = 64


class CacheByOwner:
    """Values computed from arrays, each cached as long as the array's owner lives.

    An owner is an array that owns memory. Views of the same numbers share a value.
    """

    def __init__(self) -> None:
        self._values: dict[int, tuple[Any, dict[tuple[Any, ...], Any]]] = {}

    def get(self, owner: Any, array: np.ndarray, compute: Callable[..., Any]) -> Any:
        """Return `compute(array)`, or what it returned before."""
        # Forget the values of an owner together with it.
        if (key := id(owner)) not in self._values:
            ended = weakref.ref(owner, lambda _: self._values.pop(key, None))
            self._values.setdefault(key, (ended, {}))
        _, values = self._values[key]
        # Views are told apart by where they lie, and how.
        place = array.__array_interface__["data"][0], array.shape, array.strides
        if place not in values:
            values.setdefault(place, compute(array))  # another thread may be first
        return values[place]

    def forget(self, owner: Any) -> None:
        """Drop the values of the arrays of an owner."""
        self._values.pop(id(owner), None)


class Kernels(Generic[R]):
    """Products of rounded rows, of the type R, with parameters.

    `_roundings` caches roundings of vectors of parameters and of matrices in them.
    """

    def __init__(self) -> None:
        self._roundings = CacheByOwner()
        self._thread = threading.local()

    def backend(self) -> Backend:
        """Return the backend that computes with these kernels."""
        return Backend(
            find_kernel=self.find,
            parameters_changed=self.parameters_changed,
        )

    def find(self, name: str, arrays: tuple[Any, ...]) -> Callable[..., Any] | None:
        """Return the kernel of an operation, if it should compute with these arrays.

        Rows are rounded for products with a matrix of parameters that is large enough.
        Rounded rows are multiplied here.
        """
        if name == "matmul":
            return self.matmul if self._is_rounded(arrays[0]) else None
        kernels = {"round_for": self.round_for, "exponentials": self.exponentials}
        if name in kernels and _is_parameter(arrays[1]) and self._is_faster(arrays[1]):
            return kernels[name]
        return None

    def round_for(self, x: np.ndarray, weight: np.ndarray) -> R:
        """Round a matrix, and cache the result as long as its memory's owner lives.

        Queries, keys and values are projected from one array, and those of all decoder
        layers from the encoder's output. Therefore nothing may change such an array in
        place.

        Shapes: x [N, n]
        """
        owner = x if x.base is None else x.base
        if (inputs := getattr(self._thread, "inputs", None)) is None:
            inputs = self._thread.inputs = CacheByOwner()
        rounded: R = inputs.get(owner, x, self._rounded_rows)
        return rounded

    def matmul(
        self, a: Any, b: Any, bias: np.ndarray | None = None, relu: bool = False
    ) -> np.ndarray:
        """`ops.matmul` of a rounding with parameters, or with another rounding."""
        raise NotImplementedError

    def exponentials(self, rows: np.ndarray, table: np.ndarray) -> tuple[Any, Any]:
        """Return exp(rows table^T). Shapes: rows [N, D], table [V, D] -> [N, V]

        Also returns an iterator that computes the rows slice by slice and yields each
        slice, or None if all rows are computed already.
        """
        raise NotImplementedError

    def parameters_changed(self, vector: np.ndarray) -> None:
        """Renew or forget the roundings of a vector of parameters."""
        raise NotImplementedError

    def _is_rounded(self, a: Any) -> bool:
        """Whether `a` comes from `round_for`."""
        raise NotImplementedError

    def _is_faster(self, weight: np.ndarray) -> bool:
        """Whether products with a matrix are faster here than NumPy's."""
        raise NotImplementedError

    def _rounded_rows(self, x: np.ndarray) -> R:
        """Round a matrix [N, n]."""
        raise NotImplementedError


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


def _is_parameter(weight: np.ndarray) -> bool:
    """Whether a matrix is one in a flat vector of float32 parameters."""
    in_vector = weight.base is not None and weight.base.ndim == 1
    return in_vector and weight.dtype == np.float32
