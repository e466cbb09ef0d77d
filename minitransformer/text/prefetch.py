"""TODO."""

from __future__ import annotations

from collections import deque
from concurrent.futures import ThreadPoolExecutor

from minitransformer.text.batches import Batch, BatchStream


class Prefetcher:
    """Batches of a stream, read in a thread before they are asked for.

    `epoch` and `position` are those after the last batch that was taken.
    """

    def __init__(self, stream: BatchStream, count: int = 4) -> None:
        self.epoch, self.position = stream.epoch, stream.position
        self._stream, self._reader = stream, ThreadPoolExecutor(1)
        self._read = deque(self._reader.submit(self._next) for _ in range(count))

    def _next(self) -> tuple[Batch, int, int]:
        batch = next(self._stream)
        return batch, self._stream.epoch, self._stream.position

    def __next__(self) -> Batch:
        batch, self.epoch, self.position = self._read.popleft().result()
        self._read.append(self._reader.submit(self._next))
        return batch
