"""What a dropout mask of any generator has to be like."""

import math

import pytest

# Four standard deviations are less than 0.3 differs from a multiple of 1/256.
SHARES = [0.001, 0.1, 0.2, 0.3, 0.5, 0.999]


def assert_share(stream, rate):
    """Assert that a large mask drops the share `rate`, everywhere alike."""
    shape = 4000, 2003
    keep, factor = stream.keep_mask(shape, rate)
    deviation = math.sqrt(rate * (1 - rate) / math.prod(shape))
    assert abs(keep.mean() - (1 - rate)) < 4 * deviation
    assert factor == pytest.approx(1 / (1 - rate), rel=0.01 if rate == 0.999 else 1e-4)
    for axis in (0, 1):  # no row and no column is special
        counts, n = keep.sum(axis), shape[axis]
        assert counts.std() == pytest.approx(math.sqrt(n * rate * (1 - rate)), rel=0.1)
