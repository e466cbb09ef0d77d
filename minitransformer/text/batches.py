"""From text to batches of ids (section 5.1).

Text is encoded once into ids on disk, in a cache folder named by the content of the
text and the tokenizer. An epoch is a shuffled list of batches of sentences of about
the same length. Shapes: B batch, S source, T target.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from minitransformer.settings.config import BOS_ID, PAD_ID, TrainingConfig
from minitransformer.text.ids import Ragged

# Indices of pairs: half of int64's memory, which counts where there are millions.
INDEX = np.int32

# Pairs that are sorted by length together: enough for batches with little padding, few
# enough that sorting needs little memory beside the corpus.
PAIRS_TOGETHER = 4_000_000


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


class ParallelCorpus:
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
        corpus: ParallelCorpus,
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
