"""Make more training text of the same pairs, so that a model copies names and numbers.

    python prepare.py data/en-de data/en-de-more
    python prepare.py data/en-de data/de-en-more --source de

The first folder has train.en.gz, train.de.gz and the like, as `minitransformer split`
writes them. Of its training pairs come, besides the pairs in the spelling of 1996:

- names and numbers exchanged for others, the same on both sides;
- addresses, markup, program placeholders and emoji in places of names, before or after;
- & and + in the place of "and" and "und";
- sentences of frames.txt, with names, numbers, dates, times and prices;
- those of phrases.txt, which people say more often than once in 200,000 sentences;
- sentences of the built-in corpus with two objects, one of them in the dative;
- pairs joined to two to five sentences, without the full stop, and with the source in
  lower case.

Validation and test text is copied in the new spelling, and otherwise unchanged.
"""

from __future__ import annotations

import argparse
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from new_spelling import new_spelling

from minitransformer.text.bilingual import Pair
from minitransformer.text.grammar.corpus import generate
from minitransformer.text.grammar.words import GIVING
from minitransformer.text.lines import read_lines
from minitransformer.text.pairs import write_pairs

HERE = Path(__file__).parent

# Names of both languages that stand in tens of thousands of pairs of Tatoeba.
KNOWN = {
    "Tom": "man",
    "John": "man",
    "Mary": "woman",
    "Boston": "place",
    "London": "place",
}
SYLLABLES = "ba be da do fa gre hel ka ki kor la len lo ma mi na or ra sel ti ul vin zo"
MONTHS = """January/Januar February/Februar March/März April/April May/Mai June/Juni
July/Juli August/August September/September October/Oktober November/November
December/Dezember"""
WEEKDAYS = """Monday/Montag Tuesday/Dienstag Wednesday/Mittwoch Thursday/Donnerstag
Friday/Freitag Saturday/Samstag Sunday/Sonntag"""
HOURS = """one/eins two/zwei three/drei four/vier five/fünf six/sechs seven/sieben
eight/acht nine/neun ten/zehn eleven/elf twelve/zwölf"""
EMOJI = """😀 😂 😊 😉 😍 🙏 🎉 👍 👏 🔥 🌞 🌧 🚗 ✈ 🏠 🐶 🐱 🌹 🍕 🍎 ☕ 🎵 📷 💡 ⚽ 🎁
💙 🤔 😢 😡 🙈 🚀 ⭐ ❤️ 👋🏽 👨‍👩‍👧 🇩🇪 🇬🇧 ✌️"""
SYMBOLS = "%s %d %1$s %(name)s {0} {{name}} ${user}"
DOMAINS = "com", "org", "net", "de"


def read_names() -> dict[str, list[str]]:
    """Return the names of each kind in names.txt."""
    parts = (HERE / "names.txt").read_text("utf-8").split("## ")[1:]
    return {part.split()[0]: part.split()[1:] for part in parts}


NAMES = read_names()
FRAMES = (HERE / "frames.txt").read_text("utf-8").split("\n")[1:-1]
PHRASES = [
    (english, german)
    for line in (HERE / "phrases.txt").read_text("utf-8").split("\n")[1:-1]
    for english, _, german in [line.partition("|")]
]
PHRASE_COUNT = 8  # of each phrase
GIVES = re.compile("|".join(rf"\b{verb.english_base}s?\b" for verb in GIVING))


def made_up(rng: random.Random, least: int = 1) -> str:
    """Draw a word that means nothing."""
    return "".join(rng.choices(SYLLABLES.split(), k=rng.randint(least, 4)))


def name(kind: str, rng: random.Random) -> str:
    """Draw a name; half are made up, so that any name is copied by its pieces."""
    draw = rng.random()
    if draw < 0.15:
        return made_up(rng, 2).capitalize()
    drawn = rng.choice(NAMES[kind])
    if draw < 0.5:
        start, end = drawn, rng.choice(NAMES[kind])
        return start[: rng.randint(2, len(start))] + end[-rng.randint(2, 5) :].lower()
    if kind in ("man", "woman") and rng.random() < 0.3:
        return f"{drawn} {name('surname', rng)}"
    return drawn


def thing(rng: random.Random) -> str:
    """Draw an address, markup, a program's placeholder, code, a path or an emoji."""
    one, two, three = (made_up(rng) for _ in range(3))
    number, domain = rng.randint(1, 9999), rng.choice(DOMAINS)
    things = [
        f"https://{one}.{domain}/{two}",
        f"http://www.{one}.com/{two}?{three}={number}",
        f"www.{one}.{domain}",
        f"{one}.{two}@{three}.{domain}",
        f"{{{one}}}",
        rng.choice(SYMBOLS.split()),
        f"`{one}({number})`",
        f"/{one}/{two}/{three}.txt",
        f"C:\\{one}\\{two}.txt",
        rng.choice(EMOJI.split()),
        str(rng.randint(10**6, 10**12)),
    ]
    return rng.choice(things)


