"""Adam on a GPU (section 5.3), in one pass over the parameters."""

from __future__ import annotations

import numpy as np

from minitransformer.backends.cuda import device
from minitransformer.backends.cuda.device import num_blocks
from minitransformer.engine.backend import Array, array_module
from minitransformer.model.parameters import ParameterBuffer
from minitransformer.settings.config import TrainingConfig
from minitransformer.training.loss_scale import LossScale

# The most partial sums of squares of the gradient.
MAX_PARTIAL_SUMS = 1024


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
        self.beta1, self.beta2 = training.beta1, training.beta2
        xp = array_module(parameters.data)
        self.first_moment = xp.zeros_like(parameters.data)
        self.second_moment = xp.zeros_like(parameters.data)
        self.steps: Array = xp.asarray(0)
        constants = training.beta1, training.beta2, training.epsilon
        scalars = (0.0, *constants, 1.0, 1.0, 1.0, training.clip_norm or 0.0)
        self._scalars = xp.asarray(scalars, dtype=np.float32)  # AdamScalars in C

    def restore(self, steps: int, first_moment: Array, second_moment: Array) -> None:
        xp = array_module(self.first_moment)
        self.steps = xp.asarray(steps)
        self.first_moment[...] = xp.asarray(first_moment)
        self.second_moment[...] = xp.asarray(second_moment)

    def step(self, gradient: Array, loss: Array, rate: float) -> tuple[Array, Array]:
        """Update as `Adam.step`, but the gradient alone decides if all is finite."""
        xp, gpu = array_module(gradient), device.current()
        squares = _sum_of_squares(gradient)
        norm = xp.sqrt(squares[0])
        finite = xp.isfinite(norm)
        self.steps = self.steps + xp.where(finite, 1, 0)
        scalars, data = self._scalars, self.parameters.data
        scalars[0] = rate
        scalars[4] = 1 - self.beta1**self.steps
        scalars[5] = 1 - self.beta2**self.steps
        scalars[6] = 1 / self.scale.factor
        copy = self.parameters.low_precision
        dtype = np.float32 if copy is None else copy.dtype
        arrays = data, gradient, self.first_moment, self.second_moment, copy
        kernel_args = *arrays, scalars, squares, np.int64(data.size)
        gpu.launch("adam", dtype, num_blocks(data.size), *kernel_args)
        self.scale.update(finite)
        return norm * scalars[6], finite


def _sum_of_squares(gradient: Array) -> Array:
    """Return the gradient's squared norm, on its GPU. Shapes: gradient [P] -> [1]"""
    xp, gpu = array_module(gradient), device.current()
    count = min(num_blocks(gradient.size), MAX_PARTIAL_SUMS)
    partial, total = (xp.empty(size, np.float32) for size in (count, 1))
    size = np.int64(gradient.size)
    gpu.launch("square_sums", np.float32, count, partial, gradient, size)
    gpu.launch("sum_all", np.float32, 1, total, partial, count)
    return total
