"""Estimated parameters and operations, against counts of the real ones."""

import numpy as np
import pytest

from minitransformer.engine import ops
from minitransformer.model.transformer import Transformer
from minitransformer.settings.config import ModelConfig
from minitransformer.settings.options import make_config
from minitransformer.settings.presets import PRESETS
from minitransformer.training.cost import parameters_by_block, training_flops
from support.models import tiny_config

CONFIG = tiny_config(
    (2, 3), vocab_size=20, d_ff=12, d_k=3, d_v=5, positions="learned", max_positions=9
)


def test_blocks_add_up_to_the_model():
    model = Transformer(CONFIG)
    blocks = parameters_by_block(model)
    assert list(blocks) == ["embedding", "positions", "encoder", "decoder"]
    sizes = [parameter.data.size for _, parameter in model.named_parameters()]
    assert sum(blocks.values()) == sum(sizes) == CONFIG.num_parameters
    assert (blocks["embedding"], blocks["positions"]) == (160, 72)


@pytest.mark.parametrize(
    ("name", "steps", "published"),
    [("base", 100_000, 3.3e18), ("big", 300_000, 2.3e19)],
)
def test_table_2_training_cost(name, steps, published):
    """The paper counts what eight P100 could do in that time, which no GPU reaches."""
    config = make_config(ModelConfig, PRESETS[name], {})
    counted = training_flops(config, 25, 25) / 25 * 25_000 * steps
    assert 0.2 < counted / published < 0.6


def test_counted_operations_are_those_of_the_matrix_products(monkeypatch):
    """Count the multiply-adds that a forward pass really makes."""
    counted = [0]

    def linear(x, weight, bias=None, **options):
        counted[0] += x.data.size * weight.data.shape[1]
        return real_linear(x, weight, bias, **options)

    def attention(q, k, v, mask=None, *, num_heads, **options):
        batch, queries, _ = q.shape
        keys = k.shape[1]
        counted[0] += batch * queries * keys * (q.shape[2] + v.shape[2])
        return real_attention(q, k, v, mask, num_heads=num_heads, **options)

    real_linear, real_attention = ops.linear, ops.attention
    monkeypatch.setattr(ops, "linear", linear)
    monkeypatch.setattr(ops, "attention", attention)
    model = Transformer(CONFIG)
    source, target = np.full((1, 5), 4), np.full((1, 7), 4)
    model.logits(model(source, target))
    assert training_flops(CONFIG, 5, 7) == pytest.approx(6 * counted[0])
