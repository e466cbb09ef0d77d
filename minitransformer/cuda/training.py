"""Training on a GPU: work is queued far ahead of it, and no step waits for a result.

A part's forward and backward pass are recorded as a CUDA graph, one for each shape of
batch, which a single launch repeats. For few shapes to occur, batches are padded to
lengths from a ladder. What a step finds (loss, norm, whether all was finite) stays on
the GPU until it is asked for.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any, TypeVar

import numpy as np

from minitransformer import backend
from minitransformer.backend import Array, RandomStream, array_module
from minitransformer.config import PAD_ID, TrainingConfig
from minitransformer.cuda import device
from minitransformer.data import Batch
from minitransformer.distributed import Communicator
from minitransformer.layers import ParameterBuffer
from minitransformer.loss import training_loss
from minitransformer.optimizer import Adam, gradient_norm
from minitransformer.parallel import ThreadedModel
from minitransformer.precision import LossScale
from minitransformer.transformer import Transformer

A = TypeVar("A")
R = TypeVar("R")

# Shapes that have a graph, at most; others are launched kernel by kernel.
MOST_GRAPHS = 512

# Batches without a graph that wait for the GPU, at most.
MOST_IN_FLIGHT = 4


def rounded_up(count: int) -> int:
    """The next step of a ladder: by twos up to 64, then 32 steps a doubling.

    Batches of 4,096 tokens of Multi30k come in 108 shapes then, with 9% of padding
    instead of 4%; by fours and with half as many steps, in 65 with 16%.
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
        if xp is np:
            empty: Callable[..., np.ndarray] = np.empty
        else:
            empty = importlib.import_module("cupyx").empty_pinned
        self._stream = None if xp is np else xp.cuda.get_current_stream()
        self._host: list[Any] = [empty(shape, dtype=np.int64) for shape in shapes]
        self._copied: Any = None
        self.source, self.target = self._host
        if xp is not np:
            self.source, self.target = (xp.empty(shape, np.int64) for shape in shapes)

    def wait(self) -> None:
        """Until then what was copied last may neither be freed nor overwritten."""
        if self._copied is not None:
            self._copied.synchronize()

    def fill(self, batch: Batch) -> None:
        """Put a batch that is not larger in place of the last one."""
        self.wait()
        for host, ids in zip(self._host, (batch.source, batch.target), strict=True):
            host.fill(PAD_ID)
            host[: ids.shape[0], : ids.shape[1]] = ids
        if self._stream is not None:
            self.source.set(self._host[0])
            self.target.set(self._host[1])
            self._copied = self._stream.record()


class Recorded:
    """A graph, with all that it reads at fixed addresses."""

    def __init__(
        self, graph: Any, inputs: Inputs, rng: RandomStream, positions: Array
    ) -> None:
        self.graph, self.inputs, self.rng = graph, inputs, rng
        self._positions = positions  # the model may go on to a longer table


