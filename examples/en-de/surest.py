"""Write the half of translated pairs of which a model is surest, in both directions.

    python surest.py machine.en machine.de forward backward data/surest

The files of scores are what `translate.py --score` writes of the pairs from English to
German and back. The folder gets the text for training. The measure is the mean
log-probability of a token, summed over both directions, as in dual cross-entropy
filtering (Junczys-Dowmunt, 2018). The pairs stay in their order.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from pathlib import Path

from minitransformer.text.lines import read_lines
from minitransformer.text.pairs import write_pairs


def mean_scores(path: Path) -> Iterator[float]:
    """Yield the mean log-probability, in nats, of the tokens of each line."""
    for line in read_lines(path):
        score, tokens = line.split("\t")[:2]
        yield float(score) / float(tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("texts", nargs=2, type=Path, help="English and German")
    parser.add_argument("scores", nargs=2, type=Path, help="forward and backward")
    parser.add_argument("output", type=Path, help="a new folder")
    args = parser.parse_args()
    sums = list(map(sum, zip(*map(mean_scores, args.scores), strict=True)))
    least = statistics.median(sums)
    pairs = zip(*map(read_lines, args.texts), strict=True)
    sure = (x for x, score in zip(pairs, sums, strict=True) if score >= least)
    args.output.mkdir()
    write_pairs(sure, *(args.output / f"train.{x}.gz" for x in ("en", "de")))


if __name__ == "__main__":
    main()
