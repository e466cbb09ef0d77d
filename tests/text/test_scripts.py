"""Text of many scripts, which scripts.txt has by hand: kept, composed or dropped."""

import unicodedata
from pathlib import Path

import pytest

from minitransformer.text.clean import clean
from minitransformer.text.tokenizer import Tokenizer
from minitransformer.translation.quality import (
    choose_tokenizer,
    report,
    translation_quality,
)


def read_table():
    """Each script's name and tokeniser, with its strings and what they become."""
    table = {}
    for line in Path(__file__).with_name("scripts.txt").read_text().splitlines():
        if line.startswith("#"):
            continue
        name, *strings = line.split(" | ")
        for string in strings:
            given, _, found = string.encode().decode("unicode_escape").partition(" => ")
            table.setdefault(tuple(name.split()), []).append((given, found or given))
    return table


TABLE = read_table()
STRINGS = [pair for pairs in TABLE.values() for pair in pairs]


@pytest.fixture(scope="module")
def tokenizer():
    """A vocabulary of these strings, and so one that can write all of them."""
    return Tokenizer.train([given for given, _ in STRINGS] * 3, 1600)


def test_the_table_is_large_enough():
    assert len(STRINGS) >= 150
    assert len(TABLE) >= 25


@pytest.mark.parametrize(("given", "found"), STRINGS)
def test_a_string_becomes_what_the_table_says_in_all_its_forms(tokenizer, given, found):
    assert clean(given) == found
    [pieces] = tokenizer.encode([given])
    assert tokenizer.decode([pieces]) == [found]
    assert all(tokenizer.written()[i] for i in pieces)  # none is unknown, or a byte
    for form in ("NFC", "NFD"):
        other = unicodedata.normalize(form, given)
        spaced = f"\u2028{other.replace(' ', chr(0xA0) + chr(0x3000))}\r"
        hyphenated = other[:1] + "\xad" + other[1:]
        assert tokenizer.encode([other, spaced, hyphenated]) == [pieces] * 3


@pytest.mark.parametrize(("name", "pairs"), TABLE.items(), ids=[x for x, _ in TABLE])
def test_identical_text_has_a_bleu_of_100_in_every_script(name, pairs):
    given, found = ([pair[side] for pair in pairs] for side in (0, 1))
    assert choose_tokenizer(found) == name[1]
    apart = [unicodedata.normalize("NFD", line) for line in given]
    for references in (given, found, apart):
        for lines in (references, references[:1]):
            quality = translation_quality(found[: len(lines)], lines)
            assert (quality.bleu, quality.exact) == (pytest.approx(100), 1)
    assert "\nchrF 100.00 (" in report(found[:1], apart[:1])
