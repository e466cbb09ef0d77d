"""Products by cuBLASLt, and what serves where it has no algorithm for them."""

import numpy as np
import pytest

from minitransformer.backends.cuda import blaslt, ops
from minitransformer.engine.backend import to_host
from support.closeness import assert_close

ml_dtypes = pytest.importorskip("ml_dtypes", reason="no bfloat16 without ml_dtypes")

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
# N, D, F, and by how many elements the weight is shifted in its buffer: by whole
# vectors, or in the first shape not.
SHAPES = [(3, 5, 7, 1), (1, 1, 1, 0), (37, 40, 24, 8), (130, 264, 136, 0)]


class Case:
    """Random arrays of a layer, whose weight is in the middle of a buffer."""

    def __init__(self, gpu, shape, dtype, transposed=False):
        n, d, f, shift = shape
        rng = np.random.default_rng(n)

        def draw(*sizes):
            values = rng.standard_normal(sizes).astype(dtype)
            return values.astype(float), gpu.xp.asarray(values)

        def matrix(buffer):
            part = buffer[shift:]
            return part.reshape(f, d).T if transposed else part.reshape(d, f)

        (self.wide_x, self.x), (wide, flat) = draw(n, d), draw(shift + d * f)
        self.wide_weight, self.weight = matrix(wide), matrix(flat)
        self.wide_term, self.term = draw(n, f)
        self.wide_bias = rng.standard_normal(f).astype(np.float32)
        self.bias = gpu.xp.asarray(self.wide_bias)
        self.out = gpu.xp.empty((n, f), dtype)
        self.product = self.wide_x @ self.wide_weight


def wide(array):
    return to_host(array).astype(float)


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_linear_layers_follow_float64(gpu, shape, dtype, relu):
    for transposed in (False, True):
        case = Case(gpu, shape, DTYPES[dtype], transposed)
        out, _ = ops.linear(case.x, case.weight, case.bias, relu=relu)
        expected = case.product + case.wide_bias
        assert_close(wide(out), np.maximum(expected, 0) if relu else expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES[2:])
def test_a_term_is_part_of_a_product(gpu, shape, dtype):
    for transposed in (False, True):
        case = Case(gpu, shape, DTYPES[dtype], transposed)
        lt, arrays = blaslt.current(), (case.x, case.weight)
        assert lt.multiply(*arrays, case.out, term=case.term)
        assert_close(wide(case.out), case.product + case.wide_term, dtype)


def feed_forward(gpu, dtype):
    """Gradients of two layers with a ReLU between, and in float64; x is used twice."""
    rng = np.random.default_rng(3)
    sizes = (21, 24), (24, 40), (40,), (40, 16), (16,), (21, 16), (21, 24)
    drawn = [rng.standard_normal(size) for size in sizes]
    drawn = [x.astype(np.float32 if x.ndim == 1 else dtype) for x in drawn]
    x, w1, b1, w2, b2, upstream, term = map(gpu.xp.asarray, drawn)
    hidden, hidden_vjp = ops.linear(x, w1, b1, relu=True)
    _, out_vjp = ops.linear(hidden, w2, b2)
    dhidden, dw2, db2 = out_vjp(upstream)
    dx, dw1, db1 = hidden_vjp(dhidden.dense())
    found = [ops.add_arrays(term, dx), dw1, db1, dw2, db2]

    x, w1, b1, w2, _, upstream, term = (array.astype(float) for array in drawn)
    hidden = np.maximum(x @ w1 + b1, 0)
    g = upstream @ w2.T * (hidden > 0)
    expected = [
        g @ w1.T + term,
        x.T @ g,
        g.sum(0),
        hidden.T @ upstream,
        upstream.sum(0),
    ]
    return list(map(wide, found)), expected


@pytest.mark.parametrize("kernels", ["cublaslt", "no algorithm"])
def test_feed_forward_layers_follow_float64(gpu, monkeypatch, kernels):
    if kernels == "no algorithm":
        monkeypatch.setattr(blaslt.CublasLt, "_plan", lambda *arguments: None)
    found, expected = feed_forward(gpu, np.float32)
    for got, gradient in zip(found, expected, strict=True):
        assert_close(got, gradient, "float32")


def test_each_kind_of_product_is_chosen_once_and_needs_no_kernel(host_gpu, stand_in):
    feed_forward(host_gpu, np.float16)
    asked = [*blaslt.current()._library.asked]
    feed_forward(host_gpu, np.float16)
    assert blaslt.current()._library.asked == asked
    # Two layers, and the gradient of x with a term.
    assert asked == [(40, 21, 24), (16, 21, 40), (24, 21, 40)]
    assert not stand_in.kernels & {"bias_relu", "add_arrays"}


def test_arrays_at_odd_addresses_are_left_to_the_kernel(host_gpu, stand_in):
    case = Case(host_gpu, SHAPES[0], np.float16)
    out, _ = ops.linear(case.x, case.weight, case.bias)
    assert_close(wide(out), case.product + case.wide_bias, "float16")
    assert "bias_relu" in stand_in.kernels


@pytest.mark.parametrize("fault", ["supports", "cublasLtMatmul"])
def test_a_product_that_cublaslt_refuses_is_left_to_kernels(host_gpu, stand_in, fault):
    library = blaslt.current()._library
    refusal = {"supports": lambda m, n, k: False, "cublasLtMatmul": lambda *a: 15}
    setattr(library, fault, refusal[fault])
    for _ in range(2):
        found, expected = feed_forward(host_gpu, np.float32)
        for got, gradient in zip(found, expected, strict=True):
            assert_close(got, gradient, "float32")
    assert stand_in.kernels >= {"bias_relu", "add_arrays"}
    assert len(library.asked) == len({*library.asked})


def test_tf32_is_a_kind_of_its_own(host_gpu):
    for tf32, most in (False, 1e-4), (True, 0.05):  # inputs of 10 bits
        host_gpu.tf32 = tf32
        case = Case(host_gpu, SHAPES[3], np.float32)
        out, _ = ops.linear(case.x, case.weight, case.bias)
        error = np.abs(wide(out) - case.product - case.wide_bias).max()
        assert most / 500 < error < most
