"""Dropout's random numbers on a processor."""

import numpy as np
import pytest

from minitransformer.engine.ops import HostStream
from support.dropout import SHARES, assert_share


@pytest.mark.parametrize("size", [1, 7, 8, 9, 63])
def test_one_byte_decides_each_element(size):
    """A rate of 77/256 leaves nothing for the Poisson process to drop."""
    generator = np.random.Generator(np.random.SFC64(np.random.SeedSequence((5, 6))))
    words = [int(x) for x in generator.integers(0, 2**64, -(-size // 8), np.uint64)]
    drawn = [word >> 8 * i & 255 for word in words for i in range(8)]
    keep, factor = HostStream((5, 6)).keep_mask((size,), 77 / 256)
    assert keep.tolist() == [byte >= 77 for byte in drawn[:size]]
    assert factor == pytest.approx(256 / 179, rel=1e-15)


@pytest.mark.parametrize("rate", SHARES)
def test_dropout_keeps_the_share_and_the_mean_that_it_says(rate):
    assert_share(HostStream((1, 2, 3)), rate)


@pytest.mark.parametrize("rate", [0.1, 0.3, 0.5])
def test_dropout_depends_on_the_key(rate):
    keep, _ = HostStream((1, 2, 3)).keep_mask((1000, 1001), rate)
    again, _ = HostStream((1, 2, 3)).keep_mask((1000, 1001), rate)
    other, _ = HostStream((1, 2, 4)).keep_mask((1000, 1001), rate)
    assert (keep == again).all()
    assert 0.3 < (keep == other).mean() < 0.9
    empty, _ = HostStream((1, 2, 3)).keep_mask((0, 3), rate)
    assert empty.shape == (0, 3)
