"""Divide Microsoft's documentation into training, validation and test text.

    python documentation.py msdocs data/docs

The first folder has sentences.en.gz, sentences.de.gz and meta.tsv.gz, whose columns
name the source, the page, and who translated it. Whole pages are kept for validation
and for test. The second folder becomes what `minitransformer split` writes, with the
pairs that people translated or that say nothing of it as training text. Each kind of
validation and test text also has files of its own, such as test-human.en.gz.

machine.en.gz and machine.de.gz are whole sentences of other pages, which machines
translated, in random order, of which `surest.py` chooses.
"""

from __future__ import annotations

import argparse
import random
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
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

SENTENCE = re.compile(r"[A-ZÄÖÜ].*[.!?]")
# A word with a sign, a digit or a capital inside, such as `GetInfo`, is a name.
NAME = re.compile(r"\S*[^\sa-z,]\S*")
# No more than so many sentences begin with the same words.
ALIKE = 3
BEGINNING = 6


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


def varied(pairs: Iterable[Pair]) -> Iterator[Pair]:
    """Yield whole sentences of 5 to 40 words, few of which begin alike."""
    seen = Counter[str]()
    for pair in pairs:
        words = pair[0].split()
        if 5 <= len(words) <= 40 and all(map(SENTENCE.fullmatch, pair)):
            beginning = " ".join(words[:BEGINNING])
            beginning = NAME.sub("X", beginning[0].lower() + beginning[1:])
            seen[beginning] += 1
            if seen[beginning] <= ALIKE:
                yield pair


def write(folder: Path, name: str, pairs: Iterable[Pair]) -> None:
    count = write_pairs(pairs, *(folder / f"{name}.{x}.gz" for x in ("en", "de")))
    print(f"{name}: {count:,} pairs")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("documentation", type=Path, help="the folder of sentences")
    parser.add_argument("output", type=Path, help="a new folder")
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
    for split in ("train", "val", "test"):
        kinds = {kind: pairs[f"{split}-{kind}"] for kind in ("human", "unmarked")}
        if split != "train":
            for kind, own in kinds.items():
                write(args.output, f"{split}-{kind}", own)
        write(args.output, split, [*kinds["human"], *kinds["unmarked"]])
    machine = pairs["train-machine"]
    write(
        args.output, "machine", varied(random.Random(1).sample(machine, len(machine)))
    )


if __name__ == "__main__":
    main()
