"""Constituency parsing as translation (section 6.3, Table 4): the command `parse`.

Trees become lines of text that a model learns to write, and lines become trees again,
which are scored by their labelled brackets. docs/parsing.md shows all the steps.
"""

from __future__ import annotations

import argparse
import itertools
import operator
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from minitransformer.cli import CommandParser
from minitransformer.commands import Command
from minitransformer.commands.trees import (
    Leaf,
    Span,
    Tree,
    bracket_tree,
    linearise_tree,
    normalise_tree,
    number_words,
    read_trees,
    restore_tree,
    spans,
    words,
)
from minitransformer.settings.options import UsageError
from minitransformer.system.files import make_folder, write_bytes
from minitransformer.text.lines import open_output
from minitransformer.text.pairs import TextPair

# Tags of words that spans leave out, and labels that count as equal, as in the
# parameters of EVALB for comparing parsers (COLLINS.prm).
PUNCTUATION = (",", ":", "``", "''", ".")
SAME_LABELS = {"PRT": "ADVP"}


def linearise(
    folder: Path,
    paths: Sequence[Path],
    splits: Sequence[str],
    labels: Sequence[str] = (),
    with_numbers: bool = False,
) -> None:
    """Write NAME.words, NAME.tree and NAME.mrg of each split (see `divide`).

    The first split gets the constituents of `labels` as well (`with_constituents`).
    With numbers, they stand before the tags in NAME.tree, and before the words in
    NAME.numbered.

    Raises: UsageError as `divide`, before anything is written.
    """
    # Divide the trees; the first split may get their constituents as well.
    trees = (normalise_tree(tree) for path in paths for tree in read_trees(path))
    divided = divide(trees, splits)
    if labels:
        first = next(iter(divided))
        divided[first] = with_constituents(divided[first], labels)
    # Write the trees of each split as words, as sequences and with brackets.
    contents = dict[Path, list[str]]()
    sizes = []
    for name, part in divided.items():
        sentences = [words(tree) for tree in part]
        written = {"words": [" ".join(sentence) for sentence in sentences]}
        if with_numbers:
            written["numbered"] = [number_words(sentence) for sentence in sentences]
        written["tree"] = [linearise_tree(tree, with_numbers) for tree in part]
        written["mrg"] = [bracket_tree(tree) for tree in part]
        contents |= {folder / f"{name}.{end}": lines for end, lines in written.items()}
        count = sum(map(len, sentences))
        sizes.append(f"{name}: {len(part):,} trees, {count:,} words")
    # Nothing is written before all trees are read.
    make_folder(folder)
    for path, lines in contents.items():
        write_bytes(path, "".join(f"{line}\n" for line in lines).encode())
    print("\n".join(sizes))


def divide(trees: Iterator[Tree], splits: Sequence[str]) -> dict[str, list[Tree]]:
    """Divide trees among splits in order: NAME=COUNT, or NAME for all that are left.

    Raises: UsageError if two splits have one name, or if there are too few trees, or
    too many.
    """
    divided: dict[str, list[Tree]] = {}
    for split in splits:
        match = re.fullmatch(r"([^=/]+)(?:=([1-9]\d{0,8}))?", split)
        if not match or match[1] in divided:
            expected = "--split: expected different names, each NAME or NAME=COUNT"
            raise UsageError(f"{expected}, got {split}")
        # Without a count, a split takes all trees that are left.
        count = int(match[2]) if match[2] else None
        part = divided[match[1]] = list(itertools.islice(trees, count))
        if len(part) < (count or 1):
            raise UsageError(f"--split {split}: expected more trees, got {len(part)}")
    if left := sum(1 for _ in trees):
        raise UsageError(f"--split: expected a split for every tree, {left:,} are left")
    return divided


def with_constituents(trees: Sequence[Tree], labels: Sequence[str]) -> list[Tree]:
    """Return the different trees, then their different constituents of these labels.

    Constituents of one word are left out. A model learns the alignment of tags and
    words much sooner from short texts.
    """
    parts = (
        tree[left : right + 1]
        for tree in trees
        for span, left, right in spans(tree)
        if span.label in labels and span.end - span.start > 1
    )
    return list(map(list, dict.fromkeys(map(tuple, itertools.chain(trees, parts)))))


