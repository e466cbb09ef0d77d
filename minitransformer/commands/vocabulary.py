"""Learn a vocabulary by SentencePiece in other ways than training does (5.1)."""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from minitransformer.cli import positive
from minitransformer.commands import Command
from minitransformer.settings.options import UsageError
from minitransformer.system.files import write_bytes
from minitransformer.text.clean import clean
from minitransformer.text.lines import read_lines
from minitransformer.text.symbols import symbols_for
from minitransformer.text.tokenizer import Tokenizer, ended_by_interrupt


def main(arguments: Sequence[str]) -> int:
    parser = Command(
        "minitransformer vocabulary",
        "Learn a vocabulary by SentencePiece, for train.py --vocabulary.",
        (
            "minitransformer vocabulary mine.model data/both/train.*.gz "
            "--vocab-size 8000 --user-symbols '<2de>' '<2fr>'",
            "python train.py --data data/both --source en --target de-fr "
            "--vocabulary mine.model",
        ),
        "Without options it learns by byte-pair encoding, as train.py does.",
    )
    add = parser.add_argument
    add("output", type=Path, help="the SentencePiece model to write")
    add("text", type=Path, nargs="+", help="text of both languages, plain or .gz")
    size = "word pieces; from 1,024 on, the 256 bytes are among them"
    add("--vocab-size", type=positive, required=True, metavar="N", help=size)
    whole = "tags and the like, each one unsplit piece"
    add("--user-symbols", nargs="+", default=[], metavar="SYMBOL", help=whole)
    other = (
        "options of SentencePiece's trainer, such as model_type=unigram or "
        "normalization_rule_name=nmt_nfkc"
    )
    add("--option", nargs="+", default=[], metavar="NAME=VALUE", help=other)
    return parser.run(arguments, learn)


def learn(args: argparse.Namespace) -> None:
    """Learn a vocabulary of text, and write it."""
    # The symbols of the user, and those with which pairs copy, as in training.
    symbols = list(map(clean, args.user_symbols))
    if len(args.text) == 2:
        source, target = map(read_lines, args.text)
        symbols += symbols_for(zip(source, target, strict=False))
    # The options of SentencePiece's trainer.
    options: dict[str, Any] = {"user_defined_symbols": list(dict.fromkeys(symbols))}
    for option in args.option:
        name, equals, value = option.partition("=")
        if not (name and equals):
            raise UsageError(f"--option: expected NAME=VALUE, got {option}")
        options[name] = value
    lines = itertools.chain.from_iterable(map(read_lines, args.text))
    with ended_by_interrupt():
        cores = os.cpu_count() or 1
        learned = Tokenizer.train(lines, args.vocab_size, cores, **options)
    write_bytes(args.output, learned.model)
    print(f"wrote {args.output}: {learned.vocab_size:,} word pieces")
