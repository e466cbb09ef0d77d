"""Data parallelism among processes: the ranks of a run, and all-reduce over them.

A run may have several ranks: processes that hold a copy of the model each, on one
machine or many. Each rank computes the gradient of its share of every batch, and an
all-reduce gives every rank the sum. MPI does this for ranks that compute on processors,
NCCL for ranks on GPUs (`cuda/nccl.py`). `launch.py` starts the ranks of one machine.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, NoReturn
from zlib import crc32

import numpy as np

from minitransformer.engine.autograd import Tensor
from minitransformer.engine.backend import Array, fused_kernel
from minitransformer.machine import cores, num_cores
from minitransformer.model.parameters import ParameterBuffer
from minitransformer.settings.extras import import_extra

Wait = Callable[[], None]

# Gradients are all-reduced in buckets of at least this size: large enough to use the
# network well, small enough that the first can be summed while backward computes the
# rest. A parameter is never divided.
BYTES_PER_BUCKET = 25 << 20

# How long a rank that ends waits for a sign of life of the others. Units: seconds
LAST_CALL = 5.0


@dataclass(frozen=True)
class World:
    """Which rank this process is, and how many there are (the world size).

    `local_rank` and `local_size` count the ranks of this machine alone; `by_mpi` says
    whether MPI started them.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    by_mpi: bool = False


ALONE = World()


class Communicator:
    """The ranks of a run, seen from one of them: the base class, and a run of one.

    All ranks must call the same methods in the same order.

    Raises: RuntimeError where a method waits and another rank does not answer in time.
    """

    def __init__(self, world: World = ALONE) -> None:
        self.rank, self.size = world.rank, world.size
        self.local_rank, self.local_size = world.local_rank, world.local_size

    def device(self, name: str) -> str:
        """Return this rank's device; each rank of a machine has a GPU of its own."""
        one_of_many = name == "cuda" and self.local_size > 1
        return f"cuda:{self.local_rank}" if one_of_many else name

    def start_all_reduce(self, array: Array) -> Wait:
        """Begin to replace `array` by its sum over all ranks.

        Returns: a function that waits for the sum. Until it has been called, `array`
        may be neither read nor written.
        """
        return lambda: None

    def start_gradient_all_reduce(self, array: Array) -> Wait:
        """Begin the sum of gradients, which may be rounded before they are sent."""
        return self.start_all_reduce(array)

    def broadcast(self, array: Array) -> None:
        """Replace `array` by that of rank 0."""

    def all_reduce_numbers(self, values: list[float]) -> list[float]:
        """Sum each of a few numbers over all ranks."""
        if self.size == 1:
            return values
        return self._all_reduce_on_host(np.array(values, dtype=np.float64)).tolist()

    def all_gather(self, data: bytes) -> list[bytes]:
        """Return the `data` of every rank, by rank."""
        if self.size == 1:
            return [data]
        lengths = [0.0] * self.size
        lengths[self.rank] = float(len(data))
        ends = np.cumsum(np.asarray(self.all_reduce_numbers(lengths), dtype=np.int64))
        everything = np.zeros(int(ends[-1]), dtype=np.uint8)
        mine = slice(int(ends[self.rank]) - len(data), int(ends[self.rank]))
        everything[mine] = np.frombuffer(data, dtype=np.uint8)
        everything = self._all_reduce_on_host(everything)
        return [part.tobytes() for part in np.split(everything, ends[:-1])]

    def num_cores(self) -> int:
        """Return how many cores this rank has, or its share of those of its machine.

        A launcher may have bound each rank to cores of its own; cores that several
        ranks may use are divided among these.
        """
        mine = cores()
        place = json.dumps([platform.node(), sorted(mine)]).encode()
        places = [json.loads(other) for other in self.all_gather(place)]
        ranks = Counter(
            x for host, own in places if host == platform.node() for x in own
        )
        share = sum(Fraction(1, ranks[core]) for core in mine) / len(mine)
        return max(int(share * num_cores()), 1)

    def assert_equal(self, values: Mapping[str, Any]) -> None:
        """Compare values that JSON can hold with those of rank 0.

        Raises: RuntimeError naming the first that differs, and on which ranks.
        """
        mine = {name: json.dumps(value) for name, value in values.items()}
        found = [json.loads(x) for x in self.all_gather(json.dumps(mine).encode())]
        for name, value in found[0].items():
            if others := [str(r) for r, x in enumerate(found) if x[name] != value]:
                raise RuntimeError(
                    f"expected all ranks to have the same {name}; "
                    f"it differs from rank 0's on {', '.join(others)}"
                )

    def abort(self, code: int) -> NoReturn:
        """End this process, and with it all other ranks."""
        sys.stdout.flush()
        sys.stderr.flush()
        self._abort_others(code)
        os._exit(code)

    def _abort_others(self, code: int) -> None:
        """Do nothing: the launcher sees this process end, and ends the others."""

    def _all_reduce_on_host(self, values: np.ndarray) -> np.ndarray:
        """Sum a NumPy array over all ranks."""
        self.start_all_reduce(values)()
        return values


