"""Data parallelism: a batch is divided among threads, and among processes (ranks).

NumPy releases the interpreter's lock while it computes. Threads that each take some
pairs of a batch through the whole model therefore keep all cores busy, in small
operations as well as in matrix products. Each thread uses one thread of BLAS and has
gradients of its own, which are then summed. `forked.py` does the same in processes,
and `distributed.py` sums the gradients of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol, TypeAlias, TypeVar

from minitransformer.engine.autograd import Tensor
from minitransformer.engine.backend import Array
from minitransformer.engine.random_streams import HostStream
from minitransformer.machine import one_blas_thread
from minitransformer.model.loss import training_loss
from minitransformer.model.parameters import ParameterBuffer, replicate
from minitransformer.model.transformer import Transformer
from minitransformer.text.batches import Batch, BatchStream
from minitransformer.training.distributed import Communicator, GradientAllReduce

A = TypeVar("A")
R = TypeVar("R")
WhenComplete: TypeAlias = Callable[[Tensor], None]

# About the largest part of a batch that a thread takes through the model at once: the
# tokens of the longer side, padding included, times d_model. It is large enough for
# efficient matrix products, and small enough for its activations to need little memory.
TOKENS_TIMES_WIDTH = 1 << 18


class ParallelModel(Protocol):
    """A model in training: on threads here, in processes in `forked.py`, or on a GPU.

    If it is `asynchronous`, results are arrays that the GPU may still be computing.
    """

    model: Transformer
    parameters: ParameterBuffer
    communicator: Communicator
    num_threads: int
    asynchronous: bool

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
        ...

    @property
    def tokens_at_once(self) -> int:
        """Return about how many tokens of one side the model computes at once."""
        ...

    def reserve_memory(self, stream: BatchStream, label_smoothing: float) -> None:
        """Take the memory that the stream's largest batches need, if that helps."""
        ...

    def map(self, function: Callable[[A], R], items: Iterable[A]) -> Iterator[R]:
        """Yield `function(item)` for each item in order, on one thread or several."""
        ...

    def synchronize(self) -> None:
        """Wait until all results so far are computed."""
        ...

    def close(self) -> None:
        """End the threads, if there are any."""
        ...


@dataclass(frozen=True)
class Part:
    """Some pairs of a batch, for one pass through the model and back.

    `key` seeds their dropout noise; the gradient is multiplied by `weight`.
    """

    batch: Batch
    label_smoothing: float
    key: tuple[int, ...]
    weight: float

    def forward_backward(
        self, model: Transformer, when_complete: WhenComplete | None = None
    ) -> float:
        """Add the gradient to those of the parameters, and return the summed loss."""
        source, target, rng = self.batch.source, self.batch.target, HostStream(self.key)
        loss = training_loss(model, source, target, self.label_smoothing, rng)
        loss.backward(self.weight, when_complete)
        return float(loss.data)


class ThreadedModel:
    """A model and its replicas, one per thread, which share the parameters.

    Each part of a batch draws its own dropout noise. The number of parts is a multiple
    of the threads of all ranks, or that of the sentences if they are fewer. The same
    numbers of threads and ranks therefore give the same results. Without dropout, other
    numbers change only the last bits in float32; in bf16, these decide some roundings.
    """

    asynchronous = False

    def __init__(
        self,
        model: Transformer,
        parameters: ParameterBuffer,
        num_threads: int,
        communicator: Communicator | None = None,
    ) -> None:
        self.model, self.parameters = model, parameters
        self.communicator = communicator or Communicator()
        self._all_reduce = GradientAllReduce(self.communicator, parameters)
        self.num_threads = num_threads
        self.replicas = [model, *(replicate(model) for _ in range(num_threads - 1))]
        self._replica_parameters = [
            dict(replica.named_parameters()) for replica in self.replicas[1:]
        ]
        self._open = ExitStack()  # until `close`
        self._open.enter_context(one_blas_thread())
        self._pool = self._open.enter_context(ThreadPoolExecutor(num_threads))

    def forward_backward(
        self, batches: list[Batch], label_smoothing: float, key: tuple[int, ...]
    ) -> Array:
        num_tokens = sum(batch.target_tokens for batch in batches)
        parts = [part for batch in batches for part in self._split(batch)]
        rank, size = self.communicator.rank, self.communicator.size
        mine = [
            Part(batch, label_smoothing, (*key, i), 1 / num_tokens)
            for i, batch in enumerate(parts)
        ][rank::size]
        total = self._fill_gradient(mine)
        self._all_reduce.finish()
        [total] = self.communicator.all_reduce_numbers([total])
        return total / num_tokens

    def _fill_gradient(self, parts: list[Part]) -> float:
        """Fill `parameters.grad` with the sum of the parts' gradients.

        Returns: the sum of their losses
        """
        total, threads = 0.0, self.num_threads

        def forward_backward(i: int) -> float:
            # With one thread, the last part completes the gradient of each parameter,
            # and its all-reduce starts while the backward pass goes on.
            is_last = threads == 1 and i == len(parts) - 1
            when_complete = self._all_reduce.complete if is_last else None
            return parts[i].forward_backward(self.replicas[i % threads], when_complete)

        self.parameters.grad.fill(0)
        for first in range(0, len(parts), threads):
            indices = range(first, min(first + threads, len(parts)))
            total += sum(self._pool.map(forward_backward, indices))
            list(self._pool.map(self._add_replica_gradients, range(threads)))
        return total

    def _split(self, batch: Batch) -> list[Batch]:
        """Divide a batch into parts, a multiple of the threads of all ranks."""
        tokens = max(batch.source.size, batch.target.size)
        ranks = self.communicator.size
        rounds = math.ceil(tokens / (self.tokens_at_once * ranks))
        return batch.split(rounds * self.num_threads * ranks)

    @property
    def tokens_at_once(self) -> int:
        tokens = TOKENS_TIMES_WIDTH // self.model.config.d_model
        return max(tokens, 1) * self.num_threads

    def reserve_memory(self, stream: BatchStream, label_smoothing: float) -> None:
        """Do nothing: parts are too small to need memory in advance."""

    def _add_replica_gradients(self, thread: int) -> None:
        """Add the replicas' gradients to the model's, for one thread's share of them.

        Replicas then release their gradients. The next backward pass allocates new ones
        while it frees activations, so memory never holds all of both.
        """
        parameters = list(self.parameters.parameters.items())
        for name, parameter in parameters[thread :: self.num_threads]:
            for replica in self._replica_parameters:
                if (gradient := replica[name].grad) is not None:
                    parameter.grad += gradient
                    replica[name].grad = None

    def map(self, function: Callable[[A], R], items: Iterable[A]) -> Iterator[R]:
        return self._pool.map(function, items)

    def synchronize(self) -> None:
        """Return at once, because every result is already computed."""

    def close(self) -> None:
        """End the threads and give BLAS its own threads back."""
        self._open.close()
