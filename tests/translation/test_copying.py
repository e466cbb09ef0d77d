"""What is copied into translations, and glossaries: with real models and with noise."""

import random
import re
import string
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minitransformer import load, translate
from minitransformer.settings.decoding_config import TranslationConfig
from minitransformer.text.masking import SYMBOLS
from minitransformer.text.tokenizer import Tokenizer
from minitransformer.translation.beam_search import Hypothesis
from minitransformer.translation.translator import Segment, Translator
from support.in_process import rows, run_translate
from support.models import small_model

ROWS = [
    row.split("\t")
    for row in (Path(__file__).with_name("copied.txt"))
    .read_text(encoding="utf-8")
    .splitlines()[1:]
]
SHORT_OUTPUT = TranslationConfig(beam=2, max_len_a=0, max_len_b=5)


def in_order(things, text):
    """Whether things occur in this order, one behind the other."""
    for thing in things:
        _, found, text = text.partition(thing)
        if not found:
            return False
    return True


def holds(items, source, translation):
    counts = Counter(items)
    return in_order(items, translation) and all(
        translation.count(item) == source.count(item) for item in counts
    )


def test_the_shipped_model_copies_everything_in_number_and_order(shipped):
    lines = [source for source, *_ in ROWS]
    assert len(lines) >= 150
    config = TranslationConfig.changed(shipped.decoding, {})
    found = zip(ROWS, shipped.translate(lines, config), strict=True)
    assert [y for (x, *items), y in found if not holds(items, x, y)] == []

    # The model alone copies few.
    some = ROWS[::4]
    ranked = shipped.translate_as_read([Segment(line) for line, *_ in some], config)
    found = zip(some, ranked, strict=True)
    copied = sum(holds(items, x, best.text) for (x, *items), (best, *_) in found)
    assert copied < 0.25 * len(some)


@pytest.mark.parametrize("model", ["en-de", "de-en"])
def test_only_words_go_through_the_model(model):
    """Signs, mixtures, versions, variables and cells come out as they went in."""
    text = Path(__file__).with_name("kinds.txt").read_text(encoding="utf-8")
    rows = text.partition(f"## {model}\n")[2].partition("\n## ")[0].strip("\n")
    pairs = [row.replace("<T>", "\t").split(" => ") for row in rows.split("\n")]
    lines, expected = zip(*pairs, strict=True)
    assert translate(load(model, threads=1), lines) == [*expected]


def test_a_grouped_number_is_translated_and_loses_no_digit(shipped):
    rng = random.Random(1)
    numbers = [f"{rng.randrange(10**4, 10**6):,}" for _ in range(20)]
    sources = "The farm has {} trees.", "She won {} dollars.", "They sold {} of them."
    lines = [x.format(n) for n, x in zip(numbers, sources * 7, strict=False)]
    found = [re.findall(r"[\d.,]+\d", x) for x in translate(shipped, lines)]
    assert found == [[number.replace(",", ".")] for number in numbers]


THINGS = "😀 <b> {x} %s a@b.de 1234567 `c` ⟦1⟧ ⟦7⟧ 47 你".split()
WORDS = [*THINGS, "the cat", "on", "x", ".", "(", " ", "  ", "e\u0301", "\u200d"]
LINES = st.lists(st.sampled_from(WORDS), max_size=12).map(" ".join)


@given(LINES, st.sampled_from(["", "the", "the cat "]))
def test_what_an_untrained_model_loses_is_put_back(translator, line, prefix):
    if not translator.tokenizer.encode([line])[0]:
        prefix = ""  # nothing can be asked of a blank line
    config = replace(SHORT_OUTPUT, nbest=2, split="never")
    [found] = translator.hypotheses([line], config, 1, [prefix])
    things = list(re.findall("|".join(map(re.escape, THINGS[:-2])), line))
    assert len(found) <= 2
    for best in found:
        assert best.text.startswith(prefix)
        own, names = (Counter(re.findall(r"⟦\d+⟧", x)) for x in (line, best.text))
        assert names <= own
        assert prefix or (names == own and in_order(things, best.text))


def test_prefixes_stand_beside_what_is_copied(shipped):
    lines = ["Please write to a.b@example.com today \N{GRINNING FACE}", "Hello {name}!"]
    mail, greeting = translate(shipped, lines, prefix=["Bitte", "Hallo"])
    assert mail.startswith("Bitte")
    assert in_order(["a.b@example.com", "\N{GRINNING FACE}"], mail)
    assert greeting.startswith("Hallo {name}")


TERMS = "dog\tKöter\nold man\tGreis\nApple\tApple\nwater\tNass\n\n"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("The dog is here.", "Der Köter ist hier."),
        ("Dogs and hotdogs are here.", None),
        ("I see a DOG.", "Ich sehe einen Köter."),
        ("The old man sees a dog.", "Der Greis sieht einen Köter."),
        ("A dog drinks water outside.", "Ein Köter trinkt Nass draußen."),
    ],
)
def test_the_shipped_model_heeds_a_glossary(tmp_path, shipped, line, expected):
    (tmp_path / "terms.tsv").write_text(TERMS, encoding="utf-8")
    [plain] = translate(shipped, [line])
    [found] = translate(
        load("en-de", threads=1, glossary=tmp_path / "terms.tsv"), [line]
    )
    assert found == (expected or plain)


