"""The sum of gradients over ranks, which begins while the backward pass goes on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from minitransformer.engine.autograd import Tensor
from minitransformer.model.parameters import ParameterBuffer
from minitransformer.training.distributed import Communicator, Wait

# Buckets have at least this size: large enough to use the network well, small enough
# that the first can be summed while backward computes the rest. A parameter is never
# divided.
BYTES_PER_BUCKET = 25 << 20


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
            self._waits.append(self.communicator.start_all_reduce(part))
