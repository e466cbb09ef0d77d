"""benchmarks/measure.py makes the tables of docs/results.md from JSON files."""

import importlib
import json

import pytest

from support.scripts import ROOT

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
def measure(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("measure")


def test_tables_are_made_between_the_markers(measure, tmp_path):
    (tmp_path / "p").mkdir()
    (tmp_path / "p/train-d256.json").write_text(json.dumps(TRAINING))
    page = "before\n<!-- table training -->old\n<!-- end -->\nafter <!-- end -->"
    renewed = measure.with_tables(page, tmp_path)
    start, _, rest = renewed.partition("<!-- table training -->")
    made, _, after = rest.partition("<!-- end -->")
    assert (start, after) == ("before\n", "\nafter <!-- end -->")
    assert "P (avx2), openblas, 2026-01-02:" in made
    row = "| d256 | float32 | 1,234 | compiled, bf16 | 5,678 | 1.50 (1.25 to 1.75) |"
    assert f"{row} 100 | 100 |" in made
    assert measure.with_tables(renewed, tmp_path) == renewed
    modes = measure.table("modes", [tmp_path / "p"])
    assert modes.endswith("| d256 | 1,234 |  |  | 5,678 | 1.50 |")  # two not measured
    assert "Not measured yet." in measure.with_tables(page, tmp_path / "none")


def test_decoding_shows_what_each_format_gains(measure, tmp_path):
    found = {
        **{key: TRAINING[key] for key in ("processor", "numpy_products", "date")},
        **dict.fromkeys(("ours", "ours-bf16", "ctranslate2-int8"), SIDE),
        "speed_over": {"ours-bf16": RATIO, "ctranslate2-int8": RATIO},
        "bf16_speed_over": {"ctranslate2-int8": {**RATIO, "median": 1.7}},
        "int8_speed_over": {"ctranslate2-int8": {**RATIO, "median": 1.6}},
        "same": {"ours-bf16": 0.5, "ctranslate2-int8": 0.25},
    }
    (tmp_path / "decode-base.json").write_text(json.dumps(found))
    rows = measure.table("decoding", [tmp_path]).splitlines()[-3:]
    spread = "(1.25 to 1.75)"
    assert rows == [
        "| base | ours | 1,234 |  |  |  |  |  | 100 |",
        f"| base | ours-bf16 | 1,234 | 1.50 {spread} |  |  |  | 50.0% | 100 |",
        f"| base | ctranslate2-int8 | 1,234 | 1.50 {spread} |  | 1.70 {spread} "
        f"| 1.60 {spread} | 25.0% | 100 |",
    ]


def test_the_page_has_the_tables_of_the_figures(measure):
    page = measure.PAGE.read_text(encoding="utf-8")
    assert measure.with_tables(page) == page


def test_other_work_is_noticed(measure, monkeypatch):
    clock = iter([0.0, 10.0])
    busy, own = iter([100.0, 112.0]), iter([50.0, 60.0])
    monkeypatch.setattr(measure.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(measure, "busy_seconds", lambda: next(busy))
    monkeypatch.setattr(measure, "own_seconds", lambda: next(own))
    monkeypatch.setattr(measure.os, "cpu_count", lambda: 2)
    share = measure.Watch().other_work()
    assert share == pytest.approx(2 / 20)
    with pytest.raises(SystemExit, match=r"expected an otherwise idle machine, .* 10%"):
        measure.require_idle("train-d256", share)
    measure.require_idle("train-d256", 0.05)
