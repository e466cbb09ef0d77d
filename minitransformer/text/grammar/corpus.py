"""Random sentence pairs from the grammar, and the built-in corpus made of them."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path

from minitransformer.system.files import build_once
from minitransformer.text.grammar import FOLDER, numbers, words
from minitransformer.text.grammar.clauses import Clause, NounPhrase
from minitransformer.text.pairs import TextPair, text_pairs

SIZES = {"train": 200_000, "val": 1000, "test": 1000}

DETERMINERS = "the the the a a this my his our".split()
OBJECT_DETERMINERS = "the the a a this my".split()
DEFINITE_DETERMINERS = "the the this my his our".split()


def _noun_phrase(
    rng: random.Random,
    nouns: list[words.Noun],
    adjectives: list[tuple[str, str]],
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
    subject, kind = _person(rng), rng.random()
    if kind < 0.35:
        verbs, patient = words.TRANSITIVE, _thing(rng, determiners)
    elif kind < 0.5:
        verbs, patient = words.TOWARDS_PEOPLE, _person(rng, determiners)
    elif kind < 0.6:
        verbs, patient = words.OPENING, _thing(rng, determiners, words.OPENABLE)
    elif kind < 0.65:
        verbs, patient = words.WEARING, _thing(rng, determiners, words.CLOTHES)
    elif kind < 0.8:
        gift = _thing(rng, determiners)
        objects = ((_person(rng), "dative"), (gift, "accusative"))
        return Clause(subject, rng.choice(words.GIVING), objects)
    else:
        return Clause(subject, rng.choice(words.INTRANSITIVE))
    return Clause(subject, rng.choice(verbs), ((patient, "accusative"),))


def _extended(rng: random.Random, clause: Clause) -> Clause:
    """Add nothing, a place, or a person with or for whom it is done."""
    kind, other = rng.random(), _person(rng)
    if kind < 0.5:
        return clause
    if kind < 0.7:
        addition = rng.choice(list(words.PLACES.items()))
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
        return clause.fronted(*rng.choice(list(words.TIMES.items())))
    if kind < 0.75:
        return clause.with_modal(rng.choice(list(words.MODALS)))
    if kind < 0.85:
        english, german = clause.question()
        return english + " ?", german + " ?"
    if kind < 0.93:
        clause = _clause(rng, DEFINITE_DETERMINERS)
        return clause.negated() if clause.objects else _clause(rng, ["no"]).statement()
    english, german = Clause(_person(rng), rng.choice(words.INTRANSITIVE)).statement()
    reason = Clause(_person(rng), rng.choice(words.INTRANSITIVE + words.TOWARDS_PEOPLE))
    if reason.verb in words.TOWARDS_PEOPLE:
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
    n, noun = _countable(rng, 6), rng.choice(words.PEOPLE + words.OBJECTS)
    many = NounPhrase("a", noun, plural=True)
    return (
        f"I count {numbers.cardinal_en(n)} {many.english}",
        f"ich zähle {numbers.cardinal_de(n)} {many.german('accusative')}",
    )


def _numeral(rng: random.Random) -> tuple[str, str]:
    n = _number(rng)
    english, german = numbers.cardinal_en(n), numbers.cardinal_de(n)
    return f"the number is {english}", f"die Zahl ist {german}"


def _ranking(rng: random.Random) -> tuple[str, str]:
    n = _number(rng)
    adjective = numbers.ordinal_en(n), numbers.ordinal_de(n)
    phrase = NounPhrase("the", rng.choice(words.PEOPLE + words.OBJECTS), adjective)
    return f"this is {phrase.english}", f"das ist {phrase.german('nominative')}"


def _date(rng: random.Random) -> tuple[str, str]:
    day, year = rng.randint(1, 31), rng.randint(1100, 2099)
    english, german = rng.choice(list(words.MONTHS.items()))
    if rng.random() < 0.3:
        return (
            f"today is the {numbers.ordinal_en(day)} of {english}",
            f"heute ist der {numbers.ordinal_de(day)}e {german}",
        )
    determiner = rng.choice(["the", "my", "his", "our"])
    person = NounPhrase(determiner, rng.choice(words.PEOPLE))
    english = f"the {numbers.ordinal_en(day)} of {english} {numbers.year_en(year)}"
    german = f"{numbers.ordinal_de(day)}en {german} {numbers.year_de(year)}"
    return (
        f"{person.english} was born on {english}",
        f"{person.german('nominative')} wurde am {german} geboren",
    )


def _clock(rng: random.Random) -> tuple[str, str]:
    hour, minute = rng.randint(1, 12), rng.randrange(0, 60, 5)
    english, german = numbers.clock_en(hour, minute), numbers.clock_de(hour, minute)
    if rng.random() < 0.1:
        return f"it is {english}", f"es ist {german}"
    verb, addition = rng.choice(words.INTRANSITIVE), (f"at {english}", f"um {german}")
    return Clause(_person(rng), verb, addition=addition).statement()


def _price(rng: random.Random) -> tuple[str, str]:
    phrase = _thing(rng, "the this my his our".split())
    euros = _countable(rng, 4)
    cents = rng.choice([0, rng.randint(2, 99)])
    cost = ("cost", "kosten") if phrase.plural else ("costs", "kostet")
    english = f"{numbers.cardinal_en(euros)} euros"
    german = f"{numbers.cardinal_de(euros)} Euro"
    if cents:
        english += f" and {numbers.cardinal_en(cents)} cents"
        german += f" und {numbers.cardinal_de(cents)} Cent"
    return (
        f"{phrase.english} {cost[0]} {english}",
        f"{phrase.german('nominative')} {cost[1]} {german}",
    )


# What sentences are about, and how often each is drawn (percent)
KINDS = {
    _scene: 60,
    _counting: 6,
    _numeral: 6,
    _ranking: 6,
    _date: 7,
    _clock: 7,
    _price: 8,
}


def split_of(english: str) -> str:
    """Return the split that a sentence always belongs to: train, val or test."""
    byte = hashlib.blake2b(english.encode(), digest_size=1).digest()[0]
    return "test" if byte < 5 else "val" if byte < 10 else "train"


def generate(count: int, split: str = "train", seed: int = 1) -> list[tuple[str, str]]:
    """Draw `count` different (English, German) pairs of a split; the seed decides."""
    rng = random.Random(f"{seed} {split}")
    pairs: dict[str, str] = {}
    while len(pairs) < count:
        for kind in rng.choices(list(KINDS), list(KINDS.values()), k=1000):
            english, german = kind(rng)
            if split_of(english := _finish(english)) == split:
                pairs[english] = _finish(german)
    return list(pairs.items())[:count]


def _finish(text: str) -> str:
    """Capitalise, remove superfluous spaces, and end with a full stop if need be."""
    text = " ".join(text.split()).replace(" ,", ",").replace(" ?", "?")
    return text[0].upper() + text[1:] + ("" if text.endswith("?") else ".")


def built_in_corpus(cache: Path) -> dict[str, TextPair]:
    """Return the files of all splits, written to a folder in `cache` the first time."""

    def build(partial: Path) -> None:
        partial.mkdir()
        for split, size in SIZES.items():
            pairs = generate(size, split)
            for side, language in enumerate(("en", "de")):
                text = "".join(pair[side] + "\n" for pair in pairs)
                (partial / f"{split}.{language}").write_bytes(text.encode())

    def read(folder: Path) -> dict[str, TextPair]:
        names = {s: (f"{folder}/{s}.en", f"{folder}/{s}.de") for s in SIZES}
        return text_pairs(names)

    return build_once(cache / FOLDER, build, read)
