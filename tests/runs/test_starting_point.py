"""Fine-tuning: what a new model takes over from a trained one, number by number."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from minitransformer.model.transformer import Transformer
from minitransformer.runs import checkpoint
from minitransformer.runs.starting_point import (
    choose_model,
    copy_weights,
    first_checkpoint,
    first_tokenizer,
)
from minitransformer.settings.config import ModelConfig
from minitransformer.settings.options import UsageError
from minitransformer.text.tokenizer import Tokenizer
from support.models import CAT_LINES, save_small_model
from support.runs import SETTINGS

OTHER_LINES = [line.replace("mat", "tam") for line in CAT_LINES]


def test_everything_is_taken_over_with_the_vocabulary(model_path):
    other = checkpoint.load(Path(model_path))
    config, start = choose_model(Path(model_path), {}, {"dropout": 0.4})
    assert vars(config) == {**vars(other.model.config), "dropout": 0.4}
    settings = replace(SETTINGS, model=config, start=start)
    begun, copied = first_checkpoint(settings, train=None, cache=None, cores=1)
    assert begun.tokenizer.model == other.tokenizer.model
    expected = dict(other.model.named_parameters())
    for name, parameter in begun.model.named_parameters():
        np.testing.assert_array_equal(parameter.data, expected[name].data, name)
    taken = "with the embeddings of 50 of 50 word pieces"
    assert copied == f"from        {Path(model_path).absolute()}, {taken}"


@pytest.mark.parametrize("positions", ["sinusoidal", "learned"])
def test_of_another_vocabulary_the_pieces_that_both_have(tmp_path, positions):
    path = Path(save_small_model(tmp_path / "x.safetensors", positions=positions))
    other, learned = checkpoint.load(path), Tokenizer.train(OTHER_LINES, 45)
    config, _ = choose_model(path, {}, {"vocab_size": 45})
    model, drawn = Transformer(config, seed=9), Transformer(config, seed=9)
    copied = copy_weights(other, model, learned)
    known = {p: i for i, p in enumerate(other.tokenizer.pieces(range(50)))}
    taken = 0
    for i, piece in enumerate(learned.pieces(range(45))):
        row = drawn.embedding.table.data[i]
        if piece in known:
            row, taken = other.model.embedding.table.data[known[piece]], taken + 1
        np.testing.assert_array_equal(model.embedding.table.data[i], row, piece)
    assert 10 < taken < 45
    assert copied == taken
    expected = dict(other.model.named_parameters())
    for name, parameter in model.named_parameters():
        if name != "embedding.table":
            np.testing.assert_array_equal(parameter.data, expected[name].data, name)


def test_a_vocabulary_that_is_named_replaces_one_of_the_same_size(tmp_path, model_path):
    config, start = choose_model(Path(model_path), {}, {})
    learned = Tokenizer.train(OTHER_LINES, 50)
    (tmp_path / "own.model").write_bytes(learned.model)
    vocabulary = str(tmp_path / "own.model")
    settings = replace(SETTINGS, model=config, start=start, vocabulary=vocabulary)
    other = checkpoint.load(Path(model_path))
    tokenizer = first_tokenizer(settings, other, train=None, cache=None, cores=1)
    assert tokenizer.model == learned.model != other.tokenizer.model


def test_a_beginning_is_told_by_the_parameters_that_are_drawn(tmp_path):
    """By which checkpoints of different beginnings are not averaged."""
    (tmp_path / "v").write_bytes(Tokenizer.train(CAT_LINES, 50).model)
    settings = replace(SETTINGS, vocabulary=str(tmp_path / "v"))
    found = []
    for seed in (1, 1, 2):
        training = replace(SETTINGS.training, seed=seed)
        begun, _ = first_checkpoint(replace(settings, training=training), None, None, 1)
        found.append(begun.state.origin)
    assert 0 != found[0] == found[1] != found[2]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"d_model": 16}, "--d-model: expected 8, as in .*, or nothing, got 16"),
        ({"positions": "learned"}, "--positions: expected sinusoidal, as in"),
        ({"dropout": 1.0}, "dropout: expected below 1"),
    ],
)
def test_another_shape_is_wrong_usage(model_path, given, message):
    dropout = {"attention_dropout": 0.5, "relu_dropout": 0.5}
    choose_model(Path(model_path), {}, {"d_model": 8, **dropout})
    with pytest.raises(UsageError, match=message):
        choose_model(Path(model_path), {}, given)


def test_a_preset_says_no_more_about_the_model_than_its_dropout(model_path):
    dropout = {"dropout": 0.3, "attention_dropout": 0.2, "relu_dropout": 0.1}
    preset = {"d_model": 512, "vocab_size": 99, **dropout, "steps": 7}
    config, _ = choose_model(Path(model_path), preset, {})
    own = checkpoint.load(Path(model_path)).model.config
    assert vars(config) == {**vars(own), **dropout}
    assert choose_model(None, {"d_ff": 3}, {}) == (ModelConfig(d_ff=3), None)
