"""Constraints on translations: which tokens may follow (beyond the paper).

A constraint stands between the model and the search, as an `IncrementalDecoder` that
excludes tokens. Their probability goes to padding, which no search produces. So the
search need not know of constraints, and log-probabilities remain those of the model.

Shapes: B sentences, K beams, V vocabulary, or a shortlist of it.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from functools import cache

import numpy as np

from minitransformer.engine.backend import Array, array_module
from minitransformer.settings.config import EOS_ID, PAD_ID, TranslationConfig
from minitransformer.text.tokenizer import SPACE, Tokenizer
from minitransformer.translation.incremental_decoding import IncrementalDecoder


class Pieces:
    """The word pieces of a vocabulary by the bytes that they write.

    A piece that begins a word writes a space first; special symbols write nothing.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.written = tokenizer.written_bytes()
        self.sorted = sorted((text, i) for i, text in enumerate(self.written) if text)
        self.ids: dict[bytes, list[int]] = {}
        for text, i in self.sorted:
            self.ids.setdefault(text, []).append(i)
        self.longest = max(map(len, self.ids))

    def starting_with(self, text: bytes) -> list[int]:
        """Return the pieces that write `text` and something after it."""
        first = bisect.bisect_right(self.sorted, (text, len(self.written)))
        last = bisect.bisect_left(self.sorted, (text + b"\xff", 0))
        return [i for _, i in self.sorted[first:last]]

    def prefix(self, text: str) -> Prefix | None:
        """Return the prefix `text`, or None if it has no characters but spaces.

        Raises: ValueError if no pieces write it.
        """
        normal = self._tokenizer.normalise(text).replace(SPACE, " ")
        if not normal.strip():
            return None
        return Prefix(self, normal + " " * text[-1:].isspace())


class Prefix:
    """The text that a translation begins with: pieces may follow that agree with it.

    The text is normalised as the model's text is, but may end anywhere, within a word
    or after a space. A state is the number of bytes of `text` that have been written.
    The last piece may go beyond its end. No state is a dead end.
    """

    def __init__(self, pieces: Pieces, text: str) -> None:
        self.text, self.bytes, self._written = text, text.encode(), pieces.written
        length = len(self.bytes)
        self._next: list[list[int]] = [[] for _ in range(length)]
        for state in reversed(range(length)):
            for end in range(state + 1, min(state + pieces.longest, length) + 1):
                if end == length or self._next[end]:
                    self._next[state] += pieces.ids.get(self.bytes[state:end], ())
            self._next[state] += pieces.starting_with(self.bytes[state:])
        if not self._next[0]:
            raise ValueError(f"the vocabulary cannot write {text.strip()[:40]!r}")

    def allowed(self, state: int) -> list[int]:
        """Return the tokens that may follow."""
        return self._next[state]

    def advance(self, state: int, token: int) -> int:
        """Return the state after a token."""
        return min(state + len(self._written[token]), len(self.bytes))

    @property
    def tokens(self) -> set[int]:
        """Tokens with which the text can be written, whatever of it has been written.

        Those that go beyond its end are among them only where no others may follow.
        """
        length, found = len(self.bytes), set()
        for state, tokens in enumerate(self._next):
            within = [t for t in tokens if state + len(self._written[t]) <= length]
            found.update(within or tokens)
        return found

    def restore(self, translation: str, original: str) -> str:
        """Replace the normalised prefix of a translation by what was given for it.

        Raises: ValueError if the translation does not begin with the prefix.
        """
        normal = self.text.removeprefix(" ")
        if not translation.startswith(normal):
            raise ValueError(
                f"expected a translation that can begin with {normal[:40]!r}, "
                f"found {translation[:40]!r}: it ended too early"
            )
        return original + translation[len(normal) :]


class Constraints:
    """What the translations of some sentences must meet.

    `prefixes` has the prefix of each sentence, or None. They are met before all else:
    n-grams within a prefix may occur twice.
    """

    def __init__(
        self,
        config: TranslationConfig,
        prefixes: Sequence[Prefix | None] = (),
    ) -> None:
        self.min_len, self.ngram = config.min_len or 0, config.no_repeat_ngram or 0
        self.prefixes = prefixes if any(prefixes) else ()

    def __bool__(self) -> bool:
        """Whether anything is constrained."""
        return bool(self.min_len or self.ngram or self.prefixes)

    def prefixes_of(self, batch: np.ndarray) -> list[Prefix | None]:
        return [self.prefixes[i] if self.prefixes else None for i in batch]

    def limits(self, limits: np.ndarray, batch: np.ndarray) -> np.ndarray:
        """Return the longest outputs, which need room for prefixes and `min_len`.

        A prefix does not count. Shapes: limits [B], batch of sentences [B] -> [B]
        """
        extra = [len(p.bytes) if p else 0 for p in self.prefixes_of(batch)]
        return np.maximum(limits + extra, self.min_len + 1)

    def shortlist(self, tokens: np.ndarray, batch: np.ndarray) -> np.ndarray:
        """Add the tokens that prefixes need to a sorted shortlist of tokens."""
        needed = [p.tokens for p in self.prefixes_of(batch) if p]
        return np.union1d(tokens, np.array([*set().union(*needed)], dtype=int))

    def decoder(
        self,
        decoder: IncrementalDecoder,
        batch: np.ndarray,
        shortlist: np.ndarray | None = None,
    ) -> IncrementalDecoder:
        """Return a decoder that constrains another one of the sentences `batch`."""
        return ConstrainedDecoder(decoder, self, batch, shortlist)


