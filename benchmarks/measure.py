"""Measure the speeds of docs/results.md, on a machine that does nothing else.

    python benchmarks/measure.py --data data/multi30k --run runs/m30k
    python benchmarks/measure.py --only train-d256 startup
    python benchmarks/measure.py --tables

Each benchmark writes a JSON file into docs/figures, in a folder named after the
processor. These files become the tables of docs/results.md, between markers such as
`<!-- table training -->` and `<!-- end -->`. --tables does only that, and `python
benchmarks/charts.py` draws the charts. A benchmark does not begin while other processes
are at work, and its figures are not kept if others used more than 5% of the processors
meanwhile. Everything takes two to three hours on two cores, most of them while PyTorch
compiles. With --modes the compiled modes can be left out; the best mode is then the
best of the measured ones.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from harness import processor
from train_speed import PYTORCH

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/results.md"
FIGURES = ROOT / "docs/figures"

# The greatest share of the processors that others may use while something is measured.
OTHER_WORK = 0.05

BENCHMARKS = {
    "train-d512": "train_speed.py --shape d512 --steps 5",
    "train-d256": "train_speed.py --shape d256",
    "train-d128": "train_speed.py --shape d128",
    "train-multi30k": "train_speed.py --shape multi30k --data {data} --steps 20",
    "decode-multi30k": (
        "decode_speed.py --run {run} --input {data}/test_2016_flickr.en.gz "
        "--ctranslate2-tokens 512"
    ),
    "decode-multi30k-random": (
        "decode_speed.py --shape multi30k --ctranslate2-tokens 512"
    ),
    "decode-base": "decode_speed.py --shape base",
    "startup": 'startup.py "Where is the station?"',
}

Figures: TypeAlias = dict[str, Any]
Row: TypeAlias = Sequence[str]


def busy_seconds() -> float:
    """Return the time that all processors together have worked. Units: seconds"""
    with open("/proc/stat") as file:
        times = [int(ticks) for ticks in file.readline().split()[1:8]]
    return (sum(times) - times[3] - times[4]) / os.sysconf("SC_CLK_TCK")


def own_seconds() -> float:
    """Return the time that this process and its children have worked. Units: seconds"""
    used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


class Watch:
    """Measures the share of the processors that other processes use."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.before = busy_seconds() - own_seconds()

    def other_work(self) -> float:
        possible = (time.monotonic() - self.started) * (os.cpu_count() or 1)
        return max(0.0, busy_seconds() - own_seconds() - self.before) / possible


def measure(name: str, command: str, folder: Path) -> None:
    """Run a benchmark and keep its figures. Ends the program if others are at work."""
    # Look for other work first.
    watch = Watch()
    time.sleep(5)
    require_idle(name, watch.other_work())
    print(f"{name}: {command}", file=sys.stderr)
    script, *arguments = shlex.split(command)
    watch = Watch()
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name(script)), *arguments],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    # Keep its figures, unless others worked at the same time.
    share = watch.other_work()
    require_idle(name, share)
    figures = {
        "command": f"python benchmarks/{command}",
        **json.loads(done.stdout),
        "date": time.strftime("%Y-%m-%d"),
        "other_work": round(share, 3),
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(figures, indent=2) + "\n")


def require_idle(name: str, share: float) -> None:
    if share > OTHER_WORK:
        sys.exit(
            f"{name}: expected an otherwise idle machine, other processes used "
            f"{share:.0%} of the processors"
        )


# The tables

KINDS = ("float32", "bf16", "int8")


def spread(ratio: Figures) -> str:
    return f"{ratio['median']:.2f} ({ratio['least']:.2f} to {ratio['greatest']:.2f})"


def number(value: float) -> str:
    return f"{value:,.0f}"


def machine(measured: Figures) -> str:
    """Return the processor's name with its fastest instructions for products."""
    name, _, instructions = measured["processor"].partition(" (")
    name = name.replace("(R)", "").replace(" Processor", "")
    for instruction, words in (
        ("amx", "AMX"),
        ("avx512_bf16", "AVX-512 BF16"),
        ("avx512", "AVX-512"),
        ("avx2", "AVX2"),
    ):
        if instruction in instructions:
            return f"{name}, {words}"
    return str(name)


def speed(measured: Figures, side: str) -> float:
    return float(measured[side]["tokens_per_second"])


def fastest(measured: Figures, sides: Iterable[str]) -> str:
    return max(
        (x for x in sides if x in measured), key=lambda side: speed(measured, side)
    )


def best_kind(measured: Figures) -> tuple[str, str]:
    """Return this engine's fastest precision, and the side that has its figures."""
    sides = {"ours" if kind == "float32" else f"ours-{kind}": kind for kind in KINDS}
    side = fastest(measured, sides)
    return sides[side], side


def training_ratios(measured: Figures) -> dict[str, Figures]:
    """Return this engine's speed over each other toolkit's, the best mode of both."""
    kind, _ = best_kind(measured)
    prefix = "" if kind == "float32" else f"{kind}_"
    ratios = {"PyTorch": measured[f"{prefix}speed_over_best_of_pytorch"]}
    if "marian" in measured:
        ratios["Marian"] = measured[f"{prefix}speed_over_marian"]
    return ratios


def decoding_ratios(measured: Figures) -> dict[str, Figures]:
    kind, _ = best_kind(measured)
    over = measured["speed_over" if kind == "float32" else f"{kind}_speed_over"]
    others = {"PyTorch": "pytorch", "CTranslate2": "ctranslate2"}
    return {
        name: over[fastest(measured, [side for side in over if side.startswith(stem)])]
        for name, stem in others.items()
    }


