"""Constituency parsing as translation (section 6.3, Table 4): the command `parse`.

Trees become lines of text that a model learns to write, and lines become trees again,
which are scored as EVALB does. docs/parsing.md shows all the steps.
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

from minitransformer.cli import CommandParser, Parser, exit_code, positive
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
from minitransformer.runs.outputs import check_output
from minitransformer.settings.options import UsageError
from minitransformer.system.files import make_folder, write_bytes
from minitransformer.text.lines import open_output
from minitransformer.text.pairs import TextPair

# The tags of words that are removed before spans are counted (EVALB's COLLINS.prm).
PUNCTUATION = (",", ":", "``", "''", ".")

# Labels that count as another one (COLLINS.prm).
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

    Raises: UsageError as `divide`. Nothing has been written then.
    """
    trees = (normalise_tree(tree) for path in paths for tree in read_trees(path))
    divided = divide(trees, splits)
    if labels:
        first = next(iter(divided))
        divided[first] = with_constituents(divided[first], labels)
    contents, sizes = dict[Path, list[str]](), []
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
    make_folder(folder)
    for path, lines in contents.items():
        write_bytes(path, "".join(f"{line}\n" for line in lines).encode())
    print("\n".join(sizes))


def divide(trees: Iterator[Tree], splits: Sequence[str]) -> dict[str, list[Tree]]:
    """Divide trees among splits in order: NAME=COUNT, or NAME for all that are left.

    Raises: UsageError if two splits have one name, or if there are too few trees for
    them, or too many.
    """
    divided: dict[str, list[Tree]] = {}
    for split in splits:
        match = re.fullmatch(r"([^=/]+)(?:=([1-9]\d{0,8}))?", split)
        if not match or match[1] in divided:
            expected = "--split: expected different names, each NAME or NAME=COUNT"
            raise UsageError(f"{expected}, got {split}")
        count = int(match[2]) if match[2] else None
        part = divided[match[1]] = list(itertools.islice(trees, count))
        if len(part) < (count or 1):
            raise UsageError(f"--split {split}: expected more trees, got {len(part)}")
    if left := sum(1 for _ in trees):
        raise UsageError(f"--split: expected a split for every tree, {left:,} are left")
    return divided


def with_constituents(trees: Sequence[Tree], labels: Sequence[str]) -> list[Tree]:
    """Return the different trees, then their different constituents of these labels.

    Constituents of one word are left out. From short texts a model learns much sooner
    which word a tag belongs to.
    """
    parts = (
        tree[left : right + 1]
        for tree in trees
        for span, left, right in spans(tree)
        if span.label in labels and span.end - span.start > 1
    )
    return list(map(list, dict.fromkeys(map(tuple, itertools.chain(trees, parts)))))


class Score(NamedTuple):
    """The counts of EVALB, without crossing brackets, for one sentence or several."""

    sentences: int = 0
    errors: int = 0  # sentences whose words differ, punctuation left out
    skipped: int = 0  # sentences of punctuation only
    gold: int = 0  # constituents of the right tree
    test: int = 0  # constituents of the tree that is scored
    matched: int = 0  # constituents of both
    exact: int = 0  # sentences
    words: int = 0
    tags: int = 0  # words with the right tag

    def plus(self, other: Score) -> Score:
        return Score(*map(operator.add, self, other))

    def summary(self) -> dict[str, float]:
        """Return rows of EVALB's summary. Units: counts and percent"""
        valid = max(self.sentences - self.errors - self.skipped, 1)
        return {
            "sentences": self.sentences,
            "errors": self.errors,
            "skipped": self.skipped,
            "labelled recall": 100 * self.matched / max(self.gold, 1),
            "labelled precision": 100 * self.matched / max(self.test, 1),
            "F1": 200 * self.matched / max(self.gold + self.test, 1),
            "exact match": 100 * self.exact / valid,
            "tagging accuracy": 100 * self.tags / max(self.words, 1),
        }


def score(gold: Tree, test: Tree) -> Score:
    """Compare a normalised tree with the right one, as EVALB does with COLLINS.prm.

    Words that a tree tags as punctuation are removed from it first. If the remaining
    words of both trees differ, the sentence is an error and nothing else is counted.
    """
    gold, test = (
        [x for x in tree if not isinstance(x, Leaf) or x.tag not in PUNCTUATION]
        for tree in (gold, test)
    )
    if not words(test):
        return Score(sentences=1, skipped=1)
    if words(gold) != words(test):
        return Score(sentences=1, errors=1)
    right, found = _constituents(gold), _constituents(test)
    tags = [[x.tag for x in tree if isinstance(x, Leaf)] for tree in (gold, test)]
    return Score(
        sentences=1,
        gold=right.total(),
        test=found.total(),
        matched=(right & found).total(),
        exact=right == found,
        words=len(tags[0]),
        tags=sum(map(operator.eq, *tags)),
    )


def _constituents(tree: Tree) -> Counter[Span]:
    return Counter(
        span._replace(label=SAME_LABELS.get(span.label, span.label))
        for span, _, _ in spans(tree)
        if span.start < span.end
    )


def score_files(gold: Path, test: Path, cutoff: int) -> tuple[Score, Score]:
    """Score all sentences, and those of at most `cutoff` words, punctuation included.

    Raises: ValueError if one file has more trees.
    """
    everything = shorter = Score()
    pairs = itertools.zip_longest(read_trees(gold), read_trees(test))
    for number, (right, found) in enumerate(pairs):
        if right is None or found is None:
            short, long = (gold, test) if right is None else (test, gold)
            raise ValueError(
                f"{short}: expected as many trees as in {long}, got {number:,}"
            )
        right = normalise_tree(right)
        result = score(right, normalise_tree(found))
        everything = everything.plus(result)
        if len(words(right)) <= cutoff:
            shorter = shorter.plus(result)
    return everything, shorter


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(
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
    what = "print recall, precision and F1, as EVALB counts"
    add = command("score", what).add_argument
    add("gold", type=Path, help="reference trees")
    add("trees", type=Path, help="the trees to score")
    short = "also score sentences of at most N words separately (default 40)"
    add("--cutoff", type=positive, default=40, metavar="N", help=short)
    return parser.parse_args(arguments)


def run(args: argparse.Namespace) -> None:
    if args.command == "linearise":
        linearise(args.folder, args.trees, args.split, args.parts, args.numbered)
    elif args.command == "restore":
        check_output(args.output, args, replace=True)
        pairs = TextPair(args.sequences, args.words).lines()
        lines = [bracket_tree(restore_tree(tags, text.split())) for tags, text in pairs]
        with open_output(args.output) as out:
            out.writelines(f"{line}\n" for line in lines)
    else:
        everything, shorter = score_files(args.gold, args.trees, args.cutoff)
        print(f"{'words':<20}{'any':>10}{f'<= {args.cutoff}':>10}")
        columns = everything.summary().items(), shorter.summary().values()
        for (name, value), short in zip(*columns, strict=True):
            form = "10," if isinstance(value, int) else "10.2f"
            print(f"{name:<20}{value:>{form}}{short:>{form}}")


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse_arguments(arguments)
    return exit_code("minitransformer parse", lambda: run(args))
