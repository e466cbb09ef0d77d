"""oneDNN's products against float64, and what is said where it cannot multiply."""

import ctypes
import gc
import threading

import ml_dtypes
import numpy as np
import pytest

from minitransformer.bfloat16 import onednn
from minitransformer.devices import open_device
from minitransformer.engine.backend import _KERNELS


@pytest.fixture(scope="module")
def library():
    try:
        return onednn.OneDnn()
    except RuntimeError as error:
        pytest.skip(str(error))


def wide(low):
    return low.view(ml_dtypes.bfloat16).astype(np.float64)


def matrix(rng, rows, columns):
    x = rng.standard_normal((rows, columns)).astype(ml_dtypes.bfloat16)
    return x.view(np.uint16)


def assert_products(library, rng, n, k, m):
    a, b, c, d = (matrix(rng, *x) for x in ((n, k), (k, m), (k, n), (m, k)))
    for left, right in ((a, b), (a, d.T), (c.T, b), (c.T, d.T)):
        got, expected = library.product(left, right), wide(left) @ wide(right)
        assert got.dtype == np.float32
        assert np.abs(got - expected).max() <= 1e-5 * np.abs(expected).max()


def test_rounding_is_to_the_nearest_and_ties_to_even(library):
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.standard_normal(999), [1 + 2**-8, 1 + 3 * 2**-8, 0, -1e38]])
    x = x.astype(np.float32).reshape(-1, 17)
    expected = x.astype(ml_dtypes.bfloat16).view(np.uint16)
    assert (library.rounded(x) == expected).all()
    assert (library.rounded(x[:, ::2]) == expected[:, ::2]).all()


@pytest.mark.parametrize(
    ("n", "k", "m"), [(1, 1, 1), (1, 7, 3), (5, 1, 4), (6, 9, 1), (33, 64, 70)]
)
def test_products_of_matrices_as_they_lie(library, n, k, m):
    assert_products(library, np.random.default_rng(n), n, k, m)


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


def test_few_primitives_are_kept(library, monkeypatch):
    monkeypatch.setattr(onednn, "MAX_PRIMITIVES", 3)
    fresh = onednn.OneDnn()
    rng = np.random.default_rng(0)
    for n in range(1, 8):
        assert_products(fresh, rng, n, 4, 5)
        assert 1 <= len(fresh._thread.primitives) <= 3


def test_primitives_go_with_their_thread(library, monkeypatch):
    destroyed = []
    monkeypatch.setattr(onednn, "_destroy", lambda _, kept: destroyed.append(len(kept)))
    rng = np.random.default_rng(0)
    work = threading.Thread(target=assert_products, args=(library, rng, 3, 4, 5))
    work.start()
    work.join()
    gc.collect()
    assert destroyed == [4]


def test_what_is_refused_is_an_error(library):
    low = np.zeros((3, 4), np.uint16)
    with pytest.raises(RuntimeError, match="dnnl_matmul_primitive_desc_create failed"):
        library.product(low, low)


class Library:
    """What the loader asks of a library, with a version and with instructions."""

    def __init__(self, version, isa):
        def dnnl_version():
            return [version]

        self.dnnl_version = dnnl_version
        self.dnnl_get_effective_cpu_isa = lambda: isa


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({}, "pip install 'minitransformer[bf16]' (found none)"),
        ({"libdnnl.so.2": (2, 0xE7)}, "(expected its version 3, got 2)"),
        ({"libdnnl.so.3": None}, "(no such file)"),
        ({"libdnnl.so.3": (3, 0x67)}, "AMX or AVX-512 BF16"),
    ],
)
def test_what_is_missing_is_said_in_a_line(monkeypatch, found, message):
    def files(name):
        raise onednn.metadata.PackageNotFoundError

    def load(path):
        if found[path] is None:
            raise OSError("no such file")
        return Library(*found[path])

    monkeypatch.setattr(onednn.metadata, "files", files)
    monkeypatch.setattr(onednn, "find_library", lambda _: next(iter(found), None))
    monkeypatch.setattr(ctypes, "CDLL", load)
    with pytest.raises(RuntimeError, match="--precision bf16") as error:
        open_device("cpu", "bf16")
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert np.ndarray not in _KERNELS
