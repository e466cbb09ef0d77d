"""Products by cuBLASLt, and what serves where it has no algorithm for them."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minitransformer.backends.cuda import blaslt, ops
from minitransformer.engine.backend import to_host
from support.closeness import assert_close
from support.host_blas import DTYPES


def wide(array):
    return to_host(array).astype(float)


def feed_forward(gpu, sizes, dtype="float32", seed=3, shift=0, transposed=False):
    """Two layers with a ReLU between, their gradients, and all in float64.

    x is used twice. Its weight is in a buffer, behind `shift` elements.
    """
    n, d, f, e = sizes
    rng, xp = np.random.default_rng(seed), gpu.xp
    shapes = (n, d), (shift + d * f,), (f,), (f, e), (e,), (n, e), (n, d)
    types = DTYPES[dtype], DTYPES[dtype], np.float32, DTYPES[dtype], np.float32
    # Quarters are not rounded to 16 bits: so no ReLU is turned over.
    drawn = [
        (rng.integers(-8, 9, shape) / 4).astype(kind)
        for shape, kind in zip(shapes, (*types, *types[:2]), strict=True)
    ]

    def weight(buffer):
        part = buffer[shift:]
        return part.reshape(f, d).T if transposed else part.reshape(d, f)

    x, buffer, b1, w2, b2, upstream, term = map(xp.asarray, drawn)
    hidden, hidden_vjp = ops.linear(x, weight(buffer), b1, relu=True)
    out, out_vjp = ops.linear(hidden, w2, b2)
    dhidden, dw2, db2 = out_vjp(upstream)
    dx, dw1, db1 = hidden_vjp(dhidden.dense())
    found = [out, ops.add_arrays(term, dx), dw1, db1, dw2, db2]

    x, buffer, b1, w2, b2, upstream, term = (array.astype(float) for array in drawn)
    hidden = np.maximum(x @ weight(buffer) + b1, 0)
    g = upstream @ w2.T * (hidden > 0)
    expected = [
        hidden @ w2 + b2,
        g @ weight(buffer).T + term,
        x.T @ g,
        g.sum(0),
        hidden.T @ upstream,
        upstream.sum(0),
    ]
    return list(map(wide, found)), expected


def assert_all_close(found, expected, dtype="float32"):
    """As a share of the largest number of each array."""
    for got, wanted in zip(found, expected, strict=True):
        size = abs(wanted).max() + 1
        assert_close(got / size, wanted / size, dtype)


SIZES = st.integers(1, 40) | st.sampled_from([130, 136, 264])


@settings(suppress_health_check=list(HealthCheck))
@given(
    sizes=st.tuples(SIZES, SIZES, SIZES, SIZES),
    dtype=st.sampled_from([*DTYPES]),
    seed=st.integers(0, 1000),
    shift=st.sampled_from([0, 1, 8]),
)
def test_feed_forward_layers_follow_float64(gpu, sizes, dtype, seed, shift):
    """Also with a weight at an odd address, which cuBLASLt would not take."""
    for transposed in (False, True):  # kinds of products that differ in nothing else
        found, expected = feed_forward(gpu, sizes, dtype, seed, shift, transposed)
        assert_all_close(found, expected, dtype)


def test_each_kind_of_product_is_chosen_once_and_needs_no_kernel(host_gpu, stand_in):
    for _ in range(2):
        feed_forward(host_gpu, (21, 24, 40, 16), "float16")
    # Two layers, and the gradient of x with a term.
    expected = [(40, 21, 24), (16, 21, 40), (24, 21, 40)]
    assert blaslt.current()._library.asked == expected
    assert not stand_in.kernels & {"bias_relu", "add_arrays"}


@pytest.mark.parametrize("fault", ["supports", "cublasLtMatmul"])
def test_a_product_that_cublaslt_refuses_is_left_to_kernels(host_gpu, stand_in, fault):
    library = blaslt.current()._library
    refusal = {"supports": lambda m, n, k: False, "cublasLtMatmul": lambda *a: 15}
    setattr(library, fault, refusal[fault])
    for _ in range(2):
        assert_all_close(*feed_forward(host_gpu, (21, 24, 40, 16)))
    assert stand_in.kernels >= {"bias_relu", "add_arrays"}
    assert len(library.asked) == 3


def test_tf32_is_a_kind_of_its_own(host_gpu):
    x = np.random.default_rng(0).standard_normal((130, 130), np.float32)
    given, bias = host_gpu.xp.asarray(x), host_gpu.xp.zeros(130, np.float32)
    for host_gpu.tf32, most in (False, 1e-4), (True, 0.05):  # inputs of 10 bits
        out, _ = ops.linear(given, given, bias)
        assert most / 500 < abs(wide(out) - x.astype(float) @ x).max() < most
