"""Word alignments of a trained run against sentence pairs that were aligned by hand.

python train.py --run runs/tiny
python benchmarks/alignment.py --run runs/tiny
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from harness import report

from minitransformer import load

HAND_ALIGNED = Path(__file__).parents[1] / "tests/translation/hand_aligned.txt"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--run", type=Path, required=True)
    pairs = "lines of `source ||| target ||| 0-0 1-1`"
    parser.add_argument("--pairs", type=Path, default=HAND_ALIGNED, help=pairs)
    args = parser.parse_args()
    translator = load(args.run)
    lines = args.pairs.read_text(encoding="utf-8").splitlines()
    sources, targets, by_hand = zip(*(x.split(" ||| ") for x in lines), strict=True)
    # Count the links, those that are right, and those of people.
    config = replace(translator.decoding, alignment=True)
    scored = translator.score(sources, targets, config)
    right = links = expected = 0
    for (_, _, alignment), text in zip(scored, by_hand, strict=True):
        truth = {tuple(map(int, pair.split("-"))) for pair in text.split()}
        right += len(truth & {*alignment})
        links += len(alignment)
        expected += len(truth)
    report(
        "alignment",
        sentences=len(lines),
        links=links,
        precision=round(right / links, 3),
        recall=round(right / expected, 3),
        error_rate=round(1 - 2 * right / (links + expected), 3),
    )


if __name__ == "__main__":
    main()
