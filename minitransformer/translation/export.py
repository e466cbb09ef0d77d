"""Write a trained model in the format of another engine, CTranslate2.

CTranslate2's beam search divides scores by length^p and not by the paper's penalty, so
that scores differ and long sentences may come out differently. Greedy output is the
same.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from minitransformer.engine.ops import LAYER_NORM_EPSILON
from minitransformer.model.layers import (
    FeedForward,
    LayerNorm,
    MultiHeadAttention,
    sinusoids,
)
from minitransformer.model.transformer import Transformer
from minitransformer.runs import checkpoint
from minitransformer.runs.run_directory import find_checkpoint
from minitransformer.settings.options import Parser, exit_code

QUANTIZATIONS = ("float32", "int8", "int16", "float16")

# Rows of the sinusoidal table that is written: the longest text served, in tokens.
MAX_POSITIONS = 2048


def ctranslate2_spec(model: Transformer, pieces: Sequence[str]) -> Any:
    """Return a CTranslate2 `TransformerSpec` that holds the model's arrays.

    `pieces` names the word piece of each id.

    Raises: RuntimeError if ctranslate2 is not installed, ValueError if the model has
    heads of another width than d_model / num_heads, or restricted attention, neither of
    which it knows.
    """
    try:
        specs = importlib.import_module("ctranslate2.specs")
    except ImportError as error:
        raise RuntimeError(
            "exporting needs CTranslate2: pip install 'minitransformer[ctranslate2]'"
        ) from error
    config = model.config
    if config.attention_window is not None:
        raise ValueError(
            "expected attention to all positions, which CTranslate2 takes for granted, "
            f"got an attention window of {config.attention_window}"
        )
    width = config.d_model // config.num_heads
    if (config.key_width, config.value_width) != (width, width):
        raise ValueError(
            f"expected d_k and d_v of d_model / num_heads = {width}, which CTranslate2 "
            f"takes for granted, got {config.key_width} and {config.value_width}"
        )
    spec = specs.TransformerSpec.from_config(
        (config.encoder_layers, config.decoder_layers), config.num_heads, pre_norm=False
    )
    table = model.embedding.table.data  # [V, D]
    positions = (
        model.embedding.positions.data
        if model.embedding.learned
        else sinusoids(MAX_POSITIONS, config.d_model).astype(table.dtype)
    )
    for stack, embeddings in (
        (spec.encoder, spec.encoder.embeddings[0]),
        (spec.decoder, spec.decoder.embeddings),
    ):
        stack.scale_embeddings = True
        stack.position_encodings.encodings = positions
        embeddings.weight = table
    spec.decoder.projection.weight = table
    for ours, theirs in zip(model.encoder, spec.encoder.layer, strict=True):
        _self_attention(ours.self_attention, theirs.self_attention)
        _norm(ours.self_attention_norm, theirs.self_attention.layer_norm)
        _feed_forward(ours.feed_forward, theirs.ffn)
        _norm(ours.feed_forward_norm, theirs.ffn.layer_norm)
    for layer, theirs in zip(model.decoder, spec.decoder.layer, strict=True):
        _self_attention(layer.self_attention, theirs.self_attention)
        _norm(layer.self_attention_norm, theirs.self_attention.layer_norm)
        _cross_attention(layer.cross_attention, theirs.attention)
        _norm(layer.cross_attention_norm, theirs.attention.layer_norm)
        _feed_forward(layer.feed_forward, theirs.ffn)
        _norm(layer.feed_forward_norm, theirs.ffn.layer_norm)
    spec.register_source_vocabulary(list(pieces))
    spec.register_target_vocabulary(list(pieces))
    spec.config.add_source_eos = True
    spec.config.layer_norm_epsilon = LAYER_NORM_EPSILON
    return spec


def _transposed(*weights: Any) -> np.ndarray:
    """[in, out] matrices side by side, as the one [out, in] that CTranslate2 reads."""
    return np.ascontiguousarray(np.concatenate([w.data for w in weights], axis=1).T)


def _self_attention(ours: MultiHeadAttention, theirs: Any) -> None:
    theirs.linear[0].weight = _transposed(ours.query, ours.key, ours.value)
    theirs.linear[1].weight = _transposed(ours.output)


def _cross_attention(ours: MultiHeadAttention, theirs: Any) -> None:
    theirs.linear[0].weight = _transposed(ours.query)
    theirs.linear[1].weight = _transposed(ours.key, ours.value)
    theirs.linear[2].weight = _transposed(ours.output)


def _feed_forward(ours: FeedForward, theirs: Any) -> None:
    theirs.linear_0.weight = _transposed(ours.weight_1)
    theirs.linear_0.bias = ours.bias_1.data
    theirs.linear_1.weight = _transposed(ours.weight_2)
    theirs.linear_1.bias = ours.bias_2.data


def _norm(ours: LayerNorm, theirs: Any) -> None:
    theirs.gamma, theirs.beta = ours.gain.data, ours.bias.data


def to_ctranslate2(
    model: Transformer, pieces: Sequence[str], directory: Path, quantization: str
) -> None:
    """Write a CTranslate2 model into a new or empty directory.

    Raises: ValueError if the directory holds anything; as `ctranslate2_spec`.
    """
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ValueError(f"expected a new or empty directory, got {directory}")
    spec = ctranslate2_spec(model, pieces)
    spec.validate()
    spec.optimize(quantization=None if quantization == "float32" else quantization)
    directory.mkdir(parents=True, exist_ok=True)
    spec.save(str(directory))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(
        "minitransformer export",
        "Write a trained model for another engine to serve.",
        ("minitransformer export ctranslate2 runs/NAME DIR --quantization int8",),
        "CTranslate2 reads DIR; tokenizer.model in it cuts text into the word pieces "
        "that it\nexpects. Greedy output is the same as here. Its beam search divides "
        "by length^p\ninstead of the paper's penalty, so scores differ.",
    )
    parser.add_argument("engine", choices=("ctranslate2",))
    parser.add_argument("run", type=Path, help="a run directory or a checkpoint")
    parser.add_argument("directory", type=Path, help="a new directory to write")
    parser.add_argument("--quantization", choices=QUANTIZATIONS, default="float32")
    args = parser.parse_args(arguments)

    def work() -> None:
        source = find_checkpoint(args.run)
        trained = checkpoint.load(source)
        pieces = trained.tokenizer.pieces(range(trained.tokenizer.vocab_size))
        to_ctranslate2(trained.model, pieces, args.directory, args.quantization)
        (args.directory / "tokenizer.model").write_bytes(trained.tokenizer.model)
        print(f"wrote {source} to {args.directory} in {args.quantization}")

    return exit_code("export", work)
