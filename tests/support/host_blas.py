"""The calls of cuBLAS and cuBLASLt that the package makes, on the host's memory.

Each checks what the libraries need and do not always say: a workspace that was set
after the stream, the stream that the work belongs to, addresses at multiples of 16
bytes or at those that a heuristic was told of, and matrices that fit together.
"""

import ctypes

import ml_dtypes
import numpy as np

TYPES = {0: np.float32, 2: np.float16, 14: ml_dtypes.bfloat16}
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
        self.has_math_mode = False
        self.cublasCreate_v2 = Call(lambda handle: 0)
        self.cublasSetMathMode = Call(self._set_math_mode)
        self.cublasSetStream_v2 = Call(self._set_stream)
        self.cublasSetWorkspace_v2 = Call(self._set_workspace)
        self.cublasGemmEx = Call(self._gemm)

    def _set_math_mode(self, handle, mode):
        assert mode == 16, "sums of 16-bit outputs may be rounded to 16 bits"
        self.has_math_mode = True
        return 0

    def _set_stream(self, handle, stream):
        self.stream, self.has_workspace = stream, False  # as the manual says
        return 0

    def _set_workspace(self, handle, address, size):
        assert address % 256 == 0
        self.has_workspace = True
        return 0

    def _queue(self, task):
        assert self.has_workspace, "a workspace must be set after each stream"
        assert self.has_math_mode, "sums of 16-bit outputs may be rounded to 16 bits"
        assert self.stream == self.gpu.stream.ptr, "a product on another stream"
        self.gpu.launch(task, [])

    def _gemm(self, _, turn_a, turn_b, m, n, k, alpha, *rest):
        a, a_type, lda, b, b_type, ldb, beta, c, c_type, ldc, compute, _ = rest
        factors = alpha._obj.value, beta._obj.value
        sides = (a, a_type, lda, turn_a), (b, b_type, ldb, turn_b)
        rounds = compute == COMPUTE_TF32
        task = product_of(*sides, (c, c_type, ldc), (m, n, k), factors, rounds)
        self._queue(task)
        return 0


INVALID_VALUE, NOT_SUPPORTED = 7, 15
# Attributes of a product, and preferences: their sizes, and their defaults.
PRODUCT = {3: (4, 0), 4: (4, 0), 7: (4, 1), 8: (8, 0)}
LIMITS = {1: (8, 0), 3: (4, 7), 5: (4, 256), 6: (4, 256), 7: (4, 256), 8: (4, 256)}
# What epilogues do, by the bits of their numbers.
RELU, BIAS = 2, 4
EPILOGUES = (1, BIAS, RELU | BIAS)


