"""The model in the box: where it is found, and that everything takes its name."""

import re
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import minitransformer
from minitransformer.commands import export
from minitransformer.runs import checkpoint, models
from minitransformer.runs.models import find_checkpoint
from support.in_process import run_translate
from support.models import CAT_LINES, save_small_run
from support.scripts import SHORT


def test_it_translates_where_there_is_no_run(box, model_path):
    for flags in ((), ("--model", "en-de")):
        told = run_translate(*SHORT, *flags, CAT_LINES[0])
        expected = run_translate(*SHORT, "--model", str(box), CAT_LINES[0])
        assert told[:2] == expected[:2]
        named = "" if flags else "translate.py: using the shipped model en-de: English "
        assert told[2].startswith(named)
        assert flags or told[2].endswith("; --model names another\n")
        assert told[2].count("\n") == (not flags)
    Path("words").write_text("the cat\n")
    code, _, error = run_translate("--score", "words", CAT_LINES[0])
    assert (code, "using the shipped model" in error) == (0, True)
    code, _, error = run_translate("--attention", "heads.html", CAT_LINES[0])
    assert (code, Path("heads.html").exists()) == (0, True), error
    for translator in (minitransformer.load(), minitransformer.load("en-de")):
        table = translator.model.embedding.table.data
        assert table.dtype == np.float32


def test_a_run_of_its_name_comes_first(box):
    Path("en-de").mkdir()  # the data, perhaps
    assert find_checkpoint(Path("en-de")) == box
    Path("en-de").rmdir()
    save_small_run(Path("en-de"))
    assert find_checkpoint(Path("en-de")) == Path("en-de/best.safetensors")
    _, _, error = run_translate(*SHORT, "--model", "en-de", "x")
    assert error == ""


def test_only_its_name_is_its_name(box):
    names = "en-fr", "", ".", "..", "../models/en-de", "en-de/", "\0"
    assert [x for x in names if models.shipped_model(x)] == ["en-de/"]
    for name in ("en-fr", "no/where"):
        with pytest.raises(FileNotFoundError) as caught:
            minitransformer.load(name)
        expected = "expected a run, a checkpoint or a shipped model (en-de), found"
        assert str(caught.value).startswith(f"{name}: {expected}")


def test_16_bits_are_those_of_numpy(box, model_path, capsys):
    exact, half = checkpoint.load(Path(model_path)), checkpoint.load(box)
    expected = exact.parameters.data.astype(np.float16).astype(np.float32)
    np.testing.assert_array_equal(half.parameters.data, expected)
    assert half.parameters.data.dtype == np.float32
    assert half.tokenizer.model == exact.tokenizer.model
    saved = Path(model_path).stat().st_size - box.stat().st_size
    assert saved == pytest.approx(2 * expected.size, abs=200)
    wrong = ["float16", model_path, "out", "--quantization", "int8"]
    assert export.main(wrong) == 2
    assert export.main(["float16", str(box), str(box)]) == 2  # would lose digits
    assert "expected a file to write, got one that is read" in capsys.readouterr().err


def test_8_bits_are_whole_numbers_with_a_scale_for_each_row(tmp_path, model_path):
    path = tmp_path / "small.safetensors"
    exact = checkpoint.load(Path(model_path))
    exact.model.embedding.table.data[5] = 0
    checkpoint.save(path, exact, "int8")
    read, stored = checkpoint.load(path), load_file(path)
    rounded = dict(read.model.named_parameters())
    for name, a in exact.model.named_parameters():
        b = rounded[name]
        if a.data.ndim == 1:
            np.testing.assert_array_equal(b.data, a.data.astype(np.float16))
            continue
        step = np.abs(a.data.astype(float)).max(axis=1, keepdims=True) / 127
        assert (np.abs(b.data - a.data) <= 0.501 * step).all(), name
        largest = np.abs(stored[name].astype(int)).max(axis=1)
        np.testing.assert_array_equal(largest, np.where(step[:, 0] > 0, 127, 0))
    stored["embedding.table.scales"][:] = np.nan
    with safe_open(path, "np") as file:
        save_file(stored, path, file.metadata())
    with pytest.raises(ValueError, match=r"table\.scales: expected finite"):
        checkpoint.load(path)


@pytest.mark.parametrize(
    ("name", "does", "source", "expected"),
    [
        ("en-de", "English to German", "Where is the station?", "Bahnhof"),
        ("de-en", "German to English", "Wo ist der Bahnhof?", "station"),
    ],
)
def test_the_models_of_this_package(place, name, does, source, expected):
    folder = models.SHIPPED / name
    assert (folder / "model.safetensors").stat().st_size <= 13_000_000
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert card.startswith(f"# {name}: {does} (")
    for origin in ("manythings.org/anki", "tatoeba.org", "CC BY 2.0", "statmt.org"):
        assert origin in card
    assert re.search(r"^    bash examples/en-de/train\.sh ", card, re.MULTILINE)
    [translation] = minitransformer.translate(minitransformer.load(name), [source])
    assert expected in translation
