"""Small models and batches, and what they should compute, the slow way."""

import os

import numpy as np

from minitransformer.engine.autograd import no_grad
from minitransformer.model.parameters import ParameterBuffer
from minitransformer.model.transformer import Transformer
from minitransformer.runs import checkpoint
from minitransformer.runs.checkpoint import Checkpoint
from minitransformer.runs.run_directory import RunDirectory
from minitransformer.runs.state import RunState
from minitransformer.settings.config import (
    BOS_ID,
    EOS_ID,
    ModelConfig,
    RunConfig,
    TrainingConfig,
)
from minitransformer.settings.decoding_config import DecodingConfig
from minitransformer.text.batches import Batch
from minitransformer.text.tokenizer import Tokenizer

# No number stands by itself: it would be asked for again where a model loses it.
CAT_LINES = [f"the cat number{i} sat on the mat and looked" for i in range(100)]
# Lines without digits, in letters of those.
MAT_LINES = [
    f"the cat {first} on the {second} and looked"
    for first in ("sat", "looked", "mat", "number")
    for second in ("mat", "cat", "number", "sat")
]


def tiny_config(layers=(1, 1), **settings):
    """The settings of a model that computes in milliseconds, but for those given."""
    sizes = {"d_model": 8, "d_ff": 8, "num_heads": 2}
    both = {"encoder_layers": layers[0], "decoder_layers": layers[1]}
    return ModelConfig(**{**sizes, **both, **settings})


def small_model(dropout=0.0, dtype="float64"):
    """A model of two layers on each side, for the ids of `small_batch`."""
    config = tiny_config((2, 2), vocab_size=20, dropout=dropout)
    return Transformer(config, dtype=dtype)


def small_batch(seed, sentences):
    """Sentence pairs of random ids; targets are padded to various lengths."""
    rng = np.random.default_rng(seed)
    source, target = (
        rng.integers(4, 20, (sentences, 6)),
        rng.integers(4, 20, (sentences, 5)),
    )
    for row, end in enumerate(rng.integers(2, 6, sentences)):
        target[row, end:] = 0
    return Batch(source, target)


def gradient_of(batches, processes=1, dropout=0.0, ranks=None):
    """Loss and gradient of a small model, computed twice: both begin at zero."""
    from minitransformer.training.parallel import CpuModel

    model = small_model(dropout)
    parameters = ParameterBuffer(model)
    computed = CpuModel(model, parameters, processes, communicator=ranks)
    for _ in range(2):
        loss = computed.forward_backward(batches, 0.1, (1, 1))
    computed.close()
    return loss, parameters.grad.copy()


def save_small_model(path, state=None, **settings):
    """Save an untrained model whose vocabulary is that of CAT_LINES."""
    config = tiny_config((2, 3), vocab_size=50, **settings)
    model = Transformer(config, seed=4)
    parameters = ParameterBuffer(model)
    tokenizer = Tokenizer.train(CAT_LINES, 50)
    checkpoint.save(path, Checkpoint(model, tokenizer, parameters, state or RunState()))
    return str(path)


def save_small_run(folder, **decoding):
    """Save the small model in a run directory that decodes as `decoding` says."""
    run = RunDirectory(folder)
    folder.mkdir(parents=True)
    settings = TrainingConfig(), DecodingConfig(**decoding)
    config = RunConfig("tiny", ModelConfig(), *settings, {"train": ("a", "b")})
    run.config.write_text(config.to_json())
    save_small_model(run.best, RunState(decoding=config.decoding))
    return str(folder)


# Text of the user, and the built-in corpus of an earlier version.
OWN = "/home/me/talks/train.en.gz", "/home/me/talks/train.de"
BUILT_IN = "cache/built-in-1/train.en", "cache/built-in-1/train.de"


def save_run(path, states, text=OWN, age=0, **training):
    """Write a run of OWN text whose checkpoints have these states, by their names."""
    run = RunDirectory(path)
    path.mkdir(parents=True)
    settings = TrainingConfig(**{"steps": 40, **training}), DecodingConfig()
    config = RunConfig("tiny", ModelConfig(), *settings, {"train": text})
    run.config.write_text(config.to_json())
    os.utime(run.config, (1e9 - age, 1e9 - age))
    for name, state in states.items():
        save_small_model(path / f"{name}.safetensors", RunState(**state))
    return run


def model_with_random_biases(**settings):
    """A model whose every parameter matters: gains and biases are random too."""
    config = tiny_config(
        (2, 3), vocab_size=64, d_model=32, d_ff=48, num_heads=4, **settings
    )
    model, rng = Transformer(config, seed=3), np.random.default_rng(5)
    for name, parameter in model.named_parameters():
        if name.endswith(("gain", "bias", "bias_1", "bias_2")):
            noise = rng.normal(0, 0.3, parameter.shape)
            parameter.data += noise.astype(np.float32)
    return model


def confident_models(count, vocab_size=9):
    """Models of different widths, whose probabilities are far from uniform."""
    found = []
    for seed in range(count):
        config = tiny_config(vocab_size=vocab_size, d_model=8 + 2 * seed)
        model = Transformer(config, seed=seed + 1, dtype="float64")
        model.embedding.table.data *= 3
        found.append(model)
    return found


def logits_after(model, source, target):
    """The logits after each beginning of a target, from one pass over the whole of it.

    Shapes: -> [target + 1, V]
    """
    with no_grad():
        outputs = model(np.array([[*source, EOS_ID]]), np.array([[BOS_ID, *target]]))
        return model.logits(outputs).data[0].astype(np.float64)


def softmax(logits):
    p = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return p / p.sum(axis=-1, keepdims=True)


# The sentence of `next_logits`: three tokens and EOS.
SOURCE = np.array([[5, 6, 7, EOS_ID]])


def next_logits(model, prefix):
    return logits_after(model, SOURCE[0, :-1], prefix)[-1]


def mean_next_probabilities(members, source, prefix):
    """The mean over models of the softmax."""
    logits = [logits_after(model, source, prefix)[-1] for model in members]
    return softmax(np.array(logits)).mean(axis=0)
