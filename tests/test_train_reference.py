"""train.py as a whole against a replay of its updates in plain NumPy.

The run computes in float64 here, so that what is compared has to agree to ten digits.
"""

import functools
import json

import numpy as np
import pytest
import sentencepiece
from safetensors import safe_open
from safetensors.numpy import load_file

import train as train_script
from minitransformer.model.transformer import Transformer
from minitransformer.runs import checkpoint, starting_point
from minitransformer.settings.config import ModelConfig
from minitransformer.text.batches import BatchStream
from minitransformer.training import parallel
from support.closeness import assert_close
from support.noise import RecordedNoise, dropout_sites
from support.reference import ReferenceTransformer
from support.reference_training import replay
from support.runs import values
from support.strategies import batch_of

MODEL = {
    "vocab_size": 10,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "d_model": 4,
    "d_ff": 3,
    "num_heads": 2,
}
PADDING, BEGIN, END = 0, 2, 3
# What a run has if it is asked for nothing else.
PAPERS = {"label_smoothing": 0.1, "beta1": 0.9, "beta2": 0.98, "epsilon": 1e-9}
PAPERS |= {"seed": 1, "accumulate": 1}


def write_text(folder):
    """Write a few short lines of few letters, and return the flags that name them."""
    rng, flags = np.random.default_rng(5), []
    for split, count in (("train", 24), ("val", 8)):
        for side in ("source", "target"):
            words = rng.choice(["ab", "ba", "c"], (count, 3))
            lengths = rng.integers(1, 4, count)
            lines = [" ".join(w[:n]) for w, n in zip(words, lengths, strict=True)]
            path = folder / f"{split}.{side}"
            path.write_text("".join(line + "\n" for line in lines))
            flags += [f"--{split}-{side}", str(path)]
    return flags


class Watched:
    """A run of train.py in this process: what it drew, read and wrote."""

    def __init__(self, folder, monkeypatch, settings, *flags):
        folder.mkdir(exist_ok=True)
        self.batches, self.noise = [], {}
        take = BatchStream.__next__

        def remember(stream):
            self.batches.append(take(stream))
            return self.batches[-1]

        def draw(key):
            return self.noise.setdefault(key, RecordedNoise(key))

        exact = functools.partial(Transformer, dtype="float64")
        monkeypatch.setattr(starting_point, "Transformer", exact)
        monkeypatch.setattr(checkpoint, "Transformer", exact)
        monkeypatch.setattr(BatchStream, "__next__", remember)
        monkeypatch.setattr(parallel, "HostStream", draw)
        self.folder, self.run = folder, folder / "run"
        (folder / "own.json").write_text(json.dumps(settings))
        often = "--save-every 1 --log-every 1 --validate-bleu 0 --threads 1".split()
        places = ("--run", self.run, "--cache", folder / "cache")
        places += ("--config", folder / "own.json", *write_text(folder))
        flags = (*often, *flags, *places)
        assert train_script.main([str(flag) for flag in flags]) == 0
        model = str(self.run / "tokenizer.model")
        self.tokenizer = sentencepiece.SentencePieceProcessor(model_file=model)

    def ids(self, split):
        """The sources and targets of a split, encoded."""
        paths = [self.folder / f"{split}.{side}" for side in ("source", "target")]
        lines = [path.read_text().splitlines() for path in paths]
        return [self.tokenizer.encode(side) for side in lines]

    def weights(self, name, expected=()):
        """The parameters in a checkpoint, those of these names or all."""
        tensors = load_file(self.run / f"{name}.safetensors")
        expected = expected or tensors.keys() - {"tokenizer"}
        return {name: tensors[name] for name in expected}


