"""What text is: kept, dropped, one form, by hand and by Unicode's own tables."""

import sys
import unicodedata

import pytest
import regex
from hypothesis import given
from hypothesis import strategies as st

from minitransformer.text.clean import clean

BLANK = [
    "", " ", "\t \r", "\x85", "\xa0\u3000\u2009", "\u2028\u2029", "\0\x1b\x7f", "\xad",
    "\ufeff", "\u200b\u200c\u200d", "\u200e\u200f", "\u2066\u2069", "\ufe0f",
    "\u3164\uffa0\u115f\u1160", "\u2800", "\U000e0067\U000e007f", "\u2060\u2063",
]  # fmt: skip


@pytest.mark.parametrize("text", BLANK)
def test_a_line_that_shows_nothing_is_blank(text):
    assert clean(text) == ""
    assert clean(f"{text}a{text}").count("a") == 1


def test_white_space_controls_and_the_rest_are_those_of_unicode():
    """Each character between two letters, by the properties that Unicode gives it."""
    space, ignorable = regex.compile(r"\p{White_Space}"), regex.compile(r"\p{DI}")
    others = {"Cn", "Co", "Cs"}  # unassigned, private, halves of pairs
    assigned = (c for c in map(chr, range(sys.maxunicode + 1)) if c != "\u2581")
    codes = {ord(c) for c in assigned if unicodedata.category(c) not in others}
    for code in codes | {*range(0xE0000, 0xE1000)}:  # all of which are ignorable
        character = chr(code)
        found = clean(f"x{character}x")
        if space.match(character) or character.isspace():
            assert found == "x x"
        elif unicodedata.category(character) == "Cc":
            assert found == "xx"
        else:
            dropped = found == "xx"
            assert dropped or found == unicodedata.normalize("NFC", f"x{character}x")
            assert not dropped or unicodedata.category(character) == "Cf"
            nothing = dropped or ignorable.match(character) or code == 0x2800
            assert (clean(character) == "") == bool(nothing), hex(code)


# Characters that compose, reorder, join or are dropped, more often than chance has it.
letters = st.sampled_from("aAeo\u0301\u0327\u0316\u0308\u1100\u1161\u11a8\xad\u200d \t")


@given(st.text(letters | st.characters(exclude_categories=["Cs"]), max_size=12))
def test_equal_text_has_one_form_which_stays(text):
    found = clean(text)
    assert clean(found) == found
    for form in ("NFC", "NFD"):
        assert clean(unicodedata.normalize(form, text)) == found


def test_many_accents_take_no_time():
    """Putting so many in order would take minutes."""
    found = clean("a" + "\u0301\u0316" * 200_000)
    assert found.count("\u0301") > 199_000
    assert clean(found) == found
