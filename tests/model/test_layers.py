"""Properties of attention, positions and initial weights."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minitransformer.model.layers import Embedding, sinusoids
from minitransformer.model.parameters import Initializer
from minitransformer.model.transformer import Transformer
from minitransformer.settings.config import ModelConfig
from support.closeness import assert_close

seeds = st.integers(0, 10_000)


@given(st.integers(0, 500), st.integers(0, 300))
def test_a_shifted_position_is_a_linear_function_of_it(position, shift):
    """The paper's reason for sinusoids: PE(pos + k) = R(k) PE(pos), R a rotation."""
    d = 16
    table = sinusoids(position + shift + 1, d)
    for i in range(d // 2):
        angle = shift / 10000 ** (2 * i / d)
        rotation = np.array(
            [[math.cos(angle), math.sin(angle)], [-math.sin(angle), math.cos(angle)]]
        )
        pair = slice(2 * i, 2 * i + 2)
        assert_close(table[position + shift, pair], rotation @ table[position, pair])


def test_sinusoids_are_interleaved():
    table = sinusoids(3, 4)
    assert_close(table[0], [0, 1, 0, 1])
    assert_close(table[2], [math.sin(2), math.cos(2), math.sin(0.02), math.cos(0.02)])


def embedding_of(vocab_size, d_model, learned=None, dtype="float64"):
    """An embedding without dropout, with `learned` positions or sinusoids."""
    positions = {"positions": "learned", "max_positions": learned} if learned else {}
    sizes = {"vocab_size": vocab_size, "d_model": d_model, "num_heads": 1}
    config = ModelConfig(dropout=0.0, **sizes, **positions)
    return Embedding(Initializer(1, dtype), config)


def test_sinusoids_grow_and_learned_positions_end():
    ids = np.ones((1, 700), int)
    grown = embedding_of(8, 4)(ids, None)
    assert_close(grown.data[0] - grown.data[0, 0] + sinusoids(1, 4), sinusoids(700, 4))
    with pytest.raises(ValueError, match=r"expected at most 10 tokens.*got 700"):
        embedding_of(8, 4, 10)(ids, None)


def test_each_layer_starts_as_its_section_says():
    """Gains of 1, biases of 0, and matrices that fill the interval of their bound.

    The table of embeddings has the deviation d_model^-0.5.
    """
    sizes = {"vocab_size": 50, "d_model": 40, "d_ff": 90, "num_heads": 4}
    widths = {"d_k": 15, "d_v": 20, "encoder_layers": 2, "decoder_layers": 2}
    model = Transformer(ModelConfig(**sizes, **widths), seed=1)
    of_three = math.sqrt(6 / (40 + 60 + 60 + 80))  # query, key and value side by side
    bounds = {
        **dict.fromkeys(("query", "key", "value"), of_three),
        "output": math.sqrt(6 / (80 + 40)),
        **dict.fromkeys(("weight_1", "weight_2"), math.sqrt(6 / (40 + 90))),
    }
    for name, parameter in model.named_parameters():
        kind, values = name.rpartition(".")[2], parameter.data
        if kind in bounds:
            assert 0.99 * bounds[kind] < values.max() <= bounds[kind] * (1 + 1e-6), name
            assert 0.99 * bounds[kind] < -values.min() <= bounds[kind] * (1 + 1e-6)
            assert abs(values.std() * math.sqrt(3) / bounds[kind] - 1) < 0.05, name
        elif kind == "table":
            assert abs(values.std() * math.sqrt(40) - 1) < 0.05
        else:
            assert (values == (kind == "gain")).all(), name
