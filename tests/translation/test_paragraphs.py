"""Lines of several sentences: how they are divided, and what is made of them."""

import itertools
import re
from dataclasses import replace
from pathlib import Path

import pytest

from minitransformer import translate
from minitransformer.settings.decoding_config import TranslationConfig
from minitransformer.translation.translator import Translator

TABLE = Path(__file__).with_name("paragraphs.txt").read_text(encoding="utf-8")
PARAGRAPHS = [x.split("\t") for x in TABLE.split("\n")[1:-1]]
TWO, THREE = "The cat sat. It looked!", "Oh! The cat sat. It looked."
CONFIG = TranslationConfig(max_len_a=0, max_len_b=6)


def num_sentences(text):
    """The stops of a translation, without those of numbers, titles and initials."""
    text = re.sub(r"\b(\d{1,2}|Dr|Hr|Herr|Prof|[A-Z])\.", r"\1", text)
    return len(re.findall(r"[.!?…]+\W*(?:\s|$)", text))


def test_a_paragraph_comes_back_with_all_its_sentences(shipped):
    given = [(int(count), text) for count, text in PARAGRAPHS if int(count) >= 3]
    pairs = zip(given[::2], given[1::2], strict=True)
    given += [(m + n, f"{first} {second}") for (m, first), (n, second) in pairs]
    counts, lines = zip(*given, strict=True)
    assert [num_sentences(x) for x in translate(shipped, lines)] == [*counts]
    whole = [num_sentences(x) for x in translate(shipped, lines, split="never")]
    assert sum(a == b for a, b in zip(whole, counts, strict=True)) < len(lines)


@pytest.mark.parametrize(
    ("settings", "usual", "prefix", "parts"),
    [
        ({}, 1, "", [1, 2, 3]),
        ({}, 2, "", [1, 1, 3]),
        ({}, 3, "", [1, 1, 1]),
        ({"split": "always"}, 3, "", [1, 2, 3]),
        ({"split": "never"}, 1, "", [1, 1, 1]),
        ({"split": "always"}, 1, "the", [1, 1, 1]),
        ({"max_input": 7}, 3, "", [1, 2, 3]),
        ({"max_input": 7}, 3, "the", [1, 2, 3]),
    ],
)
def test_which_lines_are_divided(translator, settings, usual, prefix, parts):
    """The model reads 3, 8 and 10 pieces: the vocabulary has no exclamation mark."""
    translator = Translator(
        translator.model, translator.tokenizer, median_sentences=usual
    )
    lines, config = ["the cat", TWO, THREE], replace(CONFIG, **settings)
    divided = [*translator.divide(lines, config, [prefix] * 3)]
    assert [*map(len, divided)] == parts
    assert ["".join(itertools.chain(*sentences)) for sentences in divided] == lines


@pytest.mark.parametrize(
    ("layout", "sentences"),
    [
        ("", []),
        ("  \t ", []),
        ("\t{}  ", ["the cat"]),
        ("  {}\t{}  {} ", ["The cat.", "Sat!", "3?"]),
        ("{}{}", ["the cat\N{IDEOGRAPHIC FULL STOP}", "sat"]),
    ],
)
def test_layout_is_kept(translator, layout, sentences):
    """White space stays; these translations have their own script's space."""
    texts = translator.translate(sentences, CONFIG)
    [text] = translator.translate([layout.format(*sentences)], CONFIG)
    assert text == layout.format(*texts)


def test_capitals_come_back_as_capitals(shipped):
    lines = [
        "Where is the station?",
        "I'm a teacher. My name is Tom.",
        " He lives in Berlin ",
    ]
    found = translate(shipped, [line.upper() for line in lines])
    assert found == [text.upper() for text in translate(shipped, lines)]
    [mixed] = translate(shipped, ["Where is the station? I'M A TEACHER."])
    assert mixed == " ".join(
        [*translate(shipped, lines[:1]), found[1].partition(".")[0] + "."]
    )
    [whole] = translate(shipped, [lines[0].upper()], split="never")
    assert whole != whole.upper()
