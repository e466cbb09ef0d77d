"""Data parallelism among processes: who is there, and sums over all of them.

A run may have several ranks, processes with a copy of the model each, on one machine or
many. Each takes its share of every batch, and the gradients are summed. NCCL does it
for GPUs, MPI for processors; alone, a rank has nothing to wait for. `launch.py` starts
ranks.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn
from zlib import crc32

import numpy as np

from minitransformer.engine.autograd import Tensor
from minitransformer.engine.backend import Array, to_host
from minitransformer.model.layers import ParameterBuffer

Wait = Callable[[], None]

# Bytes of gradient that are summed at a time: enough to use the link well, few enough
# that the first are on their way while backward still computes the last.
BYTES_PER_BUCKET = 25 << 20


class Communicator:
    """The ranks of a run, and this one's number. This class is a rank alone.

    All ranks must call the same methods in the same order.

    Raises (all methods): RuntimeError if another rank does not answer in time.
    """

    rank = 0
    size = 1
    local_rank = 0
    local_size = 1

    def device(self, name: str) -> str:
        """The device of this rank: of several GPUs of a machine, its own."""
        one_of_many = name == "cuda" and self.local_size > 1
        return f"cuda:{self.local_rank}" if one_of_many else name

    def start_all_reduce(self, array: Array) -> Wait:
        """Begin to replace `array` by its sum over all ranks; the result waits for it.

        The array may neither be read nor written before that wait.
        """
        return _nothing

    def broadcast(self, array: Array) -> None:
        """Replace `array` by rank 0's."""

    def barrier(self) -> None:
        """Wait until all ranks have come this far."""
        self.all_reduce_numbers([0.0])

    def all_reduce_numbers(self, values: list[float]) -> list[float]:
        """Sum some numbers over all ranks."""
        if self.size == 1:
            return values
        return self._all_reduce_on_host(np.array(values, dtype=np.float64)).tolist()

    def all_gather(self, data: bytes) -> list[bytes]:
        """Return the bytes that each rank gave, by rank."""
        if self.size == 1:
            return [data]
        lengths = [0.0] * self.size
        lengths[self.rank] = float(len(data))
        ends = np.cumsum(np.asarray(self.all_reduce_numbers(lengths), dtype=np.int64))
        everything = np.zeros(int(ends[-1]), dtype=np.uint8)
        mine = slice(int(ends[self.rank]) - len(data), int(ends[self.rank]))
        everything[mine] = np.frombuffer(data, dtype=np.uint8)
        everything = self._all_reduce_on_host(everything)
        starts = [0, *ends[:-1]]
        return [everything[a:b].tobytes() for a, b in zip(starts, ends, strict=True)]

    def assert_equal(self, what: str, value: bytes) -> None:
        """Raises: RuntimeError naming the ranks whose value is not that of rank 0."""
        values = self.all_gather(value)
        if others := [str(r) for r, found in enumerate(values) if found != values[0]]:
            raise RuntimeError(
                f"expected all ranks to have the same {what}; "
                f"it differs from rank 0's on {', '.join(others)}"
            )

    def abort(self, code: int) -> NoReturn:
        """End this process, and with it the other ranks."""
        sys.stdout.flush()
        sys.stderr.flush()
        self._end_others(code)
        os._exit(code)

    def _end_others(self, code: int) -> None:
        """Leave it to who started them and sees this one end."""

    def _all_reduce_on_host(self, values: np.ndarray) -> np.ndarray:
        """Sum a NumPy array over all ranks."""
        self.start_all_reduce(values)()
        return values


class MpiCommunicator(Communicator):
    """Ranks on processors, through MPI."""

    def __init__(self, timeout: float) -> None:
        self._mpi = _mpi()
        self._comm = self._mpi.COMM_WORLD
        self.rank, self.size = self._comm.rank, self._comm.size
        self.timeout = timeout

    def start_all_reduce(self, array: Array) -> Wait:
        request = self._comm.Iallreduce(self._mpi.IN_PLACE, array)
        return lambda: self._wait(request)

    def broadcast(self, array: Array) -> None:
        self._wait(self._comm.Ibcast(array))

    def _end_others(self, code: int) -> None:
        self._comm.Abort(code)

    def _wait(self, request: Any) -> None:
        poll(request.Test, self.timeout)


