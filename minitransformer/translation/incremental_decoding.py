"""Incremental decoding: models that are fed one token at a time, for beam search.

A decoder is fed the newest token of each beam and returns the weights of the next one.
It keeps what earlier tokens need, such as key/value caches.

Shapes: B sentences, K beams, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from minitransformer.engine.backend import Array, array_module, fused_kernel
from minitransformer.model.transformer import Transformer
from minitransformer.translation.candidates import TokenWeights, token_weights

# The weights of a chunk, which is computed at a time: the fewer, the less memory. But
# it has at least so many rows, which are enough for an efficient product.
WEIGHTS_PER_CHUNK = 1 << 21
MIN_ROWS_PER_CHUNK = 256


class IncrementalDecoder:
    """What beam search asks of a model, which remembers the tokens fed so far."""

    def step(self, tokens: np.ndarray) -> Iterable[TokenWeights]:
        """Feed the newest token of each beam and return the weights of the next one.

        The first step feeds BOS to one beam of each sentence. The weights come in
        chunks of rows, which the caller may overwrite; a sentence's are in one chunk.

        Shapes: tokens [B K] -> [B K, V]
        """
        raise NotImplementedError

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
        self._beam_size = beam_size

    def step(self, tokens: Array) -> Iterator[TokenWeights]:
        outputs = self._outputs(tokens)
        size = max(WEIGHTS_PER_CHUNK // len(self._table), MIN_ROWS_PER_CHUNK)
        size = max(size // self._beam_size, 1) * self._beam_size  # whole sentences
        for first in range(0, len(outputs), size):
            yield token_weights(outputs[first : first + size], self._table)

    def _outputs(self, tokens: Array) -> Array:
        """Feed tokens; return the outputs of the last layer. Shapes: [B K, D]"""
        tokens = self._xp.asarray(tokens)
        if self._shortlist is not None:
            tokens = self._shortlist[tokens]
        return self._model.decode_step(tokens, self._state)

    def select(self, rows: np.ndarray) -> None:
        self._state.select(self._xp.asarray(rows), self._beam_size)

    def join(self, other: CachedDecoder) -> None:
        self._state.join(other._state)


def incremental_decoder(
    model: Transformer,
    source: Array,
    beam_size: int,
    shortlist: np.ndarray | None = None,
) -> IncrementalDecoder:
    """Encode a batch of sentences and return what decodes them; a GPU has its own.

    Shapes: source ids [B, S], shortlist of token ids [any]
    """
    table = model.embedding.table.data
    decoder = fused_kernel("incremental_decoder", (table,), CachedDecoder)
    started: IncrementalDecoder = decoder(model, source, beam_size, shortlist)
    return started
