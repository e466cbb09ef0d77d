"""The number formats that `--precision` names."""

import sys

import numpy as np
import pytest

from minitransformer.backends.cuda.precision import low_precision_type


def test_only_mixed_precision_has_a_type_of_16_bits():
    assert low_precision_type("fp32") is None
    assert low_precision_type("tf32") is None
    assert low_precision_type("fp16") == np.float16


def test_bf16_has_8_bits_of_precision_and_the_range_of_float32():
    pytest.importorskip("ml_dtypes")
    dtype = low_precision_type("bf16")
    assert dtype.itemsize == 2
    numbers = np.array([1 + 2**-7, 1 + 2**-9, 2.0**127], np.float32).astype(dtype)
    assert numbers.astype(np.float32).tolist() == [1 + 2**-7, 1, 2.0**127]


def test_bf16_without_ml_dtypes_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(RuntimeError, match="bf16 needs ml_dtypes: pip install"):
        low_precision_type("bf16")
