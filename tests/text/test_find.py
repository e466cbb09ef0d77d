"""Text is found by settings, and again when a run is resumed."""

from types import SimpleNamespace

import pytest

from minitransformer.settings.text_config import TextConfig
from minitransformer.text.find import find_text, text_of
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


def test_text_that_was_moved_is_named(tmp_path):
    settings = SimpleNamespace(text={"train": (str(tmp_path / "a"), "b")})
    with pytest.raises(FileNotFoundError, match="a; if a run's text was moved, change"):
        text_of(settings)
