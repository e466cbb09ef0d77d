"""Pictures of the metrics of runs, which need matplotlib (extra `plot`)."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from minitransformer.cli import Parser, exit_code, printable
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
AXES = {"steps": "updates", "tokens": "source and target tokens", "minutes": "minutes"}

# On dark pages, browsers draw white on black, not black on white, in the same hues.
DARK = b"@media (prefers-color-scheme: dark) "
DARK += b"{svg {filter: invert(0.9) hue-rotate(180deg)}}"


def read_metrics(run: RunDirectory) -> list[dict[str, Any]]:
    """Read the finite numbers in metrics.jsonl, and the `tokens` up to each line.

    Raises: ValueError as `RunDirectory.read_metrics`.
    """
    records = []
    tokens = 0.0
    for line in run.read_metrics():
        record = {k: v for k, v in line.items() if is_finite_number(v)}
        tokens += record.get("source_tokens", 0) + record.get("target_tokens", 0)
        records.append({**record, "tokens": tokens})
    return records


def is_finite_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e300


def series(
    records: Sequence[dict[str, Any]], name: str, against: str
) -> tuple[list[float], list[float]]:
    """Return the x and y of each point of one metric. `against` is one of `AXES`."""
    # The field of the horizontal axis, and only lines that have both.
    key = {"steps": "step", "minutes": "seconds"}.get(against, against)
    points = [record for record in records if name in record and key in record]
    unit = 60 if against == "minutes" else 1
    return [point[key] / unit for point in points], [point[name] for point in points]


def draw(
    runs: Sequence[RunDirectory], what: Sequence[str], against: str, output: Path
) -> None:
    """Write PNG or SVG with a panel for each quantity, all runs in each."""
    # The name of each run, and its metrics.
    records = [(printable(run.path.resolve().name), read_metrics(run)) for run in runs]
    need = "plots need matplotlib"
    figure_module = import_extra("matplotlib.figure", "plot", need)
    # Panels in two columns; the last may stay empty.
    columns = 1 if len(what) == 1 else 2
    rows = math.ceil(len(what) / columns)
    figure = figure_module.Figure(figsize=(6.4 * columns, 3.4 * rows))
    panels = figure.subplots(rows, columns, squeeze=False).flat
    for panel in panels[len(what) :]:
        panel.set_visible(False)
    for panel, quantity in zip(panels, what, strict=False):
        title, metrics = QUANTITIES[quantity]
        # A line for each metric of each run, in the run's colour.
        for number, (run, lines) in enumerate(records):
            for metric, words in metrics.items():
                xs, ys = series(lines, metric, against)
                if xs:
                    panel.plot(
                        xs,
                        ys,
                        label=run + words,
                        color=f"C{number % 10}",
                        **_line_style(metric, alone=len(metrics) == 1),
                    )
        panel.set_title(title, fontsize=10)
        panel.set_xlabel(AXES[against], fontsize=9)
        _finish(panel)
    figure.tight_layout()
    write_picture(figure, output, dpi=150)


def _finish(panel: Any) -> None:
    """Draw the grid and the legend of a panel, or say that it is empty."""
    panel.tick_params(labelsize=8)
    panel.grid(alpha=0.25)
    panel.spines[["top", "right"]].set_visible(False)
    panel.set_xlim(left=0)
    if panel.has_data():
        lines = list(panel.lines)
        names = [line.get_label() for line in lines]  # also those with _ first
        for text in panel.legend(lines, names, fontsize=8, frameon=False).texts:
            text.set_parse_math(False)
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


def _line_style(name: str, alone: bool) -> dict[str, Any]:
    """Draw validation thick with points, training thin, and target tokens dashed."""
    if name.startswith("validation"):
        return {"marker": "o", "markersize": 2.5, "linewidth": 1.4}
    dashes = "--" if name.startswith("target") else "-"
    return {"linewidth": 1.0, "alpha": 1.0 if alone else 0.6, "linestyle": dashes}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(
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
    args = parser.parse_args(arguments)
    runs = [RunDirectory(path) for path in args.run]

    def work() -> None:
        if args.output.suffix not in (".png", ".svg"):
            raise UsageError(f"--output: expected .png or .svg, got {args.output}")
        check_output(args.output, args, kind=args.output.suffix)
        draw(runs, args.what, args.against, args.output)
        print(args.output)

    return exit_code(parser.prog, work)
