"""Numbers below a million, years from 1100 to 2099 and clock times in words."""

from __future__ import annotations

UNITS_EN = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen "
    "fourteen fifteen sixteen seventeen eighteen nineteen"
).split()
UNITS_DE = (
    "null ein zwei drei vier fünf sechs sieben acht neun zehn elf zwölf dreizehn "
    "vierzehn fünfzehn sechzehn siebzehn achtzehn neunzehn"
).split()
TENS_EN = "- - twenty thirty forty fifty sixty seventy eighty ninety".split()
TENS_DE = "- - zwanzig dreißig vierzig fünfzig sechzig siebzig achtzig neunzig".split()
ORDINALS_EN = {
    "one": "first",
    "two": "second",
    "three": "third",
    "five": "fifth",
    "eight": "eighth",
    "nine": "ninth",
    "twelve": "twelfth",
}
ORDINALS_DE = {1: "erst", 3: "dritt", 7: "siebt", 8: "acht"}


def cardinal_en(n: int) -> str:
    """342107 -> three hundred forty-two thousand one hundred seven."""
    for size, name in ((1000, "thousand"), (100, "hundred")):
        if n >= size:
            rest = f" {cardinal_en(n % size)}" if n % size else ""
            return f"{cardinal_en(n // size)} {name}{rest}"
    if n >= 20:
        return TENS_EN[n // 10] + (f"-{UNITS_EN[n % 10]}" if n % 10 else "")
    return UNITS_EN[n]


def cardinal_de(n: int, last: str = "eins") -> str:
    """342107 -> dreihundertzweiundvierzigtausendeinhundertsieben.

    `last` is how a 1 at the end is written: eins if no noun follows.
    """
    for size, name in ((1000, "tausend"), (100, "hundert")):
        if n >= size:
            rest = cardinal_de(n % size, last) if n % size else ""
            return cardinal_de(n // size, "ein") + name + rest
    if n >= 20:
        return (UNITS_DE[n % 10] + "und" if n % 10 else "") + TENS_DE[n // 10]
    return last if n == 1 else UNITS_DE[n]


def ordinal_en(n: int) -> str:
    """23 -> twenty-third."""
    words = cardinal_en(n)
    start = max(words.rfind(" "), words.rfind("-")) + 1
    head, last = words[:start], words[start:]
    if last in ORDINALS_EN:
        return head + ORDINALS_EN[last]
    return head + (last[:-1] + "ieth" if last.endswith("y") else last + "th")


def ordinal_de(n: int) -> str:
    """23 -> dreiundzwanzigst, without the ending that agrees with a noun."""
    low = n % 100
    head = cardinal_de(n - low) if n > low else ""
    if low in ORDINALS_DE:
        return head + ORDINALS_DE[low]
    return head + cardinal_de(low) + "t" if 0 < low < 20 else cardinal_de(n) + "st"


def year_en(year: int) -> str:
    """1984 -> nineteen eighty-four, 1905 -> nineteen oh five."""
    century, rest = divmod(year, 100)
    if 2000 <= year < 2010:
        return cardinal_en(year)
    if rest == 0:
        return cardinal_en(century) + " hundred"
    return f"{cardinal_en(century)} {'oh ' if rest < 10 else ''}{cardinal_en(rest)}"


def year_de(year: int) -> str:
    """1984 -> neunzehnhundertvierundachtzig, 2004 -> zweitausendvier."""
    if year >= 2000:
        return cardinal_de(year)
    century, rest = divmod(year, 100)
    return cardinal_de(century) + "hundert" + (cardinal_de(rest) if rest else "")


def clock_en(hour: int, minute: int) -> str:
    """(6, 30) -> half past six. Units: hours from 1 to 12, minutes in steps of 5"""
    if minute == 0:
        return cardinal_en(hour) + " o'clock"
    following = hour % 12 + 1
    words = {15: "a quarter", 30: "half"}
    if minute <= 30:
        return f"{words.get(minute, cardinal_en(minute))} past {cardinal_en(hour)}"
    left = 60 - minute
    return f"{words.get(left, cardinal_en(left))} to {cardinal_en(following)}"


def clock_de(hour: int, minute: int) -> str:
    """(6, 30) -> halb sieben. Units: hours from 1 to 12, minutes in steps of 5"""
    now, following = cardinal_de(hour), cardinal_de(hour % 12 + 1)
    if minute == 0:
        return cardinal_de(hour, "ein") + " Uhr"
    if minute in (25, 30, 35):
        side = {25: "fünf vor ", 30: "", 35: "fünf nach "}[minute]
        return f"{side}halb {following}"
    if minute < 30:
        return f"{'Viertel' if minute == 15 else cardinal_de(minute)} nach {now}"
    left = "Viertel" if minute == 45 else cardinal_de(60 - minute)
    return f"{left} vor {following}"
