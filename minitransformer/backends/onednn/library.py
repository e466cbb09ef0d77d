"""Products of bfloat16 and of integer matrices by oneDNN's C interface.

oneDNN multiplies with AVX2, AVX-512, AVX-512 BF16, AVX-512 VNNI and AMX. It compiles an
operation, which it calls a primitive, for the shapes and layouts of its arrays, in
about a third of a millisecond and 130 KB of memory. Each thread keeps the primitives
that it has used. One for A B serves any number of rows of A, unless B has very many
columns. The sum over all rows in A^T B, and a product whose rows have scales, are
compiled for the number of rows. Of such numbers there should be few: `kernels.py`
rounds them up.

Arrays of type uint16 hold the bits of bfloat16 numbers, of which NumPy has none.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from ctypes import (
    addressof,
    byref,
    c_char,
    c_float,
    c_int,
    c_int32,
    c_int64,
    c_size_t,
    c_void_p,
)
from ctypes.util import find_library
from importlib import metadata
from typing import Any, TypeAlias

import numpy as np

from minitransformer.system.workers import product_threads

# The name that the package index has for the library, and the one that C has for it.
DISTRIBUTION = "onednn-cpu-gomp"
LIBRARY = "dnnl"

# The oldest version of oneDNN that is known to multiply any number of rows fast.
MAJOR_VERSION, MINOR_VERSION = 3, 2

# Constants of its C interface.
CPU, IN_ORDER = 1, 1
MAX_AXES, ALIGNMENT = 12, 64
ANY_NUMBER = -(1 << 63)  # the length of an axis that only a call decides
BFLOAT16, FLOAT32, INT32, INT8, UINT8 = 2, 3, 4, 5, 6
# The arguments of a primitive.
SOURCE, WEIGHTS, BIAS, DESTINATION, SCRATCHPAD = 1, 33, 41, 17, 80
SCALES, ZERO_POINTS = 0x1000, 0x2000  # of another argument, to which they are added
OPERANDS = 0x8002, 0x10002  # of what comes after a product first, and second
ADD, MULTIPLY, RELU, EXP = 0x1FFF0, 0x1FFF1, 0x20, 0x2A
QUERY_SCRATCHPAD, CALLERS = 136, 1

# For each precision, the instructions that it needs and their bit in what
# dnnl_get_effective_cpu_isa returns.
INSTRUCTIONS = {
    "bf16": ("AMX or AVX-512 BF16", 0x80),
    "int8": ("AMX or AVX-512 VNNI", 0x40),
}

# Products of more columns are compiled for each number of rows: what serves any number
# needs a scratchpad of 1 KB for each column.
MAX_COLUMNS = 4096

# Operations on scaled rows are compiled for their number: at most so many at a time.
MAX_ROWS, PIECE_ROWS = 512, 16

# The sum over rows in A^T B takes so many of them at a time, so that it is compiled for
# few numbers of rows.
MAX_SUMMED = 512

# What `quantized` adds, so that its numbers have no sign.
MIDDLE = np.array([128], np.int32)
MIDDLE_ADDRESS = MIDDLE.ctypes.data

# How many primitives a thread keeps: training needs about a hundred.
MAX_PRIMITIVES = 1000

# The type, the shape and the strides of an array, in elements.
Layout: TypeAlias = tuple[int, tuple[int, ...], tuple[int, ...]]

# What oneDNN calls an operation, the layouts of its arguments, and the options of
# `_attributes`.
Operation: TypeAlias = tuple[str, dict[int, Layout], dict[str, Any]]


class OneDnn:
    """The library, loaded for a precision.

    Raises: RuntimeError if there is no such library, or if the processor does not have
    the instructions that the precision needs.
    """

    def __init__(self, precision: str = "bf16") -> None:
        self._library = _load(precision)
        needed, bit = INSTRUCTIONS[precision]
        if not self._library.dnnl_get_effective_cpu_isa() & bit:
            raise RuntimeError(
                f"--precision {precision}: expected a processor with {needed}, got one "
                "without"
            )
        self._library.dnnl_primitive_desc_query_md.restype = c_void_p
        self._library.dnnl_memory_desc_get_size.restype = c_size_t
        self._library.dnnl_memory_set_data_handle.argtypes = c_void_p, c_void_p
        self._engine = c_void_p()
        _call(self._library, "engine_create", byref(self._engine), CPU, c_size_t(0))
        self._thread = threading.local()

    def rounded(self, x: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        """Round float32 numbers to the nearest bfloat16 numbers, as uint16.

        `out`, if it is given, is contiguous and has the shape of `x`.
        """
        x = np.ascontiguousarray(x)
        if out is None:
            out = np.empty(x.shape, np.uint16)
        if x.size:
            # One piece if x has a power of two elements, else two that overlap: with a
            # primitive for each power of two, all sizes are served.
            piece = 1 << (x.size.bit_length() - 1)
            rounding = self._primitive(_rounding, piece)
            source, target = _address(x), _address(out)
            for start in {0, x.size - piece}:
                places = [source + start * x.itemsize, target + start * out.itemsize]
                self._run(rounding, places)
        return out

    def quantized(self, x: np.ndarray, factors: np.ndarray, out: np.ndarray) -> None:
        """Multiply each row by a factor of its own, round, and add 128.

        What is below 0 becomes 0, and what is above 255 becomes 255. All arrays are
        contiguous.

        Shapes: x [n, k] float32, factors [n] float32, out [n, k] uint8
        """
        width, source, target, scales = x.shape[1], *map(_address, (x, out, factors))
        for first, rows in _row_pieces(len(x)):
            rounding = self._primitive(_quantization, rows, width)
            places = [
                source + 4 * first * width,
                target + first * width,
                scales + 4 * first,
                MIDDLE_ADDRESS,
            ]
            self._run(rounding, places)

    def product(
        self,
        a: np.ndarray,
        b: np.ndarray,
        *,
        bias: np.ndarray | None = None,
        function: int | None = None,
    ) -> np.ndarray:
        """Return A B in float32, or A B + bias, or a function of that.

        Both matrices have bfloat16 numbers, and are contiguous or transposed. With the
        `function` RELU the result is the maximum of that and 0; with EXP, the
        exponential. The bias is contiguous.

        Shapes: a [n, k], b [k, m], bias [m] -> [n, m]
        """
        create = np.empty if len(b) else np.zeros  # the sum of no rows
        out = create((len(a), b.shape[1]), np.float32)
        if _is_transposed(a) and bias is None and function is None:
            for first in range(0, len(b), MAX_SUMMED):
                part = slice(first, first + MAX_SUMMED)
                self._multiply(a[:, part], b[part], out, add=first > 0)
        else:
            self._multiply(a, b, out, bias=bias, function=function)
        return out

    def _multiply(
        self,
        a: np.ndarray,
        b: np.ndarray,
        out: np.ndarray,
        *,
        add: bool = False,
        bias: np.ndarray | None = None,
        function: int | None = None,
    ) -> None:
        """Write what `product` returns to `out`, or add it."""
        n, k, m = *a.shape, b.shape[1]
        assert len(b) == k
        transposed = _is_transposed(a)
        addresses = [_address(a), _address(b), _address(out)]
        if bias is not None:
            addresses.append(_vector(bias, (m,)))
        rows = n if transposed or m > MAX_COLUMNS else ANY_NUMBER
        factors = rows, k, transposed, m, _is_transposed(b)
        how = *factors, add, bias is not None, function
        self._run(self._primitive(_product, *how), addresses, n)

    def scaled_product(
        self,
        a: np.ndarray,
        row_scales: np.ndarray,
        b: ScaledMatrix,
        *,
        bias: np.ndarray | None = None,
        function: int | None = None,
        out: np.ndarray | None = None,
    ) -> np.ndarray:
        """Return row_scales (A - 128) B + bias in float32.

        A has uint8 numbers. All arrays are contiguous. A `function` is applied to the
        result, as in `product`, which is written to `out` if that is given.

        Shapes: a [n, k], b [k, m], row_scales [n, 1], bias [m], out [n, m] -> [n, m]
        """
        rows, columns = len(a), len(b.scales)
        if out is None:
            out = np.empty((rows, columns), np.float32)
        assert a.shape[1] == len(b.integers)
        assert out.shape == (rows, columns)
        if rows > MAX_ROWS:
            for first in range(0, rows, MAX_ROWS):
                part = slice(first, first + MAX_ROWS)
                factors = a[part], row_scales[part], b
                self.scaled_product(
                    *factors, bias=bias, function=function, out=out[part]
                )
        elif rows:
            scales = _vector(row_scales, (rows, 1))
            addresses = [_address(a), _address(out), scales]
            if bias is not None:
                addresses.append(_vector(bias, (columns,)))
            how = rows, b.layout, bias is not None, function
            multiply = self._primitive(_scaled_product, *how)
            self._run(multiply, addresses + b.addresses)
        return out

    def _primitive(self, describe: Callable[..., Operation], *how: Any) -> _Primitive:
        """Return this thread's primitive for an operation, created at its first use.

        Threads share none: a primitive holds the addresses of the arrays of one call.
        """
        primitives = self._thread.__dict__.setdefault("primitives", {})
        threads = product_threads()
        key = describe, threads, *how
        if (primitive := primitives.get(key)) is None:
            if len(primitives) >= MAX_PRIMITIVES:
                primitives.clear()
            # Threads that wait for each other in loops would take cores from others.
            if hasattr(self._library, "omp_set_num_threads"):
                self._library.omp_set_num_threads(threads)
            primitive = _Primitive(self._library, self._engine, *describe(*how))
            primitives[key] = primitive
        return primitive

    def _run(self, primitive: _Primitive, addresses: list[int], rows: int = 0) -> None:
        """Run a primitive with this thread's scratchpad, large enough for any so far.

        A scratchpad of its own for each primitive would take a multiple of the memory.
        """
        scratchpad, address = getattr(self._thread, "scratchpad", (b"", 0))
        if len(scratchpad) < primitive.scratchpad + ALIGNMENT:
            scratchpad = np.empty(primitive.scratchpad + ALIGNMENT, np.uint8)
            address = -(-scratchpad.ctypes.data // ALIGNMENT) * ALIGNMENT
            self._thread.scratchpad = scratchpad, address
        addresses.append(address)
        primitive.run(addresses, rows)


class ScaledMatrix:
    """Integers times a scale for each column: the B of `OneDnn.scaled_product`.

    The integers are contiguous or transposed.

    Shapes: integers [k, m] int8, scales [m] float32
    """

    def __init__(self, integers: np.ndarray, scales: np.ndarray) -> None:
        self.integers, self.scales = integers, scales
        # What 128 in all rows of the other factor adds, negated.
        self.offsets = (-128 * integers.sum(axis=0) * scales).astype(np.float32)
        (rows, columns), transposed = integers.shape, _is_transposed(integers)
        self.layout = _layout(INT8, rows, columns, transposed)
        self.addresses = [*map(_address, (integers, self.offsets, scales))]


class _Argument(ctypes.Structure):
    _fields_ = (("argument", c_int), ("memory", c_void_p))


class _Primitive:
    """An operation that oneDNN has compiled for arrays of certain layouts.

    It needs `scratchpad` bytes of memory, which may lie elsewhere at each call. A
    layout may leave a number of rows open.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        engine: c_void_p,
        operation: str,
        layouts: dict[int, Layout],
        options: dict[str, Any],
    ) -> None:
        self._library, self._engine, self._layouts = library, engine, layouts
        self._primitive, self._stream = c_void_p(), c_void_p()
        attributes, self._description = _attributes(library, **options), c_void_p()
        described = {x: _described(library, *layout) for x, layout in layouts.items()}
        source, target = described[SOURCE], described[DESTINATION]
        arguments = [source, engine, target, engine]
        if operation == "matmul":
            bias = described.get(BIAS, c_void_p())
            arguments = [engine, source, described[WEIGHTS], bias, target]
        create = f"{operation}_primitive_desc_create"
        _call(library, create, byref(self._description), *arguments, attributes)
        _call(library, "primitive_create", byref(self._primitive), self._description)
        _call(library, "stream_create", byref(self._stream), engine, IN_ORDER)
        for layout in described.values():
            _call(library, "memory_desc_destroy", layout)
        _call(library, "primitive_attr_destroy", attributes)
        query = library.dnnl_primitive_desc_query_md
        self._scratchpad = c_void_p(query(self._description, QUERY_SCRATCHPAD, 0))
        size = library.dnnl_memory_desc_get_size(self._scratchpad)
        self.scratchpad: int = size
        self._memories: list[c_void_p] = []
        # By the number of rows.
        self._arguments: dict[int, tuple[list[c_void_p], Any, list[int]]] = {}
        self._move = library.dnnl_memory_set_data_handle
        self._execute = library.dnnl_primitive_execute
        self._wait = library.dnnl_stream_wait
        made = self._primitive, self._stream, self._description, self._memories
        finalizer = weakref.finalize(self, _destroy, library, *made)
        finalizer.atexit = False  # a daemon thread may still compute then

    def run(self, addresses: list[int], rows: int) -> None:
        """Compute with the arrays at these addresses, the last of the scratchpad."""
        if rows not in self._arguments:
            self._arguments[rows] = self._describe(rows)
        memories, arguments, places = self._arguments[rows]
        failed = 0
        for i, address in enumerate(addresses):
            if places[i] != address:  # many are the same at each call
                failed |= self._move(memories[i], address)
                places[i] = address
        failed |= self._execute(
            self._primitive, self._stream, len(places), arguments
        ) or self._wait(self._stream)
        if failed:
            del self._arguments[rows]  # whose addresses may not be those noted
            raise RuntimeError(f"oneDNN failed to compute, with status {failed}")

    def _describe(self, rows: int) -> tuple[list[c_void_p], Any, list[int]]:
        """Return what stands for the arguments of calls with so many rows.

        It is a list of oneDNN's objects, the same for its functions, and the addresses
        that the objects have.
        """
        library, memories, described = self._library, [], []
        for dtype, shape, strides in self._layouts.values():
            shape = tuple(rows if length == ANY_NUMBER else length for length in shape)
            described.append(_described(library, dtype, shape, strides))
        for layout in (*described, self._scratchpad):
            memory = c_void_p()
            how = layout, self._engine, c_void_p()
            _call(library, "memory_create", byref(memory), *how)
            memories.append(memory)
        for layout in described:
            _call(library, "memory_desc_destroy", layout)
        self._memories += memories
        places = map(_Argument, (*self._layouts, SCRATCHPAD), memories)
        return memories, (_Argument * len(memories))(*places), [0] * len(memories)


