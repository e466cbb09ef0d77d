"""Data parallelism on processors: a batch is divided among processes, and among ranks.

Each process takes some pairs of a batch through the whole model: all cores are busy in
small operations as well as in matrix products. Forked processes share the parameters.
Each fills its gradient in shared memory, and the gradients are summed. Where processes
cannot be forked there is one, whose matrix products have threads. `distributed.py` sums
the gradients of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from minitransformer.engine.backend import Array
from minitransformer.engine.ops import HostStream
from minitransformer.model.parameters import ParameterBuffer
from minitransformer.model.transformer import Transformer, training_loss
from minitransformer.system.workers import Workers, limit_threads, shared_zeros
from minitransformer.text.batches import Batch, Batches, BatchStream
from minitransformer.training.distributed import Communicator

# About the largest part of a batch that a process takes through the model at once: the
# tokens of the longer side, padding included, times d_model. It is large enough for
# efficient matrix products, and small enough for its activations to need little memory.
TOKENS_TIMES_WIDTH = 1 << 18


class ParallelModel:
    """A model in training: `CpuModel` here, or `GpuModel` in `cuda/training.py`.

    If it is `asynchronous`, results are arrays that the GPU may still be computing. It
    takes about `tokens_at_once` tokens of one side through the model at once.
    """

    model: Transformer
    parameters: ParameterBuffer
    communicator: Communicator
    tokens_at_once: int
    num_processes = 1
    asynchronous = False

    def forward_backward(
        self, batches: list[Batch], label_smoothing: float, key: tuple[int, ...]
    ) -> Array:
        """Fill `parameters.grad` with the gradient of the mean loss of `batches`.

        The mean is over all target tokens, so gradient accumulation over several
        batches equals one large batch. `key` seeds the dropout noise. Each rank
        computes its share of the batches, and all get the whole gradient and loss. A
        loss scale, if the model has one, multiplies the gradient and not the loss.

        Returns: the mean loss, a scalar
        Units: nats per target token
        """
        raise NotImplementedError

    def prefetched(self, stream: BatchStream) -> Batches:
        """Return the batches of a stream, prepared in advance if that helps."""
        return stream

    def reserve_memory(self, stream: BatchStream, label_smoothing: float) -> None:
        """Take the memory that the stream's largest batches need, if that helps."""

    def synchronize(self) -> None:
        """Wait until all results so far are computed."""

    def close(self) -> None:
        """End the processes and threads, if there are any."""


@dataclass(frozen=True)
class Part:
    """Some pairs of a batch, for one pass through the model and back.

    `key` seeds their dropout noise; the gradient is multiplied by `weight`.
    """

    batch: Batch
    label_smoothing: float
    key: tuple[int, ...]
    weight: float

    def forward_backward(self, model: Transformer) -> float:
        """Add to the gradients of the parameters, and return the summed loss."""
        # A BLAS may call a right product invalid. The loss and the norm of the gradient
        # are checked to be finite.
        with np.errstate(invalid="ignore"):
            loss = training_loss(
                model,
                self.batch.source,
                self.batch.target,
                self.label_smoothing,
                HostStream(self.key),
            )
            loss.backward(self.weight)
        return float(loss.data)


class CpuModel(ParallelModel):
    """A model whose gradients this process computes, or several that it forks.

    Each part of a batch draws its own dropout noise. The number of parts is a multiple
    of the processes of all ranks, or the number of sentences if they are fewer. The
    same numbers of processes and ranks therefore give the same results. Without
    dropout, other numbers change only the last bits in float32; in bf16, these decide
    some roundings.

    A matrix product has `num_threads` threads in each process.
    """

    def __init__(
        self,
        model: Transformer,
        parameters: ParameterBuffer,
        num_processes: int = 1,
        num_threads: int = 1,
        communicator: Communicator | None = None,
    ) -> None:
        self.model = model
        self.parameters = parameters
        self.communicator = communicator or Communicator()
        self.num_processes = num_processes
        self.num_cores = num_processes * num_threads
        tokens = TOKENS_TIMES_WIDTH // model.config.d_model
        self.tokens_at_once = max(tokens, 1) * num_processes

        # Open until `close`.
        self._open = ExitStack()
        self._open.enter_context(limit_threads(num_threads))
        self._pool = self._open.enter_context(ThreadPoolExecutor(self.num_cores))

        # Several processes share the parameters, and each has a gradient that all read.
        self._gradients = [parameters.grad]
        self._workers: Workers[tuple[int, list[Part]], float] | None = None
        if num_processes > 1:
            shape = parameters.data.shape
            dtype = parameters.data.dtype
            self._gradients = [shared_zeros(shape, dtype) for _ in range(num_processes)]
            parameters.move_into(shared_zeros(shape, dtype), self._gradients[0])
            self._workers = Workers(self._fill_own_gradient, num_processes)
            self._open.callback(self._workers.close)

    def forward_backward(
        self, batches: list[Batch], label_smoothing: float, key: tuple[int, ...]
    ) -> Array:
        # Each rank takes its parts in turn. A part is weighted by the tokens of all
        # batches: the sum of all gradients is the gradient of the mean loss.
        num_tokens = sum(batch.target_tokens for batch in batches)
        pieces = [piece for batch in batches for piece in self._split(batch)]
        ranks = self.communicator
        mine = [
            Part(piece, label_smoothing, (*key, i), weight=1 / num_tokens)
            for i, piece in enumerate(pieces)
        ][ranks.rank :: ranks.size]

        # Sum over the processes of this rank, then over all ranks.
        total = self._fill_gradient(mine)
        if ranks.size > 1:
            ranks.start_all_reduce(self.parameters.grad)()
            [total] = ranks.all_reduce_numbers([total])
        return total / num_tokens

    def _split(self, batch: Batch) -> list[Batch]:
        """Divide a batch into parts, a multiple of the processes of all ranks."""
        tokens = max(batch.source.size, batch.target.size)
        ranks = self.communicator.size
        rounds = math.ceil(tokens / (self.tokens_at_once * ranks))
        return batch.split(rounds * self.num_processes * ranks)

    def _fill_gradient(self, parts: list[Part]) -> float:
        """Fill `parameters.grad` with the sum of the parts' gradients.

        Returns: the sum of their losses
        """
        if self._workers is None:
            return self._fill_own_gradient((0, parts))
        shares = range(self.num_processes)
        work = ((n, parts[n :: self.num_processes]) for n in shares)
        total = sum(self._workers.map(work))
        self.map(self._sum_share, shares)
        return total

    def _fill_own_gradient(self, work: tuple[int, list[Part]]) -> float:
        """In process n, fill the n-th gradient with the sum over some parts.

        Returns: the sum of their losses
        """
        n, parts = work
        self.parameters.collect_gradients(self._gradients[n])
        return sum(part.forward_backward(self.model) for part in parts)

    def _sum_share(self, thread: int) -> None:
        """Add the other gradients to the first, in a thread's share of its length."""
        first, *others = self._gradients
        size = -(-len(first) // self.num_processes)
        share = slice(thread * size, (thread + 1) * size)
        for gradient in others:
            first[share] += gradient[share]

    def map(self, function: Callable[[int], None], items: Iterable[int]) -> list[None]:
        """Call `function(item)` for each item, such as a part of Adam's arrays, on as
        many threads as there are cores.
        """
        return list(self._pool.map(function, items))

    def close(self) -> None:
        """End the processes and threads, and give BLAS its own threads back."""
        self._open.close()
