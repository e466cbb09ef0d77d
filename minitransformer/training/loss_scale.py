"""Dynamic loss scaling, which keeps the gradients of fp16 from vanishing."""

from __future__ import annotations

from types import ModuleType

import numpy as np

from minitransformer.engine.backend import Array

# The scale of fp16's loss: the first one, and the number of finite steps after which
# a larger one is tried.
FIRST_SCALE = 65_536.0
GROWTH_STEPS = 2000


class LossScale:
    """The factor by which the loss is multiplied before the backward pass.

    The factor is halved when a gradient is not finite and doubled after 2,000 that
    were; for other precisions than fp16 it stays 1. `factor` and `good`, the number of
    finite steps since the factor changed, are arrays where the gradient is, so that
    nothing waits for a GPU.
    """

    def __init__(
        self, xp: ModuleType, precision: str, kept: tuple[float, int] | None = None
    ) -> None:
        self._xp, self.adapts = xp, precision == "fp16"
        factor, good = kept or (FIRST_SCALE, 0)
        self.factor = xp.asarray(factor if self.adapts else 1.0, dtype=np.float32)
        self.good = xp.asarray(good, dtype=np.int64)

    def update(self, finite: Array) -> None:
        """Learn whether the last scaled gradient was finite. Shapes: finite scalar"""
        if not self.adapts:
            return
        xp, good = self._xp, self.good + 1
        grows = good == GROWTH_STEPS
        change = xp.where(finite, xp.where(grows, 2.0, 1.0), 0.5)
        self.factor = self.factor * change.astype(np.float32)
        self.good = xp.where(finite & ~grows, good, 0)
