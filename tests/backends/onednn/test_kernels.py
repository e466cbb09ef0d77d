"""What the kernels of all precisions share."""

import gc
import weakref

import numpy as np
import pytest

from minitransformer.backends import devices
from minitransformer.backends.devices import Device
from minitransformer.backends.onednn.kernels import CacheByOwner, with_more_rows

ROWS = 0, 1, 16, 17, 250, 256, 257, 500, 513, 5000
ROUNDED = 0, 16, 16, 32, 256, 256, 288, 512, 576, 5056


@pytest.mark.parametrize(("rows", "expected"), [*zip(ROWS, ROUNDED, strict=True)])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_there_are_few_numbers_of_rows(rows, expected, dtype):
    """Multiples of 16, of 32 from 256 on, and of 64 from 512 on."""
    out = with_more_rows(np.ones((rows, 3), np.float32), dtype)
    assert out.shape == (expected, 3)
    assert out.dtype == dtype
    assert (out[rows:] == 0).all()


def test_values_are_computed_once_and_go_with_their_owner():
    cache, computed = CacheByOwner(), []

    def negative(view):
        computed.append(weakref.ref(value := -view))
        return value

    def values(owner):
        views = owner.reshape(3, 4), owner.reshape(3, 4).T, owner[1:]
        return [cache.get(owner, negative, view) for view in views]

    owner = np.arange(12.0)
    first, second = values(owner), values(owner)
    assert all(a is b for a, b in zip(first, second, strict=True))
    assert (first[1] == -owner.reshape(3, 4).T).all()
    cache.forget(owner)
    assert (values(owner)[2] == first[2]).all()
    assert len(computed) == 6
    del owner, first, second
    gc.collect()
    assert not any(value() is not None for value in computed)


@pytest.mark.parametrize("fast", [True, False])
def test_a_processor_on_which_bf16_is_slower_is_told(fast, monkeypatch):
    monkeypatch.setattr(devices, "multiplies_bf16_fast", lambda: fast)
    expected = "cpu, 2 workers, products in bf16"
    expected += "" if fast else " (slower than fp32 on this processor)"
    assert Device("cpu", np, "bf16", None, 2).description == expected
