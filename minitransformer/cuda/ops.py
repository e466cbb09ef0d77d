"""Operations of the same name and signature as in `ops.py`, by kernels and cuBLAS.

Activations and matrices are of one type: float32, float16 or bfloat16. Vectors
(biases, gains) are float32, and so are statistics, losses and all gradients of
parameters. What these bodies refuse (`find`), the reference computes. None waits for
the GPU, so that a CUDA graph can hold them; every sum is taken in a fixed order, so
that equal inputs give equal bits. The first comment of each kernel in `kernels.cu` has
its formula. Shapes: as in `ops.py`, N rows (tokens of all sentences together).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from minitransformer.autograd import Vjp
from minitransformer.backend import (
    Array,
    RandomStream,
    array_module,
    counters_per_row,
    dropout_threshold,
)
from minitransformer.cuda import device
from minitransformer.ops import LAYER_NORM_EPSILON, MASKED_SCORE

# The widest row that the LayerNorm kernels hold in registers: MAX_WIDTH in kernels.cu.
MAX_WIDTH = 2048

# Logits computed at a time in the loss: large products, little memory.
LOGITS_PER_CHUNK = 1 << 27

# Blocks that each sum a share of the rows of a matrix, or of a flat vector.
NUM_SHARES = 128
THREADS = 256


def find(name: str, arrays: tuple[Array, ...]) -> Callable[..., Any] | None:
    """Return the body of operation `name`, or None where it does not take `arrays`.

    Refused are activations of another type than float32, float16 and bfloat16 (float64:
    no kernel has doubles), matrices of another type than theirs, vectors that are not
    float32, and LayerNorm of rows wider than MAX_WIDTH.
    """
    body = OVERRIDES.get(name)
    if body is None:
        return None
    floats = [a for a in arrays if a is not None and a.dtype.kind not in "biu"]
    if name in UPDATES:
        return body
    kind = floats[0].dtype
    if kind.name not in device.REALS:
        return None
    for array in floats[1:]:
        plain = array.dtype == np.float32
        if not (plain if array.ndim == 1 else array.dtype == kind):
            # Sinusoids are a float32 matrix: a table, not a parameter.
            if name != "embedding" or not plain:
                return None
    if name == "add_layer_norm" and arrays[0].shape[-1] > MAX_WIDTH:
        return None
    return body


def gradient_norm(gradient: Array) -> Array:
    """The Euclidean norm of the flat gradient, left on the device.

    Shapes: gradient [number of parameters] float32 -> [2] float32: the norm, and 1.0 if
    it is finite, 0.0 if an element is not (or the sum of squares overflows)
    """
    raise NotImplementedError


def adam_update(
    parameters: Array,
    gradient: Array,
    mean: Array,
    square: Array,
    half: Array | None,
    scalars: Array,
    norm: Array,
) -> None:
    """One step of Adam in place, and the half-precision copy, in one pass (5.3).

    `scalars` is a float32 array on the device: learning rate, beta1, beta2, epsilon,
    1 - beta1^t, 1 - beta2^t, scale, clip. The gradient is multiplied by `scale` (the
    inverse of the loss scale) and, where clip > 0 and the norm of what results exceeds
    it, by clip / norm. `norm` is what `gradient_norm(gradient)` returned; where it says
    that the gradient is not finite, nothing changes.

    Shapes: parameters, gradient, mean, square [P] float32, half [P] float16 or
    bfloat16, scalars [8], norm [2]
    """
    raise NotImplementedError


def accumulate(total: Array, share: Array) -> None:
    """total += share: CuPy has no sums of bfloat16. Shapes: any, equal."""
    raise NotImplementedError


OVERRIDES: dict[str, Callable[..., Any]] = {}
UPDATES: dict[str, Callable[..., Any]] = {}
