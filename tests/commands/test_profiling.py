"""The table of where a training step's time goes."""

import numpy as np

from minitransformer.commands.profiling import Profile
from minitransformer.engine import autograd, ops
from minitransformer.engine.autograd import Tensor
from support import elementary


def test_every_call_is_counted_both_ways():
    profile = Profile()
    x, weight = (
        Tensor(np.ones(shape), requires_grad=True) for shape in ((2, 3, 4), (4, 5))
    )
    with autograd.wrap_primitives(profile.wrap_primitive):
        elementary.sum_all(
            ops.linear(ops.linear(x, weight), Tensor(np.ones((5, 4))))
        ).backward()
    ops.linear(x, weight)  # not observed any more
    assert profile.calls["linear forward"] == profile.calls["linear backward"] == 2
    assert profile.calls["sum_all backward"] == 1
    assert profile.seconds.keys() == profile.calls.keys()
    np.testing.assert_array_equal(x.grad, np.full((2, 3, 4), 20.0))


def test_the_table_adds_up_to_the_step():
    profile = Profile()
    profile.calls.update({"adam": 10, "linear forward": 20})
    profile.seconds.update({"adam": 1.0, "linear forward": 2.0})
    lines = profile.table(steps=10, seconds=4.0).split("\n")
    assert lines[1].split() == ["linear", "forward", "2.0", "200.00", "50.0%"]
    assert lines[2].split() == ["adam", "1.0", "100.00", "25.0%"]
    assert lines[3].split() == ["everything", "else", "100.00", "25.0%"]
    assert lines[4].split() == ["a", "step", "400.00"]
