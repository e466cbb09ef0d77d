"""Adam and the learning rate (section 5.3)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass
from typing import Protocol, TypeAlias

import numpy as np

from minitransformer.engine.backend import Array, parameters_changed
from minitransformer.training.loss_scale import LossScale

Map: TypeAlias = Callable[[Callable[[int], None], Iterable[int]], Iterable[None]]

# Elements updated at a time: they fit in the cache, and threads seldom wait.
BLOCK = 1 << 17


def learning_rate(
    step: int, peak: float, warmup: int, steps: int = 0, decay: int = 0
) -> float:
    """Return equation 3: linear growth for `warmup` steps, then decay as step^-0.5.

    `step` counts updates from 1. With peak = (d_model * warmup)^-0.5 this is
    d_model^-0.5 * min(step^-0.5, step * warmup^-1.5).

    Differs: with `decay`, it also falls linearly to zero in the last `decay` of `steps`
    updates. The paper has no such decay.
    """
    rate = peak * min(step / warmup, math.sqrt(warmup / step))
    return rate * min(1, (steps + 1 - step) / (decay + 1)) if decay else rate


def peak_learning_rate(d_model: int, warmup: int) -> float:
    """Return the highest learning rate of equation 3, reached at step `warmup`."""
    return (d_model * warmup) ** -0.5


class Optimizer(Protocol):
    """The interface of Adam: `Adam` here, and `GpuAdam` in `cuda/optimizer.py`.

    `steps` counts the updates, each as soon as it begins.

    Shapes: first_moment, second_moment [number of parameters]
    """

    steps: Array
    first_moment: Array
    second_moment: Array

    @property
    def scale(self) -> LossScale | None:
        """The loss scale of a GPU."""
        ...

    def restore(self, steps: int, first_moment: Array, second_moment: Array) -> None:
        """Continue after `steps` updates that left these moments."""
        ...

    def step(self, gradient: Array, loss: Array, rate: float) -> tuple[Array, Array]:
        """Update the parameters with learning rate `rate`, clipping the gradient.

        If the gradient is not finite, no parameter changes. `Adam` requires a finite
        loss, too.

        Returns: the norm of the gradient before clipping, and whether the update was
        made: scalars that a GPU may still be computing
        """
        ...


@dataclass(eq=False)
class Adam:
    """Adam (Kingma and Ba, 2015, algorithm 1) over one flat vector of parameters.

    A gradient whose norm is larger than `clip_norm` is scaled down to this norm. `map`
    may use `num_threads` threads, each of which updates its share of the parameters.

    Memory traffic: an update reads gradient, parameter and both moments, and writes all
    but the gradient: 16 + 12 = 28 bytes a parameter in float32. The norm reads the
    gradient once more: 4 bytes.

    Shapes: parameters, first_moment, second_moment [P]

    Elsewhere: Chainer adds epsilon before the bias correction, not after it as in
    algorithm 1.
    """

    parameters: Array
    beta1: float
    beta2: float
    epsilon: float
    _: KW_ONLY
    clip_norm: float | None = None
    num_threads: int = 1
    map: Map = map

    scale = None

    def __post_init__(self) -> None:
        self.steps = 0
        self.first_moment = np.zeros_like(self.parameters)
        self.second_moment = np.zeros_like(self.parameters)
        # Two vectors a thread, taken here: memory cannot run out during an update.
        size = min(BLOCK, len(self.parameters))
        self._scratch = np.empty((self.num_threads, 2, size), self.parameters.dtype)

    def restore(self, steps: int, first_moment: Array, second_moment: Array) -> None:
        self.steps = steps
        self.first_moment[...] = first_moment
        self.second_moment[...] = second_moment

    def step(self, gradient: Array, loss: Array, rate: float) -> tuple[Array, Array]:
        norm = gradient_norm(gradient)
        finite = np.isfinite(loss + norm)
        if finite:
            scale = min(1.0, (self.clip_norm or math.inf) / max(norm, 1e-12))
            self.update(gradient, rate, scale)
        return norm, finite

    def update(self, gradient: Array, rate: float, scale: float = 1.0) -> None:
        """Update the parameters with learning rate `rate` for `scale * gradient`."""
        self.steps += 1
        starts = range(0, len(gradient), BLOCK)

        def update_share(thread: int) -> None:
            """Update every block whose turn is this thread's, in place."""
            for start in starts[thread :: self.num_threads]:
                block = slice(start, start + BLOCK)
                m = self.first_moment[block]
                v = self.second_moment[block]
                g, change = self._scratch[thread, :, : len(m)]
                np.multiply(gradient[block], scale, out=g)

                # m = beta1 m + (1 - beta1) g
                m *= self.beta1
                m += np.multiply(g, 1 - self.beta1, out=change)

                # v = beta2 v + (1 - beta2) g^2
                g *= g
                g *= 1 - self.beta2
                v *= self.beta2
                v += g

                # The root of the bias-corrected v, plus epsilon
                root = np.sqrt(v, out=g)
                root *= 1 / math.sqrt(1 - self.beta2**self.steps)
                root += self.epsilon

                # The step along the bias-corrected m
                np.divide(m, root, out=change)
                change *= rate / (1 - self.beta1**self.steps)
                self.parameters[block] -= change

        list(self.map(update_share, range(self.num_threads)))
        parameters_changed(self.parameters)


def gradient_norm(gradient: Array) -> float:
    """Return the Euclidean norm of the flat gradient.

    In float32 it overflows above 1.8e19, as the squares in Adam's second moment might:
    a norm that is not finite skips the update.
    """
    with np.errstate(over="ignore"):
        return math.sqrt(float(gradient @ gradient))
