"""Table 3: train variations of the base model on one corpus, and print the table.

    python benchmarks/table3.py --data data/multi30k --source en --target de \\
        --steps 3000 --divide-width 4 --divide-depth 2 --vocab-size 4000

Every row is a preset (`minitransformer/settings/presets.py`); widths and numbers of
layers are divided by the same numbers in all rows. As in the paper, big is trained for
three times as many steps as the other rows (300,000 and 100,000), and checkpoints are
not averaged: perplexity (per word piece, without label smoothing) and BLEU are
those of the last checkpoint on the validation text. All further flags are passed to
train.py for every row. A complete run in --runs is read, and an interrupted one
continues. The table goes to standard error.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness import report

from minitransformer.runs.run_directory import RunDirectory
from minitransformer.settings.config import ModelConfig
from minitransformer.settings.options import make_config
from minitransformer.settings.presets import PRESETS

TRAIN = Path(__file__).resolve().parents[1] / "train.py"

# Table 3 of the paper: what changes from base; perplexity and BLEU on newstest2013, and
# parameters (10^6) where given.
PAPER: dict[str, tuple[str, float, float, int | None]] = {
    "base": ("base", 4.92, 25.8, 65),
    "base-a-h1": ("(A) h 1, d_k = d_v = 512", 5.29, 24.9, None),
    "base-a-h4": ("(A) h 4, d_k = d_v = 128", 5.00, 25.5, None),
    "base-a-h16": ("(A) h 16, d_k = d_v = 32", 4.91, 25.8, None),
    "base-a-h32": ("(A) h 32, d_k = d_v = 16", 5.01, 25.4, None),
    "base-b-dk16": ("(B) d_k 16", 5.16, 25.1, 58),
    "base-b-dk32": ("(B) d_k 32", 5.01, 25.4, 60),
    "base-c-n2": ("(C) N 2", 6.11, 23.7, 36),
    "base-c-n4": ("(C) N 4", 5.19, 25.3, 50),
    "base-c-n8": ("(C) N 8", 4.88, 25.5, 80),
    "base-c-d256": ("(C) d_model 256, d_k = d_v = 32", 5.75, 24.5, 28),
    "base-c-d1024": ("(C) d_model 1024, d_k = d_v = 128", 4.66, 26.0, 168),
    "base-c-ff1024": ("(C) d_ff 1024", 5.12, 25.4, 53),
    "base-c-ff4096": ("(C) d_ff 4096", 4.75, 26.2, 90),
    "base-d-dropout0": ("(D) P_drop 0.0", 5.77, 24.6, None),
    "base-d-dropout2": ("(D) P_drop 0.2", 4.95, 25.5, None),
    "base-d-smoothing0": ("(D) e_ls 0.0", 4.67, 25.3, None),
    "base-d-smoothing2": ("(D) e_ls 0.2", 5.47, 25.7, None),
    "base-e-learned": ("(E) learned positions", 4.92, 25.7, None),
    "big": ("big", 4.33, 26.4, 213),
}

WIDTHS = ("d_model", "d_ff", "d_k", "d_v")
DEPTHS = ("encoder_layers", "decoder_layers")


@dataclass(frozen=True)
class Result:
    """One run's last validation. Units: perplexity a word piece, BLEU 0 to 100"""

    perplexity: float
    bleu: float
    seconds: float


def scaled(row: str, width: int, depth: int) -> dict[str, Any]:
    """Return the settings of a row with divided widths and numbers of layers.

    Raises: SystemExit if a division leaves a remainder.
    """
    settings = dict(PRESETS[row])
    # d_k and d_v have no value where they follow from d_model.
    shape = make_config(ModelConfig, settings, {})
    divisors = {**dict.fromkeys(WIDTHS, width), **dict.fromkeys(DEPTHS, depth)}
    for name, divisor in divisors.items():
        if (value := getattr(shape, name)) is not None:
            if value % divisor:
                sys.exit(f"{row}: expected {name} {value} to be divisible by {divisor}")
            settings[name] = value // divisor
    return settings


def steps_of(row: str, steps: int) -> int:
    """Return the updates of a row if most have `steps`; big has three times as many."""
    return 3 * steps if row == "big" else steps


