"""The built-in corpus against hand-written German and an independent parser."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minitransformer.text.grammar import corpus
from minitransformer.text.grammar.clauses import Clause, NounPhrase
from minitransformer.text.grammar.corpus import generate, split_of
from minitransformer.text.grammar.numbers import (
    cardinal_de,
    cardinal_en,
    clock_de,
    clock_en,
    ordinal_de,
    ordinal_en,
    year_de,
    year_en,
)
from minitransformer.text.grammar.words import OBJECTS, PEOPLE, TOWARDS_PEOPLE

CARDINALS = [
    (0, "zero", "null"),
    (1, "one", "eins"),
    (11, "eleven", "elf"),
    (17, "seventeen", "siebzehn"),
    (21, "twenty-one", "einundzwanzig"),
    (30, "thirty", "dreißig"),
    (77, "seventy-seven", "siebenundsiebzig"),
    (101, "one hundred one", "einhunderteins"),
    (999, "nine hundred ninety-nine", "neunhundertneunundneunzig"),
    (1001, "one thousand one", "eintausendeins"),
    (21_000, "twenty-one thousand", "einundzwanzigtausend"),
    (
        342_107,
        "three hundred forty-two thousand one hundred seven",
        "dreihundertzweiundvierzigtausendeinhundertsieben",
    ),
]
ORDINALS = [
    (1, "first", "erst"),
    (3, "third", "dritt"),
    (7, "seventh", "siebt"),
    (8, "eighth", "acht"),
    (19, "nineteenth", "neunzehnt"),
    (21, "twenty-first", "einundzwanzigst"),
    (101, "one hundred first", "einhunderterst"),
    (1003, "one thousand third", "eintausenddritt"),
]
CLOCKS = [
    (1, 0, "one o'clock", "ein Uhr"),
    (12, 5, "five past twelve", "fünf nach zwölf"),
    (1, 15, "a quarter past one", "Viertel nach eins"),
    (4, 20, "twenty past four", "zwanzig nach vier"),
    (2, 25, "twenty-five past two", "fünf vor halb drei"),
    (6, 30, "half past six", "halb sieben"),
    (12, 30, "half past twelve", "halb eins"),
    (2, 35, "twenty-five to three", "fünf nach halb drei"),
    (8, 45, "a quarter to nine", "Viertel vor neun"),
]
YEARS = [
    (1984, "nineteen eighty-four", "neunzehnhundertvierundachtzig"),
    (1905, "nineteen oh five", "neunzehnhundertfünf"),
    (1900, "nineteen hundred", "neunzehnhundert"),
    (1100, "eleven hundred", "elfhundert"),
    (2000, "two thousand", "zweitausend"),
    (2024, "twenty twenty-four", "zweitausendvierundzwanzig"),
]


@pytest.mark.parametrize(("n", "english", "german"), CARDINALS)
def test_cardinals(n, english, german):
    assert (cardinal_en(n), cardinal_de(n)) == (english, german)


@pytest.mark.parametrize(("n", "english", "german"), ORDINALS)
def test_ordinals(n, english, german):
    assert (ordinal_en(n), ordinal_de(n)) == (english, german)


@pytest.mark.parametrize(("hour", "minute", "english", "german"), CLOCKS)
def test_clock_times(hour, minute, english, german):
    assert (clock_en(hour, minute), clock_de(hour, minute)) == (english, german)


@pytest.mark.parametrize(("year", "english", "german"), YEARS)
def test_years(year, english, german):
    assert (year_en(year), year_de(year)) == (english, german)


UNITS = {
    "ein": 1, "eins": 1, "zwei": 2, "drei": 3, "vier": 4, "fünf": 5, "sechs": 6,
    "sieben": 7, "acht": 8, "neun": 9, "zehn": 10, "elf": 11, "zwölf": 12,
    "dreizehn": 13, "vierzehn": 14, "fünfzehn": 15, "sechzehn": 16, "siebzehn": 17,
    "achtzehn": 18, "neunzehn": 19, "zwanzig": 20, "dreißig": 30, "vierzig": 40,
    "fünfzig": 50, "sechzig": 60, "siebzig": 70, "achtzig": 80, "neunzig": 90,
}  # fmt: skip


def parse_german(words):
    for word, value in (("tausend", 1000), ("hundert", 100)):
        if word in words:
            head, tail = words.split(word, 1)
            return parse_german(head) * value + (parse_german(tail) if tail else 0)
    if "und" in words:
        return sum(UNITS[part] for part in words.split("und"))
    return UNITS[words]


@given(st.integers(1, 999_999))
def test_german_cardinals_parse_back(n):
    assert parse_german(cardinal_de(n)) == n


def noun(english):
    return next(n for n in PEOPLE + OBJECTS if n.english == english)


RED, OLD = ("red", "rot"), ("old", "alt")
DECLENSIONS = [  # determiner, adjective, noun, plural, case, German
    ("the", OLD, "man", False, "nominative", "der alte Mann"),
    ("the", OLD, "man", False, "accusative", "den alten Mann"),
    ("the", OLD, "man", False, "dative", "dem alten Mann"),
    ("the", OLD, "man", True, "dative", "den alten Männern"),
    ("the", OLD, "woman", False, "dative", "der alten Frau"),
    ("the", None, "woman", True, "dative", "den Frauen"),
    ("a", OLD, "child", False, "nominative", "ein altes Kind"),
    ("a", OLD, "child", False, "accusative", "ein altes Kind"),
    ("a", OLD, "child", False, "dative", "einem alten Kind"),
    ("a", OLD, "child", True, "nominative", "alte Kinder"),
    ("a", OLD, "child", True, "dative", "alten Kindern"),
    ("my", RED, "apple", False, "nominative", "mein roter Apfel"),
    ("my", RED, "apple", False, "accusative", "meinen roten Apfel"),
    ("my", RED, "apple", True, "accusative", "meine roten Äpfel"),
    ("our", RED, "lamp", False, "accusative", "unsere rote Lampe"),
    ("our", RED, "lamp", False, "dative", "unserer roten Lampe"),
    ("no", RED, "book", False, "accusative", "kein rotes Buch"),
    ("no", RED, "car", True, "accusative", "keine roten Autos"),
    ("this", RED, "car", True, "dative", "diesen roten Autos"),
    ("this", RED, "ball", False, "nominative", "dieser rote Ball"),
    ("this", RED, "ball", False, "accusative", "diesen roten Ball"),
    ("the", None, "boy", False, "nominative", "der Junge"),
    ("the", None, "boy", False, "accusative", "den Jungen"),
    ("a", None, "student", False, "dative", "einem Studenten"),
    ("his", None, "neighbor", False, "accusative", "seinen Nachbarn"),
    ("the", None, "teacher", True, "dative", "den Lehrern"),
    ("the", None, "girl", True, "dative", "den Mädchen"),
]


@pytest.mark.parametrize(
    ("determiner", "adjective", "word", "plural", "case", "german"), DECLENSIONS
)
def test_declension(determiner, adjective, word, plural, case, german):
    phrase = NounPhrase(determiner, noun(word), adjective, plural)
    assert phrase.german(case) == german


def test_word_order():
    call = next(verb for verb in TOWARDS_PEOPLE if verb.particle == "an")
    doctor = NounPhrase("the", noun("doctor"))
    clause = Clause(NounPhrase("a", noun("boy")), call, ((doctor, "accusative"),))
    orders = [
        clause.statement(),
        clause.fronted("today", "heute"),
        clause.negated(),
        clause.question(),
        clause.with_modal("must"),
        clause.because(),
    ]
    assert [(e.strip(), " ".join(g.split())) for e, g in orders] == [
        ("a boy calls the doctor", "ein Junge ruft den Arzt an"),
        ("today a boy calls the doctor", "heute ruft ein Junge den Arzt an"),
        ("a boy does not call the doctor", "ein Junge ruft den Arzt nicht an"),
        ("does a boy call the doctor", "ruft ein Junge den Arzt an"),
        ("a boy must call the doctor", "ein Junge muss den Arzt anrufen"),
        ("because a boy calls the doctor", "weil ein Junge den Arzt anruft"),
    ]


def test_english_articles():
    apple = noun("apple")
    assert NounPhrase("a", apple).english == "an apple"
    assert NounPhrase("a", apple, RED).english == "a red apple"
    assert NounPhrase("a", apple, OLD).english == "an old apple"
    assert NounPhrase("this", apple, None, True).english == "these apples"


@pytest.fixture(scope="module")
def pairs():
    return generate(20_000)


def test_pairs_are_distinct_and_english_determines_german(pairs):
    german = dict(pairs)
    assert len(german) == len(pairs) == 20_000
    for english, translation in generate(20_000, seed=2):
        assert german.get(english, translation) == translation


def test_sentences_look_like_sentences(pairs):
    for english, german in pairs:
        for text in (english, german):
            assert text[0].isupper()
            assert text[-1] in ".?"
            assert "  " not in text
            assert " ." not in text


def test_splits_are_disjoint_whatever_the_seed(pairs):
    for split in ("val", "test"):
        for seed in (1, 2):
            found = generate(300, split, seed)
            assert {split_of(pair[0]) for pair in found} == {split}
            assert not set(found) & set(pairs)


def test_the_corpus_is_repeatable_and_written_once(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "SIZES", {"train": 50, "val": 5, "test": 5})
    first = corpus.built_in_corpus(tmp_path)
    text = first["train"].target.read_text(encoding="utf-8")
    assert text == "".join(p[1] + "\n" for p in generate(50))
    first["train"].target.write_text("mine")
    again = corpus.built_in_corpus(tmp_path)
    assert again == first
    assert first["train"].target.read_text() == "mine"
    first["val"].source.unlink()
    assert corpus.built_in_corpus(tmp_path) == first
    assert first["val"].source.exists()


def test_these_pairs_never_change():
    """Another machine must draw the same corpus; raise VERSION when this changes."""
    assert generate(3, "test") == [
        ("My brother visits queens.", "Mein Bruder besucht Königinnen."),
        (
            "In summer the clever sister sends the beautiful student a shirt.",
            "Im Sommer schickt die kluge Schwester dem schönen Studenten ein Hemd.",
        ),
        ("My children throw away my lamp.", "Meine Kinder werfen meine Lampe weg."),
    ]
