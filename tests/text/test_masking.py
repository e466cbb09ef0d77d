"""What a model reads of a line, what it does not, and pairs to learn from."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minitransformer.settings.options import UsageError
from minitransformer.text.glossary import Glossary
from minitransformer.text.masking import SYMBOLS, Mask, hide, named
from minitransformer.text.tokenizer import Tokenizer
from minitransformer.translation.slots import put_slots
from support.in_process import rows


def outputs(line, mask=None):
    """What is copied of a line: all slots but numbers."""
    return [x.output for x in (mask or Mask()).slots(line) if x.kind != "number"]


@pytest.mark.parametrize(
    "line",
    [
        "It is 5 % of 100%, and/or he/she ran 3 km/h; e.g. z.B. p.m.",
        'He\'s Mr. Smith-Jones (1 of 2) -- "no"... What?! 50% sure, 7% of it.',
        "I live in the U.S.A. at No. 5, from 9-11, on 3/4 and 24/7. ,-5% !$5 !!!",
        "The 12-year-old won 5:3 in the 1990s, on the 3rd, 2nd and 21st.",
        "Mittel- und Osteuropa, die 80er Jahre, der 5:3-Sieg, $5 and 12,50€.",
        "Wait \u2013 what?Yes,no.No. (yes): «Ja», \u2018no\u2019, “so”…",
        "हिन्दी में नमस्ते, می‌خواهم, 他有3只猫。",
        "I",
        "我",
    ],
)
def test_prose_has_nothing_to_copy(line):
    assert outputs(line) == []


# Lines, and their slots: a bar without space around it stands for a space.
SLOTS = """\
At 5pm it weighs 5kg, 2bn euros. | 5pm 5kg 2bn
See $x, #{y}, @z@, $(a b), %s, <%= n %>! | $x #{y} @z@ $(a|b) %s <%=|n|%>
Say {n, plural, one {a} other {b}}. | {n,|plural,|one|{a}|other|{b}}
Use `a b`, f(x), C++, C#, .NET and a_b. | `a|b` f(x) C++ C# .NET a_b
**very** good *not* bad [He left.] ~~old~~ | ** ** * * [ ]|~~ ~~
# A house | #
- the item - and a dash | -
I am :) and :-( and :smile: here | :) :-( :smile:
Version 3.11, section 2.5 and 1.2.3 are | 3.11 2.5 1.2.3
See (https://a.b/c_(d)), or a.b/c?d=e. | https://a.b/c_(d) a.b/c?d=e
Is it 2024-01-15 or 12/24/2024? | 2024-01-15 12/24/2024
Call +49 30 1234567 or 0176 12345678 now. | +49|30|1234567 0176|12345678
2 + 2 = 4 | 2|+|2|=|4
a = b | a|=|b
1 2 3 | 1|2|3
... | ...
H2O and CO2 by R&D | H2O CO2 R&D
<b>A house</b>&nbsp;of x<br/>bricks | <b> </b>&nbsp; <br/>
Buy !<b>a</b> ?* house, not != or ??= here | <b> </b> * != ??=
"""


LONG = "a" * 70


@pytest.mark.parametrize(("line", "slots"), [*rows(SLOTS), (f"{LONG} and me", LONG)])
def test_what_is_no_prose_is_copied(line, slots):
    assert outputs(line) == [slot.replace("|", " ") for slot in slots.split()]


NUMBERS = "12,345 1,234,567.89 1.234.567,89 1,234".split()
WORDS = """12345 12,3456 1.2345 12,345-67 1,23,456 192.168.178.100 192.168.178.1
12,345.678,9""".split()


@pytest.mark.parametrize("text", [*NUMBERS, *WORDS])
def test_numbers_whose_thousands_are_set_off_are_read(text):
    kind = "number" if text in NUMBERS else "word"
    for line in (f"It is {text}.", f"(for {text}, see below)"):
        assert [(x.kind, x.output) for x in Mask().slots(line)] == [(kind, text)]


def test_characters_that_no_piece_has_are_copied_with_their_words():
    lines = ["the cat sat on the mat", "x + y - z = f(a), b. c!"]
    mask = Mask(Tokenizer.train(lines * 9, 40))
    line = "on the M\xf6n, the Кот sat ♥ e\u0301e's cat xyzह\u093f."
    assert outputs(line, mask) == ["M\xf6n", "Кот", "♥ e\u0301e", "xyzह\u093f"]


def test_rare_marks_are_read_as_usual_ones():
    lines = ['it\'s "so" he said'] * 9 + ["it\u2019s «so» „so“"]
    mask = Mask(Tokenizer.train(lines, 30))
    assert mask.as_read("it\u2019s «so»") == 'it\'s "so"'
    assert mask.as_read("„so“") == "„so“"


@given(st.text(st.sampled_from("ab 1.9%{}<>/@⟦⟧47`_😀é-"), max_size=60))
def test_what_is_hidden_comes_back(line):
    """A model that writes what it reads gives the line, but for space around emoji."""
    own = named(line, Mask().slots(line), SYMBOLS)
    if all(x.name for x in own):
        read = hide(line, own)
        assert all(x.output not in read for x in own if len(x.output) > 4)
        assert put_slots(line, own, read, ()) == line


# A line, what is read of it, its translation and alignment, and what is made of them.
LEFT_OUT = """\
You 😀, too? | You, too? | Auch du? | 0-1 1-0 | Auch du 😀?
Come on 😀! | Come on! | Komm! | 0-0 1-0 | Komm 😀!
Come on! 😀 | Come on! | Komm! | 0-0 1-0 | Komm! 😀
😀 Come on! |  Come on! | Komm! | 0-0 1-0 | 😀 Komm!
I <b>do</b> so | I do so | Ja so tu ich | 0-3 1-0 1-2 2-1 | <b>Ja so tu</b> ich
ab 😀 bc 🎉 cd | ab bc cd | BC AB CD | 0-1 1-0 2-2 | BC AB 😀 🎉 CD
It is<br/>so | It is so | Es ist so | 0-0 1-1 2-2 | Es ist<br/>so
See a.txt! | See! | Sieh! | 0-0 | Sieh a.txt!
"""


@pytest.mark.parametrize(
    ("line", "read", "translation", "links", "expected"), rows(LEFT_OUT)
)
def test_what_is_left_out_goes_where_the_words_went(
    line, read, translation, links, expected
):
    own = named(line, Mask().slots(line), ())
    assert hide(line, own) == read
    pairs = [tuple(map(int, x.split("-"))) for x in links.split()]
    assert put_slots(line, own, translation, pairs) == expected


GLOSSARY = {
    "bank": "Geldinstitut",
    "river bank": "Ufer",
    "driver's licence": "Fahrerlaubnis",
    "caf\xe9": "Kaffeehaus",
    "C++": "C++",
    "C": "Ze",
    "100%": "ganz",
}


# Lines, and the terms in them: a bar without space around it stands for a space.
TERMS = """
The bank, Bank, BANK, bAnk and bank-owned | bank Bank BANK
The river bank and the river  bank | river|bank river||bank
my driver's licence, my driver\u2019s licence | driver's|licence driver\u2019s|licence
See bank.txt, bank.de, #bank, {bank}, a@bank.de, `bank` and bank. | bank
I learn C++, C# and C, I am 100% sure. | C++ C 100%
<b>bank</b> <a href='bank'> | bank
the café | café
"""


@pytest.mark.parametrize(("line", "terms"), rows(TERMS))
def test_terms_are_words_that_are_read(line, terms):
    mask = Mask(find_terms=Glossary(GLOSSARY).find)
    found = [line[x.start : x.end] for x in mask.slots(line) if x.kind == "term"]
    assert found == [x.replace("|", " ") for x in terms.split()]


@pytest.mark.parametrize(
    "terms",
    [{"": "x"}, {"dog": 5}, [("dog", "x")], {"very": ""}, {"dog": "K\nh"}, {" ": "x"}],
)
def test_a_wrong_dictionary_is_refused(terms):
    with pytest.raises(UsageError, match="glossary: expected a "):
        Glossary(terms)


def test_terms_are_composed():
    mask = Mask(find_terms=Glossary({" nai\u0308ve ": "e\u0301"}).find)
    assert outputs("a na\xefve man", mask) == ["\xe9"]
