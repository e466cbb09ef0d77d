"""Elementary operations, which the model does not need: for tests of the engine."""

from minitransformer.engine.autograd import primitive
from minitransformer.engine.backend import array_module


@primitive
def add(a, b):
    """a + b, with broadcasting."""

    def vjp(g):
        return _sum_to(g, a.shape), _sum_to(g, b.shape)

    return a + b, vjp


@primitive
def multiply(a, b):
    """a * b element by element, with broadcasting."""

    def vjp(g):
        return _sum_to(g * b, a.shape), _sum_to(g * a, b.shape)

    return a * b, vjp


@primitive
def sum_all(a):
    """The sum of all elements, a scalar."""
    xp = array_module(a)

    def vjp(g):
        return (xp.full(a.shape, g, dtype=a.dtype),)

    return xp.asarray(a.sum()), vjp


def _sum_to(g, shape):
    """Sum the axes of `g` over which an input of `shape` was broadcast."""
    extra = g.ndim - len(shape)
    if extra:
        g = g.sum(axis=tuple(range(extra)))
    stretched = tuple(i for i, n in enumerate(shape) if n == 1 and g.shape[i] != 1)
    return g.sum(axis=stretched, keepdims=True) if stretched else g
