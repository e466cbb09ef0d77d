"""Data parallelism over several GPUs, one process each, by NCCL."""

from __future__ import annotations

import importlib
from typing import Any

from minitransformer.backends.cuda.device import select_gpu
from minitransformer.engine.backend import Array
from minitransformer.training.distributed import MpiCommunicator, Wait


class NcclCommunicator(MpiCommunicator):
    """A rank that computes on a GPU: NCCL sums what lies there, MPI what does not.

    Sums run on a stream of their own, after the work queued so far.
    """

    def __init__(self, mpi: Any) -> None:
        super().__init__(mpi)
        self._cupy = select_gpu(self.device("cuda"))
        self._nccl = nccl = importlib.import_module("cupy.cuda.nccl")
        if not nccl.available:
            raise RuntimeError(
                "several GPUs need NCCL, CuPy finds none: pip install nvidia-nccl-cu12"
            )
        identity = self._comm.bcast(nccl.get_unique_id(), root=0)
        try:
            self._ranks = nccl.NcclCommunicator(self.size, identity, self.rank)
        except Exception as error:  # NCCL's own, and those of the libraries below it
            raise RuntimeError(f"NCCL did not start: {error}") from error
        self._types = {"float32": nccl.NCCL_FLOAT32, "float64": nccl.NCCL_FLOAT64}
        self._stream = self._cupy.cuda.Stream(non_blocking=True)

    def start_all_reduce(self, array: Array) -> Wait:
        current, place = self._cupy.cuda.get_current_stream(), array.data.ptr
        self._stream.wait_event(current.record())
        numbers = array.size, self._types[array.dtype.name], self._nccl.NCCL_SUM
        self._ranks.allReduce(place, place, *numbers, self._stream.ptr)
        done = self._stream.record()
        return lambda: current.wait_event(done)  # the GPU waits, this process does not

    def broadcast(self, array: Array) -> None:
        current, place = self._cupy.cuda.get_current_stream(), array.data.ptr
        numbers = array.size, self._types[array.dtype.name]
        self._ranks.broadcast(place, place, *numbers, 0, current.ptr)
