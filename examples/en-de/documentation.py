"""Divide Microsoft's documentation into training, validation and test text.

    python documentation.py msdocs data/docs
    python documentation.py msdocs data/docs --machine 100000

The first folder has sentences.en.gz, sentences.de.gz and meta.tsv.gz, whose columns
name the source, the page, and who translated it. Whole pages are kept for validation
and for test. The second folder becomes what `minitransformer split` writes. Its
training text has the pairs that people translated or that say nothing of it, and some
that machines translated. Each kind of validation and test text also has files of its
own, such as test-human.en.gz.
"""

from __future__ import annotations

import argparse
import random
from collections import defaultdict
from pathlib import Path
from zlib import crc32

from minitransformer.text.bilingual import Pair
from minitransformer.text.lines import read_lines
from minitransformer.text.pairs import write_pairs

KINDS = {"HT": "human", "-": "unmarked", "MT": "machine"}
# These pages say that people translated them, but read like a machine's.
DOUBTED = "win32"
# Of so many pages, one is kept for validation and one for test.
PAGES = 60


def read_pairs(folder: Path) -> dict[str, list[Pair]]:
    """Return the pairs of each split and kind, such as "test-human"."""
    lines = (
        read_lines(folder / name)
        for name in ("sentences.en.gz", "sentences.de.gz", "meta.tsv.gz")
    )
    pairs = defaultdict[str, list[Pair]](list)
    for english, german, row in zip(*lines, strict=True):
        source, page, mark, _ = row.split("\t")
        kind = "machine" if source == DOUBTED else KINDS[mark]
        number = crc32(f"{source}/{page}".encode()) % PAGES
        split = ("val", "test")[number] if number < 2 else "train"
        if kind != "machine" or split == "train":
            pairs[f"{split}-{kind}"].append((english, german))
    return pairs


def write(folder: Path, name: str, pairs: list[Pair]) -> None:
    count = write_pairs(pairs, *(folder / f"{name}.{x}.gz" for x in ("en", "de")))
    print(f"{name}: {count:,} pairs")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("documentation", type=Path, help="the folder of sentences")
    parser.add_argument("output", type=Path, help="a new folder")
    parser.add_argument(
        "--machine", type=int, default=0, help="pairs that machines translated"
    )
    args = parser.parse_args()
    args.output.mkdir(parents=True)
    pairs = read_pairs(args.documentation)
    # Training text has no sentence of the pages that are kept.
    kept = {
        side
        for name, own in pairs.items()
        if not name.startswith("train")
        for pair in own
        for side in pair
    }
    for name in ("train-human", "train-unmarked", "train-machine"):
        pairs[name] = [pair for pair in pairs[name] if kept.isdisjoint(pair)]
    machine = random.Random(1).sample(pairs.pop("train-machine"), args.machine)
    for split in ("train", "val", "test"):
        both = {kind: pairs[f"{split}-{kind}"] for kind in ("human", "unmarked")}
        if split != "train":
            for kind, own in both.items():
                write(args.output, f"{split}-{kind}", own)
        more = machine if split == "train" else []
        write(args.output, split, [*both["human"], *both["unmarked"], *more])


if __name__ == "__main__":
    main()