class Score(NamedTuple):
    """Numbers of constituents: of the reference, of the parser, and of both."""

    gold: int = 0
    test: int = 0
    matched: int = 0

    def summary(self) -> dict[str, float]:
        """Return labelled recall, precision and F1. Units: percent"""
        return {
            "labelled recall": 100 * self.matched / max(self.gold, 1),
            "labelled precision": 100 * self.matched / max(self.test, 1),
            "F1": 200 * self.matched / max(self.gold + self.test, 1),
        }


def score(gold: Tree, test: Tree) -> Score:
    """Compare a normalised tree with the reference for the same words (COLLINS.prm).

    Words that the reference tags as punctuation are left out of the spans.
    """
    # The number of words before each word, without punctuation.
    tags = [node.tag for node in gold if isinstance(node, Leaf)]
    counted = (tag not in PUNCTUATION for tag in tags)
    before = list(itertools.accumulate(counted, initial=0))
    # The labelled spans of both trees; one that occurs twice counts twice.
    expected, scored = (
        Counter(
            Span(SAME_LABELS.get(label, label), before[start], before[end])
            for (label, start, end), _, _ in spans(tree)
            if before[start] < before[end]
        )
        for tree in (gold, test)
    )
    return Score(expected.total(), scored.total(), (expected & scored).total())


def score_files(gold: Path, test: Path) -> Score:
    """Score all trees of a file.

    Raises: ValueError if one file has more trees, or two trees have different words.
    """
    total = Score()
    pairs = itertools.zip_longest(read_trees(gold), read_trees(test))
    # Both files have the same trees, but for their brackets.
    for number, (reference, scored) in enumerate(pairs):
        if reference is None or scored is None:
            short, long = (gold, test) if reference is None else (test, gold)
            raise ValueError(
                f"{short}: expected as many trees as in {long}, got {number:,}"
            )
        reference, scored = map(normalise_tree, (reference, scored))
        if words(reference) != words(scored):
            raise ValueError(
                f"{test}, tree {number + 1}: expected the words of the tree in {gold}, "
                "got others"
            )
        total = Score(*map(operator.add, total, score(reference, scored)))
    return total


def run(args: argparse.Namespace) -> None:
    if args.command == "linearise":
        linearise(args.folder, args.trees, args.split, args.parts, args.numbered)
    elif args.command == "restore":
        pairs = TextPair(args.sequences, args.words).lines()
        lines = [bracket_tree(restore_tree(tags, text.split())) for tags, text in pairs]
        with open_output(args.output) as out:
            out.writelines(f"{line}\n" for line in lines)
    else:
        for name, value in score_files(args.gold, args.trees).summary().items():
            print(f"{name:<20}{value:>10.2f}")


def main(arguments: Sequence[str]) -> int:
    parser = Command(
        "minitransformer parse",
        "Turn trees into lines of text and back, and score parses (section 6.3).",
        (
            "minitransformer parse linearise data/wsj wsj_*.mrg --split train=900 val",
            "minitransformer parse restore test.out test.words --output test.trees",
            "minitransformer parse score test.mrg test.trees",
        ),
        "linearise writes NAME.words and NAME.tree, for train.py --data with --source "
        "words\n--target tree, and NAME.mrg, one tree in a line, for score and EVALB. "
        "restore turns\neach line of model output into a tree. docs/parsing.md shows "
        "all the steps.",
    )
    kinds = parser.add_subparsers(
        dest="command", required=True, metavar="COMMAND", parser_class=CommandParser
    )

    def command(name: str, help: str) -> argparse.ArgumentParser:
        return kinds.add_parser(name, help=help, description=help)

    add = command("linearise", "write trees as words and as sequences").add_argument
    add("folder", type=Path, help="folder for the files")
    add("trees", type=Path, nargs="+", help="files of bracketed trees, plain or .gz")
    splits = "splits, and how many trees each takes in turn (default train: all)"
    add("--split", nargs="+", default=["train"], metavar="NAME[=COUNT]", help=splits)
    parts = "labels of constituents that the first split gets as further trees"
    add("--parts", nargs="+", default=[], metavar="LABEL", help=parts)
    add("--numbered", action="store_true", help="number the tags; write NAME.numbered")
    add = command("restore", "make a tree of each sequence and its words").add_argument
    add("sequences", type=Path, help="model output")
    add("words", type=Path, help="model input")
    add("--output", "-o", type=Path, metavar="FILE", help="default standard output")
    add = command("score", "print labelled recall, precision and F1").add_argument
    add("gold", type=Path, help="reference trees")
    add("trees", type=Path, help="the trees to score")
    return parser.run(arguments, run, kind="text")
