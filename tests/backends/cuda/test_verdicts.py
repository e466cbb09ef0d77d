"""Verdicts on faster paths, found out once."""

import warnings

import numpy as np
import pytest

from minitransformer.backends.cuda import verdicts

HALF = np.dtype(np.float16)


def ask(gpu, difference=0.0, error=None, dtype=HALF):
    """Return the verdict, and what was warned of; a second question asks nothing."""
    compared = []

    def results():
        compared.append(True)
        if error:
            raise error
        plain = gpu.xp.asarray(np.full(3, 10, dtype))
        yield plain, plain + dtype.type(difference)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        agree = verdicts.matches_reference(gpu, "a path", dtype, results, "without it")
        assert (
            verdicts.matches_reference(gpu, "a path", dtype, results, "without it")
            == agree
        )
    assert len(compared) == 1
    return agree, [str(warning.message) for warning in caught]


@pytest.mark.parametrize(
    ("dtype", "difference", "agree"),
    [
        (HALF, 10 * 6 * 2**-10, True),
        (HALF, 10 * 10 * 2**-10, False),
        (HALF, np.nan, False),
        (np.dtype(np.float32), 10 * 14 * 2**-23, True),
        (np.dtype(np.float32), 10 * 18 * 2**-23, False),
    ],
)
def test_results_may_differ_in_the_last_places(host_gpu, dtype, difference, agree):
    """By 8 units, in float32 by 16, relative to the largest number, which is 10."""
    problem = f"without it in {dtype.name}: it gives other results"
    expected = agree, [] if agree else [problem]
    assert ask(host_gpu, difference, dtype=dtype) == expected


def test_an_error_leaves_the_plain_path(host_gpu):
    error = MemoryError("out of memory\nat 5")
    told = "without it in float16: out of memory"
    assert ask(host_gpu, error=error) == (False, [told])
