"""What benchmarks/behaviour.py counts as kept, as a sentence and as a loop."""

import pytest

from benchmarks.behaviour import TABLE, Case, check, read_table
from support.in_process import rows

# A source, what is to be kept of it, and translations that keep it and that do not.
KEPT = """
1,234.5 cats | 1,234.5 | 1.234,5 Katzen | 1.234 Katzen, 5 Hunde
1,234.5 cats | 1,234.5 | 1.2345 Katzen und 7 | Katzen
at 7:45 | 7:45 | um 7.45 Uhr | um 7 Uhr
17 cats | 17 | 17 Katzen | 117 Katzen
a@b.de or a@b.de | a@b.de | a@b.de oder a@b.de | a@b.de
Ask Peter. | Peter | Frag Peter. | Frag Petra.
"""


@pytest.mark.parametrize(("source", "kept", "right", "wrong"), rows(KEPT))
def test_what_is_kept(source, kept, right, wrong):
    case = Case("", 0, source, (kept,))
    assert [check(case, output)["kept"] for output in (right, wrong)] == [True, False]


# A translation, its number of sentences, and whether it repeats itself.
OUTPUTS = """
Ja. Nein! | 2 | no
Er sagte: „Ja.“ Dann ging er… | 2 | no
Es kostet 2.50 Euro | 0 | no
a b c a b c a b c | 0 | loop
a b c a b c a b d | 0 | no
"""


@pytest.mark.parametrize(("output", "sentences", "loop"), rows(OUTPUTS))
def test_sentences_and_loops(output, sentences, loop):
    results = check(Case("", int(sentences) or 9, output, ()), output)
    assert results["sentences"] == (sentences != "0")
    assert results["no loop"] == (loop == "no")


def test_length():
    source = "x" * 100
    found = [
        check(Case("", 0, source, ()), "y" * n)["length"] for n in (0, 35, 215, 216)
    ]
    assert found == [False, True, True, False]


@pytest.mark.parametrize("language", ["en", "de"])
def test_the_table_has_300_inputs_of_20_kinds(language):
    cases = list(read_table(TABLE.with_name(f"behaviour.{language}.txt")))
    kinds = {case.kind for case in cases}
    assert len(cases) >= 300
    assert len(kinds) >= 20
    things = [(case.source, thing) for case in cases for thing in case.kept]
    assert [
        x for x in things if x[1].lower() not in x[0].lower() and not x[1].isdigit()
    ] == []
