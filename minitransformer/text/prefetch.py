"""Training batches prepared ahead of time, in a background thread."""

from __future__ import annotations

from collections import deque
from concurrent.futures import ThreadPoolExecutor

from minitransformer.text.batches import Batch, BatchStream


class Prefetcher:
    """The batches of a stream, of which the next `count` are always being prepared.

    `epoch` and `position` are the stream's state after the last batch that was taken,
    which is what a checkpoint saves.
    """

    def __init__(self, stream: BatchStream, count: int = 4) -> None:
        self.epoch, self.position = stream.epoch, stream.position
        self._stream, self._thread = stream, ThreadPoolExecutor(1)
        self._pending = deque(self._thread.submit(self._next) for _ in range(count))

    def _next(self) -> tuple[Batch, int, int]:
        batch = next(self._stream)
        return batch, self._stream.epoch, self._stream.position

    def __next__(self) -> Batch:
        batch, self.epoch, self.position = self._pending.popleft().result()
        self._pending.append(self._thread.submit(self._next))
        return batch
