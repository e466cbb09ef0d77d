"""The safety of a run: its directory and log, signals, clock, due dates, saving."""

from __future__ import annotations

import itertools
import math
import os
import shlex
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType

from tqdm import tqdm

from minitransformer.runs.checkpoint import Checkpoint
from minitransformer.runs.run_directory import RunDirectory
from minitransformer.runs.starting_point import SPLITS
from minitransformer.runs.state import RunState
from minitransformer.settings.config import RunConfig
from minitransformer.settings.scripts import as_installed
from minitransformer.system.machine import multiplies_bf16_fast
from minitransformer.text.batches import Batches
from minitransformer.text.pairs import TextPair
from minitransformer.training.distributed import Communicator, DivergedError, checksum
from minitransformer.training.optimizer import Optimizer
from minitransformer.training.progress import Progress, Update

# The signals that ask a training to save and stop. SIGHUP says that a terminal closed.
STOP_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)


@dataclass
class TrainingRun:
    """A run while this rank trains it, on so many `cores`.

    `start` has the model, and the state at first. `copied` is a line for the log, about
    the model whose weights it begins with.
    """

    directory: RunDirectory
    settings: RunConfig
    ranks: Communicator
    start: Checkpoint
    cores: int
    copied: str = ""

    # The stop signal that this process has received.
    signal: int | None = None
    # The stop signal at which all ranks end after the same step.
    stopped_by: int | None = None

    def __post_init__(self) -> None:
        self.training = self.settings.training
        self.writes = not self.ranks.rank  # to the directory
        self.progress = Progress(self.start.state)
        self._began = time.monotonic() - self.state.seconds
        self._seconds_before = self.state.seconds  # the last update

    @property
    def state(self) -> RunState:
        return self.progress.state

    @property
    def used_up(self) -> str | None:
        """The flag of the limit that ends the run, if one is reached."""
        return self.state.used_up(self.training)

    def check_ranks(self, precision: str) -> None:
        """Raises: DivergedError if ranks would not train the same in the same way."""
        state = asdict(self.state)
        text = state.pop("text")
        self.ranks.assert_equal(
            {
                "threads": self.cores,
                "vocabulary": self.start.tokenizer.checksum,
                **vars(self.settings.model),
                **vars(self.training),
                **vars(self.settings.decoding),
                "precision": precision,
                **{
                    f"digest of the {name} text": text.get(x)
                    for x, name in SPLITS.items()
                },
                **{f"{name} of the checkpoint": x for name, x in state.items()},
            }
        )

    def begin(self, resumes: bool) -> None:
        """Begin the run directory, or restore it as of the last checkpoint."""
        if self.writes:
            state = self.state
            self.directory.begin(self.settings, self.start.tokenizer.model, resumes)
            self.directory.truncate_metrics(state.step, bool(state.pending_validations))
            self.directory.prune(self.training)
        self.log(f"run         {self.directory.path}")

    def log(self, line: str) -> None:
        """Print a line, above the progress bar, and append it to the run's log."""
        if self.writes:
            line = as_installed(line)
            try:
                tqdm.write(line, file=sys.stdout)
                sys.stdout.flush()
            except OSError:  # a terminal that is gone ends no training
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            self.directory.append(self.directory.log, line)

    def record(self, **values: float | str) -> None:
        """Append a line about this step to metrics.jsonl."""
        if self.writes:
            self.directory.record(self.state.step, **values)

    def describe(self, device: str, workers: int, summary: Sequence[str]) -> None:
        """Log the settings, the device and a summary, before the first update."""
        settings = self.settings

        # MPI names a rank that dies by its process.
        if (count := self.ranks.size) > 1:
            ids = ", ".join(map(str, self.ranks.all_gather(os.getpid())))
            device = f"{count} ranks (processes {ids}), each {device}"

        # One block of lines, which no progress bar divides.
        preset = (
            f"preset      {settings.preset}: {settings.model.vocab_size:,} word "
            f"pieces, {self.training.steps:,} updates; --config names another"
        )
        lines = (self.copied, preset, f"device      {device}", *summary)
        self.log("\n".join(filter(None, lines)))
        unset = self.training.precision is None
        if unset and "cpu" in device and multiplies_bf16_fast():
            self.log("hint        --precision bf16 is faster on this processor")

        # Where a resumed run goes on, and whether as an unbroken one would.
        if self.state.step:
            self.log(f"resumed     after step {self.state.step:,}")
            before = self.state.workers
            if before not in (0, workers):
                self.log(
                    f"resumed     with workers: {workers}, not {before} as before "
                    "(--threads): each draws its own dropout noise, so results differ"
                )
        self.progress.change(workers=workers)

    @contextmanager
    def heeding_signals(self) -> Iterator[None]:
        """Finish the step, save and exit at the first stop signal, exit at a second.

        If SIGHUP is ignored, as under nohup, it stays ignored. A terminal that closes
        may send it twice: the second SIGHUP is ignored.
        """

        # At the first signal, the next one ends the process.
        def stop(number: int, frame: FrameType | None) -> None:
            self.signal = number
            for other in handlers:
                ignored = other == signal.SIGHUP
                signal.signal(other, signal.SIG_IGN if ignored else signal.SIG_DFL)

        # Take the place of the handlers, and restore them afterwards.
        handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
        if handlers[signal.SIGHUP] == signal.SIG_IGN:
            del handlers[signal.SIGHUP]
        for number in handlers:
            signal.signal(number, stop)
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def updates(self) -> Iterator[int]:
        """Yield the number of each update, until a limit is reached or a signal stops.

        The limits are steps, minutes and patience.
        """
        # Rank 0 shows a progress bar on a terminal.
        bar = tqdm(
            total=self.training.steps,
            initial=self.state.step,
            unit="step",
            disable=bool(self.ranks.rank) or not sys.stderr.isatty(),
        )
        with bar:
            while not self.stopped_by and not self.used_up:
                self._started = time.monotonic()
                yield self.state.step + 1
                bar.update()
            self.sync_ranks()

        # Patience or the clock may end a run before its last step.
        step = self.state.step
        if not self.stopped_by and step < self.training.steps:
            more = f"--resume {self.directory.path} with a larger value goes on"
            self.log(f"ended       after step {step:,}: {self.used_up} used up; {more}")

    def count(self, update: Update, stream: Batches) -> None:
        """Count an update, and check whether a rank was asked to stop."""
        self.progress.add(update, stream)
        self.sync_ranks()
        self.progress.add_seconds(time.monotonic() - self._started)

    def sync_ranks(self) -> None:
        """Take rank 0's clock; if one rank was asked to stop, all stop at this step."""
        clocks, signals = zip(
            *self.ranks.all_gather((time.monotonic() - self._began, self.signal)),
            strict=True,
        )
        self._seconds_before = self.state.seconds
        self.progress.change(seconds=clocks[0])
        # Of the signals that any rank has received, all ranks take the same.
        self.stopped_by = max(filter(None, signals), default=None)

    def report_is_due(self) -> bool:
        return self.state.step % self.training.log_every == 0

    def validation_is_due(self) -> bool:
        every = self.training.validate_every
        return bool(self.used_up) or self.state.step % every == 0

    def checkpoint_is_due(self) -> bool:
        return bool(self.used_up) or self.training.checkpoint_due(
            self.state.step, before=self._seconds_before, after=self.state.seconds
        )

    def synchronize(self) -> None:
        """Wait for all updates so far, and refuse to go on if some were skipped.

        A processor is never behind; a GPU is waited for before a report, a validation
        or a checkpoint. An update is skipped if its loss or gradient is not finite.

        Raises: DivergedError if some were skipped, unless a lower loss scale may help
        """
        if not (skipped := self.progress.synchronize()):
            return
        state = self.state
        where = self.start.parameters.first_nonfinite_gradient()
        last = f" (the last: in {where})" if where else ""
        raise DivergedError(
            f"step {state.step:,}, epoch {state.epoch}, batch {state.position}: "
            f"expected finite losses and gradients, got {skipped} not finite{last}; "
            "checkpoints are untouched, try a lower --learning-rate or --clip-norm"
        )

    def report(self) -> None:
        """Record the mean loss and the speed since the last report."""
        self.synchronize()
        if self.ranks.size > 1:
            parameters = checksum(self.start.parameters.data)
            self.ranks.assert_equal({"parameters": parameters})
        values, line = self.progress.report()
        self.record(**values)
        self.log(f"{self.state.outlook(self.training)}  {line}")

    @contextmanager
    def saving_after_errors(self, adam: Optimizer) -> Iterator[None]:
        """Save the model before an error ends the run, and log how to continue it.

        If the error is of this rank alone, this rank writes in the place of rank 0.
        Nothing is saved in the middle of an update, nor after a `DivergedError`.
        """
        try:
            yield
        except Exception as error:
            self.writes = True
            with suppress(Exception):  # the first error is the one to report
                if not isinstance(error, DivergedError):
                    self.save_unsaved(adam)
            if saved := self.directory.checkpoints():
                resume = f"train.py --resume {self.directory.path} continues from"
                self.log(f"failed      {resume} {saved[-1].name}")
            raise

    def save_unsaved(self, adam: Optimizer) -> None:
        """Save, unless this step has a checkpoint, or an update is only half made."""
        made = self.state.step - self.state.skipped
        is_saved = self.directory.checkpoint(self.state.step).exists()
        if self.state.step and not is_saved and int(adam.steps) == made:
            self.save(adam)

    def save(self, adam: Optimizer) -> None:
        """Write a checkpoint to resume from; delete the oldest ones."""
        self.synchronize()
        path = self.directory.checkpoint(self.state.step)
        self.save_as(path, self.state, adam)
        if self.writes:
            self.directory.prune(self.training)

    def save_as(
        self, path: Path, state: RunState, adam: Optimizer | None = None
    ) -> None:
        """Write the model, unless another rank does."""
        if self.writes:
            moments = (adam.first_moment, adam.second_moment) if adam else None
            saved = replace(self.start, state=state, moments=moments)
            self.directory.save(path, saved)

    def end(self, text: Mapping[str, TextPair]) -> None:
        """Log that the run has ended, and a command that translates a held-out line."""
        self.record(ended=str(self.used_up))
        self.log(f"done        {self.directory.path}, {self.state.seconds:,.0f} s")
        held_out = text.get("test") or text.get("val") or text["train"]
        short = (x for x, _ in held_out.lines() if 0 < len(x) < 80 and x[0] != "-")
        command = ["python", "translate.py", "--model", str(self.directory.path)]
        with suppress(OSError, ValueError):  # the text may be gone by now
            command += itertools.islice(short, 1)
        self.log(f"translate   {shlex.join(command)}")

        # A fine-tuned model may be worse than the one that it began with.
        if self.settings.start and "val" in text and not self.state.best_step:
            self.log(
                f"worse       no update improved {self.settings.start}, by the "
                f"validation {self.training.best_by or 'loss'}: try a lower "
                "--learning-rate, or other text"
            )

    def save_average(self, cost: float) -> None:
        """Write the model that the run ends with; its cost is NaN if unknown."""
        if not math.isnan(cost):
            by_bleu = self.training.best_by == "bleu"
            best = {"best_bleu": -cost} if by_bleu else {"best_loss": cost}
            self.progress.change(**best, best_step=self.state.step)
        self.save_as(self.directory.averaged, self.state)
