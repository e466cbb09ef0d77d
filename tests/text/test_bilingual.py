"""Sentence pairs of one file, as other programs write it."""

import csv
import gzip
import re
import sys
from itertools import chain

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from minitransformer.settings.text_config import TextConfig
from minitransformer.text.bilingual import import_toolkit, read_bilingual
from minitransformer.text.find import find_text
from minitransformer.text.pairs import TextPair, check_files
from support.in_process import rows

needs_toolkit = pytest.mark.skipif(
    sys.version_info < (3, 11), reason="the Translate Toolkit needs Python 3.11"
)
cells = st.text("abü ,;\"'.", min_size=1, max_size=9).filter(str.strip)
pairs = st.lists(
    st.tuples(cells, cells).map(lambda x: (f"E{x[0]}", f"D{x[1]}")), min_size=1
)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("bilingual")


@given(
    pairs=pairs,
    delimiter=st.sampled_from(",;"),
    quoting=st.sampled_from([csv.QUOTE_ALL, csv.QUOTE_MINIMAL]),
    heading=st.sampled_from([("en", "de", "note"), ("source", "target"), ()]),
    mark=st.sampled_from(["", "\ufeff"]),
)
def test_a_csv_is_read_as_the_module_csv_writes_it(
    place, pairs, delimiter, quoting, heading, mark
):
    # Without quotes, a single row may be divided in two ways.
    rest = {*",;"} - {delimiter}
    assume(quoting == csv.QUOTE_ALL or not rest & {*"".join(chain(*pairs))})
    path = place / "a.csv"
    with open(path, "w", encoding="utf-8", newline="") as file:
        file.write(mark)
        writer = csv.writer(file, delimiter=delimiter, quoting=quoting)
        writer.writerows([heading] * bool(heading))
        writer.writerows([(*pair, "note")[: len(heading) or 2] for pair in pairs])
    assert read_bilingual(path, ("en", "de"))[0] == pairs
    if heading[:1] == ("en",):
        turned = [(target, source) for source, target in pairs]
        assert read_bilingual(path, ("de", "en"))[0] == turned


# Lines with strokes for their ends and arrows for tabs, and their pairs.
COLUMNS = '''
e a → d b → CC-BY | e a → d b
en → de / e a → d b | e a → d b
id → de → en / 7 → d b → e a | e a → d b
Hi → Oh | Hi → Oh
"e ""a""" → "d b" / "e → d" | e "a" → d b / "e → d"
"e a" → "d b" | "e a" → "d b"
'''
# Lines, and what the error says.
NO_COLUMNS = """
1 → e a / 2 → e b | pair 1: expected a sentence in two languages, got '1 an
e a → e a / e b → e b | expected a sentence in two languages, got 'e a and
fr → de / f a → d b | expected en to de, got fr to de
e a → d b /  / one | line 3: expected source TAB target, got 'one'
 /  | expected sentences in en and de, found none
"""


def read_columns(place, text):
    path = place / "a.tsv.gz"
    text = text.replace(" → ", "\t").replace(" / ", "\n")
    path.write_bytes(gzip.compress(f"{text}\n".encode()))
    return read_bilingual(path, ("en", "de"))[0]


@pytest.mark.parametrize(("text", "expected"), rows(COLUMNS))
def test_columns_are_looked_at_before_they_are_trusted(place, text, expected):
    found = read_columns(place, text)
    assert " / ".join(map(" → ".join, found)) == expected


@pytest.mark.parametrize(("text", "message"), rows(NO_COLUMNS))
def test_columns_that_are_no_two_languages_are_refused(place, text, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        read_columns(place, text)


def test_quotes_of_a_csv_that_do_not_end_are_refused(place):
    (place / "open.csv").write_text('e a,"d b\n')
    with pytest.raises(
        ValueError, match=r"open.csv: expected the quotes of a .csv: un"
    ):
        read_bilingual(place / "open.csv")


def test_text_that_is_its_own_reference_is_no_table(place):
    (place / "plain").write_text("one\ntwo\n")
    check_files(place / "out", place / "plain", place / "plain")


@needs_toolkit
@given(pairs=pairs, has_region=st.booleans())
def test_catalogues_and_memories_are_read_as_the_toolkit_writes_them(
    place, pairs, has_region
):
    pairs = list(dict(pairs).items())
    codes = ("en-US", "de-DE") if has_region else ("en", "de")
    for kind, module, cls in (
        ("tmx", "tmx", "tmxfile"),
        ("po", "po", "pofile"),
        ("xlf", "xliff", "Xliff1File"),
    ):
        store = getattr(import_toolkit(f"storage.{module}", "tests"), cls)()
        store.setsourcelanguage(codes[0])
        store.settargetlanguage(codes[1])
        for source, target in [*pairs, ("e open", None)]:
            store.addsourceunit(source).target = target
        path = place / f"a.{kind}"
        path.write_bytes(bytes(store))
        read, languages = read_bilingual(path)
        assert read == [*pairs, ("e open", "")]
        assert languages == (("", "") if kind == "po" else ("en", "de"))
        # Training takes the file for both sides.
        assert list(TextPair(path, path).lines()) == read
        assert TextPair(path, path).languages == languages
        text = TextConfig(train_source=str(path), val_source=str(path))
        assert list(find_text(text)["val"].lines()) == read


@needs_toolkit
def test_a_memory_of_several_languages_gives_those_asked_for(place):
    path = place / "a.tmx"
    units = [{"fr": "f", "en-GB": "e", "de": "d"}, {"de": "d 2", "en-GB": "e\n2"}]
    body = "".join(
        "<tu>{}</tu>".format(
            "".join(
                f'<tuv xml:lang="{k}"><seg>{v}</seg></tuv>' for k, v in unit.items()
            )
        )
        for unit in units
    )
    path.write_text(
        f'<tmx version="1.4"><header srclang="en"/><body>{body}</body></tmx>'
    )
    assert read_bilingual(path, ("de", "en")) == (
        [("d", "e"), ("d 2", "e 2")],
        ("de", "en"),
    )
    assert read_bilingual(path) == ([("e", "f"), ("e 2", "")], ("en", "fr"))
    with pytest.raises(ValueError, match="expected sentences in en and it, found none"):
        read_bilingual(path, ("en", "it"))
