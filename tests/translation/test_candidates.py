"""The best candidates of a step, against sorting all of them."""

from types import SimpleNamespace

import numpy as np
import pytest

from minitransformer.engine.autograd import Tensor
from minitransformer.settings.config import BOS_ID, EOS_ID, PAD_ID, UNK_ID
from minitransformer.translation.beam_search import best_candidates
from minitransformer.translation.incremental_decoding import (
    token_weights,
    weights_of,
    with_sums,
)
from support.closeness import assert_close


def sorted_candidates(logits, log_probs, count):
    """Sort all extensions of each sentence's beams by all tokens."""
    highest = logits.max(axis=1, keepdims=True)
    log_sums = highest + np.log(np.exp(logits - highest).sum(axis=1, keepdims=True))
    extended = (logits - log_sums).reshape(*log_probs.shape, -1) + log_probs[..., None]
    extended[..., [PAD_ID, UNK_ID, BOS_ID]] = -np.inf
    return [
        sorted(
            (-value, beam, token)
            for beam, row in enumerate(beams)
            for token, value in enumerate(row.tolist())
            if np.isfinite(value)
        )[:count]
        for beams in extended
    ]


@pytest.mark.parametrize(
    ("size", "count"),
    [
        (20, 4),
        (700, 6),
        (700, 300),  # more than there are groups
        (7, 10),  # more than there are tokens that may follow
    ],
)
@pytest.mark.parametrize("sentences", [[5], [2, 3], [1, 1, 3]])
@pytest.mark.parametrize(("beams", "dtype"), [(1, "float64"), (2, "float32")])
def test_the_best_candidates_are_those_of_a_full_sort(
    size, count, sentences, beams, dtype
):
    rng = np.random.default_rng(size + count)
    log_probs = rng.normal(-3, 1, (5, beams))
    log_probs[3, 0] = -np.inf  # there is no such beam
    logits = (rng.standard_normal((log_probs.size, size)) * 4 + 50).astype(dtype)
    logits[:, [PAD_ID, UNK_ID, BOS_ID]] += 20  # they count in the sum all the same
    # Moderate logits, small ones, and some whose exponentials are 0 or infinite.
    logits[:3] += np.array([[-50], [-300], [700]])
    logits[-1, EOS_ID:] = -np.inf  # no token may follow
    expected = sorted_candidates(logits.astype(float), log_probs, count)
    chunks = np.split(logits, np.cumsum(sentences)[:-1] * beams)
    with np.errstate(all="ignore"):  # as in a search
        weights = [*map(weights_of, chunks)]
        found = best_candidates(weights, log_probs, count)
    assert {x.dtype.name for chunk in weights for x in chunk} == {dtype}
    for *columns, best in zip(*found, expected, strict=True):
        rows = zip(*(column.tolist() for column in columns), strict=True)
        rows = [row for row in rows if np.isfinite(row[0])]
        assert [row[1:] for row in rows] == [row[1:] for row in best]
        assert_close([row[0] for row in rows], [-row[0] for row in best], dtype)


def test_log_probabilities_are_those_of_float64():
    """Of float32 weights, also where sentences are of very different probability."""
    weights = np.array([[1, 1, 1, 3, 1], [1, 1, 1, 1, 3]], np.float32)
    log_probs = np.array([[-2000.0], [-1.0]])
    found, _, tokens = best_candidates([with_sums(weights)], log_probs, 2)
    assert tokens.tolist() == [[3, 4], [4, 3]]
    assert_close(found, log_probs + np.log([[3 / 7, 1 / 7]]), "float64")


@pytest.mark.parametrize("bad", [np.nan, np.inf, 0.0])
def test_sums_that_are_no_positive_numbers_are_refused(bad):
    weights = with_sums(np.ones((2, 5)))._replace(sums=np.array([2.0, bad]))
    with (
        np.errstate(all="ignore"),
        pytest.raises(ValueError, match="a model whose outputs are finite"),
    ):
        best_candidates([weights], np.zeros((1, 2)), 2)


@pytest.mark.parametrize(("size", "most"), [(5, 256), (9, 2), (10, 3)])
@pytest.mark.parametrize("count", [1, 4, 7])
def test_weights_have_sums_and_the_maxima_of_groups(size, most, count, monkeypatch):
    """A few rows at a time, as many as a cache holds."""
    module = "minitransformer.translation.incremental_decoding"
    monkeypatch.setattr(f"{module}.MAX_GROUPS", most)
    monkeypatch.setattr(f"{module}.VALUES_IN_CACHE", 3 * size + 1)
    rng = np.random.default_rng(size)
    rows, table = rng.standard_normal((count, 2)), rng.standard_normal((size, 2))
    expected = np.exp(rows @ table.T)
    embedding = SimpleNamespace(table=Tensor(table), transposed=table.T)
    weights = token_weights(rows, embedding)
    assert_close(weights.sums, expected.sum(axis=1))
    expected[:, [PAD_ID, UNK_ID, BOS_ID]] = 0
    assert_close(weights.values, expected)
    of_groups = [expected[:, n::most].max(axis=1) for n in range(min(most, size))]
    assert_close(weights.maxima, np.transpose(of_groups))
