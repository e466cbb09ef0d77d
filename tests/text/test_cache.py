"""The cache of vocabularies and encoded text: damage, bad text, interruptions."""

import re
import shutil
from types import SimpleNamespace

import numpy as np
import pytest

from minitransformer.text.cache import cached_tokenizer, encoded_corpus
from minitransformer.text.pairs import TextPair
from minitransformer.text.tokenizer import Tokenizer

LINES = [f"the cat number {i} sat on the mat" for i in range(100)]


@pytest.fixture
def pair(tmp_path):
    pair = TextPair(tmp_path / "train.en", tmp_path / "train.de")
    for path in (pair.source, pair.target):
        path.write_text("".join(line + "\n" for line in LINES))
    return pair


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


def learn(pair, cache, vocab_size=60):
    return cached_tokenizer(pair, vocab_size, cache, num_threads=1)


def test_a_vocabulary_is_learned_once(pair, cache, monkeypatch):
    first = learn(pair, cache)
    assert cached_tokenizer(pair, 50, cache, num_threads=1).vocab_size == 50
    monkeypatch.setattr(Tokenizer, "train", None)  # a second time would fail
    assert learn(pair, cache).model == first.model


def test_a_vocabulary_that_was_cut_short_is_made_again(pair, cache, capsys):
    first = learn(pair, cache).model
    [path] = cache.glob("*.model")
    for size in (0, 1, len(first) // 2, len(first) - 1):
        path.write_bytes(first[:size])
        assert learn(pair, cache).model == first
        assert path.read_bytes() == first
        assert f"{path}: expected a SentencePiece model" in capsys.readouterr().err


def encoded(pair, cache):
    corpus = encoded_corpus(pair, Tokenizer.train(LINES, 60), cache)
    return corpus.source.concatenate(np.arange(len(corpus)))


@pytest.mark.parametrize(
    "name", ["corpus.json", "source.ids", "source.starts", "target.starts"]
)
@pytest.mark.parametrize("damage", ["shorter", "empty", "missing"])
def test_damaged_encoded_text_is_made_again(pair, cache, capsys, name, damage):
    first = encoded(pair, cache).tobytes()
    [folder] = [path for path in cache.iterdir() if path.is_dir()]
    file = folder / name
    changes = {"shorter": lambda: file.read_bytes()[:-8], "empty": lambda: b""}
    file.write_bytes(changes[damage]()) if damage in changes else file.unlink()
    assert encoded(pair, cache).tobytes() == first
    told = f"{folder}: a damaged cache" in capsys.readouterr().err
    assert told == (damage != "missing")


@pytest.mark.parametrize(
    "damage", ["other ids", "other starts", "other header", "other text"]
)
def test_a_cache_that_says_something_else_is_made_again(pair, cache, capsys, damage):
    """Before it is used: an id that is no piece would be a traceback, or garbage."""
    first = encoded(pair, cache).tobytes()
    [folder] = [path for path in cache.iterdir() if path.is_dir()]
    ids = np.fromfile(folder / "source.ids", "uint16")
    starts = np.fromfile(folder / "target.starts", "int64")
    if damage == "other ids":
        ids[7] = 60_000
        ids.tofile(folder / "source.ids")
    elif damage == "other starts":
        starts[3] = starts[9]
        starts.tofile(folder / "target.starts")
    elif damage == "other header":
        header = folder / "corpus.json"
        header.write_text(
            header.read_text().replace('"sentences": 1', '"sentences": {}')
        )
        assert "{}" in header.read_text()
    else:
        pair.target.write_text("one more\n" * 100)
        encoded(pair, cache)
        [other] = [x for x in cache.iterdir() if x.is_dir() and x != folder]
        shutil.rmtree(folder)
        other.rename(folder)
        pair.target.write_text("".join(line + "\n" for line in LINES))
    assert encoded(pair, cache).tobytes() == first
    assert f"{folder}: a damaged cache (its " in capsys.readouterr().err


def test_long_text_is_encoded_in_chunks(pair, cache, monkeypatch):
    whole = encoded(pair, cache / "whole").tolist()
    monkeypatch.setattr("minitransformer.text.cache.CHUNK", 7)
    assert encoded(pair, cache / "chunks").tolist() == whole


@pytest.mark.parametrize(("paragraphs", "expected"), [(1500, 1), (3500, 20)])
def test_each_line_counts_as_much_for_the_median_number_of_sentences(
    pair, cache, monkeypatch, paragraphs, expected
):
    """However long it is: paragraphs make most of the text in both cases."""
    monkeypatch.setattr("minitransformer.text.cache.CHUNK", 1000)
    for path in (pair.source, pair.target):
        lines = [*LINES * 28, *["The cat sat. " * 20] * paragraphs]
        path.write_text("".join(f"{line}\n" for line in lines))
    corpus = encoded_corpus(pair, Tokenizer.train(LINES, 60), cache)
    assert corpus.median_sentences == expected


@pytest.mark.parametrize(("size", "dtype"), [(1 << 16, "uint16"), (65_537, "int32")])
def test_ids_take_two_bytes_where_they_fit(pair, tmp_path, size, dtype):
    """Of a vocabulary that gives every line its largest id."""

    def encode(lines, num_threads):
        return [[size - 1] if line else [] for line in lines]

    nothing = dict.fromkeys(("normalise", "keeps_whole"), str.isspace)
    nothing |= {"model": b"", "written": list}
    vocabulary = SimpleNamespace(vocab_size=size, encode=encode, **nothing)
    corpus = encoded_corpus(pair, vocabulary, tmp_path / dtype)
    assert corpus.target.concatenate(np.array([0, 5])).dtype == dtype
    assert corpus.source.concatenate(np.arange(100)).tolist() == [size - 1] * 100


@pytest.mark.parametrize(("line", "told"), [("the cat. ", 0), ("\u4f60 ", 1)])
def test_a_corpus_says_which_characters_the_vocabulary_lacks(pair, cache, line, told):
    """There are two such lines; of 100 others, the vocabulary knows the characters."""
    for path, lines in (
        (pair.source, [*LINES[::-1], *LINES[:2]]),
        (pair.target, [*LINES, line * 12, line * 12]),
    ):
        path.write_text("\n".join(lines), encoding="utf-8")
    tokenizer = Tokenizer.train([*LINES, "."], 60)
    for _ in range(2):  # encoded, and read from the cache
        notes = encoded_corpus(pair, tokenizer, cache).notes
        expected = [r"unknown     0.0% of .* and 2\.\d% of .* not 60, learns"] * told
        assert len(notes) == len(expected)
        assert all(map(re.match, expected, notes)), notes


@pytest.mark.parametrize("equal", [1, 2, 100])
def test_a_corpus_says_how_many_pairs_have_the_same_text_on_both_sides(
    pair, cache, equal
):
    """If they are more than one in a hundred; a line of a number may well be."""
    other = [*LINES[:equal], *(f"die Katze {i}" for i in range(equal, 100))]
    pair.target.write_text("".join(f"{line}\n" for line in other))
    tokenizer = Tokenizer.train([*LINES, *other], 60)
    notes = encoded_corpus(pair, tokenizer, cache).notes
    told = [f"equal       {equal} of 100 pairs have the same text"] * (equal > 1)
    assert len(notes) == len(told)
    assert all(map(str.startswith, notes, told))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (b"fine\nnot \xff fine\n", r"train\.en, line 2: expected UTF-8, got byte 0xff"),
        (b"one\ntwo\n", r"expected as many lines in .*train\.en as in .*, got 2 and"),
        (b"", r"expected as many lines in .*train\.en as in .*, got 0 and 100"),
    ],
)
def test_text_that_cannot_be_learned_from_is_named(pair, cache, source, message):
    pair.source.write_bytes(source)
    with pytest.raises(ValueError, match=f"(?s)^[^\n]*{message}[^\n]*$"):
        learn(pair, cache)
    assert not list(cache.glob("[!.]*"))


@pytest.mark.parametrize("text", ["", "\n\n", " \n\t\n"])
def test_empty_text_is_named(pair, cache, text):
    pair.source.write_text(text)
    pair.target.write_text(text)
    with pytest.raises(ValueError, match=r"train\.en, .*train\.de: expected text to"):
        learn(pair, cache)


@pytest.mark.parametrize("method", ["train", "encode"])
def test_text_that_changes_while_it_is_read_is_not_kept(
    pair, cache, monkeypatch, method
):
    tokenizer = learn(pair, cache.with_name("another"))
    original = getattr(Tokenizer, method)

    def change(*args, **options):
        pair.source.write_text(pair.source.read_text().replace("mat", "rug"))
        return original(*args, **options)

    monkeypatch.setattr(Tokenizer, method, change)
    read = {
        "train": lambda: learn(pair, cache),
        "encode": lambda: encoded_corpus(pair, tokenizer, cache),
    }
    with pytest.raises(ValueError, match="it was changed"):
        read[method]()
    assert not [path for path in cache.iterdir() if not path.name.endswith(".lock")]