def _rounding(size: int) -> Operation:
    """Round `size` float32 numbers."""
    source: Layout = FLOAT32, (size,), (1,)
    target: Layout = BFLOAT16, (size,), (1,)
    return "reorder", {SOURCE: source, DESTINATION: target}, {}


def _quantization(rows: int, columns: int) -> Operation:
    """Round a float32 matrix to uint8 numbers, as `OneDnn.quantized` says."""
    layouts = {
        SOURCE: _layout(FLOAT32, rows, columns),
        DESTINATION: _layout(UINT8, rows, columns),
        SCALES + SOURCE: (FLOAT32, (rows,), (1,)),
        ZERO_POINTS + DESTINATION: (INT32, (1,), (1,)),
    }
    return "reorder", layouts, {"scaled_rows": True}


def _product(
    n: int,
    k: int,
    a_is_transposed: bool,
    m: int,
    b_is_transposed: bool,
    add: bool,
    has_bias: bool,
    function: int | None,
) -> Operation:
    """Multiply two matrices, as `OneDnn.product` says."""
    layouts = {
        SOURCE: _layout(BFLOAT16, n, k, a_is_transposed),
        WEIGHTS: _layout(BFLOAT16, k, m, b_is_transposed),
        DESTINATION: _layout(FLOAT32, n, m),
    }
    if has_bias:
        layouts[BIAS] = _layout(FLOAT32, 1, m)
    return "matmul", layouts, {"add": add, "function": function}


