"""Products of few rows by NumKong against those of many rows by oneDNN."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from minitransformer.backends.onednn import few_rows, int8
from minitransformer.backends.onednn.library import OneDnn

NUMBERS = st.one_of(
    st.sampled_from([0.0, 0.5, -0.5, 1.0, -1.0, 3.0, 63.5, 127.0]),
    st.floats(-1e3, 1e3, width=32),
)


@pytest.fixture(scope="module")
def kernels():
    pytest.importorskip("numkong", reason="no NumKong")
    try:
        return int8.Int8Kernels(OneDnn("int8"))
    except RuntimeError as error:
        pytest.skip(str(error))


@st.composite
def products(draw):
    """Rows, parameters and a bias, with ties and zeros."""
    count, inputs = draw(st.integers(1, few_rows.MAX_FEW)), draw(st.integers(1, 70))
    outputs = draw(st.integers(1, 40))
    rows = draw(arrays(np.float32, (count, inputs), elements=NUMBERS))
    weight = draw(arrays(np.float32, (inputs, outputs), elements=NUMBERS))
    bias = draw(st.none() | arrays(np.float32, outputs, elements=NUMBERS))
    return rows, weight, bias, draw(st.booleans())


@given(products())
def test_few_rows_have_the_bits_of_many(kernels, drawn):
    """A translation does not depend on how many others it is computed with."""
    rows, weight, bias, relu = drawn
    matrix = int8.scaled_matrix(weight)
    few = kernels.few.multiply(few_rows.few_rows(rows), matrix, bias, relu)
    many = kernels._many_rows(rows)
    function = int8.RELU if relu else None
    expected = kernels.multiply(
        many.integers, many.scales, matrix, bias=bias, function=function
    )
    np.testing.assert_array_equal(few, expected[: len(rows)])


def test_what_is_not_a_number_is_seen(kernels):
    rows = np.ones((2, 8), np.float32)
    rows[1, 3] = np.nan
    matrix = int8.scaled_matrix(np.ones((8, 4), np.float32))
    with np.errstate(invalid="ignore"):
        out = kernels.few.multiply(few_rows.few_rows(rows), matrix)
    assert np.isfinite(out[0]).all()
    assert np.isnan(out[1]).all()


def test_without_numkong_onednn_multiplies_few_rows(monkeypatch, kernels):
    monkeypatch.setattr(int8, "find_numkong", lambda: None)
    plain = int8.Int8Kernels(OneDnn("int8"))
    assert plain.few is None
    weight = np.ones(12, np.float32).reshape(3, 4)
    rows = plain.round_for(np.ones((2, 3), np.float32), weight)
    assert plain.matmul(rows, weight).shape == (2, 4)
