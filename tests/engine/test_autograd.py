"""The tape: order, accumulation, release and errors."""

import contextlib
import gc
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minitransformer.engine import autograd, ops
from minitransformer.engine.autograd import Tensor, no_grad, wrap_primitives
from minitransformer.engine.backend import Backend
from support import elementary
from support.cuda import backend_for


def leaf(*values):
    return Tensor(np.array(values, dtype=float), requires_grad=True)


def weighted_sum(a, b, c):
    """2 a + 2 b + 3 c; the gradients of a and b are one array, as LayerNorm's are."""

    def vjp(g):
        doubled = 2 * g
        return doubled, doubled[...], 3 * g

    return 2 * a + 2 * b + 3 * c, vjp


def unlisted(function):
    """Make an operation that is not listed beside those of `ops`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(autograd, "PRIMITIVES", {})
        operation = autograd.primitive(function)
        assert {function.__name__: function} == autograd.PRIMITIVES
    return operation


@pytest.fixture
def no_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_a_long_chain_goes_back_without_recursion():
    x = leaf(2.0)
    y = x
    for _ in range(10_000):
        y = elementary.add(y, x)
    y.backward(np.ones(1))
    assert x.grad == [10_001]


class Twice:
    """A gradient that is twice an array, which is computed when it is needed."""

    def __init__(self, array):
        self.array = array

    def dense(self):
        return 2 * self.array


@pytest.mark.parametrize("uses", [1, 2])
def test_a_lazy_gradient_becomes_an_array_where_one_is_needed(uses):
    """For a sum, for a leaf, and for a vjp."""

    def copied(x):
        return x.copy(), lambda g: (Twice(g),)

    copy, x = unlisted(copied), leaf(1.0, 5.0)
    middle = copy(x)
    out = copy(middle)
    for _ in range(1, uses):
        out = elementary.add(out, copy(middle))
    out.backward(np.ones(2))
    assert x.grad.tolist() == 2 * [4.0 * uses]


def test_a_long_chain_can_be_dropped():
    y = x = leaf(1.0)
    for _ in range(10_000):
        y = elementary.add(y, x)
    del y


@given(st.integers(0, 10_000))
def test_random_graphs_match_their_polynomial(seed):
    """Gradients of sums and products of shared nodes, against dual numbers.

    No two leaves share a gradient, nor is it the one that the last node was given.
    """
    rng, weighted = np.random.default_rng(seed), unlisted(weighted_sum)
    leaves = [leaf(*rng.uniform(0.5, 1.5, 2)) for _ in range(3)]
    # Each tensor with its value, and its derivatives by the leaves.
    nodes = [
        (x, x.data, slopes[:, None])
        for x, slopes in zip(leaves, np.eye(3), strict=True)
    ]
    for _ in range(8):
        chosen = (nodes[i] for i in rng.integers(0, len(nodes), 3))
        (a, av, ad), (b, bv, bd), (c, cv, cd) = chosen
        kind = rng.integers(3)
        if kind == 0:
            value, slopes = 2 * av + 2 * bv + 3 * cv, 2 * ad + 2 * bd + 3 * cd
            nodes.append((weighted(a, b, c), value, slopes))
        elif kind == 1:
            nodes.append((elementary.add(a, b), av + bv, ad + bd))
        else:
            nodes.append((elementary.multiply(a, b), av * bv, ad * bv + av * bd))
    tensor, value, slopes = nodes[-1]
    upstream = np.array([1.0, 10.0])
    tensor.backward(upstream)
    np.testing.assert_array_equal(upstream, [1.0, 10.0])
    np.testing.assert_allclose(tensor.data, value)
    known = [upstream]
    for x, slope in zip(leaves, slopes, strict=True):
        if x.grad is None:
            assert not slope.any()
            continue
        np.testing.assert_allclose(x.grad, slope * upstream)
        assert not any(np.shares_memory(x.grad, other) for other in known)
        known.append(x.grad)


def test_a_leaf_is_reported_once_when_its_gradient_is_complete():
    x, y, unused = leaf(2.0), leaf(3.0), leaf(4.0)
    reported = []

    def report(tensor):
        reported.append((tensor, tensor.grad.copy()))

    product = elementary.multiply(elementary.multiply(x, y), x)  # x^2 y
    elementary.add(product, y).backward(np.ones(1), report)
    assert len(reported) == 2
    assert dict(reported) == {x: [12.0], y: [5.0]}
    assert unused.grad is None


def test_an_input_without_a_gradient_gets_none():
    x, y, z = leaf(2.0), leaf(3.0), leaf(5.0)
    reported, names, weighted = [], [], unlisted(weighted_sum)

    def product(a, b, c):
        return a * c, lambda g: (g * c, None, g * a)

    def wrapper(name, body):
        names.append(name)
        return product if body is weighted_sum else body

    with wrap_primitives(wrapper):
        node, lost = elementary.multiply(z, z), elementary.multiply(y, y)
        out = elementary.add(weighted(x, lost, z), weighted(x, node, z))
    elementary.add(out, node).backward(np.ones(1), reported.append)
    assert (x.grad, y.grad, z.grad) == ([10.0], None, [2 * 2 + 2 * 5])
    assert sorted(map(id, reported)) == sorted(map(id, (x, y, z)))
    assert names == [*["multiply"] * 2, *["weighted_sum"] * 2, "add"]


def test_a_fused_kernel_replaces_the_operation_of_its_name():
    asked, weighted, numbers = [], unlisted(weighted_sum), np.arange(3.0)
    x = leaf(*numbers)

    def find(name, arrays):
        asked.append((name, *map(id, arrays)))
        return fused.get(name)

    def product(a, b, c, power=1):
        return (a * b * c) ** power, None

    with backend_for(np.ndarray, backend=Backend(find_kernel=find)):
        fused = {}
        found = weighted(x, numbers, Tensor(numbers))
        assert found.data.tolist() == [0.0, 7.0, 14.0]
        fused = {"weighted_sum": product}
        found = weighted(x, numbers, Tensor(numbers), power=2)
        assert found.data.tolist() == [0.0, 1.0, 64.0]
    assert asked == [("weighted_sum", id(x.data), id(numbers), id(numbers))] * 2
    assert found.requires_grad
    constant = weighted(numbers, numbers, numbers)
    assert constant.data.tolist() == [0.0, 7.0, 14.0]
    assert not constant.requires_grad
    with no_grad():
        assert weighted(x, x, x).data.tolist() == [0.0, 7.0, 14.0]
        assert not weighted(x, x, x).requires_grad


def test_a_fused_kernel_adds_gradients_up():
    """Those of a node: 3 x, whose x is a product."""

    def find(name, arrays):
        return lambda a, b: a + 10 * b if name == "add_arrays" else None

    x = leaf(1.0)
    node = elementary.multiply(x, x)
    out = elementary.add(node, node)
    with backend_for(np.ndarray, backend=Backend(find_kernel=find)):
        out.backward(np.ones(1))
    assert x.grad == [11 * 2.0]


def test_wrapped_primitives_run_in_this_thread_until_the_block_ends():
    names, x = [], leaf(1.0, 2.0)

    def wrapper(name, body):
        names.append(name)
        return lambda *arrays: body(*(10 * array for array in arrays))

    with (
        contextlib.suppress(KeyError),
        wrap_primitives(wrapper),
        ThreadPoolExecutor(1) as another,
    ):
        assert elementary.sum_all(x).data == 30.0
        found = another.submit(elementary.add, x, x).result()
        np.testing.assert_array_equal(found.data, [2.0, 4.0])
        raise KeyError
    assert elementary.sum_all(x).data == 3.0
    assert names == ["sum_all"]


def test_a_number_is_the_derivative_of_a_scalar():
    x, y = (Tensor(np.ones(n, np.float32), requires_grad=True) for n in ((), 3))
    elementary.add(x, elementary.sum_all(y)).backward(0.5)
    assert x.grad.dtype == y.grad.dtype == np.float32
    assert (x.grad.tolist(), y.grad.tolist()) == (0.5, [0.5, 0.5, 0.5])


def test_gradients_add_up_in_the_callers_array():
    x = leaf(1.0, 2.0)
    x.grad = mine = np.array([10.0, 20.0])
    for _ in range(2):
        elementary.sum_all(elementary.multiply(x, x)).backward()
    assert x.grad is mine
    np.testing.assert_array_equal(mine, [14.0, 28.0])


def test_nothing_is_recorded_without_a_leaf_or_in_no_grad_of_this_thread():
    def is_recorded():
        return elementary.add(leaf(1.0), leaf(2.0)).requires_grad

    assert elementary.add(Tensor(np.ones(1)), Tensor(np.ones(1))).node is None
    with no_grad(), ThreadPoolExecutor(1) as another:
        assert not is_recorded()
        assert another.submit(is_recorded).result()
    assert is_recorded()


def test_activations_are_freed_during_backward(no_collector):
    arrays = []

    class Watched(np.ndarray):
        pass

    x = Tensor(np.ones((2, 3)), requires_grad=True)
    w = Tensor(np.ones((3, 3)), requires_grad=True)
    hidden = x
    for _ in range(5):
        hidden = ops.linear(hidden, w, relu=True)
        watched = hidden.data.view(Watched)
        hidden.data = watched
        arrays.append(weakref.ref(watched))
        arrays.append(weakref.ref(hidden.node))
    loss = elementary.sum_all(hidden)
    del hidden, watched
    assert any(ref() is not None for ref in arrays)
    loss.backward()
    assert [ref() for ref in arrays] == [None] * len(arrays)


def test_a_dropped_graph_is_freed_at_once(no_collector):
    x = leaf(1.0)
    y = elementary.multiply(x, x)
    node, tensor = weakref.ref(y.node), weakref.ref(y)
    del y
    assert node() is None
    assert tensor() is None


def test_wrong_gradients_are_refused():
    y = elementary.multiply(leaf(1.0, 2.0), leaf(3.0, 4.0))
    with pytest.raises(
        ValueError, match=r"expected a gradient of shape \(2,\), got none"
    ):
        y.backward()
    with pytest.raises(ValueError, match=r"of shape \(2,\), got \(3,\)"):
        y.backward(np.ones(3))
    with pytest.raises(ValueError, match=r"of shape \(1,\), got none"):
        elementary.multiply(leaf(1.0), leaf(2.0)).backward()
    with pytest.raises(ValueError, match="expected the result of a recorded operation"):
        Tensor(np.ones(1)).backward(np.ones(1))


def test_a_gradient_has_the_type_of_its_tensor():
    x = Tensor(np.ones(2, np.float32), requires_grad=True)
    seen = []

    def double(x):
        return 2 * x, lambda g: (seen.append(g.dtype) or 2 * g,)

    unlisted(double)(x).backward(np.ones(2))  # in float64
    assert seen == [np.float32]


def test_rows_of_a_table_that_was_computed_have_a_gradient():
    """The table is twice a leaf, so each use of a row counts twice for the leaf."""
    table = leaf([1.0, 2.0], [3.0, 4.0], [5.0, 6.0])
    ids, positions = np.array([[2, 0, 2]]), np.zeros((3, 2))
    rows = ops.embedding(elementary.add(table, table), ids, positions)
    rows.backward(np.ones((1, 3, 2)))
    np.testing.assert_array_equal(table.grad, [[2, 2], [0, 0], [4, 4]])


def test_a_graph_is_walked_once():
    weight = Tensor(np.ones((2, 3)), requires_grad=True)
    out = ops.linear(Tensor(np.ones((1, 2))), weight)
    out.backward(np.ones((1, 3)))
    with pytest.raises(RuntimeError, match="released by an earlier backward"):
        out.backward(np.ones((1, 3)))
    np.testing.assert_array_equal(weight.grad, np.ones((2, 3)))
