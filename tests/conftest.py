"""Settings shared by all tests."""

import numpy as np
from hypothesis import settings

settings.register_profile(
    "repeatable", deadline=None, max_examples=25, derandomize=True
)
settings.load_profile("repeatable")

# One table of tolerances: |got - expected| <= absolute + relative * |expected|.
TOLERANCES = {
    "float64": (1e-10, 1e-9),
    "float32": (2e-5, 2e-4),
    "float16": (8e-3, 8e-3),
    "bfloat16": (5e-2, 5e-2),
}


def assert_close(got, expected, dtype="float64"):
    absolute, relative = TOLERANCES[dtype]
    np.testing.assert_allclose(got, expected, rtol=relative, atol=absolute)
