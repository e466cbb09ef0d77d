"""The model and its gradient against the Transformer in plain NumPy, in float64."""

import numpy as np
import pytest

from minitransformer.model.parameters import ParameterBuffer
from minitransformer.model.transformer import Transformer, training_loss
from minitransformer.settings.config import ModelConfig
from support.closeness import assert_close
from support.models import tiny_config
from support.noise import RecordedNoise, dropout_sites
from support.reference import ReferenceTransformer, derivative

SMALL = vars(tiny_config((2, 2), vocab_size=11, d_ff=12))
EVERYWHERE = {"dropout": 0.25, "attention_dropout": 0.5, "relu_dropout": 0.375}
NOWHERE = dict.fromkeys(EVERYWHERE, 0.0)

CASES = {
    "no dropout": NOWHERE,
    "dropout of sub-layers and embeddings": NOWHERE | {"dropout": 0.25},
    "dropout of attention weights": NOWHERE | {"attention_dropout": 0.5},
    "dropout inside feed-forward": NOWHERE | {"relu_dropout": 0.375},
    "all dropouts": EVERYWHERE,
    "one head": EVERYWHERE | {"num_heads": 1},
    "eight heads": EVERYWHERE | {"num_heads": 8},
    "d_k below d_v": EVERYWHERE | {"num_heads": 3, "d_k": 2, "d_v": 5},
    "d_k above d_v": EVERYWHERE | {"num_heads": 3, "d_k": 4, "d_v": 1},
    "one and three layers": EVERYWHERE | {"encoder_layers": 1, "decoder_layers": 3},
    "learned": EVERYWHERE | {"positions": "learned", "max_positions": 9},
    "a window of 2": EVERYWHERE | {"attention_window": 2},
    "a window of 5": EVERYWHERE | {"attention_window": 5, "positions": "learned"},
}


def random_ids(rng, lengths):
    """Rows of random ids, each padded to the longest. Shapes: -> [B, longest]"""
    ids = rng.integers(1, 11, (len(lengths), max(lengths)))
    for row, length in zip(ids, lengths, strict=True):
        row[length:] = 0
    return ids


def check_against_reference(config, sources, targets, label_smoothing=0.1):
    """Compare logits, loss, and the gradient along a direction in each parameter.

    `sources` and `targets` are the lengths of the sentences.
    """
    rng = np.random.default_rng(0)
    source, target = random_ids(rng, sources), random_ids(rng, targets)
    model = Transformer(config, seed=3, dtype="float64")
    buffer = ParameterBuffer(model)
    buffer.data += rng.normal(0, 0.2, buffer.data.shape)  # gains and biases matter, too
    parameters = buffer.views(buffer.data)

    noise = RecordedNoise(seed=1)
    logits = model.logits(model(source, target[:, :-1], noise))
    masks = noise.masks(dropout_sites(config, *source.shape, target.shape[1] - 1))
    layers = config.encoder_layers, config.decoder_layers
    shape = layers, config.num_heads, masks, config.attention_window
    expected = ReferenceTransformer(parameters, *shape).logits(source, target[:, :-1])
    assert_close(logits.data, expected)

    def expected_loss(parameters):
        model = ReferenceTransformer(parameters, *shape)
        return model.loss(source, target, label_smoothing)

    loss = training_loss(model, source, target, label_smoothing, RecordedNoise(1))
    loss.backward()
    assert_close(loss.data, expected_loss(parameters))
    count, moves = len(parameters), {}  # move i changes parameter i alone
    for i, (name, values) in enumerate(parameters.items()):
        moves[name] = np.zeros((count, *values.shape))
        moves[name][i] = rng.standard_normal(values.shape)
    slopes = derivative(expected_loss, parameters, moves)  # [count]
    gradients = buffer.views(buffer.grad).items()
    for i, (name, gradient) in enumerate(gradients):
        found = (gradient * moves[name][i]).sum()
        assert found == pytest.approx(slopes[i], rel=1e-9, abs=1e-10), name


@pytest.mark.parametrize("name", CASES)
def test_logits_loss_and_gradient_are_those_of_the_reference(name):
    config = ModelConfig(**SMALL | CASES[name])
    check_against_reference(config, sources=(7, 4, 1), targets=(3, 9, 6))


@pytest.mark.parametrize("label_smoothing", [0.0, 0.3])
def test_smoothed_labels_are_those_of_the_reference(label_smoothing):
    config = ModelConfig(**SMALL | NOWHERE)
    check_against_reference(config, (5, 3), (4, 6), label_smoothing)


@pytest.mark.parametrize("window", [4, 40])
def test_long_sentences_with_a_window_are_those_of_the_reference(window):
    one_each = {"encoder_layers": 1, "decoder_layers": 1, "dropout": 0.25}
    config = ModelConfig(**SMALL | one_each | {"attention_window": window})
    check_against_reference(config, sources=(43, 20), targets=(37, 52))


def test_the_reference_differentiates_as_finite_differences_do():
    rng, step = np.random.default_rng(0), 1e-6
    start = Transformer(ModelConfig(**SMALL), dtype="float64").named_parameters()
    parameters = {name: p.data for name, p in start}
    direction = {n: rng.standard_normal(p.shape) for n, p in parameters.items()}
    ids = random_ids(rng, (6, 3)), random_ids(rng, (2, 5))

    def loss(parameters):
        return ReferenceTransformer(parameters, (2, 2), 2).loss(*ids, 0.1)

    up, down = (
        loss({n: p + side * direction[n] for n, p in parameters.items()})
        for side in (step, -step)
    )
    slope = derivative(loss, parameters, direction)
    assert slope == pytest.approx((up - down) / (2 * step), rel=1e-6)
