"""Random sentence pairs from the grammar, and the built-in corpus made of them."""

from __future__ import annotations

import hashlib
import random
from dataclasses import replace
from pathlib import Path

from minitransformer.system.files import build_once
from minitransformer.text.bilingual import Pair
from minitransformer.text.grammar import FOLDER, words
from minitransformer.text.grammar.clauses import Clause, NounPhrase
from minitransformer.text.pairs import TextPair, text_pairs, write_pairs

SIZES = {"train": 200_000, "val": 1000, "test": 1000}

DETERMINERS = "the the the a a this my his our".split()
OBJECT_DETERMINERS = "the the a a this my".split()
DEFINITE_DETERMINERS = "the the this my his our".split()


def _noun_phrase(
    rng: random.Random,
    nouns: list[words.Noun],
    adjectives: list[Pair],
    determiners: list[str],
) -> NounPhrase:
    adjective = rng.choice(adjectives) if rng.random() < 0.5 else None
    determiner = rng.choice(determiners)
    return NounPhrase(determiner, rng.choice(nouns), adjective, rng.random() < 0.3)


def _person(rng: random.Random, determiners: list[str] = DETERMINERS) -> NounPhrase:
    return _noun_phrase(rng, words.PEOPLE, words.PERSON_ADJECTIVES, determiners)


def _thing(
    rng: random.Random, determiners: list[str], nouns: list[words.Noun] = words.OBJECTS
) -> NounPhrase:
    return _noun_phrase(rng, nouns, words.THING_ADJECTIVES, determiners)


def _clause(rng: random.Random, determiners: list[str] = OBJECT_DETERMINERS) -> Clause:
    """Draw a clause with a verb and the kinds of objects that suit it."""
    subject = _person(rng)
    kind = rng.random()
    # Verbs with one object, of the kind of nouns that suits them.
    if kind < 0.35:
        verbs = words.TRANSITIVE
        patient = _thing(rng, determiners)
    elif kind < 0.5:
        verbs = words.TOWARDS_PEOPLE
        patient = _person(rng, determiners)
    elif kind < 0.6:
        verbs = words.OPENING
        patient = _thing(rng, determiners, words.OPENABLE)
    elif kind < 0.65:
        verbs = words.WEARING
        patient = _thing(rng, determiners, words.CLOTHES)
    # Verbs with two objects, and those with none.
    elif kind < 0.8:
        gift = _thing(rng, determiners)
        objects = ((_person(rng), "dative"), (gift, "accusative"))
        return Clause(subject, rng.choice(words.GIVING), objects)
    else:
        return Clause(subject, rng.choice(words.INTRANSITIVE))
    return Clause(subject, rng.choice(verbs), ((patient, "accusative"),))


def _extended(rng: random.Random, clause: Clause) -> Clause:
    """Add nothing, a place, or a person with or for whom it is done."""
    kind = rng.random()
    other = _person(rng)
    if kind < 0.5:
        return clause
    if kind < 0.7:
        addition = rng.choice(words.PLACES)
    elif kind < 0.85:
        addition = ("with " + other.english, "mit " + other.german("dative"))
    else:
        addition = ("for " + other.english, "für " + other.german("accusative"))
    return replace(clause, addition=addition)


def _scene(rng: random.Random) -> Pair:
    """Draw a statement, a question, a negation, or two clauses."""
    clause = _extended(rng, _clause(rng))
    kind = rng.random()
    if kind < 0.4:
        return clause.written("statement")
    if kind < 0.6:
        time, german_time = rng.choice(words.TIMES)
        return clause.written("fronted", time=time, german_time=german_time)
    if kind < 0.75:
        return clause.with_modal(rng.choice(list(words.MODALS)))
    if kind < 0.85:
        return clause.written("question")
    if kind < 0.93:
        clause = _clause(rng, DEFINITE_DETERMINERS)
        if clause.objects:
            return clause.written("negated")
        return _clause(rng, ["no"]).written("statement")
    # A main clause, and a subordinate clause that gives its reason.
    main = Clause(_person(rng), rng.choice(words.INTRANSITIVE))
    reason = Clause(_person(rng), rng.choice(words.INTRANSITIVE + words.TOWARDS_PEOPLE))
    if reason.verb in words.TOWARDS_PEOPLE:
        reason = replace(reason, objects=((_person(rng), "accusative"),))
    english, german = zip(
        main.written("statement"), reason.written("because"), strict=True
    )
    return " ".join(english), " , ".join(german)


def split_of(english: str) -> str:
    """Return the split that a sentence always belongs to: train, val or test."""
    byte = hashlib.blake2b(english.encode(), digest_size=1).digest()[0]
    return "test" if byte < 5 else "val" if byte < 10 else "train"


def generate(count: int, split: str = "train", seed: int = 1) -> list[Pair]:
    """Draw `count` different (English, German) pairs of a split; the seed decides."""
    rng = random.Random(f"{seed} {split}")
    pairs: dict[str, str] = {}
    while len(pairs) < count:
        english, german = (_finish(text) for text in _scene(rng))
        if split_of(english) == split:
            pairs[english] = german
    return list(pairs.items())


def _finish(text: str) -> str:
    """Capitalise, remove superfluous spaces, and end with a full stop if need be."""
    text = " ".join(text.split()).replace(" ,", ",").replace(" ?", "?")
    return text[0].upper() + text[1:] + ("" if text.endswith("?") else ".")


def built_in_corpus(cache: Path) -> dict[str, TextPair]:
    """Return the files of all splits, written to a folder in `cache` the first time."""

    def build(partial: Path) -> None:
        partial.mkdir()
        for split, size in SIZES.items():
            source = partial / f"{split}.en"
            target = partial / f"{split}.de"
            write_pairs(generate(size, split), source, target)

    def read(folder: Path) -> dict[str, TextPair]:
        names = {s: (f"{folder}/{s}.en", f"{folder}/{s}.de") for s in SIZES}
        return text_pairs(names)

    return build_once(cache / FOLDER, build, read)
