"""Kernels in the place of operations, for a while, and the types that they take."""

import contextlib

import numpy as np
import pytest

from minitransformer.backends.cuda.ops import BACKEND
from minitransformer.engine.backend import register_backend

ml_dtypes = pytest.importorskip("ml_dtypes", reason="no bfloat16 without ml_dtypes")

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


@contextlib.contextmanager
def backend_for(*array_types, backend=BACKEND):
    """Register a backend for arrays of some types, by default that of GPUs."""
    try:
        for array_type in array_types:
            register_backend(array_type, backend)
        yield
    finally:
        for array_type in array_types:
            register_backend(array_type, None)
