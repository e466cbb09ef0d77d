"""Files keep all but their text, as other readers of each format see them."""

import csv
import io
import json
import re
import sys
import zipfile
from contextlib import suppress
from pathlib import Path
from xml.etree import ElementTree

import pytest
from babel.messages.pofile import read_po
from hypothesis import given
from hypothesis import strategies as st

from minitransformer.commands.file import file_lines, main, with_lines
from minitransformer.text.bilingual import import_toolkit

needs_toolkit = pytest.mark.skipif(
    sys.version_info < (3, 11), reason="the Translate Toolkit needs Python 3.11"
)
EN_DE = "en", "de"
words = st.text("abcxyzüß'", min_size=1, max_size=6)
sentences = st.lists(words, min_size=2, max_size=6).map(" ".join)


def translated(content, name, new=str.upper):
    """Return a file of text whose lines a function has translated."""
    data = content if isinstance(content, bytes) else content.encode()
    lines = file_lines(data, name, EN_DE)
    return with_lines(data, name, EN_DE, [new(line) for line in lines])


def toolkit(module, data, cls):
    """Return the units that the Translate Toolkit reads."""
    return (
        getattr(import_toolkit(f"storage.{module}", "tests"), cls)
        .parsestring(data)
        .units
    )


# Notations of text


@given(
    value=st.recursive(
        st.none() | st.integers() | st.text(max_size=9),
        lambda x: st.lists(x, max_size=4) | st.dictionaries(st.text(), x, max_size=4),
        max_leaves=12,
    ),
    escapes=st.booleans(),
    indent=st.none() | st.integers(0, 3),
)
def test_strings_of_json_are_translated_and_nothing_else(value, escapes, indent):
    def changed(x):
        if isinstance(x, dict):
            return {key: changed(each) for key, each in x.items()}
        if isinstance(x, list):
            return list(map(changed, x))
        return f"<{x}>".replace("\n", ">\n<") if isinstance(x, str) else x

    # One text at least.
    content = json.dumps([value, "a"], ensure_ascii=escapes, indent=indent)
    new = translated(content, "a.json", lambda line: f"<{line}>").decode()
    assert json.loads(new) == changed([value, "a"])
    layout = json.dumps(changed([value, "a"]), ensure_ascii=False, indent=indent)
    if not escapes:
        assert new == layout


@given(
    rows=st.lists(st.tuples(words, sentences, st.integers(), sentences), min_size=1),
    delimiter=st.sampled_from(",;\t"),
    end=st.sampled_from(["\n", "\r\n"]),
)
def test_columns_of_prose_are_translated(rows, delimiter, end):
    """A heading, keys and numbers stay; quotes are those of the module csv."""
    kind, dialect = "csv", {"delimiter": delimiter, "lineterminator": end}
    rows = [list(map(str, row)) for row in rows]
    rows[0][1] = f'a {delimiter} b "c" d'
    if delimiter == "\t":  # without quotes
        kind, rows[0][1] = "TSV", "a b"
        dialect |= {"quoting": csv.QUOTE_NONE}

    def table(rows):
        out = io.StringIO()
        heading = ["key", "name", "price", "about"]
        csv.writer(out, **dialect).writerows([heading, *rows])
        return out.getvalue()

    expected = [[key, name.upper(), n, about.upper()] for key, name, n, about in rows]
    assert translated(table(rows), f"a.{kind}").decode() == table(expected)


HEADS = {
    "srt": "",
    "vtt": "WEBVTT - all\n\nNOTE of mine\n\nSTYLE\n::cue {}\n\n",
    "ass": "[Script Info]\nScriptType: v4.00+\n\n[V4+ Styles]\nFormat: Name\n\n"
    "[Events]\nFormat: Layer, Start, End, Style, Name, MarginL, MarginR, MarginV, "
    "Effect, Text\nComment: 0,0:00:01.00,0:00:02.00,Default,,0,0,0,,not shown\n"
    r"Dialogue: 0,0:00:01.00,0:00:02.00,Default,,0,0,0,,{\pos(1,2)\p1}m 0 0 l 1 0"
    "\n",
}
# aeidon guesses the encoding of a file: its text is ASCII here.
spoken = st.lists(st.text("abcx'", min_size=1), min_size=2).map(" ".join)
cues = st.tuples(st.integers(0, 3590), st.lists(spoken, min_size=1, max_size=3))


