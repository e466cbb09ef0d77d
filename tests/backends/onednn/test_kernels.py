"""What the kernels of all precisions share."""

import time

import numpy as np
import pytest

from minitransformer.backends.devices import Device
from minitransformer.backends.onednn import bfloat16
from minitransformer.backends.onednn.kernels import Kernels, with_more_rows


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (0, 0),
        (1, 16),
        (16, 16),
        (17, 32),
        (250, 256),
        (256, 256),
        (257, 288),
        (500, 512),
        (513, 576),
        (5000, 5056),
    ],
)
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_there_are_few_numbers_of_rows(rows, expected, dtype):
    """Multiples of 16, of 32 from 256 on, and of 64 from 512 on."""
    out = with_more_rows(np.ones((rows, 3), np.float32), dtype)
    assert out.shape == (expected, 3)
    assert out.dtype == dtype
    assert (out[rows:] == 0).all()


@pytest.mark.parametrize("seconds", [0, 0.1])
def test_kernels_that_are_slower_than_float32_say_so(seconds, monkeypatch):
    class Slow(Kernels):
        def factor(self, x, weight):
            assert x.dtype == weight.dtype == weight.base.dtype == np.float32
            return x

        def product(self, a, b):
            time.sleep(seconds)

    kernels = Slow()
    assert kernels.are_slow() == (seconds > 0)
    monkeypatch.setattr(bfloat16, "open_kernels", lambda: kernels)
    description = Device("cpu", np, "bf16", None, 2).description
    expected = "cpu, 2 workers, products in bf16"
    if seconds:
        expected += " (slower than fp32 on this processor)"
    assert description == expected
