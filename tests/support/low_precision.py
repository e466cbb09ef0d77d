"""What the tests of oneDNN's kernels share: a model, matrices, and what stands in."""

import weakref
from pathlib import Path

import ml_dtypes
import numpy as np

import translate
from minitransformer.backends.onednn.library import EXP, RELU, OneDnn
from support.in_process import run_main
from support.models import tiny_config

CONFIG = tiny_config(vocab_size=90, d_model=16, d_ff=40)

# A training on the corpus below, but for its length and where it is kept.
FLAGS = (
    "--data . --source en --target de --encoder-layers 1 --decoder-layers 1 "
    "--d-model 16 --d-ff 16 --num-heads 2 --vocab-size 12 --dropout 0 --warmup 10 "
    "--max-tokens 100 --learning-rate 0.01 --validate-every 20 --save-every 20 "
    "--validate-bleu 0 --average 1 --log-every 20"
).split()


def write_corpus(folder):
    """Write sentences of three words, whose translations are other such sentences."""
    rng = np.random.default_rng(5)
    for split, count in (("train", 60), ("val", 5)):
        rows = [" ".join(rng.choice(["ab", "ba", "c"], 4)) for _ in range(count)]
        for side in ("en", "de"):
            Path(folder, f"{split}.{side}").write_text("\n".join(rows) + "\n")


def assert_translates_alike(run, precision):
    """Require the same translation in float32 and in a precision."""
    outputs = []
    for asked in ("fp32", precision):
        flags = "--model", run, "--precision", asked, "ab ba c ab"
        code, out, errors = run_main(translate.main, *flags)
        assert code == 0, errors
        outputs.append(out)
    assert outputs[0] == outputs[1] != ""


def references(monkeypatch, module, name):
    """Return a list that gets a reference to each thing that a function makes."""
    made, make = [], getattr(module, name)

    def recorded(*arguments):
        made.append(weakref.ref(thing := make(*arguments)))
        return thing

    monkeypatch.setattr(module, name, recorded)
    return made


def parameters(rng, *shapes):
    """Matrices and vectors in one flat vector, as a model's parameters are."""
    sizes = [int(np.prod(shape)) for shape in shapes]
    flat = rng.standard_normal(sum(sizes)).astype(np.float32)
    parts = np.split(flat, np.cumsum(sizes)[:-1])
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]


def assert_near(got, expected, tolerance=1e-5):
    """Require differences below a share of the largest magnitude that is expected."""
    assert np.abs(got - expected).max() <= tolerance * np.abs(expected).max()


class StandIn:
    """For oneDNN, where it or the processor's instructions are missing."""

    @staticmethod
    def round(x, out):
        out[...] = np.asarray(x).astype(ml_dtypes.bfloat16).view(np.uint16)

    @staticmethod
    def product(a, b, *, bias=None, function=None):
        a, b = (x.view(ml_dtypes.bfloat16) for x in (a, b))
        wide = a.astype(np.float64), b.astype(np.float64)
        product = np.matmul(*wide).astype(np.float32)
        if bias is not None:
            product += bias
        if function is not None:
            functions = {RELU: lambda x: np.maximum(x, 0), EXP: np.exp}
            with np.errstate(over="ignore"):  # the library does not warn
                product = functions[function](product)
        return product


def library(precision):
    """oneDNN, or what stands for it."""
    try:
        return OneDnn(precision)
    except RuntimeError:
        return StandIn()


def rounded(x):
    """The nearest bfloat16 numbers, as float64."""
    return np.asarray(x, np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)