def subtitles(kind, cues):
    """Write seconds and lines of text as .srt, .vtt or .ass."""
    parts = []
    for number, (second, lines) in enumerate(cues):
        start, end = (f"{x // 60:02}:{x % 60:02}" for x in (second, second + 2))
        head = {
            "srt": f"{7 * number}\n00:{start},000 --> 00:{end},500\n",
            "vtt": f"name\n{start}.000 --> {end}.500 line:90%\n",
            "ass": f"Dialogue: 0,0:{start}.00,0:{end}.50,Default,Tom,0,0,0,,",
        }
        parts.append(head[kind] + (r"\N" if kind == "ass" else "\n").join(lines))
    return HEADS[kind] + ("\n" if kind == "ass" else "\n\n").join(parts) + "\n"


@needs_toolkit
@given(cues=st.lists(cues, min_size=1), kind=st.sampled_from(list(HEADS)))
def test_subtitles_keep_times_and_the_number_of_lines(cues, kind):
    """As aeidon reads them: the lines of a cue become one, and are divided anew."""
    content = subtitles(kind, cues)
    new = translated(content, f"a.{kind}")
    before, after = (
        toolkit("subtitles", data, "SubtitleFile") for data in (content.encode(), new)
    )
    for old, unit in zip(before, after, strict=True):
        assert unit.getid() == old.getid()
        is_drawing = r"\p1" in old.source
        text = old.source if is_drawing else old.source.upper()
        assert unit.source.split() == text.split()
        lines = unit.source.split("\n")
        most = len(unit.source) / (1 + old.source.count("\n"))
        longest = max(map(len, unit.source.split()))
        assert len(lines) <= 1 + old.source.count("\n")
        assert max(map(len, lines)) <= most + longest


@given(
    cues=st.lists(cues, min_size=1),
    kind=st.sampled_from(list(HEADS)),
    tag=st.sampled_from(["", "<i>", r"{\an8}", '<font color="#ff0000">']),
    mark=st.sampled_from(["", "\ufeff"]),
    end=st.sampled_from(["\n", "\r\n"]),
)
def test_lines_of_speakers_stay_and_so_do_all_bytes_but_the_text(
    cues, kind, tag, mark, end
):
    cues = [(x, [f"{tag}- {line}" for line in lines]) for x, lines in cues]
    content = (mark + subtitles(kind, cues).replace("\n", end)).encode()
    assert translated(content, f"a.{kind}", str) == content
    cues = [(x, [line.replace("- ", "- new ") for line in lines]) for x, lines in cues]
    new = (mark + subtitles(kind, cues).replace("\n", end)).encode()
    assert translated(content, f"a.{kind}", lambda x: x.replace("- ", "- new ")) == new


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_long_tag_of_a_subtitle_is_not_divided(end):
    cue = '1\n00:00:01,000 --> 00:00:02,000\n<font color="#ff0000">a b\nc d</font>\n'
    new = translated(cue.replace("\n", end), "a.srt", lambda x: f"{x} e {x}").decode()
    assert new.count('<font color="#ff0000">') == 2
    assert len(new.split(end)) == 5


PROPERTIES = r"""
# Not text
! nor this
a = Good morning
 b.c : Gr\u00fc\u00dfe \ud83d\ude00

d\:e\ f=The old \
    man\nand\tthe \:dog
empty=
g   {0} files
"""


@needs_toolkit
def test_properties_keep_keys_and_layout():
    units = toolkit("properties", PROPERTIES.encode(), "javafile")
    new = translated(PROPERTIES, "a.properties", lambda x: f"{x}: \\ “x”")
    assert new.isascii()
    after = toolkit("properties", new, "javafile")
    for old, unit in zip(units, after, strict=True):
        assert unit.getid() == old.getid()
        lines = old.source.split("\n")
        expected = "\n".join(f"{line}: \\ “x”" for line in lines)
        assert unit.source == (expected if old.source else "")
    values = r"(?m)((?:[=:]|g {3}) *)[^\s=:].*"
    layout = re.sub(r"\\\n *", "", PROPERTIES)
    assert re.sub(values, r"\1", new.decode()) == re.sub(values, r"\1", layout)


# Files of markup and catalogues


