"""Words in capitals and titles, with a vocabulary of words by hand."""

import pytest

from minitransformer.text.sentences import in_usual_case
from support.in_process import rows

# From the most frequent on; what is no word of these is read letter by letter.
WORDS = ["the", "I", "is", "The", "a", "Tom", "don't", "tv", "TV", "straße", "i"]


def encode(texts):
    letters = [[100 + ord(letter) for letter in text] for text in texts]
    each = zip(texts, letters, strict=True)
    return [[WORDS.index(text)] if text in WORDS else ids for text, ids in each]


CASES = """
THE TOM IS A TV. | The Tom is a tv.
'IS I TOM?' - I DON'T (XY) | 'Is I Tom?' - I don't (XY)
1 STRASSE IS THE 2ND! | 1 STRASSE is the 2ND!
The Tom Is A TV In The tv | The Tom Is A TV In The tv
Is The Tom A tv | Is The Tom A tv
Is The Tom A TV | Is the Tom a tv
The Tom Cat | The Tom Cat
THE Tom is A tv, DON'T | The Tom is A tv, don't
USA XYZ | USA XYZ
the Tom | the Tom
I | I
123 ! | 123 !
"""


@pytest.mark.parametrize(("text", "expected"), [*rows(CASES), ("", "")])
def test_words_are_what_the_vocabulary_has(text, expected):
    assert in_usual_case(text, encode) == expected


def test_a_vocabulary_of_capitals_changes_nothing():
    pieces = [*"THEISOM"]

    def in_capitals(texts):
        return [
            [i for x in text for i in ([9] * 3, [1])[x in pieces]] for text in texts
        ]

    assert in_usual_case("THE TOM IS", in_capitals) == "THE TOM IS"
