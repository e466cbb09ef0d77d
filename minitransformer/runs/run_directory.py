"""The run directory: settings, checkpoints, metrics and log of one training run."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from minitransformer.files import file_lock, write_bytes
from minitransformer.runs.checkpoint import SUFFIX
from minitransformer.settings.config import DecodingConfig, RunConfig


class RunDirectory:
    """The files of one training run. Of several ranks, only rank 0 writes here.

    Names that begin with a dot are for the processes that train: a lock, their ids, and
    files that are not complete yet.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.json"
        self.metrics = path / "metrics.jsonl"
        self.tokenizer = path / "tokenizer.model"
        self.best = path / f"best{SUFFIX}"
        self.averaged = path / f"averaged{SUFFIX}"
        self._process_ids = path / ".processes"

    @contextmanager
    def lock(self, processes: Sequence[int]) -> Iterator[None]:
        """Keep other trainings out of this directory. `processes`: the ranks' ids.

        A directory that holds nothing at the end is removed.

        Raises: ValueError if another training is running here.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            try:
                stack.enter_context(file_lock(self.path / ".lock", wait=False))
            except TimeoutError as error:
                ids = ", ".join(map(str, self.processes())) or "unknown"
                raise ValueError(
                    f"{self.path}: another training is running here, process {ids}"
                ) from error
            write_bytes(self._process_ids, json.dumps(list(processes)).encode())
            try:
                yield
            finally:
                if self._is_empty():
                    shutil.rmtree(self.path)

    def processes(self) -> list[int]:
        """Return by rank the ids of the processes that train here, or did last."""
        with suppress(OSError, ValueError, RecursionError):  # it is missing or damaged
            ids = json.loads(self._process_ids.read_bytes())
            if isinstance(ids, list) and all(type(x) is int and x > 0 for x in ids):
                return ids
        return []

    def _is_empty(self) -> bool:
        return all(path.name.startswith(".") for path in self.path.iterdir())

    def create(self, settings: RunConfig) -> None:
        """Write config.json. Raises: ValueError if the directory holds anything."""
        if not self._is_empty():
            raise ValueError(
                f"expected a new or empty run directory, got {self.path}, which is in "
                "use: choose another --run or continue it with --resume"
            )
        write_bytes(self.config, settings.to_json().encode())

    def read_config(self) -> RunConfig:
        """Read config.json. Raises: ValueError if it is missing or unusable."""
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
        """Append a line to a log; a full disk costs the line and not the run."""
        try:
            with open(path, "a", encoding="utf-8") as file:
                file.write(line + "\n")
        except OSError as error:
            print(f"{path}: a line was lost: {error}", file=sys.stderr)

    def read_metrics(self) -> list[dict[str, Any]]:
        """Return the lines of metrics.jsonl that are complete: objects with a step.

        Raises: ValueError if there is no metrics.jsonl.
        """
        if not self.metrics.is_file():
            raise ValueError(f"expected a run directory, found no {self.metrics}")
        records = []
        for line in self.metrics.read_text(encoding="utf-8").splitlines():
            with suppress(ValueError):  # it is being written, or the disk was full
                record = json.loads(line)
                if isinstance(record, dict) and type(record.get("step")) is int:
                    records.append(record)
        return records

    def truncate_metrics(self, step: int) -> None:
        """Drop the lines that a run resumed after `step` writes again."""
        if self.metrics.exists():
            lines = [
                json.dumps(record) + "\n"
                for record in self.read_metrics()
                if record["step"] <= step and "test_bleu" not in record
            ]
            write_bytes(self.metrics, "".join(lines).encode())

    def checkpoint(self, step: int) -> Path:
        """Return the path of the checkpoint after `step` updates."""
        return self.path / f"step-{step:08d}{SUFFIX}"

    def checkpoints(self) -> list[Path]:
        """Return the checkpoints that are named by their step, oldest first."""
        return sorted(self.path.glob(f"step-*{SUFFIX}"))

    def prune(self, keep_last: int) -> None:
        """Delete all but the newest `keep_last` checkpoints named by their step."""
        for path in self.checkpoints()[:-keep_last]:
            path.unlink()

    def preferred_checkpoint(self) -> Path:
        """Return the checkpoint to translate with: averaged, else best, else newest.

        Raises: FileNotFoundError if there is none.
        """
        for path in (self.averaged, self.best, *reversed(self.checkpoints())):
            if path.exists():
                return path
        raise FileNotFoundError(f"expected a checkpoint in {self.path}, found none")


class ReadOnlyRunDirectory(RunDirectory):
    """The run directory as the ranks above 0 see it: rank 0 does what is left out."""

    @contextmanager
    def lock(self, processes: Sequence[int]) -> Iterator[None]:
        yield

    def create(self, settings: RunConfig) -> None:
        """Do nothing."""

    def append(self, path: Path, line: str) -> None:
        """Do nothing."""

    def truncate_metrics(self, step: int) -> None:
        """Do nothing."""

    def prune(self, keep_last: int) -> None:
        """Do nothing."""


def newest_run(runs: Path = Path("runs")) -> RunDirectory:
    """Return the run directory in `runs` that was written to last.

    Raises: FileNotFoundError if there is none.
    """
    candidates = [path.parent for path in runs.glob("*/config.json")]
    if not candidates:
        raise FileNotFoundError(
            f"expected a training run in {runs.absolute()}, found none: "
            "run train.py first or name one"
        )
    return RunDirectory(max(candidates, key=lambda run: run.stat().st_mtime))


def find_checkpoint(path: Path | None, runs: Path = Path("runs")) -> Path:
    """Return the checkpoint that a file or run directory stands for.

    None stands for the newest run in `runs`. Raises: FileNotFoundError.
    """
    if path is None:
        return newest_run(runs).preferred_checkpoint()
    return RunDirectory(path).preferred_checkpoint() if path.is_dir() else path


def is_model(text: str) -> bool:
    """Return whether an argument names a run directory or a checkpoint file."""
    # os.path.isfile is False for what is no name or cannot be read; Path raises.
    is_checkpoint = text.endswith(SUFFIX) and os.path.isfile(text)
    return is_checkpoint or os.path.isfile(RunDirectory(Path(text)).config)


def decoding_defaults(checkpoint: Path) -> DecodingConfig:
    """Return how the run of a checkpoint decodes, with one translation a sentence.

    A checkpoint outside a run has the defaults of `DecodingConfig`.

    Raises: ValueError if config.json lies beside the checkpoint and is unusable.
    """
    run = RunDirectory(checkpoint.parent)
    if not run.config.is_file():
        return DecodingConfig()
    return replace(run.read_config().decoding, nbest=1)
