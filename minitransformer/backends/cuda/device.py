"""A GPU: its kernels by name, and matrix products by cuBLAS.

cuBLAS is called directly: CuPy's own wrappers cannot be captured in CUDA graphs.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from minitransformer.backends.cuda.graphs import graph_memory
from minitransformer.engine.backend import Array, array_module
from minitransformer.settings.extras import import_extra
from minitransformer.settings.options import UsageError

# The types of activations: their names in CUDA C++, and cuBLAS's numbers for them.
C_TYPES = {"float32": "float", "float16": "__half", "bfloat16": "__nv_bfloat16"}
# The names of those that tensor cores multiply.
TENSOR_CORE_TYPES = {"float16": "f16", "bfloat16": "bf16"}
CUBLAS_TYPES = {"float32": 0, "float16": 2, "bfloat16": 14}
COMPUTE_FLOAT32, COMPUTE_TF32 = 68, 77
DEFAULT_ALGORITHM = -1
NO_REDUCED_PRECISION_SUMS = 16  # CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION
WORKSPACE_BYTES = 32 << 20

# The threads of a block in most launches, of a warp, and the warps of such a block.
THREADS, WARP, WARPS = 256, 32, 8

# The lowest compute capability, times ten, that each precision needs; NVIDIA's Ampere
# generation has 80.
MIN_CAPABILITY = {"fp32": 0, "fp16": 53, "tf32": 80, "bf16": 80}

# The files of kernels in the order in which they are joined.
KERNELS = Path(__file__).with_name("kernels")
FILES = (
    "common dropout column_sums embedding linear layer_norm tiles attention "
    "cross_entropy elementwise beam_search adam"
).split()


class Device:
    """One GPU, which compiles each kernel at its first use and has a cuBLAS handle.

    Only one stream at a time may use it, since all products share a workspace. With
    `tf32`, products of float32 matrices round their inputs to 10 bits of mantissa; at
    first this is set as for CuPy's own products, by the variable CUPY_TF32.
    """

    def __init__(self, xp: ModuleType) -> None:
        self.xp = xp
        self.num_processors: int = xp.cuda.Device().attributes["MultiProcessorCount"]
        # Their instructions, as attention.cu uses them, came with NVIDIA's Ampere.
        self.tensor_cores = int(xp.cuda.Device().compute_capability) >= 80
        self.tf32 = os.environ.get("CUPY_TF32") == "1"
        self.cublas_lt: Any = None  # blaslt.py opens it
        # The gradients that `ops.adding_to` has operations add to, by their parameters,
        # and the tokens by id, by the address of ids.
        self.gradients: dict[tuple[int, ...], Array] = {}
        self.sorted_tokens: dict[int, Array] = {}
        self.searches: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # by model
        self._modules: dict[tuple[str, ...], Any] = {}
        self._functions: dict[tuple[str, Any, bool], Any] = {}
        self._stream: int | None = None
        self._handle = ctypes.c_void_p()
        self._blas: Any = self._load_blas()

    @property
    def compute_type(self) -> int:
        """cuBLAS's number of the arithmetic of products."""
        return COMPUTE_TF32 if self.tf32 else COMPUTE_FLOAT32

    @functools.cached_property
    def decoding_stream(self) -> Any:
        """A stream that can be recorded, unlike the null stream."""
        return self.xp.cuda.Stream(non_blocking=True)

    @functools.cached_property
    def decoding_memory(self) -> Any:
        """A memory pool for graphs of decoders."""
        return graph_memory(self.xp)

    def use_recordable_stream(self) -> None:
        """Leave the null stream, which has no graphs, for the one of decoding."""
        cuda = self.xp.cuda
        if not cuda.get_current_stream().ptr:
            cuda.Device().synchronize()  # wait for the parameters
            self.decoding_stream.use()

    def launch(
        self,
        name: str,
        dtype: Any,
        grid: Any,
        *kernel_args: Any,
        block: Any = THREADS,
    ) -> None:
        """Launch kernel `name`, compiled for activations of `dtype`.

        `grid` and `block` are numbers or tuples of them. The kernel's arguments are
        arrays, None for a null pointer, int and float for those of C, or NumPy scalars.
        """
        key = name, dtype, self.tensor_cores
        if key not in self._functions:
            self._functions[key] = self._function(name, np.dtype(dtype).name)
        self._functions[key](
            grid if isinstance(grid, tuple) else (grid,),
            block if isinstance(block, tuple) else (block,),
            tuple(_c_value(value) for value in kernel_args),
        )

    def matmul(self, a: Array, b: Array, out: Array, beta: float = 0.0) -> None:
        """Compute out = a b + beta out, with sums in float32.

        Rows or columns are contiguous, of `out` the rows.

        Shapes: a [n, k], b [k, m], out [n, m]

        Raises: RuntimeError if cuBLAS refuses the product.
        """
        # cuBLAS stores matrices by columns, so it is asked for out^T = b^T a^T.
        arrays = b, a, out
        transposed, leading_dims = zip(*map(order_of, arrays), strict=True)
        assert not transposed[2]
        types = [CUBLAS_TYPES[array.dtype.name] for array in arrays]
        scales = [ctypes.byref(ctypes.c_float(factor)) for factor in (1.0, beta)]
        addresses = [address(array) for array in arrays]
        self._use_current_stream()
        status = self._blas.cublasGemmEx(
            self._handle,
            *transposed[:2],
            *(out.shape[-1], out.shape[-2], a.shape[-1]),
            scales[0],
            *(addresses[0], types[0], leading_dims[0]),
            *(addresses[1], types[1], leading_dims[1]),
            scales[1],
            *(addresses[2], types[2], leading_dims[2]),
            self.compute_type,
            DEFAULT_ALGORITHM,
        )
        check(status, f"a product of shape {out.shape}")

    def _load_blas(self) -> Any:
        """Load the cuBLAS library that CuPy uses, and create a handle."""
        from cupy_backends.cuda.libs import cublas

        assert cublas  # importing it loads the library, which is then found by name
        blas = load_library(self.xp, "cublas")
        number: Any = ctypes.c_int
        pointer: Any = ctypes.c_void_p
        matrix = [pointer, number, number]
        head = [pointer, *[number] * 5, pointer, *matrix, *matrix, pointer, *matrix]
        blas.cublasGemmEx.argtypes = [*head, number, number]
        blas.cublasSetStream_v2.argtypes = [pointer, pointer]
        blas.cublasSetWorkspace_v2.argtypes = [pointer, pointer, ctypes.c_size_t]
        blas.cublasSetMathMode.argtypes = [pointer, number]
        check(blas.cublasCreate_v2(ctypes.byref(self._handle)), "creating a handle")
        # Else, parts of a sum may be added in 16 bits where the output has 16 bits.
        status = blas.cublasSetMathMode(self._handle, NO_REDUCED_PRECISION_SUMS)
        check(status, "choosing a math mode")
        self.workspace = self.xp.empty(WORKSPACE_BYTES, dtype=np.uint8)
        return blas

    def _use_current_stream(self) -> None:
        stream = self.xp.cuda.get_current_stream().ptr
        if stream != self._stream:
            status = self._blas.cublasSetStream_v2(self._handle, stream)
            check(status, "choosing a stream")
            # Products can be captured in a graph because the workspace is our own.
            status = self._blas.cublasSetWorkspace_v2(
                self._handle, address(self.workspace), WORKSPACE_BYTES
            )
            check(status, "choosing a workspace")
            self._stream = stream

    def _function(self, name: str, dtype: str) -> Any:
        """Return a kernel; compile all kernels for `dtype` if that is not done yet."""
        options = compiler_options(dtype, self.tensor_cores)
        if options not in self._modules:
            module = self.xp.RawModule(code=kernel_source(), options=options)
            self._modules[options] = module
        return self._modules[options].get_function(name)


