"""Encoded text, and batches of sentences of similar lengths."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
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


lengths = st.lists(
    st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=300
)


@given(lengths, st.integers(8, 500), st.integers(0, 3))
def test_every_pair_is_in_exactly_one_batch(sides, max_tokens, seed):
    corpus = ParallelCorpus(*(ragged(side) for side in zip(*sides, strict=True)))
    rng = np.random.default_rng(seed)
    batches = corpus.batch_by_length(np.arange(len(sides)), max_tokens, rng)
    assert sorted(np.concatenate(batches)) == list(range(len(sides)))
    for batch in batches:
        longest = max(max(s, t) + 1 for s, t in (sides[i] for i in batch))
        assert len(batch) == 1 or longest * len(batch) <= 1.25 * max_tokens


@given(lengths, st.integers(1, 4))
def test_a_batch_holds_its_sentences_and_nothing_else(sides, parts):
    corpus = ParallelCorpus(*(ragged(side) for side in zip(*sides, strict=True)))
    chosen = np.arange(len(sides))[::-1]
    batch = corpus.batch(chosen)
    rows = [
        (list(s[s != PAD_ID]), list(t[t != PAD_ID]))
        for part in batch.split(parts)
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


def test_parts_of_a_batch_have_no_padding_but_their_own():
    source = np.array([[5, EOS_ID, 0, 0], [6, 7, EOS_ID, 0], [8, 9, 8, EOS_ID]])
    batch = Batch(source, np.insert(source, 0, BOS_ID, axis=1))
    first, second = batch.split(2)
    assert first.source.tolist() == source[:2, :3].tolist()
    assert second.source.tolist() == source[2:].tolist()
    assert first.target.tolist() == batch.target[:2, :4].tolist()


def test_each_epoch_has_every_pair_once():
    corpus = ParallelCorpus(ragged([3] * 50), ragged([4] * 50))
    stream = BatchStream(corpus, settings(60, 256, 1))
    for epoch in range(3):
        rng = np.random.default_rng((1, epoch))
        order = corpus.batch_by_length(np.arange(50), 60, rng)
        firsts = [next(stream).source[:, 0].tolist() for _ in range(len(stream))]
        assert stream.epoch == epoch
        assert sorted(np.concatenate(firsts)) == list(range(4, 4 + 150, 3))
        assert firsts == [(4 + 3 * pairs).tolist() for pairs in order]


def test_the_stream_is_a_function_of_seed_epoch_and_position():
    rng = np.random.default_rng(1)
    corpus = ParallelCorpus(*(ragged(rng.integers(1, 30, 500)) for _ in range(2)))
    stream = BatchStream(corpus, settings(400, 256, 3))
    for _ in range(len(stream) + 5):
        next(stream)
    resumed = BatchStream(corpus, settings(400, 256, 3), stream.epoch, stream.position)
    assert stream.epoch == 1
    for _ in range(len(stream)):
        np.testing.assert_array_equal(next(stream).source, next(resumed).source)
    other = BatchStream(corpus, settings(400, 256, 4))
    again = BatchStream(corpus, settings(400, 256, 3))
    assert any(
        a.source.shape != b.source.shape or (a.source != b.source).any()
        for a, b in ((next(other), next(again)) for _ in range(5))
    )


def test_batches_of_similar_lengths_have_little_padding():
    rng = np.random.default_rng(2)
    source = rng.poisson(12, 20_000) + 2
    corpus = ParallelCorpus(
        ragged(source), ragged(source + rng.integers(-2, 3, len(source)))
    )
    stream = BatchStream(corpus, settings(2000, 256, 1))
    batches = [next(stream) for _ in range(len(stream))]
    ids = [ids for batch in batches for ids in (batch.source, batch.target[:, 1:])]
    padding = sum((side == PAD_ID).sum() for side in ids)
    share = padding / sum(side.size for side in ids)
    assert share < 0.05


def test_a_batch_has_25_000_tokens_of_each_language_in_sentences_of_like_length():
    """Section 5.1, for English and German sentences that are a tenth longer or so."""
    rng = np.random.default_rng(5)
    source = rng.geometric(1 / 28, 60_000) + 1
    target = np.rint(source * rng.normal(1.05, 0.1, len(source)) + 1).astype(int)
    corpus = ParallelCorpus(ragged(source), ragged(target))
    stream = BatchStream(corpus, settings(25_000, 256, 1))
    batches = [next(stream) for _ in range(len(stream))]
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


def test_the_largest_batches_are_found():
    rng = np.random.default_rng(3)
    corpus = ParallelCorpus(*(ragged(rng.integers(1, 40, 900)) for _ in range(2)))
    stream = BatchStream(corpus, settings(300, 256, 1))
    found, every = stream.largest_batches(), [next(stream) for _ in range(len(stream))]
    assert 1 <= len(found) <= 3
    for size in (
        lambda b: b.source.size,
        lambda b: b.target[:, 1:].size,
        lambda b: b.source.size * (b.target.shape[1] - 1),
    ):
        assert max(map(size, found)) == max(map(size, every))


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
