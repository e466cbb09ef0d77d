"""The cache of vocabularies and encoded text: damage, bad text, interruptions."""

import re
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from minitransformer.text.cache import cached_tokenizer, encoded_corpus
from minitransformer.text.pairs import TextPair
from minitransformer.text.tokenizer import Tokenizer

LINES = [f"the cat number {i} sat on the mat" for i in range(100)]


def write(folder, source=LINES, target=LINES):
    """Write the lines of both sides."""
    pair = TextPair(folder / "train.en", folder / "train.de")
    for path, lines in zip((pair.source, pair.target), (source, target), strict=True):
        path.write_text("".join(f"{line}\n" for line in lines))
    return pair


@pytest.fixture
def pair(tmp_path):
    return write(tmp_path)


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train([*LINES, "."], 60)


def learn(pair, cache, vocab_size=60):
    return cached_tokenizer(pair, vocab_size, cache, num_threads=1)


def ids_of(corpus, side="source"):
    """All ids of a side; the file itself may change."""
    return getattr(corpus, side).concatenate(np.arange(len(corpus))).tolist()


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


@pytest.mark.parametrize("chunk", [7, 10_000])
def test_encoding_keeps_order_and_drops_blank_pairs(
    tmp_path, cache, tokenizer, monkeypatch, chunk
):
    monkeypatch.setattr("minitransformer.text.cache.CHUNK", chunk)
    source = [*LINES[:50], " ", "the", *LINES[50:]]
    target = [*LINES[50:], "the", " ", *LINES[:50]]
    corpus = encoded_corpus(write(tmp_path, source, target), tokenizer, cache)
    assert (len(corpus), corpus.dropped_blank) == (100, 2)
    for side, lines in (("source", LINES), ("target", LINES[50:] + LINES[:50])):
        assert ids_of(corpus, side) == sum(tokenizer.encode(lines), [])  # noqa: RUF017


def test_the_cache_follows_the_content(tmp_path, pair, cache, tokenizer, monkeypatch):
    first = ids_of(encoded_corpus(pair, tokenizer, cache))
    monkeypatch.setattr(Tokenizer, "encode", None)  # a second encoding would fail
    (tmp_path / "copy").mkdir()
    assert ids_of(encoded_corpus(write(tmp_path / "copy"), tokenizer, cache)) == first
    with pytest.raises(TypeError):
        encoded_corpus(write(tmp_path, LINES[::-1]), tokenizer, cache)
    assert not list(cache.glob("partial-*"))


FILES = "corpus.json source.ids source.starts target.ids target.starts".split()


@pytest.fixture(scope="module")
def written(tmp_path_factory, tokenizer):
    """The folder of text in a cache, and whether its ids are as at first."""
    place = tmp_path_factory.mktemp("written")
    pair, cache = write(place), place / "cache"
    first = ids_of(encoded_corpus(pair, tokenizer, cache))
    [folder] = [path for path in cache.iterdir() if path.is_dir()]
    return folder, lambda: ids_of(encoded_corpus(pair, tokenizer, cache)) == first


@given(
    name=st.sampled_from(FILES),
    place=st.integers(0, 2000),
    removed=st.integers(0, 20) | st.just(9**9),
    added=st.binary(max_size=3),
)
@example(name="corpus.json", place=0, removed=9**9, added=b"[]")
def test_a_cache_with_other_bytes_is_made_again(written, name, place, removed, added):
    """Before it is used: an id that is no piece would be a traceback, or garbage."""
    folder, is_same = written
    data = (folder / name).read_bytes()
    place %= len(data)
    (folder / name).write_bytes(data[:place] + added + data[place + removed :])
    assert is_same()


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_cache_is_named(written, capsys, name):
    """Unless a file of it was deleted."""
    folder, is_same = written
    file = folder / name
    data = file.read_bytes()
    other = data.replace(b'"sentences": 1', b'"sentences": 2')  # of the header
    if other == data:
        other = data[:-2] + b"\x7f\0"
    for damage, told in ((lambda: file.write_bytes(other), 1), (file.unlink, 0)):
        damage()
        assert is_same()
        assert capsys.readouterr().err.count(f"{folder}: a damaged cache (") == told


def test_the_cache_of_other_text_is_made_again(written, capsys):
    folder, is_same = written
    write(folder.parents[1], ["one more"] * 100)
    assert not is_same()
    [other] = [x for x in folder.parent.iterdir() if x.is_dir() and x != folder]
    folder.rename(folder.with_name("away"))
    other.rename(folder)
    write(folder.parents[1])
    assert is_same()
    assert f"{folder}: a damaged cache (its " in capsys.readouterr().err


@pytest.mark.parametrize(("paragraphs", "expected"), [(60, 1), (200, 20)])
def test_each_line_counts_as_much_for_the_median_number_of_sentences(
    tmp_path, cache, tokenizer, monkeypatch, paragraphs, expected
):
    """However long it is: paragraphs make most of the text in both cases."""
    monkeypatch.setattr("minitransformer.text.cache.CHUNK", 40)
    monkeypatch.setattr("minitransformer.text.cache.COUNTED", 8)
    lines = [*LINES, *["The cat sat. " * 20] * paragraphs]
    corpus = encoded_corpus(write(tmp_path, lines, lines), tokenizer, cache)
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
def test_a_corpus_says_which_characters_the_vocabulary_lacks(
    tmp_path, cache, tokenizer, line, told
):
    """There are two such lines; of 100 others, the vocabulary knows the characters."""
    pair = write(tmp_path, [*LINES[::-1], *LINES[:2]], [*LINES, *[line * 12] * 2])
    for _ in range(2):  # encoded, and read from the cache
        notes = encoded_corpus(pair, tokenizer, cache).notes
        expected = [r"unknown     0.0% of .* and 2\.\d% of .* not 60, learns"] * told
        assert len(notes) == len(expected)
        assert all(map(re.match, expected, notes)), notes


@pytest.mark.parametrize("equal", [1, 2, 100])
def test_a_corpus_says_how_many_pairs_have_the_same_text_on_both_sides(
    tmp_path, cache, tokenizer, equal
):
    """If they are more than one in a hundred; a line of a number may well be."""
    other = [*LINES[:equal], *(f"cat {i}" for i in range(equal, 100))]
    notes = encoded_corpus(write(tmp_path, LINES, other), tokenizer, cache).notes
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


@pytest.mark.parametrize(
    ("lines", "none"), [([], "none"), ([" ", "\t"], "2 with a blank line each")]
)
def test_empty_text_is_named(tmp_path, cache, tokenizer, lines, none):
    pair = write(tmp_path, lines, lines)
    with pytest.raises(ValueError, match=r"train\.en, .*train\.de: expected text to"):
        learn(pair, cache)
    with pytest.raises(ValueError, match=f"expected sentence pairs, found {none}$"):
        encoded_corpus(pair, tokenizer, cache)


@pytest.mark.parametrize("method", ["train", "encode"])
def test_text_that_changes_while_it_is_read_is_not_kept(
    pair, cache, tokenizer, monkeypatch, method
):
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
