"""Find the files of each split: by settings, and again when a run is resumed."""

from __future__ import annotations

from pathlib import Path

from minitransformer.settings.config import RunConfig
from minitransformer.settings.text_config import TextConfig
from minitransformer.text.pairs import TextPair, text_pairs


def find_text(config: TextConfig) -> dict[str, TextPair]:
    """Find the pairs of files that settings name, or that are in the folder they name.

    Raises: as `require_file` and `find_splits`.
    """
    if config.data is None or config.source is None or config.target is None:
        return text_pairs(config.files)
    return find_splits(Path(config.data), config.source, config.target)


def find_splits(folder: Path, source: str, target: str) -> dict[str, TextPair]:
    """Find the pairs of files in a folder: train, and val and test if there are any.

    Raises: ValueError if there is no training text or a side of a split is missing; as
    `text_pairs`.
    """
    if not folder.is_dir():
        raise ValueError(f"expected a folder of text, found none at {folder}")
    files = {}
    for split in ("train", "val", "test"):
        if pair := find_pair(folder, split, source, target):
            files[split] = pair
        elif split == "train":
            raise ValueError(
                f"expected train.{source} and train.{target}, plain or .gz, found "
                f"none in {folder}"
            )
    return text_pairs(files)


def find_pair(folder: Path, stem: str, source: str, target: str) -> list[str] | None:
    """Find `stem.source` and `stem.target` in a folder, plain or .gz.

    Names of test text may go on after the stem; the first one is taken.

    Raises: ValueError if only one side exists.
    """
    # The files of each side by the names that they share; plain ones win.
    name = "test*" if stem == "test" else stem
    sides = [
        {
            path.name.removesuffix(suffix): path
            for suffix in (f".{language}.gz", f".{language}")
            for path in folder.glob(name + suffix)
        }
        for language in (source, target)
    ]
    if both := sorted(sides[0].keys() & sides[1].keys()):
        return [str(side[both[0]]) for side in sides]

    # A side without the other one is an error.
    for side, missing in zip(sides, (target, source), strict=True):
        for path in sorted(side.values()):
            raise ValueError(f"expected {name}.{missing} beside {path}, found none")
    return None


def text_of(settings: RunConfig) -> dict[str, TextPair]:
    """Return the pair of files of each split of a run.

    Raises: FileNotFoundError if a file does not exist.
    """
    try:
        return text_pairs(settings.text)
    except FileNotFoundError as error:
        where = "if a run's text was moved, change its place in config.json"
        raise FileNotFoundError(f"{error}; {where}") from error
