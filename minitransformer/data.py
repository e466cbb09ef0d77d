"""From text to batches of ids (section 5.1).

Text is encoded once into ids on disk, in a cache folder named by the content of the
text and the tokenizer. An epoch is a shuffled list of batches of sentences of about
the same length. Shapes: B batch, S source, T target.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import os
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

import numpy as np

from minitransformer.config import BOS_ID, EOS_ID, PAD_ID, TrainingConfig
from minitransformer.files import built_once
from minitransformer.text import TextPair
from minitransformer.tokenizer import Tokenizer

LINES_PER_CHUNK = 50_000

# Indices of pairs: half of int64's memory, which counts where there are millions.
INDEX = np.int32

# Pairs that are sorted by length together: enough for batches with little padding, few
# enough that sorting needs little memory beside the corpus.
PAIRS_TOGETHER = 4_000_000


class StoredIds:
    """Ids in a file, of which only what is asked for is read.

    A mapping would keep every page that was ever touched resident.
    """

    def __init__(self, path: Path, dtype: str) -> None:
        self._descriptor, self._dtype = os.open(path, os.O_RDONLY), np.dtype(dtype)
        weakref.finalize(self, os.close, self._descriptor)
        self._size = path.stat().st_size // self._dtype.itemsize

    def __len__(self) -> int:
        return self._size

    def read(self, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Return some stretches end to end. Shapes: starts, lengths [B] -> [total]"""
        descriptor, width = self._descriptor, self._dtype.itemsize
        parts = [
            os.pread(descriptor, length * width, start * width)
            for start, length in zip(starts.tolist(), lengths.tolist(), strict=True)
        ]
        return np.frombuffer(b"".join(parts), self._dtype)


class Ragged:
    """Sequences of ids end to end: sequence i is ids[starts[i]:starts[i + 1]].

    Shapes: ids [total], starts [number of sequences + 1]
    """

    def __init__(self, ids: np.ndarray | StoredIds, starts: np.ndarray) -> None:
        self.ids, self.starts = ids, starts

    @classmethod
    def from_lists(cls, lines: Sequence[Sequence[int]]) -> Ragged:
        lengths = [len(line) for line in lines]
        ids = np.fromiter((i for line in lines for i in line), np.int64, sum(lengths))
        return cls(ids, np.cumsum([0, *lengths]))

    def __len__(self) -> int:
        return len(self.starts) - 1

    @functools.cached_property
    def lengths(self) -> np.ndarray:
        """Raises: ValueError if the starts fall, or rise too far for a sentence."""
        lengths = np.empty(len(self), dtype=np.int32)
        for first in range(0, len(self), 1 << 20):
            part = slice(first, first + (1 << 20))
            found = np.diff(self.starts[first : part.stop + 1])
            if not 0 <= found.min() <= found.max() < 1 << 31:
                raise ValueError("the starts of sentences do not rise")
            lengths[part] = found
        return lengths

    def end_to_end(self, chosen: np.ndarray) -> np.ndarray:
        """The ids of some sequences, one after another. Shapes: chosen [B] -> [N]"""
        starts = self.starts[chosen]
        lengths = self.starts[chosen + 1] - starts
        if isinstance(self.ids, StoredIds):
            return self.ids.read(starts, lengths)
        first = np.repeat(starts - (np.cumsum(lengths) - lengths), lengths)
        return self.ids[first + np.arange(len(first))]

    def padded(self, chosen: np.ndarray, first: int | None = None) -> np.ndarray:
        """Stack some sequences, each with EOS and, if given, `first` before it.

        Shapes: chosen [B] -> [B, longest]
        """
        lengths = self.starts[chosen + 1] - self.starts[chosen]
        columns = np.arange(lengths.max(initial=0))
        inside = columns < lengths[:, None]
        begin = int(first is not None)
        out = np.full((len(chosen), begin + len(columns) + 1), PAD_ID, dtype=np.int64)
        body = out[:, begin:-1]
        body[inside] = self.end_to_end(chosen)
        out[np.arange(len(chosen)), begin + lengths] = EOS_ID
        if first is not None:
            out[:, 0] = first
        return out


