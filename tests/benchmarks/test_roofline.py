"""benchmarks/roofline.py counts what the formula of training's cost says."""

import subprocess
import sys

import pytest

from minitransformer.backends.cuda import device
from minitransformer.training.cost import training_flops
from support.models import tiny_config
from support.scripts import ROOT, with_tests_on_path

SMALL = tiny_config((2, 1), vocab_size=37, d_model=24, d_ff=40, num_heads=3)


@pytest.fixture
def roofline(benchmark, monkeypatch):
    pytest.importorskip("ml_dtypes", reason="no bfloat16 without ml_dtypes")
    monkeypatch.setattr(device, "current", device.current)  # which the benchmark sets
    return benchmark("roofline")


def test_the_operations_counted_are_those_of_the_formula(roofline):
    rows = roofline.count_step(SMALL, 6, 5).rows
    counted = sum(call.operations for calls in rows.values() for call in calls)
    # Attention computes its scores once more in the backward pass, in four layers.
    again = 4 * 2 * 6 * 5 * 5 * 24
    assert counted == 6 * training_flops(SMALL, 5, 5) + again
    assert len(rows["attention_backward_64"]) == 4
    # Both weights of each feed-forward layer, forward and two backward, and the bias.
    assert len(rows["products, feed-forward"]) == 3 * 2 * 3


def test_instructions_may_be_the_limit(roofline):
    """The largest of three times is a call's, and they add up to a row's."""
    card = roofline.Card(tflops=1, terabytes=1, processors=10, gigahertz=1)
    many = roofline.Call(3e12, 2e12, 160e9), roofline.Call(1e12, 5e12, 80e9, 2)
    assert [call.seconds(card) for call in many] == [(3, 2, 4), (1, 5, 4)]
    row = roofline.row_of("products, logits", list(many), card)
    assert (row.calls, row.least, row.limit) == (2, 9000, "instructions")
    assert row.likely == pytest.approx(9000 / roofline.SHARES["products, logits"])
    short, long, several = (
        roofline.count_step(SMALL, 6, length).rows["attention_64"][0].instructions
        for length in (16, 17, 33)
    )
    assert short == 6 * 3 * 4 * roofline.ATTENTION["attention_64"][16]
    assert short < long
    assert several == 4 * long  # two tiles of queries times two of keys


@pytest.mark.slow
def test_the_page_has_the_times_that_are_printed(roofline, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["roofline.py"])
    roofline.main()
    head, *_, step, least, likely = capsys.readouterr().out.splitlines()
    assert head.startswith("base, 896 x (28 + 28) tokens; h100: 790 TFLOP/s, 3.0 TB/s")
    page = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
    row = next(line for line in page.splitlines() if line.startswith("| a step"))
    assert [cell.strip() for cell in row.split("|")[-3:-1]] == step.split()[-2:]
    for line in (least, likely):
        kind, _, rest = line.partition(": ")
        assert rest.split(" a step")[0] in page, kind
    assert float(step.split()[-2]) < 28


def test_what_is_measured_is_what_is_counted(stand_in, roofline, monkeypatch):
    """Row by row, and each row takes some time of the whole."""
    for name, value in {"STEPS": 2, "CALLS": 50, "PRODUCTS": 1, "SIZE": 8}.items():
        monkeypatch.setattr(roofline, name, value)
    counter, times = roofline.measure_step(SMALL, 6, 5)
    counted = roofline.count_step(SMALL, 6, 5).rows
    assert counter.rows.keys() == counted.keys()
    for name, calls in counted.items():
        found = counter.rows[name]
        assert len(found) == len(calls), name
        for call, expected in zip(found, calls, strict=True):
            assert call[1:] == expected[1:], name
            # Partial sums are as many as the GPU has multiprocessors, or fewer.
            assert 0 < call.moved <= expected.moved, name
    assert times.keys() == {*counted, "a step"}
    assert min(times.values()) > 0
    assert sum(times[name] for name in counted) < times["a step"]
    card = roofline.Card(tflops=1, terabytes=1)
    head, *lines, least, likely, rate = roofline.table(counter, card, 1.0, times)
    assert head.endswith("ms at least  ms likely  ms measured   share")
    assert {line[:24].strip() for line in lines} == {*times, "between launches"}
    measured = [float(line.split()[-2]) for line in lines]
    assert abs(sum(measured[:-1]) - measured[-1]) < 0.01 * len(measured)
    starts = [line.partition(":")[0] for line in (least, likely, rate)]
    assert starts == ["at least", "likely", "measured"]


def test_measuring_without_a_gpu_is_refused_in_one_line():
    script = ROOT / "benchmarks" / "roofline.py"
    command = [sys.executable, str(script), "--measure"]
    environ = with_tests_on_path() | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, env=environ)
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert line.startswith("roofline.py: error: device cuda")
