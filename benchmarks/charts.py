"""Draw the charts of docs/results.md from the figures in docs/figures.

    python benchmarks/charts.py

Speeds come from measure.py. `table3.json` has the mean and the standard deviation of
the figures that table3.py prints.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

from measure import FIGURES, decoding_ratios, machine, read_figures, training_ratios
from table3 import PAPER

from minitransformer.commands.plot import write_picture

PICTURES = FIGURES.parent / "img"
COLORS = {"PyTorch": "#d1603d", "Marian": "#5b8e3e", "CTranslate2": "#3b6fb6"}
HERE, THERE = "#3b6fb6", "#d1603d"
# Text stays text, which can be searched and is drawn in a font that the reader has.
STYLE = {
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.size": 9,
    "svg.fonttype": "none",
    "svg.hashsalt": "charts",
}


def speed(pyplot: Any) -> Any:
    """Speed here over other toolkits', a group of bars for each processor and shape."""
    kinds = {
        "training": ("train-", training_ratios),
        "decoding": ("decode-", decoding_ratios),
    }
    # A plot each for training and decoding, as high as it has groups.
    figures = {title: read_figures(prefix) for title, (prefix, _) in kinds.items()}
    sizes = [len(groups) for groups in figures.values()]
    figure, plots = pyplot.subplots(
        len(kinds), 1, figsize=(5.4, 0.46 * sum(sizes) + 1.6), height_ratios=sizes
    )
    for plot, (title, (_, ratios)) in zip(plots, kinds.items(), strict=True):
        labels = []
        for place, group in enumerate(figures[title]):
            labels.append(f"{machine(group)}\n{group['name'].partition('-')[2]}")
            draw_bars(plot, place, ratios(group))
        plot.axvline(1, color="black", linewidth=0.8, linestyle=":")
        plot.set_yticks(range(len(labels)), labels, fontsize=8)
        plot.invert_yaxis()
        plot.set_xlim(0, 4)
        plot.set_title(f"{title}, times as fast as", loc="left")
        plot.legend(frameon=False, loc="lower right", bbox_to_anchor=(1.02, 0.93))
    return figure


def draw_bars(plot: Any, place: int, ratios: dict[str, dict[str, float]]) -> None:
    """Draw a bar with a range for each toolkit; those at the first place have names."""
    height = 0.8 / len(ratios)
    for number, (name, ratio) in enumerate(ratios.items()):
        y = place + (number - (len(ratios) - 1) / 2) * height
        median = ratio["median"]
        label = name if place == 0 else None
        plot.barh(y, median, height, color=COLORS[name], label=label)
        plot.plot([ratio["least"], ratio["greatest"]], [y, y], "k", lw=0.8)
        end = ratio["greatest"] + 0.04
        plot.text(end, y, f"{median:.2f}", va="center", fontsize=8)


def published(row: str) -> dict[str, float]:
    _, perplexity, bleu, _ = PAPER[row]
    return {"perplexity": perplexity, "bleu": bleu}


def against_base(key: str, value: float, base: float) -> float:
    """Return perplexity in percent of base's, or BLEU less base's."""
    return 100 * value / base if key == "perplexity" else value - base


def table3(pyplot: Any) -> Any:
    """Differences of each row of Table 3 from base, here and in the paper."""
    # A panel each for perplexity and BLEU, a line for each row.
    rows = json.loads((FIGURES / "table3.json").read_text(encoding="utf-8"))["rows"]
    base = rows.pop("base")
    figure, plots = pyplot.subplots(1, 2, figsize=(6.4, 3.4), sharey=True)
    panels = [
        ("perplexity", "perplexity, % of base's"),
        ("bleu", "BLEU, less base's"),
    ]
    for plot, (key, title) in zip(plots, panels, strict=True):
        for place, (row, result) in enumerate(rows.items()):
            mean, *deviation = result[key]
            here = against_base(key, mean, base[key][0])
            paper = against_base(key, published(row)[key], published("base")[key])
            # Here and in the paper, joined by a grey line.
            plot.plot([here, paper], [place, place], color="0.75", zorder=0)
            labels = ("here", "paper") if place == 0 else (None, None)
            plot.plot(here, place, "o", color=HERE, label=labels[0])
            plot.plot(paper, place, "s", color=THERE, mfc="none", label=labels[1])
            text = f"{mean:.2f}" + "".join(f" ± {x:.2f}" for x in deviation)
            plot.text(here, place - 0.18, text, fontsize=7, ha="center")
        level = 100 if key == "perplexity" else 0
        plot.axvline(level, color="black", linewidth=0.8, linestyle=":")
        mean, deviation = base[key]
        heading = f"{title}\n({mean:.2f} ± {deviation:.2f})"
        plot.set_title(heading, loc="left", fontsize=9)
        plot.margins(x=0.2)
    plots[0].set_yticks(range(len(rows)), [PAPER[row][0] for row in rows])
    plots[0].set_ylim(len(rows) - 0.5, -0.7)
    plots[1].legend(frameon=False, loc="lower left", fontsize=8)
    return figure


CHARTS = {"speed": speed, "table3": table3}


def draw(folder: Path = PICTURES) -> None:
    """Write every chart into a folder as SVG."""
    importlib.import_module("matplotlib").use("Agg")
    pyplot = importlib.import_module("matplotlib.pyplot")
    with pyplot.rc_context(STYLE):
        for name, chart in CHARTS.items():
            figure = chart(pyplot)
            figure.tight_layout()
            write_picture(figure, folder / f"{name}.svg", dpi=150)
            pyplot.close(figure)


if __name__ == "__main__":
    draw()