class WatchedDecoder:
    """A decoder that knows the tokens fed so far, and so may exclude the next.

    Shapes: sentences [B K], numbers from 0; histories [B K, length], which begin with
    BOS
    """

    def __init__(self, decoder: IncrementalDecoder, batch_size: int) -> None:
        self._decoder = decoder
        self.sentences = np.arange(batch_size)
        self.histories = np.empty((batch_size, 0), dtype=int)

    def step(self, tokens: np.ndarray) -> Iterator[Array]:
        self.histories = np.concatenate([self.histories, tokens[:, None]], axis=1)
        blocks = list(self._decoder.step(tokens))
        xp = array_module(blocks[0])
        logits = blocks[0] if len(blocks) == 1 else xp.concatenate(blocks, axis=1)
        exclude(logits, self.excluded(logits))
        yield logits

    def excluded(self, logits: Array) -> np.ndarray:
        """Return what must not follow. Shapes: logits [B K, V] -> [B K, V] bool"""
        raise NotImplementedError

    def select(self, rows: np.ndarray) -> None:
        self.sentences, self.histories = self.sentences[rows], self.histories[rows]
        self._decoder.select(rows)


class ConstrainedDecoder(WatchedDecoder):
    """A decoder whose tokens meet constraints.

    Source: `--no-repeat-ngram-size` and `--min-len` as in fairseq (Ott et al., 2019).
    """

    def __init__(
        self,
        decoder: IncrementalDecoder,
        constraints: Constraints,
        batch: np.ndarray,
        shortlist: np.ndarray | None,
    ) -> None:
        super().__init__(decoder, len(batch))
        self._constraints = constraints
        self._shortlist = shortlist
        self._prefixes = constraints.prefixes_of(batch)
        self._written = np.zeros(len(batch), dtype=int)  # the state of each prefix
        self._columns = cache(self._columns_allowed)

    def _columns_allowed(self, sentence: int, state: int) -> np.ndarray | None:
        """Return the columns of the logits that agree with a prefix; None for all."""
        prefix = self._prefixes[sentence]
        if prefix is None or state == len(prefix.bytes):
            return None
        tokens = np.array(prefix.allowed(state), dtype=int)
        if self._shortlist is None:
            return tokens
        return np.flatnonzero(np.isin(self._shortlist, tokens))

    def step(self, tokens: np.ndarray) -> Iterator[Array]:
        if self.histories.shape[1]:  # not BOS
            ids = tokens if self._shortlist is None else self._shortlist[tokens]
            for row, (sentence, token) in enumerate(
                zip(self.sentences, ids, strict=True)
            ):
                if prefix := self._prefixes[sentence]:
                    self._written[row] = prefix.advance(self._written[row], token)
        yield from super().step(tokens)

    def select(self, rows: np.ndarray) -> None:
        self._written = self._written[rows]
        super().select(rows)

    def excluded(self, logits: Array) -> np.ndarray:
        result = np.zeros(logits.shape, dtype=bool)
        if self._constraints.ngram:
            exclude_repetitions(result, self.histories, self._constraints.ngram)
        result[:, EOS_ID] |= self.histories.shape[1] <= self._constraints.min_len
        for row, state in enumerate(zip(self.sentences, self._written, strict=True)):
            columns = self._columns(*state)
            if columns is not None:
                result[row] = True
                result[row, columns] = False
        return result


def exclude_repetitions(
    excluded: np.ndarray, histories: np.ndarray, ngram: int
) -> None:
    """Exclude tokens that would complete an n-gram that has occurred before.

    Shapes: excluded [N, V] bool, histories [N, length]
    """
    if histories.shape[1] < ngram:
        return
    windows = np.lib.stride_tricks.sliding_window_view(histories, ngram, axis=1)
    newest = histories[:, None, histories.shape[1] - ngram + 1 :]
    row, place = np.nonzero((windows[:, :, :-1] == newest).all(axis=2))
    excluded[row, windows[row, place, -1]] = True


def exclude(logits: Array, excluded: np.ndarray) -> None:
    """Set logits to -inf, and give their probability to padding.

    So log-sum-exp, and with it the probability of every other token, remains the same.

    Shapes: logits [N, V], excluded [N, V] bool
    """
    xp = array_module(logits)
    affected = np.flatnonzero(excluded.any(axis=1))
    rows, hidden = xp.asarray(affected), xp.asarray(excluded[affected])
    hidden[:, PAD_ID] = True
    chosen = logits[rows]
    highest = chosen.max(axis=1)
    total = xp.where(hidden, xp.exp(chosen - highest[:, None]), 0).sum(axis=1)
    chosen[hidden] = -xp.inf
    smallest = xp.finfo(chosen.dtype).tiny  # never log(0)
    chosen[:, PAD_ID] = highest + xp.log(xp.maximum(total, smallest))
    logits[rows] = chosen
