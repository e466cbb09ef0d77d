"""The one rule for outputs, with every command and every way to name a file."""

import gzip
import os
import shutil
from pathlib import Path

import pytest

import translate
from minitransformer.commands import (
    average,
    export,
    mix,
    parse,
    plot,
    split,
    vocabulary,
)
from minitransformer.runs.run_directory import RunDirectory
from minitransformer.runs.state import RunState
from support.in_process import run_main
from support.models import save_small_model

TREES = "(TOP (S (NP (NN cat)) (VP (VBZ sits))))\n"
LINES = "".join(f"the cat number {i} sat\tdie Katze {i} sass\n" for i in range(40))

COMMANDS = {
    "average": (average.main, "OUT run/step-00000001.safetensors model"),
    "export": (export.main, "float16 run/step-00000001.safetensors OUT"),
    "ctranslate2": (export.main, "ctranslate2 run/step-00000001.safetensors OUT"),
    "vocabulary": (vocabulary.main, "OUT text --vocab-size 20"),
    "split": (split.main, "pairs OUT --source a --target b --val 3 --test 3"),
    "mix": (mix.main, "OUT corpus --source a --target b"),
    "linearise": (parse.main, "linearise OUT trees"),
    "restore": (parse.main, "restore text same -o OUT"),
    "plot": (plot.main, "run --what loss -o OUT"),
    "translate": (translate.main, "--model model -i text -o OUT --threads 1"),
    "score": (translate.main, "--model model -i text --score same -o OUT --threads 1"),
    "attention": (translate.main, "--model model --attention OUT cat --threads 1"),
}


def symbolic_link(path):
    Path("link").symlink_to(path)
    return "link"


def hard_link(path):
    os.link(path, "link")
    return "link"


NAMES = {
    "itself": str,
    "absolute": lambda path: str(Path(path).absolute()),
    "by the folder above": lambda path: f"run/../{path}",
    "by a linked folder": lambda path: f"linked/{path}",
    "symbolic link": symbolic_link,
    "hard link": hard_link,
}


@pytest.fixture
def folder(place, model_path):
    run = RunDirectory(Path("run"))
    run.path.mkdir()
    shutil.copy(model_path, "model")
    save_small_model(run.checkpoint(1), RunState(step=1))
    run.config.write_text("{}")
    run.metrics.write_text('{"step": 1, "loss": 2.0, "seconds": 1.0}\n')
    Path("linked").symlink_to(".")
    for name in ("text", "same"):
        Path(name).write_text("the cat\nsat on\n")
    Path("pairs").write_text(LINES)
    Path("trees").write_text(TREES)
    Path("corpus").mkdir()
    for side in "ab":
        Path("corpus", f"train.{side}").write_text("a line\n")


def contents():
    paths = (x for x in Path().rglob("*") if x.is_file() and x.suffix != ".svg")
    return {path: path.read_bytes() for path in paths}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("command", ["translate", "score", "restore", "vocabulary"])
def test_nothing_that_is_read_is_replaced(folder, command, name):
    main, words = COMMANDS[command]
    place = NAMES[name]("text")
    code, _, error = run_main(main, *words.replace("OUT", place).split())
    assert (code, error.count("\n")) == (2, 1)
    assert "expected a file to write, got one that is read" in error
    assert Path("text").read_text() == "the cat\nsat on\n"


EXTRAS = {"plot": "matplotlib", "ctranslate2": "ctranslate2"}
SUFFIXES = {"plot": ".svg", "attention": ".html"}
FOLDERS = {"split", "mix", "ctranslate2"}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_may_be_repeated(folder, command):
    """It writes the same; into a folder it writes once."""
    if command in EXTRAS:
        pytest.importorskip(EXTRAS[command])
    main, words = COMMANDS[command]
    words = words.replace("OUT", f"out{SUFFIXES.get(command, '')}").split()
    code, _, error = run_main(main, *words)
    assert code == 0, error
    before = contents()
    code, _, error = run_main(main, *words)
    assert (code == 0) == (command not in FOLDERS), error
    assert contents() == before


@pytest.mark.parametrize(
    ("command", "name", "old", "replaced"),
    [
        ("translate", "o", b"a text of\nearlier\n", True),
        ("translate", "o", b"", True),
        ("translate", "o.gz", gzip.compress(b"a text of\nearlier\n"), True),
        ("translate", "o.gz", b"", True),
        ("translate", "o.gz", gzip.compress(b"archive\0\0"), False),
        ("translate", "o.gz", b"\x1f\x8b\x08 cut short", False),
        ("translate", "o.gz", b"a text", False),
        ("translate", "o", b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n", False),
        ("translate", "o", b"%PDF-1.1\nin ASCII\n", False),
        ("translate", "o", b"#!/bin/sh\n" * 9999 + b"\0", False),
        ("translate", "o", "a text of é".encode() * 99_999, True),
        ("plot", "o.svg", b"<?xml", True),
        ("plot", "o.png", b"\x89PNG\r\n\0\0", True),
        ("plot", "o.png", b"a text", False),
        ("attention", "o.html", b"<!doctype", True),
        ("score", "run/metrics.jsonl", b"{}\n", False),
        ("linearise", "d/train.words", b"a text", False),
        ("linearise", "d/train.words", b"cat sits\n", True),
    ],
)
def test_text_and_pictures_replace_their_own_kind(folder, command, name, old, replaced):
    if command in EXTRAS:
        pytest.importorskip(EXTRAS[command])
    main, words = COMMANDS[command]
    Path(name).parent.mkdir(exist_ok=True)
    Path(name).write_bytes(old)
    out = "d" if command == "linearise" else name
    code, _, error = run_main(main, *words.replace("OUT", out).split())
    assert (code == 0) == replaced, error
    if not replaced:
        assert error.count("\n") == 1
        told = command == "translate" and f"{name} is not text: it is not replaced"
        assert not told or told in error
        assert Path(name).read_bytes() == old


def test_standard_output_is_no_input_either(folder, capfd):
    """`translate.py -i text >> text` would read what it writes."""
    with open("text", "a") as out:
        saved = os.dup(1)
        os.dup2(out.fileno(), 1)
        try:
            code = translate.main(["--model", "model", "-i", "text"])
        finally:
            os.dup2(saved, 1)
            os.close(saved)
    assert code == 2
    assert "standard output: expected a file to write" in capfd.readouterr().err
    assert Path("text").read_text() == "the cat\nsat on\n"
