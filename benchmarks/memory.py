"""Peak resident memory of training, this engine and PyTorch, same shapes.

    python benchmarks/memory.py

Runs the sides of train_speed.py for a few steps each, in processes of their own.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from harness import alternate, medians, ratio, report

SIDES = ("ours", "pytorch")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--shapes", nargs="+", default=["d128", "d256", "d512"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    script = str(Path(__file__).with_name("train_speed.py"))
    shapes = {}
    for shape in args.shapes:
        arguments = ["--shape", shape, "--steps", str(args.steps)]
        found = alternate(script, SIDES, arguments, args.rounds)
        shapes[shape] = {
            **{f"{s}_mb": medians(r)["peak_memory_mb"] for s, r in found.items()},
            "memory_over_pytorch": ratio(*found.values(), "peak_memory_mb"),
        }
    report("memory", shapes=shapes)


if __name__ == "__main__":
    main()
