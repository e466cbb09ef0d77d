"""Products that do more than multiply, by cuBLASLt.

An epilogue is what cuBLASLt does to a product before it is stored: it adds a bias, and
rectifies. A product may also be added to another matrix. The output is then written
once, where a separate kernel would read it again and write it again. The bias must be
of the output's type, so that one of 16 bits is rounded, as the output is. Where
cuBLASLt has no algorithm for some arrays, cuBLAS and kernels serve.

Shapes: x [N, D], weight [D, F], bias [F], out [N, F]
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any, NamedTuple

from minitransformer.backends.cuda import device
from minitransformer.backends.cuda.device import address, check, order_of
from minitransformer.engine.backend import Array

# cuBLASLt's numbers of epilogues.
NO_EPILOGUE, ADD_BIAS, ADD_BIAS_AND_RECTIFY = 1, 4, 6
# Its numbers of a product's attributes, and of preferences.
TRANSPOSED, EPILOGUE, BIAS_POINTER = (3, 4), 7, 8
MAX_WORKSPACE, REDUCTION_SCHEMES, MIN_ALIGNMENTS = 1, 3, (5, 6, 7, 8)
# A product that is divided along D adds its parts in float32.
REDUCTION_IN_FLOAT32 = 2
FLOAT32 = 0

# All arrays begin at multiples of so many bytes; epilogues read a bias in vectors.
ALIGNMENT = 16


class Choice(ctypes.Structure):
    """An algorithm, as cuBLASLt's heuristic returns it."""

    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


class Plan(NamedTuple):
    """The description of a kind of product, its three layouts, and the algorithm."""

    product: ctypes.c_void_p
    layouts: list[ctypes.c_void_p]
    choice: Choice


def current() -> CublasLt:
    """Return the handle of the GPU that CuPy has selected."""
    gpu = device.current()
    if gpu.cublas_lt is None:
        gpu.cublas_lt = CublasLt(gpu)
    handle: CublasLt = gpu.cublas_lt
    return handle


