"""benchmarks/measure.py makes the tables of docs/results.md from JSON files."""

import json
import re

import pytest

RATIO = {"median": 1.5, "least": 1.25, "greatest": 1.75}
SIDE = {"tokens_per_second": 1234.4, "peak_memory_mb": 99.6}
TRAINING = {
    "processor": "P (avx2)",
    "numpy_products": "openblas",
    "date": "2026-01-02",
    "shape": "d256",
    "ours": SIDE,
    "pytorch": SIDE,
    "pytorch-compiled-bf16": {**SIDE, "tokens_per_second": 5678},
    "best_of_pytorch": "pytorch-compiled-bf16",
    "speed_over_pytorch": {"pytorch": RATIO, "pytorch-compiled-bf16": RATIO},
    "speed_over_best_of_pytorch": RATIO,
    "share_of_matrix_products": RATIO,
}


@pytest.fixture
def measure(benchmark):
    return benchmark("measure")


def test_tables_are_made_between_the_markers(measure, tmp_path):
    (tmp_path / "p").mkdir()
    (tmp_path / "p/train-d256.json").write_text(json.dumps(TRAINING))
    page = "before\n<!-- table training -->old\n<!-- end -->\nafter <!-- end -->"
    renewed = measure.with_tables(page, tmp_path)
    start, _, rest = renewed.partition("<!-- table training -->")
    made, _, after = rest.partition("<!-- end -->")
    assert (start, after) == ("before\n", "\nafter <!-- end -->")
    assert made.strip().splitlines()[-1] == (
        "| P, AVX2 | d256 | 1,234 (float32) | 5,678 (compiled, bf16) "
        "| 1.50 (1.25 to 1.75) | 1.50 (1.25 to 1.75) | 100, 100 | 2026-01-02 |"
    )
    assert "Marian" not in made
    assert measure.with_tables(renewed, tmp_path) == renewed
    assert "Not measured yet." in measure.with_tables(page, tmp_path / "none")


def test_the_page_has_the_tables_of_the_figures(measure):
    page = measure.PAGE.read_text(encoding="utf-8")
    assert measure.with_tables(page) == page


def test_the_charts_have_the_figures_of_today(measure, benchmark, tmp_path):
    pytest.importorskip("matplotlib")
    charts = benchmark("charts")
    charts.draw(tmp_path)
    for name in charts.CHARTS:
        drawn = (tmp_path / f"{name}.svg").read_text(encoding="utf-8")
        kept = (charts.PICTURES / f"{name}.svg").read_text(encoding="utf-8")
        labels = [re.findall(r">([^<>]+)</text>", text) for text in (drawn, kept)]
        assert labels[0] == labels[1], "run: python benchmarks/charts.py"
    speeds = (charts.PICTURES / "speed.svg").read_text(encoding="utf-8")
    for found in measure.read_figures("train-"):
        assert f">{measure.training_ratios(found)['PyTorch']['median']:.2f}<" in speeds
