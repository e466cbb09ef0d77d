"""Names that a model respells."""

from dataclasses import replace

import pytest

from minitransformer import translate
from minitransformer.settings.decoding_config import TranslationConfig
from minitransformer.translation.repair import copy_names, respelled_names
from support.in_process import rows

RARE = """Kathmandu Brooklyn Fujitsu Seehofer Saskatchewan Ljubljana Lieberman Buffett
Kowalczyk Escambray Chikungunya Ostrava Schumacher Weatherby Appleton Trowbridge
Kilkenny Antananarivo Bujumbura Zanzibar Tegucigalpa Wollongong Jakobsson
Ramirez Nakamura Petrenko Abernathy Featherstone Vasquez Okonkwo""".split()
FRAMES = "Does {} live in London?", "I have never met {}.", "{} is here."
LINES = [frame.format(name) for frame in FRAMES for name in RARE]


# A text, its translation, and that with the names as they are in the text.
NEAR_MISSES = """
I was in Kathmandu. | Ich war in Kathovannu. | Ich war in Kathmandu.
Saskatchewan, Kathmandu | Kathovannu, Skatchewan | Kathmandu, Saskatchewan
"""
# Names are there, the text has the word, nothing is like it, or it is a usual word.
OTHERS = """
I was in Kathmandu. | Kathmandu und Kathovannu
Kathovannu, Kathmandu | Kathovannu
I was in Kathmandu. | Ich war in Nepal.
I was in Kathmandu. | ich war in kathovannu.
I WAS IN KATHMANDU. | ICH WAR IN KATHOVANNU.
On Friday I was there. | Am Freitag war ich da.
"""


@pytest.mark.parametrize(("source", "translation", "expected"), rows(NEAR_MISSES))
def test_near_misses_are_words_like_a_rare_name_that_is_lacking(
    shipped, source, translation, expected
):
    names = respelled_names(shipped.tokenizer, source, translation)
    for wrong, right in names.items():
        translation = translation.replace(wrong, right)
    assert translation == expected


@pytest.mark.parametrize(
    ("source", "translation"), [*rows(OTHERS), ("", "Kathovannu"), ("Kathmandu", "")]
)
def test_other_words_stay(shipped, source, translation):
    assert respelled_names(shipped.tokenizer, source, translation) == {}


def test_names_replace_words_of_which_the_model_is_unsure():
    text = "„Kathovannu“,  und Dänemark; Kathovannus Kathovannu!"
    names = {"Kathovannu": "Kathmandu", "Dänemark": "Denmark", "Copie": "Copy"}
    words = (
        ("„Kathovannu“,", -1.9),
        ("und", -2.0),
        ("Dänemark;", -1.1),
        ("Copie", None),
    )
    copied = "„Kathmandu“,  und Dänemark; Kathovannus Kathmandu!"
    assert copy_names(text, names, words) == copied


def test_the_shipped_model_keeps_more_names(shipped, monkeypatch):
    def share():
        found = zip(RARE * len(FRAMES), translate(shipped, LINES), strict=True)
        return sum(name in text for name, text in found) / len(LINES)

    copied = share()
    path = "minitransformer.translation.plain_translator.respelled_names"
    monkeypatch.setattr(path, lambda *_: {})
    assert copied > max(0.8, share())


def test_a_prefix_is_kept_and_copies_are_marked(shipped):
    line = "Schumacher is here."
    config = TranslationConfig.changed(shipped.decoding, {})
    prefix = "Sumer ist"
    [text] = shipped.translate([line], config, prefixes=[prefix])
    assert text.startswith(prefix)
    assert "Schumacher" not in text
    plain, marked = (
        shipped.hypotheses([line], replace(config, words=asked))[0][0]
        for asked in (False, True)
    )
    assert plain.text == marked.text == " ".join(word for word, _ in marked.words)
    assert "Schumacher" in plain.text
    assert not plain.words
    assert [word for word, x in marked.words if x is None] == ["Schumacher"]
