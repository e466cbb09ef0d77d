"""Products of integers on processors, against float64 and against float32."""

import gc
import weakref

import numpy as np
import pytest

import train
import translate
from minitransformer import load
from minitransformer.backends.onednn import int8
from minitransformer.backends.onednn.library import EXP, RELU, OneDnn
from minitransformer.engine import ops
from minitransformer.engine.autograd import PRIMITIVES, Tensor
from minitransformer.engine.backend import fused_kernel
from minitransformer.model.parameters import ParameterBuffer
from minitransformer.model.transformer import Transformer
from support.cuda import backend_for
from support.in_process import run_main
from support.low_precision import CONFIG, FLAGS, assert_near, parameters, write_corpus

linear = PRIMITIVES["linear"]


class StandIn:
    """For oneDNN, where it or the processor's instructions are missing."""

    @staticmethod
    def quantize(x, factors, out):
        out[...] = np.clip(np.rint(x * factors[:, None]) + 128, 0, 255)

    @staticmethod
    def scaled_product(a, row_scales, b, *, bias=None, function=None, out=None):
        found = (a - 128.0) @ b.integers * row_scales * b.scales
        if bias is not None:
            found += bias
        if function is not None:
            found = {RELU: lambda x: np.maximum(x, 0), EXP: np.exp}[function](found)
        if out is None:
            return found.astype(np.float32)
        out[...] = found
        return out


def library(precision):
    try:
        return OneDnn(precision)
    except RuntimeError:
        return StandIn()


@pytest.fixture
def kernels(monkeypatch):
    """The kernels on any processor."""
    monkeypatch.setattr(int8, "OneDnn", library)
    monkeypatch.setattr(int8, "MIN_PRODUCTS", 0)
    opened = int8.open_kernels.__wrapped__()
    with backend_for(np.ndarray, backend=opened.backend()):
        yield opened


def record_matrices(monkeypatch):
    """Return a list that gets a reference to each matrix of integers that is made."""
    made, make = [], int8.scaled_matrix

    def recorded(matrix):
        made.append(weakref.ref(scaled := make(matrix)))
        return scaled

    monkeypatch.setattr(int8, "scaled_matrix", recorded)
    return made


def rounded(x, axis):
    """Round to multiples of a 127th of the largest magnitude along an axis."""
    x = np.asarray(x, np.float64)
    step = np.abs(x).max(axis=axis, keepdims=True) / 127
    return np.rint(x / step) * step


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("rows", "n", "m"), [(1, 3, 5), (36, 64, 64), (70, 70, 33)])
def test_linear_is_float64_products_of_rounded_numbers(
    kernels, rows, n, m, with_bias, relu
):
    rng = np.random.default_rng(n)
    weight, bias = parameters(rng, (n, m), (m,))
    x = rng.standard_normal((2, rows, n)).astype(np.float32)
    out, _ = linear(x, weight, bias if with_bias else None, relu=relu)
    expected = rounded(x, -1) @ rounded(weight, 0) + (bias if with_bias else 0)
    assert out.shape == (2, rows, m)
    assert_near(out, np.maximum(expected, 0) if relu else expected)


@pytest.mark.parametrize("count", [1, 5, 33, 300])
def test_exponentials_are_those_of_float64_products(kernels, count, monkeypatch):
    monkeypatch.setattr(int8, "LOGITS_ROWS", 32)
    rng = np.random.default_rng(0)
    [table] = parameters(rng, (70, 9))
    rows = rng.standard_normal((count, 9)).astype(np.float32)
    kernel = fused_kernel("exponentials", (rows, table), None)
    assert kernel == kernels.exponentials
    expected = np.exp(rounded(rows, -1) @ rounded(table, -1).T)
    found, parts = kernel(rows, table)
    assert found.shape == expected.shape
    assert found.dtype == np.float32
    first = 0
    for part in parts:
        assert part == slice(first, min(first + 32, count))
        assert found[part] == pytest.approx(expected[part], rel=1e-4)
        first = part.stop
    assert first == count


def test_a_row_does_not_depend_on_the_others(kernels):
    rng = np.random.default_rng(0)
    [weight] = parameters(rng, (64, 30))
    x = rng.standard_normal((200, 64)).astype(np.float32)
    x[1] *= 1000
    together, _ = linear(x, weight)
    for first, count in ((0, 1), (7, 3), (100, 100)):
        part, _ = linear(x[first : first + count], weight)
        assert (part == together[first : first + count]).all()


def test_rows_and_columns_of_zeros_stay_zeros(kernels):
    [weight] = parameters(np.random.default_rng(0), (8, 6))
    weight[:, 2] = 0
    x = np.ones((3, 8), np.float32)
    x[1] = 0
    out, _ = linear(x, weight)
    assert (out[1] == 0).all()
    assert (out[:, 2] == 0).all()
    assert np.isfinite(out).all()
    assert linear(x[:0], weight)[0].shape == (0, 6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_not_finite_afterwards(kernels, bad):
    [weight] = parameters(np.random.default_rng(0), (8, 6))
    x = np.ones((3, 8), np.float32)
    x[1, 3] = bad
    with np.errstate(all="ignore"):
        out, _ = linear(x, weight)
    assert not np.isfinite(out[1]).any()
    assert np.isfinite(out[[0, 2]]).all()


def test_other_matrices_are_multiplied_in_float32(kernels):
    [weight] = parameters(np.random.default_rng(0), (64, 64))
    x = np.zeros((2, 64), np.float32)
    assert kernels.find("round_for", (x, weight)) is not None
    assert kernels.find("round_for", (x, weight.copy())) is None
    assert kernels.find("projected_cross_entropy", (x, weight)) is None


def test_integers_follow_the_parameters_and_go_with_them(kernels, monkeypatch):
    made = record_matrices(monkeypatch)
    model = Transformer(CONFIG, seed=1)
    buffer = ParameterBuffer(model)
    weight, table = model.encoder[0].feed_forward.weight_1, model.embedding.table
    x = Tensor(np.eye(16, dtype=np.float32))
    for times in (1, 2):
        for _ in range(2):
            assert_near(ops.linear(x, weight).data, rounded(weight.data, 0))
            transposed = ops.linear(x, Tensor(table.data.T))
            assert_near(transposed.data, rounded(table.data.T, 0))
        assert len(made) == 2 * times  # each matrix once for each change
        buffer.data[...] *= 2
        buffer.data_changed()
    assert_near(ops.linear(x, weight).data, rounded(weight.data, 0))
    assert sum(integers() is not None for integers in made) == 1
    del model, buffer, weight, table, transposed
    gc.collect()
    assert not any(integers() is not None for integers in made)


def test_a_run_is_translated_in_int8(kernels, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_corpus(tmp_path)
    code, _, errors = run_main(train.main, *FLAGS, "--steps", 40, "--run", "run")
    assert code == 0, errors
    made = record_matrices(monkeypatch)
    monkeypatch.setattr(int8, "open_kernels", lambda: kernels)
    outputs = []
    for precision in ("fp32", "int8"):
        names = "--model", "run", "--precision", precision, "ab ba c ab"
        code, out, errors = run_main(translate.main, *names)
        assert code == 0, errors
        outputs.append(out)
    assert outputs[0] == outputs[1] != ""
    # Before workers are forked: 6 + 10 matrices of both layers, and the embedding.
    made.clear()
    load("run", precision="int8")
    assert len(made) == 17


def test_training_in_int8_is_refused():
    code, _, errors = run_main(train.main, "--precision", "int8")
    assert code == 2
    assert "--precision" in errors
    assert "int8" in errors
