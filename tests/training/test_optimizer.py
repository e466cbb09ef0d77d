"""Adam against its algorithm, the schedule against equation 3."""

import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minitransformer.engine.backend import Backend
from minitransformer.training import optimizer
from minitransformer.training.optimizer import (
    Adam,
    gradient_norm,
    learning_rate,
    peak_learning_rate,
)
from support.closeness import assert_close
from support.cuda import backend_for


def algorithm_1(theta, gradients, rate):
    """Adam's parameters after updates by some gradients, one by one."""
    theta, m, v = list(theta), [0.0] * len(theta), [0.0] * len(theta)
    for t, gradient in enumerate(gradients, start=1):
        for i, g in enumerate(gradient):
            m[i] = 0.9 * m[i] + 0.1 * g
            v[i] = 0.98 * v[i] + 0.02 * g * g
            m_hat, v_hat = m[i] / (1 - 0.9**t), v[i] / (1 - 0.98**t)
            theta[i] -= rate * m_hat / (math.sqrt(v_hat) + 1e-9)
    return theta


@pytest.mark.parametrize("threads", [1, 2, 9])
@pytest.mark.parametrize("block", [1, 3, 100])
def test_adam_is_algorithm_1(block, threads, monkeypatch):
    monkeypatch.setattr(optimizer, "BLOCK", block)
    rng = np.random.default_rng(0)
    values, gradients = rng.standard_normal(7), rng.standard_normal((5, 7))
    expected, told = algorithm_1(values, gradients * 0.5, 0.1), []
    listening = Backend(parameters_changed=told.append)
    with (
        ThreadPoolExecutor(threads) as pool,
        backend_for(np.ndarray, backend=listening),
    ):
        adam = Adam(values, 0.9, 0.98, 1e-9, num_threads=threads, map=pool.map)
        for gradient in gradients[:-1]:
            before = gradient.copy()
            adam.update(gradient, 0.1, scale=0.5)
            np.testing.assert_array_equal(gradient, before)
        adam.update(gradients[-1] * 0.5, 0.1)
    assert_close(values, expected)
    assert [x is values for x in told] == [True] * 5


@given(st.integers(1, 10**6), st.integers(1, 10**5), st.integers(1, 4096))
def test_the_schedule_is_equation_3(step, warmup, d_model):
    expected = d_model**-0.5 * min(step**-0.5, step * warmup**-1.5)
    rate = learning_rate(step, peak_learning_rate(d_model, warmup), warmup)
    assert rate == pytest.approx(expected, rel=1e-12)


def test_base_peaks_at_7e_4():
    rates = [
        learning_rate(s, peak_learning_rate(512, 4000), 4000)
        for s in (3999, 4000, 4001)
    ]
    assert max(rates) == rates[1] == pytest.approx(6.9877e-4, rel=1e-4)


def test_the_gradient_norm_is_euclidean():
    assert gradient_norm(np.array([3.0, 4.0])) == 5
    assert gradient_norm(np.full(2, 1e30, np.float32)) == math.inf  # without a warning


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
