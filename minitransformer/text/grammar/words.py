"""The vocabulary of the grammar, English and German, with its inflections."""

from __future__ import annotations

from typing import NamedTuple

from minitransformer.text.bilingual import Pair


class Noun(NamedTuple):
    """A noun of gender m, f or n; `weak`: -n or -en in all cases but the nominative."""

    english: str
    english_plural: str
    german: str
    german_plural: str
    gender: str
    weak: bool = False


class Verb(NamedTuple):
    """A verb in the present tense, with the particle that German separates from it."""

    english: str  # third person singular
    english_base: str
    german: str
    german_base: str
    particle: str = ""


def _cells(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in row.split(",")] for row in table.split("\n")]


def _nouns(table: str) -> list[Noun]:
    return [Noun(a, b, c, d, e[0], "weak" in e) for a, b, c, d, e in _cells(table)]


def _verbs(table: str) -> list[Verb]:
    return [Verb(*row) for row in _cells(table)]


def _pairs(table: str) -> list[Pair]:
    return [(english, german) for english, german in _cells(table)]


PEOPLE = _nouns(
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
    aunt, aunts, Tante, Tanten, f"""
)
THINGS = _nouns(
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
    map, maps, Karte, Karten, f"""
)
OPENABLE = _nouns(
    """window, windows, Fenster, Fenster, n
    door, doors, Tür, Türen, f
    box, boxes, Kiste, Kisten, f
    bag, bags, Tasche, Taschen, f
    suitcase, suitcases, Koffer, Koffer, m"""
)
CLOTHES = _nouns(
    """coat, coats, Mantel, Mäntel, m
    hat, hats, Hut, Hüte, m
    shirt, shirts, Hemd, Hemden, n
    jacket, jackets, Jacke, Jacken, f"""
)
OBJECTS = THINGS + OPENABLE + CLOTHES

ANY_ADJECTIVES = _pairs(
    """old, alt
    small, klein
    big, groß
    beautiful, schön
    good, gut"""
)
PERSON_ADJECTIVES = ANY_ADJECTIVES + _pairs(
    """young, jung
    clever, klug
    friendly, freundlich
    happy, glücklich
    strong, stark"""
)
THING_ADJECTIVES = ANY_ADJECTIVES + _pairs(
    """new, neu
    red, rot
    green, grün
    blue, blau
    black, schwarz
    white, weiß
    cheap, billig
    heavy, schwer"""
)

TRANSITIVE = _verbs(
    """sees, see, sieht, sehen
    buys, buy, kauft, kaufen
    finds, find, findet, finden
    carries, carry, trägt, tragen
    draws, draw, zeichnet, zeichnen
    needs, need, braucht, brauchen
    sells, sell, verkauft, verkaufen
    hides, hide, versteckt, verstecken
    throws away, throw away, wirft, werfen, weg
    brings back, bring back, bringt, bringen, zurück"""
)
TOWARDS_PEOPLE = _verbs(
    """loves, love, liebt, lieben
    knows, know, kennt, kennen
    visits, visit, besucht, besuchen
    calls, call, ruft, rufen, an
    invites, invite, lädt, laden, ein"""
)
OPENING = _verbs(
    """opens, open, macht, machen, auf
    closes, close, macht, machen, zu"""
)
WEARING = _verbs("puts on, put on, zieht, ziehen, an")
GIVING = _verbs(
    """gives, give, gibt, geben
    shows, show, zeigt, zeigen
    sends, send, schickt, schicken
    lends, lend, leiht, leihen"""
)
INTRANSITIVE = _verbs(
    """sleeps, sleep, schläft, schlafen
    works, work, arbeitet, arbeiten
    sings, sing, singt, singen
    laughs, laugh, lacht, lachen
    dances, dance, tanzt, tanzen
    waits, wait, wartet, warten"""
)
MODALS = {"can": ("kann", "können"), "must": ("muss", "müssen")}
TIMES = _pairs(
    """today, heute
    tomorrow, morgen
    now, jetzt
    every day, jeden Tag
    on Monday, am Montag
    on Friday, am Freitag
    in the evening, am Abend
    in summer, im Sommer"""
)
PLACES = _pairs(
    """in the garden, im Garten
    in the kitchen, in der Küche
    in the city, in der Stadt
    at home, zu Hause
    at school, in der Schule
    at the station, am Bahnhof"""
)
