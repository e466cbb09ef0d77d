"""Products of bfloat16 and of integer matrices by oneDNN's C interface.

oneDNN multiplies with AVX2, AVX-512, AVX-512 BF16, AVX-512 VNNI and AMX. It compiles an
operation, which it calls a primitive, for the shapes and layouts of its arrays, in
about a third of a millisecond and 130 KB of memory. Each thread caches its primitives.
One primitive for A B serves any number of rows of A, unless B has more than MAX_COLUMNS
columns. The sum over all rows in A^T B, and a product whose rows have scales, are
compiled for each number of rows. Therefore `kernels.py` rounds these numbers up, and
few different ones remain.

NumPy has no bfloat16: arrays of type uint16 hold the bits of such numbers.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
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
from dataclasses import dataclass
from importlib import metadata
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from minitransformer.system.workers import product_threads

# The name of the package on the index, and the name of the library for C's linker.
DISTRIBUTION = "onednn-cpu-gomp"
LIBRARY = "dnnl"

# The oldest version of oneDNN that multiplies fast while the number of rows is open.
MAJOR_VERSION, MINOR_VERSION = 3, 2

# Constants of its C interface.
CPU, IN_ORDER = 1, 1
MAX_AXES, ALIGNMENT = 12, 64
ANY_NUMBER = -(1 << 63)  # an axis whose length is given at each call
BFLOAT16, FLOAT32, INT8 = 2, 3, 5
# The arguments of a primitive.
SOURCE, WEIGHTS, BIAS, DESTINATION, SCRATCHPAD = 1, 33, 41, 17, 80
SCALES = 0x1000  # plus WEIGHTS: their scales
FIRST_OPERAND, SECOND_OPERAND = 0x8002, 0x10002  # of the operations after a product
ADD, MULTIPLY, RELU, EXP = 0x1FFF0, 0x1FFF1, 0x20, 0x2A
QUERY_SCRATCHPAD, CALLERS = 136, 1

# For each precision, the instructions that it needs and their bit in the result of
# dnnl_get_effective_cpu_isa.
INSTRUCTIONS = {
    "bf16": ("AMX or AVX-512 BF16", 0x80),
    "int8": ("AMX or AVX-512 VNNI", 0x40),
}

# Products of more columns are compiled for each number of rows: a primitive for any
# number of rows needs a scratchpad of 1 KB for each column.
MAX_COLUMNS = 4096

# Products of scaled rows are compiled for each number of rows, which is at most this.
MAX_ROWS = 512

# The sum over rows in A^T B adds at most so many rows at a time, and is then compiled
# for few numbers of rows.
MAX_SUMMED = 512

# The most primitives in the cache of a thread: training needs about a hundred.
MAX_PRIMITIVES = 1000

# The type, the shape and the strides of an array, in elements.
Layout: TypeAlias = tuple[int, tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class Description:
    """An operation in oneDNN's terms: `reorder` or `matmul`, and how it computes.

    `layouts` has the layout of each argument. `scaled_columns` is the axis of the
    columns of WEIGHTS, if they have scales. A `matmul` can then `add` to its
    DESTINATION, apply `operations`, each with the layout of its operand, and apply a
    `function`, in this order.
    """

    operation: str
    layouts: dict[int, Layout]
    scaled_columns: int | None = None
    add: bool = False
    operations: tuple[tuple[int, Layout], ...] = ()
    function: int | None = None


class Rounding(NamedTuple):
    """Round `size` float32 numbers."""

    size: int

    def describe(self) -> Description:
        source, target = _vector(FLOAT32, self.size), _vector(BFLOAT16, self.size)
        return Description("reorder", {SOURCE: source, DESTINATION: target})


class Product(NamedTuple):
    """Multiply matrices [n, k] and [k, m], as `OneDnn.product` says."""

    n: int
    k: int
    m: int
    a_is_transposed: bool
    b_is_transposed: bool
    has_bias: bool
    add: bool
    function: int | None

    def describe(self) -> Description:
        layouts = {
            SOURCE: _layout(BFLOAT16, self.n, self.k, self.a_is_transposed),
            WEIGHTS: _layout(BFLOAT16, self.k, self.m, self.b_is_transposed),
            DESTINATION: _layout(FLOAT32, self.n, self.m),
        }
        if self.has_bias:
            layouts[BIAS] = _layout(FLOAT32, 1, self.m)
        return Description("matmul", layouts, add=self.add, function=self.function)


class ScaledProduct(NamedTuple):
    """Multiply matrices of integers, as `OneDnn.scaled_product` says.

    The matrices are batches of one. Without a batch, oneDNN has no fast code for rows
    with scales.
    """

    rows: int
    b: Layout
    has_bias: bool
    function: int | None

    def describe(self) -> Description:
        dtype, (width, columns), strides = self.b
        # After the product: each row times its scale, and then the bias.
        row_scales = _batch(FLOAT32, self.rows, 1)
        of_columns = _batch(FLOAT32, 1, columns)
        layouts = {
            SOURCE: _batch(INT8, self.rows, width),
            DESTINATION: _batch(FLOAT32, self.rows, columns),
            FIRST_OPERAND: row_scales,
        }
        operations = [(MULTIPLY, row_scales)]
        if self.has_bias:
            layouts[SECOND_OPERAND] = of_columns
            operations.append((ADD, of_columns))
        # Last in the order of addresses: the arrays of a `ScaledMatrix`.
        layouts |= {
            WEIGHTS: (dtype, (1, width, columns), (width * columns, *strides)),
            SCALES + WEIGHTS: _vector(FLOAT32, columns),
        }
        return Description(
            "matmul",
            layouts,
            scaled_columns=2,
            operations=tuple(operations),
            function=self.function,
        )


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

    def round(self, x: np.ndarray, out: np.ndarray) -> None:
        """Round float32 numbers to the nearest bfloat16 numbers, as uint16.

        `out` is contiguous and has the shape of `x`.
        """
        x = np.ascontiguousarray(x)
        if x.size:
            # One piece if x has a power of two elements, else two that overlap: with a
            # primitive for each power of two, all sizes are served.
            piece = 1 << (x.size.bit_length() - 1)
            rounding = self._primitive(Rounding(piece))
            source, target = address_of(x), address_of(out)
            for start in {0, x.size - piece}:
                addresses = [source + start * x.itemsize, target + start * out.itemsize]
                self._run(rounding, addresses)

    def product(
        self,
        a: np.ndarray,
        b: np.ndarray,
        *,
        bias: np.ndarray | None = None,
        function: int | None = None,
    ) -> np.ndarray:
        """Return A B in float32, or A B + bias, or a function of that.

        Both matrices have bfloat16 numbers, and are contiguous or transposed. The
        function is RELU or EXP. The bias is contiguous.

        Shapes: a [n, k], b [k, m], bias [m] -> [n, m]
        """
        create = np.empty if len(b) else np.zeros  # the sum of no rows
        out = create((len(a), b.shape[1]), np.float32)
        if _is_transposed(a) and bias is None and function is None:
            # The gradient of parameters, A^T B: sum some rows, then add the others.
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
        n, k = a.shape
        m = b.shape[1]
        assert len(b) == k
        # The number of rows is open, unless the primitive would be slow or large then.
        transposed = _is_transposed(a)
        product = Product(
            n=n if transposed or m > MAX_COLUMNS else ANY_NUMBER,
            k=k,
            m=m,
            a_is_transposed=transposed,
            b_is_transposed=_is_transposed(b),
            has_bias=bias is not None,
            add=add,
            function=function,
        )
        # In the order of the layouts of `Product`.
        addresses = [address_of(a), address_of(b), address_of(out)]
        if bias is not None:
            addresses.append(_checked_address(bias, (m,)))
        self._run(self._primitive(product), addresses, n)

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
        """Return row_scales A B + bias in float32, or a function of that.

        A has int8 numbers. All arrays are contiguous. The result is written to `out` if
        that is given.

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
                self.scaled_product(
                    a[part],
                    row_scales[part],
                    b,
                    bias=bias,
                    function=function,
                    out=out[part],
                )
        elif rows:
            # In the order of the layouts of `ScaledProduct`.
            scales = _checked_address(row_scales, (rows, 1))
            addresses = [address_of(a), address_of(out), scales]
            if bias is not None:
                addresses.append(_checked_address(bias, (columns,)))
            addresses += b.addresses
            product = ScaledProduct(rows, b.layout, bias is not None, function)
            self._run(self._primitive(product), addresses)
        return out

    def _primitive(self, operation: Rounding | Product | ScaledProduct) -> _Primitive:
        """Return this thread's primitive for an operation, created at its first use.

        Threads share none: a primitive holds the addresses of the arrays of one call.
        """
        primitives = self._thread.__dict__.setdefault("primitives", {})
        threads = product_threads()
        key = type(operation), operation, threads
        if (primitive := primitives.get(key)) is None:
            if len(primitives) >= MAX_PRIMITIVES:
                primitives.clear()
            # Threads that wait for each other in loops would take cores from others.
            if hasattr(self._library, "omp_set_num_threads"):
                self._library.omp_set_num_threads(threads)
            primitive = _Primitive(self._library, self._engine, operation.describe())
            primitives[key] = primitive
        return primitive

    def _run(self, primitive: _Primitive, addresses: list[int], rows: int = 0) -> None:
        """Run a primitive with this thread's scratchpad, which grows when necessary.

        One scratchpad for each primitive would take a multiple of the memory.
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
        self.integers = integers
        self.scales = scales
        rows, columns = integers.shape
        self.layout = _layout(INT8, rows, columns, _is_transposed(integers))
        self.addresses = [*map(address_of, (integers, scales))]


class _Argument(ctypes.Structure):
    _fields_ = (("argument", c_int), ("memory", c_void_p))


class _Primitive:
    """An operation that oneDNN has compiled for arrays of certain layouts.

    It needs `scratchpad` bytes of memory, which may lie elsewhere at each call. A
    layout may leave a number of rows open.
    """

    def __init__(
        self, library: ctypes.CDLL, engine: c_void_p, description: Description
    ) -> None:
        self._library = library
        self._engine = engine
        self._layouts = description.layouts
        # Describe the operation and its arguments to oneDNN.
        attributes = _attributes(library, description)
        described = {x: _described(library, *y) for x, y in self._layouts.items()}
        source, target = described[SOURCE], described[DESTINATION]
        arguments = [source, engine, target, engine]
        if description.operation == "matmul":
            bias = described.get(BIAS, c_void_p())
            arguments = [engine, source, described[WEIGHTS], bias, target]
        # Compile it. The descriptions of its arguments are no longer needed then.
        create = f"{description.operation}_primitive_desc_create"
        self._description = c_void_p()
        _call(library, create, byref(self._description), *arguments, attributes)
        self._primitive = c_void_p()
        _call(library, "primitive_create", byref(self._primitive), self._description)
        self._stream = c_void_p()
        _call(library, "stream_create", byref(self._stream), engine, IN_ORDER)
        for layout in described.values():
            _call(library, "memory_desc_destroy", layout)
        _call(library, "primitive_attr_destroy", attributes)
        # Ask how much memory it needs.
        query = library.dnnl_primitive_desc_query_md
        self._scratchpad = c_void_p(query(self._description, QUERY_SCRATCHPAD, 0))
        self.scratchpad: int = library.dnnl_memory_desc_get_size(self._scratchpad)
        # By the number of rows: oneDNN's memory objects, the same as an array of
        # arguments in C, and the addresses that they hold.
        self._arguments: dict[int, tuple[list[c_void_p], Any, list[int]]] = {}
        self._move = library.dnnl_memory_set_data_handle
        self._execute = library.dnnl_primitive_execute
        self._wait = library.dnnl_stream_wait
        # Free everything in C with this object.
        self._memories: list[c_void_p] = []
        finalizer = weakref.finalize(
            self,
            _destroy,
            library,
            self._primitive,
            self._stream,
            self._description,
            self._memories,
        )
        finalizer.atexit = False  # a daemon thread may still compute then

    def run(self, addresses: list[int], rows: int) -> None:
        """Compute with the arrays at these addresses, the last of the scratchpad."""
        if rows not in self._arguments:
            self._arguments[rows] = self._create_arguments(rows)
        memories, arguments, held = self._arguments[rows]
        failed = 0
        for i, address in enumerate(addresses):
            if held[i] != address:  # many are the same at each call
                failed |= self._move(memories[i], address)
                held[i] = address
        failed |= self._execute(
            self._primitive, self._stream, len(held), arguments
        ) or self._wait(self._stream)
        if failed:
            del self._arguments[rows]  # it is unknown which addresses they hold
            raise RuntimeError(f"oneDNN failed to compute, with status {failed}")

    def _create_arguments(self, rows: int) -> tuple[list[c_void_p], Any, list[int]]:
        """Return an entry of `_arguments`: memory objects that hold no address yet."""
        library = self._library
        # With the number of rows, the layouts are complete.
        described = []
        for dtype, shape, strides in self._layouts.values():
            shape = tuple(rows if length == ANY_NUMBER else length for length in shape)
            described.append(_described(library, dtype, shape, strides))
        # A memory object for each argument, and for the scratchpad.
        nowhere = c_void_p()
        memories = []
        for layout in (*described, self._scratchpad):
            memory = c_void_p()
            _call(
                library, "memory_create", byref(memory), layout, self._engine, nowhere
            )
            memories.append(memory)
        for layout in described:
            _call(library, "memory_desc_destroy", layout)
        self._memories += memories
        pairs = map(_Argument, (*self._layouts, SCRATCHPAD), memories)
        return memories, (_Argument * len(memories))(*pairs), [0] * len(memories)


def _destroy(
    library: ctypes.CDLL,
    primitive: c_void_p,
    stream: c_void_p,
    description: c_void_p,
    memories: list[c_void_p],
) -> None:
    """Free a primitive and the memory objects of its arguments."""
    library.dnnl_primitive_destroy(primitive)
    library.dnnl_stream_destroy(stream)
    library.dnnl_primitive_desc_destroy(description)
    for memory in memories:
        library.dnnl_memory_destroy(memory)


def address_of(array: np.ndarray) -> int:
    """Return where a contiguous or transposed array lies."""
    buffer: Any = array
    try:
        return addressof(c_char.from_buffer(buffer))  # three times as fast as the other
    except (TypeError, ValueError):  # transposed, empty or not to be written
        return array.ctypes.data


def _checked_address(values: np.ndarray, shape: tuple[int, ...]) -> int:
    """Return where a bias or scales of this shape lie."""
    assert (values.shape, values.dtype) == (shape, np.float32)
    return address_of(values)


def _vector(dtype: int, length: int) -> Layout:
    """Return the layout of a contiguous vector."""
    return dtype, (length,), (1,)


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


def _attributes(library: ctypes.CDLL, description: Description) -> c_void_p:
    """Return the attributes of an operation, which the caller frees."""
    attributes, following = c_void_p(), c_void_p()
    _call(library, "primitive_attr_create", byref(attributes))
    _call(library, "primitive_attr_set_scratchpad_mode", attributes, CALLERS)
    # Scales: a bit for each axis along which they differ.
    if description.scaled_columns is not None:
        axes = 1 << description.scaled_columns
        _call(library, "primitive_attr_set_scales_mask", attributes, WEIGHTS, axes)
    # The operations that follow, in their order.
    _call(library, "post_ops_create", byref(following))
    if description.add:
        one, zero_point = c_float(1), c_int32(0)
        _call(library, "post_ops_append_sum", following, one, zero_point, FLOAT32)
    for operation, layout in description.operations:
        operand = _described(library, *layout)
        _call(library, "post_ops_append_binary", following, operation, operand)
        _call(library, "memory_desc_destroy", operand)
    if (function := description.function) is not None:
        alpha = beta = c_float(0)
        _call(library, "post_ops_append_eltwise", following, function, alpha, beta)
    _call(library, "primitive_attr_set_post_ops", attributes, following)
    _call(library, "post_ops_destroy", following)
    return attributes


def _described(
    library: ctypes.CDLL, dtype: int, shape: tuple[int, ...], strides: tuple[int, ...]
) -> c_void_p:
    """Return oneDNN's description of a layout, which the caller frees."""
    description = c_void_p()
    axes = c_int64 * MAX_AXES
    _call(
        library,
        "memory_desc_create_with_strides",
        byref(description),
        len(shape),
        axes(*shape),
        dtype,
        axes(*strides),
    )
    return description


def _call(library: ctypes.CDLL, name: str, *arguments: object) -> None:
    """Call a function of the library. Raises: RuntimeError if it fails."""
    if status := getattr(library, f"dnnl_{name}")(*arguments):
        raise RuntimeError(f"oneDNN's dnnl_{name} failed with status {status}")


def _load(precision: str) -> ctypes.CDLL:
    """Load the library of an installed package, or that of the system."""
    # Where it may be: in the installed package, or where the system looks.
    paths = []
    with suppress(metadata.PackageNotFoundError):
        files = metadata.files(DISTRIBUTION) or []
        paths += [str(f.locate()) for f in files if f.name.startswith(f"lib{LIBRARY}.")]
    if system := find_library(LIBRARY):
        paths.append(system)
    # The first that loads and is new enough; else the last problem is named.
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