def poll(done: Callable[[], bool], timeout: float) -> None:
    """Wait for the other ranks, sleeping little at first and longer later.

    Raises: RuntimeError after `timeout` seconds.
    """
    began = time.monotonic()
    while not done():
        waited = time.monotonic() - began
        if waited > timeout:
            raise RuntimeError(
                "expected an answer from the other ranks, got none for "
                f"{timeout:g} s (--peer-timeout)"
            )
        if waited > 0.001:
            time.sleep(min(0.01, waited / 20))


# The environment in which ranks are started: the names of their number, of how many
# there are, and of both on one machine. MPICH and Intel MPI, Open MPI, torchrun.
MPI_NAMES = (
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
)
LAUNCHER_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


@dataclass(frozen=True)
class World:
    """This process among the ranks that were started together.

    `local_rank` and `local_size` count the ranks of this machine alone; `by_mpi` says
    whether MPI started them.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    by_mpi: bool = False


def find_world(environ: Mapping[str, str]) -> World:
    """Read from the environment which rank this process is.

    Raises: ValueError if the environment names a rank that cannot be.
    """
    for names in (*MPI_NAMES, LAUNCHER_NAMES):
        if names[0] not in environ or names[1] not in environ:
            continue
        try:
            rank, size = int(environ[names[0]]), int(environ[names[1]])
            local_size = int(environ.get(names[3], size))
            local_rank = int(environ.get(names[2], rank % local_size))
        except (ValueError, ZeroDivisionError):
            rank, size = -1, 0
        if not 0 <= rank < size:
            raise ValueError(
                f"expected {names[0]} below {names[1]}, got {environ[names[0]]} and "
                f"{environ[names[1]]}"
            )
        if size > 1:
            by_mpi = names is not LAUNCHER_NAMES
            return World(rank, size, local_rank, local_size, by_mpi)
    return World()


def connect_processors(world: World, timeout: float) -> Communicator:
    """Connect the ranks of `world`, which compute on processors.

    Raises: RuntimeError if MPI did not start them, or is not installed.
    """
    if world.size == 1:
        return Communicator()
    if not world.by_mpi:
        raise RuntimeError(
            "device cpu: expected ranks started by MPI (--ranks N or mpirun -n N), got "
            f"rank {world.rank} of {world.size} from another launcher"
        )
    found = MpiCommunicator(timeout)
    found.local_rank, found.local_size = world.local_rank, world.local_size
    return found


def _mpi() -> Any:
    try:
        return importlib.import_module("mpi4py.MPI")
    except (ImportError, RuntimeError) as error:
        raise RuntimeError(
            "several ranks on processors need mpi4py and an MPI: "
            f"pip install 'minitransformer[mpi]' ({error})"
        ) from error


class GradientAllReduce:
    """Sums the flat gradient over all ranks in buckets, while backward goes on.

    Backward reaches the last parameters first, so buckets are cut from the end. They
    start in that order on every rank, whatever the order in which they are complete.
    """

    def __init__(self, communicator: Communicator, parameters: ParameterBuffer) -> None:
        self.communicator, self.parameters = communicator, parameters
        self._bucket_of: dict[int, int] = {}
        self._slices: list[slice] = []
        self._sizes: list[int] = []
        gradient = parameters.grad
        end = start = len(gradient)
        members = 0
        for parameter in reversed(parameters.parameters.values()):
            self._bucket_of[id(parameter)] = len(self._slices)
            start -= parameter.data.size
            members += 1
            if (end - start) * gradient.itemsize >= BYTES_PER_BUCKET or start == 0:
                self._slices.append(slice(start, end))
                self._sizes.append(members)
                end, members = start, 0
        self._reset()

    def _reset(self) -> None:
        self._missing = list(self._sizes)
        self._waits: list[Wait] = []

    def complete(self, parameter: Tensor) -> None:
        """Say that this rank's gradient of `parameter` is complete."""
        self._missing[self._bucket_of[id(parameter)]] -= 1
        while len(self._waits) < len(self._slices):
            if self._missing[len(self._waits)]:
                break
            self._start()

    def finish(self) -> None:
        """Sum what is left, and wait for all of it."""
        while len(self._waits) < len(self._slices):
            self._start()
        for wait in self._waits:
            wait()
        self._reset()

    def _start(self) -> None:
        part = self._slices[len(self._waits)]
        self._waits.append(
            self.communicator.start_all_reduce(self.parameters.grad[part])
        )


def checksum(array: Array) -> bytes:
    """A digest of an array's content, to compare ranks by."""
    return crc32(to_host(array).data).to_bytes(4, "big")


def _nothing() -> None:
    """There is nothing to wait for."""
