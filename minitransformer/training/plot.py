"""Plot what runs have measured: as pictures, in the terminal, or for TensorBoard.

PNG and SVG need matplotlib (extra `plot`), event files need tensorboardX (extra
`tensorboard`); the terminal needs neither.
"""

from __future__ import annotations

import importlib
import itertools
import json
import math
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from minitransformer.runs.run_directory import RunDirectory
from minitransformer.settings.options import Parser, UsageError, exit_code, positive

Series = tuple[list[float], list[float]]

# What can be plotted: the title with its unit, and the names in metrics.jsonl, of
# which those of training are drawn thin and those of validation thick.
QUANTITIES: dict[str, tuple[str, tuple[str, ...]]] = {
    "loss": ("loss (nats a token)", ("loss", "validation_loss")),
    "bleu": ("validation BLEU", ("validation_bleu",)),
    "learning-rate": ("learning rate", ("learning_rate",)),
    "tokens-per-second": (
        "tokens a second, source and target",
        ("source_tokens_per_second", "target_tokens_per_second"),
    ),
    "gradient-norm": ("gradient norm", ("gradient_norm",)),
}
AXES = {"steps": "updates", "tokens": "source and target tokens", "minutes": "minutes"}

BLOCKS = " ▁▂▃▄▅▆▇█"


def read_metrics(run: RunDirectory) -> list[dict[str, float]]:
    """The lines of metrics.jsonl, each with the tokens learned from until then.

    Raises: ValueError if there is none.
    """
    if not run.metrics.is_file():
        raise ValueError(f"expected a run directory, found no {run.metrics}")
    records, tokens, seconds = [], 0.0, 0.0
    for line in run.metrics.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except ValueError:  # a line that is being written
            continue
        speeds = QUANTITIES["tokens-per-second"][1]
        if "loss" in record:
            passed = max(record["seconds"] - seconds, 0.0)
            tokens += passed * sum(record[name] for name in speeds)
            seconds = record["seconds"]
        records.append({**record, "tokens": tokens})
    return records


def series(records: Sequence[dict[str, float]], name: str, against: str) -> Series:
    """The points of one quantity. `against` is one of `AXES`."""
    xs, ys = [], []
    for record in records:
        if name in record and ("seconds" in record or against != "minutes"):
            x = record["seconds"] / 60 if against == "minutes" else None
            key = "step" if against == "steps" else "tokens"
            xs.append(record[key] if x is None else x)
            ys.append(record[name])
    return xs, ys


def draw(
    runs: Sequence[RunDirectory], what: Sequence[str], against: str, output: Path
) -> None:
    """Draw the quantities below each other, all runs in each, into PNG or SVG."""
    records = {run: read_metrics(run) for run in runs}
    pyplot = _pyplot("plots need matplotlib", " (or --live)")
    columns = 1 if len(what) == 1 else 2
    rows = math.ceil(len(what) / columns)
    size = (6.4 * columns, 3.4 * rows)
    figure, axes = pyplot.subplots(rows, columns, figsize=size, squeeze=False)
    panels = list(axes.flat)
    for panel in panels[len(what) :]:
        panel.set_visible(False)
    for panel, quantity in zip(panels, what, strict=False):
        title, names = QUANTITIES[quantity]
        for number, run in enumerate(runs):
            for name in names:
                xs, ys = series(records[run], name, against)
                style = {"color": f"C{number % 10}", **_style(name, len(names))}
                label = run.path.name + _suffix(name, names)
                if xs:
                    panel.plot(xs, ys, label=label, **style)
        panel.set_title(title, fontsize=10)
        panel.set_xlabel(AXES[against], fontsize=9)
        panel.tick_params(labelsize=8)
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
        panel.set_xlim(left=0)
        if panel.has_data():
            panel.legend(fontsize=8, frameon=False)
        else:
            panel.text(0.5, 0.5, "nothing measured", transform=panel.transAxes)
    figure.tight_layout()
    figure.savefig(output, dpi=150)
    pyplot.close(figure)


def _pyplot(need: str, instead: str) -> Any:
    """Matplotlib's pyplot, drawing into files. Raises: RuntimeError if missing."""
    try:
        importlib.import_module("matplotlib").use("Agg")
        return importlib.import_module("matplotlib.pyplot")
    except ImportError as error:
        raise RuntimeError(
            f"{need}: pip install 'minitransformer[plot]'{instead}"
        ) from error


def _style(name: str, of: int) -> dict[str, Any]:
    if name.startswith("validation"):
        return {"marker": "o", "markersize": 2.5, "linewidth": 1.4}
    dashed = name.startswith("target")
    return {
        "linewidth": 1.0,
        "alpha": 0.6 if of > 1 else 1.0,
        "linestyle": "--" if dashed else "-",
    }


