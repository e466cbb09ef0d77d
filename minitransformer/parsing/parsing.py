"""Constituency parsing as translation (section 6.3, Table 4), and its scores.

Trees become lines of text that a model learns to write, and lines become trees again.
docs/parsing.md has all the steps.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from minitransformer.files import write_bytes
from minitransformer.parsing.trees import (
    Leaf,
    Span,
    Tree,
    bracketed,
    linearised,
    normalised,
    numbered,
    read_trees,
    restored,
    spans,
    words,
)
from minitransformer.settings.options import Parser, UsageError, exit_code, positive
from minitransformer.text.lines import TextPair

# Tags of words that spans are counted without (COLLINS.prm of EVALB).
PUNCTUATION = (",", ":", "``", "''", ".")

# Labels that count as one (the same).
SAME_LABELS = {"PRT": "ADVP"}


def linearise(
    folder: Path,
    paths: Sequence[Path],
    splits: Sequence[str],
    labels: Sequence[str] = (),
    with_numbers: bool = False,
) -> None:
    """Write NAME.words, NAME.tree and NAME.mrg of each split, NAME=COUNT or NAME.

    The splits take the trees in turn; one without a count takes those that are left.
    With `labels` the first of them is given `with_parts`. With numbers, those of the
    words are before the tags, and NAME.numbered has them before the words.

    Raises: UsageError if a split is left without trees or trees without a split.
    """
    trees = (normalised(tree) for path in paths for tree in read_trees(path))
    folder.mkdir(parents=True, exist_ok=True)
    for split in splits:
        found = re.fullmatch(r"([^=/]+)(?:=([1-9]\d*))?", split)
        if not found:
            raise UsageError(f"--split: expected NAME or NAME=COUNT, got {split}")
        name, count = found[1], int(found[2]) if found[2] else None
        part = list(itertools.islice(trees, count))
        if len(part) < (count or 1):
            raise UsageError(f"--split {split}: expected more trees, got {len(part)}")
        if labels and split == splits[0]:
            part = with_parts(part, labels)
        sentences = [" ".join(words(tree)) for tree in part]
        _write(folder / f"{name}.words", sentences)
        if with_numbers:
            lines = [numbered(words(tree)) for tree in part]
            _write(folder / f"{name}.numbered", lines)
        sequences = [linearised(tree, with_numbers) for tree in part]
        _write(folder / f"{name}.tree", sequences)
        _write(folder / f"{name}.mrg", [bracketed(tree) for tree in part])
        count_words = sum(len(sentence.split()) for sentence in sentences)
        print(f"{name}: {len(part):,} trees, {count_words:,} words")
    if left := sum(1 for _ in trees):
        raise UsageError(f"--split: expected a split for every tree, {left:,} are left")


def with_parts(trees: Sequence[Tree], labels: Sequence[str]) -> list[Tree]:
    """Return the trees and then their constituents of these labels, all of them once.

    Constituents of one word are left out. The short texts make a model learn much
    sooner which word a tag is of.
    """
    parts = (
        tree[left : right + 1]
        for tree in trees
        for span, left, right in spans(tree)
        if span.label in labels and span.end - span.start > 1
    )
    return list(map(list, dict.fromkeys(map(tuple, itertools.chain(trees, parts)))))


def restore(sequences: Path, sentences: Path) -> Iterator[str]:
    """Yield a bracketed tree over the words of each line, whatever its sequence.

    Raises: ValueError if the files differ in length.
    """
    for sequence, sentence in TextPair(sequences, sentences).lines():
        yield bracketed(restored(sequence, sentence.split()))


@dataclass(frozen=True)
class Score:
    """What EVALB counts, of one sentence or summed over several."""

    sentences: int = 0
    errors: int = 0  # of other words, or of other punctuation
    skipped: int = 0  # of nothing but punctuation
    gold: int = 0  # constituents
    test: int = 0
    matched: int = 0
    exact: int = 0  # sentences
    crossing: int = 0  # constituents of test
    no_crossing: int = 0  # sentences
    few_crossing: int = 0  # sentences with at most two
    words: int = 0
    tags: int = 0  # words of the right tag

    def __add__(self, other: Score) -> Score:
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Score(*(a + b for a, b in pairs))

    @property
    def recall(self) -> float:
        return 100 * self.matched / max(self.gold, 1)

    @property
    def precision(self) -> float:
        return 100 * self.matched / max(self.test, 1)

    @property
    def f1(self) -> float:
        """The harmonic mean of recall and precision."""
        return 200 * self.matched / max(self.gold + self.test, 1)

    def rows(self) -> dict[str, float]:
        """The rows of EVALB's summary. Units: percent, but for counts and averages"""
        valid = max(self.sentences - self.errors - self.skipped, 1)
        return {
            "sentences": self.sentences,
            "errors": self.errors,
            "skipped": self.skipped,
            "labelled recall": self.recall,
            "labelled precision": self.precision,
            "F1": self.f1,
            "exact match": 100 * self.exact / valid,
            "average crossing": self.crossing / valid,
            "no crossing": 100 * self.no_crossing / valid,
            "2 or less crossing": 100 * self.few_crossing / valid,
            "tagging accuracy": 100 * self.tags / max(self.words, 1),
        }


