"""Batches of sentence pairs of similar length (section 5.1).

An epoch is a shuffled list of such batches. Shapes: B batch, S source, T target.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from minitransformer.settings.config import BOS_ID, PAD_ID, TrainingConfig
from minitransformer.text.ids import Ragged

# The type of indices of pairs: half the memory of int64, for millions of pairs.
INDEX = np.int32


@dataclass(frozen=True)
class Batch:
    """Padded pairs, targets with BOS. Shapes: source [B, S], target [B, T + 1]"""

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
        """Divide the sentences evenly among `parts` batches; leave out empty ones."""
        sources = np.array_split(self.source, parts)
        targets = np.array_split(self.target, parts)
        return [
            Batch(_trim(source), _trim(target))
            for source, target in zip(sources, targets, strict=True)
            if len(source)
        ]


def _trim(ids: np.ndarray) -> np.ndarray:
    """Drop the last columns that hold nothing but padding."""
    return ids[:, : int((ids != PAD_ID).sum(axis=1).max())]


class Batches(Protocol):
    """Batches one after another; the next is number `position` of `epoch`."""

    epoch: int
    position: int

    def __next__(self) -> Batch: ...


class ParallelCorpus:
    """Encoded pairs; `dropped_blank` others had a blank side and were left out."""

    notes: Sequence[str] = ()  # for the log: characters that the vocabulary lacks
    median_sentences = 1  # in a line of the source

    def __init__(self, source: Ragged, target: Ragged, dropped_blank: int = 0) -> None:
        self.source = source
        self.target = target
        self.dropped_blank = dropped_blank

    def __len__(self) -> int:
        return len(self.source)

    def batch(self, pairs: np.ndarray) -> Batch:
        return Batch(self.source.pad(pairs), self.target.pad(pairs, BOS_ID))

    def filter_by_length(self, max_length: int) -> np.ndarray:
        """Return the indices of pairs of at most max_length tokens a side, with EOS.

        Raises: ValueError if there are none.
        """
        longest = np.maximum(self.source.lengths, self.target.lengths)
        if (kept := np.flatnonzero(longest + 1 <= max_length)).size:
            return kept.astype(INDEX)
        raise ValueError(
            f"expected pairs of at most {max_length} tokens a side (--max-length), "
            f"found none among {len(self):,}"
        )

    def batch_by_length(
        self, pairs: np.ndarray, max_tokens: int, rng: np.random.Generator | None = None
    ) -> list[np.ndarray]:
        """Divide `pairs` into batches of similar lengths: a list of arrays of indices.

        Every pair is in exactly one batch. A batch holds about `max_tokens` tokens of
        its longer side, and at most 1.25 times as many with padding (a longer pair is
        alone in its batch). With `rng`, the batches are shuffled, and so are pairs of
        equal length.
        """
        # Sorting keeps the order of pairs of equal length: it is random from here on.
        if rng is not None:
            pairs = rng.permutation(pairs)
        batches = self._bisect(pairs, max_tokens)
        if rng is not None:
            rng.shuffle(batches)
        return batches

    def _bisect(self, pairs: np.ndarray, max_tokens: int) -> list[np.ndarray]:
        """Halve `pairs` by length again and again, until each group fits a batch.

        Sorted by source or by target length, a group has other halves: each time, the
        order whose halves need less padding is taken.
        """
        source = self.source.lengths[pairs] + 1
        target = self.target.lengths[pairs] + 1
        total = max(source.sum(), target.sum())
        everything = np.arange(len(pairs), dtype=INDEX)
        waiting = [(everything, max(1, round(total / max_tokens)))]
        batches = []
        while waiting:
            group, parts = waiting.pop()  # a group becomes about `parts` batches
            s = source[group]
            t = target[group]
            # A group that is small enough, padding included, is a batch.
            padded = max(int(s.max()), int(t.max())) * len(group)
            if len(group) == 1 or (parts == 1 and padded <= 1.25 * max_tokens):
                batches.append(pairs[group])
                continue
            # Otherwise halve it by source and by target length; keep what pads less.
            parts = max(parts, 2)
            share = (parts // 2) / parts
            halves = [_short_and_long(lengths, s + t, share) for lengths in (s, t)]
            short, long = min(
                halves,
                key=lambda half: sum(
                    len(x) * (int(s[x].max()) + int(t[x].max())) for x in half
                ),
            )
            waiting.append((group[short], parts // 2))
            waiting.append((group[long], parts - parts // 2))
        return batches


def _short_and_long(
    lengths: np.ndarray, tokens: np.ndarray, share: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices of the shortest sequences, and of the rest.

    The shortest are at least one, and together have less than `share` of all tokens.
    """
    order = np.argsort(lengths, kind="stable").astype(INDEX)
    sums = np.cumsum(tokens[order])
    end = max(1, int(np.searchsorted(sums, sums[-1] * share)))
    return order[:end], order[end:]


class BatchStream:
    """The endless sequence of training batches, epoch after epoch.

    The seed determines the sequence: a checkpoint saves only the `epoch` and, as
    `position`, how many of its batches have been taken. `pairs` are the indices of the
    pairs that are not too long, and `batches` those of each batch of this epoch.
    """

    def __init__(
        self,
        corpus: ParallelCorpus,
        training: TrainingConfig,
        epoch: int = 0,
        position: int = 0,
    ) -> None:
        self.corpus = corpus
        self.training = training
        self.pairs = corpus.filter_by_length(training.max_length)
        self.epoch = epoch
        self.position = position
        self._shuffle()

    def _shuffle(self) -> None:
        rng = np.random.default_rng((self.training.seed, self.epoch))
        tokens = self.training.max_tokens
        self.batches = self.corpus.batch_by_length(self.pairs, tokens, rng)

    def __len__(self) -> int:
        """The number of batches in this epoch."""
        return len(self.batches)

    def __next__(self) -> Batch:
        while self.position >= len(self.batches):
            self.epoch += 1
            self.position = 0
            self._shuffle()
        self.position += 1
        return self.corpus.batch(self.batches[self.position - 1])

    def largest_batches(self) -> list[Batch]:
        """Return the batches of this epoch that may need the most memory.

        They have the most source tokens, the most target tokens, or the most pairs of
        both (for cross-attention), padding included.
        """
        source = self.corpus.source.lengths
        target = self.corpus.target.lengths
        # The rows of each batch, and its longest source and target with EOS.
        batches = self.batches
        sizes = [(len(b), source[b].max() + 1, target[b].max() + 1) for b in batches]
        rows, s, t = np.array(sizes, dtype=np.int64).T
        largest = {int(count.argmax()) for count in (rows * s, rows * t, rows * s * t)}
        return [self.corpus.batch(batches[i]) for i in sorted(largest)]
