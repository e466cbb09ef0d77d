"""Dynamic loss scaling, which keeps small gradients of fp16 from becoming zero."""

from __future__ import annotations

from types import ModuleType

import numpy as np

from minitransformer.engine.backend import Array

# fp16's first loss scale, and after how many finite steps a larger one is tried.
FIRST_SCALE = 65_536.0
GROWTH_STEPS = 2000


class LossScale:
    """The factor by which the loss is multiplied before the backward pass.

    For fp16 the scale is dynamic: the factor is halved when a gradient is not finite,
    and doubled after `GROWTH_STEPS` steps with finite gradients. For other precisions
    it stays 1. `factor` and `finite_steps`, the number of finite steps since the factor
    changed, are scalars on the device of the gradient: nothing waits for a GPU.
    `restored` gives their values where a run is resumed.
    """

    def __init__(
        self, xp: ModuleType, precision: str, restored: tuple[float, int] | None = None
    ) -> None:
        self._xp = xp
        self.dynamic = precision == "fp16"
        factor, finite_steps = restored or (FIRST_SCALE, 0)
        self.factor = xp.asarray(factor if self.dynamic else 1.0, dtype=np.float32)
        self.finite_steps = xp.asarray(finite_steps, dtype=np.int64)

    def update(self, finite: Array) -> None:
        """Adapt to whether the last gradient was finite. Shapes: finite scalar"""
        if not self.dynamic:
            return
        xp = self._xp
        finite_steps = self.finite_steps + 1
        grows = finite_steps == GROWTH_STEPS
        change = xp.where(finite, xp.where(grows, 2.0, 1.0), 0.5)
        self.factor = self.factor * change.astype(np.float32)
        self.finite_steps = xp.where(finite & ~grows, finite_steps, 0)