def test_html_keeps_its_tags():
    page = '<p title="a b">I am <b>very</b> hungry &amp; tired.</p>\n<pre>a b</pre>'
    new = translated(page, "a.HTM").decode()
    assert new == page.replace("I am", "I AM").replace("very", "VERY").replace(
        "hungry &amp; tired", "HUNGRY &amp; TIRED"
    )


PO = """
msgid ""
msgstr ""
"Content-Type: text/plain; charset=UTF-8\\n"
"Plural-Forms: nplurals=2; plural=(n != 1);\\n"

#. Shown at the top
#: a.c:10
#, c-format
msgctxt "menu"
msgid "%d file"
msgid_plural "%d files"
msgstr[0] ""
msgstr[1] ""

msgid "One line\\n"
"and another"
msgstr ""

msgid "done"
msgstr "fertig"

#, fuzzy
msgid "perhaps"
msgstr "vielleicht"
"""


@needs_toolkit
def test_a_catalogue_gets_what_it_lacks():
    """As Babel reads it: forms of the plural, contexts, places and flags stay."""
    old, new = (read_po(io.BytesIO(x)) for x in (PO.encode(), translated(PO, "a.po")))
    assert str(new.locale) == "de"
    lacking = {
        ("%d file", "%d files"): ("%D FILE", "%D FILES"),
        "One line\nand another": "ONE LINE\nAND ANOTHER",
    }
    for before, after in zip(list(old)[1:], list(new)[1:], strict=True):
        assert after.string == lacking.get(before.id, before.string)
        assert (after.id, after.context, after.flags, after.locations) == (
            before.id,
            before.context,
            before.flags,
            before.locations,
        )


XLIFF = """<xliff version="1.2" xmlns="urn:oasis:names:tc:xliff:document:1.2">
<file original="a" source-language="en-US" datatype="plaintext"><body>
<trans-unit id="1"><source>Click <g id="1">the door</g><x id="2"/> &amp; wait</source>
</trans-unit><trans-unit id="2"><source>kept</source><target>bleibt</target>
</trans-unit><trans-unit id="3" translate="no"><source>code</source></trans-unit>
<trans-unit id="4"><source>a &lt;b></source><target/></trans-unit></body></file></xliff>
"""
TMX = """<tmx version="1.4"><header srclang="en-US" datatype="plaintext"/><body>
<tu><tuv xml:lang="de-DE"><seg>bleibt</seg></tuv><tuv xml:lang="en-US"><seg>kept</seg>
</tuv></tu><tu><tuv xml:lang="en-US"><seg>a <bpt i="1">&lt;b></bpt>b<ept i="1"/></seg>
</tuv></tu></body></tmx>
"""


@needs_toolkit
def test_elements_within_the_text_of_xliff_and_tmx_stay():
    """As ElementTree reads them; a new translation waits for a review."""
    new = ElementTree.fromstring(translated(XLIFF, "a.xlf"))
    assert new[0].get("target-language") == "de"
    units = {unit.get("id"): unit for unit in new.iter(f"{new.tag[:-5]}trans-unit")}
    targets = {n: x.find(f"{new.tag[:-5]}target") for n, x in units.items()}
    assert {n: x is not None and "".join(x.itertext()) for n, x in targets.items()} == {
        "1": "CLICK THE DOOR & WAIT",
        "2": "bleibt",
        "3": False,
        "4": "A <B>",
    }
    assert [(x.text, x.tail, x.get("id")) for x in targets["1"]] == [
        ("THE DOOR", None, "1"),
        (None, " & WAIT", "2"),
    ]
    assert targets["1"].get("state") == "needs-review-translation"
    assert units["1"].get("approved") == "no"
    assert targets["2"].attrib == {}
    new = ElementTree.fromstring(translated(TMX, "a.tmx"))
    first, second = (["".join(x.itertext()).strip() for x in tu] for tu in new[1])
    assert first == ["bleibt", "kept"]
    assert second == ["a <b>b", "A <b>B"]
    assert [child.tag for child in new[1][1][1][0]] == ["bpt", "ept"]


