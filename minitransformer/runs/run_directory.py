"""The run directory: settings, checkpoints, metrics and log of one training run."""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from minitransformer.runs.checkpoint import (
    SUFFIX,
    Checkpoint,
    has_moments,
    load,
    recorded_cost,
    save,
)
from minitransformer.settings.config import RunConfig, TrainingConfig
from minitransformer.system.files import (
    file_lock,
    json_of,
    make_folder,
    sweep,
    sync,
    write_bytes,
)

# The files of a run that are replaced as a whole, besides the checkpoints of steps.
OWN = [*"config.json metrics.jsonl tokenizer.model".split()]
OWN += [f"best{SUFFIX}", f"averaged{SUFFIX}"]

# So many of a run's last checkpoints have Adam's moments, should one be damaged.
WITH_MOMENTS = 2


class RunDirectory:
    """The files of one training run. Of several ranks, only rank 0 writes here.

    Names that begin with a dot are for the processes that train: a lock, their ids, a
    mark that there is no checkpoint yet, and files that are not complete.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config, self.metrics, self.tokenizer = (path / x for x in OWN[:3])
        self.best, self.averaged = (path / x for x in OWN[3:])
        self.log = path / "train.log"
        self._lock, self._process_ids = path / ".lock", path / ".processes"
        self._unsaved = path / ".unsaved"  # until there is a checkpoint to resume from

    @contextmanager
    def lock(self, processes: Sequence[int]) -> Iterator[None]:
        """Keep other trainings out of this directory. `processes`: the ranks' ids.

        What killed processes left unfinished is deleted. A directory that holds nothing
        at the end is removed.

        Raises: ValueError if another training is running here.
        """
        make_folder(self.path)
        with ExitStack() as stack:
            try:
                stack.enter_context(file_lock(self._lock, wait=False))
            except TimeoutError as error:
                ids = ", ".join(map(str, self.processes())) or "unknown"
                raise ValueError(
                    f"{self.path}: another training is running here, process {ids}"
                ) from error
            for own in (*OWN, f"step-*{SUFFIX}"):
                sweep(self.path, f".{own}.*.partial")
            write_bytes(self._process_ids, json.dumps(list(processes)).encode())
            try:
                yield
            finally:
                self.remove_if_empty()

    def remove_if_empty(self) -> None:
        """Remove the directory, or only what `lock` wrote, if no run began here."""
        with suppress(OSError):
            if not self.config.exists():
                self._lock.unlink(missing_ok=True)
                self._unsaved.unlink(missing_ok=True)
                self._process_ids.unlink(missing_ok=True)
                self.path.rmdir()  # which fails unless it is empty

    def processes(self) -> list[int]:
        """Return by rank the ids of the processes that train here, or did last."""
        with suppress(OSError, ValueError):  # it is missing or damaged
            return list(json.loads(self._process_ids.read_bytes()))
        return []

    def require_empty(self) -> None:
        """Raises: ValueError if the directory holds anything but hidden files."""
        names = (
            [path.name for path in self.path.iterdir()] if self.path.exists() else ()
        )
        if not all(name.startswith(".") for name in names):
            raise ValueError(
                f"expected a new or empty run directory, got {self.path}, which is in "
                "use: choose another --run or continue it with --resume"
            )

    def begin(self, settings: RunConfig, tokenizer: bytes, resumes: bool) -> None:
        """Write config.json and tokenizer.model, unless a resumed run has the same."""
        if not resumes:
            self._unsaved.touch()
        if not resumes or self.read_config() != settings:
            write_bytes(self.config, settings.to_json().encode())
        if not self.tokenizer.is_file() or self.tokenizer.read_bytes() != tokenizer:
            write_bytes(self.tokenizer, tokenizer)

    def last_written(self) -> float:
        """Return when training last wrote here, in seconds since 1970."""
        written = self.config, self.metrics
        return max(path.stat().st_mtime for path in written if path.exists())

    def own_files(self) -> list[Path]:
        """Return the run's own files that exist, without train.log and plots."""
        named = self.config, self.tokenizer, self.metrics, self.best, self.averaged
        return [path for path in (*named, *self.checkpoints()) if path.exists()]

    def is_unsaved(self) -> bool:
        """Whether the run began, but never saved a checkpoint to resume from."""
        return self._unsaved.exists()

    def read_config(self) -> RunConfig:
        """Read config.json. Raises: ValueError if it is missing or unusable."""
        if not self.config.is_file():
            raise ValueError(f"expected a run directory, found no {self.config}")
        try:
            return RunConfig.from_json(self.config.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{self.config}: {error}") from error

    def record(self, step: int, **values: float | str) -> None:
        """Append a line to metrics.jsonl, where what is not finite is null."""
        self.append(self.metrics, json_of({"step": step, **values}))

    def sync_metrics(self) -> None:
        """Wait until metrics.jsonl is on the disk, as a checkpoint presumes."""
        if self.metrics.exists():
            sync(self.metrics)

    def append(self, path: Path, line: str) -> None:
        """Append a line to a log; a full disk costs the line and not the run."""
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

        `validates` tells whether it begins with the validation after that step.
        """

        def keeps(record: dict[str, Any]) -> bool:
            if validates and record["step"] == step and "validation_loss" in record:
                return False
            return record["step"] <= step and not {"test_bleu", "ended"} & record.keys()

        if self.metrics.exists():
            kept = filter(keeps, self.read_metrics())
            lines = [json_of(record) + "\n" for record in kept]
            write_bytes(self.metrics, "".join(lines).encode())

    def checkpoint(self, step: int) -> Path:
        """Return the path of the checkpoint after `step` updates."""
        return self.path / f"step-{step:08d}{SUFFIX}"

    def checkpoints(self) -> list[Path]:
        """Return the checkpoints that are named by their step, oldest first.

        Other names, such as those of copies, are ignored.
        """
        names = [path.stem[5:] for path in self.path.glob(f"step-*{SUFFIX}")]
        steps = sorted({int(name) for name in names if name.isdecimal()})
        return [p for step in steps if (p := self.checkpoint(step)).is_file()]

    def load_to_resume(self, path: Path) -> Checkpoint:
        """Load a checkpoint of this run to resume from.

        Raises: ValueError, which says what can be done if the file is damaged.
        """
        try:
            return load(path, with_moments=True)
        except ValueError as error:
            checkpoints = self.checkpoints()
            found = checkpoints[: checkpoints.index(path)][-1:]
            with suppress(ValueError):
                load(path)
                found = [path]  # of which the moments alone are missing
            if not found:
                raise
            advice = f"delete it, and --resume goes on from {found[0].name}"
            if not has_moments(found[0]):
                advice = f"train.py --from {found[0]} begins a run with its parameters"
            raise ValueError(f"{error}; {advice}") from error

    def prune(self, training: TrainingConfig) -> None:
        """Delete all but the last `num_kept` checkpoints named by their step.

        Those but the last WITH_MOMENTS lose Adam's moments, two thirds of their size.
        One that was saved only because the run stopped goes once there is a newer one:
        an unbroken run would neither have it nor average it.
        """
        checkpoints = self.checkpoints()
        regular = [p for p in checkpoints[:-1] if training.is_regular(int(p.stem[5:]))]
        kept = [*regular, *checkpoints[-1:]][-training.num_kept :]
        for path in checkpoints:
            if path not in kept:
                path.unlink()
        for path in kept[:-WITH_MOMENTS]:
            with suppress(OSError, ValueError):  # it is damaged, or the disk is full
                if has_moments(path):
                    save(path, load(path))
        if checkpoints:
            self._unsaved.unlink(missing_ok=True)

    def preferred_checkpoint(self) -> Path:
        """Return the checkpoint to translate with: averaged, else best, else newest.

        If the run was resumed after it had been averaged, the older average is not
        preferred once the best checkpoint has a lower validation loss, or a higher BLEU
        in a run that goes by BLEU.

        Raises: FileNotFoundError if there is none.
        """
        if not (found := self._by_preference()):
            raise FileNotFoundError(f"expected a checkpoint in {self.path}, found none")
        if found[:2] == [self.averaged, self.best]:
            best_by = None
            with suppress(OSError, ValueError):  # a copy without a usable config.json
                best_by = self.read_config().training.best_by
            found[:2] = sorted(found[:2], key=lambda x: recorded_cost(x, best_by))
        return found[0]

    def is_run(self) -> bool:
        """Whether there is a run's directory, with a config.json of its kind."""
        try:
            return bool(self.read_config())
        except (OSError, ValueError):
            return False

    def has_ended(self) -> bool:
        """Whether training came to its end here, at least once."""
        says_so = any("ended" in record for record in self.read_metrics())
        whole = self.is_run() and self.has_checkpoint()
        return whole and (says_so or self.averaged.is_file())

    def has_checkpoint(self) -> bool:
        return bool(self._by_preference())

    def _by_preference(self) -> list[Path]:
        named = [path for path in (self.averaged, self.best) if path.is_file()]
        return named + self.checkpoints()[-1:]


def new_directory(preset: str, runs: Path = Path("runs")) -> Path:
    """Make a directory PRESET-TIME in `runs`; if there is one, PRESET-TIME-2, ..."""
    name = f"{preset}-{time.strftime('%Y%m%d-%H%M%S')}"
    make_folder(runs)
    for number in itertools.count(1):
        path = runs / (name if number == 1 else f"{name}-{number}")
        with suppress(FileExistsError):
            make_folder(path, exist_ok=False)
            break
    return path
