"""Several models that translate together, by the mean of their probabilities (Table 2).

Shapes: B sentences, K beams, V vocabulary.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Sequence

import numpy as np

from minitransformer.engine.backend import Array, array_module
from minitransformer.model.transformer import Transformer
from minitransformer.translation.incremental_decoding import (
    CachedDecoder,
    IncrementalDecoder,
    TokenWeights,
    group_maxima,
)


class Ensemble:
    """Several models whose probabilities are averaged, as in the ensembles of Table 2.

    Raises: ValueError if there is no model, or if their vocabularies differ in size.
    """

    def __init__(self, members: Sequence[Transformer]) -> None:
        sizes = {member.config.vocab_size for member in members}
        if len(sizes) != 1:
            raise ValueError(
                "an ensemble: expected models of one vocabulary, got sizes "
                f"{', '.join(map(str, sorted(sizes))) or 'of none'}"
            )
        self.members, self.embedding = list(members), members[0].embedding

    @property
    def position_limit(self) -> int | None:
        """The smallest limit of the members, or None if no member has one."""
        limits = [m.position_limit for m in self.members if m.position_limit]
        return min(limits, default=None)

    def decoder(
        self, source: Array, beam_size: int, shortlist: np.ndarray | None = None
    ) -> EnsembleDecoder:
        """Return what `incremental_decoder` returns for one model."""
        rest = source, beam_size, shortlist
        return EnsembleDecoder([CachedDecoder(m, *rest) for m in self.members])


class EnsembleDecoder(IncrementalDecoder):
    """Decoders whose probabilities are averaged at every step."""

    def __init__(self, members: Sequence[IncrementalDecoder]) -> None:
        self._members = members

    def step(self, tokens: np.ndarray) -> Iterator[TokenWeights]:
        steps = [member.step(tokens) for member in self._members]
        for chunks in zip(*steps, strict=True):
            each = (weights.values / weights.sums[:, None] for weights in chunks)
            total = functools.reduce(operator.add, each)
            # Weights need no norm, so a sum serves as well as a mean.
            sums = array_module(total).full(len(total), len(chunks), total.dtype)
            yield TokenWeights(total, sums, group_maxima(total))

    def select(self, rows: np.ndarray) -> None:
        for member in self._members:
            member.select(rows)

    def join(self, other: EnsembleDecoder) -> None:
        for member, joining in zip(self._members, other._members, strict=True):
            member.join(joining)
