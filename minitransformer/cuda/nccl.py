"""Ranks on GPUs: sums of gradients over processes, by NCCL."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from minitransformer.cuda.device import select_gpu
from minitransformer.engine.backend import Array
from minitransformer.training.distributed import Communicator, Wait, World, poll


class NcclCommunicator(Communicator):
    """Ranks on GPUs, one each, through NCCL (CuPy's `cupyx.distributed`).

    MPI, where the ranks were started by it, or else a port of rank 0's machine brings
    them together. Sums run on a stream of their own, beside backward's kernels.
    """

    def __init__(self, world: World, address: str, timeout: float) -> None:
        self._cupy = select_gpu(f"cuda:{world.local_rank}")
        distributed = importlib.import_module("cupyx.distributed")
        self.rank, self.size = world.rank, world.size
        self.local_rank, self.local_size = world.local_rank, world.local_size
        self.timeout = timeout
        host, _, port = address.rpartition(":")
        where = {"host": host, "port": int(port)} if address else {"use_mpi": True}
        try:
            self._group = distributed.init_process_group(self.size, self.rank, **where)
        except Exception as error:  # the libraries below raise many kinds
            raise RuntimeError(
                f"rank {self.rank} of {self.size}: NCCL did not start: {error}"
            ) from error
        self._stream = self._cupy.cuda.Stream(non_blocking=True)

    def start_all_reduce(self, array: Array) -> Wait:
        done, current = (
            self._enqueue_all_reduce(array),
            self._cupy.cuda.get_current_stream(),
        )
        return lambda: current.wait_event(done)  # the GPU waits, this process does not

    def _enqueue_all_reduce(self, array: Array) -> Any:
        """Sum after all that the current stream has in work; return the sum's event."""
        current = self._cupy.cuda.get_current_stream()
        self._stream.wait_event(current.record())
        self._group.all_reduce(array, array, "sum", self._stream)
        return self._stream.record()

    def broadcast(self, array: Array) -> None:
        self._group.broadcast(array, 0, self._cupy.cuda.get_current_stream())

    def _all_reduce_on_host(self, values: np.ndarray) -> np.ndarray:
        array = self._cupy.asarray(values)
        done = self._enqueue_all_reduce(array)
        poll(lambda: bool(done.done), self.timeout)
        return array.get()


def connect_gpus(
    world: World, environ: Mapping[str, str], timeout: float
) -> Communicator:
    """Connect the ranks of `world`, which compute on a GPU each.

    Raises: RuntimeError if the environment lacks rank 0's address, or NCCL fails.
    """
    if world.size == 1:
        return Communicator()
    if world.by_mpi:
        return NcclCommunicator(world, "", timeout)
    missing = [n for n in ("MASTER_ADDR", "MASTER_PORT") if not environ.get(n)]
    if missing:
        raise RuntimeError(f"expected {missing[0]} in the environment, found none")
    address = f"{environ['MASTER_ADDR']}:{environ['MASTER_PORT']}"
    return NcclCommunicator(world, address, timeout)
