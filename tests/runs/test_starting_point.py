"""Fine-tuning: what a new model takes over from a trained one, number by number."""

from pathlib import Path

import numpy as np
import pytest

from minitransformer.model.transformer import Transformer
from minitransformer.runs import checkpoint
from minitransformer.runs.starting_point import choose_model, copy_weights
from minitransformer.settings.config import ModelConfig, RunConfig, TrainingConfig
from minitransformer.settings.decoding_config import DecodingConfig
from minitransformer.settings.options import UsageError
from minitransformer.text.tokenizer import Tokenizer
from support.models import CAT_LINES, save_small_model

OTHER_LINES = [line.replace("mat", "tam") for line in CAT_LINES]


def not_learned():
    raise AssertionError("expected the vocabulary of the other model")


def run_from(config, start, vocabulary=None):
    """The settings of a run that begins from another model."""
    return RunConfig(
        "x",
        config,
        TrainingConfig(),
        DecodingConfig(),
        text={"train": ("a", "b")},
        vocabulary=vocabulary,
        start=start,
    )


def test_everything_is_taken_over_with_the_vocabulary(model_path):
    other = checkpoint.load(Path(model_path))
    config, start = choose_model(Path(model_path), {}, {"dropout": 0.4})
    assert vars(config) == {**vars(other.model.config), "dropout": 0.4}
    model = Transformer(config, seed=9)
    tokenizer, copied = copy_weights(run_from(config, start), model, not_learned)
    assert tokenizer.model == other.tokenizer.model
    expected = dict(other.model.named_parameters())
    for name, parameter in model.named_parameters():
        np.testing.assert_array_equal(parameter.data, expected[name].data, name)
    taken = "with the embeddings of 50 of 50 word pieces"
    assert copied == f"from        {Path(model_path).absolute()}, {taken}"


@pytest.mark.parametrize("positions", ["sinusoidal", "learned"])
def test_of_another_vocabulary_the_pieces_that_both_have(tmp_path, positions):
    path = Path(save_small_model(tmp_path / "x.safetensors", positions=positions))
    other, learned = checkpoint.load(path), Tokenizer.train(OTHER_LINES, 45)
    config, start = choose_model(path, {}, {"vocab_size": 45})
    model, drawn = Transformer(config, seed=9), Transformer(config, seed=9)
    tokenizer, copied = copy_weights(run_from(config, start), model, lambda: learned)
    assert tokenizer is learned
    known = {p: i for i, p in enumerate(other.tokenizer.pieces(range(50)))}
    taken = 0
    for i, piece in enumerate(learned.pieces(range(45))):
        row = drawn.embedding.table.data[i]
        if piece in known:
            row, taken = other.model.embedding.table.data[known[piece]], taken + 1
        np.testing.assert_array_equal(model.embedding.table.data[i], row, piece)
    assert 10 < taken < 45
    assert copied.endswith(f"with the embeddings of {taken} of 45 word pieces")
    expected = dict(other.model.named_parameters())
    for name, parameter in model.named_parameters():
        if name != "embedding.table":
            np.testing.assert_array_equal(parameter.data, expected[name].data, name)


def test_a_vocabulary_that_is_named_replaces_one_of_the_same_size(model_path):
    config, start = choose_model(Path(model_path), {}, {})
    learned = Tokenizer.train(OTHER_LINES, 50)
    settings = run_from(config, start, "own.model")
    tokenizer, _ = copy_weights(settings, Transformer(config), lambda: learned)
    assert tokenizer is learned


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
