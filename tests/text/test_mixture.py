"""Mixtures: what an epoch holds by counting, and the text of several corpora."""

import json
import shutil
from collections import Counter
from dataclasses import replace
from math import ceil, gcd
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minitransformer.settings.config import ModelConfig, RunConfig, TrainingConfig
from minitransformer.settings.decoding_config import DecodingConfig
from minitransformer.settings.text_config import TextConfig
from minitransformer.text import mixture
from minitransformer.text.batches import BatchStream, ParallelCorpus
from minitransformer.text.cache import cached_tokenizer
from minitransformer.text.grammar import corpus
from minitransformer.text.ids import Ragged
from minitransformer.text.lines import TextPair, find_text
from minitransformer.text.mixture import (
    MixedCorpus,
    MixedText,
    drawn_in_passes,
    encoded_text,
    text_of,
)

PAIR = TextPair("s", "t")


def corpora_of(*sizes, longest=6):
    """Corpora whose pairs are all different: the first id numbers them all."""
    rng, first, made = np.random.default_rng(len(sizes)), 0, []
    for size in sizes:
        sides = [
            [
                [10 + first + i, *rng.integers(4, 9, rng.integers(0, longest))]
                for i in range(size)
            ]
            for _ in range(2)
        ]
        made.append(ParallelCorpus(*map(Ragged.from_lists, sides), dropped_blank=1))
        first += size
    return made


def mixed(corpora, weights=()):
    parts = dict.fromkeys(range(1, len(corpora) + 1), PAIR)
    return MixedCorpus(corpora, MixedText("s", "t", corpora=parts, weights=weights))


def stream_of(corpus, epoch=0, position=0, **settings):
    training = TrainingConfig(**{"max_tokens": 60, "seed": 3} | settings)
    return BatchStream(corpus, training, epoch, position)


def epoch_of(stream):
    """The batches that are left of an epoch, or the next one: their pairs' numbers."""
    batches = []
    while not batches or stream.position < len(stream):
        batch = next(stream)
        np.testing.assert_array_equal(batch.source[:, 0], batch.target[:, 1])
        batches.append((batch.source[:, 0] - 10).tolist())
    return batches


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 9)), min_size=2, max_size=4)
)
def test_every_epoch_is_in_proportion_and_no_pair_is_ever_ahead_by_more_than_one(parts):
    sizes, weights = zip(*parts, strict=True)
    stream, drawn = stream_of(mixed(corpora_of(*sizes), weights)), Counter()
    corpus_of = np.repeat(range(len(sizes)), sizes)
    unit = sum(weights) // gcd(*weights)
    for epoch in range(4):
        numbers = [i for batch in epoch_of(stream) for i in batch]
        assert stream.epoch == epoch
        assert len(numbers) == ceil(sum(sizes) / unit) * unit
        counts = Counter(corpus_of[numbers].tolist())
        for i, weight in enumerate(weights):
            assert counts[i] * sum(weights) == weight * len(numbers)
        drawn.update(numbers)
        for i in range(len(sizes)):
            each = [drawn[pair] for pair in np.flatnonzero(corpus_of == i).tolist()]
            assert max(each) - min(each) <= 1


def test_without_weights_an_epoch_has_every_pair_once():
    stream = stream_of(mixed(corpora_of(40, 7, 25)))
    orders = [[i for batch in epoch_of(stream) for i in batch] for _ in range(2)]
    assert [sorted(order) for order in orders] == [list(range(72))] * 2
    assert orders[0] != orders[1]


def test_a_mixture_goes_on_where_it_was():
    def new(*place, **settings):
        return stream_of(mixed(corpora_of(50, 20, 30), (1, 3, 2)), *place, **settings)

    stream = new()
    for _ in range(len(stream) + 4):
        next(stream)
    assert (stream.epoch, stream.position) == (1, 4)
    resumed, left = new(1, 4), epoch_of(stream)
    assert epoch_of(resumed) == left
    assert epoch_of(resumed) == epoch_of(stream)
    assert epoch_of(new(1, seed=4)) != epoch_of(new(1))


