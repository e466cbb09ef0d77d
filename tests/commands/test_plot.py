"""Plots of runs: what is read from metrics.jsonl, and what is drawn."""

import json
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from minitransformer.commands import plot
from minitransformer.runs.run_directory import RunDirectory
from support.browser import needs_browser, open_tab

IMAGES = Path(__file__).parents[2] / "docs" / "img"

TRAINING = {
    "learning_rate": 0.1,
    "gradient_norm": 2.0,
    "source_tokens_per_second": 100,
    "target_tokens_per_second": 50,
    "source_tokens": 6000,
    "target_tokens": 3000.0,
}
LINES = [
    {"step": 10, "loss": 5.0, "seconds": 60.0, **TRAINING},
    {"step": 10, "validation_loss": 4.5, "validation_bleu": 1.0, "seconds": 60.0},
    {"step": 20, "loss": 3.0, "seconds": 180.0, **TRAINING},
    {"step": 20, "test_bleu": 9.0, "exact": 0.5},
]


@pytest.fixture
def run(tmp_path):
    run = RunDirectory(tmp_path / "first")
    run.path.mkdir()
    text = "".join(json.dumps(line) + "\n" for line in LINES)
    run.metrics.write_text(text + '{"step": 30, "los')  # being written
    return run


def test_series_against_steps_and_minutes(run):
    lines = list(run.read_metrics())
    assert plot.series(lines, "loss", "steps") == [(10, 5), (20, 3)]
    assert plot.series(lines, "loss", "minutes") == [(1, 5), (3, 3)]
    assert plot.series(lines, "validation_bleu", "minutes") == [(1, 1)]
    assert plot.series(lines, "nothing", "steps") == []


def test_lines_that_are_no_metrics_are_left_out(run):
    hostile = ["5", '{"a": 1}', '{"step": "x"}', '{"step": 12, "loss": "x"}']
    hostile += ["[" * 9**5, '{"step": 14, "loss": null, "seconds": 190.0}']
    hostile += ['{"step": 15, "loss": NaN, "seconds": 1e999}']
    hostile += [f'{{"step": 16, "loss": 1{"0" * 400}}}', '{"step": 17, "loss": 4}']
    text = run.metrics.read_text()
    broken = "\n".join([text, *hostile, ""])
    run.metrics.write_text(broken, encoding="utf-8", errors="surrogateescape")
    points = plot.series(run.read_metrics(), "loss", "steps")
    assert points == [(10, 5), (20, 3), (17, 4)]


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="needs matplotlib")
@pytest.mark.parametrize("against", plot.AXES)
def test_pictures_are_drawn(run, tmp_path, capsys, against):
    flags = [str(run.path), str(run.path), "--against", against]
    for name in ("all.png", "all.svg"):
        assert plot.main([*flags, "-o", str(tmp_path / name)]) == 0
    assert (tmp_path / "all.png").read_bytes().startswith(b"\x89PNG")
    svg = (tmp_path / "all.svg").read_text()
    for title, _ in plot.QUANTITIES.values():
        assert title in svg
    assert plot.AXES[against][0] in svg
    assert "(prefers-color-scheme: dark) {svg {filter: invert" in svg


@needs_browser
@pytest.mark.skipif(find_spec("matplotlib") is None, reason="needs matplotlib")
def test_plots_are_dark_on_dark_pages(run, tmp_path):
    from matplotlib import image

    assert plot.main([str(run.path), "-o", str(tmp_path / "plot.svg")]) == 0
    for path in (tmp_path / "plot.svg", IMAGES / "multi30k.svg", IMAGES / "table1.svg"):
        for scheme, paper in (("light", 1.0), ("dark", 0.1)):
            (tmp_path / "page.html").write_text(f'<img src="{path}">')
            with open_tab(color_scheme=scheme) as tab:
                tab.goto(f"file://{tmp_path / 'page.html'}")
                tab.locator("img").screenshot(path=tmp_path / "shown.png")
            shown = image.imread(tmp_path / "shown.png")[..., :3]
            assert np.allclose(np.median(shown, axis=(0, 1)), paper, atol=0.01)
            assert np.abs(shown - paper).max() > 0.7  # text can be read
