"""Gradients are summed over ranks in buckets, while the backward pass goes on."""

import numpy as np

from minitransformer.backends.cuda import nccl
from minitransformer.backends.cuda.nccl import GradientAllReduce
from minitransformer.engine.ops import HostStream
from minitransformer.model.parameters import ParameterBuffer
from minitransformer.model.transformer import training_loss
from support.closeness import assert_close
from support.models import small_batch, small_model
from support.ranks import run_ranks


def gradient(seeds, ranks=None):
    """The sum of the gradients of some batches, of one for each rank if there are."""
    model = small_model()
    parameters = ParameterBuffer(model)
    parameters.grad[:] = 0
    reduced = ranks and GradientAllReduce(ranks, parameters)
    for seed in seeds if ranks is None else seeds[ranks.rank : ranks.rank + 1]:
        batch = small_batch(seed, 4)
        loss = training_loss(model, batch.source, batch.target, 0.1, HostStream((1,)))
        loss.backward(1.0, reduced and reduced.complete)
    if reduced:
        reduced.finish()
    return parameters.grad


def test_ranks_get_the_sum_of_their_gradients(monkeypatch):
    monkeypatch.setattr(nccl, "BYTES_PER_BUCKET", 600)
    expected = gradient([1, 2, 3])
    for found in run_ranks(3, lambda ranks: gradient([1, 2, 3], ranks)):
        assert_close(found, expected)


def test_a_bucket_is_summed_once_complete_while_the_others_are_not(monkeypatch):
    monkeypatch.setattr(nccl, "BYTES_PER_BUCKET", 600)
    started = []

    class Recorder:
        rank = 0

        def start_all_reduce(self, array):
            started.append((array, array.copy(), array.base.copy()))
            return lambda: None

    whole = gradient([1], Recorder())
    assert len(started) > 3
    for bucket, at_start, _ in started:
        np.testing.assert_array_equal(bucket, at_start)
    assert (started[0][2] != whole).any()
