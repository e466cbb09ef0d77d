"""Data parallelism among the threads of a process, and among processes.

NumPy releases the interpreter's lock while it computes, so threads that each take some
sentences of a batch through the whole model keep all cores busy, in small operations as
well as in matrix products. Each thread has gradients of its own, added up at the end;
BLAS is kept to one thread in each. Of several processes (`distributed.py`) each takes
some parts of every batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from minitransformer.backend import (
    Array,
    RandomStream,
    array_module,
    one_blas_thread,
)
from minitransformer.data import Batch
from minitransformer.distributed import Communicator, GradientSum
from minitransformer.layers import ParameterBuffer, replicate
from minitransformer.loss import training_loss
from minitransformer.transformer import Transformer

A = TypeVar("A")
R = TypeVar("R")


# Tokens of one side, padding included, times d_model that a thread takes through the
# model at once: enough for efficient products, few enough for activations of little
# memory.
WIDTH_AT_ONCE = 1 << 18


class ThreadedModel:
    """A model and its replicas, one a thread, which share parameters.

    `parameters.grad` holds the summed gradient. Without dropout, the result of a step
    depends on the number of threads of all ranks in the last bits only; the noise of
    dropout is drawn for each part of a batch, and there are as many as threads. With
    the same number the result is the same every time.
    """

    def __init__(
        self,
        model: Transformer,
        parameters: ParameterBuffer,
        num_threads: int,
        communicator: Communicator | None = None,
    ) -> None:
        self.model, self.parameters = model, parameters
        self.xp = array_module(parameters.data)
        self.communicator = communicator or Communicator()
        self._sum = GradientSum(self.communicator, parameters)
        self.num_threads = num_threads
        self.replicas = [model, *(replicate(model) for _ in range(num_threads - 1))]
        self._names = list(parameters.parameters)
        self._replicas = [dict(r.named_parameters()) for r in self.replicas[1:]]
        self._limit = one_blas_thread()
        self._limit.__enter__()
        self._pool = ThreadPoolExecutor(num_threads)

    def gradient(
        self,
        batches: list[Batch],
        label_smoothing: float,
        key: tuple[int, ...],
    ) -> Array:
        """Fill `parameters.grad` with the gradient of the mean loss of `batches`.

        The loss is summed over all target tokens and divided by their number, so that
        accumulated batches weigh by their tokens. `key` seeds the dropout noise. Of
        several ranks each computes some parts, and all get the whole gradient and loss.

        Returns: the mean loss, a scalar. Units: nats a target token
        """
        num_tokens = sum(batch.target_tokens for batch in batches)
        parts = [part for batch in batches for part in self._cut(batch)]
        mine = range(self.communicator.rank, len(parts), self.communicator.size)
        total, size = 0.0, self.num_threads

        def work(turn: int) -> float:
            part, rng = parts[mine[turn]], RandomStream((*key, mine[turn]))
            replica = self.replicas[turn % size]
            loss = training_loss(
                replica, part.source, part.target, label_smoothing, rng
            )
            at_last = size == 1 and turn == len(mine) - 1
            loss.backward(1 / num_tokens, self._sum.complete if at_last else None)
            return float(loss.data)

        self.parameters.grad.fill(0)
        for first in range(0, len(mine), size):
            turns = range(first, min(first + size, len(mine)))
            total += sum(self._pool.map(work, turns))
            list(self._pool.map(self._collect, range(size)))
        self._sum.finish()
        [total] = self.communicator.total([total])
        return total / num_tokens

    def _cut(self, batch: Batch) -> list[Batch]:
        """Cut a batch into parts: one a thread, or more if those would be large."""
        tokens = max(batch.source.size, batch.target.size)
        ranks = self.communicator.size
        rounds = math.ceil(tokens / (self.tokens_at_once * ranks))
        return batch.split(rounds * self.num_threads * ranks)

    @property
    def tokens_at_once(self) -> int:
        """Tokens of one side that all threads together have in work, at most."""
        return WIDTH_AT_ONCE // self.model.config.d_model * self.num_threads

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
        """Apply `function` to items in several threads; results in order."""
        return self._pool.map(function, items)

    def wait(self) -> None:
        """Wait until all that was asked for is computed, as here it is."""

    def close(self) -> None:
        self._pool.shutdown()
        self._limit.__exit__(None, None, None)
