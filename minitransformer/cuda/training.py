"""Training on a GPU: work is queued far ahead of it, and no step waits for a result.

A part's forward and backward pass are recorded as a CUDA graph, one for each shape of
batch, which a single launch repeats. For few shapes to occur, batches are padded to
lengths from a ladder. What a step finds (loss, norm, whether all was finite) stays on
the GPU until it is asked for.
"""

from __future__ import annotations

import importlib
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any, TypeVar

import numpy as np

from minitransformer.cuda import device
from minitransformer.engine.backend import Array, array_module
from minitransformer.engine.random_streams import PhiloxStream
from minitransformer.model.layers import ParameterBuffer
from minitransformer.model.loss import training_loss
from minitransformer.model.transformer import Transformer
from minitransformer.settings.config import PAD_ID
from minitransformer.text.batches import Batch
from minitransformer.training.distributed import Communicator, GradientAllReduce
from minitransformer.training.loss_scale import LossScale

A = TypeVar("A")
R = TypeVar("R")

# Shapes that have a graph, at most; others are launched kernel by kernel.
MOST_GRAPHS = 512

# Batches without a graph that wait for the GPU, at most.
MOST_IN_FLIGHT = 4


def rounded_up(count: int) -> int:
    """The next step of a ladder: by twos up to 64, then 32 steps a doubling.

    Batches of 4,096 tokens of Multi30k come in 108 shapes then, with 9% of padding
    instead of 4%; by fours and with low_precision as many steps, in 65 with 16%.
    """
    step = max(2, (1 << max(count - 1, 1).bit_length()) // 32)
    return -(-count // step) * step


class Inputs:
    """A padded batch on the device, in arrays that stay where they are.

    Ids are copied from pinned memory, so that the copy is queued like all other work.

    Shapes: source [B, S], target [B, T + 1]
    """

    def __init__(self, xp: ModuleType, rows: int, source: int, target: int) -> None:
        shapes = (rows, source), (rows, target + 1)
        empty_pinned = importlib.import_module("cupyx").empty_pinned
        self._stream = xp.cuda.get_current_stream()
        self._host = [empty_pinned(shape, dtype=np.int64) for shape in shapes]
        self._copied: Any = None
        self.source, self.target = (xp.empty(shape, np.int64) for shape in shapes)

    def wait(self) -> None:
        """Block until the last copy has finished, so that its memory may be reused."""
        if self._copied is not None:
            self._copied.synchronize()

    def fill(self, batch: Batch) -> None:
        """Replace the last batch by one that is not larger."""
        self.wait()
        for host, ids in zip(self._host, (batch.source, batch.target), strict=True):
            host.fill(PAD_ID)
            host[: ids.shape[0], : ids.shape[1]] = ids
        self.source.set(self._host[0])
        self.target.set(self._host[1])
        self._copied = self._stream.record()


class Recorded:
    """A graph, with all that it reads at fixed addresses."""

    def __init__(
        self, graph: Any, inputs: Inputs, rng: PhiloxStream, positions: Array
    ) -> None:
        self.graph, self.inputs, self.rng = graph, inputs, rng
        self._positions = positions  # the model may go on to a longer table


class GpuModel:
    """A model on a GPU. Batches that do not fit in its memory are computed in parts.

    `log` is called with a line about what a user should know.
    """

    asynchronous = True
    num_threads = 1
    tokens_at_once = sys.maxsize

    def __init__(
        self,
        model: Transformer,
        parameters: ParameterBuffer,
        scale: LossScale,
        communicator: Communicator | None = None,
        graphs: bool = True,
        log: Callable[[str], None] = print,
    ) -> None:
        self.model, self.parameters = model, parameters
        self.communicator = communicator or Communicator()
        self._all_reduce = GradientAllReduce(self.communicator, parameters)
        self.scale, self.parts, self._log = scale, 1, log
        self.xp = xp = array_module(parameters.data)
        self._graphs: dict[tuple[float, ...], Recorded] = {}
        self._records = graphs
        self._in_flight: deque[Inputs] = deque()
        self._loss = xp.zeros(1, dtype=np.float32)
        self._weight = xp.zeros((), dtype=np.float32)
        self._memory = device.graph_memory(xp)
        self._stream = xp.cuda.Stream(non_blocking=True)  # only such a one is recorded
        xp.cuda.Device().synchronize()  # the parameters have arrived
        self._stream.use()

    @property
    def recorded(self) -> int:
        """How many shapes of batches have a graph."""
        return len(self._graphs)

    def map(self, function: Callable[[A], R], items: Iterable[A]) -> Iterator[R]:
        """Apply `function` to items in this thread, the one that selected the GPU."""
        return map(function, items)

    def synchronize(self) -> None:
        """Wait until everything queued so far is computed."""
        self._stream.synchronize()

    def reserve_memory(self, batches: list[Batch], label_smoothing: float) -> None:
        """Fill the memory pools by computing the largest batches; discard the results.

        All later batches then find the memory that they need.
        """
        for batch in batches:
            self.gradient([batch], label_smoothing, (0,))

    def gradient(
        self, batches: list[Batch], label_smoothing: float, key: tuple[int, ...]
    ) -> Array:
        """As `ParallelModel.gradient`, multiplied by the loss scale; nothing waits.

        Raises: RuntimeError if memory is not enough for single sentences.
        """
        while True:
            try:
                return self._gradient(batches, label_smoothing, key)
            except MemoryError:
                pass  # leave this block first: the error holds all that was in work
            self._halve(batches)

    def _gradient(
        self, batches: list[Batch], label_smoothing: float, key: tuple[int, ...]
    ) -> Array:
        ranks, num_tokens = self.communicator, sum(b.target_tokens for b in batches)
        mine = slice(ranks.rank, ranks.rank + 1)  # none, if sentences are few
        shares = [share for batch in batches for share in batch.split(ranks.size)[mine]]
        parts = [part for share in shares for part in share.split(self.parts)]
        self.parameters.grad.fill(0)
        self._loss.fill(0)
        self._weight[...] = self.scale.factor / num_tokens
        for number, part in enumerate(parts):
            self._add_part(part, label_smoothing, (*key, ranks.rank, number))
        self._all_reduce.finish()
        ranks.start_all_reduce(self._loss)()
        return self._loss[0] / num_tokens

    def _add_part(
        self, part: Batch, label_smoothing: float, key: tuple[int, ...]
    ) -> None:
        """Add the gradient and loss of a part, by its shape's graph if there is one.

        The first batch of a shape is computed kernel by kernel, which compiles and
        allocates what is needed, and its work is then recorded for those that follow.
        """
        shape = self._padded(part)
        name = (*shape, label_smoothing)
        if name in self._graphs:
            recorded = self._graphs[name]
            recorded.inputs.fill(part)
            recorded.rng.reseed(key)
            recorded.graph.launch()
            return
        inputs, rng = Inputs(self.xp, *shape), PhiloxStream(key, self.xp)
        inputs.fill(part)
        self._in_flight.append(inputs)
        if len(self._in_flight) > MOST_IN_FLIGHT:
            self._in_flight.popleft().wait()
        with self.xp.cuda.using_allocator(self._memory.malloc):
            self._compute(inputs, label_smoothing, rng)
            if self._records and len(self._graphs) < MOST_GRAPHS:
                rng.reseed(key)
                if graph := self._record(inputs, label_smoothing, rng):
                    positions = self.model.embedding.positions.data
                    self._graphs[name] = Recorded(graph, inputs, rng, positions)

    def _compute(
        self, inputs: Inputs, label_smoothing: float, rng: PhiloxStream
    ) -> None:
        source, target = inputs.source, inputs.target
        loss = training_loss(self.model, source, target, label_smoothing, rng)
        loss.backward(self._weight)
        self._loss += loss.data

    def _record(
        self, inputs: Inputs, label_smoothing: float, rng: PhiloxStream
    ) -> Any | None:
        """Record what `_compute` launches, without running it; None if that fails."""
        try:
            self._stream.begin_capture()
            try:
                self._compute(inputs, label_smoothing, rng)
            finally:
                graph = self._stream.end_capture()
        except Exception as error:  # of the driver, of cuBLAS, of CuPy: many kinds
            self._records = False
            self._log(f"graphs      none, work is launched kernel by kernel: {error}")
            return None
        return graph

    def _padded(self, part: Batch) -> tuple[int, int, int]:
        """Rows, source and target tokens of the inputs that a part is put in."""
        limit = self.model.config.position_limit or sys.maxsize
        lengths = part.source.shape[1], part.target.shape[1] - 1
        source, target = (min(rounded_up(n), max(n, limit)) for n in lengths)
        return rounded_up(len(part.source)), source, target

    def _halve(self, batches: list[Batch]) -> None:
        """Go on with parts of low_precision the size, after a batch that memory did not hold."""
        ranks = self.communicator.size
        largest = max(batches, key=lambda batch: batch.source.size)
        if self.parts * ranks >= len(largest.source):
            raise RuntimeError(
                f"out of GPU memory with {largest.source.shape[1]} source and "
                f"{largest.target.shape[1] - 1} target tokens at once, which is one "
                "sentence pair: expected a smaller model, or a lower --max-length"
            )
        self.parts *= 2
        self._log(
            f"memory      not enough for {largest.source_tokens:,} + "
            f"{largest.target_tokens:,} tokens: batches are computed in {self.parts} "
            "parts from now on (as with a lower --max-tokens, a higher --accumulate)"
        )
        self.synchronize()
        self._graphs.clear()
        self._memory.free_all_blocks()
        self.xp.get_default_memory_pool().free_all_blocks()
