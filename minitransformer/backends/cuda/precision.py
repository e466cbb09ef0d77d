"""The number formats of a GPU: what `--precision` names there.

fp32 is float32 throughout. tf32 is float32, too, but matrix products round their
inputs to 10 bits of mantissa. bf16 and fp16 are mixed precision: layers read a 16-bit
copy of the weight matrices and compute 16-bit activations. The master parameters, their
gradients and Adam's moments are float32, and softmax, statistics and loss are computed
in float32. A run's checkpoints hold float32 parameters in every case. On a processor
activations stay float32, and products in other formats are oneDNN's (`onednn/`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from minitransformer.engine.autograd import Vjp
from minitransformer.engine.backend import Array, as_float32
from minitransformer.settings.extras import import_extra


def low_precision_type(precision: str) -> np.dtype[Any] | None:
    """Return the 16-bit type of `precision`, or None if it has none.

    Raises: RuntimeError if bf16 is asked for and ml_dtypes is not installed.
    """
    if precision == "fp16":
        return np.dtype(np.float16)
    if precision != "bf16":
        return None
    need = "--precision bf16 needs ml_dtypes"
    return np.dtype(import_extra("ml_dtypes", "cuda13", need).bfloat16)


def in_float32(
    body: Callable[..., tuple[Array, Vjp]], *arrays: Array, **options: Any
) -> tuple[Array, Vjp]:
    """Compute an operation on float32 copies, and round what it returns."""
    out, vjp = body(*(x if x is None else as_float32(x) for x in arrays), **options)

    def rounded_vjp(g: Array) -> tuple[Array | None, ...]:
        gradients: tuple[Array | None, ...] = vjp(as_float32(g))
        return tuple(
            None if gradient is None else gradient.astype(x.dtype)
            for gradient, x in zip(gradients, arrays, strict=True)
        )

    return out.astype(arrays[0].dtype), rounded_vjp
