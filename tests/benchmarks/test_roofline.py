"""benchmarks/roofline.py counts what the formula of training's cost says."""

import argparse
import importlib
import subprocess
import sys

import pytest

from minitransformer.cuda import device
from minitransformer.settings.config import ModelConfig
from minitransformer.training.cost import training_flops
from support.scripts import ROOT, with_tests_on_path

SMALL = ModelConfig(
    vocab_size=37, d_model=24, d_ff=40, num_heads=3, encoder_layers=2, decoder_layers=1
)


@pytest.fixture
def roofline(monkeypatch):
    pytest.importorskip("ml_dtypes", reason="no bfloat16 without ml_dtypes")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.setattr(device, "current", device.current)  # which the benchmark sets
    return importlib.import_module("roofline")


def test_the_operations_counted_are_those_of_the_formula(roofline):
    rows = roofline.count_step(SMALL, 6, 5).rows
    counted = sum(row[2] for name, row in rows.items() if name != "sort_tokens")
    # Attention computes its scores once more in the backward pass, in four layers.
    again = 4 * 2 * 6 * 5 * 5 * 24
    assert counted == 6 * training_flops(SMALL, 5, 5) + again
    assert rows["attention_backward_64"][0] == 4


def test_what_is_measured_is_what_is_counted(stand_in, roofline, monkeypatch):
    """Row by row, and each row takes some time of the whole."""
    for name, value in {"STEPS": 2, "CALLS": 50, "PRODUCTS": 1, "SIZE": 8}.items():
        monkeypatch.setattr(roofline, name, value)
    counter, times = roofline.measure_step(SMALL, 6, 5)
    counted = roofline.count_step(SMALL, 6, 5).rows
    assert counter.rows.keys() == counted.keys()
    for name, (calls, moved, operations) in counted.items():
        assert counter.rows[name][0] == calls, name
        assert counter.rows[name][2] == operations, name
        # Partial sums are as many as the GPU has multiprocessors, or fewer.
        assert 0 < counter.rows[name][1] <= moved, name
    assert times.keys() == {*counted, "a step"}
    assert min(times.values()) > 0
    assert sum(times[name] for name in counted) < times["a step"]
    args = argparse.Namespace(tflops=1.0, terabytes=1.0, launch=1.0)
    head, *lines, rate = roofline.table(counter, args, times)
    assert head.endswith("ms at least  ms measured   share")
    assert {line[:24].strip() for line in lines} == {*times, "between launches"}
    measured = [float(line.split()[-2]) for line in lines]
    assert abs(sum(measured[:-1]) - measured[-1]) < 0.01 * len(measured)
    assert rate.startswith("measured ")


def test_measuring_without_a_gpu_is_refused_in_one_line():
    script = ROOT / "benchmarks" / "roofline.py"
    command = [sys.executable, str(script), "--measure"]
    environ = with_tests_on_path() | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, env=environ)
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert line.startswith("roofline.py: error: device cuda")
