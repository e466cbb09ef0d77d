"""The calls of cuBLAS that the package makes, on addresses of the host's memory.

Each checks what cuBLAS needs and does not always say: a workspace that was set after
the stream, the stream that the work belongs to, and addresses at multiples of 16 bytes.
"""

import ctypes

import ml_dtypes
import numpy as np

TYPES = {0: np.float32, 2: np.float16, 14: ml_dtypes.bfloat16}
ADDRESSES = None
COMPUTE_TF32 = 77


class Call:
    """A function of a C library: it has `argtypes`, and takes so many arguments."""

    def __init__(self, function):
        self.function, self.argtypes = function, None

    def __call__(self, *arguments):
        if self.argtypes is not None:
            assert len(arguments) == len(self.argtypes)
            for argument, kind in zip(arguments, self.argtypes, strict=True):
                if kind is not ctypes.c_void_p:
                    kind(argument)  # raises what ctypes would
        return self.function(*arguments)


class HostBlas:
    def __init__(self, gpu):
        self.gpu, self.stream, self.has_workspace = gpu, None, False
        self.products = []  # m, n, k, beta of each, for tests that count
        self.cublasCreate_v2 = Call(lambda handle: 0)
        self.cublasSetStream_v2 = Call(self._set_stream)
        self.cublasSetWorkspace_v2 = Call(self._set_workspace)
        self.cublasGemmEx = Call(self._gemm)
        self.cublasGemmBatchedEx = Call(self._batched)

    def _set_stream(self, handle, stream):
        self.stream, self.has_workspace = stream, False  # as the manual says
        return 0

    def _set_workspace(self, handle, address, size):
        assert address % 256 == 0
        self.has_workspace = True
        return 0

    def _queue(self, task):
        assert self.has_workspace, "a workspace must be set after each stream"
        assert self.stream == self.gpu.stream.ptr, "a product on another stream"
        self.gpu.launch(task, [])

    def _gemm(self, _, turn_a, turn_b, m, n, k, alpha, *rest):
        a, a_type, lda, b, b_type, ldb, beta, c, c_type, ldc, compute, _ = rest
        factors = alpha._obj.value, beta._obj.value
        self.products.append((m, n, k, factors[1]))
        sides = (a, a_type, lda, turn_a), (b, b_type, ldb, turn_b)
        rounds = compute == COMPUTE_TF32
        task = product(*sides, (c, c_type, ldc), (m, n, k), factors, rounds)
        self._queue(task)
        return 0

    def _batched(self, _, turn_a, turn_b, m, n, k, alpha, *rest):
        a, a_type, lda, b, b_type, ldb, beta, c, c_type, ldc, count, compute, _ = rest
        factors, rounds = (alpha._obj.value, beta._obj.value), compute == COMPUTE_TF32
        assert not any(x % 16 for x in (a, b, c)), "cuBLAS refuses these"

        def task():
            rows = [matrix(x, ADDRESSES, count, 1, count)[:, 0] for x in (a, b, c)]
            assert not (np.concatenate(rows) % 16).any(), "read in vectors of 16 bytes"
            for x, y, z in zip(*(row.tolist() for row in rows), strict=True):
                sides = (x, a_type, lda, turn_a), (y, b_type, ldb, turn_b)
                product(*sides, (z, c_type, ldc), (m, n, k), factors, rounds)()

        self._queue(task)
        return 0


def product(left, right, out, sizes, factors, tf32):
    """Return a task that computes out = alpha left right + beta out, by columns."""
    (m, n, k), (alpha, beta) = sizes, factors

    def task():
        sides = []
        for (address, kind, step, turned), shape in (left, (m, k)), (right, (k, n)):
            x = matrix(address, kind, *(shape[::-1] if turned else shape), step)
            x = (x.T if turned else x).astype(np.float32)
            sides.append(to_tf32(x) if tf32 else x)
        address, kind, step = out
        target = matrix(address, kind, m, n, step)
        result = np.float32(alpha) * (sides[0] @ sides[1])
        if beta:  # with 0, NaN in `out` must not spread
            result += np.float32(beta) * target.astype(np.float32)
        target[...] = result

    return task


def to_tf32(x):
    """Round to 10 bits of mantissa, to nearest."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    return ((bits + 0x1000) & 0xFFFFE000).astype(np.uint32).view(np.float32)


def matrix(address, kind, rows, columns, step):
    """A matrix by columns, as cuBLAS has it. `kind` is cuBLAS's number of a type."""
    dtype = np.dtype(np.uint64 if kind is ADDRESSES else TYPES[kind])
    assert step >= rows
    size = ((columns - 1) * step + rows) * dtype.itemsize
    buffer = (ctypes.c_char * size).from_address(address)
    strides = (dtype.itemsize, step * dtype.itemsize)
    return np.ndarray((rows, columns), dtype, buffer, strides=strides)
