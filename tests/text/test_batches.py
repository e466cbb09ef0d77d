"""Encoded text, and batches of sentences of similar lengths."""

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from minitransformer.settings.config import BOS_ID, EOS_ID, PAD_ID, TrainingConfig
from minitransformer.text.batches import Batch, BatchStream, ParallelCorpus
from minitransformer.text.cache import encoded_corpus
from minitransformer.text.ids import Ragged
from minitransformer.text.pairs import TextPair
from minitransformer.text.tokenizer import Tokenizer

LINES = [f"the cat number {i} sat on the mat and looked at {i * 7}" for i in range(200)]


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train(LINES, 60)


def settings(max_tokens: int, max_length: int, seed: int) -> TrainingConfig:
    return TrainingConfig(max_tokens=max_tokens, max_length=max_length, seed=seed)


def write_pair(folder: Path, source: str, target: str) -> TextPair:
    pair = TextPair(folder / "train.en", folder / "train.de")
    pair.source.write_bytes(source.encode())
    pair.target.write_bytes(target.encode())
    return pair


def ragged(lengths) -> Ragged:
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return Ragged(np.arange(4, 4 + starts[-1]), starts)


def corpus_of(sides) -> ParallelCorpus:
    """Pairs of these lengths, of which no two have a token in common."""
    return ParallelCorpus(*(ragged(side) for side in zip(*sides, strict=True)))


def batches_of_epoch(corpus, *options) -> list[Batch]:
    stream = BatchStream(corpus, settings(*options))
    return [next(stream) for _ in range(len(stream))]


# Few lengths, so that many batches are as large as they may be, or any.
SIDES = st.one_of(
    st.lists(st.tuples(*[st.integers(1, n)] * 2), min_size=1, max_size=most)
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
    corpus = corpus_of(sides)
    chosen = np.arange(len(sides))[::-1]
    batch = corpus.batch(chosen)
    divided = batch.split(parts)
    assert len(divided) == min(parts, len(sides))
    counts = [len(x.source) for x in divided]
    assert max(counts) - min(counts) <= 1
    assert all(ids[:, -1].any() for x in divided for ids in (x.source, x.target))
    rows = [
        (list(s[s != PAD_ID]), list(t[t != PAD_ID]))
        for part in divided
        for s, t in zip(part.source, part.target, strict=True)
    ]
    for i, (source, target) in zip(chosen, rows, strict=True):
        expected = [
            list(side.concatenate(np.array([i])))
            for side in (corpus.source, corpus.target)
        ]
        assert source == [*expected[0], EOS_ID]
        assert target == [BOS_ID, *expected[1], EOS_ID]
    assert batch.source_tokens == sum(s + 1 for s, _ in sides)
    assert batch.target_tokens == sum(t + 1 for _, t in sides)


def test_batches_and_pairs_of_equal_length_are_shuffled_by_seed_and_epoch():
    corpus = corpus_of([(1 + n // 50,) * 2 for n in range(250)])
    orders = []
    for seed, epoch in ((1, 0), (1, 1), (2, 0)):
        stream = BatchStream(corpus, settings(20, 256, seed), epoch)
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
    options = max_tokens, 256, 1
    stream = BatchStream(corpus_of(sides), settings(*options))
    found, every = stream.largest_batches(), batches_of_epoch(stream.corpus, *options)
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
    source = rng.geometric(1 / 28, 60_000) + 1
    target = np.rint(source * rng.normal(1.05, 0.1, len(source)) + 1).astype(int)
    corpus = ParallelCorpus(ragged(source), ragged(target))
    batches = batches_of_epoch(corpus, 25_000, 256, 1)
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
    corpus = ParallelCorpus(ragged([3, 50, 5]), ragged([3, 5, 99]))
    assert (len(corpus), corpus.dropped_blank) == (3, 0)
    assert list(corpus.filter_by_length(51)) == [0, 1]
    assert len(BatchStream(corpus, settings(100, 51, 1)).pairs) == 2
    with pytest.raises(ValueError, match="at most 3 tokens a side"):
        BatchStream(corpus, settings(100, 3, 1))


def test_encoding_keeps_order_and_drops_blank_pairs(tmp_path, tokenizer):
    source = [*LINES[:50], " ", "x", *LINES[50:100]]
    target = [*LINES[100:150], "x", " ", *LINES[150:]]
    pair = write_pair(tmp_path, "\n".join(source), "\n".join(target) + "\n")
    corpus = encoded_corpus(pair, tokenizer, tmp_path / "cache")
    assert (len(corpus), corpus.dropped_blank) == (100, 2)
    ids = [corpus.source.concatenate(np.array([i])) for i in range(100)]
    assert tokenizer.decode(ids) == LINES[:100]


def test_the_cache_follows_the_content(tmp_path, tokenizer, monkeypatch):
    pair = write_pair(tmp_path, "\n".join(LINES), "\n".join(LINES))
    first = encoded_corpus(pair, tokenizer, tmp_path / "cache")
    monkeypatch.setattr(Tokenizer, "encode", None)  # a second encoding would fail
    moved = TextPair(tmp_path / "a.en", tmp_path / "a.de")
    pair.source.rename(moved.source)
    pair.target.rename(moved.target)
    again = encoded_corpus(moved, tokenizer, tmp_path / "cache")
    everything = np.arange(len(first))
    np.testing.assert_array_equal(
        first.source.concatenate(everything), again.source.concatenate(everything)
    )
    moved.source.write_text("\n".join(LINES[::-1]))
    with pytest.raises(TypeError):
        encoded_corpus(moved, tokenizer, tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("partial-*"))


def test_text_without_pairs_is_refused(tmp_path, tokenizer):
    for source, found in (("\n \n", "2 with a blank line each"), ("", "none")):
        pair = write_pair(tmp_path, source, "x\ny\n" if source else "")
        message = f"expected sentence pairs, found {found}$"
        with pytest.raises(ValueError, match=message):
            encoded_corpus(pair, tokenizer, tmp_path / "cache")
