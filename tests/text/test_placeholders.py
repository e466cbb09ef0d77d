"""What is found to be copied, what the model reads instead, and pairs to learn from."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minitransformer.text import placeholders
from minitransformer.text.cache import cached_tokenizer, encoded_corpus
from minitransformer.text.pairs import TextPair
from minitransformer.text.placeholders import (
    MOST_CHARACTERS,
    NUMBERS,
    SYMBOLS,
    Finder,
    hide,
    named,
    place,
    restore,
)
from minitransformer.text.tokenizer import Tokenizer


@pytest.mark.parametrize(
    "line",
    [
        "It is 5 % of 100%, and/or he/she ran 3 km/h; e.g. z.B. p.m.",
        "AT&T & Co. said: 3 < 4 > 2, a < b, x>y - well-known, isn't it?",
        'He\'s Mr. Smith-Jones (1 of 2) -- "no"... What?! [1] 50% sure, 7% of it.',
        "I live in the U.S.A. at No. 5, from 9-11, on 3/4 and 24/7.",
        "{ } {not one} $5",
    ],
)
def test_ordinary_text_has_nothing_to_copy(line):
    assert [x.output for x in Finder().find(line) if x.kind != "number"] == []


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        *[(x, "number") for x in ("12,345", "1,234,567.89", "1.234.567,89", "1,234")],
        *[(x, "word") for x in ("12345", "12,3456", "1.2345", "12,345-67", "1,23,456")],
        *[(x, "word") for x in ("192.168.178.100", "192.168.178.1", "12,345.678,9")],
    ],
)
def test_numbers_whose_thousands_are_set_off_are_read(line, kind):
    for text in (f"It is {line}.", f"(for ${line}, see below)"):
        assert [(x.kind, x.output) for x in Finder().find(text)] == [(kind, line)]


def test_characters_that_no_piece_has_are_copied_with_their_words():
    lines = ["the cat sat on the mat", "x + y - z = f(a), b. c!"]
    finder = Finder(Tokenizer.train(lines * 9, 40))
    found = finder.find("on the M\xf6n, the Кот sat → f e\u0301e xyzह\u093f.")
    outputs = ["M\xf6n", "Кот", "→", "e\u0301e xyzह\u093f"]
    assert [x.output for x in found] == outputs


@given(st.text(st.sampled_from("ab 1.9%{}<>/@⟦⟧47`_😀é-"), max_size=60))
def test_what_is_hidden_comes_back(line):
    """A model that writes what it reads gives the line, but for space around emoji."""
    items = Finder().find(line)
    for names in (SYMBOLS, NUMBERS):
        own = named(line, items, names)
        if own and all(x.kind != "loose" for x in own):
            read = hide(line, own)
            assert all(x.output not in read for x in own if len(x.output) > 4)
            assert restore(own, read) == line


@pytest.mark.parametrize(
    ("line", "read", "translation", "links", "expected"),
    [
        ("You 😀, too?", "You, too?", "Auch du?", "0-1 1-0", "Auch du 😀?"),
        ("Come on 😀!", "Come on!", "Komm!", "0-0 1-0", "Komm 😀!"),
        ("Come on! 😀", "Come on!", "Komm!", "0-0 1-0", "Komm! 😀"),
        ("😀 Come on!", " Come on!", "Komm!", "0-0 1-0", "😀 Komm!"),
        ("I <b>do</b> so", "I do so", "Ja so tu ich", "0-3 1-0 1-2 2-1",
         "<b>Ja so tu</b> ich"),
        ("a 😀 b 🎉 c", "a b c", "B A C", "0-1 1-0 2-2", "B A 😀 🎉 C"),
        ("It is<br/>so", "It is so", "Es ist so", "0-0 1-1 2-2", "Es ist<br/>so"),
    ],
)  # fmt: skip
def test_what_is_left_out_goes_where_the_words_went(
    line, read, translation, links, expected
):
    own = named(line, Finder().find(line), ())
    assert hide(line, own) == read
    pairs = [tuple(map(int, x.split("-"))) for x in links.split()]
    assert restore(own, place(line, own, translation, pairs)) == expected


@pytest.mark.parametrize(
    ("names", "expected"),
    [("123", "Hund, Kuh, {x}"), ("213", "Kuh, Hund, {x}"), ("321", "{x}, Kuh, Hund")]
    + [(x, None) for x in ("12", "23", "1123", "1233", "1234")],
)
def test_terms_may_change_their_places_but_not_get_lost(names, expected):
    finder = Finder(glossary={"dog": "Hund", "cow": "Kuh"})
    own = named("dog, cow, {x}", finder.find("dog, cow, {x}"), SYMBOLS)
    written = dict(zip("1234", ["⟦100⟧", "⟦101⟧", "⟦1⟧", "⟦2⟧"], strict=True))
    assert restore(own, ", ".join(written[n] for n in names)) == expected


def test_long_lines_are_left_alone():
    assert Finder().find("a@b.de " * MOST_CHARACTERS) == []


S = "\u27e6"
EMOJI = "\N{GRINNING FACE}"


@pytest.mark.parametrize(
    ("pair", "hidden"),
    [
        (("see a@b.de now", "siehe a@b.de jetzt"), True),
        (("%s of %d", "%s von %d"), True),
        (("%s of %d", "%d von %s"), False),
        (("see a@b.de", "siehe dort"), False),
        (("see a@b.de", "siehe a@b.de und a@b.de"), False),
        (("12345 and 67890", "12345 und 67891"), False),
        (("a <b>x</b>", "ein <b>x</b>"), True),
        (("https://a.org", "https://a.org"), False),
        (("in 1985", "1985"), False),
        ((" ".join(f"{{{n}}} x" for n in range(10)),) * 2, False),
    ],
)
def test_pairs_that_hold_the_same_are_learned_from(pair, hidden):
    found = Finder().hide_pair(*pair)
    assert (found != pair) == hidden
    if hidden and S in found[0]:
        names = [[x for x in SYMBOLS if x in side] for side in found]
        assert names[0] == names[1] != []


def test_all_symbols_are_learned_alike():
    pairs = [Finder().hide_pair(f"see x{n}@y.de", f"da x{n}@y.de") for n in range(500)]
    counts = [sum(name in source for source, _ in pairs) for name in SYMBOLS]
    assert sum(counts) == 500
    assert min(counts) > 30


def test_a_vocabulary_has_symbols_if_enough_pairs_need_them(tmp_path, monkeypatch):
    monkeypatch.setattr(placeholders, "LEAST_PAIRS", 5)
    rows = [
        (f"the cat saw x{n}@y.de here", f"die Katze x{n}@y.de hier") for n in range(9)
    ]
    for name, count in (("many", 9), ("few", 4)):
        text = TextPair(tmp_path / f"{name}.en", tmp_path / f"{name}.de")
        own = rows[:count] + [("the cat sat", "die Katze da")] * 20
        for path, side in zip(
            (text.source, text.target), zip(*own, strict=True), strict=True
        ):
            path.write_text("".join(f"{line}\n" for line in side))
        tokenizer = cached_tokenizer(text, 60, tmp_path / "cache", 1)
        assert all(map(tokenizer.keeps_whole, SYMBOLS)) == (name == "many")
        corpus = encoded_corpus(text, tokenizer, tmp_path / "cache")
        first = corpus.source.ids[: corpus.source.starts[1]].tolist()
        assert (SYMBOLS[0][0] in tokenizer.decode([first])[0]) == (name == "many")
