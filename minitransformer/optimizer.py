"""Adam and the learning-rate schedule (section 5.3)."""

from __future__ import annotations

import math

from minitransformer.backend import Array, array_module

# Elements updated at a time: a block of each vector fits in the cache together.
BLOCK = 1 << 15


def learning_rate(step: int, peak: float, warmup: int) -> float:
    """Equation 3: rises linearly for `warmup` steps, then falls as step^-0.5.

    `step` counts updates from 1. With peak = (d_model * warmup)^-0.5 this is
    d_model^-0.5 * min(step^-0.5, step * warmup^-1.5).
    """
    return peak * min(step / warmup, math.sqrt(warmup / step))


def paper_peak(d_model: int, warmup: int) -> float:
    """The highest learning rate of equation 3, reached at step `warmup`."""
    return (d_model * warmup) ** -0.5


class Adam:
    """Adam (Kingma and Ba, 2015, algorithm 1) over one flat vector of parameters.

    Epsilon is added outside the bias-corrected root. `half`, if any, is a copy of the
    parameters in 16 bits, which is kept up to date.

    Shapes: parameters, half, mean, square [number of parameters]
    """

    def __init__(
        self,
        parameters: Array,
        beta1: float,
        beta2: float,
        epsilon: float,
        half: Array | None = None,
    ) -> None:
        xp = array_module(parameters)
        self.parameters, self.half = parameters, half
        self.beta1, self.beta2, self.epsilon = beta1, beta2, epsilon
        self.mean = xp.zeros_like(parameters)
        self.square = xp.zeros_like(parameters)
        self.steps = 0

    def resume(self, steps: int, mean: Array, square: Array) -> None:
        """Go on after `steps` updates that left these moments."""
        self.steps = steps
        self.mean[...] = array_module(self.mean).asarray(mean)
        self.square[...] = array_module(self.square).asarray(square)

    def step(
        self, gradient: Array, loss: Array, rate: float, clip_norm: float | None
    ) -> tuple[Array, Array]:
        """Update, with the gradient scaled down to `clip_norm` if it is longer.

        Nothing changes where the loss or the gradient is not finite.

        Returns: the norm of the gradient, and whether all was finite (scalars, of NumPy
        here; `cuda/training.py` has a version that leaves them on the GPU)
        """
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
        xp = array_module(gradient)
        mean, square = self.mean[block], self.square[block]
        g = gradient[block] * scale
        mean *= self.beta1
        mean += (1 - self.beta1) * g
        g *= g
        g *= 1 - self.beta2
        square *= self.beta2
        square += g
        root = xp.sqrt(square, out=g)
        root *= 1 / math.sqrt(1 - self.beta2**self.steps)
        root += self.epsilon
        change = xp.divide(mean, root, out=root)
        change *= rate / (1 - self.beta1**self.steps)
        self.parameters[block] -= change
        if self.half is not None:
            self.half[block] = self.parameters[block]


def gradient_norm(gradient: Array) -> float:
    """The Euclidean norm of the flat gradient."""
    return math.sqrt(float(gradient @ gradient))
