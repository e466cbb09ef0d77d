"""Sentences drawn from the grammar, and the corpus made of them."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from minitransformer.files import built_once
from minitransformer.text.grammar.clauses import Clause, NounPhrase
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
from minitransformer.text.grammar.words import (
    CLOTHES,
    GIVING,
    INTRANSITIVE,
    MODALS,
    MONTHS,
    OBJECTS,
    OPENABLE,
    OPENING,
    PEOPLE,
    PERSON_ADJECTIVES,
    PLACES,
    THING_ADJECTIVES,
    TIMES,
    TOWARDS_PEOPLE,
    TRANSITIVE,
    WEARING,
    Noun,
)
from minitransformer.text.lines import TextPair

VERSION = 1
SIZES = {"train": 200_000, "val": 1000, "test": 1000}


class SentencePair(NamedTuple):
    english: str
    german: str


# Sentences


def _noun_phrase(
    rng: random.Random,
    nouns: list[Noun],
    adjectives: dict[str, str],
    determiners: str = "the the the a a this my his our",
) -> NounPhrase:
    adjective = rng.choice(list(adjectives.items())) if rng.random() < 0.5 else None
    determiner = rng.choice(determiners.split())
    return NounPhrase(determiner, rng.choice(nouns), adjective, rng.random() < 0.3)


def _person(rng: random.Random) -> NounPhrase:
    return _noun_phrase(rng, PEOPLE, PERSON_ADJECTIVES)


def _clause(rng: random.Random, determiners: str = "the the a a this my") -> Clause:
    """Draw a clause with a verb and the kinds of objects that suit it."""
    subject, kind = _person(rng), rng.random()
    if kind < 0.35:
        verbs, nouns, adjectives = TRANSITIVE, OBJECTS, THING_ADJECTIVES
    elif kind < 0.5:
        verbs, nouns, adjectives = TOWARDS_PEOPLE, PEOPLE, PERSON_ADJECTIVES
    elif kind < 0.6:
        verbs, nouns, adjectives = OPENING, OPENABLE, THING_ADJECTIVES
    elif kind < 0.65:
        verbs, nouns, adjectives = WEARING, CLOTHES, THING_ADJECTIVES
    elif kind < 0.8:
        thing = _noun_phrase(rng, OBJECTS, THING_ADJECTIVES, determiners)
        objects = ((_person(rng), "dative"), (thing, "accusative"))
        return Clause(subject, rng.choice(GIVING), objects)
    else:
        return Clause(subject, rng.choice(INTRANSITIVE))
    thing = _noun_phrase(rng, nouns, adjectives, determiners)
    return Clause(subject, rng.choice(verbs), ((thing, "accusative"),))


def _extended(rng: random.Random, clause: Clause) -> Clause:
    """Add nothing, a place, or a person that it is done with or for."""
    kind, other = rng.random(), _person(rng)
    if kind < 0.5:
        return clause
    if kind < 0.7:
        addition = rng.choice(list(PLACES.items()))
    elif kind < 0.85:
        addition = ("with " + other.english, "mit " + other.german("dative"))
    else:
        addition = ("for " + other.english, "für " + other.german("accusative"))
    return Clause(clause.subject, clause.verb, clause.objects, addition)


def _scene(rng: random.Random) -> tuple[str, str]:
    clause, kind = _extended(rng, _clause(rng)), rng.random()
    if kind < 0.4:
        return clause.statement()
    if kind < 0.6:
        return clause.fronted(*rng.choice(list(TIMES.items())))
    if kind < 0.75:
        return clause.with_modal(rng.choice(list(MODALS)))
    if kind < 0.85:
        english, german = clause.question()
        return english + " ?", german + " ?"
    if kind < 0.93:
        clause = _clause(rng, "the the this my his our")
        return clause.negated() if clause.objects else _clause(rng, "no").statement()
    english, german = Clause(_person(rng), rng.choice(INTRANSITIVE)).statement()
    reason = Clause(_person(rng), rng.choice(INTRANSITIVE + TOWARDS_PEOPLE))
    if reason.verb in TOWARDS_PEOPLE:
        objects = ((_person(rng), "accusative"),)
        reason = Clause(reason.subject, reason.verb, objects)
    because = reason.because()
    return f"{english} {because[0]}", f"{german} , {because[1]}"


def _number(rng: random.Random, low: int = 1, digits: int = 6) -> int:
    """Draw a number with any count of digits equally likely."""
    size = rng.randint(1, digits)
    return max(low, rng.randrange(10 ** (size - 1), 10**size))


def _countable(rng: random.Random, digits: int) -> int:
    """Draw a number of at least 2 that does not end in 01, which would be singular."""
    while (n := _number(rng, 2, digits)) % 100 == 1:
        pass
    return n


def _counting(rng: random.Random) -> tuple[str, str]:
    n, noun = _countable(rng, 6), rng.choice(PEOPLE + OBJECTS)
    many = NounPhrase("a", noun, plural=True)
    return (
        f"I count {cardinal_en(n)} {many.english}",
        f"ich zähle {cardinal_de(n)} {many.german('accusative')}",
    )


def _numeral(rng: random.Random) -> tuple[str, str]:
    n = _number(rng)
    return f"the number is {cardinal_en(n)}", f"die Zahl ist {cardinal_de(n)}"


def _ranking(rng: random.Random) -> tuple[str, str]:
    n = _number(rng)
    adjective = ordinal_en(n), ordinal_de(n)
    phrase = NounPhrase("the", rng.choice(PEOPLE + OBJECTS), adjective)
    return f"this is {phrase.english}", f"das ist {phrase.german('nominative')}"


def _date(rng: random.Random) -> tuple[str, str]:
    day, year = rng.randint(1, 31), rng.randint(1100, 2099)
    english, german = rng.choice(list(MONTHS.items()))
    if rng.random() < 0.3:
        return (
            f"today is the {ordinal_en(day)} of {english}",
            f"heute ist der {ordinal_de(day)}e {german}",
        )
    person = NounPhrase(rng.choice(["the", "my", "his", "our"]), rng.choice(PEOPLE))
    return (
        f"{person.english} was born on the {ordinal_en(day)} of {english} "
        f"{year_en(year)}",
        f"{person.german('nominative')} wurde am {ordinal_de(day)}en {german} "
        f"{year_de(year)} geboren",
    )


def _clock(rng: random.Random) -> tuple[str, str]:
    hour, minute = rng.randint(1, 12), rng.randrange(0, 60, 5)
    english, german = clock_en(hour, minute), clock_de(hour, minute)
    if rng.random() < 0.1:
        return f"it is {english}", f"es ist {german}"
    verb = rng.choice(INTRANSITIVE)
    return Clause(
        _person(rng), verb, addition=(f"at {english}", f"um {german}")
    ).statement()


def _price(rng: random.Random) -> tuple[str, str]:
    phrase = _noun_phrase(rng, OBJECTS, THING_ADJECTIVES, "the this my his our")
    euros = _countable(rng, 4)
    cents = rng.choice([0, rng.randint(2, 99)])
    cost = ("cost", "kosten") if phrase.plural else ("costs", "kostet")
    english, german = f"{cardinal_en(euros)} euros", f"{cardinal_de(euros)} Euro"
    if cents:
        english += f" and {cardinal_en(cents)} cents"
        german += f" und {cardinal_de(cents)} Cent"
    return (
        f"{phrase.english} {cost[0]} {english}",
        f"{phrase.german('nominative')} {cost[1]} {german}",
    )


KINDS: list[tuple[Callable[[random.Random], tuple[str, str]], int]] = [
    (_scene, 60),
    (_counting, 6),
    (_numeral, 6),
    (_ranking, 6),
    (_date, 7),
    (_clock, 7),
    (_price, 8),
]


# The corpus


def split_of(english: str) -> str:
    """The split that a sentence belongs to, whoever draws it: train, val or test."""
    byte = hashlib.blake2b(english.encode(), digest_size=1).digest()[0]
    return "test" if byte < 5 else "val" if byte < 10 else "train"


def generate(count: int, split: str = "train", seed: int = 1) -> list[SentencePair]:
    """Draw `count` different pairs of a split, the same for the same arguments.

    Raises: ValueError if there is no such split.
    """
    if split not in SIZES:
        raise ValueError(f"expected a split of {', '.join(SIZES)}, got {split!r}")
    rng = random.Random(f"{seed} {split}")
    kinds, weights = zip(*KINDS, strict=True)
    pairs: dict[str, str] = {}
    while len(pairs) < count:
        for kind in rng.choices(kinds, weights, k=1000):
            english, german = map(_finish, kind(rng))
            if split_of(english) == split:
                pairs[english] = german
    return [SentencePair(*pair) for pair in list(pairs.items())[:count]]


def _finish(words: str) -> str:
    """Capitalise, close up the spaces and end with a full stop or question mark."""
    text = " ".join(words.split()).replace(" ,", ",").replace(" ?", "?")
    return text[0].upper() + text[1:] + ("" if text.endswith("?") else ".")


def write_corpus(cache: Path) -> dict[str, TextPair]:
    """Write all splits into a folder below `cache`, unless an earlier run did."""

    def build(partial: Path) -> None:
        partial.mkdir()
        for split, size in SIZES.items():
            pairs = generate(size, split)
            for side, language in enumerate(("en", "de")):
                text = "".join(pair[side] + "\n" for pair in pairs)
                (partial / f"{split}.{language}").write_text(text, encoding="utf-8")

    folder = built_once(cache / f"built-in-{VERSION}", build)
    return {
        split: TextPair(folder / f"{split}.en", folder / f"{split}.de")
        for split in SIZES
    }