def score(gold: Tree, test: Tree) -> Score:
    """Compare a normalised tree with the right one, as EVALB does with COLLINS.prm.

    Words that either tree tags as punctuation are left out of that tree first; if then
    the words differ, the sentence is an error and counts nothing.
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
    matched = (right & found).total()
    crossing = sum(
        count
        for span, count in found.items()
        if any(
            other.start < span.start < other.end < span.end
            or span.start < other.start < span.end < other.end
            for other in right
        )
    )
    tags = [[x.tag for x in tree if isinstance(x, Leaf)] for tree in (gold, test)]
    return Score(
        sentences=1,
        gold=right.total(),
        test=found.total(),
        matched=matched,
        exact=right == found,
        crossing=crossing,
        no_crossing=crossing == 0,
        few_crossing=crossing <= 2,
        words=len(tags[0]),
        tags=sum(a == b for a, b in zip(*tags, strict=True)),
    )


def _constituents(tree: Tree) -> Counter[Span]:
    return Counter(
        span._replace(label=SAME_LABELS.get(span.label, span.label))
        for span, _, _ in spans(tree)
        if span.start < span.end
    )


def score_files(gold: Path, test: Path, cutoff: int) -> tuple[Score, Score]:
    """Score all sentences, and those of at most `cutoff` words, punctuation counted.

    Raises: ValueError if one file has more trees.
    """
    everything = shorter = Score()
    pairs = itertools.zip_longest(read_trees(gold), read_trees(test))
    for number, (right, found) in enumerate(pairs):
        if right is None or found is None:
            shorter_file = gold if right is None else test
            raise ValueError(f"{shorter_file}: expected a tree more after {number:,}")
        right = normalised(right)
        result = score(right, normalised(found))
        everything += result
        if len(words(right)) <= cutoff:
            shorter += result
    return everything, shorter


def _write(path: Path, lines: Sequence[str]) -> None:
    write_bytes(path, "".join(f"{line}\n" for line in lines).encode())


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(
        "minitransformer parse",
        "Turn trees into lines of text and back, and score parses (section 6.3).",
        (
            "minitransformer parse linearise data/wsj wsj_*.mrg --split train=900 val",
            "minitransformer parse restore test.out test.words --output test.trees",
            "minitransformer parse score test.mrg test.trees",
        ),
        "linearise writes NAME.words and NAME.tree, which train.py --data takes as "
        "--source words\n--target tree, and NAME.mrg, a tree a line, which score and "
        "EVALB take. restore makes a\ntree of every line that a model wrote. "
        "docs/parsing.md has all the steps.",
    )
    kinds = parser.add_subparsers(
        dest="command",
        required=True,
        metavar="COMMAND",
        parser_class=argparse.ArgumentParser,
    )

    def command(name: str, help: str) -> argparse.ArgumentParser:
        return kinds.add_parser(name, help=help, description=help)

    to_text = command("linearise", "trees to words and to sequences")
    to_text.add_argument("folder", type=Path, help="where the files go")
    files = "bracketed trees, plain or .gz, in this order"
    to_text.add_argument("trees", type=Path, nargs="+", help=files)
    splits = "names of splits and how many trees each takes (default train)"
    to_text.add_argument("--split", nargs="+", default=["train"], help=splits)
    parts = "labels of constituents that the first split also has as texts of their own"
    to_text.add_argument("--parts", nargs="+", default=[], metavar="LABEL", help=parts)
    numbers = "write numbers before words and tags: little text teaches no counting"
    to_text.add_argument("--numbered", action="store_true", help=numbers)
    back = command("restore", "sequences and their words to trees, one a line")
    back.add_argument("sequences", type=Path, help="lines as a model wrote them")
    back.add_argument("words", type=Path, help="the lines that it read")
    output = "default standard output"
    back.add_argument("--output", "-o", type=Path, metavar="FILE", help=output)
    scores = command("score", "labelled recall, precision and F1, as EVALB counts")
    scores.add_argument("gold", type=Path, help="the right trees")
    scores.add_argument("trees", type=Path, help="the trees to score")
    short = "words of the sentences that are also scored by themselves (default 40)"
    scores.add_argument("--cutoff", type=positive, default=40, metavar="N", help=short)
    return parser.parse_args(arguments)


def run(args: argparse.Namespace) -> None:
    if args.command == "linearise":
        linearise(args.folder, args.trees, args.split, args.parts, args.numbered)
    elif args.command == "restore":
        lines = list(restore(args.sequences, args.words))
        if args.output:
            _write(args.output, lines)
        else:
            print(*lines, sep="\n")
    else:
        everything, shorter = score_files(args.gold, args.trees, args.cutoff)
        print(f"{'words':<20}{'any':>10}{f'<= {args.cutoff}':>10}")
        columns = everything.rows().items(), shorter.rows().values()
        for (name, value), short in zip(*columns, strict=True):
            form = "10," if isinstance(value, int) else "10.2f"
            print(f"{name:<20}{value:>{form}}{short:>{form}}")


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse_arguments(arguments)
    return exit_code("parse", lambda: run(args))
