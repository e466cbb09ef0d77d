"""Noun phrases that agree in gender, number and case, and clauses in word order."""

from __future__ import annotations

from dataclasses import dataclass

from minitransformer.text.grammar.words import MODALS, Noun, Verb

# Noun phrases: columns are masculine, feminine, neuter and plural

COLUMNS = "mfnp"
DEFINITE = {
    "nominative": ("der", "die", "das", "die"),
    "accusative": ("den", "die", "das", "die"),
    "dative": ("dem", "der", "dem", "den"),
}
THIS = {
    "nominative": ("dieser", "diese", "dieses", "diese"),
    "accusative": ("diesen", "diese", "dieses", "diese"),
    "dative": ("diesem", "dieser", "diesem", "diesen"),
}
EIN_ENDINGS = {  # ein, kein, mein, sein, unser
    "nominative": ("", "e", "", "e"),
    "accusative": ("en", "e", "", "e"),
    "dative": ("em", "er", "em", "en"),
}
WEAK_ENDINGS = {  # of adjectives after der and dieser
    "nominative": ("e", "e", "e", "en"),
    "accusative": ("en", "e", "e", "en"),
    "dative": ("en", "en", "en", "en"),
}
MIXED_ENDINGS = {  # of adjectives after ein, kein, mein
    "nominative": ("er", "e", "es", "en"),
    "accusative": ("en", "e", "es", "en"),
    "dative": ("en", "en", "en", "en"),
}
STRONG_PLURAL = {"nominative": "e", "accusative": "e", "dative": "en"}
EIN_WORDS = {"a": "ein", "no": "kein", "my": "mein", "his": "sein", "our": "unser"}


@dataclass(frozen=True)
class NounPhrase:
    """A determiner, perhaps an adjective (English and German stem), and a noun."""

    determiner: str
    noun: Noun
    adjective: tuple[str, str] | None = None
    plural: bool = False

    @property
    def english(self) -> str:
        noun = self.noun.english_plural if self.plural else self.noun.english
        words = [self.adjective[0], noun] if self.adjective else [noun]
        if self.determiner == "a":
            article = [] if self.plural else ["an" if words[0][0] in "aeiou" else "a"]
        elif self.determiner == "this":
            article = ["these" if self.plural else "this"]
        else:
            article = [self.determiner]
        return " ".join(article + words)

    def german(self, case: str) -> str:
        """Decline in the nominative, accusative or dative."""
        column = COLUMNS.index("p" if self.plural else self.noun.gender)
        if self.determiner in ("the", "this"):
            article = (DEFINITE if self.determiner == "the" else THIS)[case][column]
            ending = WEAK_ENDINGS[case][column]
        elif self.determiner == "a" and self.plural:
            article, ending = "", STRONG_PLURAL[case]
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


# Clauses


@dataclass(frozen=True)
class Clause:
    """Who does what to whom: one meaning that both languages put into order.

    `objects` pairs each noun phrase after the verb with its German case; `addition`
    is a phrase at the end in both languages, as (English, German).
    """

    subject: NounPhrase
    verb: Verb
    objects: tuple[tuple[NounPhrase, str], ...] = ()
    addition: tuple[str, str] = ("", "")

    @property
    def english_rest(self) -> str:
        words = [phrase.english for phrase, _ in self.objects]
        return " ".join(x for x in (*words, self.addition[0]) if x)

    @property
    def german_rest(self) -> str:
        words = [phrase.german(case) for phrase, case in self.objects]
        return " ".join(x for x in (*words, self.addition[1]) if x)

    @property
    def english_verb(self) -> str:
        return self.verb.english_base if self.subject.plural else self.verb.english

    @property
    def german_verb(self) -> str:
        return self.verb.german_base if self.subject.plural else self.verb.german

    def statement(self) -> tuple[str, str]:
        """Der Junge ruft den Arzt an."""
        return (
            f"{self.subject.english} {self.english_verb} {self.english_rest}",
            f"{self.subject.german('nominative')} {self.german_verb} "
            f"{self.german_rest} {self.verb.particle}",
        )

    def fronted(self, english: str, german: str) -> tuple[str, str]:
        """Heute ruft der Junge den Arzt an."""
        return (
            f"{english} {self.subject.english} {self.english_verb} {self.english_rest}",
            f"{german} {self.german_verb} {self.subject.german('nominative')} "
            f"{self.german_rest} {self.verb.particle}",
        )

    def negated(self) -> tuple[str, str]:
        """Der Junge ruft den Arzt nicht an."""
        do = "do" if self.subject.plural else "does"
        return (
            f"{self.subject.english} {do} not {self.verb.english_base} "
            f"{self.english_rest}",
            f"{self.subject.german('nominative')} {self.german_verb} "
            f"{self.german_rest} nicht {self.verb.particle}",
        )

    def question(self) -> tuple[str, str]:
        """Ruft der Junge den Arzt an?"""
        do = "do" if self.subject.plural else "does"
        return (
            f"{do} {self.subject.english} {self.verb.english_base} {self.english_rest}",
            f"{self.german_verb} {self.subject.german('nominative')} "
            f"{self.german_rest} {self.verb.particle}",
        )

    def with_modal(self, modal: str) -> tuple[str, str]:
        """Der Junge muss den Arzt anrufen."""
        german = MODALS[modal][self.subject.plural]
        return (
            f"{self.subject.english} {modal} {self.verb.english_base} "
            f"{self.english_rest}",
            f"{self.subject.german('nominative')} {german} {self.german_rest} "
            f"{self.verb.particle}{self.verb.german_base}",
        )

    def because(self) -> tuple[str, str]:
        """..., weil der Junge den Arzt anruft."""
        return (
            f"because {self.subject.english} {self.english_verb} {self.english_rest}",
            f"weil {self.subject.german('nominative')} {self.german_rest} "
            f"{self.verb.particle}{self.german_verb}",
        )
