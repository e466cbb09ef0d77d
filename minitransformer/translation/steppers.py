"""Models as beam search sees them: fed a token to each beam, they say what may follow.

Shapes: B sentences, K beams, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from minitransformer.engine import ops
from minitransformer.engine.autograd import Tensor
from minitransformer.engine.backend import Array, array_module, as_float32, fused_kernel
from minitransformer.model.layers import Embedding
from minitransformer.model.transformer import Transformer
from minitransformer.settings.config import ModelConfig

# Logits computed and searched at a time: enough columns for an efficient product, few
# enough to stay in the cache.
LOGITS_PER_BLOCK = 1 << 20
MIN_COLUMNS_PER_BLOCK = 1024


class Stepper(Protocol):
    """What beam search asks of a model that remembers the tokens fed so far."""

    def step(self, tokens: np.ndarray) -> Iterable[Array]:
        """Feed each beam's last token; unnormalised log-probabilities of the next.

        The first step feeds one beam of each sentence, BOS.

        Shapes: tokens [B K] -> [B K, V], in blocks of columns that may be overwritten
        """
        ...

    def select(self, rows: np.ndarray) -> None:
        """Go on with `rows` of the current beams, K of each sentence that is left.

        Shapes: rows [B' K]
        """
        ...


class TransformerStepper:
    """A Transformer over a batch of source sentences, with cached keys and values.

    With a shortlist, its tokens alone can follow, and are named by their places in it.
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

    def step(self, tokens: np.ndarray) -> Iterator[Array]:
        tokens = self._xp.asarray(tokens)
        if self._shortlist is not None:
            tokens = self._shortlist[tokens]
        outputs = Tensor(self._model.decode_step(tokens, self._state))
        size = max(LOGITS_PER_BLOCK // len(tokens), MIN_COLUMNS_PER_BLOCK)
        if self._xp is not np:
            size = len(self._table)
        for first in range(0, len(self._table), size):
            columns = Tensor(self._table[first : first + size].T)
            yield as_float32(ops.linear(outputs, columns).data)

    def select(self, rows: np.ndarray) -> None:
        self._state.select(self._xp.asarray(rows), self._beam_size)


class Ensemble:
    """Several models whose probabilities are averaged (Table 2 compares with them).

    They share a vocabulary; the one that takes the shortest sentences sets the limit.

    Raises: ValueError if they are none, or their vocabularies differ in size.
    """

    def __init__(self, members: Sequence[Transformer]) -> None:
        sizes = {member.config.vocab_size for member in members}
        if len(sizes) != 1:
            raise ValueError(
                "an ensemble: expected models of one vocabulary, got sizes "
                f"{', '.join(map(str, sorted(sizes))) or 'of none'}"
            )
        self.members = list(members)

    @property
    def config(self) -> ModelConfig:
        """The first member's, with the shortest limit of all."""
        limited = [
            m.config for m in self.members if m.config.position_limit is not None
        ]
        if not limited:
            return self.members[0].config
        shortest = min(limited, key=lambda config: config.max_positions)
        return replace(
            self.members[0].config,
            positions="learned",
            max_positions=shortest.max_positions,
        )

    @property
    def embedding(self) -> Embedding:
        return self.members[0].embedding


class EnsembleStepper:
    """Steppers whose members' probabilities are averaged at every step."""

    def __init__(self, members: Sequence[Stepper]) -> None:
        self._members = members

    def step(self, tokens: np.ndarray) -> Iterator[Array]:
        total: Array = None
        for member in self._members:
            blocks = [block.copy() for block in member.step(tokens)]
            xp = array_module(blocks[0])
            probabilities = xp.concatenate(blocks, axis=1)
            ops.softmax_in_place(xp, probabilities)
            total = probabilities if total is None else total + probabilities
        # Their sum is unnormalised, as it may be; a tiny number stands for none at all.
        yield xp.log(xp.maximum(total, xp.finfo(total.dtype).tiny))

    def select(self, rows: np.ndarray) -> None:
        for member in self._members:
            member.select(rows)


def start(
    model: Transformer | Ensemble,
    source: Array,
    beam_size: int,
    shortlist: np.ndarray | None = None,
) -> Stepper:
    """Begin to decode a batch of sentences with one model or several."""
    if isinstance(model, Transformer):
        table = model.embedding.table.data
        stepper = fused_kernel("stepper", (table,), TransformerStepper)
        return stepper(model, source, beam_size, shortlist)
    return EnsembleStepper(
        [TransformerStepper(m, source, beam_size, shortlist) for m in model.members]
    )
