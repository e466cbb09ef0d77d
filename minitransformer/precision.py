"""The numbers that a GPU computes with: `--precision`.

fp32 is float32 throughout. tf32 is too, but products round what they multiply to 10
bits of mantissa. bf16 and fp16 keep a 16-bit copy of the parameters, which the layers
read, and 16-bit activations; the parameters themselves, their gradients, Adam's
moments, statistics, softmax and loss stay float32. So checkpoints are the same in all.
"""

from __future__ import annotations

import importlib
import os
from types import ModuleType
from typing import Any

import numpy as np

from minitransformer.backend import Array
from minitransformer.options import UsageError

# What precisions take, as compute capability times ten; NVIDIA's Ampere has 80.
LEAST_CAPABILITY = {"fp32": 0, "fp16": 53, "tf32": 80, "bf16": 80}

# The scale of fp16's loss: the first, and good steps until a larger one is tried.
FIRST_SCALE = 65_536.0
GROWTH_STEPS = 2000


def choose_precision(asked: str | None, xp: ModuleType) -> str:
    """What was asked for, or else bf16 on GPUs that have it and fp32 elsewhere.

    GPUs without bf16 have fp16, but it is left to be asked for: it can overflow.

    Raises: UsageError if the device has not what was asked for.
    """
    if xp is np:
        if asked in (None, "fp32"):
            return "fp32"
        raise UsageError(f"--precision: expected fp32 with --device cpu, got {asked}")
    capability = int(xp.cuda.Device().compute_capability)
    if asked is None:
        return "bf16" if capability >= LEAST_CAPABILITY["bf16"] else "fp32"
    if capability < LEAST_CAPABILITY[asked]:
        possible = [p for p, least in LEAST_CAPABILITY.items() if capability >= least]
        raise UsageError(
            f"--precision: expected {' or '.join(possible)} on this GPU (compute "
            f"capability {capability / 10}), got {asked}"
        )
    return asked


def use_precision(precision: str, xp: ModuleType) -> np.dtype[Any] | None:
    """Set how products of float32 are computed; return the 16-bit type, if it is one.

    Raises: RuntimeError if a library that it takes is not installed.
    """
    if xp is not np:
        os.environ["CUPY_TF32"] = str(int(precision == "tf32"))
        try:
            gpu = importlib.import_module("minitransformer.cuda.device").current()
        except ImportError as error:
            reason = str(error).partition("\n")[0]
            raise RuntimeError(
                "device cuda needs the libraries of CUDA: pip install "
                f"'cupy-cuda13x[ctk]' (or 12x), or CUDA's toolkit ({reason})"
            ) from error
        gpu.tf32 = precision == "tf32"
    if precision == "fp16":
        return np.dtype(np.float16)
    if precision != "bf16":
        return None
    try:
        return np.dtype(importlib.import_module("ml_dtypes").bfloat16)
    except ImportError as error:
        raise RuntimeError(
            "--precision bf16 needs ml_dtypes: pip install ml_dtypes"
        ) from error


class LossScale:
    """The factor by which the loss is multiplied, so that fp16 gradients do not vanish.

    It is halved when a gradient is not finite and doubled after 2,000 that were; 1 and
    constant where the precision is another. `factor` and `good`, the finite steps since
    it changed, are arrays where the gradient is, so that nothing waits for a GPU.
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