def _suffix(name: str, names: Sequence[str]) -> str:
    if len(names) == 1:
        return ""
    return {"loss": ", training", "validation_loss": ", validation"}.get(
        name, ", " + name.split("_")[0]
    )


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw values as blocks of eight heights, averaged into at most `width` columns."""
    if not values:
        return ""
    width = min(width, len(values))
    edges = [round(i * len(values) / width) for i in range(width + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    scale = 7 / (high - low) if high > low else 0.0
    return "".join(BLOCKS[1 + round((mean - low) * scale)] for mean in means)


def screen(runs: Sequence[RunDirectory], what: Sequence[str], width: int) -> str:
    """Lines for a terminal: each quantity, its last value, its course."""
    lines = []
    for run in runs:
        records = read_metrics(run)
        last = records[-1] if records else {"step": 0, "seconds": 0.0}
        seconds = last.get("seconds", 0.0)
        lines.append(f"{run.path}  step {last['step']:,.0f}  {seconds:,.0f} s")
        for quantity in what:
            for name in QUANTITIES[quantity][1]:
                _, ys = series(records, name, "steps")
                if ys:
                    label = name.replace("_", " ")
                    shown = sparkline(ys, max(width - 40, 10))
                    lines.append(f"  {label:<26}{ys[-1]:>11,.5g} {shown}")
    return "\n".join(lines)


def watch(runs: Sequence[RunDirectory], what: Sequence[str], every: float) -> None:
    """Redraw the screen until Ctrl-C; once, where the output is not a terminal."""
    while True:
        width = shutil.get_terminal_size((100, 24)).columns
        if not sys.stdout.isatty():
            print(screen(runs, what, width))
            return
        print("\x1b[2J\x1b[H" + screen(runs, what, width), flush=True)
        time.sleep(every)


def write_events(runs: Sequence[RunDirectory], folder: Path) -> None:
    """Write TensorBoard event files, a folder for each run."""
    try:
        writer = importlib.import_module("tensorboardX").SummaryWriter
    except ImportError as error:
        raise RuntimeError(
            "event files need tensorboardX: pip install 'minitransformer[tensorboard]'"
        ) from error
    for run in runs:
        with writer(str(folder / run.path.name)) as events:
            for record in read_metrics(run):
                for name, value in _numbers(record):
                    events.add_scalar(name, value, int(record["step"]))


def _numbers(record: dict[str, float]) -> Iterator[tuple[str, float]]:
    for name, value in record.items():
        if name not in ("step", "tokens") and isinstance(value, int | float):
            yield name, value


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(
        "minitransformer plot",
        "Plot loss, BLEU, learning rate and speed of one run or several.",
        (
            "minitransformer plot runs/a runs/b --output runs.svg",
            "minitransformer plot runs/a --against minutes --what loss bleu",
            "minitransformer plot runs/a --live",
            "minitransformer plot runs/a --tensorboard events",
        ),
        "Pictures need matplotlib, event files need tensorboardX; --live needs neither.",
    )
    parser.add_argument("run", nargs="+", type=Path, help="run directories")
    name = "PNG or SVG by its ending (default metrics.png)"
    parser.add_argument("--output", "-o", type=Path, metavar="FILE", help=name)
    chosen = "quantities (default all)"
    parser.add_argument(
        "--what", nargs="+", choices=QUANTITIES, default=list(QUANTITIES), help=chosen
    )
    axis = "horizontal axis (default steps)"
    parser.add_argument("--against", choices=AXES, default="steps", help=axis)
    live = "draw in the terminal, every N seconds (default 5), until Ctrl-C"
    parser.add_argument(
        "--live", nargs="?", const=5, type=positive, metavar="N", help=live
    )
    events = "write TensorBoard event files to this folder instead"
    parser.add_argument("--tensorboard", type=Path, metavar="DIR", help=events)
    args = parser.parse_args(arguments)
    runs = [RunDirectory(path) for path in args.run]

    def work() -> None:
        if args.live and (args.output or args.tensorboard):
            raise UsageError("--live does not go with --output or --tensorboard")
        if args.live:
            watch(runs, args.what, args.live)
        elif args.tensorboard:
            write_events(runs, args.tensorboard)
        else:
            output = args.output or Path("metrics.png")
            if output.suffix not in (".png", ".svg"):
                raise UsageError(f"--output: expected .png or .svg, got {output}")
            draw(runs, args.what, args.against, output)
            print(output)

    return exit_code(parser.prog, work)
