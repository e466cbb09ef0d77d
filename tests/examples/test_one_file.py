"""The Transformer in one file computes what the package computes, and learns."""

import os
import runpy
import subprocess
import sys

import numpy as np
import pytest

from minitransformer.model.transformer import Transformer, training_loss
from minitransformer.settings.config import ModelConfig
from minitransformer.settings.decoding_config import DecodingConfig
from minitransformer.translation.batch_translation import translate_ids
from support.scripts import ROOT

FILE = ROOT / "examples" / "one_file.py"


@pytest.fixture
def one():
    return runpy.run_path(str(FILE))


def copied(one, model, copy):
    """Give both models the same parameters, in float64: those of one that has some."""
    for name, parameter in model.named_parameters():
        key = (name, *parameter.shape)
        if key in copy:
            parameter.data[...] = copy[key].data
        else:
            copy[key] = one["Tensor"](parameter.data)


@pytest.fixture
def model(one):
    config = ModelConfig(
        vocab_size=one["V"],
        encoder_layers=one["LAYERS"],
        decoder_layers=one["LAYERS"],
        d_model=one["D"],
        d_ff=one["D_FF"],
        num_heads=one["HEADS"],
        dropout=0.0,
    )
    return Transformer(config, 3, "float64")


def test_loss_and_gradients_are_those_of_the_package(one, model):
    rng, copy = np.random.default_rng(4), one["Transformer"]()
    for _, parameter in model.named_parameters():
        if parameter.data.ndim == 1:  # gains and biases that are neither 0 nor 1
            parameter.data[...] = rng.normal(1, 0.3, parameter.shape)
    copied(one, model, copy)
    pairs = [one["PAIRS"][i] for i in (0, 5, 9, 400)]
    source = one["to_ids"]([english for english, _ in pairs])
    target = one["to_ids"]([german for _, german in pairs], [one["BOS"]])
    assert (source == 0).any()  # padding
    assert (target == 0).any()

    expected = training_loss(model, source, target, 0.1, None)
    expected.backward()
    outputs = copy(source, target[:, :-1])
    table = copy["embedding.table", one["V"], one["D"]]
    loss = outputs.cross_entropy(table, target[:, 1:], 0.1)
    one["backward"](loss)

    np.testing.assert_allclose(loss.data, expected.data, rtol=1e-12)
    gradients = {(n, *p.shape): p.grad for n, p in model.named_parameters()}
    assert gradients.keys() == copy.keys()
    for key, gradient in gradients.items():
        np.testing.assert_allclose(copy[key].grad, gradient, rtol=1e-9, atol=1e-12)


def test_it_learns_and_finds_what_the_package_finds(one, model):
    copy, pairs = one["Transformer"](), one["PAIRS"][:3]
    one["train"].__globals__["PAIRS"] = pairs
    one["train"](copy, 100, batch_size=3, warmup=200)
    copied(one, model, copy)
    right = 0
    for english, german in pairs:
        text, score = one["translate"](copy, english)
        right += text == german
        ids = one["to_ids"]([english])[0, :-1].tolist()
        [[best]] = translate_ids(model, [ids], DecodingConfig(max_len_b=50))
        words = [one["WORDS"][i] for i in best.tokens]
        assert one["TOKEN"].findall(text) == words
        assert score == pytest.approx(best.score, rel=1e-5)
    assert right >= 2


@pytest.mark.slow
def test_the_command_translates_sentences_that_it_has_not_seen():
    # Products as small as these are faster on one thread.
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, str(FILE)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    sentences = "Now the young man sleeps. Jetzt schläft der junge Mann.\n"
    sentences += "The children must sleep. Die Kinder müssen schlafen.\n"
    assert done.stdout.endswith(sentences)


def test_it_is_short():
    assert len(FILE.read_text(encoding="utf-8").splitlines()) <= 250