def check_run(
    watched, config, *, seed, accumulate, label_smoothing, start=None, **settings
):
    """Replay a run and compare everything that it wrote.

    The model of another, `start`, is measured before the first update.
    """
    measured = [] if start is None else [0]
    if start is None:
        start = Transformer(config, seed, dtype="float64")
        start = {name: p.data.copy() for name, p in start.named_parameters()}
    batches = watched.batches
    model = functools.partial(ReferenceTransformer, config)

    def loss(parameters, step):
        total, tokens = 0, 0
        for i in range(accumulate):
            batch = batches[(step - 1) * accumulate + i]
            lengths = batch.source.shape[1], batch.target.shape[1] - 1
            sites = dropout_sites(config, len(batch.source), *lengths)
            masks = watched.noise[seed, step, i].masks(sites)
            total = total + model(parameters, dropout=masks).loss(
                batch.source, batch.target, label_smoothing
            )
            tokens += (batch.target[:, 1:] != PADDING).sum()
        return total / tokens

    val = batch_of(zip(*watched.ids("val"), strict=True))
    val_tokens = (val.target[:, 1:] != PADDING).sum()

    def validation_loss(parameters):
        total = model(parameters).loss(val.source, val.target, label_smoothing=0)
        return total / val_tokens

    records, averaged = replay(
        start, loss, validation_loss, d_model=config.d_model, **settings
    )
    steps = range(1, len(records) + 1)
    assert len(batches) == len(records) * accumulate
    assert watched.noise.keys() == {
        (seed, t, i) for t in steps for i in range(accumulate)
    }
    for name in ("loss", "gradient_norm", "learning_rate", "validation_loss"):
        expected = {t: records[t - 1][name] for t in steps if name in records[t - 1]}
        if name == "validation_loss":
            expected |= {t: validation_loss(start) for t in measured}
        assert values(watched.run, name) == pytest.approx(expected, rel=1e-9), name
    best = min(expected, key=expected.get)  # by the validation loss
    written = {f"step-{t:08d}": records[t - 1]["parameters"] for t in steps}
    written |= {"averaged": averaged}
    written |= {"best": records[best - 1]["parameters"] if best else start}
    with safe_open(watched.run / "averaged.safetensors", framework="np") as file:
        stored = json.loads(file.metadata()["state"])["best_loss"]
    lowest = expected[best]
    if settings.get("average_by") != "number":  # by which runs are compared later
        lowest = validation_loss(averaged)
        assert lowest < expected[best]
    assert stored == pytest.approx(lowest, rel=1e-9)
    assert {p.stem for p in watched.run.glob("*.safetensors")} == written.keys()
    for name, parameters in written.items():
        found = watched.weights(name, parameters)
        for parameter in parameters:
            assert_close(found[parameter], parameters[parameter])
    return records


def test_a_run_with_the_papers_settings_is_that_of_the_reference(tmp_path, monkeypatch):
    others = {"warmup": 2, "steps": 4, "average": 2, "validate_every": 3}
    others["average_by"] = "number"
    run = Watched(tmp_path, monkeypatch, {**MODEL, **others}, "--max-tokens", 60)
    check_run(run, ModelConfig(**MODEL, dropout=0.1), **PAPERS, **others)

    # The four batches are an epoch: each pair once, in the word pieces of the run.
    pairs = zip(*run.ids("train"), strict=True)
    expected = [([*source, END], [BEGIN, *target, END]) for source, target in pairs]
    rows = [row for b in run.batches for row in zip(b.source, b.target, strict=True)]
    found = [tuple(ids[ids != PADDING].tolist() for ids in row) for row in rows]
    assert sorted(found) == sorted(expected)


def test_a_run_with_other_settings_is_that_of_the_reference(tmp_path, monkeypatch):
    dropouts = {"dropout": 0.25, "relu_dropout": 0.5, "attention_dropout": 0.125}
    model = {**MODEL, **dropouts, "d_k": 1, "d_v": 3}
    settings = {
        "seed": 4,
        "accumulate": 2,
        "label_smoothing": 0.2,
        "learning_rate": 0.7,
        "warmup": 2,
        "beta1": 0.7,
        "beta2": 0.9,
        "epsilon": 1e-3,
        "clip_norm": 0.5,
        "steps": 9,
        "patience": 2,
        "average": 5,
    }
    flags = "--max-tokens 40 --validate-every 1".split()
    run = Watched(tmp_path, monkeypatch, {**model, **settings}, *flags)
    records = check_run(run, ModelConfig(**model), **settings)
    # The run is one of which these settings matter: two validations in a row without
    # a lower loss end it, not two in all, and one of its gradients needs no clipping.
    # The mean of the last four checkpoints is better than those of fewer and of all.
    losses = [record["validation_loss"] for record in records]
    assert [x == min(losses[: i + 1]) for i, x in enumerate(losses)] == [
        True, False, True, False, False,
    ]  # fmt: skip
    assert [record["gradient_norm"] > 0.5 for record in records].count(False) == 1


def test_a_run_from_another_begins_with_its_weights_and_nothing_else(
    tmp_path, monkeypatch
):
    """Adam's moments, the step and the schedule are those of a new run."""
    settings = {**MODEL, "warmup": 2, "average_by": "number", "max_tokens": 60}
    flags = "--steps", 4, "--average", 1
    first = Watched(tmp_path / "first", monkeypatch, settings, *flags)
    flags = "--from", first.run, "--dropout", 0.3, "--average", 2, "--steps", 2
    second = Watched(tmp_path / "next", monkeypatch, settings, *flags)
    others = {"warmup": 2, "steps": 2, "average": 2, "validate_every": 1000}
    others |= {"average_by": "number", "start": first.weights("best")}
    check_run(second, ModelConfig(**MODEL, dropout=0.3), **PAPERS, **others)