def _scaled_product(
    rows: int, b: Layout, has_bias: bool, function: int | None
) -> Operation:
    """Multiply matrices of integers, as `OneDnn.scaled_product` says.

    The matrices are batches of one. Without a batch, oneDNN has no fast code for rows
    with scales.
    """
    dtype, (width, columns), strides = b
    of_rows, of_columns = _batch(FLOAT32, rows, 1), _batch(FLOAT32, 1, columns)
    operations = {OPERANDS[0]: (MULTIPLY, of_rows)}
    if has_bias:
        operations[OPERANDS[1]] = ADD, of_columns
    layouts = {
        SOURCE: _batch(UINT8, rows, width),
        DESTINATION: _batch(FLOAT32, rows, columns),
        **{operand: layout for operand, (_, layout) in operations.items()},
        WEIGHTS: (dtype, (1, width, columns), (width * columns, *strides)),
        BIAS: of_columns,  # what oneDNN calls so is added before rows are scaled
        SCALES + WEIGHTS: (FLOAT32, (columns,), (1,)),
    }
    options = {"operations": operations.values(), "function": function}
    return "matmul", layouts, {"scaled_columns": 2, **options}


def _destroy(
    library: ctypes.CDLL,
    primitive: c_void_p,
    stream: c_void_p,
    description: c_void_p,
    memories: list[c_void_p],
) -> None:
    """Free the memory of a primitive and of what stands for its arguments."""
    library.dnnl_primitive_destroy(primitive)
    library.dnnl_stream_destroy(stream)
    library.dnnl_primitive_desc_destroy(description)
    for memory in memories:
        library.dnnl_memory_destroy(memory)


