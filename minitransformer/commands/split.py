"""Split a list of sentence pairs into training, validation and test text.

No sentence of either language is in two splits.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeAlias

from minitransformer.cli import Parser, exit_code, positive
from minitransformer.runs.outputs import check_output
from minitransformer.settings.options import UsageError
from minitransformer.system.files import atomic_folder
from minitransformer.text.clean import clean
from minitransformer.text.lines import open_output, read_lines
from minitransformer.text.pairs import TextPair

Pair: TypeAlias = tuple[str, str]


def read_pairs(path: Path) -> list[Pair]:
    """Read lines of source TAB target, of which either may be blank, and clean both.

    Raises: ValueError naming any other line.
    """
    pairs = []
    for number, line in enumerate(read_lines(path), start=1):
        source, tab, rest = line.partition("\t")
        if not tab and clean(line):
            raise ValueError(
                f"{path}, line {number}: expected source TAB target, got {line[:60]!r}"
            )
        pairs.append((clean(source), clean(rest.partition("\t")[0])))
    return pairs


def split_pairs(
    pairs: Sequence[Pair], held_out: dict[str, int], seed: int
) -> dict[str, list[Pair]]:
    """Draw `held_out` pairs for each split that it names; the others are for training.

    Different source sentences are drawn, each with the first of its translations. Any
    other pair with a sentence in such a split, or with a drawn source, is left out. A
    split has fewer pairs if too many sentences have the same translation.

    Raises: ValueError if there are too few different source sentences.
    """
    first: dict[str, str] = {}
    for source, target in pairs:
        first.setdefault(source, target)
    drawn = list(first)
    random.Random(seed).shuffle(drawn)
    if len(drawn) <= sum(held_out.values()):
        raise ValueError(
            f"expected more than {sum(held_out.values()):,} different source "
            f"sentences, got {len(drawn):,}"
        )
    splits: dict[str, list[Pair]] = {}
    used_sources, used_targets = set[str](), set[str]()
    for name, count in held_out.items():
        splits[name] = []
        while len(splits[name]) < count and drawn:
            source = drawn.pop()
            used_sources.add(source)
            if first[source] not in used_targets:
                splits[name].append((source, first[source]))
        used_targets.update(target for _, target in splits[name])
    splits["train"] = [
        (source, target)
        for source, target in pairs
        if source not in used_sources and target not in used_targets
    ]
    return splits


def unseen(pairs: Iterable[Pair], held_out: Sequence[Pair]) -> list[Pair]:
    """Return the pairs of which neither side is a sentence of `held_out`."""
    sources, targets = {source for source, _ in held_out}, {t for _, t in held_out}
    return [(s, t) for s, t in pairs if s not in sources and t not in targets]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(
        "minitransformer split",
        "Split a list of sentence pairs into training, validation and test text.",
        (
            "minitransformer split deu.txt data/tatoeba --source en --target de",
            "python train.py --config small --data data/tatoeba "
            "--source en --target de",
        ),
        "Each line of the list is a source sentence, a tab and its translation; further"
        "\ncolumns are ignored. No sentence of either language is in two splits.",
    )
    add = parser.add_argument
    add("pairs", type=Path, help="lines of source TAB target, plain or .gz")
    add("folder", type=Path, help="output folder, new or empty")
    add("--source", required=True, metavar="LANG", help="ending of the source files")
    add("--target", required=True, metavar="LANG", help="ending of the target files")
    add("--val", type=positive, default=2000, help="validation pairs (default 2000)")
    add("--test", type=positive, default=2000, help="test pairs (default 2000)")
    add("--seed", type=int, default=1, help="seed of the draw (default 1)")
    also = "further training text; pairs with a held-out sentence are left out"
    add("--also", type=Path, nargs=2, metavar=("SOURCE", "TARGET"), help=also)
    args = parser.parse_args(arguments)

    def work() -> None:
        check_output(args.folder, args)
        languages = args.source, args.target
        plain = [name for name in languages if name and Path(name).name == name]
        if len(set(plain)) < 2:
            raise UsageError(
                "--source and --target: expected two different endings of file names, "
                f"such as en and de, got {args.source!r} and {args.target!r}"
            )
        pairs = read_pairs(args.pairs)
        counts = {"val": args.val, "test": args.test}
        splits = split_pairs([pair for pair in pairs if all(pair)], counts, args.seed)
        if args.also:
            more = [(clean(s), clean(t)) for s, t in TextPair(*args.also).lines()]
            pairs += more
            held_out = splits["val"] + splits["test"]
            splits["train"] += unseen(filter(all, more), held_out)
        for split, count in {**counts, "train": 1}.items():
            if len(splits[split]) < count:
                raise ValueError(
                    f"{args.pairs}: expected {count:,} {split} pairs without a "
                    f"sentence of another split, found {len(splits[split]):,}"
                )
        with atomic_folder(args.folder) as folder:
            for split, chosen in splits.items():
                for side, language in enumerate(languages):
                    with open_output(folder / f"{split}.{language}.gz") as file:
                        file.writelines(pair[side] + "\n" for pair in chosen)
        left_out = len(pairs) - sum(map(len, splits.values()))
        blank = sum(not all(pair) for pair in pairs)
        sizes = ", ".join(f"{len(p):,} {name}" for name, p in splits.items())
        counted = f"{left_out:,} of {len(pairs):,} pairs, {blank:,} with a blank side"
        print(f"{sizes}; left out: {counted}")

    return exit_code(parser.prog, work)
