"""One table of tolerances for all comparisons of floating-point numbers."""

import numpy as np

# |got - expected| <= absolute + relative * |expected|: (absolute, relative).
TOLERANCES = {
    "float64": (1e-10, 1e-9),
    "float32": (2e-5, 2e-4),
    "float16": (8e-3, 8e-3),
    "bfloat16": (5e-2, 5e-2),
}


def assert_close(got, expected, dtype="float64"):
    absolute, relative = TOLERANCES[dtype]
    np.testing.assert_allclose(got, expected, rtol=relative, atol=absolute)
