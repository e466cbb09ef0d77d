"""A `Device` without a GPU: kernels built for the host, cuBLAS's calls by NumPy."""

import ctypes
import re
import subprocess
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ml_dtypes
import numpy as np

from minitransformer.cuda import device

SHIMS = Path(__file__).parent / "host_cuda"
TYPES = {0: np.float32, 2: np.float16, 14: ml_dtypes.bfloat16}
WRONG = {1: "number of arguments", 2: "size of an argument", 3: "barrier not reached"}


def build(compiler: str, folder: Path) -> dict[str, ctypes.CDLL]:
    """Compile kernels.cu once for each type of activations."""
    source = device.SOURCE.read_text(encoding="utf-8")
    names = re.findall(r"__global__ void (\w+)\(", source)
    exports = "".join(f"EXPORT({name})\n" for name in names)
    (folder / "host.cpp").write_text(f'#include "{device.SOURCE}"\n{exports}')

    def compile_for(item: tuple[str, str]) -> tuple[str, ctypes.CDLL]:
        name, real = item
        library = folder / f"{name}.so"
        flags = f"-O1 -std=c++17 -shared -fPIC -fno-strict-aliasing -w -DREAL={real}"
        command = [compiler, *flags.split(), f"-I{SHIMS}", "-o", str(library)]
        subprocess.run([*command, str(folder / "host.cpp")], check=True)
        return name, ctypes.CDLL(str(library))

    with ThreadPoolExecutor() as pool:
        return dict(pool.map(compile_for, device.C_TYPES.items()))


class HostDevice(device.Device):
    """Runs launches on NumPy arrays; `backwards` has a block's last thread begin."""

    def __init__(self, libraries: dict[str, ctypes.CDLL], xp: types.ModuleType) -> None:
        self._libraries = libraries
        self.backwards = False
        self.launched: set[str] = set()
        super().__init__(xp)

    def _load_blas(self):
        return HostBlas()

    def _use_current_stream(self):
        pass

    def _function(self, name, dtype):
        kernel = self._libraries[dtype][f"launch_{name}"]

        def run(grid, block, arguments):
            self.launched.add(name)
            values = [
                np.array(a.ctypes.data, np.uint64)
                if isinstance(a, np.ndarray)
                else np.array(a)
                for a in arguments
            ]
            count = len(values)
            status = kernel(
                (ctypes.c_uint * 3)(*grid, *[1] * (3 - len(grid))),
                (ctypes.c_uint * 3)(*block, *[1] * (3 - len(block))),
                (ctypes.c_void_p * count)(*(value.ctypes.data for value in values)),
                (ctypes.c_int * count)(*(value.itemsize for value in values)),
                count,
                self.backwards,
            )
            assert status == 0, f"{name}: {WRONG[status]}"

        return run


class HostBlas:
    """The two products of cuBLAS that are called, on addresses of host memory."""

    def cublasGemmEx(self, _, turn_a, turn_b, m, n, k, alpha, *rest):  # noqa: N802
        a, a_type, lda, b, b_type, ldb, beta, c, c_type, ldc, _, _ = rest
        left = _matrix(a, a_type, *((k, m) if turn_a else (m, k)), lda)
        right = _matrix(b, b_type, *((n, k) if turn_b else (k, n)), ldb)
        out = _matrix(c, c_type, m, n, ldc)
        left, right = (x.astype(np.float32) for x in (left, right))
        product = (left.T if turn_a else left) @ (right.T if turn_b else right)
        result = alpha._obj.value * product
        if beta._obj.value:
            result += beta._obj.value * out.astype(np.float32)
        out[...] = result
        return 0

    def cublasGemmBatchedEx(self, *arguments):  # noqa: N802
        *head, count, compute, algorithm = arguments
        assert all(head[i] % 16 == 0 for i in (7, 10, 14)), "cuBLAS refuses these"
        a, b, c = (_matrix(head[i], None, count, 1, count)[:, 0] for i in (7, 10, 14))
        addresses = np.concatenate([a, b, c])
        assert not (addresses % 16).any(), "cuBLAS may read vectors of 16 bytes there"
        for i in range(count):
            head[7], head[10], head[14] = int(a[i]), int(b[i]), int(c[i])
            self.cublasGemmEx(*head, compute, algorithm)
        return 0


def _matrix(address, kind, rows, columns, step):
    """A matrix by columns, as cuBLAS has it. `kind` is cuBLAS's number of a type."""
    dtype = np.dtype(np.uint64 if kind is None else TYPES[kind])
    assert step >= rows
    size = ((columns - 1) * step + rows) * dtype.itemsize
    buffer = (ctypes.c_char * size).from_address(address)
    strides = (dtype.itemsize, step * dtype.itemsize)
    return np.ndarray((rows, columns), dtype, buffer, strides=strides)
