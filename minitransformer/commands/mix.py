"""Make one corpus of several, with tags and repetitions (beyond the paper)."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

from minitransformer.cli import positive
from minitransformer.commands import Command
from minitransformer.settings.options import UsageError
from minitransformer.settings.scripts import as_installed
from minitransformer.system.files import atomic_folder
from minitransformer.text.bilingual import Pair
from minitransformer.text.clean import clean
from minitransformer.text.find import find_splits
from minitransformer.text.pairs import TextPair, write_pairs


def tagged(text: TextPair, repeat: int, tag: str) -> Iterator[Pair]:
    """Yield the pairs of a corpus so often, with its tag before what is not blank."""
    for _ in range(repeat):
        for source, target in text.lines():
            yield f"{tag} {source}" if tag and clean(source) else source, target


def one_for_each(flag: str, values: Sequence, count: int) -> list:
    """Return a value for each corpus, where one alone stands for all.

    Raises: UsageError if there are neither one nor `count`.
    """
    if len(values) not in (1, count):
        expected = f"expected 1 or {count}, one for each corpus"
        raise UsageError(f"{flag}: {expected}, got {len(values)}")
    return list(values) * (count if len(values) == 1 else 1)


def mix(args: argparse.Namespace) -> None:
    """Write the corpus, and print its size and the flags to train with it.

    Raises: UsageError if the numbers of values do not fit, ValueError if a corpus has
    no training text.
    """
    # A folder, both languages, a number and a tag for each corpus.
    flags = {
        "CORPUS": args.corpora,
        "--source": args.source,
        "--target": args.target,
        "--repeat": args.repeat,
        "--tag": args.tag,
    }
    count = max(map(len, flags.values()))
    each = [one_for_each(flag, values, count) for flag, values in flags.items()]
    # Corpora of several languages have the name of all of them, such as de-fr.
    languages = ["-".join(dict.fromkeys(side)) for side in (args.source, args.target)]
    if languages[0] == languages[1]:
        expected = "--source and --target: expected two languages"
        raise UsageError(f"{expected}, got {languages[0]} for both")
    # The parts of each split; only training text is repeated.
    splits = dict[str, list[Iterator[Pair]]]()
    for place, source, target, repeat, tag in zip(*each, strict=True):
        for split, text in find_splits(place, source, target).items():
            times = repeat if split == "train" else 1
            splits.setdefault(split, []).append(tagged(text, times, tag))
    source, target = languages
    sizes = []
    with atomic_folder(args.output) as partial:
        for split, parts in splits.items():
            pairs = itertools.chain.from_iterable(parts)
            files = [partial / f"{split}.{language}.gz" for language in languages]
            sizes.append(f"{write_pairs(pairs, files[0], files[1]):,} {split}")
    command = f"train.py --data {args.output} --source {source} --target {target}"
    print(as_installed(f"{', '.join(sizes)} pairs, for {command}"))


def main(arguments: Sequence[str]) -> int:
    parser = Command(
        "minitransformer mix",
        "Make one corpus of several, with tags and repetitions.",
        (
            "minitransformer mix data/both data/en-de data/en-fr --source en "
            "--target de fr --repeat 1 3 --tag '<2de>' '<2fr>'",
            "python train.py --data data/both --source en --target de-fr",
        ),
        "A corpus is a folder of train.LANG, and of val.LANG and test*.LANG if any.\n"
        "One folder, language, number or tag stands for all corpora.",
    )
    add = parser.add_argument
    help = "output folder, new or empty"
    add("output", type=Path, metavar="folder", help=help)
    add("corpora", type=Path, nargs="+", metavar="CORPUS", help="a folder of text")
    for side in ("source", "target"):
        language = f"{side} language, for all corpora or for each"
        add(f"--{side}", nargs="+", required=True, metavar="LANG", help=language)
    often = "repetitions of training pairs, for all or for each (default 1)"
    add("--repeat", type=positive, nargs="+", default=[1], metavar="N", help=often)
    before = "tag before source lines, for all or for each; '' for none"
    add("--tag", nargs="+", default=[""], metavar="TAG", help=before)
    return parser.run(arguments, mix)
