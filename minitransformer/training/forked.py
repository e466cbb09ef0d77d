"""Data parallelism among forked processes, which share the parameters."""

from __future__ import annotations

from minitransformer.model.parameters import ParameterBuffer
from minitransformer.model.transformer import Transformer
from minitransformer.training.distributed import Communicator
from minitransformer.training.parallel import Part, ThreadedModel
from minitransformer.workers import Workers, forks_allowed, shared_zeros


def on_cores(
    model: Transformer,
    parameters: ParameterBuffer,
    count: int,
    communicator: Communicator | None = None,
) -> ThreadedModel:
    """Return the model on `count` processes where forks are allowed, else on threads.

    Ranks have threads: MPI does not allow the forks of a process that it started.
    """
    ranks = communicator or Communicator()
    if count > 1 and ranks.size == 1 and forks_allowed():
        return ForkedModel(model, parameters, count)
    return ThreadedModel(model, parameters, count, ranks)


class ForkedModel(ThreadedModel):
    """`ThreadedModel`, but a process in place of each thread computes gradients.

    Each process adds up a gradient of its own in shared memory, and waits for the
    others once an update. Threads of the parent do the rest: they sum the gradients,
    and compute what `map` is asked for, such as Adam's update.
    """

    def __init__(
        self, model: Transformer, parameters: ParameterBuffer, num_processes: int
    ) -> None:
        super().__init__(model, parameters, num_processes)
        like = parameters.data.shape, parameters.data.dtype
        self._gradients = [shared_zeros(*like) for _ in range(num_processes)]
        parameters.move_into(shared_zeros(*like), self._gradients[0])
        self._workers = Workers(self._compute, num_processes)
        self._open.callback(self._workers.close)

    def _fill_gradient(self, parts: list[Part]) -> float:
        shares = range(self.num_threads)
        total = sum(self._workers.map((n, parts[n :: len(shares)]) for n in shares))
        list(self.map(self._add_gradients, shares))
        return total

    def _compute(self, work: tuple[int, list[Part]]) -> float:
        """Fill the n-th gradient with that of some parts, and return their loss."""
        n, parts = work
        self.parameters.collect_gradients(self._gradients[n])
        return sum(part.forward_backward(self.model) for part in parts)

    def _add_gradients(self, thread: int) -> None:
        """Add the other gradients to the first, in a thread's share of its length."""
        first, *others = self._gradients
        size = -(-len(first) // self.num_threads)
        share = slice(thread * size, (thread + 1) * size)
        for gradient in others:
            first[share] += gradient[share]
