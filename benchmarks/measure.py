"""Measure the speeds of docs/results.md, on a machine that does nothing else.

    python benchmarks/measure.py --data data/multi30k --run runs/m30k
    python benchmarks/measure.py --only train-d256 startup
    python benchmarks/measure.py --tables

Each benchmark writes a JSON file into docs/figures, in a folder named after the
processor. From all these files, the tables between the markers of docs/results.md, such
as `<!-- table training -->` and `<!-- end -->`, are made; --tables does only that. A
benchmark does not begin while other processes are at work, and its figures are not kept
if others used more than 5% of the processors meanwhile. Everything takes two to three
hours on two cores, most of which PyTorch compiles: --modes may leave that out, and the
best mode is then the best of those measured.
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
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from harness import processor
from train_speed import PRECISIONS, PYTORCH

from minitransformer.devices import ONEDNN

ROOT = Path(__file__).resolve().parents[1]
PAGE, FIGURES = ROOT / "docs/results.md", ROOT / "docs/figures"

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
    """Return for how long all processors together have worked, idle time left out."""
    with open("/proc/stat") as file:
        times = [int(ticks) for ticks in file.readline().split()[1:8]]
    return (sum(times) - times[3] - times[4]) / os.sysconf("SC_CLK_TCK")


def own_seconds() -> float:
    """Return for how long this process and those that it started have worked."""
    used = (
        resource.getrusage(x) for x in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    return sum(u.ru_utime + u.ru_stime for u in used)


class Watch:
    """Says what share of the processors other processes have used since it began."""

    def __init__(self) -> None:
        self.began = time.monotonic(), busy_seconds() - own_seconds()

    def other_work(self) -> float:
        started, others = self.began
        possible = (time.monotonic() - started) * (os.cpu_count() or 1)
        return max(0.0, busy_seconds() - own_seconds() - others) / possible


def measure(name: str, command: str, folder: Path) -> None:
    """Run a benchmark and keep its figures. Ends the program if others are at work."""
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
    share = watch.other_work()
    require_idle(name, share)
    figures = {"command": f"python benchmarks/{command}", **json.loads(done.stdout)}
    figures |= {"date": time.strftime("%Y-%m-%d"), "other_work": round(share, 3)}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(figures, indent=2) + "\n")


def require_idle(name: str, share: float) -> None:
    if share > OTHER_WORK:
        sys.exit(
            f"{name}: expected an otherwise idle machine, other processes used "
            f"{share:.0%} of the processors"
        )


# The tables


def spread(ratio: Figures) -> str:
    return f"{ratio['median']:.2f} ({ratio['least']:.2f} to {ratio['greatest']:.2f})"


def number(value: float) -> str:
    return f"{value:,.0f}"


def training_rows(name: str, found: Figures) -> Iterator[Row]:
    best = found["best_of_pytorch"]
    sides = {"float32": ("ours", "")}
    sides |= {kind: (f"ours-{kind}", f"{kind}_") for kind in PRECISIONS}
    for kind, (side, prefix) in sides.items():
        if side in found:
            over = found[f"{prefix}speed_over_best_of_pytorch"]
            yield (
                found["shape"],
                kind,
                number(found[side]["tokens_per_second"]),
                mode_name(best),
                number(found[best]["tokens_per_second"]),
                spread(over),
                number(found[side]["peak_memory_mb"]),
                number(found[best]["peak_memory_mb"]),
            )


def mode_name(side: str) -> str:
    """Return in words how PyTorch computed, such as "compiled, bf16"."""
    parts = side.split("-")[1:]
    if "bf16" not in parts:
        parts.append("float32")
    return ", ".join(parts)


def mode_rows(name: str, found: Figures) -> Iterator[Row]:
    yield (
        found["shape"],
        *(number(found[x]["tokens_per_second"]) if x in found else "" for x in PYTORCH),
        f"{found['share_of_matrix_products']['median']:.2f}",
    )


def decoding_rows(name: str, found: Figures) -> Iterator[Row]:
    model = name.partition("-")[2]
    over = found["speed_over"]
    others = [found.get(f"{kind}_speed_over", {}) for kind in ONEDNN]
    for side in ("ours", *over):
        yield (
            model,
            side,
            number(found[side]["tokens_per_second"]),
            spread(over[side]) if side in over else "",
            *(spread(ratios[side]) if side in ratios else "" for ratios in others),
            f"{found['same'][side]:.1%}" if side in over else "",
            number(found[side]["peak_memory_mb"]),
        )


def startup_rows(name: str, found: Figures) -> Iterator[Row]:
    yield (
        f"{found['seconds']:.2f} s",
        f"{found['least']:.2f} to {found['greatest']:.2f} s",
        f"{found['numpy_alone']:.2f} s",
    )


# Of each table: which figures it shows, its head and its rows.
TABLES: dict[str, tuple[str, Row, Callable[[str, Figures], Iterator[Row]]]] = {
    "training": (
        "train-",
        (
            "shape",
            "this engine in",
            "tokens/s",
            "PyTorch's best mode",
            "tokens/s",
            "ratio",
            "MB",
            "PyTorch's MB",
        ),
        training_rows,
    ),
    "modes": (
        "train-",
        ("shape", "float32", "bf16", "compiled", "compiled, bf16", "products"),
        mode_rows,
    ),
    "decoding": (
        "decode-",
        (
            "model",
            "decoder",
            "tokens/s",
            "float32 over it",
            *(f"{precision} over it" for precision in ONEDNN),
            "same",
            "MB",
        ),
        decoding_rows,
    ),
    "startup": ("startup", ("median", "range", "`import numpy`"), startup_rows),
}


def table(name: str, folders: Sequence[Path]) -> str:
    """Return a table of one kind, with a paragraph and its rows for each processor."""
    prefix, head, rows = TABLES[name]
    parts = []
    for folder in folders:
        found = {
            path.stem: json.loads(path.read_text())
            for key in BENCHMARKS
            if key.startswith(prefix) and (path := folder / f"{key}.json").exists()
        }
        if not found:
            continue
        first, days = next(iter(found.values())), {x["date"] for x in found.values()}
        when = " to ".join(sorted({min(days), max(days)}))
        machine = f"{first['processor']}, {first['numpy_products']}, {when}:"
        lines = [head, ["---"] * len(head)]
        lines += [row for key, figures in found.items() for row in rows(key, figures)]
        body = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        parts.append(f"{machine}\n\n{body}")
    return "\n\n".join(parts) or "Not measured yet."


def with_tables(page: str, figures: Path = FIGURES) -> str:
    """Return the text of the page with new tables between its markers."""
    folders = sorted(path for path in figures.glob("*") if path.is_dir())

    def renewed(match: re.Match[str]) -> str:
        name = match[1]
        return f"<!-- table {name} -->\n\n{table(name, folders)}\n\n<!-- end -->"

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
    text = PAGE.read_text(encoding="utf-8")
    if "<!-- table " not in text:
        sys.exit(f"{PAGE}: expected <!-- table training --> or another, found none")
    PAGE.write_text(with_tables(text), encoding="utf-8")


if __name__ == "__main__":
    main()
