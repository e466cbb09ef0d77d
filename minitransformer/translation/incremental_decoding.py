"""Incremental decoding: models that are fed one token at a time, for beam search.

A decoder is fed the newest token of each beam and returns the weights of the next one.
It keeps what earlier tokens need, such as key/value caches. Weights are probabilities
that are not normalised, mostly exp(logit): divided by their sum, those of all tokens
that may follow a beam are its softmax.

Shapes: B sentences, K beams, V vocabulary, G groups of tokens.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from minitransformer.engine import ops
from minitransformer.engine.autograd import Tensor
from minitransformer.engine.backend import (
    Array,
    array_module,
    as_float32,
    fused_kernel,
)
from minitransformer.model.layers import Embedding
from minitransformer.model.transformer import Transformer
from minitransformer.settings.config import EOS_ID

# About how many weights are computed at a time, a chunk: the fewer, the less memory.
WEIGHTS_PER_CHUNK = 1 << 21

# About how many weights a processor's cache holds.
VALUES_IN_CACHE = 1 << 17

# The number of groups of tokens, whose maxima bound the best weights of a row.
MAX_GROUPS = 256


class TokenWeights(NamedTuple):
    """The weights of the tokens after each beam, their sums, and the maxima of groups.

    Token i is in group i % G. The values of padding, the unknown token and BOS, whose
    ids are below EOS_ID, are 0, so that no search produces them; the sums count them.

    Shapes: values [N, V], sums [N], maxima [N, G]
    """

    values: Array
    sums: Array
    maxima: Array


class IncrementalDecoder:
    """What beam search asks of a model, which remembers the tokens fed so far."""

    def step(self, tokens: np.ndarray) -> Iterable[TokenWeights]:
        """Feed the newest token of each beam and return the weights of the next one.

        The first step feeds BOS to one beam of each sentence. The weights come in
        chunks of rows, which the caller may overwrite; a sentence's are in one chunk.

        Shapes: tokens [B K]
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
    """One Transformer that decodes a batch of sentences with key/value caches."""

    def __init__(self, model: Transformer, source: Array, beam_size: int) -> None:
        self.model = model
        self._xp = array_module(source)
        self.state = model.start_decoding(source)
        self._beam_size = beam_size

    def step(self, tokens: Array) -> Iterator[TokenWeights]:
        # The product with the table, for some sentences at a time.
        outputs = self._outputs(tokens)
        embedding = self.model.embedding
        vocab_size = self.model.config.vocab_size
        size = max(WEIGHTS_PER_CHUNK // vocab_size, ops.MIN_ROWS_PER_CHUNK)
        size = max(size // self._beam_size, 1) * self._beam_size  # whole sentences
        for first in range(0, len(outputs), size):
            yield token_weights(outputs[first : first + size], embedding)

    def _outputs(self, tokens: Array) -> Array:
        """Feed tokens; return the last layer's output. Shapes: -> [B K, D]"""
        return self.model.decode_step(self._xp.asarray(tokens), self.state)

    def select(self, rows: np.ndarray) -> None:
        self.state.select(self._xp.asarray(rows), self._beam_size)

    def join(self, other: CachedDecoder) -> None:
        self.state.join(other.state)


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
        self.members = list(members)
        self.embedding = members[0].embedding

    @property
    def position_limit(self) -> int | None:
        """The smallest limit of the members, or None if no member has one."""
        limits = [m.position_limit for m in self.members if m.position_limit]
        return min(limits, default=None)


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


def incremental_decoder(
    model: Transformer | Ensemble, source: Array, beam_size: int
) -> IncrementalDecoder:
    """Encode a batch of sentences, and return what decodes them.

    Shapes: source [B, S]
    """
    if isinstance(model, Ensemble):
        members = [CachedDecoder(m, source, beam_size) for m in model.members]
        return EnsembleDecoder(members)
    return CachedDecoder(model, source, beam_size)


# The weights of tokens


def token_weights(rows: Array, embedding: Embedding) -> TokenWeights:
    """Return the weights of the tokens that follow. Shapes: rows [N, D]"""
    table = embedding.table.data
    if kernel := fused_kernel("exponentials", (rows, table), None):
        weights = with_sums(kernel(rows, table))
    else:
        weights = with_sums(_logits(rows, embedding), exponents=True)
    # Where an exponential overflows, subtract the maximum first.
    safe = ops.exp_is_safe(weights.sums)
    return weights if safe else weights_of(_logits(rows, embedding))


def weights_of(logits: Array) -> TokenWeights:
    """Return exp(logits - the maximum of each row), in place. Shapes: logits [N, V]"""
    logits -= logits.max(axis=1, keepdims=True)
    return with_sums(logits, exponents=True)


def _logits(rows: Array, embedding: Embedding) -> Array:
    return as_float32(ops.linear(Tensor(rows), Tensor(embedding.transposed)).data)


def with_sums(values: Array, exponents: bool = False) -> TokenWeights:
    """Return weights with their sums and maxima.

    If the values are `exponents`, their exponentials replace them. NumPy computes as
    many rows at a time as a processor's cache holds.

    Shapes: values [N, V]
    """
    xp = array_module(values)
    count, size = values.shape
    sums = xp.empty(count, values.dtype)
    ones = xp.ones(size, values.dtype)
    maxima = xp.empty((count, min(MAX_GROUPS, size)), values.dtype)
    at_once = VALUES_IN_CACHE // size + 1 if xp is np else count
    for first in range(0, count, at_once):
        part = slice(first, first + at_once)
        weights = values[part]
        if exponents:
            xp.exp(weights, out=weights)
        sums[part] = weights @ ones
        # Padding, the unknown token and BOS count in the sums, but never follow.
        weights[:, :EOS_ID] = 0
        maxima[part] = group_maxima(weights)
    return TokenWeights(values, sums, maxima)


def group_maxima(values: Array) -> Array:
    """Return the largest value of each group. Shapes: values [N, V] -> [N, G]"""
    count, size = values.shape
    groups = min(MAX_GROUPS, size)
    rest = size % groups  # the first groups have one token more
    rows = values[:, : size - rest].reshape(count, -1, groups)
    maxima = rows.max(axis=1)
    last = array_module(values).maximum(maxima[:, :rest], values[:, size - rest :])
    maxima[:, :rest] = last
    return maxima
