"""Noun phrases with their agreement, and clauses with their word order."""

from __future__ import annotations

from dataclasses import dataclass

from minitransformer.text.bilingual import Pair
from minitransformer.text.grammar.words import MODALS, Noun, Verb

# The columns of the tables below are masculine, feminine, neuter and plural; a dash is
# no ending.
COLUMNS = "mfnp"
CASES = "nominative", "accusative", "dative"


def _table(rows: str) -> dict[str, list[str]]:
    """Return the cells of each case."""
    cells = ([cell.strip("-") for cell in row.split()] for row in rows.split("\n"))
    return dict(zip(CASES, cells, strict=True))


DEFINITE = _table(
    """der die das die
    den die das die
    dem der dem den"""
)
THIS = _table(
    """dieser diese dieses diese
    diesen diese dieses diese
    diesem dieser diesem diesen"""
)
# ein, kein, mein, sein, unser
EIN_ENDINGS = _table(
    """- e - e
    en e - e
    em er em en"""
)
# Adjectives after der and dieser
WEAK_ENDINGS = _table(
    """e e e en
    en e e en
    en en en en"""
)
# Adjectives after ein, kein, mein
MIXED_ENDINGS = _table(
    """er e es en
    en e es en
    en en en en"""
)
STRONG_PLURAL = {"nominative": "e", "accusative": "e", "dative": "en"}
EIN_WORDS = {"a": "ein", "no": "kein", "my": "mein", "his": "sein", "our": "unser"}

# The two orders of the words of each kind of clause: {verb} is inflected, {base} is the
# base form, and {rest} has the objects and the addition.
ORDERS = {
    # Der Junge ruft den Arzt an.
    "statement": ("{subject} {verb} {rest}", "{subject} {verb} {rest} {particle}"),
    # Heute ruft der Junge den Arzt an.
    "fronted": (
        "{time} {subject} {verb} {rest}",
        "{german_time} {verb} {subject} {rest} {particle}",
    ),
    # Der Junge ruft den Arzt nicht an.
    "negated": (
        "{subject} {do} not {base} {rest}",
        "{subject} {verb} {rest} nicht {particle}",
    ),
    # Ruft der Junge den Arzt an?
    "question": (
        "{do} {subject} {base} {rest} ?",
        "{verb} {subject} {rest} {particle} ?",
    ),
    # Der Junge muss den Arzt anrufen.
    "modal": (
        "{subject} {modal} {base} {rest}",
        "{subject} {german_modal} {rest} {particle}{base}",
    ),
    # ..., weil der Junge den Arzt anruft.
    "because": (
        "because {subject} {verb} {rest}",
        "weil {subject} {rest} {particle}{verb}",
    ),
}


@dataclass(frozen=True)
class NounPhrase:
    """A determiner, an adjective (English word, German stem) or none, and a noun."""

    determiner: str
    noun: Noun
    adjective: Pair | None = None
    plural: bool = False

    @property
    def english(self) -> str:
        noun = self.noun.english_plural if self.plural else self.noun.english
        words = [self.adjective[0], noun] if self.adjective else [noun]
        determiner = self.determiner
        if self.plural:
            determiner = {"a": "", "this": "these"}.get(determiner, determiner)
        elif determiner == "a" and words[0][0] in "aeiou":
            determiner = "an"
        return " ".join([determiner, *words]).strip()

    def german(self, case: str) -> str:
        """Decline the phrase. `case`: nominative, accusative or dative."""
        # The article decides the ending of the adjective.
        column = COLUMNS.index("p" if self.plural else self.noun.gender)
        if self.determiner in ("the", "this"):
            article = (DEFINITE if self.determiner == "the" else THIS)[case][column]
            ending = WEAK_ENDINGS[case][column]
        elif self.determiner == "a" and self.plural:
            article = ""
            ending = STRONG_PLURAL[case]
        else:
            article = EIN_WORDS[self.determiner] + EIN_ENDINGS[case][column]
            ending = MIXED_ENDINGS[case][column]
        adjective = self.adjective[1] + ending if self.adjective else ""
        return " ".join(x for x in (article, adjective, self._noun(case)) if x)

    def _noun(self, case: str) -> str:
        noun = self.noun
        if self.plural:
            dative_n = case == "dative" and noun.german_plural[-1] not in "ns"
            return noun.german_plural + "n" * dative_n
        if noun.weak and case != "nominative":
            return noun.german_plural  # the same form for every weak noun used here
        return noun.german


@dataclass(frozen=True)
class Clause:
    """Who does what to whom: one meaning; each language has its own word order.

    `objects` pairs each noun phrase after the verb with its German case; `addition`
    is a phrase at the end in both languages, as (English, German).
    """

    subject: NounPhrase
    verb: Verb
    objects: tuple[tuple[NounPhrase, str], ...] = ()
    addition: Pair = ("", "")

    def written(self, kind: str, **words: str) -> Pair:
        """Return the clause in the English and the German order of a kind."""
        plural = self.subject.plural
        verb = self.verb
        english, german = ORDERS[kind]
        # English needs the base form after "do" and modals, German a separate particle.
        return (
            english.format(
                subject=self.subject.english,
                do="do" if plural else "does",
                verb=verb.english_base if plural else verb.english,
                base=verb.english_base,
                rest=" ".join(
                    [*(p.english for p, _ in self.objects), self.addition[0]]
                ),
                **words,
            ),
            german.format(
                subject=self.subject.german("nominative"),
                verb=verb.german_base if plural else verb.german,
                base=verb.german_base,
                particle=verb.particle,
                rest=" ".join(
                    [*(p.german(c) for p, c in self.objects), self.addition[1]]
                ),
                **words,
            ),
        )

    def with_modal(self, modal: str) -> Pair:
        """Return the clause with an English modal verb and its German counterpart."""
        german = MODALS[modal][self.subject.plural]
        return self.written("modal", modal=modal, german_modal=german)
