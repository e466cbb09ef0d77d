"""Threads, accumulation and repeatability of a training step's gradient."""

import numpy as np
import pytest

from minitransformer.model.parameters import ParameterBuffer
from minitransformer.training.parallel import ThreadedModel
from support.closeness import assert_close
from support.models import small_batch, small_model


def gradient(batches, threads, dropout=0.0, dtype="float64"):
    model = small_model(dropout, dtype)
    parameters = ParameterBuffer(model)
    threaded = ThreadedModel(model, parameters, threads)
    threaded.gradient(batches, 0.1, (1, 1))
    loss = threaded.gradient(batches, 0.1, (1, 1))  # the second starts from zero
    threaded.close()
    return loss, parameters.grad.copy()


@pytest.mark.parametrize("threads", [2, 3, 8])
def test_threads_do_not_change_the_gradient(threads):
    batches = [small_batch(0, 7), small_batch(1, 2)]
    loss, expected = gradient(batches, 1)
    other, found = gradient(batches, threads)
    assert_close(other, loss)
    assert_close(found, expected)


def test_accumulation_weighs_by_tokens():
    parts = [small_batch(0, 7), small_batch(1, 3)]
    loss, together = gradient(parts, 1)
    tokens = [part.target_tokens for part in parts]
    alone = [gradient([part], 1) for part in parts]
    weights = [n / sum(tokens) for n in tokens]
    assert_close(loss, sum(w * x for w, (x, _) in zip(weights, alone, strict=True)))
    mean = sum(w * g for w, (_, g) in zip(weights, alone, strict=True))
    assert_close(together, mean)


def test_a_step_repeats_bit_for_bit():
    first, second = (gradient([small_batch(0, 9)], 2, 0.3, "float32") for _ in range(2))
    assert first[0] == second[0]
    np.testing.assert_array_equal(first[1], second[1])