def _row_pieces(count: int) -> Iterator[tuple[int, int]]:
    """Yield where pieces that make up so many rows begin, and their numbers of rows.

    There are few such numbers; the last piece may begin in the one before it.
    """
    for first in range(0, count, MAX_ROWS):
        rest = min(count - first, MAX_ROWS)
        if whole := rest // PIECE_ROWS * PIECE_ROWS:
            yield first, whole
        if whole < rest:
            size = min(count, PIECE_ROWS)
            yield count - size, size


def _address(array: np.ndarray) -> int:
    """Return where a contiguous or transposed array lies."""
    buffer: Any = array
    try:
        return addressof(c_char.from_buffer(buffer))  # three times as fast as the other
    except (TypeError, ValueError):  # transposed, empty or not to be written
        return array.ctypes.data


def _vector(vector: np.ndarray, shape: tuple[int, ...]) -> int:
    """Return where a bias or scales lie."""
    assert (vector.shape, vector.dtype) == (shape, np.float32)
    return _address(vector)


def _batch(dtype: int, rows: int, columns: int) -> Layout:
    """Return the layout of a batch of one contiguous matrix."""
    return dtype, (1, rows, columns), (rows * columns, columns, 1)


def _is_transposed(matrix: np.ndarray) -> bool:
    """Whether a matrix is a contiguous one, transposed, instead of contiguous."""
    if matrix.flags.c_contiguous:
        return False
    assert matrix.flags.f_contiguous
    return True


