"""benchmarks/roofline.py counts what the formula of training's cost says."""

import importlib

import pytest

from minitransformer.cuda import device
from minitransformer.settings.config import ModelConfig
from minitransformer.training.cost import training_flops
from support.scripts import ROOT


def test_the_operations_counted_are_those_of_the_formula(monkeypatch):
    pytest.importorskip("ml_dtypes", reason="no bfloat16 without ml_dtypes")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.setattr(device, "current", device.current)  # which the benchmark sets
    config = ModelConfig(
        vocab_size=37, d_model=24, d_ff=40, num_heads=3, encoder_layers=2,
        decoder_layers=1,
    )  # fmt: skip
    rows = importlib.import_module("roofline").count_step(config, 6, 5).rows
    counted = sum(row[2] for name, row in rows.items() if name != "sort_tokens")
    # Attention computes its scores once more in the backward pass, in four layers.
    again = 4 * 2 * 6 * 5 * 5 * 24
    assert counted == 6 * training_flops(config, 5, 5) + again
    assert rows["attention_backward_64"][0] == 4