def load_library(xp: ModuleType, name: str) -> Any:
    """Load a library of CUDA, of the version that CuPy uses.

    Raises: OSError if it is not found.
    """
    major = xp.cuda.runtime.runtimeGetVersion() // 1000
    windows = sys.platform == "win32"
    return ctypes.CDLL(f"{name}64_{major}.dll" if windows else f"lib{name}.so.{major}")


def compiler_options(dtype: str, tensor_cores: bool) -> tuple[str, ...]:
    """Return the options that compile the kernels for activations of a type.

    Tensor cores multiply tiles of 16-bit numbers, if the GPU has them.
    """
    options: tuple[str, ...] = ("-std=c++17", f"-DREAL={C_TYPES[dtype]}")
    if tensor_cores and dtype in TENSOR_CORE_TYPES:
        options = *options, f"-DTENSOR_CORES={TENSOR_CORE_TYPES[dtype]}"
    return options


def kernel_source() -> str:
    """Return the source of all kernels; the compiler's messages name their files."""
    parts = [
        f'#line 1 "{name}.cu"\n{(KERNELS / f"{name}.cu").read_text(encoding="utf-8")}'
        for name in FILES
    ]
    return "".join(parts)


def find_gpu(name: str) -> tuple[ModuleType, int]:
    """Return CuPy and the number of the GPU `cuda` or `cuda:N`, which stays unused.

    Raises: UsageError if the name is unknown, RuntimeError if there is no such GPU.
    """
    kind, _, index = str(name).partition(":")  # from Python, it may be anything
    if kind != "cuda" or (index and not index.isdigit()):
        raise UsageError(f"--device: expected cpu, cuda or cuda:N, got {name!r}")
    need = "device cuda needs CuPy (for a CUDA 12 driver, the extra cuda12)"
    cupy = import_extra("cupy", "cuda13", need)
    if not cupy.cuda.is_available():
        raise RuntimeError(
            "device cuda: no CUDA driver or no GPU was found (nvidia-smi lists both)"
        )
    count = cupy.cuda.runtime.getDeviceCount()
    if int(index or 0) >= count:
        raise RuntimeError(f"device {name}: expected cuda:0 to cuda:{count - 1}")
    return cupy, int(index or 0)


