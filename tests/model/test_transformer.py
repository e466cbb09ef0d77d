"""The whole model: gradients, what a position sees, and the paper's sizes."""

import numpy as np
import pytest

from minitransformer.engine.ops import HostStream
from minitransformer.model.parameters import ParameterBuffer
from minitransformer.model.transformer import Transformer
from minitransformer.settings.config import ModelConfig
from minitransformer.settings.options import make_config
from minitransformer.settings.presets import PRESETS
from support.models import tiny_config

VOCAB = 15


def small(**changes):
    return tiny_config((2, 2), vocab_size=VOCAB, d_ff=12, **changes)


def ids(rng, *shape):
    return rng.integers(4, VOCAB, shape)


def test_dropout_is_off_in_evaluation():
    model = Transformer(small(dropout=0.5), seed=1)
    rng = np.random.default_rng(0)
    source, target = ids(rng, 2, 4), ids(rng, 2, 4)
    first, second = (model(source, target).data for _ in range(2))
    noisy = [model(source, target, HostStream((k,))).data for k in (1, 1, 2)]
    np.testing.assert_array_equal(first, second)
    np.testing.assert_array_equal(noisy[0], noisy[1])
    assert np.abs(noisy[0] - noisy[2]).max() > 0.1


def test_a_seed_gives_one_model():
    a, b, c = (ParameterBuffer(Transformer(small(), seed)).data for seed in (1, 1, 2))
    np.testing.assert_array_equal(a, b)
    assert (a != c).any()
    assert a.dtype == np.float32


def count(preset="base", **changes):
    """Parameters of a model; without a seed its zeros take no memory."""
    config = make_config(ModelConfig, PRESETS[preset], changes)
    model = Transformer(config, seed=None)
    found = sum(p.data.size for _, p in model.named_parameters())
    assert config.num_parameters == found
    return found


def test_base_and_big_have_the_papers_sizes():
    assert count("base", vocab_size=37_000) == 63_045_632
    assert count("big", vocab_size=37_000) == 214_171_648


ROWS = "base b-dk16 b-dk32 c-n2 c-n4 c-n8 c-d256 c-d1024 c-ff1024 c-ff4096".split()
MILLIONS = 65, 58, 60, 36, 50, 80, 28, 168, 53, 90


@pytest.mark.parametrize(("row", "millions"), [*zip(ROWS, MILLIONS, strict=True)])
def test_table_3_parameter_counts(row, millions):
    preset = row if row == "base" else f"base-{row}"
    assert round(count(preset, vocab_size=41_100) / 1e6) == millions


@pytest.mark.parametrize("heads", [1, 4, 16, 32])
def test_row_a_keeps_the_amount_of_computation(heads):
    assert count(f"base-a-h{heads}", vocab_size=37_000) == count(vocab_size=37_000)
