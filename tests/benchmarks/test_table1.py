"""The layers that benchmarks/table1.py measures compute the layers of Table 1."""

import importlib

import numpy as np
import pytest

from minitransformer.engine import autograd
from minitransformer.engine.autograd import Tensor
from support.closeness import assert_close
from support.scripts import ROOT

BENCHMARKS = ROOT / "benchmarks"
N, D, R = 7, 3, 4


@pytest.fixture(scope="module")
def table1():
    """The benchmark, whose primitives stay out of the engine's table."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(autograd, "PRIMITIVES", {**autograd.PRIMITIVES})
        patch.syspath_prepend(str(BENCHMARKS))
        yield importlib.import_module("table1")


def random_layer(table1, kind):
    rng = np.random.default_rng(0)
    forward, shapes = table1.layer(kind, N, D, R)
    return forward, [rng.standard_normal(shape) for shape in shapes]


@pytest.mark.parametrize("kind", ["recurrent", "convolutional", "restricted"])
def test_gradients_match_central_differences(table1, kind):
    forward, arrays = random_layer(table1, kind)
    leaves = [Tensor(array, requires_grad=True) for array in arrays]
    out = forward(*leaves)
    upstream = np.random.default_rng(1).standard_normal(out.shape)
    out.backward(upstream)
    for array, leaf in zip(arrays, leaves, strict=True):
        for index in np.ndindex(array.shape):
            kept, sides = array[index], []
            for step in (1e-6, -1e-6):
                array[index] = kept + step
                sides.append((forward(*map(Tensor, arrays)).data * upstream).sum())
            array[index] = kept
            slope = (sides[0] - sides[1]) / 2e-6
            np.testing.assert_allclose(leaf.grad[index], slope, rtol=1e-5, atol=1e-7)


def test_recurrent_and_convolutional_layers_are_their_formulas(table1):
    forward, arrays = random_layer(table1, "recurrent")
    *rows, w, u = arrays
    state = total = np.zeros((1, D))
    for row in rows:
        state = np.tanh(row @ w + state @ u)
        total = total + state
    assert_close(forward(*map(Tensor, arrays)).data, total)

    forward, arrays = random_layer(table1, "convolutional")
    x, *kernel = arrays
    out = forward(*map(Tensor, arrays)).data
    for t in range(N):
        near = [(t + j - 1, w) for j, w in enumerate(kernel)]
        assert_close(out[t], sum(x[i] @ w for i, w in near if 0 <= i < N))


@pytest.mark.parametrize("r", [1, 4, 40])
@pytest.mark.parametrize("length", [7, 16, 45, 64])  # 16 positions make a block
def test_restricted_attention_is_attention_under_a_band_mask(table1, length, r):
    rng = np.random.default_rng(0)
    q, k, v, g = rng.standard_normal((4, 1, length, D))
    near = np.abs(np.subtract.outer(np.arange(length), np.arange(length))) <= r // 2
    found, vjp = autograd.PRIMITIVES["restricted"](q, k, v, reach=r // 2)
    attend = autograd.PRIMITIVES["attention"]
    expected, masked_vjp = attend(q, k, v, near, num_heads=1)
    assert_close(found, expected)
    for gradient, wanted in zip(vjp(g), masked_vjp(g)[:3], strict=True):
        assert_close(gradient, wanted)


def test_rows_are_those_of_the_table(table1):
    found = {
        kind: (
            row.complexity,
            row.sequential_operations(81, 9),
            row.maximum_path_length(81, 9),
        )
        for kind, row in table1.ROWS.items()
    }
    assert found == {
        "self-attention": ("n^2 d", 1, 1),
        "recurrent": ("n d^2", 81, 81),
        "convolutional": ("k n d^2", 1, 4),
        "restricted": ("r n d", 1, 9),
    }
