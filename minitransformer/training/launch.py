"""Starts the ranks of a run on this machine, watches them, and starts them again.

Ranks on processors are started by MPI's `mpiexec`, ranks on GPUs one by one, with the
environment that torchrun-style launchers give. If one ends before its time all end, and
what is said names it.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the process that watches a rank needs none of it
    from minitransformer.runs.run_directory import RunDirectory
    from minitransformer.settings.config import RanksConfig

# What `watch` says of a rank that a signal ended.
NAMED = re.compile(r"^(rank \d+) was ended by signal")

# Seconds that ranks have to end by themselves once they are asked to.
GRACE = 10.0

# Exit codes that another try would only bring about again, or that were asked for.
FINAL = {0, 2, 128 + signal.SIGINT, 128 + signal.SIGTERM}


class Ranks:
    """The processes of one try."""

    def __init__(
        self,
        command: Sequence[str],
        config: RanksConfig,
        processes: Callable[[], list[int]],
    ) -> None:
        self.named: str | None = None
        self._ids = processes
        self._reader: threading.Thread | None = None
        # Sessions of their own: Ctrl-C comes to this process alone.
        if config.ranks > 1:
            watched = [sys.executable, "-m", "minitransformer.training.launch"]
            mpi = subprocess.Popen(
                [find_mpiexec(), "-n", str(config.ranks), *watched, *command],
                start_new_session=True,
                stderr=subprocess.PIPE,
                encoding="utf-8",
                errors="replace",
            )
            self.processes: list[subprocess.Popen[str]] = [mpi]
            self._reader = threading.Thread(target=self._pass_on, args=(mpi.stderr,))
            self._reader.start()
        else:
            count, port = config.gpus, free_port()
            self.processes = [
                subprocess.Popen(
                    command,
                    start_new_session=True,
                    env=os.environ | environment(rank, count, port),
                    text=True,
                )
                for rank in range(count)
            ]

    def _pass_on(self, lines: Iterable[str]) -> None:
        """Show what MPI and the ranks say, and look for the rank that ended."""
        for line in lines:
            sys.stderr.write(line)
            sys.stderr.flush()
            if (found := NAMED.match(line)) and self.named is None:
                self.named = found[1]

    def wait(self) -> int:
        """Wait until all have ended, or one has failed; return its exit code."""
        while True:
            codes = [process.poll() for process in self.processes]
            for rank, code in enumerate(codes):
                if code:
                    if len(codes) > 1:
                        self.named = f"rank {rank}"
                    self.end()
                    return 128 - code if code < 0 else code
            if None not in codes:
                self.end()
                return 0
            time.sleep(0.05)

    def end(self) -> None:
        """End what still runs, with force if it does not go."""
        for stop in (signal.SIGTERM, signal.SIGKILL):
            deadline = time.monotonic() + GRACE
            for process in self.processes:
                if process.poll() is None:
                    os.killpg(process.pid, stop)
            while any(p.poll() is None for p in self.processes):
                if time.monotonic() > deadline:
                    break
                time.sleep(0.05)
        if self._reader is not None:
            for number in self._ids():  # where a dead parent does not end its child
                with suppress(ProcessLookupError):
                    os.kill(number, signal.SIGKILL)
            self._reader.join(GRACE)


def launch(
    command: Callable[[int], Sequence[str]],
    config: RanksConfig,
    processes: Callable[[], list[int]],
) -> int:
    """Run ranks to their end, up to 1 + restarts times; return the exit code.

    `command(attempt)` is what each rank runs, `processes()` their ids by rank. A signal
    to stop is passed on to rank 0, which makes all ranks stop at the same step; a
    second signal ends them at once.
    """
    running: list[Ranks] = []
    asked = 0

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked += 1
        ids = processes()
        if asked == 1 and ids:
            os.kill(ids[0], number)
        elif running:
            running[0].end()

    handlers = {s: signal.signal(s, stop) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        for attempt in range(config.restarts + 1):
            running[:] = [Ranks(command(attempt), config, processes)]
            code = running[0].wait()
            if code in FINAL or asked:
                break
            who, code = running[0].named or "the training", 1
            print(
                f"train.py: error: {who} ended before its time, and with it the run",
                file=sys.stderr,
            )
            if attempt < config.restarts:
                print(f"restart {attempt + 1} of {config.restarts}", file=sys.stderr)
        return code
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def launch_training(
    command: Sequence[str], run: RunDirectory, resumes: bool, config: RanksConfig
) -> int:
    """Run the ranks of a training command, restarted from its checkpoints.

    The last of several equal flags counts, so what each rank is told here overrides
    the flags of `command`.
    """
    alone = ["--ranks", "1", "--gpus", "1", "--restarts", "0"]

    def attempt_command(attempt: int) -> list[str]:
        place = ["--resume", str(run.path)]
        if not resumes:
            place = ["--run", str(run.path), "--attempt", str(attempt)]
        return [*command, *place, *alone]

    code = launch(attempt_command, config, run.processes)
    if code == 1 and run.steps():
        print(f"train.py --resume {run.path} goes on from the last checkpoint")
    return code


def find_mpiexec() -> str:
    """Find MPI's launcher, beside this Python first. Raises: RuntimeError."""
    beside = str(Path(sys.executable).parent)
    for path in (beside, None):
        for name in ("mpiexec", "mpirun"):
            if found := shutil.which(name, path=path):
                return found
    raise RuntimeError(
        "--ranks needs an MPI, found no mpiexec: pip install 'minitransformer[mpi]'"
    )


def environment(rank: int, size: int, port: int) -> dict[str, str]:
    """What tells a rank who it is, in the names of torchrun-style launchers."""
    if size == 1:
        return {}
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def free_port() -> int:
    """Return a TCP port that nothing on this machine listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def watch(command: Sequence[str]) -> int:
    """Run a rank under MPI, and say which one it was if a signal ends it.

    MPI's launchers end all ranks when one dies, and not all of them name it.
    """
    process = subprocess.Popen(command, close_fds=False, preexec_fn=_die_with_parent)
    code = process.wait()
    if code < 0:
        rank = os.environ.get("PMI_RANK") or os.environ.get("OMPI_COMM_WORLD_RANK")
        print(f"rank {rank} was ended by signal {-code}", file=sys.stderr, flush=True)
        time.sleep(0.5)  # for the line to be passed on before all is torn down
        return 128 - code
    return code


def _die_with_parent() -> None:
    """On Linux, end this process when its parent ends."""
    pr_set_pdeathsig = 1
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(watch(sys.argv[1:]))
