"""Ranks: the speed of two against one, and the cost of an all-reduce.

    python benchmarks/ranks.py --data data/multi30k --cache cache

Trains the preset `multi30k` on 1 and 2 MPI ranks of one thread each, in turns, and
compares tokens a second. It then times the all-reduce of vectors over R = 2, 4 and 8
ranks and fits the cost of a ring to each:
seconds = latency * 2 (R - 1) + bytes * 2 (R - 1) / R / bandwidth.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from harness import medians, ratio, report

from minitransformer.backends.devices import connect_ranks
from minitransformer.training.distributed import find_mpiexec

TRAIN = Path(__file__).resolve().parents[1] / "train.py"
SIZES = (1_000, 100_000, 1_000_000, 4_000_000, 16_000_000)


def tokens_per_second(args: argparse.Namespace, ranks: int) -> dict[str, float]:
    """Return the training speed; the first report is left out."""
    with tempfile.TemporaryDirectory() as folder:
        # A run of three reports.
        every = max(args.steps // 3, 1)
        command = [
            *(sys.executable, str(TRAIN), "--config", "multi30k"),
            *("--data", str(args.data.absolute()), "--source", "en", "--target", "de"),
            *("--cache", str(args.cache.absolute()), "--run", "run"),
            *("--threads", "1", "--ranks", str(ranks), "--steps", str(3 * every)),
            *("--log-every", str(every), "--validate-every", "1000000"),
            *("--validate-bleu", "0", "--average", "1"),
        ]
        subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
        speeds = [
            line["source_tokens_per_second"] + line["target_tokens_per_second"]
            for line in map(json.loads, lines)
            if "loss" in line
        ]
        return {"tokens_per_second": statistics.median(speeds[1:])}


def time_all_reduces() -> None:
    """Run on every rank; rank 0 prints the seconds of an all-reduce by vector size."""
    ranks = connect_ranks("cpu")
    medians_by_size = {}
    for size in SIZES:
        vector = np.ones(size, np.float32)
        seconds = []
        for _ in range(12):
            ranks.all_reduce_numbers([0.0])  # all have come this far
            started = time.perf_counter()
            ranks.start_all_reduce(vector)()
            seconds.append(time.perf_counter() - started)
        medians_by_size[size] = statistics.median(seconds[2:])
    if ranks.rank == 0:
        print(json.dumps(medians_by_size))


def all_reduce_seconds(ranks: int) -> dict[str, float]:
    command = [
        find_mpiexec(),
        "-n",
        str(ranks),
        sys.executable,
        __file__,
        "--all-reduces",
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


def fitted(ranks: int, seconds: dict[str, float]) -> dict[str, float]:
    """Fit latency and bandwidth by least squares of the relative error."""
    steps = 2 * (ranks - 1)
    rows = [
        (steps / taken, 4 * int(size) * steps / ranks / taken)
        for size, taken in seconds.items()
    ]
    solution, *_ = np.linalg.lstsq(np.array(rows), np.ones(len(rows)), rcond=None)
    latency, per_byte = solution
    return {"latency_seconds": latency, "bytes_per_second": 1 / per_byte}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, help="folder of train.en, train.de, ...")
    parser.add_argument("--cache", type=Path, default=Path("cache"))
    parser.add_argument("--steps", type=int, default=30, help="a run (default 30)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--all-reduces", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.all_reduces:
        time_all_reduces()
        return
    # Training on one rank and on two, in turns.
    values: dict[str, object] = {}
    if args.data:
        one: list[dict[str, float]] = []
        two: list[dict[str, float]] = []
        for number in range(args.rounds):
            for ranks, results in ((1, one), (2, two)):
                print(f"round {number + 1}: {ranks} rank(s)", file=sys.stderr)
                results.append(tokens_per_second(args, ranks))
        values = {
            "one_rank": medians(one),
            "two_ranks": medians(two),
            "speed_of_two_over_one": ratio(two, one, "tokens_per_second"),
        }
    # The all-reduce alone.
    seconds = {ranks: all_reduce_seconds(ranks) for ranks in (2, 4, 8)}
    fits = {ranks: fitted(ranks, by_size) for ranks, by_size in seconds.items()}
    report("ranks", **values, seconds_of_an_all_reduce=seconds, fit=fits)


if __name__ == "__main__":
    main()
