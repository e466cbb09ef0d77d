"""Decoders that are fed one token at a time, against the definitions."""

import numpy as np
import pytest

from minitransformer.engine.backend import register_kernels
from minitransformer.model.transformer import Transformer
from minitransformer.settings.config import BOS_ID, EOS_ID
from minitransformer.translation import candidates, incremental_decoding
from minitransformer.translation.beam_search import beam_search
from minitransformer.translation.ensemble import incremental_decoder
from minitransformer.translation.incremental_decoding import CachedDecoder
from support.closeness import assert_close
from support.models import SOURCE, confident_models, next_logits


@pytest.mark.parametrize(
    ("at_once", "at_least", "rows"),
    [(40, 1, [[3], [4, 2]]), (9, 1, [[2, 1], [2, 2, 2]]), (9, 5, [[3], [4, 2]])],
)
def test_logits_come_in_chunks_of_whole_sentences(monkeypatch, at_once, at_least, rows):
    """At most 40 logits at once are those of four beams of nine tokens."""
    [model] = confident_models(1)
    monkeypatch.setattr(CachedDecoder, "logits_per_chunk", at_once)
    monkeypatch.setattr(incremental_decoding, "MIN_ROWS_PER_CHUNK", at_least)
    decoder = incremental_decoder(model, SOURCE.repeat(3, axis=0), 2)
    first = list(decoder.step(np.array([BOS_ID] * 3)))
    decoder.select(np.array([0, 0, 1, 1, 2, 2]))
    second = list(decoder.step(np.array([8, 5] * 3)))
    assert [[len(b) for b in chunks] for chunks in (first, second)] == rows
    assert_close(np.concatenate(first), [next_logits(model, [])] * 3)
    expected = [next_logits(model, [token]) for token in (8, 5)]
    assert_close(np.concatenate(second), expected * 3)


def test_with_a_shortlist_tokens_are_positions_in_it():
    [model], shortlist = confident_models(1), np.array([0, 1, 2, 3, 8, 5])
    decoder = incremental_decoder(model, SOURCE, 1, shortlist)
    [logits] = decoder.step(np.array([2]))
    assert_close(logits, [next_logits(model, [])[shortlist]])
    decoder.select(np.array([0]))
    [logits] = decoder.step(np.array([4]))
    assert_close(logits, [next_logits(model, [8])[shortlist]])


def test_a_gpu_may_have_a_decoder_of_its_own():
    """It is looked up by the type of the embeddings."""
    [model] = confident_models(1)

    def find(name, arrays):
        assert name == "incremental_decoder"
        assert arrays == (model.embedding.table.data,)
        return lambda *arguments: arguments

    register_kernels(np.ndarray, find)
    try:
        found = incremental_decoder(model, SOURCE, 2)
    finally:
        register_kernels(np.ndarray, None)
    assert found == (model, SOURCE, 2, None)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("shortlist", [None, np.array([0, 1, 2, 3, 8, 5])])
@pytest.mark.parametrize("fast", [False, True])
def test_weights_are_exponentials_of_the_logits(dtype, shortlist, fast, monkeypatch):
    """Up to a factor for each row, by which their sums are multiplied, too."""
    monkeypatch.setattr(candidates, "exp2_is_fast", lambda name: fast)
    model = Transformer(confident_models(1)[0].config, seed=1, dtype=dtype)
    steps = (
        getattr(incremental_decoder(model, SOURCE, 1, shortlist), name)
        for name in ("step", "weights")
    )
    [logits], [weights] = (step(np.array([BOS_ID])) for step in steps)
    values = weights.values
    assert values.dtype == dtype
    assert_close(weights.sums, values.sum(axis=1), dtype)
    assert_close(values / values[:, :1], np.exp(logits - logits[:, :1]), dtype)


def test_a_search_asks_a_kernel_for_weights():
    """One that knows the outputs and the embeddings: here it wants EOS alone."""
    [model] = confident_models(1)
    asked = []

    def kernel(rows, table):
        asked.append(rows.shape)
        assert table is model.embedding.table.data
        weights = np.zeros((len(rows), len(table)))
        weights[:, [EOS_ID, 5]] = 3.0, 1.0
        return weights, (slice(n, n + 1) for n in range(len(rows)))

    def find(name, arrays):
        return kernel if name == "exponentials" else None

    decoder = incremental_decoder(model, SOURCE, 1)
    register_kernels(np.ndarray, find)
    try:
        [[found]] = beam_search(decoder, np.array([4]), 1, 0.6, 1)
    finally:
        register_kernels(np.ndarray, None)
    assert asked == [(1, model.config.d_model)]
    assert found.tokens == ()
    assert_close(found.log_prob, np.log(3 / 4))


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("fast", [False, True])
def test_powers_of_2_are_taken_where_they_are_the_faster_ones(dtype, fast, monkeypatch):
    def is_fast(name):
        assert name == dtype
        return fast

    monkeypatch.setattr(candidates, "exp2_is_fast", is_fast)
    functions, plain = [], candidates.replaced

    def replaced(logits, function):
        functions.append(function)
        factor = np.log2(np.e) if fast else 1
        assert_close(logits, factor * np.array([[3, 7, 2, 5, 6]]), dtype)
        return plain(logits, function)

    monkeypatch.setattr(candidates, "replaced", replaced)
    rows = np.ones((1, 2), dtype)
    table = np.array([[1, 2], [3, 4], [0, 2], [2, 3], [5, 1]], dtype)
    values, sums, *_ = candidates.token_weights(rows, table)
    assert functions == [np.exp2 if fast else np.exp]
    assert values.dtype == sums.dtype == dtype
    assert_close(values, np.exp([[3, 7, 2, 5, 6]]), dtype)


@pytest.mark.parametrize("value", [np.inf, np.nan, 1e-20, 0.0])
def test_weights_of_a_kernel_that_may_overflow_are_not_used(value):
    """They are computed again, with the largest logit subtracted."""
    [model] = confident_models(1)

    def kernel(rows, table):
        return np.full((1, 9), value), None

    def find(name, arrays):
        return kernel if name == "exponentials" else None

    decoder = incremental_decoder(model, SOURCE, 1)
    register_kernels(np.ndarray, find)
    try:
        with np.errstate(all="ignore"):
            [weights] = decoder.weights(np.array([BOS_ID]))
    finally:
        register_kernels(np.ndarray, None)
    expected = np.exp(next_logits(model, []))
    assert_close(weights.values[0] / weights.sums, expected / expected.sum())
