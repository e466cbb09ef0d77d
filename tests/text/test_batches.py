"""Batches of sentences of similar lengths."""

import itertools

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from minitransformer.settings.config import BOS_ID, EOS_ID, PAD_ID, TrainingConfig
from minitransformer.text.batches import Batch, BatchStream, ParallelCorpus
from minitransformer.text.ids import Ragged


def settings(max_tokens, max_length=256, seed=1):
    return TrainingConfig(max_tokens=max_tokens, max_length=max_length, seed=seed)


def sequences(lengths):
    """Sequences of these lengths, of which no two have a token in common."""
    ids = itertools.count(4)
    return [[*itertools.islice(ids, n)] for n in lengths]


def corpus_of(sides) -> ParallelCorpus:
    """Pairs of these lengths."""
    ids = map(sequences, zip(*sides, strict=True))
    return ParallelCorpus(*map(Ragged.from_lists, ids))


def batches_of_epoch(corpus, max_tokens) -> list[Batch]:
    stream = BatchStream(corpus, settings(max_tokens))
    return [next(stream) for _ in range(len(stream))]


# Few lengths, so that many batches are as large as they may be, or any.
SIDES = st.one_of(
    st.lists(st.tuples(*[st.integers(0, n)] * 2), min_size=1, max_size=most)
    for n, most in ((4, 40), (40, 300))
)


# Examples: EOS is counted, of either side.
@given(SIDES, st.integers(8, 40) | st.integers(8, 500), st.none() | st.integers(0, 3))
@example([(4, 1)] * 13, 40, None)
@example([(1, 4)] * 13, 40, None)
@example([(1, 1)] * 20, 40, None)
def test_every_pair_is_in_exactly_one_batch(sides, max_tokens, seed):
    """A batch is no larger than it may be, and there is one if all pairs fit it."""
    rng = None if seed is None else np.random.default_rng(seed)
    pairs = np.arange(len(sides))
    batches = corpus_of(sides).batch_by_length(pairs, max_tokens, rng)
    assert sorted(np.concatenate(batches)) == pairs.tolist()
    sizes = [len(x) * (1 + max(max(sides[i]) for i in x)) for x in (pairs, *batches)]
    assert len(batches) == 1 or sizes[0] > max_tokens
    for batch, size in zip(batches, sizes[1:], strict=True):
        assert len(batch) == 1 or size <= 1.25 * max_tokens


@given(SIDES, st.integers(1, 4))
def test_a_batch_holds_its_sentences_and_nothing_else(sides, parts):
    """Its parts are of like size, with no padding but their own."""
    chosen = np.arange(len(sides))[::-1]
    batch = corpus_of(sides).batch(chosen)
    divided = batch.split(parts)
    assert len(divided) == min(parts, len(sides))
    counts = [len(x.source) for x in divided]
    assert max(counts) - min(counts) <= 1
    assert all(ids[:, -1].any() for x in divided for ids in (x.source, x.target))
    for side, begin in (("source", []), ("target", [BOS_ID])):
        lengths = [pair[side == "target"] for pair in sides]
        expected = [[*begin, *ids, EOS_ID] for ids in sequences(lengths)]
        rows = [row for x in divided for row in getattr(x, side)]
        assert [row[row != PAD_ID].tolist() for row in rows] == expected[::-1]
        assert getattr(batch, f"{side}_tokens") == sum(lengths) + len(sides)


def test_batches_and_pairs_of_equal_length_are_shuffled_by_seed_and_epoch():
    corpus = corpus_of([(1 + n // 50,) * 2 for n in range(250)])
    orders = []
    for seed, epoch in ((1, 0), (1, 1), (2, 0)):
        stream = BatchStream(corpus, settings(20, seed=seed), epoch)
        orders.append(np.concatenate(stream.batches))
    for order in orders:
        lengths = [i // 50 for i in order]
        of_length = [[i for i in order if i // 50 == n] for n in range(5)]
        for each in (lengths, *of_length):
            assert sorted(each) not in (each, each[::-1])
    for first, second in itertools.combinations(orders, 2):
        assert (first != second).any()


@given(SIDES, st.integers(8, 60))
@example([(2, 8), (7, 2), (3, 6)], 12)  # each is the largest in its way
def test_the_largest_batches_are_found(sides, max_tokens):
    stream = BatchStream(corpus_of(sides), settings(max_tokens))
    found, every = stream.largest_batches(), batches_of_epoch(stream.corpus, max_tokens)
    assert 1 <= len(found) <= 3
    for size in (
        lambda b: b.source.size,
        lambda b: b.target[:, 1:].size,
        lambda b: b.source.size * (b.target.shape[1] - 1),
    ):
        assert max(map(size, found)) == max(map(size, every))


def test_a_batch_has_25_000_tokens_of_each_language_in_sentences_of_like_length():
    """Section 5.1, for English and German sentences that are a tenth longer or so."""
    rng = np.random.default_rng(5)
    source = rng.geometric(1 / 28, 30_000) + 1
    target = np.rint(source * rng.normal(1.05, 0.1, len(source)) + 1).astype(int)
    corpus = corpus_of(zip(source, target, strict=True))
    batches = batches_of_epoch(corpus, 25_000)
    for side in ("source", "target"):
        tokens, spreads = [], []
        for batch in batches:
            ids = getattr(batch, side)[:, 1 if side == "target" else 0 :]  # without BOS
            lengths = (ids != PAD_ID).sum(axis=1)
            tokens.append(lengths.sum())
            spreads.append(lengths.std())
        assert np.median(tokens) == pytest.approx(25_000, rel=0.1)
        assert max(tokens) < 31_250
        assert np.mean(spreads) < 0.2 * source.std()


def test_long_pairs_are_left_out():
    corpus = corpus_of([(3, 3), (50, 5), (5, 99)])
    assert list(corpus.filter_by_length(51)) == [0, 1]
    assert len(BatchStream(corpus, settings(100, 51)).pairs) == 2
    with pytest.raises(ValueError, match="at most 3 tokens a side"):
        BatchStream(corpus, settings(100, 3))
