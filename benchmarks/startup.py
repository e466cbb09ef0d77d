"""Time from starting translate.py to its translation, beside `import numpy` alone.

python benchmarks/startup.py "Where is the station?"

Every round starts both in new processes. One start that is not counted comes first, so
that Python has compiled the modules, as it has after an installation.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from harness import ratio, report

SCRIPT = Path(__file__).parents[1] / "translate.py"


def start(command: Sequence[str]) -> tuple[float, str]:
    """Run Python with these arguments, and return its seconds and its output."""
    environment = dict(os.environ)
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, *command],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env=environment,
    )
    return time.perf_counter() - started, done.stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("sentence")
    parser.add_argument(
        "--model", default="en-de", help="a run, a file or a shipped model's name"
    )
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    # One start that is not counted, then both in turns.
    translate = [str(SCRIPT), "--model", args.model, args.sentence]
    _, translation = start(translate)
    ours = []
    numpy = []
    for _ in range(args.rounds):
        ours.append({"seconds": start(translate)[0]})
        numpy.append({"seconds": start(["-c", "import numpy"])[0]})
    seconds = [result["seconds"] for result in ours]
    report(
        "startup",
        translation=translation,
        seconds=round(statistics.median(seconds), 3),
        least=round(min(seconds), 3),
        greatest=round(max(seconds), 3),
        numpy_alone=round(statistics.median(r["seconds"] for r in numpy), 3),
        over_numpy_alone=ratio(ours, numpy, "seconds"),
    )


if __name__ == "__main__":
    main()
