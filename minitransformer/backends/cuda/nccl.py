"""Ranks on GPUs: NCCL sums their gradients, while the backward pass goes on."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable
from typing import Any

from minitransformer.backends.cuda.device import select_gpu
from minitransformer.engine.autograd import Tensor
from minitransformer.engine.backend import Array
from minitransformer.model.parameters import ParameterBuffer
from minitransformer.training.distributed import Communicator, MpiCommunicator, Wait

# Buckets have at least this size: large enough to use the network well, small enough
# that the first can be summed while backward computes the rest. A parameter is never
# divided.
BYTES_PER_BUCKET = 25 << 20


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
        current = self._cupy.cuda.get_current_stream()
        self._stream.wait_event(current.record())
        self._ranks.allReduce(
            array.data.ptr,
            array.data.ptr,
            array.size,
            self._types[array.dtype.name],
            self._nccl.NCCL_SUM,
            self._stream.ptr,
        )
        done = self._stream.record()
        return lambda: current.wait_event(done)  # the GPU waits, this process does not

    def broadcast(self, array: Array) -> None:
        root = 0
        self._ranks.broadcast(
            array.data.ptr,
            array.data.ptr,
            array.size,
            self._types[array.dtype.name],
            root,
            self._cupy.cuda.get_current_stream().ptr,
        )


class GradientAllReduce:
    """All-reduce of the flat gradient in buckets, which can start during backward.

    Backward completes the last parameters first, so the first bucket is at the end of
    the gradient. Every rank starts the buckets in this one order, whichever order its
    own gradients are complete in. `bucket_of` has buckets by the id of a parameter.
    """

    def __init__(self, communicator: Communicator, parameters: ParameterBuffer) -> None:
        self.communicator, self.parameters = communicator, parameters
        self.bucket_of: dict[int, int] = {}
        self._buckets: list[slice] = []
        end = start = len(parameters.grad)
        for parameter in reversed(parameters.parameters.values()):
            self.bucket_of[id(parameter)] = len(self._buckets)
            start -= parameter.data.size
            size = (end - start) * parameters.grad.itemsize
            if size >= BYTES_PER_BUCKET or start == 0:
                self._buckets.append(slice(start, end))
                end = start
        self._reset()

    def _reset(self) -> None:
        self._missing = Counter(self.bucket_of.values())  # parameters, by bucket
        self._waits: list[Wait] = []  # one for each bucket that was started

    def complete(self, parameter: Tensor) -> None:
        """Note that the gradient of `parameter` is complete; start complete buckets."""
        self._missing[self.bucket_of[id(parameter)]] -= 1
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
            self._waits.append(self.communicator.start_all_reduce(part))
