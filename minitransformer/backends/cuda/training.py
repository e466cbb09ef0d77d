"""Training on a GPU: the host queues work far ahead and never waits for a result.

The forward and backward pass of a batch are recorded as a CUDA graph, and a single
launch repeats it for each later batch of that shape. Batches are padded to a few
lengths, so that few shapes occur. Loss, norm and whether both are finite stay on the
GPU until somebody reads them.
"""

from __future__ import annotations

import importlib
import sys
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from minitransformer.backends.cuda import device
from minitransformer.backends.cuda.graphs import Recording, graph_memory
from minitransformer.backends.cuda.nccl import GradientAllReduce
from minitransformer.backends.cuda.ops import adding_to, sort_tokens
from minitransformer.backends.cuda.philox import PhiloxStream
from minitransformer.engine.autograd import Tensor
from minitransformer.engine.backend import Array, array_module
from minitransformer.model.parameters import ParameterBuffer
from minitransformer.model.transformer import Transformer, training_loss
from minitransformer.settings.config import PAD_ID
from minitransformer.text.batches import Batch, Batches, BatchStream
from minitransformer.training.distributed import Communicator
from minitransformer.training.loss_scale import LossScale
from minitransformer.training.parallel import ParallelModel

# The most shapes that get a graph; batches of others are launched kernel by kernel.
MAX_GRAPHS = 512

# The most batches without a graph that are queued at a time.
MAX_IN_FLIGHT = 4


