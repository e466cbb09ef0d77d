"""Data parallelism: the gradient of a batch on the threads of a process, and its ranks.

NumPy releases the interpreter's lock while it computes. Threads that each take some
sentences of a batch through the whole model therefore keep all cores busy, in small
operations as well as in matrix products. Each thread has gradients of its own, which
are added up at the end; BLAS uses one thread in each. Of several processes
(`distributed.py`) each takes some parts of every batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

from minitransformer.engine.backend import Array
from minitransformer.engine.machine import one_blas_thread
from minitransformer.engine.random_streams import HostStream
from minitransformer.model.layers import ParameterBuffer, replicate
from minitransformer.model.loss import training_loss
from minitransformer.model.transformer import Transformer
from minitransformer.text.batches import Batch
from minitransformer.training.distributed import Communicator, GradientAllReduce

A = TypeVar("A")
R = TypeVar("R")


# Tokens of one side, padding included, times d_model that a thread takes through the
# model at once: enough for efficient products, few enough for activations of little
# memory.
WIDTH_AT_ONCE = 1 << 18


class ParallelModel(Protocol):
    """A model that is trained: on threads here, on a GPU in `cuda/training.py`.

    `num_threads` threads work on it. Where it is `asynchronous`, results are arrays
    that a device may still compute, and `synchronize` waits for them.
    """

    model: Transformer
    parameters: ParameterBuffer
    communicator: Communicator
    num_threads: int
    asynchronous: bool

    def gradient(
        self, batches: list[Batch], label_smoothing: float, key: tuple[int, ...]
    ) -> Array:
        """Fill `parameters.grad` with the gradient of the mean loss of `batches`.

        Gradient accumulation: the loss is summed over all target tokens and divided by
        their number, so that each of the batches counts by its tokens. `key` seeds the
        dropout noise. Of several ranks each computes some parts, and all get the whole
        gradient and loss.

        Returns: the mean loss, a scalar. Units: nats a target token
        """
        ...

    @property
    def tokens_at_once(self) -> int:
        """Tokens of one side that are taken through the model at once, at most."""
        ...

    def reserve_memory(self, batches: list[Batch], label_smoothing: float) -> None:
        """Compute the largest batches once, so that no later one is short of memory."""
        ...

    def map(self, function: Callable[[A], R], items: Iterable[A]) -> Iterator[R]:
        """Apply `function` to items, in the threads if there are several; in order."""
        ...

    def synchronize(self) -> None:
        """Wait until everything asked for so far is computed."""
        ...


class ThreadedModel:
    """A model and its replicas, one for each thread, which share the parameters.

    `parameters.grad` holds the summed gradient. Without dropout, the result of a step
    depends on the number of threads of all ranks in the last bits only. The noise of
    dropout is drawn for each part of a batch, and there are as many parts as threads;
    with the same number of threads the result is the same every time.
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
        self._names = list(parameters.parameters)
        self._replicas = [dict(r.named_parameters()) for r in self.replicas[1:]]
        self._limit = one_blas_thread()
        self._limit.__enter__()
        self._pool = ThreadPoolExecutor(num_threads)

    def gradient(
        self, batches: list[Batch], label_smoothing: float, key: tuple[int, ...]
    ) -> Array:
        num_tokens = sum(batch.target_tokens for batch in batches)
        parts = [part for batch in batches for part in self._split(batch)]
        mine = range(self.communicator.rank, len(parts), self.communicator.size)
        total, size = 0.0, self.num_threads

        def work(turn: int) -> float:
            part, rng = parts[mine[turn]], HostStream((*key, mine[turn]))
            replica = self.replicas[turn % size]
            loss = training_loss(
                replica, part.source, part.target, label_smoothing, rng
            )
            at_last = size == 1 and turn == len(mine) - 1
            complete = self._all_reduce.complete if at_last else None
            loss.backward(1 / num_tokens, complete)
            return float(loss.data)

        self.parameters.grad.fill(0)
        for first in range(0, len(mine), size):
            turns = range(first, min(first + size, len(mine)))
            total += sum(self._pool.map(work, turns))
            list(self._pool.map(self._collect, range(size)))
        self._all_reduce.finish()
        [total] = self.communicator.all_reduce_numbers([total])
        return total / num_tokens

    def _split(self, batch: Batch) -> list[Batch]:
        """Cut a batch into one part a thread, or more if the parts would be large."""
        tokens = max(batch.source.size, batch.target.size)
        ranks = self.communicator.size
        rounds = math.ceil(tokens / (self.tokens_at_once * ranks))
        return batch.split(rounds * self.num_threads * ranks)

    @property
    def tokens_at_once(self) -> int:
        return WIDTH_AT_ONCE // self.model.config.d_model * self.num_threads

    def reserve_memory(self, batches: list[Batch], label_smoothing: float) -> None:
        """Leave it to the allocator: parts of a bounded size need no reserve."""

    def _collect(self, share: int) -> None:
        """Add the replicas' gradients to the model's, for a share of the parameters.

        Each backward pass makes them anew while its activations go, so that the memory
        of both is never held at once.
        """
        for name in self._names[share :: self.num_threads]:
            total = self.parameters.parameters[name].grad
            for replica in self._replicas:
                if (gradient := replica[name].grad) is not None:
                    total += gradient
                    replica[name].grad = None

    def map(self, function: Callable[[A], R], items: Iterable[A]) -> Iterator[R]:
        return self._pool.map(function, items)

    def synchronize(self) -> None:
        """Return at once: every result is already computed."""

    def close(self) -> None:
        """End the threads, and give BLAS its own threads back."""
        self._pool.shutdown()
        self._limit.__exit__(None, None, None)
