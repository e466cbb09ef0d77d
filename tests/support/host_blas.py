"""The calls of cuBLAS and cuBLASLt that the package makes, on the host's memory.

Each checks what the libraries need and do not always say: a workspace that was set
after the stream, the stream that the work belongs to, and addresses at multiples of 16
bytes where the algorithm is one for these.
"""

import ctypes
from functools import partial

import numpy as np
import pytest

ml_dtypes = pytest.importorskip("ml_dtypes", reason="no bfloat16 without ml_dtypes")

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
TYPES = dict(zip((0, 2, 14), DTYPES.values(), strict=True))  # by cuBLAS's numbers
COMPUTE_TF32 = 77
# Attributes of a product of cuBLASLt; the bits of what its epilogue does.
TURNED, EPILOGUE, BIAS_POINTER = (3, 4), 7, 8
RELU, BIAS = 2, 4


class HostBlas:
    """cuBLAS: `partial` gives each function room for its `argtypes`."""

    def __init__(self, gpu):
        self.gpu, self.stream, self.has_workspace = gpu, None, False
        self.cublasCreate_v2 = lambda handle: 0
        self.cublasSetMathMode = partial(self._set_math_mode)
        self.cublasSetStream_v2 = partial(self._set_stream)
        self.cublasSetWorkspace_v2 = partial(self._set_workspace)
        self.cublasGemmEx = partial(self._gemm)

    def _set_math_mode(self, handle, mode):
        assert mode == 16, "sums of 16-bit outputs may be rounded to 16 bits"
        return 0

    def _set_stream(self, handle, stream):
        self.stream, self.has_workspace = stream, False  # as the manual says
        return 0

    def _set_workspace(self, handle, address, size):
        self.has_workspace = True
        return 0

    def _gemm(self, _, turn_a, turn_b, m, n, k, alpha, *rest):
        a, a_type, lda, b, b_type, ldb, beta, c, c_type, ldc, compute, _ = rest
        assert self.has_workspace, "a workspace must be set after each stream"
        assert self.stream == self.gpu.stream.ptr, "a product on another stream"
        task = partial(
            multiply,
            (a, a_type, lda, turn_a),
            (b, b_type, ldb, turn_b),
            (c, c_type, ldc),
            sizes=(m, n, k),
            tf32=compute == COMPUTE_TF32,
            term=c,
            beta=beta._obj.value,
        )
        self.gpu.launch(task, [])
        return 0


class HostBlasLt:
    """cuBLASLt, whose descriptions are dictionaries; their numbers are the pointers.

    `supports` tells for which sizes there is an algorithm, and `asked` who wanted one.
    """

    def __init__(self, gpu):
        self.gpu, self.objects, self.asked = gpu, [None], []
        self.supports = lambda m, n, k: True
        for kind in ("MatmulDesc", "MatmulPreference", "MatrixLayout"):
            setattr(self, f"cublasLt{kind}Create", partial(self._create))
            setattr(self, f"cublasLt{kind}SetAttribute", partial(self._set_attribute))
        self.cublasLtCreate = lambda handle: 0
        self.cublasLtMatmulAlgoGetHeuristic = partial(self._heuristic)
        self.cublasLtMatmul = partial(self._matmul)

    def _create(self, place, *arguments):
        place._obj.value = len(self.objects)
        self.objects.append({"created with": arguments})
        return 0

    def _set_attribute(self, target, attribute, buffer, size):
        number = int.from_bytes(bytes(buffer._obj), "little")
        self.objects[target.value][attribute] = number
        return 0

    def _created_with(self, *objects):
        return [self.objects[x.value]["created with"] for x in objects]

    def _heuristic(self, _, desc, a, b, c, d, limits, wanted, results, count):
        (_, *sides, _), (_, m, n, _) = self._created_with(a, d)
        k = sides[not self.objects[desc.value][TURNED[0]]]
        self.asked.append((m, n, k))
        count._obj.value = int(self.supports(m, n, k))
        return 0

    def _matmul(self, _, desc, alpha, a, la, b, lb, beta, c, lc, d, ld, choice, *rest):
        (_, _, stream), product = rest, self.objects[desc.value]
        epilogue, bias = product[EPILOGUE], product.get(BIAS_POINTER)
        assert not any(address % 16 for address in (a, b, c, d, bias or 0))
        assert stream == self.gpu.stream.ptr, "a product on another stream"
        left, right, (kind, m, n, step) = self._created_with(la, lb, ld)
        turned = [product[side] for side in TURNED]
        task = partial(
            multiply,
            (a, kind, left[3], turned[0]),
            (b, kind, right[3], turned[1]),
            (d, kind, step),
            sizes=(m, n, left[1] if turned[0] else left[2]),
            tf32=product["created with"][0] == COMPUTE_TF32,
            term=c,
            beta=beta._obj.value,
            bias=bias if epilogue & BIAS else None,
            relu=epilogue & RELU,
        )
        self.gpu.launch(task, [])
        return 0


def multiply(left, right, out, *, sizes, tf32, term, beta, bias=None, relu=False):
    """Compute out = left right + beta term + bias by columns, and rectify it.

    Each matrix is an address, cuBLAS's number of a type, the distance of two columns
    and, of a factor, whether it is transposed. The others are addresses.
    """
    m, n, k = sizes
    sides = []
    for (address, kind, step, turned), shape in (left, (m, k)), (right, (k, n)):
        x = matrix(address, kind, *(shape[::-1] if turned else shape), step)
        x = (x.T if turned else x).astype(np.float32)
        sides.append(to_tf32(x) if tf32 else x)
    result = sides[0] @ sides[1]
    address, kind, step = out
    if beta:  # with 0, NaN in the term must not spread
        result += np.float32(beta) * matrix(term, kind, m, n, step).astype(np.float32)
    if bias:
        result += matrix(bias, kind, m, 1, m).astype(np.float32)
    if relu:
        result = np.maximum(result, 0)
    matrix(address, kind, m, n, step)[...] = result


def to_tf32(x):
    """Round to 10 bits of mantissa, to nearest."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    return ((bits + 0x1000) & 0xFFFFE000).astype(np.uint32).view(np.float32)


def matrix(address, kind, rows, columns, step):
    """A matrix by columns, as cuBLAS has it. `kind` is cuBLAS's number of a type."""
    dtype = np.dtype(TYPES[kind])
    assert step >= rows
    size = ((columns - 1) * step + rows) * dtype.itemsize
    strides = (dtype.itemsize, step * dtype.itemsize)
    return np.ndarray((rows, columns), dtype, memory(address, size), strides=strides)


def memory(address, size):
    return (ctypes.c_char * size).from_address(address)