class HostBlasLt:
    """cuBLASLt, as its header and its manual describe it.

    As in version 13.1, an attribute that is unknown or of another size is refused.
    """

    def __init__(self, gpu):
        self.gpu, self.objects, self.asked = gpu, [None], []
        self.supports = lambda m, n, k: True
        create, attribute = self._create, self._set_attribute
        sizes = {"MatmulDesc": PRODUCT, "MatmulPreference": LIMITS}
        for name, known in sizes.items():
            defaults = {key: default for key, (_, default) in known.items()}
            setattr(self, f"cublasLt{name}Create", Call(create(defaults)))
            setattr(self, f"cublasLt{name}SetAttribute", Call(attribute(known)))
        self.cublasLtMatrixLayoutCreate = Call(create({}))
        self.cublasLtCreate = Call(lambda handle: 0)
        self.cublasLtMatmulAlgoGetHeuristic = Call(self._heuristic)
        self.cublasLtMatmul = Call(self._matmul)

    def _create(self, defaults):
        def create(place, *arguments):
            place._obj.value = len(self.objects)
            self.objects.append({**defaults, "created with": arguments})
            return 0

        return create

    def _set_attribute(self, known):
        def set_attribute(target, attribute, buffer, size):
            if attribute not in known or known[attribute][0] != size:
                return INVALID_VALUE
            number = int.from_bytes(bytes(buffer._obj), "little")
            self.objects[target.value][attribute] = number
            return 0

        return set_attribute

    def _heuristic(self, _, desc, a, b, c, d, limits, wanted, results, count):
        product, limits = self.objects[desc.value], self.objects[limits.value]
        layouts = [self.objects[x.value]["created with"] for x in (a, b, c, d)]
        kinds = {layout[0] for layout in layouts}
        compute, scale = product["created with"]
        assert (len(kinds), scale, wanted) == (1, 0, 1), "other types than those used"
        assert compute == 68 or (compute == COMPUTE_TF32 and kinds == {0})
        assert product[7] in EPILOGUES
        needs_bias = product[7] & BIAS
        assert bool(product[8]) == bool(needs_bias), "read for the alignment"
        assert limits[3] == 2, "sums of parts in 16 bits"
        left, right = (
            layout[1:3] if not product[turn] else layout[2:0:-1]
            for layout, turn in zip(layouts[:2], (3, 4), strict=True)
        )
        assert left[1] == right[0]
        assert layouts[2] == layouts[3]
        assert layouts[3][1:3] == (left[0], right[1])
        assert all(step >= rows for _, rows, _, step in layouts)
        self.asked.append((*layouts[3][1:3], left[1]))
        if not self.supports(*self.asked[-1]):
            count._obj.value = 0
            return NOT_SUPPORTED
        aligned = [limits[side] for side in (5, 6, 7, 8)]
        extra = product[8]
        results._obj.algorithm[:] = [
            desc.value,
            *aligned,
            extra & -extra,
            product[7],
            0,
        ]
        results._obj.workspace, results._obj.state = limits[1], 0
        count._obj.value = 1
        return 0

    def _matmul(self, _, desc, alpha, a, la, b, lb, beta, c, lc, d, ld, choice, *rest):
        (workspace, size, stream), product = rest, self.objects[desc.value]
        chosen_for, *aligned, extra, epilogue, _ = choice._obj.algorithm
        assert (chosen_for, epilogue) == (desc.value, product[7])
        for address, multiple in zip((a, b, c, d), aligned, strict=True):
            assert address % multiple == 0, "an algorithm for other alignments"
        if epilogue != 1:
            assert extra % 16 == 0, "epilogues read the bias in vectors"
            assert product[8] % extra == 0
        assert workspace % 256 == 0
        assert size >= choice._obj.workspace
        assert stream == self.gpu.stream.ptr, "a product on another stream"
        assert alpha._obj.value == 1
        assert beta._obj.value in ((0, 1) if epilogue == 1 else (0,))
        assert beta._obj.value or c == d
        assert lc.value == ld.value
        layouts = [self.objects[x.value]["created with"] for x in (la, lb, ld)]
        sides = [
            (address, kind, step, product[turn])
            for address, turn, (kind, _, _, step) in zip(
                (a, b), (3, 4), layouts[:2], strict=True
            )
        ]
        kind, m, n, step = layouts[2]
        k = layouts[0][1 if product[3] else 2]
        tf32 = product["created with"][0] == COMPUTE_TF32
        bias = product[8]
        added = beta._obj.value

        def finished(result):
            if added:
                result = result + matrix(c, kind, m, n, step).astype(np.float32)
            if epilogue & BIAS:
                values = matrix(bias, kind, m, 1, m).astype(np.float32)
                result = result + values
            if epilogue & RELU:
                result = np.maximum(result, 0)
            return result

        out, sizes = (d, kind, step), (m, n, k)
        self.gpu.launch(product_of(*sides, out, sizes, (1, 0), tf32, finished), [])
        return 0


def product_of(left, right, out, sizes, factors, tf32, finish=None):
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
        target[...] = finish(result) if finish else result

    return task


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
