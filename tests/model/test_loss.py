"""Validation figures against an explicit log-softmax."""

import math

import numpy as np
import pytest

from minitransformer.engine import ops
from minitransformer.model.transformer import Transformer, token_log_probs
from minitransformer.settings.config import PAD_ID
from minitransformer.text.batches import Batch
from minitransformer.training.evaluation import token_statistics
from support.closeness import assert_close
from support.models import tiny_config

CONFIG = tiny_config(vocab_size=12)


def test_statistics_are_those_of_the_softmax(monkeypatch):
    monkeypatch.setattr(ops, "LOGITS_PER_CHUNK", 3 * 12)
    model = Transformer(CONFIG, dtype="float64")
    rng = np.random.default_rng(0)
    source, target = rng.integers(4, 12, (3, 4)), rng.integers(4, 12, (3, 6))
    target[1, 3:] = PAD_ID
    logits = model.logits(model(source, target[:, :-1])).data
    log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    nll, correct, tokens = 0.0, 0, 0
    found, is_best = token_log_probs(model, source, target)
    for b, t in np.ndindex(3, 5):
        word = target[b, t + 1]
        if word == PAD_ID:
            assert found[b, t] == 0
            assert not is_best[b, t]
            continue
        assert_close(found[b, t], log_probs[b, t, word])
        assert is_best[b, t] == (logits[b, t].argmax() == word)
        nll -= log_probs[b, t, word]
        correct += int(logits[b, t].argmax() == word)
        tokens += 1
    total = token_statistics(model, Batch(source, target))
    assert_close(total.nll, nll)
    assert (total.correct, total.tokens) == (correct, tokens)
    assert total.perplexity == pytest.approx(math.e ** (nll / tokens))
    assert total.accuracy == correct / tokens


def test_log_probabilities_of_large_logits_do_not_overflow():
    model, rng = Transformer(CONFIG, dtype="float64"), np.random.default_rng(2)
    model.embedding.table.data *= 1e5
    source, target = rng.integers(4, 12, (3, 4)), rng.integers(4, 12, (3, 6))
    logits = model.logits(model(source, target[:, :-1])).data
    highest = logits.max(axis=-1)
    assert highest.max() - highest.min() > 1e4  # far too much for one exponential
    expected = np.take_along_axis(logits, target[:, 1:, None], -1)[..., 0]
    expected = expected - np.logaddexp.reduce(logits, axis=-1)
    found, _ = token_log_probs(model, source, target)
    assert_close(found, expected)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_log_probabilities_have_the_models_dtype(dtype, monkeypatch):
    """A chunk has at least one row, and the logits of a chunk are all there are."""
    monkeypatch.setattr(ops, "LOGITS_PER_CHUNK", 1)
    model, rows = Transformer(CONFIG, dtype=dtype), []
    logits = model.logits
    monkeypatch.setattr(model, "logits", lambda x: rows.append(x.shape) or logits(x))
    source, target = np.array([[5, 6, 3]]), np.array([[2, 7, 8, 3, PAD_ID]])
    log_probs, is_best = token_log_probs(model, source, target)
    assert (log_probs.dtype, is_best.dtype) == (dtype, bool)
    assert rows == [(1, 8)] * 3
