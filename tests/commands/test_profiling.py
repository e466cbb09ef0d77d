"""The table of where a training step's time goes."""

import numpy as np
import pytest

from minitransformer.commands import profiling
from minitransformer.commands.profiling import Profile
from minitransformer.engine import autograd, ops
from minitransformer.engine.autograd import Tensor


def test_every_call_is_counted_both_ways_with_its_operations():
    profile = Profile()
    x, weight = (
        Tensor(np.ones(shape), requires_grad=True) for shape in ((2, 3, 4), (4, 5))
    )
    with autograd.wrap_primitives(profile.wrap_primitive):
        ops.sum_all(
            ops.linear(ops.linear(x, weight), Tensor(np.ones((5, 4))))
        ).backward()
    ops.linear(x, weight)  # not observed any more
    forward = profile.entries["linear", "forward"]
    backward = profile.entries["linear", "backward"]
    # Two products of 6 rows, 4 x 5 and 5 x 4, each two operations a multiply-add.
    assert (forward.calls, forward.flops) == (2, 2 * (2 * 6 * 4 * 5))
    assert (backward.calls, backward.flops) == (2, 2 * forward.flops)
    assert profile.entries["sum_all", "backward"].calls == 1
    np.testing.assert_array_equal(x.grad, np.full((2, 3, 4), 20.0))


@pytest.mark.parametrize("queries", [3, 7])
def test_operations_of_attention_and_loss_are_those_of_their_products(queries):
    q = np.ones((2, queries, 8))
    k, v, targets = (
        np.ones((2, 5, 8)),
        np.ones((2, 5, 6)),
        np.array([[1, 2, 0], [3, 0, 0]]),
    )
    forward, backward = profiling.operations("attention", (q, k, v), {})
    # In each sentence: queries x 5 scores of 8 multiply-adds, queries x 6 of 5.
    assert forward == 2 * 2 * (queries * 5 * 8 + queries * 6 * 5)
    assert backward == 2 * forward
    loss, _ = profiling.operations(
        "projected_cross_entropy",
        (np.ones((2, 3, 4)), np.ones((9, 4)), targets),
        {"padding_id": 0},
    )
    assert loss == 3 * 2 * 3 * 9 * 4  # three products over the 3 targets in use


def test_the_table_adds_up_to_the_step():
    profile = Profile()
    profile.entries["linear", "forward"] = profiling.Entry(10, 2.0, 4e9)
    profile.entries["adam", ""] = profiling.Entry(10, 1.0, 8e9)
    lines = profile.table(steps=10, seconds=4.0).split("\n")
    assert lines[1].split() == ["linear", "forward", "1.0", "200.00", "50.0%", "2.0"]
    assert lines[2].split() == ["adam", "1.0", "100.00", "25.0%", "8.0"]
    assert lines[3].split() == ["everything", "else", "100.00", "25.0%"]
    assert lines[4].split() == ["a", "step", "400.00"]
