"""Checkpoints: saving, loading, averaging, damaged files."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from minitransformer.model.parameters import ParameterBuffer
from minitransformer.model.transformer import Transformer
from minitransformer.runs import checkpoint
from minitransformer.runs.checkpoint import Checkpoint
from minitransformer.runs.run_directory import RunDirectory
from minitransformer.runs.starting_point import last_checkpoint
from minitransformer.runs.state import RunState
from minitransformer.settings.config import TrainingConfig
from minitransformer.text.tokenizer import Tokenizer
from minitransformer.training.averaging import mean_of
from support.damage import rewrite_checkpoint
from support.models import tiny_config

LINES = [f"the cat number {i} sat on the mat" for i in range(100)]
CONFIG = tiny_config(vocab_size=40, d_ff=16)


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train(LINES, 40)


def make(tokenizer, seed=1, moments=True) -> Checkpoint:
    model = Transformer(CONFIG, seed)
    parameters = ParameterBuffer(model)
    both = parameters.data * 2, parameters.data**2
    state = RunState(step=7, seconds=0.1 + 0.2, gradient_norm=1.0)
    return Checkpoint(model, tokenizer, parameters, state, both if moments else None)


@pytest.fixture
def saved(tmp_path, tokenizer):
    path = tmp_path / "step-00000007.safetensors"
    checkpoint.save(path, make(tokenizer))
    return path


def test_everything_comes_back_bit_for_bit(saved, tokenizer):
    original, loaded = make(tokenizer), checkpoint.load(saved, with_moments=True)
    np.testing.assert_array_equal(loaded.parameters.data, original.parameters.data)
    np.testing.assert_array_equal(loaded.moments, original.moments)
    assert loaded.state == original.state
    assert loaded.model.config == CONFIG
    assert loaded.tokenizer.model == tokenizer.model
    assert [p.name for p in saved.parent.iterdir()] == [saved.name]


def test_a_state_that_is_not_finite_is_json_and_the_worst(tmp_path, tokenizer):
    path, made = tmp_path / "best.safetensors", make(tokenizer)
    made.state = RunState(best_loss=math.inf, gradient_norm=math.nan, best_bleu=4.0)
    checkpoint.save(path, made)
    with safe_open(path, "np") as file:
        text = file.metadata()["state"]
    assert text.count(": null") == 3  # with loss_scale
    recorded = checkpoint.recorded_state(path)
    assert [recorded.best_cost(x) for x in ("loss", "bleu")] == [math.inf, -4]


TABLE = "embedding.table"
HUGE_CONFIG = json.dumps({**vars(CONFIG), "d_ff": 10**15, "encoder_layers": 10**9})
DEEP_JSON = "[" * 100_000
ONE_HEAD = json.dumps({**vars(CONFIG), "num_heads": 1})


@pytest.mark.parametrize(
    ("tensors", "metadata", "message"),
    [
        ({TABLE: lambda t: t[:-1]}, {}, r"embedding.table: expected float32 \(40, 8\)"),
        ({TABLE: lambda t: t.astype(np.float64)}, {}, "expected float32.*got float64"),
        ({TABLE: lambda t: t * np.nan}, {}, "embedding.table: expected finite"),
        ({TABLE: lambda t: t + np.float32(1e-6)}, {}, "embedding.table: its checksum"),
        ({"tokenizer": lambda t: t.view("i1")}, {}, "tokenizer: expected uint8.*int8"),
        ({}, {"config": HUGE_CONFIG}, "a model of less than 2\\^40 parameters"),
        ({}, {"config": DEEP_JSON}, "not a usable checkpoint"),
        ({}, {"checksums": "[]"}, "not a usable checkpoint"),
        ({}, {"format": "other"}, "expected format 'minitransformer 1', got 'other'"),
        ({}, {"config": "{}"}, "expected a tokenizer of 37000 word pieces, got 40"),
        ({}, {"config": "["}, "not a usable checkpoint"),
        ({}, {"checksum": "1", "config": ONE_HEAD}, "checksum of its metadata differs"),
        ({}, {"checksum": "", "state": "{}"}, "the checksum of its metadata differs"),
        ({"adam.mean": lambda t: t[1:]}, {}, "adam.mean: expected float32"),
    ],
)
def test_a_damaged_file_is_refused(saved, tensors, metadata, message):
    rewrite_checkpoint(saved, tensors, **metadata)
    with pytest.raises(ValueError, match=message):
        checkpoint.load(saved, with_moments=True)


def test_a_missing_tensor_is_named(saved):
    tensors = load_file(saved)
    with checkpoint.safe_open(saved, framework="np") as file:
        metadata = file.metadata()
    del tensors[TABLE]
    save_file(tensors, saved, metadata)
    with pytest.raises(ValueError, match=r"a usable checkpoint.* embedding\.table"):
        checkpoint.load(saved)


def test_a_damaged_newest_checkpoint_says_that_deleting_it_helps(tmp_path, tokenizer):
    run = RunDirectory(tmp_path)
    first, last = run.checkpoint(99_999_999), run.checkpoint(100_000_000)
    checkpoint.save(first, make(tokenizer))
    last.write_bytes(first.read_bytes()[:-1])
    with pytest.raises(ValueError, match=f"{last.name}: not a .*delete it to go on "):
        last_checkpoint(run)
    last.unlink()
    loaded = last_checkpoint(run)
    assert loaded.state.step == 7
    np.testing.assert_array_equal(loaded.moments, make(tokenizer).moments)


def test_older_checkpoints_keep_their_parameters_alone(tmp_path, tokenizer):
    """With them a run can begin, but none goes on."""
    run, paths = RunDirectory(tmp_path), []
    for step in (10, 20, 30, 40):
        paths.append(run.checkpoint(step))
        checkpoint.save(paths[-1], make(tokenizer, seed=step))
    expected = [load_file(path) for path in paths]
    paths[0].write_bytes(paths[0].read_bytes()[:-1])  # damaged, and left alone
    run.prune(TrainingConfig(save_every=10, keep_last=4))
    moments = {"adam.mean", "adam.square"}
    for path, tensors in zip(paths[1:], expected[1:], strict=True):
        read = load_file(path)
        lost = tensors.keys() - read.keys()
        assert lost == (moments if path == paths[1] else set())
        for name, tensor in read.items():
            np.testing.assert_array_equal(tensor, tensors[name])
    for path in paths[2:]:
        assert checkpoint.load(path, with_moments=True).moments is not None
        path.unlink()
    with pytest.raises(ValueError, match=r"expected Adam's moments.*train\.py --from"):
        last_checkpoint(run)


def test_averaging_refuses_other_models(tmp_path, saved, tokenizer):
    with pytest.raises(ValueError, match="expected checkpoints to average, got none"):
        mean_of([])
    other = tmp_path / "other.safetensors"
    one = make(Tokenizer.train([x.upper() for x in LINES], 40))
    checkpoint.save(other, one)
    with pytest.raises(ValueError, match="its tokenizer differs"):
        mean_of([other, saved])


@pytest.mark.parametrize("error", [OSError("the disk"), MemoryError("no room")])
def test_what_is_not_the_fault_of_a_file_is_raised_as_it_is(
    model_path, tmp_path, monkeypatch, error
):
    with pytest.raises(FileNotFoundError, match="expected a checkpoint, found no file"):
        checkpoint.load(tmp_path / "gone.safetensors")

    def fail(*args):
        raise error

    monkeypatch.setattr(checkpoint, "_read", fail)
    with pytest.raises(type(error), match=str(error)):
        checkpoint.load(Path(model_path))
