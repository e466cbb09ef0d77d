"""The number formats of a GPU: what `--precision` names there.

fp32 is float32 throughout. tf32 is float32, too, but matrix products round their
inputs to 10 bits of mantissa. bf16 and fp16 are mixed precision: layers read a 16-bit
copy of the weight matrices and compute 16-bit activations. The master parameters, their
gradients and Adam's moments are float32, and softmax, statistics and loss are computed
in float32. A run's checkpoints hold float32 parameters in every case. On a processor
activations stay float32, and products in other formats are oneDNN's (`onednn/`).
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np


def low_precision_type(precision: str) -> np.dtype[Any] | None:
    """Return the 16-bit type of `precision`, or None if it has none.

    Raises: RuntimeError if bf16 is asked for and ml_dtypes is not installed.
    """
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
