"""Start the ranks of a run on this machine, watch them, and restart them.

MPI's `mpiexec` starts ranks that compute on processors. Ranks that compute on GPUs are
started one by one, with the environment variables of torchrun-style launchers. When one
rank ends early, all others are ended too, and an error names the one that ended first.
When the launcher itself ends, so do its ranks, except on Windows.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:  # `run_rank` starts faster without them
    from minitransformer.runs.run_directory import RunDirectory
    from minitransformer.settings.config import RanksConfig

# How long ranks may take to end after SIGTERM, before SIGKILL, and the pause between
# two looks at processes. Units: seconds
GRACE_PERIOD = 10.0
POLL_INTERVAL = 0.05

# Open MPI would bind each of two ranks, with all its threads, to one core.
UNBOUND = {
    "OMPI_MCA_hwloc_base_binding_policy": "none",  # its version 4
    "PRTE_MCA_hwloc_default_binding_policy": "none",  # and 5
}

WINDOWS = not hasattr(os, "killpg")

# The signals that ask a training to save and stop; SIGHUP says that a terminal closed.
# Windows has SIGBREAK (Ctrl-Break), which alone reaches a process in another group.
HANGUP = getattr(signal, "SIGHUP", None)
BREAK = getattr(signal, "SIGBREAK", None)
STOP_SIGNALS = tuple(s for s in (HANGUP, BREAK, signal.SIGINT, signal.SIGTERM) if s)
ASK_TO_STOP = getattr(signal, "CTRL_BREAK_EVENT", signal.SIGTERM)
KILL = getattr(signal, "SIGKILL", signal.SIGTERM)

# The exit code by which a rank tells the launcher of an error that a restart would meet
# again, such as a damaged file.
LASTING_ERROR = 65
USAGE_ERROR = 2

# The exit codes of ranks that have done their work, or stopped because they were asked.
DONE = {0, *(128 + number for number in STOP_SIGNALS)}


@contextmanager
def stop_signals_handled(handle: Callable[[int], None]) -> Iterator[None]:
    """Call `handle(number)` for each of the stop signals that arrives.

    A SIGHUP that is ignored, as under nohup, stays so.
    """

    def handler(number: int, frame: FrameType | None) -> None:
        handle(number)

    heeded = [
        number
        for number in STOP_SIGNALS
        if number != HANGUP or signal.getsignal(number) != signal.SIG_IGN
    ]
    before = {number: signal.signal(number, handler) for number in heeded}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def end_at_second_signal() -> None:
    """Let SIGINT and SIGTERM end this process at once, and ignore SIGHUP.

    A terminal that closes may send SIGHUP twice.
    """
    for number in STOP_SIGNALS:
        ignored = number == HANGUP
        signal.signal(number, signal.SIG_IGN if ignored else signal.SIG_DFL)


class RankProcesses:
    """The processes of all ranks, started once.

    `failed` names the first that failed; `interrupted` tells whether a signal ended all
    at once, as it does before they have begun.

    Each process has a session of its own, so that Ctrl-C reaches the launcher alone.
    """

    failed: str | None = None
    interrupted = False

    def __init__(self, processes: Sequence[subprocess.Popen[str]]) -> None:
        self._processes = processes

    def wait(self, signals: Sequence[int]) -> int:
        """Wait until all have ended or one has failed; return its exit code.

        `signals` are those that the launcher has received, which may become more. The
        first makes all ranks save and stop, the second ends them at once.
        """
        asked = False
        while True:
            time.sleep(POLL_INTERVAL)
            codes = [process.poll() for process in self._processes]
            ended = self._exit_codes()
            if failures := [rank for rank in ended if ended[rank] not in DONE]:
                self.failed, code = f"rank {failures[0]}", ended[failures[0]]
                break
            if None not in codes:
                code = max(code or 0 for code in codes)
                break
            if len(signals) > 1 or (signals and not asked and not self._ask_to_stop()):
                self.interrupted, code = True, 128 + signals[-1]
                break
            asked = bool(signals)
        self._terminate()
        return code

    def _exit_codes(self) -> dict[str, int]:
        """Return the exit codes of the ranks that have ended, in order of their ends.

        That of a rank that a signal ended is negative.
        """
        raise NotImplementedError

    def _process_ids(self) -> dict[str, int]:
        """Return the process ids of the ranks that have started."""
        raise NotImplementedError

    def _ask_to_stop(self) -> bool:
        """Have rank 0 stop all ranks after the same step, if it has started."""
        if not (first := self._process_ids().get("0")):
            return False
        with suppress(ProcessLookupError):
            os.kill(first, ASK_TO_STOP)
        return True

    def _terminate(self) -> None:
        """End what still runs: by SIGTERM, and by SIGKILL after the grace period."""
        for stop in (signal.SIGTERM, KILL):
            running = [p for p in self._processes if p.poll() is None]
            for process in running:
                with suppress(ProcessLookupError):
                    if WINDOWS:
                        process.terminate()
                    else:
                        os.killpg(process.pid, stop)
            deadline = time.monotonic() + GRACE_PERIOD
            while any(p.poll() is None for p in running):
                if time.monotonic() > deadline:
                    break
                time.sleep(POLL_INTERVAL)


class SeparateRanks(RankProcesses):
    """Ranks that are started one by one: several on a GPU each, or one of any kind."""

    def __init__(self, command: Sequence[str], count: int) -> None:
        if count > 1:
            refuse_windows("--gpus")
        self._ended: dict[str, int] = {}
        with socket.socket() as listener:  # find a port that nobody listens on
            listener.bind(("127.0.0.1", 0))
            port = int(listener.getsockname()[1])
        super().__init__(
            [
                subprocess.Popen(
                    command,
                    start_new_session=True,
                    stdin=subprocess.DEVNULL,
                    env=os.environ | rank_environment(rank, count, port),
                    text=True,
                    creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),
                    preexec_fn=None if WINDOWS else _end_with_parent,
                )
                for rank in range(count)
            ]
        )

    def _exit_codes(self) -> dict[str, int]:
        """Of ranks that end at nearly the same time, lasting errors come first."""
        found = ((str(rank), p.poll()) for rank, p in enumerate(self._processes))
        codes = {rank: code for rank, code in found if code is not None}
        for rank in sorted(
            codes, key=lambda rank: codes[rank] not in (USAGE_ERROR, LASTING_ERROR)
        ):
            self._ended.setdefault(rank, codes[rank])
        return self._ended

    def _process_ids(self) -> dict[str, int]:
        return {str(rank): p.pid for rank, p in enumerate(self._processes)}


class MpiRanks(RankProcesses):
    """Ranks that `mpiexec`, the only process here, has started.

    `run_rank` writes the id of each rank's process, and the code with which it ended,
    to files in `folder`.
    """

    def __init__(self, command: Sequence[str], count: int, folder: Path) -> None:
        refuse_windows("--ranks")
        self._folder = folder
        rank = [sys.executable, "-m", "minitransformer.training.launch"]
        rank += [str(folder), str(os.getpid())]
        mpi = subprocess.Popen(
            [find_mpiexec(), "-n", str(count), *rank, *command],
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            env=UNBOUND | os.environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            preexec_fn=_end_with_parent,
        )
        super().__init__([mpi])
        # mpiexec would end if it could not write to a closed pipe or a full disk.
        self._forwarders = []
        for streams in ((mpi.stdout, sys.stdout), (mpi.stderr, sys.stderr)):
            forwarder = threading.Thread(target=_forward, args=streams, daemon=True)
            forwarder.start()
            self._forwarders.append(forwarder)

    def _exit_codes(self) -> dict[str, int]:
        return self._read_notes(".code")

    def _process_ids(self) -> dict[str, int]:
        return self._read_notes(".pid")

    def _read_notes(self, suffix: str) -> dict[str, int]:
        """Return by rank the numbers that `run_rank` has written, oldest first."""
        files = self._folder.glob(f"*{suffix}")
        oldest_first = sorted(files, key=lambda path: path.stat().st_mtime_ns)
        texts = {path.stem: path.read_text("utf-8") for path in oldest_first}
        return {rank: int(text) for rank, text in texts.items() if text}

    def _terminate(self) -> None:
        """End also the ranks that, on some systems, outlive the processes of MPI."""
        super()._terminate()
        ended = self._exit_codes()
        for rank, process_id in self._process_ids().items():
            if rank not in ended:
                with suppress(ProcessLookupError):
                    os.kill(process_id, KILL)
        for forwarder in self._forwarders:
            forwarder.join(GRACE_PERIOD)


def _forward(pipe: TextIO, stream: TextIO) -> None:
    with pipe:
        for line in pipe:
            stream.write(line)
            stream.flush()


def start_ranks(
    command: Sequence[str], config: RanksConfig, folder: Path
) -> RankProcesses:
    """Start `command` as many times as the settings say; `folder` is for notes."""
    if config.ranks > 1:
        return MpiRanks(command, config.ranks, folder)
    return SeparateRanks(command, config.gpus)


def launch_training(
    command: Sequence[str], run: RunDirectory, resumes: bool, config: RanksConfig
) -> int:
    """Run a training command as one or more ranks; return the exit code.

    When a rank has died, all start again from the last checkpoint, as often as
    `config.restarts` says, unless it reported an error that would come again. The first
    stop signal makes all ranks stop after the same step; the second ends them at once.
    """
    # The last of a repeated flag counts: a rank starts no others, and trains in `run`.
    alone = ["--ranks", "1", "--gpus", "1", "--restarts", "0"]
    place = ["--resume" if resumes else "--run", str(run.path)]
    signals: list[int] = []

    def note(number: int) -> None:
        if not (signals and number == HANGUP):  # which a closing terminal sends twice
            signals.append(number)

    with stop_signals_handled(note):
        for attempt in range(config.restarts + 1):
            flags = [*place, "--attempt", str(attempt), *alone]
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
                ranks = start_ranks([*command, *flags], config, Path(folder))
                code = ranks.wait(signals)
            if ranks.interrupted:
                print("train.py: error: interrupted", file=sys.stderr)
            if signals and code:
                return 128 + signals[-1]
            if code in (USAGE_ERROR, LASTING_ERROR, *DONE):
                return 1 if code == LASTING_ERROR else code
            failed = ranks.failed or "the training"
            print(f"train.py: error: {failed} ended unexpectedly", file=sys.stderr)
            if attempt < config.restarts:
                print(f"restart {attempt + 1} of {config.restarts}", file=sys.stderr)
    if run.checkpoints():
        print(f"train.py --resume {run.path} continues from the last checkpoint")
    return 1


def refuse_windows(flag: str) -> None:
    """Raises: RuntimeError on Windows, where only one process can be watched."""
    if WINDOWS:
        raise RuntimeError(
            f"{flag}: expected Linux or macOS, got Windows: start the ranks by "
            "`mpiexec -n N python train.py`"
        )


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


def run_rank(folder: Path, launcher: int, command: Sequence[str]) -> int:
    """Run the command of one rank under MPI; write to `folder` how it ends.

    MPI's launchers do not notice every rank that ends before the ranks are connected,
    and not all of them say which it was. The rank is ended when `launcher`, a process
    id, is gone.
    """
    rank = os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"]
    process = subprocess.Popen(command, close_fds=False, preexec_fn=_end_with_parent)
    (folder / f"{rank}.pid").write_bytes(str(process.pid).encode())
    while (code := process.poll()) is None:
        time.sleep(POLL_INTERVAL)
        try:
            os.kill(launcher, 0)
        except ProcessLookupError:
            process.kill()
    (folder / f"{rank}.code").write_bytes(str(code).encode())
    return 128 - code if code < 0 else code


def _end_with_parent() -> None:
    """On Linux, have the kernel end this process when its parent ends."""
    pr_set_pdeathsig = 1
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(run_rank(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]))
