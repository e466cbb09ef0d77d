"""Products of bfloat16 matrices by oneDNN, through its C interface.

oneDNN has kernels for AVX-512 BF16 and AMX, and reads matrices as they lie in memory,
also transposed ones. Arrays of type uint16 hold the bits of bfloat16 numbers, of which
NumPy has none.

A primitive of oneDNN is an operation, compiled for arrays of one layout; a memory
object says where such an array is. Each thread has primitives of its own, because two
threads must not execute one at the same time. A product is computed by the thread that
asks for it: callers divide their work.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable
from ctypes.util import find_library
from importlib import metadata

import numpy as np

# The names that the package index has for the library, and the one that C has for it.
DISTRIBUTIONS = ("onednn-cpu-gomp", "onednn")
LIBRARY = "dnnl"

# Constants of oneDNN's C interface, of its version 3.
MAJOR_VERSION = 3
CPU, IN_ORDER = 1, 1
TYPES = {"uint16": 2, "float32": 3}  # of the elements: bfloat16 and float32
SOURCE, DESTINATION, WEIGHTS = 1, 17, 33  # the arguments of a primitive
BFLOAT16_INSTRUCTIONS = 0x80  # a bit of what dnnl_get_effective_cpu_isa returns

# The most primitives that a thread keeps, and the most that oneDNN keeps for all. Real
# batches have ever new layouts; with 1,024, training on Multi30k took 120 MB more.
MAX_PRIMITIVES = 256

Layout = tuple[tuple[int, ...], tuple[int, ...], str]  # shape, strides, type


class _Argument(ctypes.Structure):
    _fields_ = (("argument", ctypes.c_int), ("memory", ctypes.c_void_p))


Primitives = dict[object, tuple[ctypes.c_void_p, "ctypes.Array[_Argument]"]]


class _Owner:
    """An object whose end can be noticed."""


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
        self._call("set_primitive_cache_capacity", MAX_PRIMITIVES)
        self._engine = ctypes.c_void_p()
        self._call("engine_create", ctypes.byref(self._engine), CPU, ctypes.c_size_t(0))
        self._thread = threading.local()

    def rounded(self, x: np.ndarray) -> np.ndarray:
        """Round float32 numbers to the nearest bfloat16 numbers, as uint16."""
        x = np.ascontiguousarray(x)
        low = np.empty(x.shape, np.uint16)
        self._run(
            self._reorder, (SOURCE, x.reshape(-1)), (DESTINATION, low.reshape(-1))
        )
        return low

    def product(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """Return A B in float32 of bfloat16 matrices, each contiguous or transposed.

        Shapes: a [n, k], b [k, m] -> [n, m]
        """
        out = np.empty((a.shape[0], b.shape[1]), np.float32)
        self._run(self._matmul, (SOURCE, a), (WEIGHTS, b), (DESTINATION, out))
        return out

    def _run(
        self,
        make: Callable[..., ctypes.c_void_p],
        *arguments: tuple[int, np.ndarray],
    ) -> None:
        """Execute the primitive that `make` makes for such arrays."""
        if not hasattr(self._thread, "primitives"):
            self._begin_thread()
        primitives = self._thread.primitives
        layouts = tuple(_layout(array) for _, array in arguments)
        key = make.__name__, layouts
        if key not in primitives:
            if len(primitives) == MAX_PRIMITIVES:
                _destroy(self._library, primitives)
            primitives[key] = self._prepare(make, [n for n, _ in arguments], layouts)
        primitive, call = primitives[key]
        for (_, array), argument in zip(arguments, call, strict=True):
            memory = ctypes.c_void_p(argument.memory)
            address = ctypes.c_void_p(array.ctypes.data)
            self._call("memory_set_data_handle", memory, address)
        stream = self._thread.stream
        self._call("primitive_execute", primitive, stream, len(call), call)
        self._call("stream_wait", stream)

    def _begin_thread(self) -> None:
        if hasattr(self._library, "omp_set_num_threads"):
            self._library.omp_set_num_threads(1)
        self._thread.stream = ctypes.c_void_p()
        stream = ctypes.byref(self._thread.stream)
        self._call("stream_create", stream, self._engine, IN_ORDER)
        self._thread.primitives = {}
        owner = self._thread.owner = _Owner()  # which goes when the thread ends
        weakref.finalize(owner, _destroy, self._library, self._thread.primitives)

    def _prepare(
        self,
        make: Callable[..., ctypes.c_void_p],
        names: list[int],
        layouts: tuple[Layout, ...],
    ) -> tuple[ctypes.c_void_p, ctypes.Array[_Argument]]:
        """Return a primitive and its arguments, which have no addresses yet."""
        described = [self._describe(layout) for layout in layouts]
        description = make(*described)
        primitive = ctypes.c_void_p()
        self._call("primitive_create", ctypes.byref(primitive), description)
        self._call("primitive_desc_destroy", description)
        arguments = []
        for name, layout in zip(names, described, strict=True):
            memory = ctypes.c_void_p()
            new = ctypes.byref(memory)
            self._call("memory_create", new, layout, self._engine, ctypes.c_void_p())
            self._call("memory_desc_destroy", layout)
            arguments.append(_Argument(name, memory))
        return primitive, (_Argument * len(arguments))(*arguments)

    def _describe(self, layout: Layout) -> ctypes.c_void_p:
        shape, strides, dtype = layout
        described, many = ctypes.c_void_p(), ctypes.c_int64 * 12
        new = ctypes.byref(described)
        numbers = len(shape), many(*shape), TYPES[dtype], many(*strides)
        self._call("memory_desc_create_with_strides", new, *numbers)
        return described

    def _matmul(self, *layouts: ctypes.c_void_p) -> ctypes.c_void_p:
        description, (a, b, out) = ctypes.c_void_p(), layouts
        new, none = ctypes.byref(description), ctypes.c_void_p()
        create = "matmul_primitive_desc_create"
        self._call(create, new, self._engine, a, b, none, out, none)
        return description

    def _reorder(self, *layouts: ctypes.c_void_p) -> ctypes.c_void_p:
        description, engine = ctypes.c_void_p(), self._engine
        new, none = ctypes.byref(description), ctypes.c_void_p()
        source, target = layouts
        create = "reorder_primitive_desc_create"
        self._call(create, new, source, engine, target, engine, none)
        return description

    def _call(self, name: str, *arguments: object) -> None:
        """Call a function of the library. Raises: RuntimeError if it fails."""
        if status := getattr(self._library, f"dnnl_{name}")(*arguments):
            raise RuntimeError(f"oneDNN's dnnl_{name} failed with status {status}")


def _destroy(library: ctypes.CDLL, primitives: Primitives) -> None:
    """Free the memory of primitives and of what stands for their arguments."""
    for primitive, call in primitives.values():
        library.dnnl_primitive_destroy(primitive)
        for argument in call:
            library.dnnl_memory_destroy(ctypes.c_void_p(argument.memory))
    primitives.clear()


def _layout(array: np.ndarray) -> Layout:
    strides = tuple(stride // array.itemsize for stride in array.strides)
    return array.shape, strides, array.dtype.name


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
        if (major := library.dnnl_version()[0]) == MAJOR_VERSION:
            return library
        problem = f"expected its version {MAJOR_VERSION}, got {major}"
    raise RuntimeError(
        "--precision bf16 on a CPU needs oneDNN: "
        f"pip install 'minitransformer[bf16]' ({problem})"
    )