def select_gpu(name: str) -> ModuleType:
    """Select a GPU, which begins to use its memory. Return CuPy. Raises: `find_gpu`"""
    cupy, index = find_gpu(name)
    cupy.cuda.Device(index).use()
    return cupy


def choose_precision(asked: str | None, capability: int) -> str:
    """Return the precision that was asked for, or else bf16 if the GPU has it, or fp32.

    A GPU without bf16 may have fp16, but that must be asked for, since it can overflow.

    Raises: UsageError if a GPU of this `capability` lacks the precision asked for.
    """
    if asked is None:
        return "bf16" if capability >= MIN_CAPABILITY["bf16"] else "fp32"
    if capability < MIN_CAPABILITY.get(asked, sys.maxsize):
        possible = [p for p, minimum in MIN_CAPABILITY.items() if capability >= minimum]
        raise UsageError(
            f"--precision: expected {' or '.join(possible)} on this GPU (compute "
            f"capability {capability / 10}), got {asked}"
        )
    return asked


def set_tf32(enabled: bool) -> None:
    """Choose whether float32 products round their inputs to 10 bits of mantissa.

    Raises: RuntimeError if a CUDA library is missing.
    """
    os.environ["CUPY_TF32"] = str(int(enabled))
    try:
        gpu = current()
    except (ImportError, OSError) as error:  # of Python, or of the system's loader
        reason = str(error).partition("\n")[0]
        raise RuntimeError(
            "device cuda needs the libraries of CUDA: pip install "
            f"'cupy-cuda13x[ctk]' (or 12x), or CUDA's toolkit ({reason})"
        ) from error
    gpu.tf32 = enabled


def current() -> Device:
    """Return the GPU that CuPy has selected."""
    cupy = importlib.import_module("cupy")
    return _device(cupy.cuda.runtime.getDevice())


@functools.cache
def _device(index: int) -> Device:
    return Device(importlib.import_module("cupy"))


def num_blocks(threads: int) -> int:
    """Return how many blocks of THREADS threads are needed for `threads` threads."""
    return -(-threads // THREADS)


def warp_blocks(rows: int) -> int:
    """Return how many blocks are needed for one warp per row."""
    return -(-rows // WARPS)


def num_vectors(count: int, dtype: Any) -> int:
    """Return how many vectors of 16 bytes hold `count` elements."""
    return -(-count * np.dtype(dtype).itemsize // 16)


def rows_of(x: Array) -> Array:
    """Return all rows of the last axis, contiguous. Shapes: x [..., D] -> [N, D]"""
    return array_module(x).ascontiguousarray(x).reshape(-1, x.shape[-1])


def size_of(rows: Array) -> tuple[np.int64, int]:
    """Return the numbers of rows and columns, as kernels take them."""
    return np.int64(len(rows)), rows.shape[1]


@functools.cache
def is_activation_type(dtype: np.dtype[Any]) -> bool:
    """Return whether the kernels can be compiled for activations of this type."""
    return dtype.name in C_TYPES


def check(status: int, call: str) -> None:
    """Raise RuntimeError for a status of cuBLAS that is not success."""
    if status:
        raise RuntimeError(f"cuBLAS: status {status} for {call}")


def order_of(matrix: Array) -> tuple[int, int]:
    """Return whether cuBLAS must transpose a matrix, and its leading dimension.

    That is the distance of two rows, or of two columns if they are contiguous, in
    elements.
    """
    rows, columns = matrix.shape
    down, across = (stride // matrix.itemsize for stride in matrix.strides)
    if (across == 1 or columns == 1) and (down >= columns or rows == 1):
        return 0, max(down, columns)
    assert down == 1 or rows == 1
    assert across >= rows or columns == 1
    return 1, max(across, rows)


def address(array: Array) -> int:
    """Return where an array begins in memory."""
    return array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr


def struct(dtype: np.dtype[Any], **values: Any) -> np.ndarray:
    """Return a struct of C, which a kernel takes by value. All fields must be given."""
    return np.array([tuple(values[name] for name in dtype.names or ())], dtype)


def _c_value(value: Any) -> Any:
    """Convert a Python value to the type of the kernel's parameter."""
    if value is None:
        return np.uint64(0)
    if isinstance(value, int):
        return np.int32(value)
    return np.float32(value) if isinstance(value, float) else value