class CublasLt:
    """A handle of cuBLASLt, and the algorithm that it chose for each kind of product.

    Raises: OSError if there is no cuBLASLt, RuntimeError if it cannot be initialised.
    """

    def __init__(self, gpu: device.Device) -> None:
        self.gpu = gpu
        self.plans: dict[tuple[Any, ...], Plan | None] = {}
        self._library = library = device.load_library(gpu.xp, "cublasLt")
        number: Any = ctypes.c_int
        pointer: Any = ctypes.c_void_p
        size: Any = ctypes.c_size_t
        long: Any = ctypes.c_int64
        attribute = [pointer, number, pointer, size]
        signatures = {
            "MatmulDescCreate": [pointer, number, number],
            "MatmulDescSetAttribute": attribute,
            "MatmulPreferenceSetAttribute": attribute,
            "MatrixLayoutCreate": [pointer, number, long, long, long],
            "MatmulAlgoGetHeuristic": [*[pointer] * 7, number, pointer, pointer],
            "Matmul": [*[pointer] * 14, size, pointer],
        }
        for name, types in signatures.items():
            getattr(library, f"cublasLt{name}").argtypes = types
        self._handle = ctypes.c_void_p()
        status = library.cublasLtCreate(ctypes.byref(self._handle))
        check(status, "creating a handle of cuBLASLt")

    def multiply(
        self,
        x: Array,
        weight: Array,
        out: Array,
        *,
        bias: Array | None = None,
        relu: bool = False,
        term: Array | None = None,
    ) -> bool:
        """Compute out = x weight and more in one go; return False if that cannot be.

        A bias is added to each row, and with `relu` max(0, that) taken. Without a bias,
        `term` may be added.

        Shapes: term [N, F]
        """
        epilogue = NO_EPILOGUE
        if bias is not None:
            bias = bias.astype(out.dtype, copy=False)
            epilogue = ADD_BIAS_AND_RECTIFY if relu else ADD_BIAS
        arrays = [a for a in (weight, x, out, bias, term) if a is not None]
        if any(address(array) % ALIGNMENT for array in arrays):
            return False

        # Products of one kind, by type, layout and size, share a plan.
        orders = order_of(weight), order_of(x)
        compute = self.gpu.compute_type
        key = out.dtype.name, compute, epilogue, orders, weight.shape, len(x)
        if key not in self.plans:
            self.plans[key] = self._plan(weight, x, out, epilogue)
        plan = self.plans[key]
        if plan is None:
            return False

        # Only addresses change from one product to the next of its kind.
        if bias is not None:
            self._set(plan.product, BIAS_POINTER, ctypes.c_void_p(address(bias)))
        a, b, c = plan.layouts
        status = self._library.cublasLtMatmul(
            *(self._handle, plan.product, ctypes.byref(ctypes.c_float(1))),
            *(address(weight), a, address(x), b),
            ctypes.byref(ctypes.c_float(0 if term is None else 1)),
            *(address(out if term is None else term), c, address(out), c),
            ctypes.byref(plan.choice),
            *(address(self.gpu.workspace), device.WORKSPACE_BYTES),
            self.gpu.xp.cuda.get_current_stream().ptr,
        )
        return not status

    def _plan(self, weight: Array, x: Array, out: Array, epilogue: int) -> Plan | None:
        """Describe a product, and ask for an algorithm; return None if there is none.

        The descriptions are kept as long as the process, one for each kind of product.
        """
        # cuBLASLt stores matrices by columns, so it is asked for out^T = weight^T x^T.
        product = self._create("MatmulDesc", self.gpu.compute_type, FLOAT32)
        a, b, c = layouts = [self._layout(matrix) for matrix in (weight, x, out)]
        for attribute, matrix in zip(TRANSPOSED, (weight, x), strict=True):
            self._set(product, attribute, ctypes.c_int32(order_of(matrix)[0]))

        # The heuristic takes from an address only its alignment.
        self._set(product, EPILOGUE, ctypes.c_uint32(epilogue))
        if epilogue != NO_EPILOGUE:
            self._set(product, BIAS_POINTER, ctypes.c_void_p(ALIGNMENT))

        # Of the algorithms that need no more than these, take the one that comes first.
        limits = self._create("MatmulPreference")
        prefer = functools.partial(self._set, limits, kind="MatmulPreference")
        prefer(MAX_WORKSPACE, ctypes.c_uint64(device.WORKSPACE_BYTES))
        prefer(REDUCTION_SCHEMES, ctypes.c_uint32(REDUCTION_IN_FLOAT32))
        for attribute in MIN_ALIGNMENTS:
            prefer(attribute, ctypes.c_uint32(ALIGNMENT))
        choice, count = Choice(), ctypes.c_int()
        status = self._library.cublasLtMatmulAlgoGetHeuristic(
            *(self._handle, product, a, b, c, c, limits),
            *(1, ctypes.byref(choice), ctypes.byref(count)),
        )
        usable = not status and count.value and not choice.state
        return Plan(product, layouts, choice) if usable else None

    def _layout(self, matrix: Array) -> ctypes.c_void_p:
        """Describe how a matrix lies in memory, as cuBLASLt sees it: by columns."""
        transposed, leading_dim = order_of(matrix)
        rows, columns = matrix.shape if transposed else matrix.shape[::-1]
        kind = device.CUBLAS_TYPES[matrix.dtype.name]
        return self._create("MatrixLayout", kind, rows, columns, leading_dim)

    def _create(self, kind: str, *arguments: int) -> ctypes.c_void_p:
        created = ctypes.c_void_p()
        create = getattr(self._library, f"cublasLt{kind}Create")
        check(create(ctypes.byref(created), *arguments), f"creating a {kind}")
        return created

    def _set(
        self,
        target: ctypes.c_void_p,
        attribute: int,
        value: Any,
        kind: str = "MatmulDesc",
    ) -> None:
        set_attribute = getattr(self._library, f"cublasLt{kind}SetAttribute")
        size = ctypes.sizeof(value)
        status = set_attribute(target, attribute, ctypes.byref(value), size)
        check(status, f"attribute {attribute} of a {kind}")
