"""Threads, accumulation and repeatability of a training step's gradient."""

import numpy as np
import pytest
from conftest import assert_close

from minitransformer.model.layers import ParameterBuffer
from minitransformer.model.transformer import Transformer
from minitransformer.settings.config import ModelConfig
from minitransformer.text.batches import Batch
from minitransformer.training.parallel import ThreadedModel


def small_model(dropout=0.0, dtype="float64"):
    config = ModelConfig(
        vocab_size=20,
        encoder_layers=1,
        decoder_layers=1,
        d_model=8,
        d_ff=8,
        num_heads=2,
        dropout=dropout,
    )
    return Transformer(config, dtype=dtype)


def gradient(batches, threads, dropout=0.0, dtype="float64"):
    model = small_model(dropout, dtype)
    parameters = ParameterBuffer(model)
    threaded = ThreadedModel(model, parameters, threads)
    threaded.gradient(batches, 0.1, (1, 1))
    loss = threaded.gradient(batches, 0.1, (1, 1))  # the second starts from zero
    threaded.close()
    return loss, parameters.grad.copy()


def batch(seed, sentences):
    rng = np.random.default_rng(seed)
    source, target = (
        rng.integers(4, 20, (sentences, 6)),
        rng.integers(4, 20, (sentences, 5)),
    )
    for row, end in enumerate(rng.integers(2, 6, sentences)):
        target[row, end:] = 0
    return Batch(source, target)


@pytest.mark.parametrize("threads", [2, 3, 8])
def test_threads_do_not_change_the_gradient(threads):
    batches = [batch(0, 7), batch(1, 2)]
    loss, expected = gradient(batches, 1)
    other, found = gradient(batches, threads)
    assert_close(other, loss)
    assert_close(found, expected)


def test_accumulation_weighs_by_tokens():
    parts = [batch(0, 7), batch(1, 3)]
    loss, together = gradient(parts, 1)
    tokens = [part.target_tokens for part in parts]
    alone = [gradient([part], 1) for part in parts]
    weights = [n / sum(tokens) for n in tokens]
    assert_close(loss, sum(w * x for w, (x, _) in zip(weights, alone, strict=True)))
    mean = sum(w * g for w, (_, g) in zip(weights, alone, strict=True))
    assert_close(together, mean)


def test_a_step_repeats_bit_for_bit():
    first, second = (gradient([batch(0, 9)], 2, 0.3, "float32") for _ in range(2))
    assert first[0] == second[0]
    np.testing.assert_array_equal(first[1], second[1])
