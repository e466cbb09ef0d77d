"""Data parallelism among processes: the ranks of a run, and all-reduce over them.

A run may have several ranks: processes that each hold a copy of the model, on one
machine or many. Each rank computes the gradient of its share of every batch, and an
all-reduce gives every rank the sum. MPI starts the ranks and connects them. On GPUs,
NCCL sums (`cuda/nccl.py`) while the backward pass goes on.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from minitransformer.engine.backend import Array
from minitransformer.settings.extras import import_extra
from minitransformer.system.machine import cores, num_cores

Wait = Callable[[], None]

# The environment variables by which launchers tell a process its rank and the number of
# ranks: MPICH and Intel MPI, Open MPI, srun, and torchrun, which is no MPI.
RANKS = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK")
SIZES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "WORLD_SIZE")

# Open MPI would bind each of two ranks, with all its threads, to one core.
UNBOUND = {
    "OMPI_MCA_hwloc_base_binding_policy": "none",  # its version 4
    "PRTE_MCA_hwloc_default_binding_policy": "none",  # and 5
}


def started_by_mpi(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this process is a rank that MPI's launcher has started."""
    return any(name in environ for name in RANKS)


def start_ranks(count: int, command: Sequence[str]) -> NoReturn:
    """Replace this process by MPI's launcher, which runs a command of Python `count`
    times and ends all of these ranks when one of them fails.

    Raises: RuntimeError if there is no launcher.
    """
    mpiexec = find_mpiexec()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # it would stop in the background
    sys.stdout.flush()
    ranks = [mpiexec, "-n", str(count), sys.executable, *command]
    os.execve(mpiexec, ranks, UNBOUND | os.environ)


def find_mpiexec() -> str:
    """Return the path of MPI's launcher, preferably the one beside this Python.

    Raises: RuntimeError if there is none.
    """
    for path in (str(Path(sys.executable).parent), None):
        for name in ("mpiexec", "mpirun"):
            if launcher := shutil.which(name, path=path):
                return launcher
    raise RuntimeError(
        "several ranks need an MPI, found no mpiexec: "
        "pip install 'minitransformer[mpi]'"
    )


class DivergedError(RuntimeError):
    """No run should go on: an update was not finite, or ranks are not the same."""


class Communicator:
    """The ranks of a run, seen from one of them: the base class, and a run of one.

    All ranks must call the same methods in the same order. `local_rank` counts the
    ranks of this machine alone.
    """

    rank = 0
    size = 1
    local_rank = 0

    def device(self, name: str) -> str:
        """Return this rank's device: on GPUs, the ranks of a machine share none."""
        one_of_many = name == "cuda" and self.size > 1
        return f"cuda:{self.local_rank}" if one_of_many else name

    def start_all_reduce(self, array: Array) -> Wait:
        """Begin to replace `array` by its sum over all ranks.

        Returns: a function that waits for the sum. Until it has been called, `array`
        may be neither read nor written.
        """
        return lambda: None

    def broadcast(self, array: Array) -> None:
        """Replace `array` by that of rank 0."""

    def all_reduce_numbers(self, values: list[float]) -> list[float]:
        """Sum each of a few numbers over all ranks."""
        return values

    def all_gather(self, value: Any) -> list[Any]:
        """Return the value of every rank, by rank."""
        return [value]

    def num_cores(self) -> int:
        """Return how many cores this rank has; ranks of the same cores divide these."""
        place = platform.node(), cores()
        return max(num_cores() // self.all_gather(place).count(place), 1)

    def assert_equal(self, values: Mapping[str, Any]) -> None:
        """Compare values, which JSON can hold, with the values of rank 0.

        Raises: DivergedError naming the first that differs, and on which ranks.
        """
        # Compared as JSON, in which NaN equals itself.
        mine = {name: json.dumps(value) for name, value in values.items()}
        each = self.all_gather(mine)
        for name, value in each[0].items():
            others = [
                f"{theirs[name]} on rank {rank}"
                for rank, theirs in enumerate(each)
                if theirs[name] != value
            ]
            if others:
                raise DivergedError(
                    f"expected all ranks to have the same {name}, got {value} on "
                    f"rank 0, {', '.join(others)}"
                )

    def abort(self, code: int) -> None:
        """End this process, and with it all other ranks, if there are any."""


class MpiCommunicator(Communicator):
    """Ranks that MPI has started and connects. `mpi` is the module mpi4py.MPI."""

    def __init__(self, mpi: Any) -> None:
        self._mpi = mpi
        self._comm = mpi.COMM_WORLD
        self.rank = self._comm.Get_rank()
        self.size = self._comm.Get_size()
        self.local_rank = self._comm.Split_type(mpi.COMM_TYPE_SHARED).Get_rank()

    def start_all_reduce(self, array: Array) -> Wait:
        request = self._comm.Iallreduce(self._mpi.IN_PLACE, array)
        return lambda: _poll(request.Test)

    def broadcast(self, array: Array) -> None:
        _poll(self._comm.Ibcast(array).Test)

    def all_reduce_numbers(self, values: list[float]) -> list[float]:
        sums = np.array(values, dtype=np.float64)
        MpiCommunicator.start_all_reduce(self, sums)()  # also of ranks on GPUs
        return sums.tolist()

    def all_gather(self, value: Any) -> list[Any]:
        _poll(self._comm.Ibarrier().Test)
        each: list[Any] = self._comm.allgather(value)
        return each

    def abort(self, code: int) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        time.sleep(0.5)  # mpiexec may drop an error message that it has not read yet
        self._comm.Abort(code)


def _poll(done: Callable[[], bool]) -> None:
    """Wait until `done` returns True, asking often at first and less often later.

    MPI's own waiting would keep a core busy that another rank may need.
    """
    began = time.monotonic()
    while not done():
        if (waited := time.monotonic() - began) > 0.001:
            time.sleep(min(0.01, waited / 20))


def find_mpi(environ: Mapping[str, str] = os.environ) -> Any:
    """Return the module mpi4py.MPI if this process is one of several ranks, else None.

    Raises: RuntimeError if mpi4py is missing, or connects other ranks than were started
    """
    started = next((environ[name] for name in SIZES if name in environ), "1")
    if started == "1":
        return None
    mpi = import_extra("mpi4py.MPI", "mpi", "several ranks need mpi4py and an MPI")
    if (connected := mpi.COMM_WORLD.Get_size()) != int(started):
        raise RuntimeError(
            f"a launcher has started {started} ranks, but mpi4py connects {connected}: "
            "start them by the mpiexec of the MPI that mpi4py was installed with, or "
            "by srun --mpi=pmi2 (see docs/multi-node.md)"
        )
    return mpi


def checksum(array: Array) -> int:
    """Return the sum of an array's bits, modulo 2^64, by which ranks are compared."""
    return int(array.view(np.uint32).sum(dtype=np.uint64))
