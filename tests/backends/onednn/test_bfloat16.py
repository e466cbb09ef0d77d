"""Products in bfloat16 against those of float64, and what is rounded how often."""

import gc
import json

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import train
from minitransformer.backends.onednn import bfloat16
from minitransformer.engine import ops
from minitransformer.engine.autograd import PRIMITIVES, Tensor
from minitransformer.engine.backend import fused_kernel
from minitransformer.model.parameters import ParameterBuffer
from minitransformer.model.transformer import Transformer
from minitransformer.training.optimizer import Adam
from support.cuda import backend_for
from support.in_process import run_main
from support.low_precision import (
    CONFIG,
    FLAGS,
    assert_near,
    assert_translates_alike,
    library,
    parameters,
    references,
    rounded,
    write_corpus,
)
from support.properties import within


@pytest.fixture(scope="module")
def kernels():
    """The kernels on any processor."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bfloat16, "OneDnn", lambda: library("bf16"))
        patch.setattr(bfloat16, "MIN_SIZE", 1)
        opened = bfloat16.open_kernels.__wrapped__()
        with backend_for(np.ndarray, backend=opened.backend()):
            yield opened


linear, loss_of = (PRIMITIVES[x] for x in ("linear", "projected_cross_entropy"))


SIZES = st.integers(1, 6) | st.integers(60, 70)


@given(SIZES, SIZES, SIZES, st.booleans())
@example(rows=4, n=3, m=1, relu=False)  # a matrix of one column, which was turned
def test_linear_is_float64_products_of_rounded_numbers(kernels, rows, n, m, relu):
    """Of matrices: a single row or column is multiplied by NumPy."""
    rng, low = np.random.default_rng(n), rounded if min(n, m) > 1 else np.float64
    weight, bias = parameters(rng, (n, m), (m,))
    x = rng.standard_normal((2, rows, n)).astype(np.float32)
    out, vjp = linear(x, weight, bias, relu=relu)
    flat = low(x.reshape(-1, n))
    expected = flat @ low(weight) + bias
    g = rng.standard_normal(out.shape).astype(np.float32)
    upstream = g.reshape(-1, m) * (expected > 0 if relu else 1)
    pairs = zip(
        (out, *vjp(g)),
        (
            np.maximum(expected, 0) if relu else expected,
            low(upstream) @ low(weight).T,
            flat.T @ low(upstream),
            upstream.sum(axis=0),
        ),
        strict=True,
    )
    for found, wide in pairs:
        assert found.dtype == np.float32
        within(
            abs(found.reshape(wide.shape) - wide).max(), 1e-5 * (1 + abs(wide).max())
        )
    _, vjp = linear(x, weight)
    assert vjp(g)[2] is None


def test_exponentials_are_those_of_float64_products(kernels):
    rng = np.random.default_rng(0)
    [table] = parameters(rng, (70, 9))
    rows = rng.standard_normal((5, 9)).astype(np.float32)
    kernel = fused_kernel("exponentials", (rows, table), None)
    assert kernel == kernels.exponentials
    found = kernel(rows, table)
    assert_near(found, np.exp(rounded(rows) @ rounded(table).T))


def test_a_relu_lets_nothing_through_where_it_was_zero(kernels):
    [weight] = parameters(np.random.default_rng(0), (4, 4))
    weight[...] = np.eye(4)
    x = np.array([[1, -1, 0, -0.0]], np.float32)
    out, vjp = linear(x, weight, relu=True)
    assert out.tolist() == [[1, 0, 0, 0]]
    dx, *_ = vjp(np.ones((1, 4), np.float32))
    assert dx.tolist() == [[1, 0, 0, 0]]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_the_loss_of_a_model_that_diverged_is_not_finite(kernels, bad):
    """A kernel may turn NaN into another exponential."""
    [weight] = parameters(np.random.default_rng(0), (5, 8))
    x, targets = np.ones((2, 8), np.float32), np.array([1, 2])
    x[1, 3] = bad
    options = {"label_smoothing": 0.1, "padding_id": 0}
    with np.errstate(all="ignore"):
        loss, _ = loss_of(x, weight, targets, **options)
    assert not np.isfinite(loss)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.9])
def test_the_loss_follows_float64(kernels, smoothing, monkeypatch):
    tolerance = 1e-2  # exponentials are rounded, too
    monkeypatch.setattr(ops, "LOGITS_PER_CHUNK", 1)
    monkeypatch.setattr(ops, "MIN_ROWS_PER_CHUNK", 5)
    rng = np.random.default_rng(1)
    [weight] = parameters(rng, (30, 8))
    x = rng.standard_normal((30, 5, 8)).astype(np.float32)
    x[3] *= 99  # more than the kernel's exponentials can hold
    targets = rng.integers(0, 30, (30, 5))
    options = {"label_smoothing": smoothing, "padding_id": 0}
    loss, vjp = loss_of(x, weight, targets, **options)
    wide = rounded(x), rounded(weight), targets
    expected, expected_vjp = loss_of(*wide, **options)
    assert loss == pytest.approx(float(expected), rel=tolerance if smoothing else 1e-5)
    found, meant = (v(np.float32(2))[:2] for v in (vjp, expected_vjp))
    for got, want in zip(found, meant, strict=True):
        assert_near(got, want, tolerance)
        assert got.dtype == loss.dtype == np.float32


def test_other_matrices_are_multiplied_by_numpy(kernels, monkeypatch):
    rng = np.random.default_rng(0)
    [weight] = parameters(rng, (64, 64))
    x = np.zeros((2, 64), np.float32)
    assert kernels.find("round_for", (x, weight)) is not None
    assert kernels.find("round_for", (x, weight.copy())) is None
    assert kernels.find("attention", (x, weight)) is None
    assert kernels.find("matmul", (x, weight)) is None
    assert kernels.find("matmul", (kernels.round_for(x, weight), weight)) is not None
    wide = weight.astype(np.float64)
    assert kernels.find("round_for", (x, wide.reshape(-1)[:].reshape(64, 64))) is None
    monkeypatch.setattr(bfloat16, "MIN_SIZE", 64 * 64)
    assert kernels.find("round_for", (x, weight)) is not None
    assert kernels.find("round_for", (x, weight[:63])) is None


def test_a_run_learns_and_translates(kernels, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_corpus(tmp_path)
    losses = {}
    for name in ("fp32", "bf16"):
        run = ["--run", name, "--steps", 20, "--threads", 2]
        code, _, errors = run_main(train.main, *FLAGS, *run, "--precision", name)
        assert code == 0, errors
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        found = [json.loads(line) for line in lines]
        losses[name] = [r["loss"] for r in found if "loss" in r]
    log = (tmp_path / "bf16" / "train.log").read_text()
    assert "products in bf16" in log
    assert losses["bf16"] != losses["fp32"]
    assert losses["bf16"] == pytest.approx(losses["fp32"], rel=0.02)
    assert_translates_alike("bf16", "bf16")


def test_the_loss_of_large_logits_is_finite(kernels):
    """Logits of 200, 0 and -200, whose exponentials no float32 can hold."""
    weight = np.array([1, 0, -1], np.float32).reshape(3, 1)
    x, targets = np.array([[200], [-200]], np.float32), np.array([1, 2])
    options = {"label_smoothing": 0.0, "padding_id": 0}
    loss, vjp = loss_of(x, weight, targets, **options)
    assert loss == 200  # the first row: token 0 is certain, and 1 was expected
    dx, dweight = vjp(np.float32(1))[:2]
    assert dx.tolist() == [[1], [0]]
    assert dweight.tolist() == [[200], [-200], [0]]


def test_what_was_rounded_follows_the_parameters_and_goes_with_them(
    kernels, monkeypatch
):
    """One rounding of the vector serves all matrices, and is freed with the model."""
    made = references(monkeypatch, bfloat16, "shared_zeros")
    model = Transformer(CONFIG, seed=1)
    buffer = ParameterBuffer(model)
    weight = model.encoder[0].feed_forward.weight_1
    x = Tensor(np.eye(16, dtype=np.float32))
    adam = Adam(buffer.data, 0.9, 0.98, 1e-9)
    for _ in range(2):
        assert_near(ops.linear(x, weight).data, rounded(weight.data))
        adam.update(np.ones_like(buffer.data), 0.1)
    buffer.data[...] *= 2
    buffer.data_changed()
    assert_near(ops.linear(x, weight).data, rounded(weight.data))
    assert [rounding() is not None for rounding in made] == [True]
    del model, buffer, weight, adam
    gc.collect()
    assert made[0]() is None