def opendocument(**parts):
    """Write an OpenDocument, whose file `mimetype` comes first."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        mimetype = zipfile.ZipInfo("mimetype")
        archive.writestr(mimetype, "application/vnd.oasis.opendocument.text")
        for name, content in parts.items():
            archive.writestr(f"{name}.xml", content)
    return out.getvalue()


ODT = """<?xml version="1.0"?><d xmlns:text="urn:t" xmlns:office="urn:o"><office:body>
<text:h>The dog</text:h><text:p>I am <text:span a="x">very<text:s/></text:span>hungry
&amp; tired, page <text:page-number>one</text:page-number>.</text:p></office:body></d>
"""


def test_an_opendocument_keeps_its_layout():
    data = opendocument(styles="<a/>", content=ODT, meta="<title>Mine</title>")
    files, documents = [], []
    for content in (data, translated(data, "a.odt")):
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            assert archive.read("meta.xml") == b"<title>Mine</title>"
            files.append([(x.filename, x.compress_type) for x in archive.infolist()])
            documents.append(ElementTree.fromstring(archive.read("content.xml")))
    assert files[0] == files[1]
    elements = [[(x.tag, x.attrib) for x in document.iter()] for document in documents]
    assert elements[0] == elements[1]
    heading, paragraph = documents[1][0]
    assert heading.text == "THE DOG"
    texts = ["I AM ", "VERY", "HUNGRY & TIRED, PAGE ", "one", "."]
    assert [*paragraph.itertext()] == texts


EXAMPLES = {
    ".json": b'{"a": ["b c", 1]}',
    ".odt": opendocument(content=ODT),
    ".po": PO.encode(),
    ".properties": PROPERTIES.encode(),
    ".tmx": TMX.encode(),
    ".xliff": XLIFF.encode(),
}


@needs_toolkit
@given(
    kind=st.sampled_from(list(EXAMPLES)),
    place=st.integers(0, 2000),
    removed=st.integers(0, 20),
    added=st.binary(max_size=3) | st.sampled_from([b"<", b'"', b"\\ud800"]),
)
def test_a_damaged_file_is_translated_or_refused(kind, place, removed, added):
    data = EXAMPLES[kind]
    place %= len(data)
    damaged = data[:place] + added + data[place + removed :]
    with suppress(ValueError):  # and no other error
        translated(damaged, f"a{kind}")


# The command


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.docx", b"PK", "got .docx; an office program saves .docx as .odt"),
        ("a", b"text", "got no ending"),
        ("a.srt", b"Caf\xe9", "expected .srt, in UTF-8: 'utf-8' codec can't decode"),
        ("a.srt", b"no cue", "expected text to translate, found none"),
        ("a.json", b"{", "expected .json, in UTF-8: Expecting property name"),
        ("a.odt", b"PK", "expected .odt, in UTF-8: File is not a zip file"),
        ("a.csv", b'a b,"c', "a.csv: expected .csv, in UTF-8: unexpected end of data"),
    ],
)
def test_other_files_are_refused_in_one_line(name, content, message, tmp_path, capsys):
    (tmp_path / name).write_bytes(content)
    new = tmp_path / f"new{Path(name).suffix}"
    assert main([str(tmp_path / name), str(new)]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("minitransformer file: error: ")
    assert message in line
    assert not new.exists()


@needs_toolkit
@pytest.mark.parametrize("kind", [".po", ".tmx", ".xlf"])
def test_what_the_toolkit_cannot_read_is_refused(kind):
    with pytest.raises(ValueError, match=f"^a{kind}: expected {kind}: "):
        file_lines(b"<", f"a{kind}", EN_DE)


def test_a_toolkit_that_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "translate.storage.factory", None)
    with pytest.raises(RuntimeError, match=r"pip install 'minitransformer.files.'"):
        file_lines(PO.encode(), "a.po", EN_DE)


def test_the_command_replaces_nothing_but_text(tmp_path, capsys):
    """The shipped model translates; a subtitle's sentence goes over two lines."""
    source, target = tmp_path / "film.srt", tmp_path / "film.de.srt"
    source.write_text(subtitles("srt", [(5, ["The dog", "runs."])]))
    command = ["--threads", "1", "--model", "en-de"]
    target.write_bytes(b"\0")
    for output, message in [
        (source, "expected a file to write, got one that is read"),
        (target, "is not text: it is not replaced"),
        (tmp_path / "film.vtt", "expected the ending of film.srt"),
    ]:
        assert main([*command, str(source), str(output)]) == 2
        assert message in capsys.readouterr().err
    assert target.read_bytes() == b"\0"
    target.write_text("old")
    assert main([*command, str(source), str(target)]) == 0
    assert target.read_text() == subtitles("srt", [(5, ["Der Hund", "läuft."])])
