"""The words that both languages share, and how they are inflected."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Noun(NamedTuple):
    """A noun of gender m, f or n; `weak` takes -n or -en outside the nominative."""

    english: str
    english_plural: str
    german: str
    german_plural: str
    gender: str
    weak: bool = False


class Verb(NamedTuple):
    """A verb in the present: third person singular, base form; `particle` separates."""

    english: str
    english_base: str
    german: str
    german_base: str
    particle: str = ""


def _table(text: str, kind: Callable[..., Noun | Verb]) -> list:
    rows = (line.split(",") for line in text.strip().split("\n"))
    return [kind(*(cell.strip() for cell in row)) for row in rows]


def _noun(*cells: str) -> Noun:
    english, plural, german, german_plural, gender = cells
    return Noun(english, plural, german, german_plural, gender[0], gender == "m weak")


PEOPLE: list[Noun] = _table(
    """man, men, Mann, Männer, m
    woman, women, Frau, Frauen, f
    child, children, Kind, Kinder, n
    boy, boys, Junge, Jungen, m weak
    girl, girls, Mädchen, Mädchen, n
    teacher, teachers, Lehrer, Lehrer, m
    doctor, doctors, Arzt, Ärzte, m
    student, students, Student, Studenten, m weak
    neighbor, neighbors, Nachbar, Nachbarn, m weak
    sister, sisters, Schwester, Schwestern, f
    brother, brothers, Bruder, Brüder, m
    queen, queens, Königin, Königinnen, f
    baker, bakers, Bäcker, Bäcker, m
    farmer, farmers, Bauer, Bauern, m weak
    aunt, aunts, Tante, Tanten, f""",
    _noun,
)
THINGS: list[Noun] = _table(
    """apple, apples, Apfel, Äpfel, m
    book, books, Buch, Bücher, n
    letter, letters, Brief, Briefe, m
    flower, flowers, Blume, Blumen, f
    table, tables, Tisch, Tische, m
    chair, chairs, Stuhl, Stühle, m
    lamp, lamps, Lampe, Lampen, f
    cup, cups, Tasse, Tassen, f
    key, keys, Schlüssel, Schlüssel, m
    ball, balls, Ball, Bälle, m
    picture, pictures, Bild, Bilder, n
    car, cars, Auto, Autos, n
    dog, dogs, Hund, Hunde, m
    cat, cats, Katze, Katzen, f
    horse, horses, Pferd, Pferde, n
    bird, birds, Vogel, Vögel, m
    egg, eggs, Ei, Eier, n
    map, maps, Karte, Karten, f""",
    _noun,
)
OPENABLE: list[Noun] = _table(
    """window, windows, Fenster, Fenster, n
    door, doors, Tür, Türen, f
    box, boxes, Kiste, Kisten, f
    bag, bags, Tasche, Taschen, f
    suitcase, suitcases, Koffer, Koffer, m""",
    _noun,
)
CLOTHES: list[Noun] = _table(
    """coat, coats, Mantel, Mäntel, m
    hat, hats, Hut, Hüte, m
    shirt, shirts, Hemd, Hemden, n
    jacket, jackets, Jacke, Jacken, f""",
    _noun,
)
OBJECTS = THINGS + OPENABLE + CLOTHES

ANY_ADJECTIVES = {
    "old": "alt",
    "small": "klein",
    "big": "groß",
    "beautiful": "schön",
    "good": "gut",
}
PERSON_ADJECTIVES = ANY_ADJECTIVES | {
    "young": "jung",
    "clever": "klug",
    "friendly": "freundlich",
    "happy": "glücklich",
    "strong": "stark",
}
THING_ADJECTIVES = ANY_ADJECTIVES | {
    "new": "neu",
    "red": "rot",
    "green": "grün",
    "blue": "blau",
    "black": "schwarz",
    "white": "weiß",
    "cheap": "billig",
    "heavy": "schwer",
}

TRANSITIVE: list[Verb] = _table(
    """sees, see, sieht, sehen
    buys, buy, kauft, kaufen
    finds, find, findet, finden
    carries, carry, trägt, tragen
    draws, draw, zeichnet, zeichnen
    needs, need, braucht, brauchen
    sells, sell, verkauft, verkaufen
    hides, hide, versteckt, verstecken
    throws away, throw away, wirft, werfen, weg
    brings back, bring back, bringt, bringen, zurück""",
    Verb,
)
TOWARDS_PEOPLE: list[Verb] = _table(
    """loves, love, liebt, lieben
    knows, know, kennt, kennen
    visits, visit, besucht, besuchen
    calls, call, ruft, rufen, an
    invites, invite, lädt, laden, ein""",
    Verb,
)
OPENING: list[Verb] = _table(
    """opens, open, macht, machen, auf
    closes, close, macht, machen, zu""",
    Verb,
)
WEARING: list[Verb] = [Verb("puts on", "put on", "zieht", "ziehen", "an")]
GIVING: list[Verb] = _table(
    """gives, give, gibt, geben
    shows, show, zeigt, zeigen
    sends, send, schickt, schicken
    lends, lend, leiht, leihen""",
    Verb,
)
INTRANSITIVE: list[Verb] = _table(
    """sleeps, sleep, schläft, schlafen
    works, work, arbeitet, arbeiten
    sings, sing, singt, singen
    laughs, laugh, lacht, lachen
    dances, dance, tanzt, tanzen
    waits, wait, wartet, warten""",
    Verb,
)
MODALS = {"can": ("kann", "können"), "must": ("muss", "müssen")}
TIMES = {
    "today": "heute",
    "tomorrow": "morgen",
    "now": "jetzt",
    "every day": "jeden Tag",
    "on Monday": "am Montag",
    "on Friday": "am Freitag",
    "in the evening": "am Abend",
    "in summer": "im Sommer",
}
PLACES = {
    "in the garden": "im Garten",
    "in the kitchen": "in der Küche",
    "in the city": "in der Stadt",
    "at home": "zu Hause",
    "at school": "in der Schule",
    "at the station": "am Bahnhof",
}
MONTHS = dict(
    zip(
        "January February March April May June July August September October "
        "November December".split(),
        "Januar Februar März April Mai Juni Juli August September Oktober "
        "November Dezember".split(),
        strict=True,
    )
)
