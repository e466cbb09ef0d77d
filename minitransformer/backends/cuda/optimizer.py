"""Adam on a GPU (section 5.3), in one pass over the parameters."""

from __future__ import annotations

import numpy as np

from minitransformer.backends.cuda import device
from minitransformer.backends.cuda.device import num_blocks, num_vectors
from minitransformer.engine.backend import Array, array_module
from minitransformer.model.parameters import ParameterBuffer
from minitransformer.settings.config import TrainingConfig
from minitransformer.training.loss_scale import LossScale

# The most partial sums of squares of the gradient.
MAX_PARTIAL_SUMS = 1024

# What the host knows of an update: AdamNumbers in adam.cu.
NUMBERS = np.dtype(
    [(name, np.float32) for name in ("rate", "beta1", "beta2", "epsilon", "clip_norm")]
)


class GpuAdam:
    """An `Optimizer` whose decisions are made on the GPU, so that the host never waits.

    The GPU decides whether to update and how far to clip. The gradient comes multiplied
    by the loss scale, which adapts to it. `steps`, an array on the GPU, is the number
    of updates that were made.

    Shapes: first_moment, second_moment [P]
    """

    def __init__(
        self, parameters: ParameterBuffer, training: TrainingConfig, scale: LossScale
    ) -> None:
        self.parameters, self.scale = parameters, scale
        self.constants = {
            "beta1": training.beta1,
            "beta2": training.beta2,
            "epsilon": training.epsilon,
            "clip_norm": training.clip_norm or 0.0,
        }
        xp = array_module(parameters.data)
        self.first_moment = xp.zeros_like(parameters.data)
        self.second_moment = xp.zeros_like(parameters.data)
        self.steps: Array = xp.asarray(0)

    def restore(self, steps: int, first_moment: Array, second_moment: Array) -> None:
        xp = array_module(self.first_moment)
        self.steps = xp.asarray(steps)
        self.first_moment[...] = xp.asarray(first_moment)
        self.second_moment[...] = xp.asarray(second_moment)

    def step(self, gradient: Array, loss: Array, rate: float) -> tuple[Array, Array]:
        """Update as `Adam.step`, but the gradient alone decides if all is finite."""
        xp = array_module(gradient)
        data, copy = self.parameters.data, self.parameters.low_precision

        # An update counts where no element of the gradient is NaN or infinite.
        squares = _sum_of_squares(gradient)
        norm = xp.sqrt(squares[0])
        finite = xp.isfinite(norm)
        self.steps = self.steps + xp.where(finite, 1, 0)
        device.current().launch(
            "adam",
            np.float32 if copy is None else copy.dtype,
            num_blocks(num_vectors(data.size, data.dtype)),
            data,
            gradient,
            self.first_moment,
            self.second_moment,
            copy,
            device.struct(NUMBERS, rate=rate, **self.constants),
            self.steps,
            self.scale.factor,
            squares,
            np.int64(data.size),
        )
        norm = norm / self.scale.factor  # which the next line may change
        self.scale.update(finite)
        return norm, finite


def _sum_of_squares(gradient: Array) -> Array:
    """Return the gradient's squared norm, on its GPU. Shapes: gradient [P] -> [1]"""
    xp, gpu = array_module(gradient), device.current()
    count = min(num_blocks(gradient.size), MAX_PARTIAL_SUMS)
    partial, total = (xp.empty(size, np.float32) for size in (count, 1))
    size = np.int64(gradient.size)
    gpu.launch("square_sums", np.float32, count, partial, gradient, size)
    gpu.launch("sum_all", np.float32, 1, total, partial, count)
    return total
