"""What is rounded to bfloat16, and how often."""

import gc
import math

import numpy as np
import pytest

from minitransformer.engine import ops
from minitransformer.engine.autograd import Tensor
from minitransformer.engine.backend import register_kernels
from minitransformer.model.parameters import ParameterBuffer
from minitransformer.model.transformer import Transformer
from minitransformer.onednn import bfloat16, floats
from minitransformer.training.optimizer import Adam
from support.low_precision import CONFIG, assert_near, library, parameters, rounded


@pytest.fixture
def kernels(monkeypatch):
    """The kernels on any processor."""
    monkeypatch.setattr(bfloat16, "OneDnn", lambda: library("bf16"))
    monkeypatch.setattr(floats, "MIN_SIZE", 1)
    opened = bfloat16.open_kernels.__wrapped__()
    register_kernels(np.ndarray, opened.find)
    yield opened
    register_kernels(np.ndarray, None)


def watch_roundings(kernels, monkeypatch):
    """Return a list to which the shape of each array that is rounded will be added."""
    shapes, round_numbers = [], kernels.rounded

    def watched(x, out=None):
        shapes.append(x.shape)
        return round_numbers(x, out)

    monkeypatch.setattr(kernels, "rounded", watched)
    return shapes


def test_an_array_is_rounded_once_while_it_lives(kernels, monkeypatch):
    rng = np.random.default_rng(0)
    first, second, third = parameters(rng, (6, 9), (9, 6), (9, 6))
    kernels.linear(np.ones((1, 6), np.float32), first)  # rounds the parameters
    shapes = watch_roundings(kernels, monkeypatch)
    x = rng.standard_normal((4, 6)).astype(np.float32)
    hidden, _ = kernels.linear(x, first, relu=True)  # rounded for the two that follow
    for weight in (second, third):
        out, _ = kernels.linear(hidden, weight)
        assert_near(out, rounded(hidden) @ rounded(weight))
    kernels.linear(x, first)
    assert shapes == [(4, 6), (4, 9)]
    assert len(kernels._thread.inputs) == 2
    del x, hidden
    assert not kernels._thread.inputs


def test_all_matrices_are_views_of_one_rounded_copy(kernels, monkeypatch):
    rng = np.random.default_rng(0)
    weight, table = parameters(rng, (6, 9), (20, 6))
    shapes = watch_roundings(kernels, monkeypatch)
    x = rng.standard_normal((4, 6)).astype(np.float32)
    blocks = [table[first : first + n].T for n in (3, 7, 20) for first in (0, n // 2)]
    for matrix in (weight, table.T, *blocks):  # as beam search multiplies by blocks
        out, _ = kernels.linear(x, matrix)
        assert_near(out, rounded(x) @ rounded(matrix))
    assert sorted(map(math.prod, shapes)) == [x.size, weight.base.size]


def test_what_was_rounded_follows_the_parameters_and_goes_with_them(kernels):
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
    assert len(kernels._kept) == 1
    del model, buffer, weight, adam
    gc.collect()
    assert not kernels._kept
    assert not kernels._views
