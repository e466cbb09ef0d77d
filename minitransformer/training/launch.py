"""Start the ranks of a run on this machine, watch them, and restart them.

MPI's `mpiexec` starts ranks that compute on processors. Ranks that compute on GPUs are
started one by one, with the environment variables of torchrun-style launchers. When one
rank ends early, all others are ended too, and an error names the one that ended first.
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
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # `run_rank` starts faster without them
    from minitransformer.runs.run_directory import RunDirectory
    from minitransformer.settings.config import RanksConfig

# What `run_rank` prints when a signal ends its rank.
ENDED_BY_SIGNAL = re.compile(r"^(rank \d+) was ended by signal")

# How long ranks may take to end after SIGTERM, before SIGKILL. Units: seconds
GRACE_PERIOD = 10.0

# Exit codes after which nothing is restarted: success, wrong usage, and a stop that
# the user asked for.
FINAL_EXIT_CODES = {0, 2, 128 + signal.SIGINT, 128 + signal.SIGTERM}


class RankProcesses:
    """The processes of all ranks, started once. `failed` names the first that failed.

    Each process has a session of its own, so that Ctrl-C reaches the launcher alone.
    """

    def __init__(
        self, command: Sequence[str], config: RanksConfig, run: RunDirectory
    ) -> None:
        self.failed: str | None = None
        self._run = run
        self._reader: threading.Thread | None = None
        if config.ranks > 1:
            rank = [sys.executable, "-m", "minitransformer.training.launch", *command]
            mpi = subprocess.Popen(
                [find_mpiexec(), "-n", str(config.ranks), *rank],
                start_new_session=True,
                stderr=subprocess.PIPE,
                encoding="utf-8",
                errors="replace",
            )
            self._processes: list[subprocess.Popen[str]] = [mpi]
            self._reader = threading.Thread(target=self._forward, args=(mpi.stderr,))
            self._reader.start()
        else:
            with socket.socket() as listener:  # find a port that nobody listens on
                listener.bind(("127.0.0.1", 0))
                port = int(listener.getsockname()[1])
            self._processes = [
                subprocess.Popen(
                    command,
                    start_new_session=True,
                    env=os.environ | rank_environment(rank, config.gpus, port),
                    text=True,
                )
                for rank in range(config.gpus)
            ]

    def _forward(self, lines: Iterable[str]) -> None:
        """Show lines of MPI and the ranks; note the first rank that a signal ended."""
        for line in lines:
            sys.stderr.write(line)
            sys.stderr.flush()
            if not self.failed and (match := ENDED_BY_SIGNAL.match(line)):
                self.failed = match[1]

    def wait(self) -> int:
        """Wait until all have ended or one has failed; return its exit code."""
        code: int | None = None
        while code is None:
            time.sleep(0.05)
            codes = [process.poll() for process in self._processes]
            if failures := [rank for rank, found in enumerate(codes) if found]:
                code = codes[failures[0]]
                if len(codes) > 1:
                    self.failed = f"rank {failures[0]}"
            elif None not in codes:
                code = 0
        self.terminate()
        return 128 - code if code < 0 else code

    def terminate(self) -> None:
        """End what still runs: by SIGTERM, and by SIGKILL after the grace period."""
        for stop in (signal.SIGTERM, signal.SIGKILL):
            running = [p for p in self._processes if p.poll() is None]
            for process in running:
                os.killpg(process.pid, stop)
            deadline = time.monotonic() + GRACE_PERIOD
            while any(p.poll() is None for p in running):
                if time.monotonic() > deadline:
                    break
                time.sleep(0.05)
        if self._reader is not None:
            # On some systems a rank outlives the process that runs it.
            for process_id in self._run.processes():
                with suppress(ProcessLookupError):
                    os.kill(process_id, signal.SIGKILL)
            self._reader.join(GRACE_PERIOD)


def launch_training(
    command: Sequence[str], run: RunDirectory, resumes: bool, config: RanksConfig
) -> int:
    """Run a training command as one or more ranks; return the exit code.

    When a rank has died, all start again from the last checkpoint, as often as
    `config.restarts` says. The first SIGINT or SIGTERM goes to rank 0, which makes all
    ranks stop after the same step; the second ends them at once.
    """
    # The last of a repeated flag counts: a rank starts no others, and trains in `run`.
    alone = ["--ranks", "1", "--gpus", "1", "--restarts", "0"]
    ranks: RankProcesses | None = None
    signals = 0

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal signals
        signals += 1
        if signals == 1 and (process_ids := run.processes()):
            with suppress(ProcessLookupError):
                os.kill(process_ids[0], number)
        elif ranks is not None:
            ranks.terminate()

    handlers = {s: signal.signal(s, stop) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        for attempt in range(config.restarts + 1):
            place = ["--run", str(run.path), "--attempt", str(attempt)]
            if resumes:
                place = ["--resume", str(run.path)]
            ranks = RankProcesses([*command, *place, *alone], config, run)
            code = ranks.wait()
            if code in FINAL_EXIT_CODES or signals:
                return code
            failed = ranks.failed or "the training"
            print(f"train.py: error: {failed} ended unexpectedly", file=sys.stderr)
            if attempt < config.restarts:
                print(f"restart {attempt + 1} of {config.restarts}", file=sys.stderr)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if run.checkpoints():
        print(f"train.py --resume {run.path} continues from the last checkpoint")
    return 1


def find_mpiexec() -> str:
    """Return the path of MPI's launcher, preferably the one beside this Python.

    Raises: RuntimeError if there is none.
    """
    for path in (str(Path(sys.executable).parent), None):
        for name in ("mpiexec", "mpirun"):
            if launcher := shutil.which(name, path=path):
                return launcher
    raise RuntimeError(
        "--ranks needs an MPI, found no mpiexec: pip install 'minitransformer[mpi]'"
    )


def rank_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """Return the variables that torchrun-style launchers set for a rank."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def run_rank(command: Sequence[str]) -> int:
    """Run the command of one rank under MPI; if a signal ends it, print which rank.

    MPI's launchers end all ranks when one dies, and not all of them name it.
    """
    process = subprocess.Popen(command, close_fds=False, preexec_fn=_end_with_parent)
    code = process.wait()
    if code < 0:
        rank = os.environ.get("PMI_RANK") or os.environ.get("OMPI_COMM_WORLD_RANK")
        print(f"rank {rank} was ended by signal {-code}", file=sys.stderr, flush=True)
        time.sleep(0.5)  # until MPI has passed the line on, before it ends all
        return 128 - code
    return code


def _end_with_parent() -> None:
    """On Linux, have the kernel end this process when its parent ends."""
    pr_set_pdeathsig = 1
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(run_rank(sys.argv[1:]))
