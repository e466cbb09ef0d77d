"""Pictures of the metrics of runs, which need matplotlib (extra `plot`)."""

from __future__ import annotations

import argparse
import importlib
import io
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from minitransformer.cli import printable
from minitransformer.commands import Command
from minitransformer.runs.outputs import check_output
from minitransformer.runs.run_directory import RunDirectory
from minitransformer.settings.extras import import_extra
from minitransformer.settings.options import UsageError
from minitransformer.system.files import write_bytes

# The quantities: a title with the unit, and the metrics in metrics.jsonl that are drawn
# together, each with its words in the legend.
QUANTITIES: dict[str, tuple[str, dict[str, str]]] = {
    "loss": (
        "loss (nats a token)",
        {"loss": ", training", "validation_loss": ", validation"},
    ),
    "bleu": ("validation BLEU", {"validation_bleu": ""}),
    "learning-rate": ("learning rate", {"learning_rate": ""}),
    "tokens-per-second": (
        "tokens a second, source and target",
        {
            "source_tokens_per_second": ", source",
            "target_tokens_per_second": ", target",
        },
    ),
    "gradient-norm": ("gradient norm", {"gradient_norm": ""}),
}
# The horizontal axes: words, a field of metrics.jsonl, and how many of it are one.
AXES = {"steps": ("updates", "step", 1), "minutes": ("minutes", "seconds", 60)}

STYLE = {
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 10,
    "font.size": 8,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "lines.linewidth": 1,
    "lines.markersize": 4,
    "text.parse_math": False,
}
# On dark pages, browsers draw white on black, not black on white, in the same hues.
DARK = b"@media (prefers-color-scheme: dark) "
DARK += b"{svg {filter: invert(0.9) hue-rotate(180deg)}}"


def series(
    lines: Iterable[dict[str, Any]], name: str, against: str
) -> list[tuple[float, float]]:
    """Return the x and y of each point of one metric. `against` is one of `AXES`."""
    _, field, unit = AXES[against]
    return [
        (line[field] / unit, line[name])
        for line in lines
        if is_finite_number(line.get(name)) and is_finite_number(line.get(field))
    ]


def is_finite_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e300


def draw(
    runs: Sequence[RunDirectory], what: Sequence[str], against: str, output: Path
) -> None:
    """Write PNG or SVG with a panel for each quantity, all runs in each."""
    metrics = {run: list(run.read_metrics()) for run in runs}
    matplotlib = import_extra("matplotlib", "plot", "plots need matplotlib")
    figure_module = importlib.import_module("matplotlib.figure")
    # Panels in two columns; the last may stay empty.
    columns = 1 if len(what) == 1 else 2
    rows = math.ceil(len(what) / columns)
    with matplotlib.rc_context(STYLE):
        figure = figure_module.Figure(figsize=(6.4 * columns, 3.4 * rows))
        panels = figure.subplots(rows, columns, squeeze=False).flat
        for panel in panels[len(what) :]:
            panel.set_visible(False)
        for panel, quantity in zip(panels, what, strict=False):
            panel.set_xlabel(AXES[against][0])
            _draw_panel(panel, quantity, metrics, against)
        figure.tight_layout()
        write_picture(figure, output, dpi=150)


def _draw_panel(
    panel: Any,
    quantity: str,
    metrics: dict[RunDirectory, list[dict[str, Any]]],
    against: str,
) -> None:
    """Draw a line for each metric of each run, in the run's colour."""
    title, names = QUANTITIES[quantity]
    panel.set_title(title)
    labels = []
    for number, (run, lines) in enumerate(metrics.items()):
        for metric, words in names.items():
            if points := series(lines, metric, against):
                panel.plot(
                    *zip(*points, strict=True),
                    color=f"C{number % 10}",
                    linestyle="--" if metric.startswith("target") else "-",
                    marker="." if metric.startswith("validation") else "",
                )
                labels.append(printable(run.path.resolve().name) + words)
    panel.set_xlim(left=0)
    if labels:
        panel.legend(panel.lines, labels)  # also those with _ first
    else:
        panel.text(0.5, 0.5, "nothing measured", transform=panel.transAxes)


def write_picture(figure: Any, path: Path, dpi: int) -> None:
    """Write a figure as PNG or SVG, by the end of the file's name.

    A browser shows an SVG dark on dark pages. Units: dpi dots an inch
    """
    drawn = io.BytesIO()
    undated = {"Date": None} if path.suffix == ".svg" else None
    figure.savefig(drawn, dpi=dpi, format=path.suffix[1:], metadata=undated)
    data = drawn.getvalue()
    if path.suffix == ".svg":
        data = data.replace(b"</style>", DARK + b"</style>", 1)
    write_bytes(path, data, replace=True)


def plot(args: argparse.Namespace) -> None:
    """Write a picture of runs, and name its file."""
    if args.output.suffix not in (".png", ".svg"):
        raise UsageError(f"--output: expected .png or .svg, got {args.output}")
    check_output(args.output, args, kind=args.output.suffix)
    runs = [RunDirectory(path) for path in args.run]
    draw(runs, args.what, args.against, args.output)
    print(args.output)


def main(arguments: Sequence[str]) -> int:
    parser = Command(
        "minitransformer plot",
        "Plot loss, BLEU, learning rate and speed of one run or several.",
        (
            "minitransformer plot runs/a runs/b --output runs.svg",
            "minitransformer plot runs/a --against minutes --what loss bleu",
        ),
        "It needs matplotlib.",
    )
    add = parser.add_argument
    add("run", nargs="+", type=Path, help="run directories")
    name = "PNG or SVG by its ending (default metrics.png)"
    default = Path("metrics.png")
    add("--output", "-o", type=Path, default=default, metavar="FILE", help=name)
    names = list(QUANTITIES)
    every = f"any of {', '.join(names)} (default all)"
    add("--what", nargs="+", choices=names, default=names, metavar="NAME", help=every)
    axis = "horizontal axis (default steps)"
    add("--against", choices=AXES, default="steps", help=axis)
    return parser.run(arguments, plot)
