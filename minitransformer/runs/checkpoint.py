"""The checkpoint format: how a model and a training run's state are saved and loaded.

A checkpoint is one safetensors file. It holds the parameters by name, the tokenizer,
for a training run also Adam's two moments, and as JSON the model's configuration, the
state of the run and a checksum of each tensor. Nothing in it is ever executed. A file
to pass on may hold the parameters as float16, or their matrices as int8 with a scale
for each row; when it is read, they become float32 again.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO
from zlib import crc32

import numpy as np
from safetensors import safe_open

from minitransformer.engine.backend import to_host
from minitransformer.model.parameters import ParameterBuffer
from minitransformer.model.transformer import Transformer
from minitransformer.runs.state import RunState, json_of
from minitransformer.settings.config import ModelConfig
from minitransformer.settings.options import from_dict
from minitransformer.system.announce import announce
from minitransformer.system.files import atomic_write
from minitransformer.text.tokenizer import Tokenizer

SUFFIX = ".safetensors"

# From so many bytes on, loading may take two seconds.
LARGE = 200_000_000

# The names in a file: of the format, the tokenizer, and Adam's first and second moment.
# They never change, because checkpoints that were written earlier must still load.
FORMAT = "minitransformer 1"
TOKENIZER = "tokenizer"
MOMENTS = "adam.mean", "adam.square"
SCALES = ".scales"  # after the name of a matrix that is stored as int8


@dataclass
class Checkpoint:
    """A model with its tokenizer, and the state of the run that trains it.

    `moments` are Adam's first and second moment. `stored` is the type of the parameters
    in the file.
    """

    model: Transformer
    tokenizer: Tokenizer
    parameters: ParameterBuffer
    state: RunState = field(default_factory=RunState)
    moments: tuple[np.ndarray, np.ndarray] | None = None
    stored: str = "float32"


def save(
    path: Path, checkpoint: Checkpoint, stored: str = "float32", replace: bool = False
) -> None:
    """Write a checkpoint, which appears at `path` only when it is complete.

    `stored` is the type in which the file holds the parameters: float32, float16, or
    int8 for matrices.

    Raises: OSError if it cannot be written, or if a file is there and `replace` is
    false. The older file then stays as it is.
    """
    # The tensors: parameters, tokenizer and moments.
    parameters = checkpoint.parameters
    tensors = {
        name: np.ascontiguousarray(to_host(view))
        for name, view in parameters.views(parameters.data).items()
    }
    if stored != "float32":
        tensors = _rounded(tensors, stored)
    tensors[TOKENIZER] = np.frombuffer(checkpoint.tokenizer.model, dtype=np.uint8)
    if checkpoint.moments is not None:
        moments = map(to_host, checkpoint.moments)
        tensors.update(zip(MOMENTS, moments, strict=True))

    # The metadata, with a checksum of each tensor and one of themselves.
    metadata = {
        "format": FORMAT,
        "checksums": json.dumps({name: crc32(t.data) for name, t in tensors.items()}),
        "config": json.dumps(dataclasses.asdict(checkpoint.model.config)),
        "state": json_of(dataclasses.asdict(checkpoint.state)),
    }
    if stored != "float32":
        metadata["parameters"] = stored
    metadata["checksum"] = _checksum(metadata)
    with atomic_write(path, replace) as file:
        write_tensors(file, tensors, metadata)


def _rounded(tensors: dict[str, np.ndarray], stored: str) -> dict[str, np.ndarray]:
    """Round parameters to float16, or their matrices to int8 with a scale for each row.

    A row of int8 holds whole numbers from -127 to 127, which times its scale are the
    parameters.
    """
    rounded: dict[str, np.ndarray] = {}
    for name, values in tensors.items():
        if stored == "int8" and values.ndim == 2:
            scales = np.abs(values).max(axis=1) / 127
            scales[scales == 0] = 1
            rounded[name] = np.rint(values / scales[:, None]).astype(np.int8)
            rounded[name + SCALES] = scales
        else:
            rounded[name] = values.astype(np.float16)
    return rounded


def write_tensors(
    file: BinaryIO, tensors: dict[str, np.ndarray], metadata: dict[str, str]
) -> None:
    """Write a safetensors file: the size of a JSON header, the header, the tensors."""
    # The header gives each tensor's type, shape and place after the header.
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, tensor in tensors.items():
        start = end
        end += tensor.nbytes
        header[name] = {
            "dtype": f"{tensor.dtype.kind.upper()}{8 * tensor.itemsize}",  # such as F32
            "shape": tensor.shape,
            "data_offsets": (start, end),
        }

    # Spaces align the tensors to eight bytes.
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for tensor in tensors.values():
        file.write(tensor.data)


def _checksum(metadata: dict[str, str]) -> str:
    return str(crc32(json.dumps(metadata, sort_keys=True).encode()))


def load(path: Path, with_moments: bool = False) -> Checkpoint:
    """Read a checkpoint, and check every tensor against the configuration.

    Raises: ValueError saying what is wrong with the file, FileNotFoundError.
    """
    if not path.is_file():
        raise FileNotFoundError(f"expected a checkpoint, found no file {path}")
    announce(f"loading {path}", path.stat().st_size > LARGE)
    with _opened(path) as file:
        return _read(file, with_moments)


def has_moments(path: Path) -> bool:
    """Return whether a checkpoint has Adam's moments, to resume from.

    Raises: as `recorded_state`.
    """
    with _opened(path) as file:
        return {*file.keys()}.issuperset(MOMENTS)


def recorded_state(path: Path) -> RunState:
    """Return the state that a checkpoint holds, without reading its parameters.

    Raises: ValueError saying that the file cannot be used, OSError if it is missing.
    """
    with _opened(path) as file:
        return RunState.from_json(json.loads(file.metadata()["state"]))


@contextmanager
def _opened(path: Path) -> Iterator[safe_open]:
    """Open a checkpoint. Any error of a damaged or malicious file is a ValueError."""
    try:
        with safe_open(path, framework="np") as file:
            yield file
    except (OSError, MemoryError):
        raise
    except Exception as error:
        raise ValueError(f"{path}: not a usable checkpoint: {error}") from error


def _read(file: safe_open, with_moments: bool) -> Checkpoint:
    """Raises: an error of any kind if the file is not a whole checkpoint."""
    # The metadata say what the tensors must be.
    metadata = file.metadata() or {}
    if metadata.get("format") != FORMAT:
        raise ValueError(f"expected format {FORMAT!r}, got {metadata.get('format')!r}")
    if metadata.pop("checksum", None) != _checksum(metadata):
        raise ValueError("the checksum of its metadata differs from the one written")
    config = from_dict(ModelConfig, json.loads(metadata["config"]))
    state = RunState.from_json(json.loads(metadata["state"]))
    stored = metadata.get("parameters", "float32")

    # The tokenizer, whose word pieces are the rows of the embedding.
    read = partial(_read_tensor, file, json.loads(metadata["checksums"]))
    size = file.get_slice(TOKENIZER).get_shape()
    tokenizer = Tokenizer(read(TOKENIZER, size, np.dtype(np.uint8)).tobytes())
    if tokenizer.vocab_size != config.vocab_size:
        raise ValueError(
            f"expected a tokenizer of {config.vocab_size} word pieces, "
            f"got {tokenizer.vocab_size}"
        )

    # The parameters, and the moments that Adam continues with.
    model = Transformer(config, seed=None)
    parameters = ParameterBuffer(model)
    _read_parameters(parameters, stored, read)
    moments = None
    if with_moments:
        if not {*file.keys()}.issuperset(MOMENTS):
            raise ValueError(
                "expected Adam's moments, which only the last checkpoints of a run have"
            )
        like = parameters.data
        first, second = (read(name, like.shape, like.dtype) for name in MOMENTS)
        moments = first, second
    return Checkpoint(model, tokenizer, parameters, state, moments, stored)


def _read_tensor(
    file: safe_open,
    checksums: dict[str, int],
    name: str,
    shape: Sequence[int],
    dtype: np.dtype[Any],
) -> np.ndarray:
    """Raises: ValueError if a tensor is not of this kind, or not as it was written."""
    tensor = file.get_tensor(name)
    if tensor.dtype != dtype or tensor.shape != tuple(shape):
        raise ValueError(
            f"{name}: expected {dtype} {tuple(shape)}, "
            f"got {tensor.dtype} {tensor.shape}"
        )
    if not np.isfinite(tensor).all():
        raise ValueError(f"{name}: expected finite numbers")
    if crc32(tensor.data) != checksums[name]:
        raise ValueError(f"{name}: its checksum differs from the one written")
    return tensor


def _read_parameters(
    parameters: ParameterBuffer, stored: str, read: Callable[..., np.ndarray]
) -> None:
    """Fill `parameters`, as float32, by `read` from a file with the `stored` type."""
    for name, view in parameters.views(parameters.data).items():
        # A matrix that is stored as int8 has a scale for each row.
        if stored == "int8" and view.ndim == 2:
            scales = read(name + SCALES, view.shape[:1], view.dtype)
            rows = read(name, view.shape, np.dtype(np.int8))
            np.multiply(rows, scales[:, None], out=view)
        else:
            dtype = view.dtype if stored == "float32" else np.dtype(np.float16)
            view[...] = read(name, view.shape, dtype)
