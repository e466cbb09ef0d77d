"""Export of a trained model: in fewer bits, for CTranslate2 or for Argos Translate.

Greedy output is the same in CTranslate2: a bias of the logits excludes the tokens that
beam search here excludes, also from the softmax. CTranslate2's beam search divides
scores by length^p instead of the paper's penalty. Its scores differ, and long sentences
may come out differently.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, ZipFile

import numpy as np

from minitransformer.api import load
from minitransformer.commands import Command
from minitransformer.engine.ops import LAYER_NORM_EPSILON
from minitransformer.model.layers import AddAndNorm, sinusoids
from minitransformer.model.transformer import DecoderLayer, EncoderLayer, Transformer
from minitransformer.runs import checkpoint
from minitransformer.runs.checkpoint import Checkpoint
from minitransformer.runs.models import (
    find_checkpoint,
    fingerprint,
    language_codes,
    require_alike,
)
from minitransformer.runs.run_directory import RunDirectory
from minitransformer.settings.config import BOS_ID, EOS_ID, PAD_ID, UNK_ID
from minitransformer.settings.extras import import_extra
from minitransformer.settings.options import UsageError
from minitransformer.system.files import atomic_folder, atomic_write
from minitransformer.system.machine import num_cores
from minitransformer.text.lines import read_lines
from minitransformer.translation.confidence import quantiles

NOTES = """\
For float16 and int8, the output is a checkpoint of a half or a quarter of the size,
which translate.py reads and from which train.py --from begins. CTranslate2 reads DIR,
in which tokenizer.model is the SentencePiece model of the word pieces. Argos Translate
and LibreTranslate install FILE.argosmodel. Greedy output of these is the same as here;
beam search divides scores by length^p instead of the paper's penalty."""

# The bias of the logits of excluded tokens. A float16 can hold it.
NEVER = -30_000.0

# Rows of the table of sinusoids: the longest text that CTranslate2 takes, in tokens.
MAX_POSITIONS = 2048


def ctranslate2_spec(model: Transformer, pieces: Sequence[str]) -> Any:
    """Return a CTranslate2 `TransformerSpec` that holds the model's arrays.

    `pieces` names the word piece of each id.

    Raises: RuntimeError if ctranslate2 is not installed, ValueError if CTranslate2 does
    not know heads of such a width.
    """
    need = "exporting needs CTranslate2"
    specs = import_extra("ctranslate2.specs", "ctranslate2", need)
    config = model.config
    width = config.d_model // config.num_heads
    if (config.key_width, config.value_width) != (width, width):
        raise ValueError(
            f"CTranslate2: expected d_k and d_v of d_model / num_heads = {width}, "
            f"got {config.key_width} and {config.value_width}"
        )
    layers = config.encoder_layers, config.decoder_layers
    spec = specs.TransformerSpec.from_config(layers, config.num_heads, pre_norm=False)
    _embeddings(model, spec)
    # The layers of both stacks, and the attention of the decoder to the encoder.
    for encoder_layer, target in zip(model.encoder, spec.encoder.layer, strict=True):
        _common_sublayers(encoder_layer, target)
    for layer, target in zip(model.decoder, spec.decoder.layer, strict=True):
        _common_sublayers(layer, target)
        cross = layer.cross_attention
        target.attention.linear[0].weight = _transposed(cross.query)
        target.attention.linear[1].weight = _transposed(cross.key, cross.value)
        target.attention.linear[2].weight = _transposed(cross.output)
        _norm(layer.cross_attention_norm, target.attention.layer_norm)
    # The vocabulary, and the names of its special tokens.
    spec.register_source_vocabulary(list(pieces))
    spec.register_target_vocabulary(list(pieces))
    spec.config.unk_token = pieces[UNK_ID]
    spec.config.eos_token = pieces[EOS_ID]
    spec.config.bos_token = spec.config.decoder_start_token = pieces[BOS_ID]
    spec.config.add_source_eos = True
    spec.config.layer_norm_epsilon = LAYER_NORM_EPSILON
    return spec


def _embeddings(model: Transformer, spec: Any) -> None:
    """Copy the table of embeddings and of logits, and the positions."""
    table = model.embedding.table.data  # [V, D]
    positions = (
        model.embedding.positions.data
        if model.embedding.learned
        else sinusoids(MAX_POSITIONS, model.config.d_model).astype(table.dtype)
    )
    # One table for the source, the target and the logits, as in section 3.4.
    embeddings = spec.encoder.embeddings[0], spec.decoder.embeddings
    for stack, embedding in zip((spec.encoder, spec.decoder), embeddings, strict=True):
        stack.scale_embeddings = True
        stack.position_encodings.encodings = positions
        embedding.weight = table
    spec.decoder.projection.weight = table
    spec.decoder.projection.bias = bias = np.zeros(len(table), table.dtype)
    bias[[PAD_ID, UNK_ID, BOS_ID]] = NEVER


def _common_sublayers(layer: EncoderLayer | DecoderLayer, target: Any) -> None:
    """Copy self-attention and feed-forward, which layers of both stacks have."""
    # Section 3.2: queries, keys and values are one product there.
    attention = layer.self_attention
    projections = _transposed(attention.query, attention.key, attention.value)
    target.self_attention.linear[0].weight = projections
    target.self_attention.linear[1].weight = _transposed(attention.output)
    _norm(layer.self_attention_norm, target.self_attention.layer_norm)
    # Section 3.3.
    feed_forward = layer.feed_forward
    target.ffn.linear_0.weight = _transposed(feed_forward.weight_1)
    target.ffn.linear_0.bias = feed_forward.bias_1.data
    target.ffn.linear_1.weight = _transposed(feed_forward.weight_2)
    target.ffn.linear_1.bias = feed_forward.bias_2.data
    _norm(layer.feed_forward_norm, target.ffn.layer_norm)