class MpiCommunicator(Communicator):
    """Ranks that compute on processors, connected by MPI."""

    def __init__(self, world: World, timeout: float) -> None:
        super().__init__(world)
        need = "several ranks on processors need mpi4py and an MPI"
        self._mpi = import_extra("mpi4py.MPI", "mpi", need)
        self._comm = self._mpi.COMM_WORLD
        self.timeout = timeout
        found = self._comm.Get_rank(), self._comm.Get_size()
        if found != (world.rank, world.size):
            raise RuntimeError(
                f"the launcher started rank {world.rank} of {world.size}, but mpi4py "
                f"is rank {found[0]} of {found[1]}: it belongs to another MPI than the "
                "launcher, use the mpiexec of the one that it was installed with"
            )
        self._hosts = ["an unknown machine"] * self.size  # until all have answered
        host = self._mpi.Get_processor_name().encode()
        self._hosts = [x.decode() for x in self.all_gather(host)]
        _unlink_mpich_memory()

    def start_all_reduce(self, array: Array) -> Wait:
        request = self._comm.Iallreduce(self._mpi.IN_PLACE, array)
        return lambda: self._wait(request)

    def broadcast(self, array: Array) -> None:
        self._wait(self._comm.Ibcast(array))

    def _abort_others(self, code: int) -> None:
        time.sleep(0.5)  # mpiexec may drop an error message that it has not read yet
        self._comm.Abort(code)

    def _wait(self, request: Any) -> None:
        poll(request.Test, self.timeout, self._lost_ranks)

    def _lost_ranks(self) -> str:
        """Name the ranks that are lost: those that do not wait as this one does.

        Every rank that has waited in vain comes here, and sends all others a byte.
        """
        others, answered = set(range(self.size)) - {self.rank}, set[int]()
        sent = [self._comm.Isend(b"!", rank) for rank in others]
        received = {rank: self._comm.Irecv(bytearray(1), rank) for rank in others}
        deadline = time.monotonic() + min(self.timeout / 2, LAST_CALL)
        while others - answered and time.monotonic() < deadline:
            answered |= {rank for rank in others - answered if received[rank].Test()}
            time.sleep(0.01)
        del sent
        lost = sorted(others - answered) or sorted(others)
        return ", ".join(f"rank {rank} on {self._hosts[rank]}" for rank in lost)


def _unlink_mpich_memory() -> None:
    """Remove the names of MPICH's shared memory, which all ranks have opened by now.

    It goes on existing until they end. MPICH itself would remove the names only at the
    end of an MPI program, and never if that is aborted.
    """
    with suppress(OSError):  # only Linux says what is mapped
        mapped = Path("/proc/self/maps").read_text("utf-8").splitlines()
        for name in {line.split()[5] for line in mapped if "/dev/shm/mpich" in line}:
            Path(name).unlink(missing_ok=True)


def poll(
    done: Callable[[], bool],
    timeout: float,
    silent: Callable[[], str] = lambda: "the other ranks",
) -> None:
    """Wait until `done` returns True, asking often at first and less often later.

    Raises: RuntimeError if it does not within `timeout` seconds; `silent` says who did
    not answer.
    """
    began = time.monotonic()
    while not done():
        waited = time.monotonic() - began
        if waited > timeout:
            raise RuntimeError(
                f"expected an answer from {silent()}, got none for {timeout:g} s "
                "(--peer-timeout)"
            )
        if waited > 0.001:
            time.sleep(min(0.01, waited / 20))


