"""The text of a run: one corpus, or a mixture of several (beyond the paper).

An epoch of a mixture has as many pairs as its corpora have together, rounded up until
the pairs of all corpora are exactly in the proportion of the weights. Each corpus is
read pass after pass, shuffled anew each time, and the next epoch goes on where this one
ended: when one pair of a corpus has been drawn n times, every other has been drawn at
least n - 1 times. Without weights, an epoch has every pair once.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from minitransformer.settings.config import RunConfig
from minitransformer.settings.text_config import corpus_number
from minitransformer.text.batches import ParallelCorpus
from minitransformer.text.cache import encoded_corpus
from minitransformer.text.grammar.corpus import FOLDER, built_in_corpus
from minitransformer.text.ids import Ragged
from minitransformer.text.lines import TextPair, text_pairs
from minitransformer.text.tokenizer import Tokenizer

# If a corpus is drawn more than once in an epoch, the epoch is sorted by length in
# several rounds, so that the copies of a pair are mostly in different batches. A round
# has at least this many pairs, which are enough for batches with little padding.
PAIRS_PER_ROUND = 10_000


@dataclass(frozen=True)
class MixedText(TextPair):
    """The text of a split in several corpora, one after the other.

    `source` and `target` are the files of the first. `weights` has a weight for each of
    the corpora, or is empty.
    """

    corpora: Mapping[int, TextPair] = field(default_factory=dict)
    weights: tuple[int, ...] = ()

    def __str__(self) -> str:
        return ", ".join(map(str, self.corpora.values()))

    @property
    def parts(self) -> Mapping[int, TextPair]:
        return self.corpora

    def digest(self) -> str:
        digests = "".join(part.digest() for part in self.corpora.values())
        return hashlib.blake2b(digests.encode(), digest_size=16).hexdigest()

    def lines(self) -> Iterator[tuple[str, str]]:
        return itertools.chain.from_iterable(x.lines() for x in self.corpora.values())


def text_of(settings: RunConfig, cache: Path) -> dict[str, TextPair]:
    """Return the text of each split of a run: a `MixedText` of several, or with tags.

    Files of the built-in corpus that no longer exist are made again in `cache`.

    Raises: FileNotFoundError if another file does not exist.
    """
    splits: dict[str, dict[int, TextPair]] = {}
    for name, pair in _pairs_of(settings.text, cache).items():
        number = corpus_number(name)
        tag = settings.tags[number - 1] if settings.tags else ""
        parts = splits.setdefault(name.partition(" ")[0], {})
        parts[number] = replace(pair, tag=tag)
    text: dict[str, TextPair] = {}
    for split, parts in splits.items():
        text[split] = first = parts[min(parts)]
        if len(parts) > 1 or settings.tags:
            files = first.source, first.target
            text[split] = MixedText(*files, corpora=parts, weights=settings.weights)
    return text


def _pairs_of(files: Mapping[str, Sequence[str]], cache: Path) -> dict[str, TextPair]:
    try:
        return text_pairs(files)
    except FileNotFoundError as error:
        if {Path(x).parent.name for pair in files.values() for x in pair} != {FOLDER}:
            where = "if a run's text was moved, change its place in config.json"
            raise FileNotFoundError(f"{error}; {where}") from error
        return built_in_corpus(cache)


def encoded_text(
    text: TextPair, tokenizer: Tokenizer, cache: Path, num_threads: int = 1
) -> ParallelCorpus:
    """Encode each corpus of a text, or open its ids in the cache.

    Raises: ValueError as `encoded_corpus`.
    """
    parts = text.parts
    corpora = [encoded_corpus(x, tokenizer, cache, num_threads) for x in parts.values()]
    return MixedCorpus(corpora, text) if isinstance(text, MixedText) else corpora[0]


class JoinedIds(Ragged):
    """The sequences of several corpora, one corpus after the other."""

    def __init__(self, parts: Sequence[Ragged]) -> None:
        self._parts, sizes = parts, [len(part) for part in parts]
        self._first = np.cumsum([0, *sizes[:-1]])
        self.lengths = np.concatenate([part.lengths for part in parts])

    def __len__(self) -> int:
        return len(self.lengths)

    def concatenate(self, chosen: np.ndarray) -> np.ndarray:
        corpus = np.searchsorted(self._first, chosen, side="right") - 1
        lengths = self.lengths[chosen]
        corpus_of_id = np.repeat(corpus, lengths)
        out = np.empty(len(corpus_of_id), dtype=np.int32)
        for i in np.unique(corpus):
            sequences = chosen[corpus == i] - self._first[i]
            out[corpus_of_id == i] = self._parts[i].concatenate(sequences)
        return out


class MixedCorpus(ParallelCorpus):
    """Encoded pairs of several corpora, which are drawn in proportion to weights."""

    def __init__(self, corpora: Sequence[ParallelCorpus], text: MixedText) -> None:
        super().__init__(
            JoinedIds([corpus.source for corpus in corpora]),
            JoinedIds([corpus.target for corpus in corpora]),
            sum(corpus.dropped_blank for corpus in corpora),
        )
        self._ends = np.cumsum([len(corpus) for corpus in corpora])
        self._text = text

    def _by_corpus(self, pairs: np.ndarray) -> list[np.ndarray]:
        return np.split(pairs, np.searchsorted(pairs, self._ends[:-1]))

    def _counts(self, pairs: np.ndarray) -> list[int]:
        """Return how many pairs of each corpus an epoch has."""
        weights = self._text.weights or [len(x) for x in self._by_corpus(pairs)]
        factor = math.gcd(*weights)
        shares = math.ceil(len(pairs) / (sum(weights) // factor))
        return [shares * (weight // factor) for weight in weights]

    def filter_by_length(self, max_length: int) -> np.ndarray:
        """As for one corpus. Raises: ValueError if a corpus has no such pair."""
        pairs = super().filter_by_length(max_length)
        parts = self._by_corpus(pairs)
        for found, text in zip(parts, self._text.corpora.values(), strict=True):
            if not len(found):
                raise ValueError(
                    f"{text}: expected pairs of at most {max_length} tokens, found none"
                )
        return pairs

    def rounds(self, pairs: np.ndarray, seed: int, epoch: int) -> list[np.ndarray]:
        parts, counts = self._by_corpus(pairs), self._counts(pairs)
        drawn = [
            drawn_in_passes(part, epoch * count, count, seed, number)
            for number, (part, count) in enumerate(zip(parts, counts, strict=True), 1)
        ]
        passes = max(math.ceil(n / len(x)) for n, x in zip(counts, parts, strict=True))
        rounds = min(passes, max(1, sum(counts) // PAIRS_PER_ROUND))
        shares = [np.array_split(x, rounds) for x in drawn]
        return [np.concatenate(x) for x in zip(*shares, strict=True)]

    def summary(self, pairs: np.ndarray) -> list[str]:
        counts, lines = self._counts(pairs), []
        parts = self._text.corpora.items()
        for (number, text), found, count in zip(
            parts, self._by_corpus(pairs), counts, strict=True
        ):
            tag = f", tag {text.tag}" if text.tag else ""
            lines.append(
                f"corpus {number:<5}{text}{tag}: {len(found):,} pairs, "
                f"{count:,} an epoch ({count / sum(counts):.1%})"
            )
        return lines


def drawn_in_passes(
    pairs: np.ndarray, first: int, count: int, seed: int, corpus: int
) -> np.ndarray:
    """Return `count` elements from number `first` of passes that never end.

    Each pass is a permutation of `pairs` that the seed, the number of the pass and that
    of the corpus determine. Shapes: pairs [any] -> [count]
    """
    passes = range(first // len(pairs), math.ceil((first + count) / len(pairs)))
    # Corpora count from 1, because a generator takes (seed, pass, 0) for (seed, pass),
    # which is the key of the batches of an epoch.
    generators = [np.random.default_rng((seed, number, corpus)) for number in passes]
    order = [generator.permutation(pairs) for generator in generators]
    start = first - passes.start * len(pairs)
    return np.concatenate(order)[start : start + count]
