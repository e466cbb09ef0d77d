"""Time from starting translate.py to its first translation, in a fresh process.

python benchmarks/startup.py --run runs/tiny "The old man sees a dog."
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path

from harness import report


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("sentence")
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    script = Path(__file__).parents[1] / "translate.py"
    command = [sys.executable, str(script), "--model", str(args.run), args.sentence]
    seconds = []
    for _ in range(args.rounds):
        started = time.perf_counter()
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        seconds.append(time.perf_counter() - started)
    report(
        "startup",
        translation=done.stdout.strip(),
        seconds=round(statistics.median(seconds), 3),
        least=round(min(seconds), 3),
        greatest=round(max(seconds), 3),
    )


if __name__ == "__main__":
    main()