def in_german(number: str) -> str:
    """Exchange the points and the commas of a number."""
    return number.translate(str.maketrans(".,", ",."))


def date(rng: random.Random) -> Pair:
    english, german = rng.choice(MONTHS.split()).split("/")
    day, year = rng.randint(1, 31), rng.choice(["", f" {rng.randint(1700, 2040)}"])
    american = f"{english} {day}" + year.replace(" ", ", ")
    return rng.choice([f"{day} {english}{year}", american]), f"{day}. {german}{year}"


def price(rng: random.Random) -> Pair:
    number = f"{rng.randint(2, 10 ** rng.randint(1, 6)):,}"
    if rng.random() < 0.3:
        number += f".{rng.randint(1, 99):02}"
    german = in_german(number)
    kinds = ("euros", "Euro", "€"), ("dollars", "Dollar", "$"), ("pounds", "Pfund", "£")
    english_word, german_word, symbol = rng.choice(kinds)
    if rng.random() < 0.5:
        return f"{number} {english_word}", f"{german} {german_word}"
    return f"{symbol}{number}", f"{german} {symbol}"


def clock(rng: random.Random) -> Pair:
    """Draw a time of twelve hours, with the part of the day."""
    hour, is_late = rng.randint(1, 12), rng.random() < 0.5
    time = f"{hour}" + rng.choice(["", f":{rng.randint(0, 59):02}"])
    of_day = hour % 12 + 12 * is_late
    ends = {4: "nachts", 10: "morgens", 12: "vormittags", 13: "mittags"}
    ends |= {18: "nachmittags", 24: "abends"}
    part = next(word for end, word in ends.items() if of_day < end)
    english = rng.choice(["p.m.", "pm"] if is_late else ["a.m.", "am"])
    return f"{time} {english}", f"{time} Uhr {part}"


def half(rng: random.Random) -> Pair:
    """Draw half an hour, which German counts towards the next one."""
    hour = rng.randrange(12)
    hours = [x.split("/") for x in HOURS.split()]
    return f"half past {hours[hour][0]}", f"halb {hours[(hour + 1) % 12][1]}"


def ordinal(rng: random.Random) -> Pair:
    number = rng.randint(2, 30)
    ends = {1: "st", 2: "nd", 3: "rd"}
    end = "th" if 10 < number < 20 else ends.get(number % 10, "th")
    return f"{number}{end}", f"{number}."


def frame(rng: random.Random) -> Pair:
    """Fill the slots of a frame: first those that are the same in both languages."""

    def time() -> str:
        return f"{rng.randint(0, 23)}:{rng.randint(0, 59):02}"

    def person() -> str:
        return name(rng.choice(["man", "woman"]), rng)

    year = rng.randint(1700, 2010)
    filled = {
        "person": person(),
        "person2": person(),
        "surname": rng.choice(NAMES["surname"]),
        "place": name("place", rng),
        "place2": name("place", rng),
        "year": year,
        "year2": year + rng.randint(1, 30),
        "time": time(),
        "time2": time(),
        "small": rng.randint(2, 300),
        "small2": rng.randint(2, 300),
        "digits": rng.randint(10**3, 10 ** rng.randint(5, 11)),
        "phone": "+{} {} {}".format(*(rng.randint(10, 10**n) for n in (2, 3, 8))),
        "thing": thing(rng),
        "thing2": thing(rng),
    }

    def big() -> Pair:
        number = f"{rng.randint(1000, 10 ** rng.randint(4, 9)):,}"
        return number, in_german(number)

    def decimal() -> Pair:
        number = f"{rng.randint(1, 99)}.{rng.randint(1, 99)}"
        return number, in_german(number)

    differing = {
        "date": date(rng),
        "price": price(rng),
        "price2": price(rng),
        "weekday": rng.choice(WEEKDAYS.split()).split("/"),
        "ordinal": ordinal(rng),
        "half": half(rng),
        "clock": clock(rng),
        "clock2": clock(rng),
        "big": big(),
        "big2": big(),
        "decimal": decimal(),
        "decimal2": decimal(),
    }
    source, target = (
        text.format(**filled, **{slot: pair[i] for slot, pair in differing.items()})
        for i, text in enumerate(rng.choice(FRAMES).split("|"))
    )
    return source.replace(".m..", ".m."), target


