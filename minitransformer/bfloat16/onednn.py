"""Products of bfloat16 matrices by oneDNN, through its C interface.

oneDNN multiplies with AVX-512 BF16 and AMX. Its function for products reads matrices as
they lie in memory, also transposed ones, and has no state. It is exported, but not
among the documented ones; oneDNN's documented products are compiled for every shape,
which took more memory, and more time for ever new shapes. Rounding is a documented
primitive: an operation that is compiled for one number of elements.

Arrays of type uint16 hold the bits of bfloat16 numbers, of which NumPy has none. The
thread that asks for a product computes it: callers divide their work.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from ctypes import byref, c_char, c_float, c_int, c_int64, c_size_t, c_void_p
from ctypes.util import find_library
from importlib import metadata

import numpy as np

# The names that the package index has for the library, and the one that C has for it.
DISTRIBUTIONS = ("onednn-cpu-gomp", "onednn")
LIBRARY = "dnnl"
PRODUCT = "gemm_bf16bf16f32"
PRODUCT_TYPES = (
    *(c_char, c_char, c_int64, c_int64, c_int64),  # transa, transb, n, m, k
    *(c_float, c_void_p, c_int64, c_void_p, c_int64),  # alpha = 1, A, lda, B, ldb
    *(c_float, c_void_p, c_int64),  # beta (1 adds to C), C, ldc
)

# Constants of oneDNN's C interface, of its version 3.
MAJOR_VERSION = 3
CPU, IN_ORDER = 1, 1
BFLOAT16, FLOAT32 = 2, 3
SOURCE, DESTINATION = 1, 17  # the arguments of a primitive
BFLOAT16_INSTRUCTIONS = 0x80  # a bit of what dnnl_get_effective_cpu_isa returns


class OneDnn:
    """The library, loaded.

    Raises: RuntimeError if there is no such library, or if the processor does not
    multiply bfloat16 numbers.
    """

    def __init__(self) -> None:
        self._library = _load()
        if not self._library.dnnl_get_effective_cpu_isa() & BFLOAT16_INSTRUCTIONS:
            raise RuntimeError(
                "--precision bf16: expected a processor that multiplies bfloat16 "
                "numbers (AMX or AVX-512 BF16), got one that does not"
            )
        getattr(self._library, f"dnnl_{PRODUCT}").argtypes = PRODUCT_TYPES
        self._engine = c_void_p()
        _call(self._library, "engine_create", byref(self._engine), CPU, c_size_t(0))
        self._thread = threading.local()

    def rounded(self, x: np.ndarray) -> np.ndarray:
        """Round float32 numbers to the nearest bfloat16 numbers, as uint16."""
        x = np.ascontiguousarray(x)
        low = np.empty(x.shape, np.uint16)
        self._use_one_thread()
        if x.size:
            # Two pieces, which overlap unless x has a power of two elements: with a
            # primitive for each power of two, all sizes are served.
            piece = 1 << (x.size.bit_length() - 1)
            rounding = self._rounding(piece)
            source, target = x.ctypes.data, low.ctypes.data
            for start in {0, x.size - piece}:
                rounding.run(source + start * x.itemsize, target + start * low.itemsize)
        return low

    def product(
        self, a: np.ndarray, b: np.ndarray, out: np.ndarray | None = None
    ) -> np.ndarray:
        """Return A B of bfloat16 matrices in float32, added to `out` if that is given.

        Both are contiguous or transposed, `out` is contiguous.

        Shapes: a [n, k], b [k, m], out [n, m] -> [n, m]
        """
        (n, k), m = a.shape, b.shape[1]
        add = 0.0 if out is None else 1.0
        if out is None:
            out = np.empty((n, m), np.float32)
        if b.shape[0] != k or out.shape != (n, m) or not out.flags.c_contiguous:
            raise ValueError(f"expected [n, k] and [k, m], got {a.shape} and {b.shape}")
        (a_order, a_row), (b_order, b_row) = _layout(a), _layout(b)
        self._use_one_thread()
        _call(
            self._library,
            PRODUCT,
            *(a_order, b_order, n, m, k, 1.0, a.ctypes.data, a_row),
            *(b.ctypes.data, b_row, add, out.ctypes.data, m),
        )
        return out

    def _use_one_thread(self) -> None:
        """Keep what this thread asks for in this thread, also before the first product.

        A primitive that is created without this divides its work among threads of its
        own, which wait for each other in loops and so take cores from other work.
        """
        if hasattr(self._library, "omp_set_num_threads"):
            self._library.omp_set_num_threads(1)

    def _rounding(self, size: int) -> _Rounding:
        """Return this thread's: two threads must not execute one primitive at once."""
        roundings = self._thread.__dict__.setdefault("roundings", {})
        if size not in roundings:
            roundings[size] = _Rounding(self._library, self._engine, size)
        return roundings[size]


