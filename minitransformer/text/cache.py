"""A cache folder of vocabularies and encoded text, each computed once.

Files are named by a digest of the text and of what else they depend on, so that
changed text is encoded anew.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from minitransformer.system.announce import announce
from minitransformer.system.files import build_once
from minitransformer.text.batches import ParallelCorpus
from minitransformer.text.grammar import are_built_in
from minitransformer.text.ids import Ragged
from minitransformer.text.pairs import TextPair
from minitransformer.text.placeholders import Finder, symbols_for
from minitransformer.text.sentences import usual_sentences
from minitransformer.text.tokenizer import (
    Tokenizer,
    VocabularyError,
    ended_by_interrupt,
)

# How much text is encoded at a time, in characters with line ends.
CHUNK = 4_000_000
# Of how many lines the sentences are counted.
MOST_LINES = 20_000

# Part of the names of files, which changes with `clean`, `Finder` or the format.
CLEANED = "-clean-copied-3"


def cached_tokenizer(
    text: TextPair, vocab_size: int, cache: Path, num_threads: int
) -> Tokenizer:
    """Learn the joint vocabulary of both sides, or read it from the cache.

    Raises: ValueError if the text changes while it is read, or as `Tokenizer.train`,
    `TextPair.lines`.
    """

    def build(partial: Path) -> None:
        options = {"user_defined_symbols": list(symbols_for(text.lines()))}
        lines = itertools.chain.from_iterable(text.lines())
        announce(f"learning {vocab_size:,} word pieces from {text}", text.is_large)
        try:
            with ended_by_interrupt():
                made = Tokenizer.train(lines, vocab_size, num_threads, **options)
        except VocabularyError as error:
            built_in = are_built_in([text.source])
            other = "; --data or --train-source names other text" * built_in
            raise ValueError(f"{text}: {error}{other}") from error
        _expect_unchanged(text, digest)
        partial.write_bytes(made.model)

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
    digest = text.digest()
    salt = (digest + CLEANED).encode()
    key = hashlib.blake2b(tokenizer.model, digest_size=16, key=salt)

    def build(folder: Path) -> None:
        announce(f"encoding {text}", text.is_large)
        _encode(text, tokenizer, num_threads, folder)
        _expect_unchanged(text, digest)

    return build_once(cache / key.hexdigest(), build, read_corpus)


def _expect_unchanged(text: TextPair, digest: str) -> None:
    """Raises: ValueError if the text changed since `digest` was taken."""
    if text.digest() != digest:
        raise ValueError(f"{text}: expected text that stays the same, it was changed")


def read_corpus(folder: Path) -> ParallelCorpus:
    """Open the ids that `encoded_corpus` wrote.

    Raises: ValueError if a file was cut short, FileNotFoundError if it is missing.
    """
    try:
        header = json.loads((folder / "corpus.json").read_text(encoding="utf-8"))
        sides = []
        for side in ("source", "target"):
            ids = _mapped(folder / f"{side}.ids", header["dtype"])
            starts = _mapped(folder / f"{side}.starts", "int64")
            if len(starts) != header["pairs"] + 1 or starts[-1] != len(ids):
                raise ValueError(f"the {side} is not whole")
            sides.append(Ragged(ids, starts))
        corpus = ParallelCorpus(sides[0], sides[1], header["dropped_blank"])
        corpus.notes, corpus.usual_sentences = header["notes"], header["sentences"]
        return corpus
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder}: a damaged cache ({error})") from error


def _mapped(path: Path, dtype: str) -> np.ndarray:
    """Map a file into memory, whose pages the system drops when it needs the space."""
    return np.asarray(np.memmap(path, dtype, mode="r"))


def _encode(
    text: TextPair, tokenizer: Tokenizer, num_threads: int, folder: Path
) -> None:
    dtype = "uint16" if tokenizer.vocab_size <= 1 << 16 else "int32"
    folder.mkdir()
    ends = {"source": 0, "target": 0}
    pairs = blank = 0
    unknown, characters = {"source": 0, "target": 0}, Counter[str]()  # of the targets
    some, stride = list[str](), 1  # every so many lines of the source
    no_text = [i for i, text in enumerate(tokenizer.written()) if not text]

    def append(name: str, values: np.ndarray) -> None:
        with open(folder / name, "ab") as file:
            file.write(values.data)

    for side in ends:
        append(f"{side}.starts", np.zeros(1, dtype=np.int64))
    finder, read = Finder(tokenizer), text.lines()
    if finder.has_symbols:
        read = itertools.starmap(finder.hide_pair, read)
    for chunk in _chunks(read):
        some += [source for source, _ in chunk[-(pairs + blank) % stride :: stride]]
        while len(some) > MOST_LINES:
            some, stride = some[::2], 2 * stride
        characters.update("".join(target for _, target in chunk))
        sides = (
            tokenizer.encode([pair[column] for pair in chunk], num_threads)
            for column in (0, 1)
        )
        kept = [ids for ids in zip(*sides, strict=True) if all(ids)]
        blank += len(chunk) - len(kept)
        pairs += len(kept)
        for column, side in enumerate(ends):
            lines = [ids[column] for ids in kept]
            lengths = np.fromiter(map(len, lines), dtype=np.int64, count=len(lines))
            ids = np.fromiter(itertools.chain.from_iterable(lines), dtype=dtype)
            starts = ends[side] + np.cumsum(lengths)
            ends[side] += len(ids)
            unknown[side] += int(np.isin(ids, no_text).sum())
            append(f"{side}.ids", ids)
            append(f"{side}.starts", starts)
    if not pairs:
        found = f"{blank:,} with a blank line each" if blank else "none"
        raise ValueError(f"{text}: expected sentence pairs, found {found}")
    header = {"dtype": dtype, "dropped_blank": blank, "pairs": pairs}
    header["sentences"] = usual_sentences(some)
    shares = [unknown[side] / ends[side] for side in ends]
    header["notes"] = _notes(shares, characters, tokenizer)
    (folder / "corpus.json").write_bytes(json.dumps(header).encode())


def _notes(
    unknown: Sequence[float], characters: Counter[str], tokenizer: Tokenizer
) -> list[str]:
    """Return lines for the log on what the vocabulary lacks and loses of a corpus."""
    notes = []
    if max(unknown) > 5e-3:
        notes.append(
            f"unknown     {unknown[0]:.1%} of the source and {unknown[1]:.1%} of the "
            "target, characters that the vocabulary lacks: --vocab-size, if it is not "
            f"{tokenizer.vocab_size}, learns one of this text, also with --from"
        )
    lost = Counter({c: n for c, n in characters.items() if not tokenizer.keeps(c)})
    if lost:
        names = (
            f"{c if c.isprintable() else f'U+{ord(c):04X}'} {count:,}"
            for c, count in lost.most_common(8)
        )
        notes.append(
            f"changed     {lost.total():,} characters of the target, which become "
            f"others or nothing, most often {', '.join(names)}"
        )
    return notes


def _chunks(lines: Iterable[tuple[str, str]]) -> Iterator[list[tuple[str, str]]]:
    """Divide pairs of lines into lists that need a bounded amount of memory."""
    chunk, characters = list[tuple[str, str]](), 0
    for pair in lines:
        chunk.append(pair)
        characters += sum(map(len, pair)) + 2
        if characters > CHUNK:
            yield chunk
            chunk, characters = [], 0
    if chunk:
        yield chunk
