"""The schedule against equation 3, and the limits of Adam's numbers."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minitransformer.training.optimizer import (
    Adam,
    learning_rate,
    peak_learning_rate,
)


@given(st.integers(1, 10**6), st.integers(1, 10**5), st.integers(1, 4096))
def test_the_schedule_is_equation_3(step, warmup, d_model):
    expected = d_model**-0.5 * min(step**-0.5, step * warmup**-1.5)
    rate = learning_rate(step, peak_learning_rate(d_model, warmup), warmup)
    assert rate == pytest.approx(expected, rel=1e-12)


def test_a_gradient_too_large_for_the_second_moment_changes_nothing():
    """Its square would leave a moment that is infinite for ever."""
    parameters = np.ones(2, np.float32)
    adam = Adam(parameters, 0.9, 0.98, 1e-9)
    for size, finite in ((1.2e19, True), (1.4e19, False)):
        before = parameters.copy(), adam.second_moment.copy()
        assert adam.step(np.full(2, size, np.float32), 1.0, 0.1)[1] == finite
        assert np.array_equal(parameters, before[0]) == (not finite)
        assert np.array_equal(adam.second_moment, before[1]) == (not finite)
        assert np.isfinite(adam.second_moment).all()