def exchange_names(pair: Pair, draw: Callable[[str], str]) -> Pair:
    """Exchange the `KNOWN` names that stand as often on both sides."""
    source, target = pair
    for old, kind in KNOWN.items():
        count = len(re.findall(rf"\b{old}\b", source))
        if not count or count != len(re.findall(rf"\b{old}s?\b", target)):
            continue
        new = draw(kind)
        genitive = new + ("'" if new[-1] in "sßxz" else "s")
        source = new.join(re.split(rf"\b{old}\b", source))
        target = genitive.join(re.split(rf"\b{old}s\b", target))
        target = new.join(re.split(rf"\b{old}\b", target))
    return source, target


def exchange_numbers(pair: Pair, rng: random.Random) -> Pair:
    """Exchange numbers of two to four digits that stand once on both sides."""
    source, target = pair
    for old in re.findall(r"(?<![\d.,:])\d{2,4}(?![\d:]|[.,]\d)", source):
        if source.count(old) == target.count(old) == 1:
            is_year = len(old) == 4
            least, most = (1700, 2040) if is_year else (11, 10 ** len(old))
            new = str(rng.randint(least, most))
            source, target = source.replace(old, new), target.replace(old, new)
    return source, target


def with_things(pair: Pair, rng: random.Random) -> Pair:
    """Put things that are copied around a pair, or in the place of its names."""
    replaced = exchange_names(pair, lambda kind: thing(rng))
    if replaced != pair and rng.random() < 0.5:
        return replaced
    tag = rng.choice("b i p em h2 li strong td".split())
    one, two, smile = thing(rng), thing(rng), rng.choice(EMOJI.split())
    places = ("", f" {one}"), (f"{one} ", ""), (f"{one} ", f" {two}"), ("", f" {smile}")
    before, after = rng.choice([(f"<{tag}>", f"</{tag}>"), *places])
    return before + pair[0] + after, before + pair[1] + after


def german_quotes(line: str) -> str:
    """Write "..." as German does."""
    return re.sub(r'"([^"]*)"', r"„\1“", line)


def gifts(seed: int) -> list[Pair]:
    """Return pairs of the built-in corpus like "The man gives the child a book."."""
    return [pair for pair in generate(60_000, seed=seed) if GIVES.search(pair[0])]


def more(pairs: list[Pair], source: int, rng: random.Random) -> Iterator[Pair]:
    """Yield the pairs in random order, and what is made of them.

    `source` is the side that is put into lower case.
    """
    pairs = rng.sample(pairs, len(pairs))
    for pair in pairs:
        draw = rng.random()
        named = exchange_names(pair, lambda kind: name(kind, rng))
        if named != pair and draw < 0.85:
            pair = named
        numbered = exchange_numbers(pair, rng)
        if numbered != pair:
            yield pair
            yield exchange_numbers(pair, rng)
            pair = numbered
        draw = rng.random()
        english, german = pair
        if draw < 0.04:
            lower = english.lower(), german.lower()
            pair = (lower[0], german) if source == 0 else (english, lower[1])
        elif draw < 0.08 and english.endswith(".") and german.endswith("."):
            pair = english[:-1], german[:-1]
        elif draw < 0.16:
            pair = with_things(pair, rng)
        elif english.count(" and ") == german.count(" und ") == 1 and draw < 0.4:
            sign = rng.choice([" & ", " + "])
            pair = english.replace(" and ", sign), german.replace(" und ", sign)
        yield pair
    for _ in range(len(pairs) // 8):
        yield frame(rng)
    short = [pair for pair in pairs if len(pair[0]) < 100]
    for _ in range(len(pairs) // 5):
        sample = rng.choices(short, k=rng.choice([2, 2, 2, 3, 3, 4, 5]))
        sample = [exchange_names(pair, lambda kind: name(kind, rng)) for pair in sample]
        yield " ".join(x for x, _ in sample), " ".join(x for _, x in sample)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("data", type=Path, help="a folder that `split` made")
    parser.add_argument("output", type=Path, help="a new folder")
    parser.add_argument("--source", choices=("en", "de"), default="en")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    args.output.mkdir(parents=True)
    splits = {}
    for split in ("train", "val", "test"):
        names = f"{split}.en.gz", f"{split}.de.gz"
        english, german = (read_lines(args.data / x) for x in names)
        german = (german_quotes(new_spelling(line)) for line in german)
        splits[split] = list(zip(english, german, strict=True))
    # What is validation or test text stays out.
    held = {line for x in ("val", "test") for pair in splits[x] for line in pair}
    own = PHRASES * PHRASE_COUNT + gifts(args.seed)
    pairs = splits["train"] + [pair for pair in own if held.isdisjoint(pair)]
    side = int(args.source == "de")
    splits["train"] = list(more(pairs, side, random.Random(args.seed)))
    for split, pairs in splits.items():
        files = (args.output / f"{split}.{x}.gz" for x in ("en", "de"))
        print(f"{split}: {write_pairs(pairs, *files):,} pairs")


if __name__ == "__main__":
    main()
