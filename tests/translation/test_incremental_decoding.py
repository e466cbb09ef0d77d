"""Decoders that are fed one token at a time, against the definitions."""

import numpy as np
import pytest

from minitransformer.engine import ops
from minitransformer.engine.backend import Backend
from minitransformer.settings.config import BOS_ID, EOS_ID
from minitransformer.translation import incremental_decoding
from minitransformer.translation.incremental_decoding import incremental_decoder
from support.closeness import assert_close
from support.cuda import backend_for
from support.models import SOURCE, confident_models, next_logits


def assert_weights(found, logits):
    """Compare the log-probabilities of the tokens from EOS on."""
    logits = np.array(logits)
    expected = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
    with np.errstate(divide="ignore"):  # those below EOS have a weight of 0
        found = np.log(found.values / found.sums[:, None])
    assert (found[:, :EOS_ID] == -np.inf).all()
    assert_close(found[:, EOS_ID:], expected[:, EOS_ID:])


@pytest.mark.parametrize(
    ("at_once", "at_least", "rows"),
    [(40, 1, [[3], [4, 2]]), (9, 1, [[2, 1], [2, 2, 2]]), (9, 5, [[3], [4, 2]])],
)
def test_chunks_have_whole_sentences(monkeypatch, at_once, at_least, rows):
    """At most 40 weights at once are those of four beams of nine tokens."""
    [model] = confident_models(1)
    monkeypatch.setattr(incremental_decoding, "WEIGHTS_PER_CHUNK", at_once)
    monkeypatch.setattr(ops, "MIN_ROWS_PER_CHUNK", at_least)
    decoder = incremental_decoder(model, SOURCE.repeat(3, axis=0), 2)
    first = list(decoder.step(np.array([BOS_ID] * 3)))
    decoder.select(np.array([0, 0, 1, 1, 2, 2]))
    second = list(decoder.step(np.array([8, 5] * 3)))
    assert [[len(w.sums) for w in chunks] for chunks in (first, second)] == rows
    for weights in first:
        assert_weights(weights, [next_logits(model, [])] * len(weights.sums))
    for weights in second:
        expected = [next_logits(model, [token]) for token in (8, 5)]
        assert_weights(weights, expected * (len(weights.sums) // 2))


@pytest.mark.parametrize("value", [np.inf, np.nan, 1e-20, 0.0])
def test_weights_of_a_kernel_that_may_overflow_are_not_used(value):
    """They are computed again, with the largest logit subtracted."""
    [model] = confident_models(1)

    def kernel(rows, table):
        return np.full((1, 9), value)

    def find(name, arrays):
        return kernel if name == "exponentials" else None

    decoder = incremental_decoder(model, SOURCE, 1)
    backend = Backend(find_kernel=find)
    with backend_for(np.ndarray, backend=backend), np.errstate(all="ignore"):
        [weights] = decoder.step(np.array([BOS_ID]))
    assert_weights(weights, [next_logits(model, [])])