class GpuModel(ThreadedModel):
    """A model on a GPU. Batches that do not fit in its memory are computed in parts.

    `log` is told what happens that a user should know of.
    """

    def __init__(
        self,
        model: Transformer,
        parameters: ParameterBuffer,
        scale: LossScale,
        communicator: Communicator | None = None,
        graphs: bool = True,
        log: Callable[[str], None] = print,
    ) -> None:
        super().__init__(model, parameters, 1, communicator)
        self.scale, self.parts, self._log = scale, 1, log
        xp = self.xp
        self._graphs: dict[tuple[float, ...], Recorded] = {}
        self._records = graphs and xp is not np
        self._in_flight: deque[Inputs] = deque()
        self._loss = xp.zeros(1, dtype=np.float32)
        self._weight = xp.zeros((), dtype=np.float32)
        if xp is not np:
            self._memory = device.graph_memory(xp)
            self._stream = xp.cuda.Stream(non_blocking=True)  # as recording asks
            xp.cuda.Device().synchronize()  # the parameters have arrived
            self._stream.use()

    @property
    def recorded(self) -> int:
        """How many shapes of batches have a graph."""
        return len(self._graphs)

    @property
    def tokens_at_once(self) -> int:
        return sys.maxsize

    def map(self, function: Callable[[A], R], items: Iterable[A]) -> Iterator[R]:
        """Apply `function` to items, in this thread: CuPy's device is a thread's."""
        return map(function, items)

    def wait(self) -> None:
        if self.xp is not np:
            self._stream.synchronize()

    def gradient(
        self, batches: list[Batch], label_smoothing: float, key: tuple[int, ...]
    ) -> Array:
        """As `ThreadedModel.gradient`, multiplied by the loss scale; nothing waits.

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
        self._sum.finish()
        ranks.start_sum(self._loss)()
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
        inputs, rng = Inputs(self.xp, *shape), RandomStream(key, self.xp, True)
        inputs.fill(part)
        if self.xp is np:
            self._compute(inputs, label_smoothing, rng)
            return
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
        self, inputs: Inputs, label_smoothing: float, rng: RandomStream
    ) -> None:
        source, target = inputs.source, inputs.target
        loss = training_loss(self.model, source, target, label_smoothing, rng)
        loss.backward(self._weight)
        self._loss += loss.data

    def _record(
        self, inputs: Inputs, label_smoothing: float, rng: RandomStream
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
        limit = self.model.config.max_length or sys.maxsize
        lengths = part.source.shape[1], part.target.shape[1] - 1
        source, target = (min(rounded_up(n), max(n, limit)) for n in lengths)
        return rounded_up(len(part.source)), source, target

    def _halve(self, batches: list[Batch]) -> None:
        """Go on with parts of half the size, after a batch that memory did not hold."""
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
        self.wait()
        if self.xp is not np:
            self._graphs.clear()
            self._memory.free_all_blocks()
            self.xp.get_default_memory_pool().free_all_blocks()


class GpuAdam(Adam):
    """Adam that leaves on the GPU whether to update, and how far to clip.

    The gradient comes multiplied by the loss scale, which learns from it. `steps` is an
    array there, of the updates that were made.
    """

    def __init__(
        self, parameters: ParameterBuffer, training: TrainingConfig, scale: LossScale
    ) -> None:
        constants = training.beta1, training.beta2, training.epsilon
        super().__init__(parameters.data, *constants, parameters.half)
        self.scale = scale
        scalars = (0.0, *constants, 1.0, 1.0, 1.0, training.clip_norm or 0.0)
        xp = array_module(parameters.data)
        self._scalars = xp.asarray(scalars, dtype=np.float32)

    def step(
        self, gradient: Array, loss: Array, rate: float, clip_norm: float | None
    ) -> tuple[Array, Array]:
        """As `Adam.step`, by the gradient alone, and without waiting for the GPU."""
        fused_norm = backend.override("gradient_norm", (gradient,))
        if fused_norm is None:
            return self._step_in_turn(gradient, rate, clip_norm)
        found = fused_norm(gradient)
        finite = found[1] > 0
        self.steps = self.steps + array_module(found).where(finite, 1, 0)
        scalars = self._scalars
        scalars[0] = rate
        scalars[4] = 1 - self.beta1**self.steps
        scalars[5] = 1 - self.beta2**self.steps
        scalars[6] = 1 / self.scale.factor
        vectors = self.parameters, gradient, self.mean, self.square, self.half
        backend.override("adam_update", (gradient,))(*vectors, scalars, found)
        norm = found[0] * scalars[6]
        self.scale.update(finite)
        return norm, finite

    def _step_in_turn(
        self, gradient: Array, rate: float, clip_norm: float | None
    ) -> tuple[Array, Array]:
        """The same without the kernels: it waits for the norm."""
        factor = float(self.scale.factor)
        norm = gradient_norm(gradient) / factor
        finite = math.isfinite(norm)
        if finite:
            scale = min(1.0, (clip_norm or math.inf) / max(norm, 1e-12))
            self.update(gradient, rate, scale / factor)
        decided = array_module(gradient).asarray(finite)
        self.scale.update(decided)
        return norm, decided
