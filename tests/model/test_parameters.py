"""Parameters: their names, their initial values, and the flat buffers."""

import numpy as np
import pytest

from minitransformer.engine.autograd import Tensor
from minitransformer.engine.backend import Backend
from minitransformer.model.parameters import Initializer, Module, ParameterBuffer
from support import elementary
from support.closeness import assert_close
from support.cuda import backend_for


class Tied(Module):
    def __init__(self):
        self.first = Tensor(np.arange(3.0), requires_grad=True)
        self.again = self.first
        self.constant = Tensor(np.ones(2))
        self.inner = [Inner(), Inner()]


class Inner(Module):
    def __init__(self):
        self.weight = Tensor(np.full((2, 2), 5.0), requires_grad=True)


def test_the_buffer_holds_each_parameter_once():
    module = Tied()
    buffer = ParameterBuffer(module)
    assert list(buffer.parameters) == ["first", "inner.0.weight", "inner.1.weight"]
    assert buffer.data.size == 11
    buffer.data[:] = np.arange(11)
    assert_close(module.again.data, [0, 1, 2])
    assert_close(module.inner[1].weight.data, [[7, 8], [9, 10]])
    elementary.sum_all(module.inner[0].weight).backward()
    assert_close(buffer.grad, [0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0])


def test_parameters_move_into_vectors_that_are_given():
    """Kernels that prepare parameters learn of the new vector."""
    module, changed = Tied(), []
    buffer = ParameterBuffer(module)
    old = buffer.data
    data, grad = np.zeros(11), np.full(11, 2.0)

    with backend_for(np.ndarray, backend=Backend(parameters_changed=changed.append)):
        buffer.move_into(data, grad)
    assert [vector is data for vector in changed] == [True]
    assert buffer.data is data
    assert buffer.grad is grad
    assert_close(data, old)
    data += 1
    assert_close(module.first.data, [1, 2, 3])
    elementary.sum_all(module.inner[0].weight).backward()
    assert_close(grad, [2, 2, 2, 3, 3, 3, 3, 2, 2, 2, 2])


def test_gradients_are_collected_in_a_vector_from_zero():
    module = Tied()
    buffer, vector = ParameterBuffer(module), np.full(11, np.nan)
    old = buffer.grad
    buffer.collect_gradients(vector)
    assert buffer.grad is vector
    for _ in range(2):
        elementary.sum_all(module.first).backward()
    np.testing.assert_array_equal(vector, [2] * 3 + [0] * 8)
    assert not old.any()


def test_low_precision_copies_the_matrices_alone():
    module = Tied()
    buffer = ParameterBuffer(module)
    assert buffer.low_precision is None
    buffer.data_changed()
    buffer.grad[:] = 1
    buffer.move_to(np, np.dtype(np.float16))
    assert buffer.low_precision.dtype == np.float16
    assert not buffer.grad.any()
    weight = module.inner[1].weight
    assert (module.first.data.dtype, weight.data.dtype) == (np.float64, np.float16)
    buffer.data[:] = np.arange(11) + 1e-9
    assert_close(module.first.data, [1e-9, 1 + 1e-9, 2 + 1e-9])
    assert (weight.data == 5).all()
    buffer.data_changed()
    np.testing.assert_array_equal(weight.data, [[7, 8], [9, 10]])
    weight.grad += 3
    np.testing.assert_array_equal(buffer.grad, [0] * 7 + [3] * 4)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_the_first_parameter_whose_gradient_is_not_finite_is_named(value):
    buffer = ParameterBuffer(Tied())
    buffer.grad[:] = 1e300
    assert buffer.first_nonfinite_gradient() is None
    buffer.grad[10] = value
    assert buffer.first_nonfinite_gradient() == "inner.1.weight"
    buffer.grad[4] = value
    assert buffer.first_nonfinite_gradient() == "inner.0.weight"


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("seed", [None, 7])
def test_a_seed_draws_and_none_leaves_zeros(dtype, seed):
    init, again = Initializer(seed, dtype), Initializer(seed, dtype)
    for draw in (
        lambda init: init.normal(0.5, 40, 60),
        lambda init: init.glorot_uniform(40, 60),
        lambda init: init.glorot_uniform(40, 60, fan_out=200),
    ):
        values = draw(init).data
        assert (values.shape, values.dtype) == ((40, 60), dtype)
        np.testing.assert_array_equal(values, draw(again).data)
        assert values.any() == (seed is not None)
        assert abs(values.mean()) < 0.05
    for value in (0, 1, 2.5):
        constant = init.constant(value, 3, 4)
        assert (constant.data == np.full((3, 4), value, dtype)).all()
        assert (constant.data.dtype, constant.requires_grad) == (dtype, True)
    assert all(draw.requires_grad for draw in (init.normal(1, 2), again.normal(1, 2)))
