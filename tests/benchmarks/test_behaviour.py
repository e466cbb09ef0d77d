"""What benchmarks/behaviour.py counts as kept, as a sentence and as a loop."""

import pytest

from benchmarks.behaviour import TABLE, Case, check, read_table


@pytest.mark.parametrize(
    ("source", "kept", "output", "holds"),
    [
        ("1,234.5 cats", "1,234.5", "1.234,5 Katzen", True),
        ("1,234.5 cats", "1,234.5", "1.2345 Katzen und 7", True),
        ("1,234.5 cats", "1,234.5", "1.234 Katzen, 5 Hunde", False),
        ("at 7:45", "7:45", "um 7.45 Uhr", True),
        ("17 cats", "17", "117 Katzen", False),
        ("a@b.de or a@b.de", "a@b.de", "a@b.de", False),
        ("a@b.de or a@b.de", "a@b.de", "a@b.de oder a@b.de", True),
        ("Ask Peter.", "Peter", "Frag Petra.", False),
    ],
)
def test_what_is_kept(source, kept, output, holds):
    assert check(Case("", 0, source, (kept,)), output)["kept"] == holds


@pytest.mark.parametrize(
    ("output", "sentences", "loop"),
    [
        ("Ja. Nein!", 2, False),
        ("Er sagte: „Ja.“ Dann ging er…", 2, False),
        ("Es kostet 2.50 Euro", 0, False),
        ("a b c a b c a b c", 0, True),
        ("a b c a b c a b d", 0, False),
    ],
)
def test_sentences_and_loops(output, sentences, loop):
    results = check(Case("", sentences or 9, output, ()), output)
    assert results["sentences"] == (sentences > 0)
    assert results["no loop"] != loop


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