def test_batches_mix_the_corpora_and_hold_a_pair_twice_at_most_between_passes(
    monkeypatch,
):
    monkeypatch.setattr(mixture, "PAIRS_PER_ROUND", 300)
    # All pairs have one length, so that nothing but the order keeps a pair apart.
    stream = stream_of(mixed(corpora_of(300, 1200, longest=1), (3, 1)), max_tokens=200)
    batches = epoch_of(stream)
    assert sum(map(len, batches)) == 1500
    twice = sum(len(batch) - len(set(batch)) for batch in batches)
    assert 0 <= twice < 30
    shares = [np.mean(np.array(batch) < 300) for batch in batches]
    assert 0.4 < min(shares) <= np.mean(shares) == pytest.approx(0.75, abs=0.01)


@pytest.mark.parametrize(
    ("weights", "least", "rounds"),
    [((1, 1), 10, 1), ((3, 1), 300, 4), ((3, 1), 600, 2), ((3, 1), 2000, 1)],
)
def test_an_epoch_has_a_round_for_each_pass_unless_they_are_small(
    monkeypatch, weights, least, rounds
):
    """Of 1,500 pairs, the first corpus has 1,125 of 300, or else 750 of 750."""
    monkeypatch.setattr(mixture, "PAIRS_PER_ROUND", least)
    sizes = (750, 750) if weights == (1, 1) else (300, 1200)
    found = mixed(corpora_of(*sizes), weights).rounds(np.arange(1500), 3, 0)
    assert [len(x) for x in found] == pytest.approx([1500 / rounds] * rounds, abs=2)


def test_a_corpus_is_not_shuffled_by_the_numbers_that_shuffle_its_batches():
    [drawn] = mixed(corpora_of(50, 20)).rounds(np.arange(70), 3, 0)
    batches = np.random.default_rng((3, 0)).permutation(50)
    assert sorted(drawn[:50]) == sorted(batches)
    assert (drawn[:50] != batches).any()


def test_joined_ids_are_those_of_one_corpus():
    corpora = corpora_of(5, 1, 9)
    whole = [
        Ragged.from_lists(
            [
                getattr(corpus, side).concatenate(np.array([i])).tolist()
                for corpus in corpora
                for i in range(len(corpus))
            ]
        )
        for side in ("source", "target")
    ]
    joined, expected = mixed(corpora), ParallelCorpus(*whole)
    chosen = np.random.default_rng(1).permutation(15)
    np.testing.assert_array_equal(joined.source.lengths, expected.source.lengths)
    for pairs in (chosen, chosen[:1], chosen[-4:], np.array([5]), chosen[:0]):
        for side in ("source", "target"):
            found, true = (getattr(x.batch(pairs), side) for x in (joined, expected))
            np.testing.assert_array_equal(found, true)
    assert (len(joined), joined.dropped_blank) == (15, 3)


def test_passes_are_permutations_that_follow_one_another():
    pairs = np.array([3, 5, 8, 9, 11])
    order = drawn_in_passes(pairs, 0, 20, 1, 2)
    assert [sorted(order[i : i + 5]) for i in range(0, 20, 5)] == [pairs.tolist()] * 4
    assert len({tuple(order[i : i + 5]) for i in range(0, 20, 5)}) > 1
    others = [drawn_in_passes(pairs, 0, 20, *key) for key in ((1, 3), (2, 2))]
    assert all((other != order).any() for other in others)
    for first, count in ((0, 5), (5, 5), (4, 3), (7, 13), (19, 1)):
        part = drawn_in_passes(pairs, first, count, 1, 2)
        assert part.tolist() == order[first : first + count].tolist()


def test_the_start_says_what_an_epoch_holds():
    corpora = corpora_of(40, 10)
    tagged = {1: PAIR, 2: TextPair("u", "v", "<x>")}
    corpus = MixedCorpus(corpora, MixedText("s", "t", corpora=tagged, weights=(1, 3)))
    stream = stream_of(corpus)
    assert corpus.summary(stream.pairs) == [
        "corpus 1    s, t: 40 pairs, 13 an epoch (25.0%)",
        "corpus 2    u, v, tag <x>: 10 pairs, 39 an epoch (75.0%)",
    ]
    assert len(stream.pairs_of_epoch()) == 52