def _layout(dtype: int, rows: int, columns: int, transposed: bool = False) -> Layout:
    """Return the layout of a contiguous or transposed matrix."""
    return dtype, (rows, columns), (1, rows) if transposed else (columns, 1)


def _attributes(
    library: ctypes.CDLL,
    add: bool = False,
    function: int | None = None,
    scaled_columns: int | None = None,
    scaled_rows: bool = False,
    operations: Iterable[tuple[int, Layout]] = (),
) -> c_void_p:
    """Return how to compute: the caller's scratchpad, scales, and what comes after.

    `scaled_columns` is the axis of the columns, if they have scales. Where the rows of
    a source have scales, a number is added to them, too. `operations` follow, with
    arrays of these layouts, and then the function.
    """
    attributes, following = c_void_p(), c_void_p()
    _call(library, "primitive_attr_create", byref(attributes))
    _call(library, "primitive_attr_set_scratchpad_mode", attributes, CALLERS)
    set_scales = "primitive_attr_set_scales_mask"
    if scaled_columns is not None:
        _call(library, set_scales, attributes, WEIGHTS, 1 << scaled_columns)
    if scaled_rows:
        _call(library, set_scales, attributes, SOURCE, 1 << 0)
        set_zero_points = "primitive_attr_set_zero_points_mask"
        _call(library, set_zero_points, attributes, DESTINATION, 0)
    _call(library, "post_ops_create", byref(following))
    if add:
        append, added = "post_ops_append_sum", (c_float(1), c_int32(0), FLOAT32)
        _call(library, append, following, *added)
    for operation, layout in operations:
        operand = _described(library, *layout)
        _call(library, "post_ops_append_binary", following, operation, operand)
        _call(library, "memory_desc_destroy", operand)
    if function is not None:
        append, parameters = "post_ops_append_eltwise", (c_float(0), c_float(0))
        _call(library, append, following, function, *parameters)
    _call(library, "primitive_attr_set_post_ops", attributes, following)
    _call(library, "post_ops_destroy", following)
    return attributes


def _described(
    library: ctypes.CDLL, dtype: int, shape: tuple[int, ...], strides: tuple[int, ...]
) -> c_void_p:
    """Return oneDNN's description of a layout, which the caller frees."""
    description, axes = c_void_p(), c_int64 * MAX_AXES
    create = "memory_desc_create_with_strides"
    layout = len(shape), axes(*shape), dtype, axes(*strides)
    _call(library, create, byref(description), *layout)
    return description


def _call(library: ctypes.CDLL, name: str, *arguments: object) -> None:
    """Call a function of the library. Raises: RuntimeError if it fails."""
    if status := getattr(library, f"dnnl_{name}")(*arguments):
        raise RuntimeError(f"oneDNN's dnnl_{name} failed with status {status}")


def _load(precision: str) -> ctypes.CDLL:
    """Load the library of an installed package, or that of the system."""
    paths = []
    with suppress(metadata.PackageNotFoundError):
        files = metadata.files(DISTRIBUTION) or []
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
        major, minor = library.dnnl_version()[:2]
        if major != MAJOR_VERSION or minor < MINOR_VERSION:
            expected = f"{MAJOR_VERSION}.{MINOR_VERSION} or a later {MAJOR_VERSION}.x"
            problem = f"expected its version {expected}, got {major}.{minor}"
        else:
            return library
    raise RuntimeError(
        f"--precision {precision} on a CPU needs oneDNN: "
        f"pip install 'minitransformer[onednn]' ({problem})"
    )
