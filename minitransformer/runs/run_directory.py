"""TODO."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from minitransformer.files import locked, write_bytes
from minitransformer.runs.checkpoint import SUFFIX
from minitransformer.settings.config import RunConfig

LOCK = ".lock"


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

    def truncate_metrics(self, step: int) -> None:
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


class ReadOnlyRunDirectory(RunDirectory):
    """A run directory in which another rank writes, and this one only reads."""

    def in_use(self, processes: Sequence[int]) -> AbstractContextManager[None]:
        return nullcontext()

    def create(self, settings: RunConfig) -> None:
        """Leave it to rank 0."""

    def append(self, path: Path, line: str) -> None:
        """Leave it to rank 0."""

    def truncate_metrics(self, step: int) -> None:
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


def find_checkpoint(path: Path | None, runs: Path = Path("runs")) -> Path:
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
