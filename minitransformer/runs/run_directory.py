"""The run directory: settings, checkpoints, metrics and log of one training run."""

from __future__ import annotations

import itertools
import json
import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from minitransformer.runs.checkpoint import (
    SUFFIX,
    Checkpoint,
    has_moments,
    load,
    save,
)
from minitransformer.runs.state import json_of
from minitransformer.settings.config import RunConfig, TrainingConfig
from minitransformer.system.files import (
    file_lock,
    make_folder,
    sweep,
    sync,
    unfinished,
    write_bytes,
)

# The files of a run, besides the checkpoints of steps.
CONFIG = "config.json"
METRICS = "metrics.jsonl"
TOKENIZER = "tokenizer.model"
LOG = "train.log"
BEST = f"best{SUFFIX}"
AVERAGED = f"averaged{SUFFIX}"

# Files that say how far a training has come: a mark that there is no checkpoint to
# resume from yet, and a lock.
UNSAVED = ".unsaved"
LOCK = ".training.lock"
HIDDEN = (UNSAVED, LOCK)  # in this order they are deleted

# Regular expressions for the name of any file of a run, and for its name while it is
# written.
SINGLE = (CONFIG, METRICS, TOKENIZER, LOG, BEST, AVERAGED, *HIDDEN)
NAMES = "|".join(map(re.escape, SINGLE)) + rf"|step-\d{{8,}}{re.escape(SUFFIX)}"
UNFINISHED = unfinished(NAMES)

# So many of a run's last checkpoints have Adam's moments, should one be damaged.
WITH_MOMENTS = 2


