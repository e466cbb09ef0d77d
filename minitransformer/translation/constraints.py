"""Constraints on translations: the text that they begin with (beyond the paper).

A constraint stands between the model and the search, as an `IncrementalDecoder` that
sets the weights of tokens to 0, but not their sum. So the search need not know of
constraints, and log-probabilities remain those of the model.

Shapes: B sentences, K beams, V vocabulary.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from minitransformer.engine.backend import Array, array_module
from minitransformer.settings.config import UNK_ID
from minitransformer.text.clean import clean
from minitransformer.text.tokenizer import SPACE, Tokenizer
from minitransformer.translation.incremental_decoding import (
    IncrementalDecoder,
    TokenWeights,
    group_maxima,
)

# How many beginnings of words a `PrefixFinder` caches the endings of.
MAX_ENDINGS = 1024


@dataclass(frozen=True)
class Prefix:
    """The text that a translation begins with. It may end within a word.

    Its tokens are those into which the tokenizer cuts a text that begins with it. Other
    pieces could write the same letters, but the model has never seen them there. The
    tokens `first` come first, then one of `ways`: its last token may go beyond the
    prefix, and no way begins with another one.

    `text` is normalised, as the model's text is.
    """

    text: str
    first: list[int]
    ways: list[list[int]]

    @cached_property
    def most_tokens(self) -> int:
        """The most tokens that it takes to write the prefix."""
        return len(self.first) + max(map(len, self.ways))

    def following(self, written: list[int]) -> set[int]:
        """Return the tokens that may follow the written ones; none if all may."""
        # First the fixed tokens, then all ways that begin with the tokens after them.
        if len(written) < len(self.first):
            return {self.first[len(written)]}
        begun = written[len(self.first) :]
        n = len(begun)
        return {way[n] for way in self.ways if len(way) > n and way[:n] == begun}

    def restore(self, translation: str, original: str) -> str:
        """Replace the normalised prefix of a translation by the original one.

        Raises: ValueError if the translation does not begin with the prefix.
        """
        if not translation.startswith(self.text):
            raise ValueError(
                f"expected a translation that begins with {self.text[:40]!r}, "
                f"got {translation[:40]!r}: the model has too few positions"
            )
        return original + translation[len(self.text) :]


class PrefixFinder:
    """Makes prefixes from text, for one vocabulary."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        if not tokenizer.normalise("a").startswith(SPACE):
            raise ValueError(
                "--prefix: expected a vocabulary that puts a space before the first "
                "word, got one that does not"
            )
        written = ((text, i) for i, text in enumerate(tokenizer.written()) if text)
        self._pieces = sorted(written)
        self._longest = max(len(text) for text, _ in self._pieces)
        self._endings = lru_cache(MAX_ENDINGS)(self._find_endings)

    def find(self, text: str, limit: float = math.inf) -> Prefix | None:
        """Return the prefix `text` of at most `limit` tokens, or None if it is blank.

        Raises: ValueError if it is longer, or the vocabulary has no pieces for it.
        """
        # The last word may go on, unless white space follows it.
        text = clean(text)
        words = self._tokenizer.normalise(text).replace(SPACE, " ").split()
        if not words:
            return None
        normal = " ".join(words)
        unfinished = "" if text[-1].isspace() else words.pop()
        tokens, first = self._tokenizer.encode([normal, " ".join(words)])
        # The prefix must fit, and be made of pieces that the model writes.
        if len(tokens) > limit:
            raise ValueError(
                f"expected at most {limit} tokens (--max-input), got {len(tokens)}"
            )
        if UNK_ID in tokens:
            raise ValueError(
                f"expected text that the vocabulary can write, got {normal[:40]!r}"
            )
        ways = self._endings(unfinished)
        return Prefix(normal if unfinished else normal + " ", first, ways)

    def _find_endings(self, word: str) -> list[list[int]]:
        """Return the ways to write a word that begins with `word`."""
        if not word:
            return [[token] for token, _ in self._beginning_with(SPACE)]
        # The last piece begins at any character, and writes at least the rest.
        texts = [word]
        ways = self._tokenizer.encode(texts)
        ends = range(max(len(word) - self._longest, 0), len(word))
        before = self._tokenizer.encode([word[:end] for end in ends])
        for end, tokens in zip(ends, before, strict=True):
            rest = word[end:] if end else SPACE + word
            for token, piece in self._beginning_with(rest):
                ways.append([*tokens, token])
                texts.append(word[:end] + piece.removeprefix(SPACE).replace(SPACE, " "))
        # The tokenizer must cut the text in this way.
        cuts = self._tokenizer.encode(texts)
        return [way for way, cut in zip(ways, cuts, strict=True) if way == cut]

    def _beginning_with(self, text: str) -> Iterator[tuple[int, str]]:
        """Yield the pieces that begin with `text`, each with its own text."""
        for place in range(
            bisect.bisect_left(self._pieces, (text, 0)), len(self._pieces)
        ):
            piece, token = self._pieces[place]
            if not piece.startswith(text):
                return
            yield token, piece


