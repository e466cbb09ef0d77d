"""The base class of oneDNN's kernels: what is rounded, and which products they compute.

The operations of `engine/ops.py` call `round_for` to round what they multiply by
parameters, and `matmul` for the product. NumPy computes everything else.

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

# Numbers of rows are rounded up, from 512 on to a multiple of this one, so that few
# products have to be compiled.
ROWS_STEP = 64


class Kept:
    """What was made of arrays, kept while the `owner` of their numbers lives.

    For all views of the same numbers, it is made once.
    """

    def __init__(self) -> None:
        self.by_owner: dict[int, tuple[Any, dict[tuple[Any, ...], Any]]] = {}

    def get(self, owner: Any, array: np.ndarray, make: Callable[..., Any]) -> Any:
        """Return `make(array)`, made now or before."""
        if (key := id(owner)) not in self.by_owner:
            ended = weakref.ref(owner, lambda _: self.by_owner.pop(key))
            self.by_owner.setdefault(key, (ended, {}))
        made = self.by_owner[key][1]
        place = array.__array_interface__["data"][0], array.shape, array.strides
        if place not in made:
            made.setdefault(place, make(array))  # another thread may be the first
        return made[place]


class Kernels(Generic[R]):
    """Products of rounded rows, of the type R, with parameters.

    `_kept` has what was made of vectors of parameters and of matrices in them.
    """

    def __init__(self) -> None:
        self._kept, self._thread = Kept(), threading.local()

    def backend(self) -> Backend:
        """Return the backend that computes with these kernels."""
        return Backend(
            find_kernel=self.find,
            parameters_changed=self.parameters_changed,
        )

    def find(self, name: str, arrays: tuple[Any, ...]) -> Callable[..., Any] | None:
        """Return a kernel by its name, if it is for these arrays.

        Rows are rounded for products with a matrix of parameters that is not too small;
        then they are multiplied here.
        """
        if name == "matmul":
            return self.matmul if self._is_rounded(arrays[0]) else None
        kernels = {"round_for": self.round_for, "exponentials": self.exponentials}
        if name in kernels and _is_parameter(arrays[1]) and self._is_faster(arrays[1]):
            return kernels[name]
        return None

    def round_for(self, x: np.ndarray, weight: np.ndarray) -> R:
        """Round a matrix [N, n], once while the array that has its numbers lives.

        Queries, keys and values are projected from one array, and those of all decoder
        layers from the encoder's output. So nothing may change such an array in place.
        """
        owner = x if x.base is None else x.base
        if (inputs := getattr(self._thread, "inputs", None)) is None:
            inputs = self._thread.inputs = Kept()
        rounded: R = inputs.get(owner, x, self._rounded_rows)
        return rounded

    def matmul(
        self, a: Any, b: Any, bias: np.ndarray | None = None, relu: bool = False
    ) -> np.ndarray:
        """`ops.matmul` of a rounding with parameters, or with another rounding."""
        raise NotImplementedError

    def exponentials(self, rows: np.ndarray, table: np.ndarray) -> tuple[Any, Any]:
        """Return exp(rows table^T). Shapes: rows [N, D], table [V, D] -> [N, V]

        Also returns an iterator over slices of its rows, which computes them on the
        way, or None if all are there.
        """
        raise NotImplementedError

    def parameters_changed(self, vector: np.ndarray) -> None:
        """Renew or forget what was made of a vector of parameters."""
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
    """Return a number of rows rounded up, to a multiple of 16, 32 or 64.

    Products of ever new numbers of rows would be compiled again and again.
    """
    step = min(max(16, 1 << count.bit_length() >> 4), ROWS_STEP)
    return -(-count // step) * step


def with_more_rows(x: np.ndarray, dtype: DTypeLike) -> np.ndarray:
    """Return an array with room for a matrix, and rows of zeros that follow.

    Shapes: x [N, n] -> [more_rows(N), n]
    """
    out: np.ndarray = np.empty((more_rows(len(x)), x.shape[1]), dtype)
    out[len(x) :] = 0
    return out


def _is_parameter(weight: np.ndarray) -> bool:
    """Whether a matrix is one in a flat vector of float32 parameters."""
    in_vector = weight.base is not None and weight.base.ndim == 1
    return in_vector and weight.dtype == np.float32
