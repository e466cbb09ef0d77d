"""A cache folder of vocabularies and encoded text, each computed once.

The name of a file is a digest of the text and of all else that it depends on: changed
text is encoded anew.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from minitransformer.system.announce import announce
from minitransformer.system.files import build_once
from minitransformer.text.batches import ParallelCorpus
from minitransformer.text.ids import Ragged
from minitransformer.text.masking import Mask
from minitransformer.text.pairs import TextPair, file_digest
from minitransformer.text.sentences import median_sentences
from minitransformer.text.symbols import hide_pair, symbols_for
from minitransformer.text.tokenizer import (
    Tokenizer,
    VocabularyError,
    ended_by_interrupt,
)

# How many pairs of lines are encoded at a time, and in how many of these, the first,
# sentences are counted.
CHUNK = 10_000
COUNTED = 200

# Part of the names of files, a new one whenever `clean`, `Mask` or the format change.
CLEANED = "-clean-copied-5"

# The names of a corpus's files of ids.
SIDES = "source", "target"


def cached_tokenizer(
    text: TextPair, vocab_size: int, cache: Path, num_threads: int
) -> Tokenizer:
    """Learn the joint vocabulary of both sides, or read it from the cache.

    It has at most `vocab_size` word pieces: as many as the text supports.

    Raises: ValueError if the text changes while it is read, or as `Tokenizer.train`,
    `TextPair.lines`.
    """

    def build(partial: Path) -> None:
        # Symbols, which stand for copied text, are pieces of the vocabulary.
        symbols = list(symbols_for(text.lines()))
        announce(f"learning {vocab_size:,} word pieces from {text}", text.is_large)
        try:
            with ended_by_interrupt():
                learned = Tokenizer.train(
                    itertools.chain.from_iterable(text.lines()),
                    vocab_size,
                    num_threads,
                    user_defined_symbols=symbols,
                )
        except VocabularyError as error:
            raise ValueError(f"{text}: {error}") from error
        _expect_unchanged(text, digest)
        partial.write_bytes(learned.model)

    digest = text.digest()
    path = cache / f"{digest}-{vocab_size}{CLEANED}.model"
    return build_once(path, build, Tokenizer.read)


def encoded_corpus(
    text: TextPair, tokenizer: Tokenizer, cache: Path, num_threads: int = 1
) -> ParallelCorpus:
    """Encode a pair of files, or open the ids in the cache.

    Pairs with a blank side are dropped.

    Raises: ValueError if the files differ in length, are not UTF-8, hold no pair or
    change while they are read.
    """
    # The ids depend on the text, the vocabulary and the version of the encoding.
    digest = text.digest()
    salt = (digest + CLEANED).encode()
    key = hashlib.blake2b(tokenizer.model, digest_size=16, key=salt).hexdigest()

    def build(folder: Path) -> None:
        announce(f"encoding {text}", text.is_large)
        header = {"key": key, **_encode(text, tokenizer, num_threads, folder)}
        whole = {"header": header, "checksum": _checksum(folder, header)}
        (folder / "corpus.json").write_bytes(json.dumps(whole).encode())
        _expect_unchanged(text, digest)

    return build_once(cache / key, build, read_corpus)


def _expect_unchanged(text: TextPair, digest: str) -> None:
    """Raises: ValueError if the text changed since `digest` was taken."""
    if text.digest() != digest:
        raise ValueError(f"{text}: expected text that stays the same, it was changed")


def read_corpus(folder: Path) -> ParallelCorpus:
    """Open the ids that `encoded_corpus` wrote.

    Raises: ValueError if it is of other text or another vocabulary, or if a file is not
    as it was written; FileNotFoundError if one is missing.
    """
    try:
        # Nothing is used before the checksum says that it is what was written.
        whole = json.loads((folder / "corpus.json").read_text(encoding="utf-8"))
        header = whole["header"]
        if _checksum(folder, header) != whole["checksum"]:
            raise ValueError("its checksum differs from the one written")
        if header["key"] != folder.name:
            raise ValueError("its text or vocabulary is another")

        # Map the ids of both sides.
        sides = []
        for name in SIDES:
            ids = _mapped(folder / f"{name}.ids", header["dtype"])
            starts = _mapped(folder / f"{name}.starts", "int64")
            sides.append(Ragged(ids, starts))
        corpus = ParallelCorpus(sides[0], sides[1], header["dropped_blank"])
        corpus.notes = header["notes"]
        corpus.median_sentences = header["sentences"]
        return corpus
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder}: a damaged cache ({error})") from error


def _checksum(folder: Path, header: dict[str, Any]) -> str:
    """Return a digest of the header and of the files of both sides."""
    total = hashlib.blake2b(json.dumps(header, sort_keys=True).encode())
    for name, suffix in itertools.product(SIDES, (".ids", ".starts")):
        total.update(file_digest(folder / f"{name}{suffix}"))
    return total.hexdigest()


def _mapped(path: Path, dtype: str) -> np.ndarray:
    """Map a file into memory. The system drops its pages when it needs the space."""
    return np.asarray(np.memmap(path, dtype, mode="r"))


class _Side:
    """One side of a corpus: two growing files, and how often each id occurs."""

    def __init__(self, path: Path, vocab_size: int) -> None:
        self._path = path
        self.dtype = "uint16" if vocab_size <= 1 << 16 else "int32"
        self.counts = np.zeros(vocab_size, dtype=np.int64)
        self._append(".starts", np.zeros(1, dtype=np.int64))

    def add(self, lines: Sequence[list[int]]) -> None:
        ragged = Ragged.from_lists(lines)
        self._append(".starts", self.counts.sum() + ragged.starts[1:])
        self._append(".ids", ragged.ids.astype(self.dtype))
        self.counts += np.bincount(ragged.ids, minlength=len(self.counts))

    def _append(self, suffix: str, values: np.ndarray) -> None:
        with open(self._path.with_suffix(suffix), "ab") as file:
            file.write(values.data)


def _encode(
    text: TextPair, tokenizer: Tokenizer, num_threads: int, folder: Path
) -> dict[str, Any]:
    """Write the ids of both sides to a folder; return a header that describes them."""
    folder.mkdir()
    sides = [_Side(folder / name, tokenizer.vocab_size) for name in SIDES]
    sample = list[str]()
    pairs = 0
    blank = 0
    equal = 0

    # Symbols stand for text that both sides of a pair have, and the model learns them.
    mask = Mask(tokenizer)
    lines = text.lines()
    if mask.symbols:
        lines = (hide_pair(mask, *pair) for pair in lines)

    while chunk := list(itertools.islice(lines, CHUNK)):
        sample += [source for source, _ in chunk[:COUNTED]]
        # Encode both sides, and leave out pairs with a blank one.
        both = zip(*chunk, strict=True)
        encoded = (tokenizer.encode(side, num_threads) for side in both)
        kept = [ids for ids in zip(*encoded, strict=True) if all(ids)]
        pairs += len(kept)
        blank += len(chunk) - len(kept)
        equal += sum(source == target for source, target in kept)
        for column, side in enumerate(sides):
            side.add([ids[column] for ids in kept])
    if not pairs:
        none = f"{blank:,} with a blank line each" if blank else "none"
        raise ValueError(f"{text}: expected sentence pairs, found {none}")

    # The header has the median of the sentences in a line, and notes for the log.
    no_text = [i for i, piece in enumerate(tokenizer.written()) if not piece]
    unknown = [side.counts[no_text].sum() / side.counts.sum() for side in sides]
    return {
        "dtype": sides[0].dtype,
        "dropped_blank": blank,
        "sentences": median_sentences(sample),
        "notes": _notes(unknown, equal, pairs, tokenizer),
    }


def _notes(
    unknown: Sequence[float], equal: int, pairs: int, tokenizer: Tokenizer
) -> list[str]:
    """Return lines for the log about text that a model cannot learn to translate.

    `unknown` has the share of ids on each side without a text of their own, and `equal`
    is the number of pairs with the same text on both sides.
    """
    notes = []
    if max(unknown) > 5e-3:
        notes.append(
            f"unknown     {unknown[0]:.1%} of the source and {unknown[1]:.1%} of the "
            "target, characters that the vocabulary lacks: --vocab-size, if it is not "
            f"{tokenizer.vocab_size}, learns one of this text, also with --from"
        )
    if equal > pairs // 100:
        notes.append(
            f"equal       {equal:,} of {pairs:,} pairs have the same text on both "
            "sides: the model learns to copy it"
        )
    return notes