class Constraints:
    """The prefix of each sentence's translation, or None."""

    def __init__(self, prefixes: Sequence[Prefix | None]) -> None:
        self.prefixes = prefixes

    def limits(self, limits: np.ndarray, batch: np.ndarray) -> np.ndarray:
        """Return the lengths of the longest outputs. Prefixes do not count in `limits`.

        Shapes: limits, batch [B] -> [B]
        """
        prefixes = (self.prefixes[i] for i in batch)
        return limits + [prefix.most_tokens if prefix else 0 for prefix in prefixes]

    def decoder(
        self, decoder: IncrementalDecoder, batch: np.ndarray
    ) -> IncrementalDecoder:
        """Return a decoder that constrains another one, for the sentences `batch`."""
        if not any(self.prefixes):
            return decoder
        return PrefixDecoder(decoder, [(self.prefixes[i], []) for i in batch])


class FilteringDecoder(IncrementalDecoder):
    """A decoder that excludes some of the tokens of another one.

    Which ones depends on what `beams` has of each beam.
    """

    def __init__(self, decoder: IncrementalDecoder, beams: list[Any]) -> None:
        self._decoder = decoder
        self._beams = beams

    def excluded(self, beams: list[Any], weights: Array) -> np.ndarray:
        """Mark the tokens of some beams that must not follow.

        Shapes: weights [N, V] -> [N, V] bool
        """
        raise NotImplementedError

    def step(self, tokens: np.ndarray) -> Iterator[TokenWeights]:
        first = 0
        for weights in self._decoder.step(tokens):
            values = weights.values
            beams = self._beams[first : first + len(values)]
            first += len(values)
            values[array_module(values).asarray(self.excluded(beams, values))] = 0
            yield weights._replace(maxima=group_maxima(values))

    def select(self, rows: np.ndarray) -> None:
        self._beams = [self._beams[row] for row in rows]
        self._decoder.select(rows)

    def join(self, other: FilteringDecoder) -> None:
        self._beams += other._beams
        self._decoder.join(other._decoder)


class PrefixDecoder(FilteringDecoder):
    """A decoder whose tokens first write prefixes.

    A beam has its prefix, or None, and the tokens so far.
    """

    def step(self, tokens: np.ndarray) -> Iterator[TokenWeights]:
        self._beams = [
            (prefix, [*written, token])
            for (prefix, written), token in zip(
                self._beams, tokens.tolist(), strict=True
            )
        ]
        return super().step(tokens)

    def excluded(self, beams: list[Any], weights: Array) -> np.ndarray:
        result = np.zeros(weights.shape, dtype=bool)
        for row, (prefix, written) in enumerate(beams):
            # The first token is BOS.
            if prefix and (following := prefix.following(written[1:])):
                result[row] = True
                result[row, [*following]] = False
        return result
