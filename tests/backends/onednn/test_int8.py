"""Products of integers on processors, against float64 and against float32."""

import gc
import importlib
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import train
from minitransformer import load
from minitransformer.backends.onednn import int8
from minitransformer.engine import ops
from minitransformer.engine.autograd import Tensor, no_grad
from minitransformer.model.parameters import ParameterBuffer
from minitransformer.model.transformer import Transformer
from support.cuda import backend_for
from support.in_process import run_main
from support.low_precision import (
    CONFIG,
    FLAGS,
    assert_near,
    assert_translates_alike,
    parameters,
    references,
    write_corpus,
)


@no_grad()
def linear(*arrays, relu=False):
    return ops.linear(*arrays, relu=relu).data


@pytest.fixture(scope="module")
def kernels():
    """The kernels on any processor, for matrices of any size."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(int8, "MIN_PRODUCTS", 0)
        opened = int8.open_kernels.__wrapped__()
        with backend_for(np.ndarray, backend=opened.backend()):
            yield opened


def rounded(x, axis):
    """Round to multiples of a 127th of the largest magnitude along an axis."""
    x = np.asarray(x, np.float64)
    step = np.abs(x).max(axis=axis, keepdims=True, initial=1e-30) / 127
    return np.rint(x / step) * step


NUMBERS = st.one_of(
    st.sampled_from([0.0, 0.5, -0.5, 1.0, -1.0, 3.0, 63.5, 127.0]),
    st.floats(-1e3, 1e3, width=32),
)


@st.composite
def products(draw):
    """Rows, matrices of parameters and a bias of the first, with ties and zeros."""

    def drawn(*shape):
        return draw(arrays(np.float32, shape, elements=NUMBERS))

    inputs = draw(st.integers(1, 70))
    columns = draw(st.lists(st.integers(1, 40), min_size=1, max_size=3))
    sizes = [(inputs, m) for m in columns]
    weights = parameters(np.random.default_rng(0), *sizes)
    for weight in weights:
        weight[...] = drawn(*weight.shape)
    rows = drawn(draw(st.integers(0, 3 * int8.MAX_FEW)), inputs)
    return rows, weights, draw(st.none() | st.just(drawn(columns[0])))


@given(products(), st.booleans())
def test_linear_is_float64_products_of_rounded_numbers(kernels, drawn, relu):
    x, [weight, *_], bias = drawn
    out = linear(x[:, None], weight, bias, relu=relu)
    expected = rounded(x, -1) @ rounded(weight, 0) + (0 if bias is None else bias)
    expected = np.maximum(expected, 0) if relu else expected
    assert out.shape == (len(x), 1, weight.shape[1])
    # A number between two integers may become either of them.
    ties = np.abs(x).sum(axis=-1) * np.abs(weight).max(initial=0) / 60
    assert (abs(out[:, 0] - expected) <= ties[:, None] + 1e-3).all()


@given(products(), st.booleans(), st.data())
@no_grad()
def test_a_row_does_not_depend_on_the_others(kernels, drawn, relu, data):
    """Nor on the library: a translation has no other neighbours on another machine."""
    x, [weight, *others], bias = drawn
    together = linear(x, weight, bias, relu=relu)
    first = data.draw(st.integers(0, len(x)))
    last = data.draw(st.integers(first, len(x)))
    part = linear(x[first:last], weight, bias, relu=relu)
    np.testing.assert_array_equal(part, together[first:last])
    weights = [Tensor(w) for w in (weight, *others)]
    for joined, w in zip(ops.projections(Tensor(x), weights), weights, strict=True):
        np.testing.assert_array_equal(joined.data, linear(x, w))
    alone = int8.Int8Kernels(importlib.import_module("numkong"), None)
    found, _ = alone.find("linear", (x, weight))(x, weight, bias, relu=relu)
    np.testing.assert_array_equal(found, together)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_not_finite_afterwards(kernels, bad):
    [weight] = parameters(np.random.default_rng(0), (8, 6))
    x = np.ones((3, 8), np.float32)
    x[1, 3] = bad
    with np.errstate(all="ignore"):
        out = linear(x, weight)
    assert not np.isfinite(out[1]).any()
    assert np.isfinite(out[[0, 2]]).all()


def test_other_matrices_are_multiplied_in_float32(kernels):
    [weight] = parameters(np.random.default_rng(0), (64, 64))
    x = np.zeros((2, 64), np.float32)
    assert kernels.find("linear", (x, weight)) is None  # a gradient may be needed
    with no_grad():
        assert kernels.find("linear", (x, weight)) is not None
        assert kernels.find("linear", (x, weight.copy())) is None
        assert kernels.find("projected_cross_entropy", (x, weight)) is None


@no_grad()
def test_integers_follow_the_parameters_and_go_with_them(kernels, monkeypatch):
    made = references(monkeypatch, int8, "Int8Matrix")
    model = Transformer(CONFIG, seed=1)
    buffer = ParameterBuffer(model)
    weight, table = model.encoder[0].feed_forward.weight_1, model.embedding.table
    x = Tensor(np.eye(16, dtype=np.float32))
    for times in (1, 2):
        for _ in range(2):
            assert_near(ops.linear(x, weight).data, rounded(weight.data, 0))
            assert_near(model.logits(x).data, rounded(table.data.T, 0))
        assert len(made) == 2 * times  # each matrix once for each change
        buffer.data[...] *= 2
        buffer.data_changed()
    assert_near(ops.linear(x, weight).data, rounded(weight.data, 0))
    assert sum(integers() is not None for integers in made) == 1
    del model, buffer, weight, table
    gc.collect()
    assert not any(integers() is not None for integers in made)


def test_a_run_is_translated_in_int8(kernels, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_corpus(tmp_path)
    code, _, errors = run_main(train.main, *FLAGS, "--steps", 20, "--run", "run")
    assert code == 0, errors
    made = references(monkeypatch, int8, "Int8Matrix")
    monkeypatch.setattr(int8, "open_kernels", lambda: kernels)
    assert_translates_alike("run", "int8")
    # Before workers are forked: 4 + 7 products of both layers, and the embedding.
    made.clear()
    load("run", precision="int8")
    assert len(made) == 12


def test_training_in_int8_is_refused():
    code, _, errors = run_main(train.main, "--precision", "int8")
    assert code == 2
    assert "--precision" in errors
    assert "int8" in errors


def test_what_is_missing_is_said_in_a_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "numkong", None)
    expected = (
        r"--precision int8 needs NumKong: pip install 'minitransformer\[onednn\]'"
    )
    with pytest.raises(RuntimeError, match=expected):
        int8.open_kernels.__wrapped__()
