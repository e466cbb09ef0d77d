"""Incremental decoding: models that are fed one token at a time, for beam search.

A decoder is fed the newest token of each beam and returns the logits of the next one.
It keeps what earlier tokens need, such as key/value caches.

Shapes: B sentences, K beams, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from minitransformer.engine.backend import Array, array_module
from minitransformer.model.transformer import Transformer
from minitransformer.translation import candidates
from minitransformer.translation.candidates import TokenWeights
from minitransformer.translation.histories import Histories

# Logits of at least this many rows are computed at a time: enough for an efficient
# product.
MIN_ROWS_PER_CHUNK = 256


class IncrementalDecoder:
    """What beam search asks of a model, which remembers the tokens fed so far."""

    def step(self, tokens: np.ndarray) -> Iterable[Array]:
        """Feed the newest token of each beam and return the logits of the next one.

        The first step feeds BOS to one beam of each sentence. The logits come in chunks
        of rows, which the caller may overwrite; a sentence's are in one chunk.

        Shapes: tokens [B K] -> [B K, V]
        """
        raise NotImplementedError

    def weights(self, tokens: np.ndarray) -> Iterator[TokenWeights]:
        """Do a `step`, and return the weights of tokens instead of the logits."""
        return map(candidates.exponentials, self.step(tokens))

    def select(self, rows: np.ndarray) -> None:
        """Continue with the beams `rows`, K for each sentence that is left.

        A beam that is extended in several ways is listed several times.

        Shapes: rows [B' K]
        """
        raise NotImplementedError

    def join(self, other: Any) -> None:
        """Add the beams of another decoder of the same kind, after as many steps."""
        raise NotImplementedError


class CachedDecoder(IncrementalDecoder):
    """One Transformer that decodes a batch of sentences with key/value caches.

    With a shortlist, it takes and returns positions in that list instead of token ids.
    """

    # The logits of a chunk: the fewer, the less memory.
    logits_per_chunk = 1 << 21

    def __init__(
        self,
        model: Transformer,
        source: Array,
        beam_size: int,
        shortlist: np.ndarray | None = None,
    ) -> None:
        self._model, self._xp = model, array_module(source)
        self._shortlist = None if shortlist is None else self._xp.asarray(shortlist)
        table = model.embedding.table.data
        self._table = table if shortlist is None else table[self._shortlist]
        self._state = model.start_decoding(source)
        self._beam_size, self._histories = beam_size, Histories(len(source))

    def step(self, tokens: np.ndarray) -> Iterator[Array]:
        return (candidates.project(rows, self._table) for rows in self._outputs(tokens))

    def weights(self, tokens: np.ndarray) -> Iterator[TokenWeights]:
        return (
            candidates.token_weights(rows, self._table)
            for rows in self._outputs(tokens)
        )

    def _outputs(self, tokens: np.ndarray) -> Iterator[Array]:
        """Feed tokens, and yield the outputs of the last layer in chunks of rows."""
        tokens = self._xp.asarray(tokens)
        if self._shortlist is not None:
            tokens = self._shortlist[tokens]
        outputs = self._model.decode_step(tokens, self._state)
        self._histories.add_token()
        size = max(self.logits_per_chunk // len(self._table), MIN_ROWS_PER_CHUNK)
        size = max(size // self._beam_size, 1) * self._beam_size  # whole sentences
        for first in range(0, len(tokens), size):
            yield outputs[first : first + size]

    def select(self, rows: np.ndarray) -> None:
        changed = self._histories.select(rows) if self._xp is np else None
        self._state.select(self._xp.asarray(rows), self._beam_size, changed)

    def join(self, other: CachedDecoder) -> None:
        self._state.join(other._state)
        self._histories.join(other._histories)
