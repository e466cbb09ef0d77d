"""The number formats that `--precision` names."""

import sys

import numpy as np
import pytest

from minitransformer.backends.cuda.precision import low_precision_type


def test_only_mixed_precision_has_a_type_of_16_bits():
    assert low_precision_type("fp32") is None
    assert low_precision_type("tf32") is None
    assert low_precision_type("fp16") == np.float16


def test_bf16_without_ml_dtypes_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(RuntimeError, match="bf16 needs ml_dtypes: pip install"):
        low_precision_type("bf16")
