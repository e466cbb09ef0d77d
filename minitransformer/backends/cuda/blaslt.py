"""Linear layers with a bias, by cuBLASLt: the product itself adds it and rectifies.

An epilogue is what cuBLASLt does to a product before it is stored. The output is then
written once, where a kernel of its own would read it again and write it again. The bias
must be of the output's type, so that one of 16 bits is rounded, as the output is. At
first use on a device the results are compared with those of `by_kernels`, which also
serves arrays with gaps or at odd addresses, and shapes without an algorithm.

Shapes: x [N, D], weight [D, F], bias [F], out [N, F]
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np

from minitransformer.backends.cuda import device, verdicts
from minitransformer.backends.cuda.device import address, check, warp_blocks
from minitransformer.engine.backend import Array

# cuBLASLt's numbers: what it does to a product, attributes of one, and preferences.
BIAS, RELU_BIAS = 4, 6
EPILOGUE, BIAS_POINTER = 7, 8
MAX_WORKSPACE, REDUCTION_SCHEMES, MIN_ALIGNMENTS = 1, 3, (5, 6, 7, 8)
# A product that is divided along D adds its parts in float32.
REDUCTION_IN_FLOAT32 = 2
FLOAT32 = 0

# All arrays begin at multiples of so many bytes; epilogues read a bias in vectors.
ALIGNMENT = 16

# N, D and F of the products that are compared with those of the kernels.
COMPARED = (40, 48, 72), (136, 264, 24)


class Choice(ctypes.Structure):
    """An algorithm, as cuBLASLt's heuristic returns it."""

    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


def forward(
    x: Array, weight: Array, bias: Array | None, relu: bool, out: Array
) -> None:
    """Compute out = x weight + bias, or max(0, that) with `relu`."""
    gpu = device.current()
    fused = bias is not None and matches_reference(gpu, x.dtype)
    if not (fused and gpu.cublas_lt.linear(x, weight, bias, relu, out)):
        by_kernels(gpu, x, weight, bias, relu, out)


def by_kernels(
    gpu: device.Device,
    x: Array,
    weight: Array,
    bias: Array | None,
    relu: bool,
    out: Array,
) -> None:
    """Compute the same by cuBLAS, and by a kernel that reads the product again."""
    gpu.matmul(x, weight, out)
    if relu or bias is not None:
        rows, width = out.shape
        kernel_args = out, bias, np.int64(rows), width, relu
        gpu.launch("bias_relu", out.dtype, warp_blocks(rows), *kernel_args)


