"""Data parallelism among forked processes of one machine, which share parameters."""

from __future__ import annotations

from minitransformer.model.parameters import ParameterBuffer
from minitransformer.model.transformer import Transformer
from minitransformer.training.parallel import Part, ThreadedModel
from minitransformer.workers import Workers, shared_zeros


class ForkedModel(ThreadedModel):
    """`ThreadedModel` with a forked process in place of each thread.

    The processes wait for each other only at the end of an update, not for Python's
    lock at every operation. They compute gradients; what else is divided, such as
    Adam's update, is done by the threads of the parent.
    """

    def __init__(
        self, model: Transformer, parameters: ParameterBuffer, num_processes: int
    ) -> None:
        super().__init__(model, parameters, num_processes)
        parameters.share()
        parameters.data_changed()
        others = shared_zeros((num_processes - 1, len(parameters.grad)), "float32")
        self._gradients = [parameters.grad, *others]
        self._workers = Workers(self._gradient_of, num_processes)
        self._open.callback(self._workers.close)

    def _gradient_of(self, work: tuple[int, list[Part]]) -> float:
        """Fill one of the gradients with that of some parts; return their loss."""
        which, parts = work
        self._gradients[which].fill(0)
        self.parameters.collect_gradients_in(self._gradients[which])
        return sum(part.add_gradient(self.model) for part in parts)

    def _fill_gradient(self, parts: list[Part]) -> float:
        count = self.num_threads
        shares = [(which, parts[which::count]) for which in range(count)]
        total = sum(self._workers.map(shares))
        list(self.map(self._add_gradients, range(count)))
        return total

    def _add_gradients(self, thread: int) -> None:
        """Add the other gradients to the first, in one thread's share of its length."""
        size = -(-len(self.parameters.grad) // self.num_threads)
        mine = slice(thread * size, (thread + 1) * size)
        for gradient in self._gradients[1:]:
            self.parameters.grad[mine] += gradient[mine]