# The environment variables by which launchers tell a process its rank, the world size,
# the local rank and the local world size: MPICH and Intel MPI, Open MPI, torchrun.
# `slurm.py` gives those of srun the names of torchrun.
MPICH = "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"
OPEN_MPI = (
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
)
TORCHRUN = "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"


def find_world(environ: Mapping[str, str]) -> World:
    """Read from the environment which rank this process is.

    Raises: ValueError if the rank is no number below the world size.
    """
    for names in (MPICH, OPEN_MPI, TORCHRUN):
        if names[0] not in environ or names[1] not in environ:
            continue
        try:
            rank, size = int(environ[names[0]]), int(environ[names[1]])
            # srun --mpi=pmi2 gives rank and size the names of MPICH, and only those
            local_size = int(environ.get(names[3], environ.get(TORCHRUN[3], size)))
            place = environ.get(TORCHRUN[2], rank % local_size)
            local_rank = int(environ.get(names[2], place))
        except (ValueError, ZeroDivisionError):
            rank, size = -1, 0
        if not 0 <= rank < size:
            read = dict.fromkeys((*names, *TORCHRUN[2:]))
            got = ", ".join(f"{x}={environ[x]}" for x in read if x in environ)
            raise ValueError(
                f"expected whole numbers, {names[0]} below {names[1]}, got {got}"
            )
        if size > 1:
            by_mpi = names is not TORCHRUN or "PMIX_RANK" in environ
            return World(rank, size, local_rank, local_size, by_mpi)
    return ALONE


def connect_processors(world: World, timeout: float) -> Communicator:
    """Connect the ranks of `world`, which compute on processors.

    Raises: RuntimeError if MPI did not start them, or is not installed.
    """
    if world.size == 1:
        return Communicator()
    if not world.by_mpi:
        raise RuntimeError(
            "device cpu: expected ranks started by MPI (--ranks N, mpirun -n N or srun "
            f"--mpi=pmi2), got rank {world.rank} of {world.size} from another launcher"
        )
    return MpiCommunicator(world, timeout)


class GradientAllReduce:
    """All-reduce of the flat gradient in buckets, which can start during backward.

    Backward completes the last parameters first, so the first bucket is at the end of
    the gradient. Every rank starts the buckets in this one order, whichever order its
    own gradients are complete in.
    """

    def __init__(self, communicator: Communicator, parameters: ParameterBuffer) -> None:
        self.communicator, self.parameters = communicator, parameters
        self._bucket_of: dict[int, int] = {}  # by the id of a parameter
        self._buckets: list[slice] = []
        end = start = len(parameters.grad)
        for parameter in reversed(parameters.parameters.values()):
            self._bucket_of[id(parameter)] = len(self._buckets)
            start -= parameter.data.size
            size = (end - start) * parameters.grad.itemsize
            if size >= BYTES_PER_BUCKET or start == 0:
                self._buckets.append(slice(start, end))
                end = start
        self._reset()

    def _reset(self) -> None:
        self._missing = Counter(self._bucket_of.values())  # parameters, by bucket
        self._waits: list[Wait] = []  # one for each bucket that was started

    def num_ready(self, complete: list[Tensor]) -> int:
        """Return how many buckets can start once these parameters are complete."""
        missing = Counter(self._bucket_of.values())
        missing.subtract(self._bucket_of[id(parameter)] for parameter in complete)
        return next(
            (b for b in range(len(self._buckets)) if missing[b]), len(self._buckets)
        )

    def complete(self, parameter: Tensor) -> None:
        """Note that the gradient of `parameter` is complete; start complete buckets."""
        self._missing[self._bucket_of[id(parameter)]] -= 1
        self._start(lambda bucket: not self._missing[bucket])

    def finish(self) -> None:
        """Start the buckets that are left, and wait for all."""
        self._start(lambda bucket: True)
        for wait in self._waits:
            wait()
        self._reset()

    def _start(self, ready: Callable[[int], bool]) -> None:
        """Start the next buckets in their order, up to the first that is not ready."""
        for bucket in range(len(self._waits), len(self._buckets)):
            if not ready(bucket):
                break
            part = self.parameters.grad[self._buckets[bucket]]
            self._waits.append(self.communicator.start_gradient_all_reduce(part))


def checksum(array: Array) -> int:
    """Return a digest of an array's content, by which ranks are compared."""
    return fused_kernel("checksum", (array,), lambda a: crc32(a.data))(array)
