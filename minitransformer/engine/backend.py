"""The array libraries, and what a device computes in its own way.

Most code calls the functions of the library that its arrays belong to, NumPy or CuPy.
When a GPU is chosen, or oneDNN on a processor, its `Backend` is registered here, and
found by the type of an array. The engine itself imports nothing for GPUs but CuPy.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeAlias, TypeVar

import numpy as np

# A NumPy or a CuPy array. CuPy has no type stubs, so both are Any to the type checker.
Array: TypeAlias = Any

# Returns the fused body of the named operation for some arrays, or None.
FindKernel: TypeAlias = Callable[[str, tuple[Array, ...]], Callable[..., Any] | None]

F = TypeVar("F")


def find_no_kernel(name: str, arrays: tuple[Array, ...]) -> None:
    """Leave each operation to its reference body."""


def do_nothing(array: Array) -> None:
    """Return at once: NumPy prepares no parameters, and has no GPU to select."""


@dataclass(frozen=True)
class Backend:
    """What a device does in its own way; the defaults are for NumPy without oneDNN.

    `precision` is the number format of products with parameters. `find_kernel` looks up
    operations by name: those of `ops.py`, and add_arrays, exponentials, matmul and
    round_for. `beam_search` stands in for `BeamSearch` of `translation/`.
    `logits_to_score` is the number of logits that are computed at a time to score given
    translations; by default it is that of the loss. `parameters_changed` renews what
    was prepared from a vector of parameters. `select_device` selects an array's GPU in
    the current thread.
    """

    precision: str = "fp32"
    find_kernel: FindKernel = find_no_kernel
    beam_search: Callable[..., Any] | None = None
    logits_to_score: int | None = None
    parameters_changed: Callable[[Array], None] = do_nothing
    select_device: Callable[[Array], None] = do_nothing


_NUMPY = Backend()
_BACKENDS: dict[type, Backend | None] = {}


def array_module(array: Array) -> ModuleType:
    """Return the library (NumPy or CuPy) that `array` belongs to."""
    if type(array) is np.ndarray or isinstance(array, np.ndarray | np.generic):
        return np
    return importlib.import_module("cupy")


def register_backend(array_type: type, backend: Backend | None) -> None:
    """Register `backend` for arrays of `array_type`; None restores the default."""
    _BACKENDS[array_type] = backend


def backend_of(array: Array) -> Backend:
    """Return the backend that is registered for the type of `array`."""
    return _BACKENDS.get(type(array)) or _NUMPY


def fused_kernel(
    name: str, arrays: tuple[Array, ...], fallback: F
) -> Callable[..., Any] | F:
    """Return the fused body of operation `name` for these arrays, or `fallback`.

    The first array of a registered type decides.
    """
    for array in arrays:
        if backend := _BACKENDS.get(type(array)):
            return backend.find_kernel(name, arrays) or fallback
    return fallback


def parameters_changed(parameters: Array) -> None:
    """Have the backend renew what it prepared from a vector of parameters."""
    backend_of(parameters).parameters_changed(parameters)


def to_host(array: Array) -> np.ndarray:
    """Return `array` as a NumPy array, copied only if it lives on a GPU."""
    if isinstance(array, np.ndarray):
        return array
    # CuPy's `get` forgets the stream in use if the array's memory has gaps.
    return (array if array.flags.c_contiguous else array.copy()).get()


def as_float32(array: Array) -> Array:
    """Return a float32 copy of an array of 16-bit numbers, and any other as it is."""
    return array.astype(np.float32) if array.dtype.itemsize == 2 else array
