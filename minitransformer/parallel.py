"""Data parallelism among the threads of one process.

NumPy releases the interpreter's lock while it computes, so threads that each take some
sentences of a batch through the whole model keep all cores busy, in small operations as
well as in matrix products. Each thread has gradients of its own, added up at the end;
BLAS is kept to one thread in each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import TypeVar

import numpy as np

from minitransformer.backend import Array, RandomStream, one_blas_thread
from minitransformer.data import Batch
from minitransformer.layers import ParameterBuffer, replicate
from minitransformer.loss import training_loss
from minitransformer.transformer import Transformer

A = TypeVar("A")
R = TypeVar("R")


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
        self.replicas = [model]
        self._gradients: list[Array] = [parameters.grad]
        for _ in range(num_threads - 1):
            replica, gradient = replicate(model), xp.zeros_like(parameters.grad)
            views = parameters.views(gradient)
            for name, parameter in replica.named_parameters():
                parameter.grad = views[name]
            self.replicas.append(replica)
            self._gradients.append(gradient)
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

        def work(shard: int) -> float:
            replica, total = self.replicas[shard], 0.0
            self._gradients[shard].fill(0)
            for index, parts in enumerate(shards):
                if shard >= len(parts):
                    continue
                rng = RandomStream((*key, index, shard), self.xp)
                source = self.xp.asarray(parts[shard].source)
                target = self.xp.asarray(parts[shard].target)
                loss = training_loss(replica, source, target, label_smoothing, rng)
                total += float(loss.data)
                loss.backward(1 / num_tokens)
            return total

        shards = [batch.split(self.num_threads) for batch in batches]
        losses = list(self._pool.map(work, range(self.num_threads)))
        for gradient in self._gradients[1:]:
            self._gradients[0] += gradient
        return sum(losses) / num_tokens

    def map(self, function: Callable[[A], R], items: Iterable[A]) -> Iterator[R]:
        """Apply `function` to items in several threads; results in order."""
        return self._pool.map(function, items)

    def close(self) -> None:
        self._pool.shutdown()
        self._limit.__exit__(None, None, None)