@dataclass(frozen=True)
class Batch:
    """Sentence pairs, padded. Shapes: source [B, S], target [B, T + 1] from BOS on."""

    source: np.ndarray
    target: np.ndarray

    @property
    def source_tokens(self) -> int:
        return int((self.source != PAD_ID).sum())

    @property
    def target_tokens(self) -> int:
        """Tokens to predict, EOS included."""
        return int((self.target[:, 1:] != PAD_ID).sum())

    def split(self, parts: int) -> list[Batch]:
        """Cut into `parts` batches of as many sentences (fewer if there are fewer)."""
        return [
            Batch(_trimmed(source), _trimmed(target))
            for source, target in zip(
                np.array_split(self.source, parts),
                np.array_split(self.target, parts),
                strict=True,
            )
            if len(source)
        ]


def _trimmed(ids: np.ndarray) -> np.ndarray:
    """Drop the columns at the end that hold only padding."""
    return ids[:, : int((ids != PAD_ID).sum(axis=1).max())]


class Corpus:
    """Encoded sentence pairs, on disk or in memory."""

    def __init__(self, source: Ragged, target: Ragged, dropped_blank: int = 0) -> None:
        self.source, self.target = source, target
        self.dropped_blank = dropped_blank

    def __len__(self) -> int:
        return len(self.source)

    def batch(self, chosen: np.ndarray) -> Batch:
        return Batch(self.source.padded(chosen), self.target.padded(chosen, BOS_ID))

    def within(self, max_length: int) -> np.ndarray:
        """Indices of pairs of at most `max_length` tokens a side, EOS included."""
        longest = np.maximum(self.source.lengths, self.target.lengths)
        return np.flatnonzero(longest < max_length).astype(INDEX)

    def batches(
        self, pairs: np.ndarray, max_tokens: int, rng: np.random.Generator | None = None
    ) -> list[np.ndarray]:
        """Cut `pairs` into batches of alike lengths: a list of arrays of indices.

        Every pair is in exactly one batch. A batch holds about `max_tokens` source and
        as many target tokens, and at most 1.25 times as many with padding (a longer
        pair stands alone). The pairs are halved again and again, each time by the side
        whose halves pad less. With `rng`, ties and the batches are shuffled.
        """
        if rng is not None:
            pairs = rng.permutation(pairs)
        batches = [
            batch
            for first in range(0, len(pairs), PAIRS_TOGETHER)
            for batch in self._cut(pairs[first : first + PAIRS_TOGETHER], max_tokens)
        ]
        if rng is not None:
            rng.shuffle(batches)
        return batches

    def _cut(self, pairs: np.ndarray, max_tokens: int) -> list[np.ndarray]:
        source, target = self.source.lengths[pairs] + 1, self.target.lengths[pairs] + 1
        total = max(source.sum(), target.sum())
        first = np.arange(len(pairs), dtype=INDEX)
        waiting = [(first, max(1, round(total / max_tokens)))]
        batches = []
        while waiting:
            group, parts = waiting.pop()
            s, t = source[group], target[group]
            padded = max(s.max(), t.max()) * len(group)
            if len(group) == 1 or (parts == 1 and padded <= 1.25 * max_tokens):
                batches.append(pairs[group])
                continue
            parts = max(parts, 2)
            tokens = s + t
            halves = [_cut(side, tokens, (parts // 2) / parts) for side in (s, t)]
            low, high = min(
                halves,
                key=lambda half: sum(len(x) * (s[x].max() + t[x].max()) for x in half),
            )
            del s, t, tokens, halves
            waiting.append((group[low], parts // 2))
            waiting.append((group[high], parts - parts // 2))
        return batches


def _cut(
    lengths: np.ndarray, tokens: np.ndarray, share: float
) -> tuple[np.ndarray, np.ndarray]:
    """Split positions into the shorter with `share` of all tokens, and the longer."""
    order = np.argsort(lengths, kind="stable").astype(INDEX)
    sums = np.cumsum(tokens[order])
    cut = int(np.searchsorted(sums, sums[-1] * share))
    cut = min(max(cut, 1), len(order) - 1)
    return order[:cut], order[cut:]


class BatchStream:
    """The endless sequence of training batches, epoch after epoch.

    A function of the seed: (epoch, position) is all there is to save.
    """

    def __init__(
        self,
        corpus: Corpus,
        training: TrainingConfig,
        epoch: int = 0,
        position: int = 0,
    ) -> None:
        self.corpus, self.training = corpus, training
        self.pairs = corpus.within(training.max_length)
        if not len(self.pairs):
            raise ValueError(
                f"expected training pairs of at most {training.max_length} tokens, "
                "found none"
            )
        self.epoch, self.position = epoch, position
        self._batches = self._shuffled()

    def _shuffled(self) -> list[np.ndarray]:
        rng = np.random.default_rng((self.training.seed, self.epoch))
        return self.corpus.batches(self.pairs, self.training.max_tokens, rng)

    def __len__(self) -> int:
        """Batches in this epoch."""
        return len(self._batches)

    def __next__(self) -> Batch:
        while self.position >= len(self._batches):
            self.epoch, self.position = self.epoch + 1, 0
            self._batches = self._shuffled()
        self.position += 1
        return self.corpus.batch(self._batches[self.position - 1])

    def largest(self) -> list[Batch]:
        """Batches of this epoch that take the most memory.

        Those with the most source tokens, target tokens and pairs of both, as attention
        has, with padding.
        """
        source, target = self.corpus.source.lengths, self.corpus.target.lengths
        batches = self._batches
        sizes = [(len(b), source[b].max() + 1, target[b].max() + 1) for b in batches]
        rows, s, t = np.array(sizes, dtype=np.int64).T
        found = {int(count.argmax()) for count in (rows * s, rows * t, rows * s * t)}
        return [self.corpus.batch(batches[i]) for i in sorted(found)]

    def padding_share(self) -> float:
        """The share of this epoch's computed tokens that is padding."""
        source, target = self.corpus.source.lengths, self.corpus.target.lengths
        used = padded = 0
        for batch in self._batches:
            for lengths in (source[batch] + 1, target[batch] + 1):
                used += int(lengths.sum())
                padded += int(lengths.max()) * len(lengths)
        return 1 - used / padded


class ReadAhead:
    """Batches of a stream, read in a thread before they are asked for.

    `epoch` and `position` are those after the last batch that was taken.
    """

    def __init__(self, stream: BatchStream, count: int = 4) -> None:
        self.epoch, self.position = stream.epoch, stream.position
        self._stream, self._reader = stream, ThreadPoolExecutor(1)
        self._read = deque(self._reader.submit(self._next) for _ in range(count))

    def _next(self) -> tuple[Batch, int, int]:
        batch = next(self._stream)
        return batch, self._stream.epoch, self._stream.position

    def __next__(self) -> Batch:
        batch, self.epoch, self.position = self._read.popleft().result()
        self._read.append(self._reader.submit(self._next))
        return batch


def cached_tokenizer(
    text: TextPair, vocab_size: int, cache: Path, num_threads: int
) -> Tokenizer:
    """Learn the joint vocabulary of both sides, or take it from the cache.

    Raises: ValueError as `Tokenizer.train`.
    """

    def build(partial: Path) -> None:
        lines = itertools.chain.from_iterable(text.lines())
        partial.write_bytes(Tokenizer.train(lines, vocab_size, num_threads).model)

    path = built_once(cache / f"{text.digest()}-bpe{vocab_size}.model", build)
    return Tokenizer(path.read_bytes())


def encoded_corpus(
    text: TextPair, tokenizer: Tokenizer, cache: Path, num_threads: int = 1
) -> Corpus:
    """Encode a pair of files, or open the ids that an earlier run encoded.

    Pairs with a blank side are left out.

    Raises: ValueError if the files differ in length, are not UTF-8 or hold no pair.
    """
    key = hashlib.blake2b(tokenizer.model, digest_size=16, key=text.digest().encode())

    def build(partial: Path) -> None:
        _write_corpus(text, tokenizer, partial, num_threads)

    return read_corpus(built_once(cache / key.hexdigest(), build))


def read_corpus(folder: Path) -> Corpus:
    """Open the ids that `encoded_corpus` wrote, after a look at their checksums.

    Raises: ValueError if a file is damaged.
    """
    try:
        header = json.loads((folder / "corpus.json").read_text(encoding="utf-8"))
        dtype, sides = header["dtype"], []
        if dtype not in ("uint16", "int32"):
            raise ValueError(f"ids of type {dtype!r}")
        for side in ("source", "target"):
            for name in (f"{side}.ids", f"{side}.starts"):
                if _checksum(folder / name) != header["checksums"][name]:
                    raise ValueError(f"{name} has another checksum")
            ids = StoredIds(folder / f"{side}.ids", dtype)
            starts = np.asarray(np.memmap(folder / f"{side}.starts", "int64", mode="r"))
            ragged = Ragged(ids, starts)
            if starts[0] != 0 or starts[-1] != len(ids) or len(ragged.lengths) < 1:
                raise ValueError(f"{side}.starts does not fit {side}.ids")
            sides.append(ragged)
        if len(sides[0]) != len(sides[1]):
            raise ValueError("the sides differ in length")
        return Corpus(sides[0], sides[1], header["dropped_blank"])
    except (ValueError, KeyError, TypeError, RecursionError, OSError) as error:
        raise ValueError(
            f"{folder}: damaged cache ({error}), delete it and start again"
        ) from error


def _checksum(path: Path) -> int:
    total = 0
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            total = crc32(block, total)
    return total


def _write_corpus(
    text: TextPair, tokenizer: Tokenizer, folder: Path, num_threads: int
) -> None:
    dtype = "uint16" if tokenizer.vocab_size <= 1 << 16 else "int32"
    folder.mkdir()
    ends = {"source": 0, "target": 0}
    pairs = blank = 0
    checksums: dict[str, int] = {}

    def append(name: str, values: np.ndarray) -> None:
        with open(folder / name, "ab") as file:
            file.write(values.data)
        checksums[name] = crc32(values.data, checksums.get(name, 0))

    for side in ends:
        append(f"{side}.starts", np.zeros(1, dtype=np.int64))
    for chunk in _chunks(text.lines(), LINES_PER_CHUNK):
        kept = [pair for pair in chunk if pair[0].strip() and pair[1].strip()]
        blank += len(chunk) - len(kept)
        pairs += len(kept)
        for column, side in enumerate(ends):
            lines = tokenizer.encode([pair[column] for pair in kept], num_threads)
            lengths = np.fromiter(map(len, lines), dtype=np.int64, count=len(lines))
            ids = np.fromiter(itertools.chain.from_iterable(lines), dtype=dtype)
            starts = ends[side] + np.cumsum(lengths)
            ends[side] += len(ids)
            append(f"{side}.ids", ids)
            append(f"{side}.starts", starts)
    if not pairs:
        raise ValueError(
            f"{text.source}, {text.target}: expected sentence pairs, found none"
        )
    header = {"dtype": dtype, "dropped_blank": blank, "checksums": checksums}
    (folder / "corpus.json").write_text(json.dumps(header))


def _chunks(
    items: Iterable[tuple[str, str]], size: int
) -> Iterator[list[tuple[str, str]]]:
    iterator = iter(items)
    while chunk := list(itertools.islice(iterator, size)):
        yield chunk
