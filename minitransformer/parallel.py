"""Data parallelism among the threads of one process.

NumPy releases the interpreter's lock while it computes, so threads that each take some
sentences of a batch through the whole model keep all cores busy, in small operations as
well as in matrix products. Each thread has gradients of its own, added up at the end;
BLAS is kept to one thread in each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import TypeVar

import numpy as np

from minitransformer.backend import RandomStream, one_blas_thread
from minitransformer.data import Batch
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

    `parameters.grad` holds the summed gradient. The result of a step depends on the
    number of threads in the last bits only, and is the same every time for one number.
    """

    def __init__(
        self,
        model: Transformer,
        parameters: ParameterBuffer,
        num_threads: int,
        xp: ModuleType = np,
    ) -> None:
        self.model, self.parameters, self.xp = model, parameters, xp
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
    ) -> float:
        """Fill `parameters.grad` with the gradient of the mean loss of `batches`.

        The loss is summed over all target tokens and divided by their number, so that
        accumulated batches weigh by their tokens. `key` seeds the dropout noise.

        Units: nats a target token
        """
        num_tokens = sum(batch.target_tokens for batch in batches)
        parts = [part for batch in batches for part in self._cut(batch)]
        total, size = 0.0, self.num_threads

        def work(number: int) -> float:
            rng = RandomStream((*key, number), self.xp)
            source = self.xp.asarray(parts[number].source)
            target = self.xp.asarray(parts[number].target)
            replica = self.replicas[number % size]
            loss = training_loss(replica, source, target, label_smoothing, rng)
            loss.backward(1 / num_tokens)
            return float(loss.data)

        self.parameters.grad.fill(0)
        for first in range(0, len(parts), size):
            numbers = range(first, min(first + size, len(parts)))
            total += sum(self._pool.map(work, numbers))
            list(self._pool.map(self._collect, range(size)))
        return total / num_tokens

    def _cut(self, batch: Batch) -> list[Batch]:
        """Cut a batch into parts: one a thread, or more if those would be large."""
        tokens = max(batch.source.size, batch.target.size)
        at_once = WIDTH_AT_ONCE // self.model.config.d_model * self.num_threads
        rounds = math.ceil(tokens / at_once) if self.xp is np else 1
        return batch.split(rounds * self.num_threads)

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

    def close(self) -> None:
        self._pool.shutdown()
        self._limit.__exit__(None, None, None)
