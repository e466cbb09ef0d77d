"""Sentences found by rules, against a table by hand."""

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minitransformer.text.sentences import (
    Sentence,
    as_one_sentence,
    halved,
    median_sentences,
    space_after,
    split_sentences,
)
from support.in_process import rows

TABLE = Path(__file__).with_name("sentences.txt").read_text(encoding="utf-8")
CASES = [x for x in TABLE.split("\n") if x and not x.startswith("# ")]


def joined(sentences):
    return "".join(itertools.chain(*sentences))


@pytest.mark.parametrize("case", CASES)
def test_sentences_are_those_of_the_table(case):
    (space, first), *others = split_sentences(case.replace("\N{PILCROW SIGN}", ""))
    marked = [f"{space}\N{PILCROW SIGN}{text}" for space, text in others]
    assert space + first + "".join(marked) == case.rstrip()


PARTS = st.sampled_from(
    ["Er", "sie", "1", ".", "...", "?", "。", '"', " ", "\t", "z. B."]
)


@given(st.lists(PARTS).map("".join) | st.text())
def test_white_space_and_sentences_are_the_text(line):
    for sentences in (split_sentences(line), [as_one_sentence(line)]):
        assert joined(sentences) == line.rstrip()
        assert all(not space.strip() for space, _ in sentences)
        assert all(text == text.strip() for _, text in sentences)
        assert all(text for _, text in sentences) or not line.strip()


@given(st.lists(PARTS | st.just("long"), max_size=20).map("".join), st.integers(1, 9))
def test_halves_fit(text, limit):
    whole = Sentence("\t", text.strip())
    parts = halved(whole, lambda part: len(part) <= limit)
    assert joined(parts) == joined([whole])
    assert all(len(part) <= limit and part.strip() == part for _, part in parts)
    assert all(space.isspace() or not space for space, _ in parts)


# How long a part may be, and the parts of a text.
HALVES = """
20 | one two three¶ four five six
15 | He ran.¶ She did not
18 | He ran. "Go."¶ she said it
20 | A. And after¶ that he ran
12 | It is¶ 3.14 or
6 | 你好。¶你好好好
3 | 你好¶你好
9 | 👨\u200d👩\u200d👧¶👨\u200d👩\u200d👧
3 | 👨\u200d¶👩\u200d👧
4 | e\u0316\u0323¶e\u0316\u0323
"""


@pytest.mark.parametrize(("limit", "text"), rows(HALVES))
def test_halves_end_after_punctuation_else_between_words_or_characters(limit, text):
    whole = Sentence("", text.replace("¶", ""))
    found = halved(whole, lambda part: len(part) <= int(limit))
    assert "¶".join(space + part for space, part in found) == text


def test_white_space_between_translations_is_that_of_their_script():
    for space in ("", " "):
        assert space_after("Er kam.", space) == " "
        assert space_after("他来了。", space) == ""
        assert space_after("“他来了。”", space) == ""
    for space in ("  ", "\t", "\n", "\u3000"):
        assert space_after("Er kam.", space) == space_after("他来了。", space) == space


def test_the_median_number_of_sentences_is_the_lower_one_of_two():
    one, two, three = "He came.", "He came. She left.", "He came. She left. I stayed."
    assert median_sentences([one]) == median_sentences([""]) == 1
    assert median_sentences([*[one] * 9, three]) == median_sentences([one, three]) == 1
    assert median_sentences([one, one, two, two, three]) == 2
    assert median_sentences([one] + [three] * 2) == 3