class CublasLt:
    """A handle of cuBLASLt, and the algorithm that it chose for each kind of product.

    Raises: OSError if there is no cuBLASLt, AttributeError if it lacks a function,
    RuntimeError if it cannot be initialised.
    """

    def __init__(self, gpu: device.Device) -> None:
        self.gpu = gpu
        self.plans: dict[tuple[Any, ...], tuple[Any, ...] | None] = {}
        self._library = library = device.load_library(gpu.xp, "cublasLt")
        number: Any = ctypes.c_int
        pointer: Any = ctypes.c_void_p
        size: Any = ctypes.c_size_t
        attribute = [pointer, number, pointer, size]
        library.cublasLtMatmulDescCreate.argtypes = [pointer, number, number]
        library.cublasLtMatmulDescSetAttribute.argtypes = attribute
        library.cublasLtMatmulPreferenceSetAttribute.argtypes = attribute
        library.cublasLtMatrixLayoutCreate.argtypes = [
            *(pointer, number, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int64)
        ]
        library.cublasLtMatmulAlgoGetHeuristic.argtypes = [
            *(*[pointer] * 7, number, pointer, pointer)
        ]
        library.cublasLtMatmul.argtypes = [*[pointer] * 14, size, pointer]
        self._handle = ctypes.c_void_p()
        status = library.cublasLtCreate(ctypes.byref(self._handle))
        check(status, "creating a handle of cuBLASLt")

    def linear(
        self, x: Array, weight: Array, bias: Array, relu: bool, out: Array
    ) -> bool:
        """Compute `forward`; return False if there is no algorithm for these arrays."""
        bias = bias.astype(out.dtype, copy=False)
        # cuBLASLt stores matrices by columns, so it is asked for out^T = weight^T x^T.
        arrays = weight, x, out
        *starts, bias_start = map(address, (*arrays, bias))
        gaps = not all(array.flags.c_contiguous for array in arrays)
        if gaps or any(start % ALIGNMENT for start in (*starts, bias_start)):
            return False
        tf32 = self.gpu.tf32 and out.dtype == np.float32
        key = out.dtype.name, tf32, relu, *weight.shape, len(x)
        if key not in self.plans:
            shapes = [array.shape for array in arrays]
            self.plans[key] = self._plan(out.dtype, tf32, relu, shapes)
        plan = self.plans[key]
        if plan is None:
            return False
        product, (a, b, c), choice = plan
        self._set(product, BIAS_POINTER, ctypes.c_void_p(bias_start))
        one, zero = (ctypes.byref(ctypes.c_float(factor)) for factor in (1.0, 0.0))
        status = self._library.cublasLtMatmul(
            *(self._handle, product, one, starts[0], a, starts[1], b),
            *(zero, starts[2], c, starts[2], c, ctypes.byref(choice)),
            *(address(self.gpu.workspace), device.WORKSPACE_BYTES),
            self.gpu.xp.cuda.get_current_stream().ptr,
        )
        return not status

    def _plan(
        self,
        dtype: np.dtype[Any],
        tf32: bool,
        relu: bool,
        shapes: list[tuple[int, int]],
    ) -> tuple[Any, ...] | None:
        """Describe a product, and ask for an algorithm; return None if there is none.

        The descriptions are kept as long as the process, one for each kind of product.
        """
        compute = device.COMPUTE_TF32 if tf32 else device.COMPUTE_FLOAT32
        product = self._create("MatmulDesc", compute, FLOAT32)
        self._set(product, EPILOGUE, ctypes.c_uint32(RELU_BIAS if relu else BIAS))
        # The heuristic takes from an address only its alignment.
        self._set(product, BIAS_POINTER, ctypes.c_void_p(ALIGNMENT))
        kind = device.CUBLAS_TYPES[dtype.name]
        a, b, c = (
            self._create("MatrixLayout", kind, columns, rows, columns)
            for rows, columns in shapes
        )
        limits = self._create("MatmulPreference")
        self._prefer(limits, MAX_WORKSPACE, ctypes.c_uint64(device.WORKSPACE_BYTES))
        self._prefer(limits, REDUCTION_SCHEMES, ctypes.c_uint32(REDUCTION_IN_FLOAT32))
        for attribute in MIN_ALIGNMENTS:
            self._prefer(limits, attribute, ctypes.c_uint32(ALIGNMENT))
        choice, found = Choice(), ctypes.c_int()
        wanted = 1, ctypes.byref(choice), ctypes.byref(found)
        arguments = self._handle, product, a, b, c, c, limits, *wanted
        status = self._library.cublasLtMatmulAlgoGetHeuristic(*arguments)
        usable = not status and found.value and not choice.state
        return (product, (a, b, c), choice) if usable else None

    def _create(self, kind: str, *arguments: int) -> ctypes.c_void_p:
        created = ctypes.c_void_p()
        create = getattr(self._library, f"cublasLt{kind}Create")
        check(create(ctypes.byref(created), *arguments), f"creating a {kind}")
        return created

    def _set(self, product: ctypes.c_void_p, attribute: int, value: Any) -> None:
        status = self._library.cublasLtMatmulDescSetAttribute(
            product, attribute, ctypes.byref(value), ctypes.sizeof(value)
        )
        check(status, f"attribute {attribute} of a product")

    def _prefer(self, limits: ctypes.c_void_p, attribute: int, value: Any) -> None:
        status = self._library.cublasLtMatmulPreferenceSetAttribute(
            limits, attribute, ctypes.byref(value), ctypes.sizeof(value)
        )
        check(status, f"preference {attribute}")


def matches_reference(gpu: device.Device, dtype: np.dtype[Any]) -> bool:
    """Return whether cuBLASLt gives what the kernels give."""

    def results() -> Iterator[tuple[Array, Array]]:
        if gpu.cublas_lt is None:
            gpu.cublas_lt = CublasLt(gpu)
        rng, xp = np.random.default_rng(0), gpu.xp
        for rows, width, columns in COMPARED:
            x, weight, bias = (
                xp.asarray(rng.standard_normal(shape).astype(kind))
                for shape, kind in (
                    ((rows, width), dtype),
                    ((width, columns), dtype),
                    (columns, np.float32),
                )
            )
            for relu in (False, True):
                plain, fused = (xp.empty((rows, columns), dtype) for _ in range(2))
                by_kernels(gpu, x, weight, bias, relu, plain)
                if not gpu.cublas_lt.linear(x, weight, bias, relu, fused):
                    raise RuntimeError("it has no algorithm")
                yield plain, fused

    fallback = "biases are added and rectified without cuBLASLt"
    return verdicts.matches_reference(gpu, "cuBLASLt", dtype, results, fallback)
