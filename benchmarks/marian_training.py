"""Marian's training on the batches of train_speed.py, by the package pymarian.

Marian reads text, so each id becomes a word of the same number, and the sentences come
in the order of the batches, unshuffled. It has a post-norm Transformer with shared
embeddings, label smoothing, dropout of sub-layer outputs and Adam, as this engine has;
its processor build computes in float32.
"""

from __future__ import annotations

import itertools
import re
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from minitransformer.settings.config import PAD_ID, ModelConfig
from minitransformer.text.batches import Batch

# Of a line of Marian's log: the sentences so far, and the seconds of the last update.
UPDATE = re.compile(r": Sen\. ([\d,]+) :.*: Time ([\d.]+)s")


def marian(
    config: ModelConfig, batches: list[Batch], warmup: int, threads: int
) -> dict[str, float]:
    """Train on the batches; return tokens a second after `warmup` updates, and MB.

    Raises: RuntimeError with the end of its log if Marian fails.
    """
    # Batches of as many sentences as here, or of as many tokens.
    sizes = {len(batch.source) for batch in batches}
    size = ["--mini-batch", str(max(sizes)), "--maxi-batch", "1"]
    if len(sizes) > 1:  # batches of as many tokens, in the same order
        tokens = max(max(b.source.size, b.target.size) for b in batches)
        size = ["--mini-batch-words", str(tokens), "--maxi-batch-sort", "none"]
    # Marian trains once through the text, an update for each batch.
    with tempfile.TemporaryDirectory() as folder:
        vocabulary = write_text(Path(folder), config.vocab_size, batches)
        command = [
            *(sys.executable, "-m", "pymarian", "train", "--type", "transformer"),
            *("-m", f"{folder}/model.npz", "-v", vocabulary, vocabulary),
            *("-t", f"{folder}/source", f"{folder}/target", "--shuffle", "none"),
            *(*size, *flags(config), "--cpu-threads", str(threads)),
            *("--sync-sgd", "--after-epochs", "1", "--disp-freq", "1u"),
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"Marian ended: {done.stderr[-500:]}")
    # The log has a line for each update; those after the warm-up count.
    updates = [
        (int(sentences.replace(",", "")), float(seconds))
        for sentences, seconds in UPDATE.findall(done.stderr)
    ]
    lengths = np.concatenate([tokens_of(batch) for batch in batches])
    first, last = updates[warmup - 1][0], updates[-1][0]
    seconds = sum(seconds for _, seconds in updates[warmup:])
    return {
        "tokens_per_second": float(lengths[first:last].sum()) / seconds,
        "peak_memory_mb": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024,
    }


def tokens_of(batch: Batch) -> np.ndarray:
    """Count the tokens of each pair, EOS included. Shapes: [B]"""
    sides = batch.source, batch.target[:, 1:]
    return sum((side != PAD_ID).sum(axis=1) for side in sides)


def flags(config: ModelConfig) -> list[str]:
    """Return the model, the loss and the optimizer in Marian's words."""
    values: dict[str, object] = {
        "dim-vocabs": f"{config.vocab_size} {config.vocab_size}",
        "dim-emb": config.d_model,
        "transformer-dim-ffn": config.d_ff,
        "transformer-heads": config.num_heads,
        "enc-depth": config.encoder_layers,
        "dec-depth": config.decoder_layers,
        "transformer-dropout": config.dropout,
        "label-smoothing": 0.1,
        "optimizer": "adam",
        "optimizer-params": "0.9 0.98 1e-9",
        "learn-rate": 1e-4,
        "clip-norm": 0,
        "max-length": 1000,
        "workspace": 2000,  # MB
    }
    words = ([f"--{name}", *str(value).split()] for name, value in values.items())
    return [*itertools.chain(*words), "--tied-embeddings-all"]


def write_text(folder: Path, vocab_size: int, batches: list[Batch]) -> str:
    """Write the vocabulary and both sides of the batches; return the vocabulary."""
    # A word for each id.
    words = [f"w{number}: {number}" for number in range(vocab_size)]
    words[:2] = ["</s>: 0", "<unk>: 1"]
    vocabulary = folder / "vocabulary.yml"
    vocabulary.write_text("\n".join(words) + "\n")
    # A line for each sentence, without padding.
    for name, first in (("source", 0), ("target", 1)):  # a target begins with BOS
        with open(folder / name, "w") as text:
            for batch in batches:
                for ids in getattr(batch, name)[:, first:]:
                    words = [f"w{number}" for number in ids[ids != PAD_ID]]
                    text.write(" ".join(words[:-1]) + "\n")  # Marian adds EOS
    return str(vocabulary)