class ScriptedTranslator(Translator):
    """A translator whose model translates a text by `write`.

    A stroke stands between translations. Without `links`, word n is made from word n.
    """

    def __init__(self, write, links=None, symbols=(), **options):
        characters = Tokenizer.train(
            [string.printable], 100 + len(symbols), user_defined_symbols=[*symbols]
        )
        super().__init__(small_model(), characters, **options)
        self._write = write
        self._links = links
        self.read = []

    def translate_as_read(self, segments, config):
        self.read += segments
        written = [self._write(x.text).split("|") for x in segments]
        return [
            [Hypothesis((), 0.0, 0.0, text=x, confidence=0.5) for x in each]
            for each in written
        ]

    def _align(self, sources, targets, config):
        return [
            self._links or tuple((n, n) for n in range(len(x.split()))) for x in targets
        ]

    def texts(self, line):
        [ranked] = self.hypotheses([line], SHORT_OUTPUT)
        return "|".join(h.text for h in ranked)


# A line, what a model writes, and what is made of it.
NUMBERS = """\
In 2004 | Im Jahr 2.004 | Im Jahr 2.004
In 2004 | zweitausendvier | zweitausendvier 2004
In 2004 | 2005 | 2004
In 2004 | 20 04 | 20 04 2004
In 2004 | 2004|2005 | 2004|2004
In 1,350.5 | 1.530,5 | 1.350,5
At 3:5 | 3:55 | 3:5
In 12 | zwölf | zwölf
In 12 | 13 | 12
In 3 of 45 | drei von 54 | drei von 45
It is -5 here | kalt | kalt -5
At 3 p.m. | um 15 Uhr | um 15 Uhr
"""


@pytest.mark.parametrize(("line", "written", "expected"), rows(NUMBERS))
def test_a_number_is_repaired_or_placed_by_the_alignment(line, written, expected):
    links = (0, 0), (1, 0)
    assert ScriptedTranslator(lambda text: written, links).texts(line) == expected


def test_a_changed_number_is_read_as_a_symbol_then():
    def write(text):
        return "Jahr ⟦1⟧ war" if "⟦1⟧" in text else "Jahr 2005 und 3"

    translator = ScriptedTranslator(write, symbols=SYMBOLS)
    assert translator.texts("the year 2004") == "Jahr 2004 war"


def test_a_copy_that_touches_a_word_stands_behind_what_was_made_from_it():
    crossed = (0, 0), (1, 2), (2, 1), (3, 3)
    translator = ScriptedTranslator(lambda text: "ein Hund Katze zwei", crossed)
    assert translator.texts("one cat{a b}dog two") == "ein Hund Katze{a b}zwei"


def test_a_term_has_the_spaces_and_the_prefix_that_are_asked_for():
    translator = ScriptedTranslator(
        lambda text: "der ( Hund )", [(0, 2)], glossary={"cat": "Katze"}
    )
    assert translator.texts("(cat)") == "der ( Katze )"
    translator.hypotheses(["the cat"], SHORT_OUTPUT, 1, ["die Katze"])
    assert translator.read[-1].prefix == "die Katze"


MISSING = """
It is the 21st | egal | 21
on 4 of the 21st | vier am 21. | nothing
the 4th | der 400. | 4
the 4th | der vierte | nothing
the year 2004 | 2004 und 2005 | nothing
"""


@pytest.mark.parametrize(
    ("line", "written", "missing"), [*rows(MISSING), ("the river", "", "nothing")]
)
def test_what_is_missing_is_named(line, written, missing):
    translator = ScriptedTranslator(lambda text: written)
    [[best]] = translator.hypotheses([line], SHORT_OUTPUT)
    assert (*best.missing, "nothing")[0] == missing
    is_sure = (
        missing == "nothing" and "2005" not in best.text
    )  # a number that was invented
    assert best.confidence == 0.5 * is_sure


def test_alignments_count_the_words_of_the_line(shipped):
    config = TranslationConfig.changed(shipped.decoding, {"alignment": True})
    line = "I sent the two files a.txt and {b c} to info@example.com."
    [[best]] = shipped.hypotheses([line], config)
    words, written = line.split(), best.text.split()
    assert {words[i] for i, j in best.alignment if written[j] == words[-1]} == {
        words[-1]
    }
    assert max(i for i, _ in best.alignment) == len(words) - 1


def test_a_bad_line_of_a_glossary_is_named(tmp_path):
    path = tmp_path / "terms.tsv"
    for text, wrong in (
        ("dog\tHund\n\ncat Katze\n", "line 3: .* got 'cat Katze'"),
        ("dog\tHund\tx\n", "line 1: expected a new term, a tab and its translation"),
        ("dog\t \n", "line 1: "),
        ("dog\tHund\ndog\tKöter\n", "line 2: "),
    ):
        path.write_text(text, encoding="utf-8")
        code, out, error = run_translate("--glossary", str(path), "The dog.")
        assert (code, out) == (2, "")
        assert re.search(f"{path}, {wrong}", error)
        assert len(error.splitlines()) <= 2
