"""What docstrings say of shapes is checked at each call, and mistakes are noticed."""

import types

import numpy as np
import pytest

from support import shapes

MODULE = '''
from dataclasses import dataclass
from typing import NamedTuple
import numpy as np

def rounded(n):
    return n + 1

def product(a, b=None, wrong=0):
    """A B. Shapes: a [N, n], b [n, m] -> [N, m] float64"""
    return (a @ b)[wrong:]

def stack(rows, count, size=2):
    """Shapes: rows each [N, at least 2] -> sums [count], flat [N count], rest [..., N]

    Units: none
    """
    return np.zeros(count), np.zeros(size * count), np.zeros((7, 8, 2))

def with_mask(x, mask):
    """Shapes: x [..., T + 1], mask broadcasting to [3, T] -> scalar"""
    return 1.5

def padded(x, out):
    """Shapes: x [N, 1 or n, any], out [max(rounded(N), 4), n]"""

class Pair(NamedTuple):
    """Shapes: left, right [B]"""

    left: np.ndarray
    right: np.ndarray

@dataclass(frozen=True)
class Fields:
    """Shapes: ids [size], words [names] int32"""

    ids: np.ndarray
    words: np.ndarray
    size: int
    names: list

class Base:
    """Shapes: table [V, D]"""

    def __init__(self, table, width=3):
        self.table, self.width = table, width

    def look_up(self, ids):
        """Shapes: ids [B] -> [B, width]"""
        raise NotImplementedError

    @property
    def mean(self):
        """Shapes: -> scalar"""
        return self.table.mean(axis=0)

class Nothing:
    """Shapes: t [5]"""

    def __init__(self, table):
        self.table = table

class Other(Base):
    def look_up(self, ids):
        return self.table[ids]
'''


@pytest.fixture
def planted(monkeypatch):
    """A module with lines, watched as one of the package."""
    monkeypatch.setattr(shapes, "CALLS", {})
    monkeypatch.setattr(shapes, "MISTAKES", [])
    module = types.ModuleType("minitransformer.planted")
    exec(MODULE, vars(module))
    shapes.watch(module)
    return module


def z(*shape, dtype="float64"):
    return np.zeros(shape, dtype)


RIGHT = {
    "product(z(2, 3), z(3, 4))": 1,
    "product(a=z(2, 3), b=z(3, 4))": 1,
    "stack([z(2, 2), z(2, 9)], 5)": 1,
    "with_mask(z(4, 6, 3, 7), z(3, 1))": 1,
    "with_mask(z(7), None)": 1,
    "padded(z(5, 3, 2), z(6, 3)), padded(z(1, 1, 2), z(4, 3))": 2,
    "Pair(z(2), z(2))": 1,
    "Fields(z(2), z(1, dtype='int32'), 2, ['a'])": 1,
    "Base(z(5, 3)), Other(z(5, 3))": 1,
    "Other(z(5, 3)).look_up(np.arange(4))": 1,
}
WRONG = {
    # What is called: its name, what is wrong, and what came.
    "product(z(2, 3), z(3, 4), wrong=1)": (
        r"planted\.product: Shapes: a \[N, n\], b \[n, m\] -> \[N, m\] float64: "
        r"expected N = 2, got 1; got a \[2, 3\], b \[3, 4\], \[1, 4\]"
    ),
    "product(z(2, 3, dtype='f4'), z(3, 4, dtype='f4'))": "of the result is float32",
    "product(z(2), z(2, 4))": "a has 1 axes",
    "stack([z(2, 2), z(3, 2)], 5)": "expected N = 2, got 3",
    "stack([z(2, 1)], 5)": "expected at least 2 = 2, got 1",
    "stack([z(2, 2)], 5, size=3)": r"N count = 10, got 15",
    "with_mask(z(7), z(4, 3, 6))": "mask has 3 axes",
    "with_mask(z(7), z(3, 5))": "expected T . 1 = 6, got 7",
    "with_mask(z(7), z(2, 6))": "expected 3 = 3, got 2",
    "padded(z(5, 3, 2), z(6, 2))": "expected 1 or n = 2, got 3",
    "padded(z(5, 1, 2), z(5, 2))": r"max\(rounded\(N\), 4\) = 6, got 5",
    "Pair(z(2), z(3))": "planted.Pair: Shapes: .*: expected B = 2, got 3",
    "Fields(z(3), z(1, dtype='int32'), 2, ['a'])": "expected size = 2, got 3",
    "Fields(z(2), z(2, dtype='int32'), 2, ['a'])": "expected names = 1, got 2",
    "Base(z(5))": "table has 1 axes",
    "Other(z(5, 4)).look_up(np.arange(4))": r"Other\.look_up: .*: expected width = 3",
    "Nothing(z(5))": "planted.Nothing: Shapes: t .5.: what is {'t'}",
    "Base(z(5, 3)).mean": r"planted\.Base\.mean: .*: the result has 1 axes",
}


@pytest.mark.parametrize("call", RIGHT)
def test_right_shapes_are_counted(planted, call):
    eval(call, {**vars(planted), "z": z})
    assert shapes.MISTAKES == []
    assert max(shapes.CALLS.values()) == RIGHT[call]


@pytest.mark.parametrize("call", WRONG)
def test_a_wrong_shape_fails_and_is_named(planted, call):
    for count in (1, 2):  # it is not remembered as right
        with pytest.raises(AssertionError, match=WRONG[call]):
            eval(call, {**vars(planted), "z": z})
        assert len(shapes.MISTAKES) == count  # even if the error is caught


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("Shapes: x [N, n], weights of [n, m]", "expected names and .axes., got 'wei"),
        ("Shapes: y [N]", "planted.f: Shapes: y .N.: what is {'y'}"),
        ("Shapes: x", "expected names and"),
    ],
)
def test_a_line_that_says_nothing_is_refused(planted, line, message):
    module = types.ModuleType("minitransformer.planted")
    exec(f'def f(x):\n    """{line}"""', vars(module))
    with pytest.raises((AssertionError, ValueError), match=message):
        shapes.watch(module)


def test_shapes_of_the_package_are_checked():
    from minitransformer.engine import ops

    before = shapes.CALLS["engine.ops.linear"]
    ops.linear(z(2, 3), z(3, 4))
    assert shapes.CALLS["engine.ops.linear"] == before + 1
