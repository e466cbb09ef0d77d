"""The settings of the text to learn from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from minitransformer.settings.options import Config, option

# Files that have the source and the target.
BOTH_SIDES = ".tmx", ".po", ".xlf", ".xliff", ".csv", ".tsv"


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
    train_source: str | None = option(
        None, "source of training text, or a .tmx, .po, .csv of both", metavar="FILE"
    )
    train_target: str | None = option(None, "target of training text", metavar="FILE")
    val_source: str | None = option(None, "source of validation text", metavar="FILE")
    val_target: str | None = option(None, "target of validation text", metavar="FILE")
    test_source: str | None = option(None, "source of test text", metavar="FILE")
    test_target: str | None = option(None, "target of test text", metavar="FILE")

    def __post_init__(self) -> None:
        super().__post_init__()
        # Single files, of which training needs both, and others one another.
        named = {split: pair for split, pair in self._pairs().items() if any(pair)}
        given = self.data, self.source, self.target
        if named:
            if any(given):
                raise ValueError(
                    "--data, --source and --target do not go with file names"
                )
            for split in ("train", *named):
                source, target = named.get(split, (None, None))
                is_both = (source or "").removesuffix(".gz").endswith(BOTH_SIDES)
                if not source or is_both == bool(target) or source == target:
                    raise ValueError(
                        f"expected --{split}-source and --{split}-target, two files, "
                        f"or a {', '.join(BOTH_SIDES)} as --{split}-source alone"
                    )
        # Or a folder, with the names of two languages.
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
        """The source and target file of each split, if single files are named.

        They are the same if a file has both sides.
        """
        return {split: (s, t or s) for split, (s, t) in self._pairs().items() if s}
