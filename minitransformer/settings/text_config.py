"""The settings of the text to learn from, and of its vocabulary."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from minitransformer.settings.options import Config, UsageError, flag_name, option

# What no symbol of a user may be: the special pieces, bytes, nothing, or what has a
# space (U+2581 in SentencePiece) or a comma in it.
RESERVED = re.compile(
    r"<pad>|<unk>|</?s>|<0x[0-9A-Fa-f]{2}>||.*[\s\u2581,].*", re.DOTALL
)


def check_symbols(flag: str, symbols: Iterable[str]) -> None:
    """Raises: UsageError if a symbol cannot be a piece of the vocabulary."""
    for symbol in symbols:
        if RESERVED.fullmatch(symbol) or not symbol.isprintable():
            raise UsageError(
                f"{flag}: expected a symbol without space or comma, none of <pad>, "
                f"<unk>, <s>, </s> and bytes such as <0x41>, got {symbol!r}"
            )


@dataclass(frozen=True)
class VocabularyConfig(Config):
    """How text becomes word pieces (section 5.1), by SentencePiece."""

    help_group: ClassVar[str] = "the vocabulary (section 5.1)"

    tokenizer: str | None = option(
        None, "SentencePiece model to take; none is learned", metavar="FILE"
    )
    vocab_type: str = option(
        "bpe", "how word pieces are learned", choices=("bpe", "unigram")
    )
    user_symbols: tuple[str, ...] = option(
        (), "placeholders that are never split or changed", metavar="SYMBOL"
    )
    character_coverage: float = option(
        1.0, "share of the text that learned characters cover", at_least=0.98, at_most=1
    )
    normalization: str = option(
        "nmt_nfkc",
        "how characters are normalised",
        choices=("nmt_nfkc", "nmt_nfkc_cf", "nfkc", "nfkc_cf", "identity"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        symbols = ",".join(self.user_symbols).split(",") if self.user_symbols else ()
        check_symbols("--user-symbols", symbols)
        object.__setattr__(self, "user_symbols", tuple(dict.fromkeys(symbols)))
        if self.tokenizer is not None:
            object.__setattr__(self, "tokenizer", str(Path(self.tokenizer).absolute()))
            for name in ("vocab_type", "character_coverage", "normalization"):
                if getattr(self, name) != getattr(VocabularyConfig, name):
                    flag = flag_name(name)
                    raise ValueError(f"{flag} does nothing with --tokenizer")


@dataclass(frozen=True)
class TextConfig(Config):
    """The text to learn from: a folder, single files, or the built-in corpus."""

    help_group: ClassVar[str] = "the text to learn from (default: the built-in corpus)"

    data: str | None = option(
        None,
        "folder of train.LANG, val.LANG, test*.LANG, plain or .gz (of several, "
        "`minitransformer mix` makes one)",
        metavar="FOLDER",
    )
    source: str | None = option(None, "source language in --data", metavar="LANG")
    target: str | None = option(None, "target language in --data", metavar="LANG")
    train_source: str | None = option(None, "source of training text", metavar="FILE")
    train_target: str | None = option(None, "target of training text", metavar="FILE")
    val_source: str | None = option(None, "source of validation text", metavar="FILE")
    val_target: str | None = option(None, "target of validation text", metavar="FILE")
    test_source: str | None = option(None, "source of test text", metavar="FILE")
    test_target: str | None = option(None, "target of test text", metavar="FILE")

    def __post_init__(self) -> None:
        super().__post_init__()
        named = {split: pair for split, pair in self._pairs().items() if any(pair)}
        given = self.data, self.source, self.target
        if named:
            if any(given):
                raise ValueError(
                    "--data, --source and --target do not go with file names"
                )
            for split in ("train", *named):
                if None in named.get(split, (None,)):
                    raise ValueError(f"expected --{split}-source and --{split}-target")
        elif self.data and not (self.source and self.target):
            raise ValueError("--data expects --source and --target, such as en and de")
        elif any(given) and not self.data:
            raise ValueError("--source and --target need --data")
        elif self.data and self.source == self.target:
            raise ValueError(
                "--source and --target: expected two languages, got "
                f"{self.source} for both"
            )

    def _pairs(self) -> dict[str, tuple[str | None, str | None]]:
        return {
            "train": (self.train_source, self.train_target),
            "val": (self.val_source, self.val_target),
            "test": (self.test_source, self.test_target),
        }

    @property
    def files(self) -> dict[str, tuple[str, str]]:
        """The source and target file of each split, if single files are named."""
        return {split: (s, t) for split, (s, t) in self._pairs().items() if s and t}
