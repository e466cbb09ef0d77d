"""A GPU as the overrides see it: kernels by name, and matrix products by cuBLAS.

cuBLAS is called directly: CuPy's own wrappers refuse to be captured in CUDA graphs, and
have no batch of matrices that lie at two strides, as sentences and heads do.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import math
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from minitransformer.engine.backend import Array
from minitransformer.settings.options import UsageError

# Types of activations: the name in kernels.cu, and cuBLAS's number.
REALS = {"float32": "float", "float16": "__half", "bfloat16": "__nv_bfloat16"}
CUDA_TYPES = {"float32": 0, "float16": 2, "bfloat16": 14}
COMPUTE_FLOAT32, COMPUTE_TF32 = 68, 77
DEFAULT_ALGORITHM = -1
WORKSPACE_BYTES = 32 << 20

# Threads of a block, alone and as 32 x 8: those of most launches.
THREADS, WARP, WARPS = 256, 32, 8

# The least compute capability, times ten, that each precision needs; NVIDIA's Ampere
# generation has 80.
LEAST_CAPABILITY = {"fp32": 0, "fp16": 53, "tf32": 80, "bf16": 80}

SOURCE = Path(__file__).with_name("kernels.cu")


class Device:
    """One GPU: compiles kernels when they are first used, holds a cuBLAS handle.

    Used by one stream at a time, since that has cuBLAS's workspace. Where CUPY_TF32 is
    set, as for CuPy's own products, those of float32 round their inputs to 10 bits.
    """

    def __init__(self, xp: ModuleType) -> None:
        self.xp = xp
        self.tf32 = os.environ.get("CUPY_TF32") == "1"
        self._modules: dict[str, Any] = {}
        self._functions: dict[tuple[str, Any], Any] = {}
        self._stream: int | None = None
        self._handle = ctypes.c_void_p()
        self._blas: Any = self._load_blas()

    def launch(
        self, name: str, dtype: Any, grid: Any, block: Any, *arguments: Any
    ) -> None:
        """Run kernel `name`, compiled for activations of `dtype`.

        `grid` and `block` are numbers or tuples. Arguments are arrays, None for a null
        pointer, int and float for those of C, or NumPy scalars.
        """
        key = name, dtype
        if key not in self._functions:
            self._functions[key] = self._function(name, np.dtype(dtype).name)
        self._functions[key](
            grid if isinstance(grid, tuple) else (grid,),
            block if isinstance(block, tuple) else (block,),
            tuple(_argument(value) for value in arguments),
        )

    def matmul(
        self, a: Array, b: Array, out: Array, alpha: float = 1.0, beta: float = 0.0
    ) -> None:
        """out = alpha a b + beta out, summed in float32.

        Shapes: a [n, k], b [k, m], out [n, m], or each with two axes before these,
        [outer, inner]; of any strides, but rows of `out` are contiguous
        """
        # cuBLAS counts by columns, so it is asked for out^T = b^T a^T.
        operands = [_operand(self.xp, b), _operand(self.xp, a), _operand(self.xp, out)]
        arrays, transposed, leading_dims = zip(*operands, strict=True)
        assert arrays[2] is out
        assert not transposed[2]
        types = [_cuda_type(array.dtype) for array in arrays]
        scales = [ctypes.byref(ctypes.c_float(factor)) for factor in (alpha, beta)]
        self._use_current_stream()
        if out.ndim == 2:
            call, count = self._blas.cublasGemmEx, []
            addresses = [_address(array) for array in arrays]
        else:
            call, count = self._blas.cublasGemmBatchedEx, [math.prod(out.shape[:2])]
            pointers = self._pointers(arrays)
            addresses = [_address(row) for row in pointers]
        status = call(
            self._handle,
            *transposed[:2],
            *(out.shape[-1], out.shape[-2], a.shape[-1]),
            scales[0],
            *(addresses[0], types[0], leading_dims[0]),
            *(addresses[1], types[1], leading_dims[1]),
            scales[1],
            *(addresses[2], types[2], leading_dims[2]),
            *count,
            COMPUTE_TF32 if self.tf32 else COMPUTE_FLOAT32,
            DEFAULT_ALGORITHM,
        )
        if status:
            raise RuntimeError(f"cuBLAS: status {status} for a product {out.shape}")

    def _pointers(self, arrays: tuple[Array, ...]) -> Array:
        """Where each matrix of three arrays begins. Shapes: -> [3, outer inner]"""
        outer, inner = arrays[2].shape[:2]
        pointers = self.xp.empty((3, outer * inner), dtype=np.uint64)
        kernel_args = (
            value
            for array in arrays
            for value in (array, *(np.int64(stride) for stride in array.strides[:2]))
        )
        grid = blocks(outer * inner)
        size = outer, inner
        self.launch(
            "pointers", np.float32, grid, THREADS, pointers, *size, *kernel_args
        )
        return pointers

    def _load_blas(self) -> Any:
        """Load the cuBLAS that CuPy uses, and open it."""
        from cupy_backends.cuda.libs import cublas

        assert cublas  # its import finds the library, whose name is now enough
        major = self.xp.cuda.runtime.runtimeGetVersion() // 1000
        blas = ctypes.CDLL(f"libcublas.so.{major}")
        number: Any = ctypes.c_int
        pointer: Any = ctypes.c_void_p
        matrix = [pointer, number, number]
        head = [pointer, *[number] * 5, pointer, *matrix, *matrix, pointer, *matrix]
        blas.cublasGemmEx.argtypes = [*head, number, number]
        blas.cublasGemmBatchedEx.argtypes = [*head, number, number, number]
        blas.cublasSetStream_v2.argtypes = [pointer, pointer]
        blas.cublasSetWorkspace_v2.argtypes = [pointer, pointer, ctypes.c_size_t]
        if status := blas.cublasCreate_v2(ctypes.byref(self._handle)):
            raise RuntimeError(f"cuBLAS: status {status} when it was opened")
        self._workspace = self.xp.empty(WORKSPACE_BYTES, dtype=np.uint8)
        return blas

    def _use_current_stream(self) -> None:
        stream = self.xp.cuda.get_current_stream().ptr
        if stream != self._stream:
            # A workspace of its own lets products be captured in a graph.
            self._blas.cublasSetStream_v2(self._handle, stream)
            self._blas.cublasSetWorkspace_v2(
                self._handle, _address(self._workspace), WORKSPACE_BYTES
            )
            self._stream = stream

    def _function(self, name: str, dtype: str) -> Any:
        """Find a kernel in the module of its type, compiled now unless it was."""
        if dtype not in self._modules:
            self._modules[dtype] = self.xp.RawModule(
                code=SOURCE.read_text(encoding="utf-8"),
                options=("-std=c++17", f"-DREAL={REALS[dtype]}"),
            )
        return self._modules[dtype].get_function(name)


def select_gpu(name: str) -> ModuleType:
    """Select the GPU `cuda` or `cuda:N` and return CuPy.

    Raises: ValueError if the name is unknown, RuntimeError if there is no such GPU.
    """
    kind, _, index = name.partition(":")
    if kind != "cuda" or (index and not index.isdigit()):
        raise ValueError(f"expected a device cpu, cuda or cuda:N, got {name!r}")
    try:
        cupy = importlib.import_module("cupy")
    except ImportError as error:
        raise RuntimeError(
            "device cuda needs CuPy: pip install 'minitransformer[cuda13]' "
            "(or [cuda12] for a CUDA 12 driver)"
        ) from error
    if not cupy.cuda.is_available():
        raise RuntimeError(
            "device cuda: no CUDA driver or no GPU was found (nvidia-smi lists both)"
        )
    count = cupy.cuda.runtime.getDeviceCount()
    if int(index or 0) >= count:
        raise RuntimeError(f"device {name}: expected cuda:0 to cuda:{count - 1}")
    cupy.cuda.Device(int(index or 0)).use()
    return cupy


def compute_capability(xp: ModuleType) -> int:
    """Return the compute capability of the selected GPU times ten."""
    return int(xp.cuda.Device().compute_capability)


def choose_precision(asked: str | None, capability: int) -> str:
    """Return the precision that was asked for, or else bf16 if the GPU has it, or fp32.

    GPUs without bf16 do have fp16, but it must be asked for, since it can overflow.

    Raises: UsageError if a GPU of this `capability` has not what was asked for.
    """
    if asked is None:
        return "bf16" if capability >= LEAST_CAPABILITY["bf16"] else "fp32"
    if capability < LEAST_CAPABILITY[asked]:
        possible = [p for p, least in LEAST_CAPABILITY.items() if capability >= least]
        raise UsageError(
            f"--precision: expected {' or '.join(possible)} on this GPU (compute "
            f"capability {capability / 10}), got {asked}"
        )
    return asked


def set_tf32(enabled: bool) -> None:
    """Have float32 products round their inputs to 10 bits of mantissa, or not.

    Raises: RuntimeError if a library of CUDA is missing.
    """
    os.environ["CUPY_TF32"] = str(int(enabled))
    try:
        gpu = current()
    except ImportError as error:
        reason = str(error).partition("\n")[0]
        raise RuntimeError(
            "device cuda needs the libraries of CUDA: pip install "
            f"'cupy-cuda13x[ctk]' (or 12x), or CUDA's toolkit ({reason})"
        ) from error
    gpu.tf32 = enabled


def current() -> Device:
    """The device that CuPy has selected."""
    cupy = importlib.import_module("cupy")
    return _device(cupy.cuda.runtime.getDevice())


@functools.cache
def _device(index: int) -> Device:
    return Device(importlib.import_module("cupy"))


def graph_memory(xp: ModuleType) -> Any:
    """A memory pool for graphs, which keeps its blocks: graphs have their addresses.

    CuPy's own frees unused blocks and tries again when memory runs out, but not at an
    error that it does not know; what the default pool holds is freed instead.
    """

    def allocate(size: int) -> Any:
        for last_try in (False, True):
            try:
                return xp.cuda.MemoryPointer(xp.cuda.Memory(size), 0)
            except xp.cuda.runtime.CUDARuntimeError as error:
                if last_try:
                    raise MemoryError(str(error)) from error
            xp.get_default_memory_pool().free_all_blocks()
        raise AssertionError

    return xp.cuda.MemoryPool(allocate)


def blocks(threads: int) -> int:
    """Blocks for so many threads."""
    return -(-threads // THREADS)


def packs(count: int, dtype: Any) -> int:
    """Pieces of 16 bytes that `count` elements take."""
    return -(-count * np.dtype(dtype).itemsize // 16)


@functools.cache
def is_real(dtype: np.dtype[Any]) -> bool:
    """Whether kernels have activations of this type."""
    return dtype.name in REALS


@functools.cache
def _cuda_type(dtype: np.dtype[Any]) -> int:
    return CUDA_TYPES[dtype.name]


def _operand(xp: ModuleType, array: Array) -> tuple[Array, int, int]:
    """A matrix as cuBLAS takes it: whether by columns, and elements from line to line.

    One that is contiguous along neither axis is copied.
    """
    rows, columns = array.shape[-2:]
    down, across = (stride // array.itemsize for stride in array.strides[-2:])
    if (across == 1 or columns == 1) and (down >= columns or rows == 1):
        return array, 0, max(down, columns)
    if (down == 1 or rows == 1) and (across >= rows or columns == 1):
        return array, 1, max(across, rows)
    return xp.ascontiguousarray(array), 0, columns


def _address(array: Array) -> int:
    return array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr


def _argument(value: Any) -> Any:
    """Give a Python value the type that a kernel's parameter has in C."""
    if value is None:
        return np.uint64(0)
    if isinstance(value, int):
        return np.int32(value)
    return np.float32(value) if isinstance(value, float) else value
