"""oneDNN's products against float64, and what is said where it cannot multiply."""

import ctypes
import subprocess
import sys
import threading

import ml_dtypes
import numpy as np
import pytest

from minitransformer.backends.devices import open_device
from minitransformer.backends.onednn import bfloat16
from minitransformer.backends.onednn import library as onednn
from minitransformer.engine.backend import Backend, backend_of


@pytest.fixture(scope="module")
def library():
    try:
        return onednn.OneDnn()
    except RuntimeError as error:
        pytest.skip(str(error))


def wide(x):
    return x.view(ml_dtypes.bfloat16).astype(float)


def matrix(rng, rows, columns):
    """The bits of normal bfloat16 numbers."""
    x = rng.standard_normal((rows, columns)).astype(ml_dtypes.bfloat16)
    return x.view(np.uint16)


def assert_products(library, rng, n, k, m):
    shapes = (n, k), (k, m), (k, n), (m, k)
    a, b, c, d = (matrix(rng, *shape) for shape in shapes)
    for left, right in ((a, b), (a, d.T), (c.T, b), (c.T, d.T)):
        got, expected = library.product(left, right), wide(left) @ wide(right)
        assert got.dtype == np.float32
        assert np.abs(got - expected).max() <= 1e-5 * np.abs(expected).max()


def test_rounding_is_to_the_nearest_and_ties_to_even(library):
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.standard_normal(999), [1 + 2**-8, 1 + 3 * 2**-8, 0, -1e38]])
    x = x.astype(np.float32).reshape(-1, 17)
    parts = [x.reshape(-1)[:size] for size in (0, 1, 2, 3, 127, 128, 129)]
    for numbers in (x, x[:, ::2], *parts):
        out = np.empty(numbers.shape, np.uint16)
        library.round(numbers, out)
        assert (out == numbers.astype(ml_dtypes.bfloat16).view(np.uint16)).all()


@pytest.mark.parametrize(
    ("n", "k", "m"), [(1, 1, 1), (1, 7, 3), (5, 1, 4), (6, 9, 1), (33, 64, 70)]
)
def test_products_of_matrices_as_they_lie(library, n, k, m):
    assert_products(library, np.random.default_rng(n), n, k, m)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(
    ("n", "k", "m"), [(0, 4, 3), (1, 1, 1), (5, 1, 4), (6, 9, 1), (33, 64, 70)]
)
def test_products_of_integers_are_exact_but_for_their_scales(
    library, n, k, m, transposed, with_bias
):
    """Also where all are the largest, so that sums of few would not fit 16 bits."""
    rng = np.random.default_rng(n)
    a, b = (rng.integers(-127, 128, shape) for shape in ((n, k), (m, k)))
    a[:1], b[0] = 127, 127
    row_scales = rng.uniform(0.5, 2, (n, 1)).astype(np.float32)
    scales, bias = rng.uniform(0.5, 2, (2, m)).astype(np.float32)
    integers = b.astype(np.int8).T
    if not transposed:
        integers = np.ascontiguousarray(integers)
    matrix = onednn.ScaledMatrix(integers, scales)
    expected = row_scales * (a @ b.T * scales) + (bias if with_bias else 0)
    arrays = a.astype(np.int8), row_scales, matrix
    how = {"bias": bias if with_bias else None}
    out = np.empty((n, m), np.float32)
    for more in ({}, {"out": out}):
        got = library.scaled_product(*arrays, **how, **more)
        assert got.dtype == np.float32
        assert (got is out) == bool(more)
        assert got == pytest.approx(expected, rel=1e-5, abs=1e-4)
    how["function"] = onednn.RELU
    assert (library.scaled_product(*arrays, **how) == np.maximum(got, 0)).all()


def test_no_rows_have_no_products(library):
    low = np.ones((3, 4), np.uint16)
    assert library.product(low[:0], low.T).shape == (0, 3)


def test_threads_multiply_at_the_same_time(library):
    wrong = []

    def multiply(seed):
        rng = np.random.default_rng(seed)
        try:
            for n in range(1, 40):
                assert_products(library, rng, n, 20, 30)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=multiply, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("rows", [0, 16, 17, 40])
def test_sums_over_rows_are_added_in_parts(library, rows, monkeypatch):
    monkeypatch.setattr(onednn, "MAX_SUMMED", 16)
    rng = np.random.default_rng(0)
    a, b = matrix(rng, rows, 5), matrix(rng, rows, 3)
    expected = wide(a).T @ wide(b)
    assert np.abs(library.product(a.T, b) - expected).max() <= 1e-5 * max(rows, 1)


def test_a_thread_may_still_multiply_while_python_ends(library):
    script = """
import threading, time
import numpy as np
from minitransformer.backends.onednn.library import OneDnn

library, a = OneDnn(), np.zeros((256, 256), np.uint16)

def work():
    while True:
        for rows in range(1, 200):
            library.product(a[:rows], a)

for _ in range(4):
    threading.Thread(target=work, daemon=True).start()
time.sleep(0.3)
"""
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0


class Library:
    """What the loader asks of a library, with a version and with instructions."""

    def __init__(self, version, isa):
        def dnnl_version():
            return version

        self.dnnl_version = dnnl_version
        self.dnnl_get_effective_cpu_isa = lambda: isa


@pytest.mark.parametrize(
    ("precision", "found", "message"),
    [
        ("bf16", {}, "pip install 'minitransformer[onednn]' (found none)"),
        ("bf16", {"libdnnl.so.2": ((2, 7), 0xE7)}, "3.2 or a later 3.x, got 2.7)"),
        ("bf16", {"libdnnl.so.3": ((3, 1), 0xE7)}, "3.2 or a later 3.x, got 3.1)"),
        ("bf16", {"libdnnl.so.3": None}, "(no such file)"),
        ("bf16", {"libdnnl.so.3": ((3, 2), 0x67)}, "AMX or AVX-512 BF16, got one"),
    ],
)
def test_what_is_missing_is_said_in_a_line(monkeypatch, precision, found, message):
    def files(name):
        raise onednn.metadata.PackageNotFoundError

    def load(path):
        if found.get(path) is None:  # or the C library
            raise OSError("no such file")
        return Library(*found[path])

    monkeypatch.setattr(onednn.metadata, "files", files)
    monkeypatch.setattr(onednn, "find_library", lambda _: next(iter(found), None))
    monkeypatch.setattr(ctypes, "CDLL", load)
    uncached = bfloat16.open_kernels.__wrapped__
    monkeypatch.setattr(bfloat16, "open_kernels", uncached)
    with pytest.raises(RuntimeError, match=f"--precision {precision}") as error:
        open_device("cpu", precision)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert backend_of(np.ones(1)) == Backend()
