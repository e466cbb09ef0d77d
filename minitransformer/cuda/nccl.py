"""Data parallelism over several GPUs, one process each, by NCCL."""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import sys
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from minitransformer.cuda.device import select_gpu
from minitransformer.cuda.precision import low_precision_type
from minitransformer.engine.backend import Array
from minitransformer.settings.config import RanksConfig
from minitransformer.settings.extras import import_extra
from minitransformer.training.distributed import Communicator, Wait, World, poll

# NCCL's number of the type bfloat16 (nccl.h), which CuPy's wrapper does not name.
NCCL_BFLOAT16 = 9

# What the driver says of an event that the GPU has not come to, cudaErrorNotReady.
NOT_READY = 600


class NcclCommunicator(Communicator):
    """A rank that computes on a GPU and reaches the others by NCCL, through CuPy.

    Ranks that MPI started find each other by MPI, others at the `address` of rank 0.
    Sums run on a stream of their own, after the work queued so far.
    """

    def __init__(self, world: World, address: str, config: RanksConfig) -> None:
        super().__init__(world)
        self._cupy = select_gpu(f"cuda:{world.local_rank}")
        self.timeout, self._config = config.peer_timeout, config
        host, _, port = address.rpartition(":")
        where = {"host": host, "port": int(port)} if address else {"use_mpi": True}
        if not address:  # CuPy would do without, and look for rank 0 on each machine
            import_extra("mpi4py.MPI", "mpi", "ranks started by MPI need mpi4py")
        with _no_mpi() if address else contextlib.nullcontext():
            distributed = importlib.import_module("cupyx.distributed")
        try:
            with _forked_processes():
                self._group = distributed.init_process_group(
                    self.size, self.rank, **where
                )
            # All have met: CuPy's store would outlive a rank that aborts.
            self._group.stop()
        except Exception as error:  # the libraries below raise many kinds
            raise RuntimeError(
                f"rank {self.rank} of {self.size}: NCCL did not start: {error}"
            ) from error
        self._stream = self._cupy.cuda.Stream(non_blocking=True)
        self._bfloat16_group: Any = None

    def start_all_reduce(self, array: Array) -> Wait:
        done = self._enqueue_all_reduce(array)
        current = self._cupy.cuda.get_current_stream()
        return lambda: current.wait_event(done)  # the GPU waits, this process does not

    def start_gradient_all_reduce(self, array: Array) -> Wait:
        """Begin the sum of gradients, with --reduce-precision bf16 rounded to that.

        Source: the communication hook bf16_compress_hook of PyTorch. NCCL adds numbers
        of 16 bits and rounds each sum; all ranks get the same ones.
        """
        if self._config.reduce_precision == "fp32":
            return self.start_all_reduce(array)
        if self._bfloat16_group is None:
            self._bfloat16_group = self._new_group()
        current = self._cupy.cuda.get_current_stream()
        self._stream.wait_event(current.record())
        # Not `with`: that would end with the null stream, whatever `use` has chosen.
        self._stream.use()
        try:
            rounded = array.astype(low_precision_type("bf16"))
            address, nccl = rounded.data.ptr, self._cupy.cuda.nccl
            numbers = rounded.size, NCCL_BFLOAT16, nccl.NCCL_SUM, self._stream.ptr
            self._bfloat16_group.allReduce(address, address, *numbers)
            array[...] = rounded
            done = self._stream.record()
        finally:
            current.use()
        return lambda: current.wait_event(done)

    def _new_group(self) -> Any:
        """Connect all ranks once more, by NCCL itself: CuPy's group has no bfloat16."""
        nccl = self._cupy.cuda.nccl
        identity = np.frombuffer(nccl.get_unique_id(), dtype=np.uint8)
        sent = self._cupy.asarray(identity)
        self.broadcast(sent)
        self._wait_for(self._cupy.cuda.get_current_stream().record())
        return nccl.NcclCommunicator(self.size, sent.get().tobytes(), self.rank)

    def _enqueue_all_reduce(self, array: Array) -> Any:
        """Queue a sum behind the work of the current stream; return the sum's event."""
        current = self._cupy.cuda.get_current_stream()
        self._stream.wait_event(current.record())
        self._group.all_reduce(array, array, "sum", self._stream)
        return self._stream.record()

    def broadcast(self, array: Array) -> None:
        self._group.broadcast(array, 0, self._cupy.cuda.get_current_stream())

    def _all_reduce_on_host(self, values: np.ndarray) -> np.ndarray:
        array = self._cupy.asarray(values)
        done = self._enqueue_all_reduce(array)
        self._wait_for(done)
        return array.get()

    def _wait_for(self, event: Any) -> None:
        """Wait until the GPU comes to `event`, for --peer-timeout at most.

        The event's own `done` would be False after an error of the driver, too.
        """
        runtime = self._cupy.cuda.runtime
        poll(lambda: runtime.eventQuery(event.ptr) != NOT_READY, self.timeout)
        runtime.eventSynchronize(event.ptr)  # raises the error, if there was one


@contextlib.contextmanager
def _no_mpi() -> Iterator[None]:
    """Have CuPy believe that mpi4py is not installed, unless it is imported already.

    CuPy imports it where it is installed. Where no MPI is, that raises RuntimeError,
    which CuPy does not expect; where one is, this rank would start it for nothing.
    """
    name = "mpi4py.MPI"
    hidden = name not in sys.modules
    if hidden:
        sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if hidden:
            del sys.modules[name]


@contextlib.contextmanager
def _forked_processes() -> Iterator[None]:
    """Have `multiprocessing` fork: CuPy's store, by which ranks meet, needs it.

    That store is a process whose object no other way of starting can pickle. Python
    3.14 forks no more by default, and 3.12 warns of it where threads are running.
    """
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("fork", force=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            yield
    finally:
        multiprocessing.set_start_method(before, force=True)


def connect_gpus(
    world: World, environ: Mapping[str, str], config: RanksConfig
) -> Communicator:
    """Connect the ranks of `world`, each of which computes on a GPU of its own.

    Raises: RuntimeError if the environment lacks the address of rank 0, or NCCL fails.
    """
    if world.size == 1:
        return Communicator()
    if world.by_mpi:
        return NcclCommunicator(world, "", config)
    missing = [n for n in ("MASTER_ADDR", "MASTER_PORT") if not environ.get(n)]
    if missing:
        raise RuntimeError(f"expected {missing[0]} in the environment, found none")
    port = int(environ["MASTER_PORT"])
    # torchrun's own store listens at that port, and the next one is ours.
    port += environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    address = f"{environ['MASTER_ADDR']}:{port}"
    return NcclCommunicator(world, address, config)
