"""Linear layers by cuBLASLt, and what serves where it is missing, wrong or unable."""

import warnings

import numpy as np
import pytest

from minitransformer.backends.cuda import blaslt, device
from minitransformer.engine.backend import to_host
from support.closeness import assert_close
from support.host_blas import HostBlas, HostBlasLt, finish

ml_dtypes = pytest.importorskip("ml_dtypes", reason="no bfloat16 without ml_dtypes")

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
# N, D, F, and by how many elements the weight is shifted in its buffer: by whole
# vectors, or in the first shape not.
SHAPES = [(3, 5, 7, 1), (1, 1, 1, 0), (37, 40, 19, 8), (130, 264, 131, 0)]


def run(gpu, shape, dtype, relu=True, transposed=False):
    """Compute a layer; return what was found and what float64 says."""
    n, d, f, shift = shape
    rng = np.random.default_rng(n)
    x, flat = (rng.standard_normal(s).astype(dtype) for s in ((n, d), shift + d * f))
    bias = rng.standard_normal(f).astype(np.float32)

    def matrix(buffer):
        part = buffer[shift:]
        return part.reshape(f, d).T if transposed else part.reshape(d, f)

    out = gpu.xp.empty((n, f), dtype)
    arrays = gpu.xp.asarray(x), matrix(gpu.xp.asarray(flat)), gpu.xp.asarray(bias)
    blaslt.forward(*arrays, relu, out)
    expected = x.astype(float) @ matrix(flat).astype(float) + bias
    return to_host(out).astype(float), np.maximum(expected, 0) if relu else expected


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_linear_layers_follow_float64(gpu, shape, dtype, relu):
    for transposed in (False, True):
        found, expected = run(gpu, shape, DTYPES[dtype], relu, transposed)
        assert_close(found, expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_kind_of_product_is_chosen_once_and_needs_no_kernel(
    host_gpu, monkeypatch, dtype
):
    run(host_gpu, SHAPES[1], DTYPES[dtype])
    asked = host_gpu.cublas_lt._library.asked
    monkeypatch.setattr(blaslt, "by_kernels", None)
    before = [*asked]
    for _ in range(2):
        for shape in SHAPES[1:]:
            assert_close(*run(host_gpu, shape, DTYPES[dtype]), dtype)
    assert asked == [*before, (19, 37, 40), (131, 130, 264)]


def test_arrays_at_odd_addresses_or_with_gaps_are_left_to_the_kernel(
    host_gpu, monkeypatch
):
    run(host_gpu, SHAPES[1], np.float16)
    library = host_gpu.cublas_lt._library
    monkeypatch.setattr(library, "cublasLtMatmul", None)
    assert_close(*run(host_gpu, SHAPES[0], np.float16), "float16")
    assert_close(*run(host_gpu, SHAPES[2], np.float16, transposed=True), "float16")


def without_relu(result, bias, relu):
    return result + bias


def along_rows(result, bias, relu):
    return finish(result, np.resize(bias, (1, result.shape[1])), relu)


def libraries(fault):
    """A cuBLASLt with a fault."""

    def load(state):
        library = HostBlasLt(state)
        if fault == "no algorithm":
            library.supports = lambda m, n, k: False
        elif fault == "not initialised":
            library.cublasLtCreate = lambda handle: 1
        else:
            library.finish = fault
        return library

    return {"libcublas.so.13": HostBlas} | (
        {} if fault == "missing" else {"libcublasLt.so.13": load}
    )


@pytest.mark.parametrize(
    ("fault", "problem"),
    [
        (without_relu, "it gives other results"),
        (along_rows, "it gives other results"),
        ("missing", "libcublasLt.so.13: cannot open"),
        ("not initialised", "status 1 for creating a handle"),
        ("no algorithm", "it has no algorithm"),
    ],
)
def test_a_library_that_is_wrong_is_not_used(stand_in, fault, problem):
    stand_in.files = libraries(fault)
    gpu = device.current()
    with pytest.warns(UserWarning, match=f"without cuBLASLt in float16: .*{problem}"):
        assert_close(*run(gpu, SHAPES[2], np.float16), "float16")
    assert gpu.verdicts == {"cuBLASLt in float16": False}
    assert_close(*run(gpu, SHAPES[2], np.float16), "float16")  # without a warning


@pytest.mark.parametrize("fault", ["supports", "cublasLtMatmul"])
def test_a_product_that_cublaslt_refuses_is_left_to_the_kernel(host_gpu, fault):
    run(host_gpu, SHAPES[1], np.float16)
    library = host_gpu.cublas_lt._library
    refusal = {"supports": lambda m, n, k: False, "cublasLtMatmul": lambda *a: 15}
    setattr(library, fault, refusal[fault])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            assert_close(*run(host_gpu, SHAPES[2], np.float16), "float16")
    assert library.asked.count((19, 37, 40)) == 1


def test_tf32_is_compared_for_itself(host_gpu):
    run(host_gpu, SHAPES[1], np.float32)
    host_gpu.tf32 = True
    found, expected = run(host_gpu, SHAPES[3], np.float32)
    assert 1e-4 < np.abs(found - expected).max() < 0.05  # inputs of 10 bits
    assert host_gpu.verdicts == {"cuBLASLt in float32": True, "cuBLASLt in tf32": True}
