"""Tags before source lines: what a model expects, and what it gets."""

from dataclasses import replace

import pytest

from minitransformer.settings.decoding_config import DecodingConfig
from minitransformer.settings.options import UsageError
from minitransformer.text.tokenizer import Tokenizer
from minitransformer.translation.tags import Tags
from minitransformer.translation.translator import Translator
from support.models import CAT_LINES, small_model

KNOWN = ["<2de>", "<2fr>"]
CONFIG = DecodingConfig(max_input=8)


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train(CAT_LINES, 60, user_defined_symbols=KNOWN)


def encoded(tokenizer, known, chosen, *lines, **settings):
    """What a translator gives its model for lines: the pieces of each part, joined."""
    tags = Tags(tokenizer, known, chosen)
    translator = Translator(small_model(), tokenizer, tags=tags)
    found = translator.encode(lines, replace(CONFIG, **settings), first_line=7)
    return [["".join(tokenizer.pieces(part)) for part in parts] for parts in found]


@pytest.mark.parametrize(
    ("known", "chosen", "line"),
    [
        (KNOWN, "<2de>", "the cat"),
        (KNOWN, "<2de>", "<2de> the cat"),
        (KNOWN, None, "<2de> the cat"),
        (KNOWN[:1], "<2de>", "the cat"),
        (["", *KNOWN], "<2de>", "the cat"),
        (["", *KNOWN], None, "<2de> the cat"),
        ([], None, "<2de> the cat"),
    ],
)
def test_the_tag_of_a_line_is_its_own_or_the_chosen_one(tokenizer, known, chosen, line):
    assert encoded(tokenizer, known, chosen, line, "", " ") == [
        ["▁<2de>▁the▁cat"], [""], [""],
    ]  # fmt: skip


@pytest.mark.parametrize("chosen", [None, ""])
def test_lines_have_no_tag_if_a_corpus_had_none(tokenizer, chosen):
    assert encoded(tokenizer, ["", "<2de>"], chosen, "the cat") == [["▁the▁cat"]]


@pytest.mark.parametrize("line", ["<2fr> ", ""])
def test_each_part_of_a_long_line_has_the_tag(tokenizer, line):
    text = "the cat number 77 sat on the mat and looked"
    [parts] = encoded(tokenizer, KNOWN, None if line else "<2fr>", line + text)
    assert len(parts) > 1
    assert all(part.startswith("▁<2fr>▁") for part in parts)
    whole = "".join(part.removeprefix("▁<2fr>") for part in parts)
    assert whole.replace("▁", " ").strip() == text
    limit = CONFIG.max_input
    ids = tokenizer.encode([part.replace("▁", " ") for part in parts])
    assert max(map(len, ids)) <= limit
    with pytest.raises(ValueError, match=f"line 7: expected at most {limit} word"):
        encoded(tokenizer, KNOWN, "<2fr>", text, long_input="error")


def test_a_line_of_nothing_but_a_tag_is_blank(tokenizer):
    assert encoded(tokenizer, KNOWN, None, "<2de>", " <2fr> ") == [[""], [""]]


@pytest.mark.parametrize(
    ("chosen", "line", "message"),
    [
        (None, "the cat", "line 8: expected one of the model's tags <2de>, <2fr> at"),
        (None, "the <2de> cat", "line 8: expected one of the model's tags"),
        (
            "<2de>",
            "<2fr> the",
            "line 8: expected no other tag than --tag .<2de>., got .<2f",
        ),
    ],
)
def test_a_wrong_or_missing_tag_is_refused_with_its_line(
    tokenizer, chosen, line, message
):
    with pytest.raises(ValueError, match=message):
        encoded(tokenizer, KNOWN, chosen, "", line)


def test_an_unknown_tag_is_refused(tokenizer):
    with pytest.raises(
        UsageError, match="--tag: expected '<2de>', '<2fr>', got '<2x>'"
    ):
        Tags(tokenizer, KNOWN, "<2x>")
    with pytest.raises(UsageError, match="expected '<2de>', '<2fr>', got ''"):
        Tags(tokenizer, KNOWN, "")


def test_a_model_without_recorded_tags_has_those_of_its_vocabulary(tokenizer):
    """Its corpus was made by `minitransformer mix`: tags are part of the text."""
    translator = Translator(small_model(), tokenizer, tags=Tags(tokenizer, [], "<2de>"))
    expected = tokenizer.encode(["<2de> the cat"])
    for line in ("the cat", "<2de> the cat"):
        assert translator.encode([line], DecodingConfig(), 1) == [expected]
    for wrong in ("<2x>", "the cat", ""):
        with pytest.raises(UsageError, match="--tag: expected a symbol of the vocab"):
            Tags(tokenizer, [], wrong)