def training_row(measured: Figures) -> Row:
    kind, side = best_kind(measured)
    best = measured["best_of_pytorch"]
    ratios = training_ratios(measured)
    plain = measured["speed_over_pytorch"].get("pytorch")
    return (
        machine(measured),
        measured["shape"],
        f"{number(speed(measured, side))} ({kind})",
        f"{number(speed(measured, best))} ({mode_name(best)})",
        spread(ratios["PyTorch"]),
        spread(plain) if plain else "",
        spread(ratios["Marian"]) if "Marian" in ratios else "",
        f"{number(measured[side]['peak_memory_mb'])}, "
        f"{number(measured[best]['peak_memory_mb'])}",
        measured["date"],
    )


def mode_name(side: str) -> str:
    """Return in words how PyTorch computed, such as "compiled, bf16"."""
    parts = side.split("-")[1:]
    if "bf16" not in parts:
        parts.append("float32")
    return ", ".join(parts)


def decoding_row(measured: Figures) -> Row:
    kind, side = best_kind(measured)
    over = measured["speed_over"]
    other = fastest(measured, [x for x in over if x.startswith("ctranslate2")])
    ratios = decoding_ratios(measured)
    return (
        machine(measured),
        measured["name"].partition("-")[2],
        f"{number(speed(measured, side))} ({kind})",
        f"{number(speed(measured, other))} ({other.partition('-')[2]})",
        spread(ratios["CTranslate2"]),
        spread(over["ctranslate2-float32"]),
        spread(ratios["PyTorch"]),
        f"{number(measured[side]['peak_memory_mb'])}, "
        f"{number(measured[other]['peak_memory_mb'])}",
        measured["date"],
    )


def startup_row(measured: Figures) -> Row:
    return (
        machine(measured),
        f"{measured['seconds']:.2f} s",
        f"{measured['least']:.2f} to {measured['greatest']:.2f} s",
        f"{measured['numpy_alone']:.2f} s",
        measured["date"],
    )


# For each table, the prefix of its figures, its head, and the function for a row.
TABLES: dict[str, tuple[str, Row, Callable[[Figures], Row]]] = {
    "training": (
        "train-",
        (
            "processor",
            "shape",
            "here",
            "PyTorch",
            "over PyTorch",
            "both float32",
            "over Marian",
            "MB: here, PyTorch",
            "day",
        ),
        training_row,
    ),
    "decoding": (
        "decode-",
        (
            "processor",
            "model",
            "here",
            "CTranslate2",
            "over CTranslate2",
            "both float32",
            "over PyTorch",
            "MB: here, CTranslate2",
            "day",
        ),
        decoding_row,
    ),
    "startup": (
        "startup",
        ("processor", "median", "range", "`import numpy`", "day"),
        startup_row,
    ),
}


def read_figures(prefix: str, figures: Path = FIGURES) -> list[Figures]:
    """Return what benchmarks of one kind have measured, in the order of BENCHMARKS."""
    return [
        {"name": name, **json.loads(path.read_text(encoding="utf-8"))}
        for folder in sorted(path for path in figures.glob("*") if path.is_dir())
        for name in BENCHMARKS
        if name.startswith(prefix) and (path := folder / f"{name}.json").exists()
    ]


def table(name: str, figures: Path = FIGURES) -> str:
    """Return a table of one kind, without columns that nothing was measured for."""
    prefix, head, row = TABLES[name]
    rows = [row(measured) for measured in read_figures(prefix, figures)]
    if not rows:
        return "Not measured yet."
    # Leave out columns without figures, such as those of Marian.
    kept = [i for i in range(len(head)) if any(line[i] for line in rows)]
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line[i] for i in kept)} |" for line in lines)


def with_tables(page: str, figures: Path = FIGURES) -> str:
    """Return the text of the page with new tables between its markers."""

    def renewed(match: re.Match[str]) -> str:
        made = table(match[1], figures)
        return f"<!-- table {match[1]} -->\n\n{made}\n\n<!-- end -->"

    return re.sub(r"<!-- table (\S+) -->.*?<!-- end -->", renewed, page, flags=re.S)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add("--data", type=Path, default=Path("data/multi30k"), help="Multi30k's folder")
    add("--run", type=Path, help="a run that was trained on it")
    add("--only", nargs="+", choices=BENCHMARKS, help="(default all)")
    modes = "of PyTorch's modes in training, those to measure (default all)"
    add("--modes", nargs="+", choices=PYTORCH, help=modes)
    add("--tables", action="store_true", help="make the tables, measure nothing")
    args = parser.parse_args()
    # Measure, each benchmark with the text and the run that it needs.
    chosen = [] if args.tables else args.only or list(BENCHMARKS)
    for name in chosen:
        if "{run}" in BENCHMARKS[name] and not args.run:
            parser.error(f"{name} needs --run")
    slug = re.sub(r"\W+", "-", processor()).strip("-").lower()
    for name in chosen:
        command = BENCHMARKS[name].format(data=args.data, run=args.run)
        if args.modes and name.startswith("train-"):
            command += f" --modes {' '.join(args.modes)}"
        measure(name, command, FIGURES / slug)
    # Make the tables of the page.
    text = PAGE.read_text(encoding="utf-8")
    if "<!-- table " not in text:
        sys.exit(f"{PAGE}: expected <!-- table training --> or another, found none")
    PAGE.write_text(with_tables(text), encoding="utf-8")


if __name__ == "__main__":
    main()