class RunDirectory:
    """The files of one training run. Of several ranks, only rank 0 writes here."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / CONFIG
        self.metrics = path / METRICS
        self.tokenizer = path / TOKENIZER
        self.log = path / LOG
        self.best = path / BEST
        self.averaged = path / AVERAGED
        # There while the run has saved no checkpoint to resume from.
        self.unsaved = path / UNSAVED
        self._lock = path / LOCK
        self._locked: os.stat_result | None = None  # the lock of this training

    @contextmanager
    def lock(self, resumes: bool = False) -> Iterator[None]:
        """Keep other trainings out of this directory.

        A directory that is not known to be a run's is left as it is. Unfinished files
        of killed processes are deleted. If no run begins here, the hidden files are
        deleted at the end, and so is a directory that this call has made.

        Raises: ValueError if another training is running here, if a hidden file is a
        link to one elsewhere, or as `require_free` unless a run `resumes`.
        """
        for path in (self.unsaved, self._lock):
            if path.is_symlink():
                raise ValueError(f"{path}: expected a file of a run, got a link")
        if not resumes:
            self.require_free()
        may_go = resumes or self._lock.exists() or not self.path.exists()
        with ExitStack() as stack:
            # Take the lock of the operating system, which ends with this process.
            make_folder(self.path)
            try:
                stack.enter_context(file_lock(self._lock, wait=False))
            except TimeoutError as error:
                problem = "another training is running here"
                raise ValueError(f"{self.path}: {problem}") from error
            self._locked = self._lock.stat()
            try:
                if not resumes:
                    self.require_free()  # nor did another run begin meanwhile
                sweep(self.path, NAMES)
                yield
            finally:
                # If no run has begun, leave no trace.
                with suppress(OSError, ValueError):
                    self._check()
                    for name in () if self.config.exists() else HIDDEN:
                        (self.path / name).unlink(missing_ok=True)
                    if may_go:
                        self.path.rmdir()  # which fails unless it is empty

    def _check(self) -> None:
        """Raises: ValueError if this is no longer the directory that `lock` locked."""
        with suppress(OSError):
            locked = self._locked
            if locked is None or os.path.samestat(locked, self._lock.stat()):
                return
        raise ValueError(
            f"{self.path}: this directory was moved, removed or replaced: this "
            "training ends and writes nothing more"
        )

    def require_free(self) -> None:
        """Raises: ValueError if the directory holds anything but what `lock` wrote."""
        names = set(os.listdir(self.path)) if self.path.exists() else set[str]()
        if self._lock.name in names:  # of a training that ended before it began a run
            names = {x for x in names - {*HIDDEN} if not re.fullmatch(UNFINISHED, x)}
        if names:
            raise ValueError(
                f"expected a new or empty run directory, got {self.path}, which holds "
                f"{min(names)}: choose another --run, or continue a run with --resume"
            )

    def begin(self, settings: RunConfig, tokenizer: bytes, resumes: bool) -> None:
        """Write config.json and tokenizer.model, unless a resumed run has the same."""
        self._check()
        if not resumes:
            self.unsaved.touch()
        if not resumes or self.read_config() != settings:
            write_bytes(self.config, settings.to_json().encode(), replace=True)
        if not self.tokenizer.is_file() or self.tokenizer.read_bytes() != tokenizer:
            write_bytes(self.tokenizer, tokenizer, replace=True)

    def last_written(self) -> float:
        """Return when training last wrote here, in seconds since 1970."""
        written = self.config, self.metrics
        return max(path.stat().st_mtime for path in written if path.exists())

    def read_config(self) -> RunConfig:
        """Read config.json. Raises: ValueError if it is missing or unusable."""
        if not self.config.is_file():
            raise ValueError(f"expected a run directory, found no {self.config}")
        try:
            return RunConfig.from_json(self.config.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{self.config}: {error}") from error

    def record(self, step: int, **values: float | str) -> None:
        """Append a line to metrics.jsonl; numbers that are not finite become null."""
        self.append(self.metrics, json_of({"step": step, **values}))

    def save(self, path: Path, checkpoint: Checkpoint) -> None:
        """Write a checkpoint, once the metrics up to it are on the disk."""
        self._check()
        if self.metrics.exists():
            sync(self.metrics)
        save(path, checkpoint, replace=True)

    def append(self, path: Path, line: str) -> None:
        """Append a line to a log; a full disk costs the line and not the run."""
        self._check()
        data = f"{line}\n".encode(errors="backslashreplace")
        try:
            with open(path, "ab") as file:
                file.write(data)
        except OSError as error:
            print(f"{path}: a line was lost: {error}", file=sys.stderr)

    def read_metrics(self) -> list[dict[str, Any]]:
        """Return the lines of metrics.jsonl that are complete: objects with a step.

        Raises: ValueError if there is neither metrics.jsonl nor config.json, which a
        run has before its first metrics.
        """
        if not self.metrics.is_file():
            if self.config.is_file():
                return []
            raise ValueError(f"expected a run directory, found no {self.metrics}")
        records = []
        for line in self.metrics.read_bytes().splitlines():
            # It may be that a line is being written, or that the disk was full.
            with suppress(ValueError, RecursionError):
                record = json.loads(line)
                if isinstance(record, dict) and type(record.get("step")) is int:
                    records.append(record)
        return records

    def truncate_metrics(self, step: int, validates: bool = False) -> None:
        """Drop the lines that a run resumed after `step` writes again.

        With `validates`, it begins with the validation after that step.
        """
        self._check()

        def is_kept(record: dict[str, Any]) -> bool:
            if validates and record["step"] == step and "validation_loss" in record:
                return False
            return record["step"] <= step and not {"test_bleu", "ended"} & record.keys()

        if self.metrics.exists():
            kept = filter(is_kept, self.read_metrics())
            lines = [json_of(record) + "\n" for record in kept]
            write_bytes(self.metrics, "".join(lines).encode(), replace=True)

    def checkpoint(self, step: int) -> Path:
        """Return the path of the checkpoint after `step` updates."""
        return self.path / f"step-{step:08d}{SUFFIX}"

    def checkpoints(self) -> list[Path]:
        """Return the checkpoints that are named by their step, oldest first.

        Files of other names, such as copies, are ignored.
        """
        names = [path.stem[5:] for path in self.path.glob(f"step-*{SUFFIX}")]
        steps = sorted({int(name) for name in names if name.isdecimal()})
        return [p for step in steps if (p := self.checkpoint(step)).is_file()]

    def prune(self, training: TrainingConfig) -> None:
        """Delete all but the last `num_kept` checkpoints named by their step.

        All but the last WITH_MOMENTS lose Adam's moments, two thirds of their size. A
        checkpoint that was saved only because the run stopped is deleted as soon as
        there is a newer one: an unbroken run would neither have it nor average it.
        """
        # Keep the newest checkpoint, and before it only such as were due.
        self._check()
        checkpoints = self.checkpoints()
        due = [p for p in checkpoints[:-1] if training.is_regular(int(p.stem[5:]))]
        kept = [*due, *checkpoints[-1:]][-training.num_kept :]
        for path in checkpoints:
            if path not in kept:
                path.unlink()

        # Without its moments, an older checkpoint still serves to average.
        for path in kept[:-WITH_MOMENTS]:
            with suppress(OSError, ValueError):  # it is damaged, or the disk is full
                if has_moments(path):
                    self.save(path, load(path))
        if checkpoints:
            self.unsaved.unlink(missing_ok=True)

    def preferred_checkpoint(self) -> Path:
        """Return the checkpoint to translate with: averaged, else best, else newest.

        Raises: FileNotFoundError if there is none.
        """
        for path in (self.averaged, self.best, *self.checkpoints()[::-1]):
            if path.is_file():
                return path
        raise FileNotFoundError(f"expected a checkpoint in {self.path}, found none")

    def is_run(self) -> bool:
        """Whether there is a run's directory, with a config.json of its kind."""
        try:
            return bool(self.read_config())
        except (OSError, ValueError):
            return False

    def has_ended(self) -> bool:
        """Whether training came to its end here, at least once."""
        recorded = any("ended" in record for record in self.read_metrics())
        ended = recorded or self.averaged.is_file()
        return ended and self.has_checkpoint() and self.is_run()

    def has_checkpoint(self) -> bool:
        with suppress(FileNotFoundError):
            return bool(self.preferred_checkpoint())
        return False


def new_directory(preset: str, runs: Path = Path("runs")) -> Path:
    """Make a directory PRESET-TIME in `runs`; if there is one, PRESET-TIME-2, ..."""
    name = f"{preset}-{time.strftime('%Y%m%d-%H%M%S')}"
    make_folder(runs)
    for number in itertools.count(1):
        path = runs / (name if number == 1 else f"{name}-{number}")
        with suppress(FileExistsError):
            make_folder(path, exist_ok=False)
            break
    (path / LOCK).touch()  # the mark that `lock` may remove the folder
    return path