class _Argument(ctypes.Structure):
    _fields_ = (("argument", c_int), ("memory", c_void_p))


class _Rounding:
    """The primitive that rounds `size` float32 numbers."""

    def __init__(self, library: ctypes.CDLL, engine: c_void_p, size: int) -> None:
        self._library = library
        self._stream, self._primitive = c_void_p(), c_void_p()
        description, one_axis = c_void_p(), (c_int64 * 12)(size)
        strides = (c_int64 * 12)(1)
        layouts, memories = [], []
        for dtype in (FLOAT32, BFLOAT16):
            layout, memory = c_void_p(), c_void_p()
            create = "memory_desc_create_with_strides"
            _call(library, create, byref(layout), 1, one_axis, dtype, strides)
            _call(library, "memory_create", byref(memory), layout, engine, c_void_p())
            layouts.append(layout)
            memories.append(memory)
        _call(
            library,
            "reorder_primitive_desc_create",
            *(byref(description), layouts[0], engine, layouts[1], engine, c_void_p()),
        )
        _call(library, "primitive_create", byref(self._primitive), description)
        _call(library, "stream_create", byref(self._stream), engine, IN_ORDER)
        _call(library, "primitive_desc_destroy", description)
        for layout in layouts:
            _call(library, "memory_desc_destroy", layout)
        self._memories = memories
        self._arguments = (_Argument * 2)(
            _Argument(SOURCE, memories[0]), _Argument(DESTINATION, memories[1])
        )
        weakref.finalize(
            self, _destroy, library, self._primitive, self._stream, memories
        )

    def run(self, source: int, target: int) -> None:
        """Round the numbers at one address to another."""
        for memory, address in zip(self._memories, (source, target), strict=True):
            _call(self._library, "memory_set_data_handle", memory, c_void_p(address))
        stream = self._stream
        run = "primitive_execute"
        _call(self._library, run, self._primitive, stream, 2, self._arguments)
        _call(self._library, "stream_wait", stream)


def _destroy(
    library: ctypes.CDLL,
    primitive: c_void_p,
    stream: c_void_p,
    memories: list[c_void_p],
) -> None:
    """Free the memory of a primitive and of what stands for its arguments."""
    library.dnnl_primitive_destroy(primitive)
    library.dnnl_stream_destroy(stream)
    for memory in memories:
        library.dnnl_memory_destroy(memory)


def _layout(matrix: np.ndarray) -> tuple[bytes, int]:
    """Return N or, for a transposed matrix, T, and the leading dimension."""
    if matrix.flags.c_contiguous:
        return b"N", max(matrix.shape[1], 1)
    assert matrix.flags.f_contiguous
    return b"T", matrix.shape[0]


def _call(library: ctypes.CDLL, name: str, *arguments: object) -> None:
    """Call a function of the library. Raises: RuntimeError if it fails."""
    if status := getattr(library, f"dnnl_{name}")(*arguments):
        raise RuntimeError(f"oneDNN's dnnl_{name} failed with status {status}")


def _load() -> ctypes.CDLL:
    """Load the library of an installed package, or that of the system."""
    paths = []
    for name in DISTRIBUTIONS:
        try:
            files = metadata.files(name) or []
        except metadata.PackageNotFoundError:
            continue
        paths += [str(f.locate()) for f in files if f.name.startswith(f"lib{LIBRARY}.")]
    if system := find_library(LIBRARY):
        paths.append(system)
    problem: object = "found none"
    for path in paths:
        try:
            library = ctypes.CDLL(path)
        except OSError as error:
            problem = error
            continue
        library.dnnl_version.restype = ctypes.POINTER(ctypes.c_int)
        if (major := library.dnnl_version()[0]) != MAJOR_VERSION:
            problem = f"expected its version {MAJOR_VERSION}, got {major}"
        elif not hasattr(library, f"dnnl_{PRODUCT}"):
            problem = f"expected the function dnnl_{PRODUCT}, got a build without it"
        else:
            return library
    raise RuntimeError(
        "--precision bf16 on a CPU needs oneDNN: "
        f"pip install 'minitransformer[bf16]' ({problem})"
    )
