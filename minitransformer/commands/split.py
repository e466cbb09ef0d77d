"""Split a list of sentence pairs into training, validation and test text.

No sentence of either language is in two splits.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from pathlib import Path

from minitransformer.cli import positive
from minitransformer.commands import Command
from minitransformer.settings.options import UsageError
from minitransformer.system.files import atomic_folder
from minitransformer.text.bilingual import Pair, read_bilingual
from minitransformer.text.clean import clean
from minitransformer.text.pairs import write_pairs


def split_pairs(
    pairs: Sequence[Pair], held_out: dict[str, int], seed: int
) -> dict[str, list[Pair]]:
    """Draw `held_out` pairs for each split that it names; the others are for training.

    Different source sentences are drawn, each with the first of its translations. Any
    other pair with a sentence in such a split, or with a drawn source, is left out. A
    split has fewer pairs if too many sentences have the same translation.

    Raises: ValueError if there are too few different source sentences.
    """
    # Shuffle the different source sentences.
    first_translation: dict[str, str] = {}
    for source, target in pairs:
        first_translation.setdefault(source, target)
    sources = list(first_translation)
    random.Random(seed).shuffle(sources)
    if len(sources) <= (total := sum(held_out.values())):
        flags = " and ".join(f"--{name}" for name in held_out)
        raise ValueError(
            f"{flags}: expected more than {total:,} different source sentences, "
            f"got {len(sources):,}"
        )
    # Draw each held-out split: no translation is in two of them.
    splits: dict[str, list[Pair]] = {}
    used_sources, used_targets = set[str](), set[str]()
    for name, count in held_out.items():
        splits[name] = []
        while len(splits[name]) < count and sources:
            source = sources.pop()
            used_sources.add(source)
            if first_translation[source] not in used_targets:
                splits[name].append((source, first_translation[source]))
        used_targets.update(target for _, target in splits[name])
    # Train on the pairs that share no sentence with them.
    splits["train"] = [
        (source, target)
        for source, target in pairs
        if source not in used_sources and target not in used_targets
    ]
    return splits


def split(args: argparse.Namespace) -> None:
    """Read the pairs, split them, and write a file for each split and language."""
    # Languages are endings of file names.
    languages = args.source, args.target
    plain = {name for name in languages if name and Path(name).name == name}
    if len(plain) < 2:
        raise UsageError(
            "--source and --target: expected two different endings of file names, "
            f"such as en and de, got {args.source!r} and {args.target!r}"
        )
    # Split the pairs that have both sides.
    found, _ = read_bilingual(args.pairs, languages)
    pairs = [(clean(source), clean(target)) for source, target in found]
    counts = {"val": args.val, "test": args.test}
    splits = split_pairs([pair for pair in pairs if all(pair)], counts, args.seed)
    # Require as many pairs as were asked for, and some to train on.
    for name, count in {**counts, "train": 1}.items():
        if len(splits[name]) < count:
            raise ValueError(
                f"{args.pairs}: expected {count:,} {name} pairs without a "
                f"sentence of another split, found {len(splits[name]):,}"
            )
    with atomic_folder(args.output) as folder:
        for name, chosen in splits.items():
            files = [folder / f"{name}.{language}.gz" for language in languages]
            write_pairs(chosen, files[0], files[1])
    # Say how many pairs each split has, and how many are in none.
    left_out = len(pairs) - sum(map(len, splits.values()))
    blank = sum(not all(pair) for pair in pairs)
    sizes = ", ".join(f"{len(chosen):,} {name}" for name, chosen in splits.items())
    print(
        f"{sizes}; left out: {left_out:,} of {len(pairs):,} pairs, "
        f"{blank:,} with a blank side"
    )


def main(arguments: Sequence[str]) -> int:
    parser = Command(
        "minitransformer split",
        "Split a list of sentence pairs into training, validation and test text.",
        (
            "minitransformer split deu.txt data/tatoeba --source en --target de",
            "python train.py --config small --data data/tatoeba "
            "--source en --target de",
        ),
        "The list is a .tmx, .po, .xliff or .csv, or each line is a source sentence, a"
        "\ntab and its translation. The first line of a table may name its columns, as"
        "\nen and de; others are ignored. No sentence is in two splits.",
    )
    add = parser.add_argument
    add("pairs", type=Path, help="sentence pairs, plain or .gz")
    help = "output folder, new or empty"
    add("output", type=Path, metavar="folder", help=help)
    add("--source", required=True, metavar="LANG", help="ending of the source files")
    add("--target", required=True, metavar="LANG", help="ending of the target files")
    add("--val", type=positive, default=2000, help="validation pairs (default 2000)")
    add("--test", type=positive, default=2000, help="test pairs (default 2000)")
    add("--seed", type=int, default=1, help="seed of the draw (default 1)")
    return parser.run(arguments, split)
