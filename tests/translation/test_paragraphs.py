"""Lines of several sentences, as minitransformer.translation divides and joins them."""

import re
from pathlib import Path

import pytest

from minitransformer import translate
from minitransformer.settings.decoding_config import TranslationConfig

TABLE = Path(__file__).with_name("paragraphs.txt").read_text(encoding="utf-8")
PARAGRAPHS = [x.split("\t") for x in TABLE.split("\n")[1:-1]]
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
    # Undivided, some are lost.
    whole = [num_sentences(x) for x in translate(shipped, lines[-9:], split="never")]
    assert whole != [*counts[-9:]]


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
    [whole] = translate(shipped, [lines[1].upper()], split="never")
    assert whole != whole.upper()