def train(args: argparse.Namespace, row: str, seed: int, flags: Sequence[str]) -> Path:
    """Train one row with one seed, or continue where its run stopped."""
    run = args.runs / f"{row}-seed{seed}"
    steps = str(steps_of(row, args.steps))
    # Continue a run that has begun, or begin one with the settings of the row.
    command = [sys.executable, str(TRAIN), "--cache", str(args.cache)]
    if (run / "config.json").exists():
        command += ["--resume", str(run)]
    else:
        args.runs.mkdir(parents=True, exist_ok=True)
        settings = args.runs / f"{row}.json"
        whole = scaled(row, args.divide_width, args.divide_depth)
        settings.write_text(json.dumps(whole, indent=2) + "\n")
        command += ["--config", str(settings), "--data", str(args.data)]
        command += ["--source", args.source, "--target", args.target]
        command += ["--steps", steps, "--seed", str(seed), "--run", str(run)]
        command += ["--validate-every", steps, "--validate-bleu", "1000000"]
        command += ["--average", "1", "--keep-last", "1", *flags]
    # A complete run ends with a validation.
    if last_validation(run) is None:
        print(" ".join(command), file=sys.stderr)
        if code := subprocess.run(command, stdout=sys.stderr).returncode:
            sys.exit(f"{row}: train.py ended with code {code}")
    return run


def last_validation(run: Path) -> Result | None:
    """Return the validation at the end of a run, or None before that."""
    directory = RunDirectory(run)
    if not directory.metrics.is_file():
        return None
    for line in directory.read_metrics():
        if "validation_bleu" in line:
            return Result(
                perplexity=line["validation_perplexity"],
                bleu=line["validation_bleu"],
                seconds=line["seconds"],
            )
    return None


def spread(values: Sequence[float]) -> str:
    """The mean, and the standard deviation where there are several seeds."""
    mean = f"{statistics.mean(values):.2f}"
    return f"{mean} ± {statistics.stdev(values):.2f}" if len(values) > 1 else mean


def table(results: dict[str, list[Result]], parameters: dict[str, int]) -> str:
    lines = [
        "| row | PPL | BLEU | parameters (10^6) | paper's PPL | BLEU | parameters |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row, seeds in results.items():
        name, perplexity, bleu, millions = PAPER[row]
        cells = [
            name,
            spread([result.perplexity for result in seeds]),
            spread([result.bleu for result in seeds]),
            f"{parameters[row] / 1e6:.2f}",
            f"{perplexity:.2f}",
            f"{bleu:.1f}",
            str(millions or ""),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", type=Path, required=True, help="folder of train.LANG and val.LANG")
    add("--source", default="en", metavar="LANG", help="(default en)")
    add("--target", default="de", metavar="LANG", help="(default de)")
    steps = "updates; the row big has three times as many (default 100,000)"
    add("--steps", type=int, default=100_000, metavar="N", help=steps)
    add("--rows", nargs="+", choices=PAPER, default=list(PAPER), metavar="ROW")
    add("--seeds", nargs="+", type=int, default=[1], metavar="N", help="(default 1)")
    add("--divide-width", type=int, default=1, metavar="N", help="widths (default 1)")
    add("--divide-depth", type=int, default=1, metavar="N", help="layers (default 1)")
    add("--runs", type=Path, default=Path("runs/table3"), help="(default runs/table3)")
    add("--cache", type=Path, default=Path("cache"), help="(default cache)")
    return parser.parse_known_args()


def main() -> None:
    args, flags = parse_arguments()
    # Train every row with every seed, or read its run.
    results: dict[str, list[Result]] = {row: [] for row in args.rows}
    parameters = {}
    for seed in args.seeds:
        for row in args.rows:
            run = train(args, row, seed, flags)
            if (result := last_validation(run)) is None:
                sys.exit(f"{run}: expected a validation with BLEU, found none")
            results[row].append(result)
            parameters[row] = RunDirectory(run).read_config().model.num_parameters
    print(table(results, parameters), file=sys.stderr)
    report(
        "table3",
        steps=args.steps,
        seeds=args.seeds,
        divided={"width": args.divide_width, "depth": args.divide_depth},
        flags=flags,
        rows={
            row: {
                "parameters": parameters[row],
                "runs": [asdict(result) for result in seeds],
                "paper": dict(
                    zip(("perplexity", "bleu", "millions"), PAPER[row][1:], strict=True)
                ),
            }
            for row, seeds in results.items()
        },
    )


if __name__ == "__main__":
    main()
