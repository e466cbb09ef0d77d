"""Lines of text files, and where files are found."""

import gzip
import os
import re
import textwrap
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minitransformer.text import lines as text
from minitransformer.text import pairs
from minitransformer.text.lines import (
    join_paragraphs,
    read_lines,
    read_open_file,
    source_lines,
)
from minitransformer.text.pairs import TextPair


@pytest.mark.parametrize("compressed", [False, True])
def test_only_a_line_feed_ends_a_line(tmp_path, compressed):
    text = "\ufeffa\u0085b\u2028c\x0bd\re\r\n\n\ufeff last".encode()
    path = tmp_path / ("x.txt.gz" if compressed else "x.txt")
    path.write_bytes(gzip.compress(text) if compressed else text)
    assert list(read_lines(path)) == ["a\u0085b\u2028c\x0bd\re", "", "\ufeff last"]


WHOLE = gzip.compress(b"some text\n" * 99)


@pytest.mark.parametrize("data", [b"plain", WHOLE[:-9], WHOLE[:12] + b"x" * 30])
def test_a_file_that_is_not_gzip_is_named(tmp_path, data):
    path = tmp_path / "x.en.gz"
    path.write_bytes(data)
    for read in (lambda: list(read_lines(path)), TextPair(path, path).digest):
        with pytest.raises(ValueError, match=r"x\.en\.gz: expected a gzip file"):
            read()


def test_a_pipe_gives_its_lines_as_they_come(monkeypatch):
    reading, writing = os.pipe()
    with open(reading) as file:
        monkeypatch.setattr("sys.stdin", file)
        os.write(writing, b"one\ntwo\nth")
        lines = source_lines((), None, 10)
        assert next(lines) == ["one", "two"]
        os.write(writing, b"ree\r\n\n")
        assert next(lines) == ["three", ""]
        os.write(writing, b"a\nb\nc\nlast")
        os.close(writing)
        assert list(lines) == [["a", "b", "c", "last"]]


def test_a_list_of_long_lines_is_short(tmp_path, monkeypatch):
    """However many lines a list may have, it has few characters."""
    monkeypatch.setattr(text, "MAX_LINE", 100_000)
    (tmp_path / "long").write_text(f"{'x' * 30_000}\n" * 11)
    with open(tmp_path / "long") as file:
        monkeypatch.setattr("sys.stdin", file)
        for path in (tmp_path / "long", None):
            sizes = [len(lines) for lines in source_lines((), path, 2000)]
            assert (sum(sizes), max(sizes) <= 6) == (11, True)


@pytest.mark.parametrize("read", ["file", "pipe"])
def test_a_line_without_end_is_refused(monkeypatch, read):
    """The device gives zeros for ever; a line as long as the limit is read."""
    monkeypatch.setattr(text, "MAX_LINE", 1 << 17)
    with open("/dev/zero", "rb") as zeros:
        lines = {
            "file": lambda: read_lines(Path("/dev/zero")),
            "pipe": lambda: read_open_file(zeros.fileno()),
        }[read]()
        message = "line 1: expected at most 131,072 bytes before a line feed, got more"
        with pytest.raises(ValueError, match=message):
            next(lines)


def test_errors_of_reading_and_writing_name_the_file(tmp_path, monkeypatch, capfd):
    with pytest.raises(OSError, match="Bad file descriptor") as caught:
        list(read_open_file(1 << 20))
    assert caught.value.filename == "standard input"
    with pytest.raises(IsADirectoryError, match=str(tmp_path)):
        text.open_output(tmp_path).__enter__()
    with open("/dev/full", "w") as full, monkeypatch.context() as patches:
        patches.setattr("sys.stdout", full)
        with pytest.raises(OSError, match="No space"), text.open_output(None) as out:
            out.write("x")
        full.buffer.raw.close()


def test_output_of_that_name_is_compressed_always_to_the_same_bytes(tmp_path):
    written = []
    for folder in ("a", "b"):
        path = tmp_path / folder / "out.gz"
        path.parent.mkdir()
        with text.open_output(path) as file:
            file.write("süß\n")
            file.flush()
            file.write("x\n")
        written.append(path.read_bytes())
    assert gzip.decompress(written[0]) == "süß\nx\n".encode()
    assert written[0] == written[1]
    assert written[0][4:8] == bytes(4)  # the time
    with suppress(KeyboardInterrupt), text.open_output(path) as file:
        file.write("y\n")
        raise KeyboardInterrupt
    assert path.read_bytes() == written[1]
    assert [*path.parent.iterdir()] == [path]


def test_lengths_of_files_are_compared_and_pipes_left_alone(tmp_path):
    one, two, pipe = (tmp_path / name for name in ("one", "two", "pipe"))
    one.write_text("a\n")
    two.write_text("a\nb\n")
    os.mkfifo(pipe)
    for pair in ((one, one), (one, None), (None, two), (None, None), (pipe, one)):
        pairs.check_files(None, *pair)
    with pytest.raises(ValueError, match=r"as many lines in .*one as in .*two"):
        pairs.check_files(None, two, one)
    with pytest.raises(FileNotFoundError):
        pairs.check_files(None, None, tmp_path / "none")


PARAGRAPHS = st.lists(
    st.lists(st.text("abcÄß.,!?", min_size=1, max_size=12), min_size=1)
)
MARGINS = "", "> ", "   ", "> >  "


@given(PARAGRAPHS, st.integers(40, 72), st.sampled_from(MARGINS))
def test_paragraphs_that_were_wrapped_are_whole_again(paragraphs, width, margin):
    whole = [" ".join(words) for words in paragraphs]
    wrapped = [
        textwrap.indent("\n".join(textwrap.wrap(x, width)), margin) for x in whole
    ]
    found = join_paragraphs("\n\n".join(wrapped).split("\n"))
    assert found == "\n\n".join(margin + x for x in whole).split("\n")


@given(st.lists(st.text(" >-*1.aB#")))
def test_no_word_is_lost_where_lines_are_joined(lines):
    joined = " ".join(join_paragraphs(lines))
    assert re.sub(r"[\s>-]", "", joined) == re.sub(r"[\s>-]", "", "".join(lines))


def test_paragraphs_begin_where_a_reader_sees_it():
    text = """\
    Dear Tom,
    we live near the vil-
    lage that you know, which has Vor-
    und Nachteile, and we have there
      - a garden with
        trees,
      - a cellar that is large and very old

    1. and big rooms
    > When will you come to see us? We hope
    > that it will be in May?
    >
    > > Before the end of this month, I think,
    > and not later than that. What do you say?
    Best wishes
    Mary"""
    assert join_paragraphs(textwrap.dedent(text).split("\n")) == [
        "Dear Tom,",
        "we live near the village that you know, which has Vor- und Nachteile, and we "
        "have there",
        "  - a garden with trees,",
        "  - a cellar that is large and very old",
        "",
        "1. and big rooms",
        "> When will you come to see us? We hope that it will be in May?",
        ">",
        "> > Before the end of this month, I think,",
        "> and not later than that. What do you say?",
        "Best wishes",
        "Mary",
    ]
