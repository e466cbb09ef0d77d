"""Adam on a GPU (section 5.3), in one pass that waits for nothing."""

from __future__ import annotations

import numpy as np

from minitransformer.cuda import device
from minitransformer.cuda.device import THREADS, blocks
from minitransformer.engine.backend import Array, array_module
from minitransformer.model.layers import ParameterBuffer
from minitransformer.settings.config import TrainingConfig
from minitransformer.training.loss_scale import LossScale

# Blocks that each sum a part of the gradient, at most.
NUM_BLOCKS = 1024


class GpuAdam:
    """Adam whose decisions (whether to update, how far to clip) stay on the GPU.

    The gradient comes multiplied by the loss scale, which learns from it. `steps` is an
    array on the GPU: the number of updates that were made.

    Shapes: first_moment, second_moment [number of parameters]
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
        self._scalars = xp.asarray(scalars, dtype=np.float32)

    def restore(self, steps: int, first_moment: Array, second_moment: Array) -> None:
        """Continue after `steps` updates that left these moments."""
        xp = array_module(self.first_moment)
        self.steps = xp.asarray(steps)
        self.first_moment[...] = xp.asarray(first_moment)
        self.second_moment[...] = xp.asarray(second_moment)

    def step(
        self, gradient: Array, loss: Array, rate: float, clip_norm: float | None
    ) -> tuple[Array, Array]:
        """Update as `Adam.step`, judging by the gradient alone whether all is finite.

        The norm to clip to is that of the settings that this object was made with.
        """
        found = gradient_norm(gradient)
        finite = found[1] > 0
        self.steps = self.steps + array_module(found).where(finite, 1, 0)
        scalars = self._scalars
        scalars[0] = rate
        scalars[4] = 1 - self.beta1**self.steps
        scalars[5] = 1 - self.beta2**self.steps
        scalars[6] = 1 / self.scale.factor
        adam_update(
            self.parameters.data,
            gradient,
            self.first_moment,
            self.second_moment,
            self.parameters.low_precision,
            scalars,
            found,
        )
        norm = found[0] * scalars[6]
        self.scale.update(finite)
        return norm, finite


def gradient_norm(gradient: Array) -> Array:
    """Compute the Euclidean norm of the flat gradient, left on the device.

    Shapes: gradient [P] float32 -> [2] float32: the norm, and 1.0 if it is finite, 0.0
    if an element is not, or the sum of squares overflows
    """
    xp, gpu = array_module(gradient), device.current()
    count = min(blocks(gradient.size), NUM_BLOCKS)
    partial, norm = xp.empty(count, np.float32), xp.empty(2, np.float32)
    size = np.int64(gradient.size)
    gpu.launch("square_sums", np.float32, count, THREADS, partial, gradient, size)
    gpu.launch("gradient_norm", np.float32, 1, THREADS, norm, partial, count)
    return norm


def adam_update(
    parameters: Array,
    gradient: Array,
    first_moment: Array,
    second_moment: Array,
    low_precision: Array | None,
    scalars: Array,
    norm: Array,
) -> None:
    """Do one step of Adam in place, and update the 16-bit copy, in one pass.

    `scalars` is a float32 array on the device: learning rate, beta1, beta2, epsilon,
    1 - beta1^t, 1 - beta2^t, scale, clip. The gradient is multiplied by `scale` (the
    inverse of the loss scale) and, where clip > 0 and the norm of what results exceeds
    it, by clip / norm. `norm` is what `gradient_norm(gradient)` returned; where it says
    that the gradient is not finite, nothing changes.

    Shapes: parameters, gradient, first_moment, second_moment [P] float32,
    low_precision [P] float16 or bfloat16, scalars [8], norm [2]
    """
    device.current().launch(
        "adam",
        np.float32 if low_precision is None else low_precision.dtype,
        blocks(parameters.size),
        THREADS,
        *(parameters, gradient, first_moment, second_moment, low_precision),
        *(scalars, norm, np.int64(parameters.size)),
    )