def test_a_corpus_without_short_pairs_is_named():
    corpora = corpora_of(10, 1, longest=1)
    corpora[1] = ParallelCorpus(*[Ragged.from_lists([range(4, 30)])] * 2)
    with pytest.raises(ValueError, match="s, t: expected pairs of at most 9 tokens, "):
        stream_of(mixed(corpora), max_length=9)


# The text


@pytest.fixture
def folders(tmp_path):
    """Two folders: one of English to German with a blank line, one also to French."""
    texts = {
        "a/train.en": "one\n\ntwo\n",
        "a/train.de": "eins\n\nzwei\n",
        "a/val.en": "v1\nv2\nv3\n",
        "a/val.de": "w1\nw2\nw3\n",
        "b/train.en": "three\n",
        "b/train.fr": "trois\n",
        "b/val.en": "x1\nx2\nx3\n",
        "b/val.fr": "y1\ny2\ny3\n",
        "b/test.en": "four\n",
        "b/test.fr": "quatre\n",
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def run_of(folders, **settings):
    names = tuple(str(folders / name) for name in "ab")
    config = TextConfig(data=names, source="en", target=("de", "fr"), **settings)
    files = {k: (str(x.source), str(x.target)) for k, x in find_text(config).items()}
    configs = ModelConfig(), TrainingConfig(), DecodingConfig()
    run = RunConfig("x", *configs, files, weights=config.weights, tags=config.tag)
    assert RunConfig.from_json(run.to_json()) == run
    return run


def test_tags_stand_before_lines_that_are_not_blank(folders, tmp_path):
    run = run_of(folders, tag=("<2de>", "<2fr>"), weights=(2, 3))
    assert list(run.text) == "train,val,train 2,val 2,test 2".split(",")
    assert run.vocabulary.user_symbols == ("<2de>", "<2fr>")
    text = text_of(run, tmp_path / "cache")
    assert (list(text), text["train"].weights) == (["train", "val", "test"], (2, 3))
    assert list(text["train"].lines()) == [
        ("<2de> one", "eins"),
        ("", ""),
        ("<2de> two", "zwei"),
        ("<2fr> three", "trois"),
    ]
    assert list(text["test"].lines()) == [("<2fr> four", "quatre")]
    assert str(text["train"]).count("train") == 4
    assert list(text["train"].parts) == [1, 2]
    tokenizer = cached_tokenizer(
        text["train"], 28, tmp_path / "cache", 1, run.vocabulary
    )
    corpus = encoded_text(text["train"], tokenizer, tmp_path / "cache")
    assert (len(corpus), corpus.dropped_blank) == (3, 1)
    rows = [tokenizer.pieces(row) for row in corpus.batch(np.arange(3)).source]
    assert [row[:2] for row in rows] == [["▁", f"<2{x}>"] for x in ("de", "de", "fr")]


def test_text_and_tag_make_the_digest(folders, tmp_path):
    def digests(*tags):
        text = text_of(run_of(folders, tag=tags), tmp_path / "cache")["train"]
        return text.digest(), *(part.digest() for part in text.parts.values())

    plain, tagged, other = digests(), digests("<a>", "<b>"), digests("<a>", "<c>")
    assert len({plain[0], tagged[0], other[0]}) == 3
    assert (tagged[1] == other[1], tagged[2] == other[2]) == (True, False)
    source, *targets = (folders / x for x in ("a/train.en", "a/train.de", "a/val.de"))
    digests = [TextPair(source, target).digest() for target in targets]
    assert plain[1] == digests[0] != digests[1]


@pytest.mark.parametrize(
    ("limit", "expected"), [(None, (3, 3)), (3, (1, 2)), (4, (2, 2)), (1, (0, 1))]
)
def test_samples_are_as_many_of_each_corpus(folders, tmp_path, limit, expected):
    val = text_of(run_of(folders), tmp_path / "cache")["val"]
    samples = val.samples(limit)
    assert tuple(map(len, samples.values())) == expected
    pairs = list(val.lines())
    assert samples == {1: pairs[: expected[0]], 2: pairs[3 : 3 + expected[1]]}


@pytest.mark.parametrize(
    ("tags", "kind"), [((), ParallelCorpus), (("<y>",), MixedCorpus)]
)
def test_one_corpus_is_no_mixture_unless_it_is_tagged(folders, tmp_path, tags, kind):
    run = run_of(folders)
    only = {k: v for k, v in run.text.items() if not k.endswith("2")}
    text = text_of(replace(run, text=only, tags=tags), tmp_path / "cache")["train"]
    source, target = text.parts[1].source, text.parts[1].target
    assert (source, target) == (folders / "a/train.en", folders / "a/train.de")
    tokenizer = cached_tokenizer(text, 20, tmp_path / "cache", 1)
    corpus = encoded_text(text, tokenizer, tmp_path / "cache")
    assert (type(corpus), len(corpus)) == (kind, 2)
    said = [f"corpus 1    {source}, {target}, tag <y>: 2 pairs, 2 an epoch (100.0%)"]
    assert corpus.summary(np.arange(2)) == said * len(tags)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"source": ("en",) * 3},
            "--source: expected 1 or 2, one for each corpus, got 3",
        ),
        ({"weights": (1, 2, 3)}, "--weights: expected 2, one for each corpus, got 3"),
        ({"weights": (1,)}, "--weights: expected 2, one for each corpus, got 1"),
        ({"weights": (1, 0)}, "weights: expected at least 1, got 0"),
        ({"weights": (0.5, 0.5)}, "weights: expected int, got 0.5"),
        ({"tag": ("<a>",)}, "--tag: expected 2, one for each corpus, got 1"),
        (
            {"tag": ("<a>", "b c")},
            "--tag: expected a symbol without space .* got 'b c'",
        ),
        (
            {"tag": ("<s>", "<a>")},
            "--tag: expected a symbol without space .* got '<s>'",
        ),
        ({"tag": ("", "")}, "--tag: expected a symbol without space .* got ''"),
        ({"data": "a", "target": "de", "weights": (3,)}, "nothing with one corpus"),
    ],
)
def test_wrong_corpora_are_refused(settings, message):
    good = {"data": ("a", "b"), "source": ("en",), "target": ("de", "fr")}
    with pytest.raises(ValueError, match=message):
        TextConfig(**good | settings)


