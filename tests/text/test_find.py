"""Text is found by settings, and again when a run is resumed."""

import shutil
from types import SimpleNamespace

import pytest

from minitransformer.settings.text_config import TextConfig
from minitransformer.text.find import find_text, text_of
from minitransformer.text.grammar import corpus
from minitransformer.text.pairs import TextPair


def test_text_is_found_in_a_folder(tmp_path):
    names = "train.en.gz train.de val.en val.de test_x.en test_x.en.gz test_x.de"
    for name in [*names.split(), "test_y.en", "test_y.de"]:
        (tmp_path / name).write_bytes(b"")
    config = TextConfig(data=str(tmp_path), source="en", target="de")
    found = find_text(config)
    assert found["train"] == TextPair(tmp_path / "train.en.gz", tmp_path / "train.de")
    assert found["test"].source.name == "test_x.en"
    (tmp_path / "val.de").unlink()
    with pytest.raises(ValueError, match=r"expected val\.de beside .*val\.en"):
        find_text(config)
    missing = TextConfig(data=str(tmp_path), source="fr", target="it")
    with pytest.raises(ValueError, match=r"expected train\.fr and train\.it"):
        find_text(missing)


def test_a_run_on_the_built_in_corpus_outlives_the_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "SIZES", {"train": 50, "val": 5, "test": 5})
    first = corpus.built_in_corpus(tmp_path / "old")
    files = {s: (str(pair.source), str(pair.target)) for s, pair in first.items()}
    settings = SimpleNamespace(text=files)
    digest = first["train"].digest()
    assert text_of(settings, tmp_path / "new") == first
    shutil.rmtree(tmp_path / "old")
    again = text_of(settings, tmp_path / "new")
    assert again["train"].source.is_relative_to(tmp_path / "new")
    assert again["train"].digest() == digest
    files["val"] = (str(tmp_path / "mine"), files["val"][1])
    with pytest.raises(FileNotFoundError, match="if a run's text was moved"):
        text_of(settings, tmp_path / "new")
