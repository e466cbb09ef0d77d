"""The built-in corpus against hand-written German and an independent parser."""

import hashlib

import pytest

from minitransformer.text.grammar import corpus
from minitransformer.text.grammar.clauses import Clause, NounPhrase
from minitransformer.text.grammar.corpus import generate, split_of
from minitransformer.text.grammar.words import OBJECTS, PEOPLE, TOWARDS_PEOPLE
from support.in_process import rows


def noun(english):
    return next(n for n in PEOPLE + OBJECTS if n.english == english)


ADJECTIVES = {"red": "rot", "old": "alt"}
# One or many, the case, and the German.
DECLENSIONS = """
the old man | one | accusative | den alten Mann
the old man | one | dative | dem alten Mann
the old man | many | dative | den alten Männern
a old child | one | dative | einem alten Kind
a old child | many | nominative | alte Kinder
my red apple | one | accusative | meinen roten Apfel
no red car | many | accusative | keine roten Autos
the boy | one | accusative | den Jungen
a student | one | dative | einem Studenten
"""


@pytest.mark.parametrize(("english", "count", "case", "german"), rows(DECLENSIONS))
def test_declension(english, count, case, german):
    determiner, *adjectives, word = english.split()
    adjective = next(((x, ADJECTIVES[x]) for x in adjectives), None)
    phrase = NounPhrase(determiner, noun(word), adjective, count == "many")
    assert phrase.german(case) == german


def test_word_order():
    call = next(verb for verb in TOWARDS_PEOPLE if verb.particle == "an")
    doctor = NounPhrase("the", noun("doctor"))
    clause = Clause(NounPhrase("a", noun("boy")), call, ((doctor, "accusative"),))
    orders = [
        clause.written("statement"),
        clause.written("fronted", time="today", german_time="heute"),
        clause.written("negated"),
        clause.written("question"),
        clause.with_modal("must"),
        clause.written("because"),
    ]
    assert [tuple(" ".join(x.split()) for x in pair) for pair in orders] == [
        ("a boy calls the doctor", "ein Junge ruft den Arzt an"),
        ("today a boy calls the doctor", "heute ruft ein Junge den Arzt an"),
        ("a boy does not call the doctor", "ein Junge ruft den Arzt nicht an"),
        ("does a boy call the doctor ?", "ruft ein Junge den Arzt an ?"),
        ("a boy must call the doctor", "ein Junge muss den Arzt anrufen"),
        ("because a boy calls the doctor", "weil ein Junge den Arzt anruft"),
    ]


@pytest.fixture(scope="module")
def pairs():
    return generate(20_000)


def test_pairs_are_distinct_and_english_determines_german(pairs):
    german = dict(pairs)
    assert len(german) == len(pairs) == 20_000
    for english, translation in generate(20_000, seed=2):
        assert german.get(english, translation) == translation


def test_splits_are_disjoint_whatever_the_seed(pairs):
    for split in ("val", "test"):
        for seed in (1, 2):
            found = generate(99, split, seed)
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


def test_these_pairs_never_change(pairs):
    """Another machine must draw the same corpus; raise VERSION when this changes."""
    text = "".join(f"{english}\t{german}\n" for english, german in pairs)
    found = hashlib.sha256(text.encode()).hexdigest()
    assert found == "33a313000ae7d89617769cfc20475fe8bd76238c0b92bd9976ff813b4685dbfc"