def test_one_folder_or_language_stands_for_all():
    one = TextConfig(data="a", source="en", target=("de", "fr")).corpora
    assert one == [("a", "en", "de"), ("a", "en", "fr")]
    two = TextConfig(data=("a", "b"), source="en", target="de").corpora
    assert two == [("a", "en", "de"), ("b", "en", "de")]


@pytest.mark.parametrize(
    "damage",
    [{"weights": [1]}, {"weights": [1, "x"]}, {"tags": ["<a>"]}, {"tags": [1, 2]},
     {"weights": 5}, {"text": {"train": ["a", "b"], "val x": ["a", "b"]}}],
)  # fmt: skip
def test_a_damaged_mixture_in_a_configuration_is_refused(folders, damage):
    stored = json.loads(run_of(folders, weights=(1, 2), tag=("<a>", "")).to_json())
    with pytest.raises(ValueError, match="expected"):
        RunConfig.from_json(json.dumps({**stored, **damage}))


def test_a_run_on_the_built_in_corpus_outlives_the_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "SIZES", {"train": 50, "val": 5, "test": 5})
    first = corpus.built_in_corpus(tmp_path / "old")
    files = {s: (str(pair.source), str(pair.target)) for s, pair in first.items()}
    settings = SimpleNamespace(text=files, tags=(), weights=())
    digest = first["train"].digest()
    assert text_of(settings, tmp_path / "new") == first
    shutil.rmtree(tmp_path / "old")
    again = text_of(settings, tmp_path / "new")
    assert again["train"].source.is_relative_to(tmp_path / "new")
    assert again["train"].digest() == digest
    files["val"] = (str(tmp_path / "mine"), files["val"][1])
    with pytest.raises(FileNotFoundError, match="if a run's text was moved"):
        text_of(settings, tmp_path / "new")
