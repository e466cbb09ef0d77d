"""Saving and loading, without pickle and without a moment in which a file is half.

A checkpoint is one safetensors file: the parameters by name, the tokenizer's bytes, for
a training run also Adam's moments, and JSON with the configuration and the state.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from errno import EIO
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from minitransformer.backend import to_host
from minitransformer.config import ModelConfig, RunConfig
from minitransformer.files import locked, replacing, write_bytes
from minitransformer.layers import ParameterBuffer
from minitransformer.options import from_dict
from minitransformer.tokenizer import Tokenizer
from minitransformer.transformer import Transformer

FORMAT = "minitransformer 1"
SUFFIX = ".safetensors"
LOCK = ".lock"

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
        mean, square = checkpoint.moments
        tensors["adam.mean"], tensors["adam.square"] = to_host(mean), to_host(square)
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


def average(paths: Sequence[Path]) -> Checkpoint:
    """Average the parameters of checkpoints of one run (section 6.1).

    The tokenizer and the state are the last one's.

    Raises: ValueError if there is none, or they differ in shape or tokenizer.
    """
    if not paths:
        raise ValueError("expected checkpoints to average, got none")
    result = load(paths[-1])
    total = result.parameters.data.astype(np.float64)
    for path in paths[:-1]:
        other = load(path)
        if other.model.config != result.model.config:
            raise ValueError(f"{path}: its configuration differs from {paths[-1]}")
        if other.tokenizer.model != result.tokenizer.model:
            raise ValueError(f"{path}: its tokenizer differs from that of {paths[-1]}")
        total += other.parameters.data
    result.parameters.data[...] = total / len(paths)
    return result


class RunDirectory:
    """The files of one training run: checkpoints by step, best, last and averaged."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.json"
        self.metrics = path / "metrics.jsonl"
        self.tokenizer = path / "tokenizer.model"
        self.best = path / f"best{SUFFIX}"
        self.averaged = path / f"averaged{SUFFIX}"

    def in_use(self, processes: Sequence[int]) -> AbstractContextManager[None]:
        """Keep others from training in this directory. `processes`: the ranks' ids.

        Raises: ValueError if somebody does already.
        """
        return self._in_use(" ".join(map(str, processes)))

    @contextmanager
    def _in_use(self, note: str) -> Iterator[None]:
        self.path.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            try:
                stack.enter_context(locked(self.path / LOCK, False, note))
            except BlockingIOError as error:
                ids = self.processes()  # none yet, if it has only just begun
                raise ValueError(
                    f"{self.path}: another training is running in this directory"
                    + (f", process {ids[0]}" if ids else "")
                ) from error
            try:
                yield
            finally:
                if [path.name for path in self.path.iterdir()] == [LOCK]:
                    shutil.rmtree(self.path)  # nothing came of it

    def processes(self) -> list[int]:
        """The processes that train here, or did last, by rank."""
        try:
            return [int(number) for number in (self.path / LOCK).read_text().split()]
        except (OSError, ValueError):
            return []

    def create(self, settings: RunConfig) -> None:
        """Write config.json. Raises: ValueError if the directory holds anything."""
        if any(not path.name.startswith(".") for path in self.path.iterdir()):
            raise ValueError(
                f"expected a new or empty run directory, got {self.path}, which is in "
                "use: choose another --run or continue it with --resume"
            )
        write_bytes(self.config, settings.to_json().encode())

    def read_config(self) -> RunConfig:
        """Raises: ValueError if there is no config.json, or an unusable one."""
        if not self.config.is_file():
            raise ValueError(f"expected a run directory, found no {self.config}")
        try:
            return RunConfig.from_json(self.config.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{self.config}: {error}") from error

    def record(self, step: int, **values: float | str) -> None:
        """Append a line to metrics.jsonl."""
        self.append(self.metrics, json.dumps({"step": step, **values}))

    def append(self, path: Path, line: str) -> None:
        """Append a line to a log; on a full disk say so and lose it, not the run."""
        try:
            with open(path, "a", encoding="utf-8") as file:
                file.write(line + "\n")
        except OSError as error:
            print(f"{path}: a line was lost: {error}", file=sys.stderr)

    def forget_after(self, step: int) -> None:
        """Drop what a resumed run measures again: later steps, and the test."""
        if self.metrics.exists():
            lines = self.metrics.read_text(encoding="utf-8").split("\n")[:-1]
            kept = [
                line
                for line in lines
                if (values := _parsed(line))
                and values["step"] <= step
                and "test_bleu" not in values
            ]
            write_bytes(self.metrics, "".join(line + "\n" for line in kept).encode())

    def steps(self) -> list[Path]:
        """The numbered checkpoints, oldest first."""
        return sorted(self.path.glob(f"step-*{SUFFIX}"))

    def step(self, step: int) -> Path:
        return self.path / f"step-{step:08d}{SUFFIX}"

    def prune(self, keep_last: int) -> None:
        """Delete all but the newest `keep_last` numbered checkpoints."""
        for path in self.steps()[:-keep_last]:
            path.unlink()

    def decodable(self) -> Path:
        """The file to translate with: averaged if there, else best, else newest.

        Raises: FileNotFoundError if there is none.
        """
        for path in (self.averaged, self.best, *reversed(self.steps())):
            if path.exists():
                return path
        raise FileNotFoundError(f"expected a checkpoint in {self.path}, found none")


class WatchedRun(RunDirectory):
    """A run directory in which another rank writes, and this one only reads."""

    def in_use(self, processes: Sequence[int]) -> AbstractContextManager[None]:
        return nullcontext()

    def create(self, settings: RunConfig) -> None:
        """Leave it to rank 0."""

    def append(self, path: Path, line: str) -> None:
        """Leave it to rank 0."""

    def forget_after(self, step: int) -> None:
        """Leave it to rank 0."""

    def prune(self, keep_last: int) -> None:
        """Leave it to rank 0."""


def _parsed(line: str) -> dict[str, Any] | None:
    """A line of metrics.jsonl, or None if a full disk cut it short."""
    try:
        return json.loads(line)
    except ValueError:
        return None


def newest_run(runs: Path = Path("runs")) -> RunDirectory:
    """The run directory in `runs` that was written to last.

    Raises: FileNotFoundError if there is none.
    """
    candidates = [path.parent for path in runs.glob("*/config.json")]
    if not candidates:
        raise FileNotFoundError(
            f"expected a training run in {runs.absolute()}, found none: "
            "run train.py first or name one"
        )
    return RunDirectory(max(candidates, key=lambda run: run.stat().st_mtime))


def resolve(path: Path | None, runs: Path = Path("runs")) -> Path:
    """Find the checkpoint file that `path`, a file or run directory, stands for.

    None stands for the newest run in `runs`. Raises: FileNotFoundError.
    """
    if path is None:
        return newest_run(runs).decodable()
    return RunDirectory(path).decodable() if path.is_dir() else path


def is_model(text: str) -> bool:
    """Whether an argument names a run directory or a checkpoint, and not a sentence."""
    path = Path(text)
    if path.suffix == SUFFIX and path.is_file():
        return True
    return RunDirectory(path).config.is_file()
