"""Saving and loading, without pickle and without a moment in which a file is half.

A checkpoint is one safetensors file: the parameters by name, the tokenizer's bytes, for
a training run also Adam's moments, and JSON with the configuration and the state.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from errno import EIO
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from minitransformer.engine.backend import to_host
from minitransformer.files import replacing
from minitransformer.model.layers import ParameterBuffer
from minitransformer.model.transformer import Transformer
from minitransformer.settings.config import ModelConfig
from minitransformer.settings.options import from_dict
from minitransformer.text.tokenizer import Tokenizer

FORMAT = "minitransformer 1"
SUFFIX = ".safetensors"

# What reading a file that is damaged, or made to do harm, may raise.
UNUSABLE = (
    SafetensorError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    OverflowError,
    RecursionError,
)


@dataclass
class Checkpoint:
    """A model with its tokenizer, and what a training run needs to go on.

    `state` is a JSON object: the step and whatever else the training loop keeps.
    """

    model: Transformer
    tokenizer: Tokenizer
    parameters: ParameterBuffer
    state: dict[str, Any] = field(default_factory=dict)
    moments: tuple[np.ndarray, np.ndarray] | None = None

    @property
    def step(self) -> int:
        return int(self.state.get("step", 0))


def save(path: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint, in one step as far as readers of `path` can see.

    Raises: OSError if it cannot be written; an older file of that name is then whole.
    """
    tensors = {
        name: np.ascontiguousarray(to_host(view))
        for name, view in checkpoint.parameters.views(
            checkpoint.parameters.data
        ).items()
    }
    tensors["tokenizer"] = np.frombuffer(checkpoint.tokenizer.model, dtype=np.uint8)
    if checkpoint.moments is not None:
        first_moment, second_moment = checkpoint.moments
        tensors["adam.mean"], tensors["adam.square"] = (
            to_host(first_moment),
            to_host(second_moment),
        )
    metadata = {
        "format": FORMAT,
        "checksums": json.dumps({name: crc32(t.data) for name, t in tensors.items()}),
        "config": json.dumps(dataclasses.asdict(checkpoint.model.config)),
        "state": json.dumps(checkpoint.state),
    }
    with replacing(path) as partial:
        try:
            save_file(tensors, partial, metadata)
        except SafetensorError as error:
            raise OSError(EIO, f"could not be written: {error}") from error


def load(path: Path, with_moments: bool = False) -> Checkpoint:
    """Read a checkpoint, checking every tensor against the configuration.

    Raises: ValueError saying what is wrong with the file, FileNotFoundError.
    """
    if not path.is_file():
        raise FileNotFoundError(f"expected a checkpoint, found no file {path}")
    try:
        with safe_open(path, framework="np") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise ValueError(
                    f"expected format {FORMAT!r}, got {metadata.get('format')!r}"
                )
            config = from_dict(ModelConfig, json.loads(metadata["config"]))
            state = json.loads(metadata["state"])
            names, least = set(file.keys()), 4 * config.num_parameters
            if path.stat().st_size < least:
                raise ValueError(f"expected at least {least:,} bytes, it is shorter")
            checksums = json.loads(metadata["checksums"])

            def read(name: str, like: np.ndarray) -> np.ndarray:
                return _checked(file.get_tensor(name), name, like, checksums[name])

            pieces = file.get_tensor("tokenizer")
            tokenizer = Tokenizer(
                _checked(pieces, "tokenizer", pieces, checksums["tokenizer"]).tobytes()
            )
            if tokenizer.vocab_size != config.vocab_size:
                raise ValueError(
                    f"expected a tokenizer of {config.vocab_size} word pieces, "
                    f"got {tokenizer.vocab_size}"
                )
            model = Transformer(config, seed=None)
            parameters = ParameterBuffer(model)
            views = parameters.views(parameters.data)
            if missing := sorted(views.keys() - names):
                raise ValueError(f"expected a tensor {missing[0]}, found none")
            extra = names - views.keys() - {"tokenizer", "adam.mean", "adam.square"}
            if extra:
                raise ValueError(f"expected no tensor {min(extra)}")
            for name, view in views.items():
                view[...] = read(name, view)
            moments = None
            if with_moments:
                if not {"adam.mean", "adam.square"} <= names:
                    raise ValueError("it holds no optimizer state to resume from")
                moments = (
                    read("adam.mean", parameters.data),
                    read("adam.square", parameters.data),
                )
    except UNUSABLE as error:
        raise ValueError(f"{path}: not a usable checkpoint: {error}") from error
    return Checkpoint(model, tokenizer, parameters, state, moments)


def _checked(
    tensor: np.ndarray, name: str, like: np.ndarray, checksum: int
) -> np.ndarray:
    if tensor.dtype != like.dtype or tensor.shape != like.shape:
        raise ValueError(
            f"{name}: expected {like.dtype} {like.shape}, "
            f"got {tensor.dtype} {tensor.shape}"
        )
    if not np.isfinite(tensor).all():
        raise ValueError(f"{name}: expected finite numbers")
    if crc32(tensor.data) != checksum:
        raise ValueError(f"{name}: its checksum is another than when it was written")
    return tensor
