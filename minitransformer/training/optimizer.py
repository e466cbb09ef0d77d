"""Adam and the learning-rate schedule (section 5.3)."""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np

from minitransformer.engine.backend import Array

# Elements updated at a time: a block of each vector fits in the cache together.
BLOCK = 1 << 15


def learning_rate(step: int, peak: float, warmup: int) -> float:
    """Equation 3: rises linearly for `warmup` steps, then falls as step^-0.5.

    `step` counts updates from 1. With peak = (d_model * warmup)^-0.5 this is
    d_model^-0.5 * min(step^-0.5, step * warmup^-1.5).
    """
    return peak * min(step / warmup, math.sqrt(warmup / step))


def peak_learning_rate(d_model: int, warmup: int) -> float:
    """Return the highest learning rate of equation 3, reached at step `warmup`."""
    return (d_model * warmup) ** -0.5


class Optimizer(Protocol):
    """What the training loop asks of Adam, here and in `cuda/optimizer.py`.

    Shapes: first_moment, second_moment [number of parameters]
    """

    first_moment: Array
    second_moment: Array

    def restore(self, steps: int, first_moment: Array, second_moment: Array) -> None:
        """Continue after `steps` updates that left these moments."""
        ...

    def step(
        self, gradient: Array, loss: Array, rate: float, clip_norm: float | None
    ) -> tuple[Array, Array]:
        """Update the parameters, with the gradient clipped to `clip_norm`.

        Nothing changes if the loss or the gradient is not finite.

        Returns: the norm of the gradient, and whether all was finite, as scalars that
        may still be computed on a device
        """
        ...


class Adam:
    """Adam (Kingma and Ba, 2015, algorithm 1) over one flat vector of parameters.

    Shapes: parameters, first_moment, second_moment [number of parameters]

    Differs: epsilon is added outside the bias-corrected root, as in the paper's
    algorithm; Chainer's variant adds it before the correction.
    """

    def __init__(
        self, parameters: Array, beta1: float, beta2: float, epsilon: float
    ) -> None:
        self.parameters = parameters
        self.beta1, self.beta2, self.epsilon = beta1, beta2, epsilon
        self.first_moment = np.zeros_like(parameters)
        self.second_moment = np.zeros_like(parameters)
        self.steps = 0

    def restore(self, steps: int, first_moment: Array, second_moment: Array) -> None:
        self.steps = steps
        self.first_moment[...] = first_moment
        self.second_moment[...] = second_moment

    def step(
        self, gradient: Array, loss: Array, rate: float, clip_norm: float | None
    ) -> tuple[Array, Array]:
        norm = gradient_norm(gradient)
        finite = math.isfinite(loss + norm)
        if finite:
            scale = min(1.0, (clip_norm or math.inf) / max(norm, 1e-12))
            self.update(gradient, rate, scale)
        return norm, finite

    def update(self, gradient: Array, rate: float, scale: float = 1.0) -> None:
        """Move the parameters against `scale * gradient` with learning rate `rate`."""
        self.steps += 1
        for start in range(0, len(gradient), BLOCK):
            self._update_block(slice(start, start + BLOCK), gradient, rate, scale)

    def _update_block(
        self, block: slice, gradient: Array, rate: float, scale: float
    ) -> None:
        m, v = self.first_moment[block], self.second_moment[block]
        g = gradient[block] * scale
        m *= self.beta1
        m += (1 - self.beta1) * g
        g *= g
        g *= 1 - self.beta2
        v *= self.beta2
        v += g
        root = np.sqrt(v, out=g)
        root *= 1 / math.sqrt(1 - self.beta2**self.steps)
        root += self.epsilon
        change = np.divide(m, root, out=root)
        change *= rate / (1 - self.beta1**self.steps)
        self.parameters[block] -= change


def gradient_norm(gradient: Array) -> float:
    """Return the Euclidean norm of the flat gradient."""
    return math.sqrt(float(gradient @ gradient))