def _norm(norm: AddAndNorm, target: Any) -> None:
    target.gamma = norm.gain.data
    target.beta = norm.bias.data


def _transposed(*weights: Any) -> np.ndarray:
    """Join [in, out] matrices into the one [out, in] matrix that CTranslate2 reads."""
    return np.ascontiguousarray(np.concatenate([w.data for w in weights], axis=1).T)


def to_ctranslate2(
    model: Transformer,
    pieces: Sequence[str],
    directory: Path,
    quantization: str,
    tokenizer: bytes = b"",
) -> None:
    """Write a CTranslate2 model as a directory that appears once it is complete.

    An empty directory is replaced. `tokenizer` is the content of tokenizer.model.

    Raises: OSError if the directory is not empty; else as `ctranslate2_spec`.
    """
    spec = ctranslate2_spec(model, pieces)
    spec.validate()
    spec.optimize(quantization=None if quantization == "float32" else quantization)
    with atomic_folder(directory.resolve()) as folder:
        spec.save(str(folder))
        if tokenizer:
            (folder / "tokenizer.model").write_bytes(tokenizer)


def to_argos(
    trained: Checkpoint, path: Path, codes: Sequence[str], quantization: str
) -> None:
    """Write a package for Argos Translate. Raises: as `ctranslate2_spec`."""
    source, target = codes
    about = {
        "type": "translate",
        "package_version": "1.0",
        "argos_version": "1.9",
        "from_code": source,
        "from_name": source,
        "to_code": target,
        "to_name": target,
    }
    # A folder with the model, the word pieces and what they are, as a ZIP archive.
    pieces = trained.tokenizer.all_pieces()
    with tempfile.TemporaryDirectory() as place, atomic_write(path) as file:
        folder = Path(place) / f"minitransformer-{source}_{target}"
        to_ctranslate2(trained.model, pieces, folder / "model", quantization)
        (folder / "sentencepiece.model").write_bytes(trained.tokenizer.model)
        (folder / "metadata.json").write_text(json.dumps(about))
        (folder / "README.md").write_text(f"# {source} to {target}\n")
        with ZipFile(file, "w", ZIP_DEFLATED) as archive:
            for name in folder.rglob("*"):
                archive.write(name, name.relative_to(place))


def calibrated(source: Path, text: Path) -> tuple[float, ...]:
    """Return quantiles of the log-probability per token of translations of a text."""
    translator = load(source, threads=num_cores())
    translations = translator.hypotheses(list(read_lines(text)), translator.decoding)
    if means := [best.mean_log_prob for best, *_ in translations if best.tokens]:
        return quantiles(means)
    raise ValueError(f"{text}: expected lines to translate, found none")


def export(args: argparse.Namespace) -> None:
    """Write a trained model as one of the kinds that `main` names."""
    useless = {"argos": "calibrate", "ctranslate2": "calibrate languages"}
    for name in useless.get(args.kind, "quantization languages").split():
        if getattr(args, name):
            raise UsageError(f"--{name} does nothing with {args.kind}")
    source = find_checkpoint(args.run)
    trained = checkpoint.load(source)
    codes = language_codes(source)
    trained.state = replace(trained.state, languages=codes)

    # In the folder of another run, it would be taken for a model of that run.
    run = RunDirectory(args.output.resolve().parent)
    if run.is_run() and run.has_checkpoint():
        own = run.preferred_checkpoint()
        of_run = fingerprint(own, checkpoint.load(own))
        require_alike(fingerprint(source, trained), of_run)
    number_format = args.quantization or "float32"
    # A checkpoint in fewer bits, which may know how sure its translations are.
    if args.kind in ("float16", "int8"):
        number_format = args.kind
        if args.calibrate:
            measured = calibrated(source, args.calibrate)
            trained.state = replace(trained.state, log_prob_quantiles=measured)
        checkpoint.save(args.output, trained, number_format)
    # Or a model for another program.
    elif args.kind == "argos":
        codes = args.languages or codes
        if codes == ("source", "target"):
            raise UsageError("expected --languages, such as en de")
        to_argos(trained, args.output, codes, number_format)
    else:
        to_ctranslate2(
            trained.model,
            trained.tokenizer.all_pieces(),
            args.output,
            number_format,
            tokenizer=trained.tokenizer.model,
        )
    print(f"wrote {source} to {args.output} in {number_format}")


def main(arguments: Sequence[str]) -> int:
    parser = Command(
        "minitransformer export",
        "Export a trained model in float16 or int8, or for other programs.",
        (
            "minitransformer export ctranslate2 runs/NAME DIR --quantization int8",
            "minitransformer export argos runs/NAME en_de.argosmodel",
            "minitransformer export int8 runs/NAME small.safetensors",
        ),
        NOTES,
    )
    parser.add_argument("kind", choices=("ctranslate2", "argos", "float16", "int8"))
    parser.add_argument("run", type=Path, help="a run directory or a checkpoint")
    output = "a file; for ctranslate2, a new or empty directory"
    parser.add_argument("output", type=Path, help=output)
    kinds = ("float32", "int8", "int16", "float16")
    help = "number format of CTranslate2's weights (default float32)"
    parser.add_argument("--quantization", choices=kinds, help=help)
    help = "codes such as en de, for argos (default by the names of the run's files)"
    parser.add_argument("--languages", nargs=2, metavar="LANG", help=help)
    help = "text whose translations calibrate the confidence (float16 and int8)"
    parser.add_argument("--calibrate", type=Path, metavar="FILE", help=help)
    return parser.run(arguments, export)
