"""The array libraries, and the registry of fused kernels that replace operations.

Most code calls the functions of the library that its arrays belong to, NumPy or CuPy.
When a GPU is chosen, or oneDNN on a processor, fused kernels are registered here, and
operations look them up by the type of their arrays. The engine itself knows no GPU.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeAlias, TypeVar

import numpy as np

# A NumPy or a CuPy array. CuPy has no type stubs, so both are Any to the type checker.
Array: TypeAlias = Any

# Returns the fused body of the named operation for some arrays, or None.
FindKernel: TypeAlias = Callable[[str, tuple[Array, ...]], Callable[..., Any] | None]

F = TypeVar("F")

_KERNELS: dict[type, FindKernel] = {}


def array_module(array: Array) -> ModuleType:
    """Return the library (NumPy or CuPy) that `array` belongs to."""
    if isinstance(array, np.ndarray | np.generic):
        return np
    return importlib.import_module("cupy")


def register_kernels(array_type: type, find: FindKernel | None) -> None:
    """Register `find` for operations on arrays of `array_type`; None removes it."""
    if find is None:
        _KERNELS.pop(array_type, None)
    else:
        _KERNELS[array_type] = find


def fused_kernel(
    name: str, arrays: tuple[Array, ...], fallback: F
) -> Callable[..., Any] | F:
    """Return the kernel that is registered for these arrays, or `fallback`.

    `name` is an operation of `ops.py`, or one of a few functions that a device does in
    its own way: add_arrays, beam_search, exponentials, factor, incremental_decoder,
    logits_to_score, parameters_changed, product. The first array of a registered type
    decides.
    """
    for array in arrays:
        if find := _KERNELS.get(type(array)):
            return find(name, arrays) or fallback
    return fallback


def parameters_changed(parameters: Array) -> None:
    """Tell fused kernels that what they prepared from these values is out of date."""
    fused_kernel("parameters_changed", (parameters,), lambda _: None)(parameters)


def to_host(array: Array) -> np.ndarray:
    """Return `array` as a NumPy array, copied only if it lives on a GPU."""
    if isinstance(array, np.ndarray):
        return array
    # CuPy's `get` forgets the stream in use if the array's memory has gaps.
    return (array if array.flags.c_contiguous else array.copy()).get()


def as_float32(array: Array) -> Array:
    """Return a float32 copy of an array of 16-bit numbers, and any other as it is."""
    return array.astype(np.float32) if array.dtype.itemsize == 2 else array