def padded_length(count: int) -> int:
    """Return the length to pad to: even up to 64, then 16 lengths a doubling.

    Batches of 4,096 tokens of Multi30k then have 104 shapes with 9% padding instead of
    4%; with half as many lengths they would have 59 shapes with 16%.
    """
    step = max(2, (1 << max(count - 1, 1).bit_length()) // 32)
    return -(-count // step) * step


class PaddedBatch:
    """A padded batch on the GPU, in arrays that stay where they are.

    `sorted_tokens` are those that the model embeds, by the address of their ids and
    without padding, whose gradient is 0. All is copied from pinned memory, so that the
    copy is queued like other work.

    Shapes: source [B, S], target [B, T + 1]
    """

    def __init__(self, xp: ModuleType, rows: int, source: int, target: int) -> None:
        self._stream = xp.cuda.get_current_stream()
        self._copied: Any = None
        self.source = xp.empty((rows, source), np.int64)
        self.target = xp.empty((rows, target + 1), np.int64)
        orders = xp.empty(rows * source, np.int64), xp.empty(rows * target, np.int64)
        self.sorted_tokens = {
            device.address(ids): order
            for ids, order in zip((self.source, self.target), orders, strict=True)
        }
        self._arrays = self.source, self.target, *orders
        empty_pinned = importlib.import_module("cupyx").empty_pinned
        self._host = [empty_pinned(x.shape, dtype=np.int64) for x in self._arrays]

    def wait(self) -> None:
        """Wait until the last copy has finished, so that its memory may be reused."""
        if self._copied is not None:
            self._copied.synchronize()

    def fill(self, batch: Batch) -> None:
        """Replace the ids by those of a batch that is not larger."""
        self.wait()
        source, target, *orders = self._host
        for host, ids in (source, batch.source), (target, batch.target):
            host.fill(PAD_ID)
            host[: ids.shape[0], : ids.shape[1]] = ids

        # The decoder embeds all tokens of the target but the last.
        for order, ids in zip(orders, (source, target[:, :-1]), strict=True):
            order[...] = sort_tokens(ids)
            order[order >> 32 == PAD_ID] = -1
        for array, host in zip(self._arrays, self._host, strict=True):
            array.set(host)
        self._copied = self._stream.record()


@dataclass(frozen=True)
class RecordedGraph:
    """The CUDA graphs of a shape, and the arrays that they read at fixed addresses.

    With several GPUs there is a graph for each bucket of gradients, so that its sum can
    begin while the next graphs compute; `completed` are its parameters. The model may
    replace its `positions` by a longer table, so they are kept here.
    """

    graphs: list[Any]
    completed: list[list[Tensor]]
    batch: PaddedBatch
    rng: PhiloxStream
    positions: Array


class Prefetcher:
    """The batches of a stream, of which a thread always prepares the next `count`.

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


def ignore(parameter: Tensor) -> None:
    """Do nothing with a parameter whose gradient is complete."""


class GpuModel(ParallelModel):
    """A model whose gradients a GPU computes.

    A batch that does not fit in the GPU's memory is computed in parts. `log` is called
    with a line about anything that the user should know.
    """

    asynchronous = True
    tokens_at_once = sys.maxsize

    def __init__(
        self,
        model: Transformer,
        parameters: ParameterBuffer,
        scale: LossScale,
        communicator: Communicator | None = None,
        *,
        graphs: bool = True,
        log: Callable[[str], None] = print,
    ) -> None:
        self.model, self.parameters = model, parameters
        self.communicator = communicator or Communicator()
        self._all_reduce = GradientAllReduce(self.communicator, parameters)
        self.scale, self.parts, self._log = scale, 1, log
        self.xp = xp = array_module(parameters.data)
        self._graphs: dict[tuple[float, ...], RecordedGraph] = {}
        self._records_graphs = graphs
        self._in_flight: deque[PaddedBatch] = deque()
        self._loss = xp.zeros(1, dtype=np.float32)
        self._weight = xp.zeros((), dtype=np.float32)
        self._memory = graph_memory(xp)
        # The null stream cannot be recorded.
        self._stream = xp.cuda.Stream(non_blocking=True)
        xp.cuda.Device().synchronize()  # wait for the parameters
        self._stream.use()

    def synchronize(self) -> None:
        self._stream.synchronize()

    def prefetched(self, stream: BatchStream) -> Batches:
        return Prefetcher(stream)

    def reserve_memory(self, stream: BatchStream, label_smoothing: float) -> None:
        """Fill the memory pools: compute the largest batches and discard the results.

        All later batches then find the memory that they need.
        """
        for batch in stream.largest_batches():
            self.forward_backward([batch], label_smoothing, (0,))

    def forward_backward(
        self, batches: list[Batch], label_smoothing: float, key: tuple[int, ...]
    ) -> Array:
        """Queue what `ParallelModel.forward_backward` computes, times the loss scale.

        Raises: RuntimeError if the memory is too small for a single sentence pair.
        """
        # Where CuPy copies a strided array to the host, it forgets the stream in use.
        self._stream.use()
        while True:
            try:
                return self._forward_backward(batches, label_smoothing, key)
            except MemoryError:
                pass  # leave this block: the error refers to arrays that must be freed
            self._halve(batches)

    def _forward_backward(
        self, batches: list[Batch], label_smoothing: float, key: tuple[int, ...]
    ) -> Array:
        # This rank takes its share of each batch, in as many parts as memory asks for.
        ranks, num_tokens = self.communicator, sum(b.target_tokens for b in batches)
        mine = slice(ranks.rank, ranks.rank + 1)  # empty for ranks without a sentence
        shares = [share for batch in batches for share in batch.split(ranks.size)[mine]]
        parts = [part for share in shares for part in share.split(self.parts)]

        # Gradients and losses of all parts add up. The loss of a token weighs the same
        # in each, and a rank's last part starts the all-reduce of what it completes.
        self.parameters.grad.fill(0)
        self._loss.fill(0)
        self._weight[...] = self.scale.factor / num_tokens
        for number, part in enumerate(parts):
            is_last = number == len(parts) - 1
            self._add_part(
                part,
                label_smoothing,
                (*key, ranks.rank, number),
                self._all_reduce.complete if is_last else ignore,
            )
        self._all_reduce.finish()
        ranks.start_all_reduce(self._loss)()
        return self._loss[0] / num_tokens

    def _add_part(
        self,
        part: Batch,
        label_smoothing: float,
        key: tuple[int, ...],
        when_complete: Callable[[Tensor], None],
    ) -> None:
        """Add the gradient and loss of a part, by its shape's graph if there is one.

        The first batch of a shape is computed kernel by kernel, which compiles kernels
        and allocates memory, and the work is then recorded for later batches.
        """
        # Replay the graphs of this shape, with the ids and noise of this batch.
        shape = self._padded_shape(part)
        name = (*shape, label_smoothing)
        if recorded := self._graphs.get(name):
            recorded.batch.fill(part)
            recorded.rng.reseed(key)
            for graph, parameters in zip(
                recorded.graphs, recorded.completed, strict=True
            ):
                graph.launch()
                for parameter in parameters:
                    when_complete(parameter)
            return

        # Queue no more batches than those whose ids fit in pinned memory.
        batch, rng = PaddedBatch(self.xp, *shape), PhiloxStream(key, self.xp)
        batch.fill(part)
        self._in_flight.append(batch)
        if len(self._in_flight) > MAX_IN_FLIGHT:
            self._in_flight.popleft().wait()

        # Compute kernel by kernel. No all-reduce starts yet: without memory, the part
        # is computed again. Positions outlive a graph, so they may not be in memory
        # that graphs reuse.
        positions = self.model.embedding.reserve(max(shape[1:])).data
        with self.xp.cuda.using_allocator(self._memory.malloc):
            self._compute(batch, label_smoothing, rng, ignore)

        # Record the same work, with the same noise, for the next batch of this shape.
        if not self._records_graphs or len(self._graphs) >= MAX_GRAPHS:
            return
        try:
            rng.reseed(key)
            with self.xp.cuda.using_allocator(self._memory.malloc):
                graphs, completed = self._record(batch, label_smoothing, rng)
            recorded = RecordedGraph(graphs, completed, batch, rng, positions)
            self._graphs[name] = recorded
        except MemoryError:
            raise
        except Exception as error:  # of the driver, of cuBLAS, of CuPy: many kinds
            self._records_graphs = False
            none = "graphs      none, work is launched kernel by kernel"
            self._log(f"{none}: {error}")

    def _compute(
        self,
        batch: PaddedBatch,
        label_smoothing: float,
        rng: PhiloxStream,
        when_complete: Callable[[Tensor], None],
    ) -> None:
        source, target = batch.source, batch.target
        loss = training_loss(self.model, source, target, label_smoothing, rng)
        self._loss += loss.data
        with adding_to(self.parameters, batch.sorted_tokens):
            loss.backward(self._weight, when_complete)

    def _record(
        self, batch: PaddedBatch, label_smoothing: float, rng: PhiloxStream
    ) -> tuple[list[Any], list[list[Tensor]]]:
        """Record graphs, and the parameters whose gradients each completes."""
        completed: list[list[Tensor]] = [[]]
        bucket_of = self._all_reduce.bucket_of
        missing = Counter(bucket_of.values())

        # Where a bucket of gradients is complete, its all-reduce may start: end the
        # graph there, and begin the next.
        def note(parameter: Tensor) -> None:
            completed[-1].append(parameter)
            bucket = bucket_of[id(parameter)]
            missing[bucket] -= 1
            if not missing[bucket] and self.communicator.size > 1:
                completed.append([])
                recording.cut()

        with Recording(self._stream) as recording:
            self._compute(batch, label_smoothing, rng, note)
        return recording.graphs, completed

    def _padded_shape(self, part: Batch) -> tuple[int, int, int]:
        """Return the sentences, source tokens and target tokens to pad a part to."""
        limit = self.model.config.position_limit or sys.maxsize
        lengths = part.source.shape[1], part.target.shape[1] - 1
        source, target = (min(padded_length(n), max(n, limit)) for n in lengths)
        return padded_length(len(part.source)), source, target

    def _halve(self, batches: list[Batch]) -> None:
        """Halve the parts of batches, after a batch that did not fit in memory."""
        # A rank computes at least one sentence pair at a time.
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

        # Free the memory of the graphs, which are of larger parts.
        self.synchronize()
        self._graphs.clear()
        self._memory.free_all_blocks()
        self.xp.get_default_memory_pool().free_all_blocks()
