"""`minitransformer mix`: one corpus of several, with tags and repetitions."""

import pytest

from minitransformer.commands import mix
from minitransformer.text.find import find_splits
from support.in_process import rows, run_main

TEXTS = {
    "a/train.en": "one\n\ntwo\n",
    "a/train.de": "eins\n\nzwei\n",
    "a/val.en": "v\n",
    "a/val.de": "w\n",
    "b/train.en": "three\n",
    "b/train.fr": "trois\n",
    "b/test_x.en": "four\n",
    "b/test_x.fr": "quatre\n",
}


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Two folders: one of English to German with a blank line, one to French."""
    monkeypatch.chdir(tmp_path)
    for name, text in TEXTS.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def run(*arguments, code=0):
    found, out, error = run_main(mix.main, *arguments)
    assert found == code, error
    return error if code else out


def test_several_corpora_become_one(place):
    flags = ["--source", "en", "--target", "de", "fr", "--repeat", 1, 2]
    out = run("both", "a", "b", *flags, "--tag", "<2de>", "<2fr>")
    assert out == (
        "5 train, 1 val, 1 test pairs, for train.py --data both --source en "
        "--target de-fr\n"
    )
    found = find_splits(place / "both", "en", "de-fr")
    pairs = {split: list(text.lines()) for split, text in found.items()}
    french = ("<2fr> three", "trois")
    german = [("<2de> one", "eins"), ("", ""), ("<2de> two", "zwei")]
    assert pairs == {
        "train": [*german, french, french],
        "val": [("<2de> v", "w")],
        "test": [("<2fr> four", "quatre")],
    }


def test_one_folder_stands_for_both_directions(place):
    run("both", "a", "--source", "en", "de", "--target", "de", "en")
    pairs = list(find_splits(place / "both", "en-de", "de-en")["train"].lines())
    english = ["one", "", "two"]
    german = ["eins", "", "zwei"]
    assert pairs == [*zip(english, german), *zip(german, english)]  # noqa: B905


# The exit code, the arguments, and what the error says.
WRONG = """\
2 | both a b --source en --target de fr xx | CORPUS: expected 1 or 3, one
2 | both a --source en --target de --repeat 0 | --repeat
2 | both a --source en --target en | expected two languages, got en for
1 | both a gone --source en --target de | text, found none at gone
1 | both a b --source en --target de | expected train.de beside b/train.en
2 | a b --source en --target fr | a: expected a file, or a new or an empty
"""


@pytest.mark.parametrize(("code", "arguments", "message"), rows(WRONG))
def test_what_cannot_be_mixed_is_refused(place, arguments, code, message):
    before = sorted(place.rglob("*"))
    error = run(*arguments.split(), code=int(code))
    assert message in error
    assert error.count("\n") == 1
    assert sorted(place.rglob("*")) == before
