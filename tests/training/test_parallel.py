"""Processes, accumulation and repeatability of a training step's gradient."""

import weakref

import numpy as np
import pytest

from minitransformer.engine.backend import parameters_changed
from minitransformer.model.parameters import ParameterBuffer
from minitransformer.system.workers import CAN_FORK
from minitransformer.training import parallel
from minitransformer.training.parallel import CpuModel
from support.closeness import assert_close
from support.models import gradient_of, small_batch, small_model
from support.ranks import run_ranks

forks = pytest.mark.skipif(not CAN_FORK, reason="processes are forked on Linux only")


@forks
@pytest.mark.parametrize(("processes", "ranks"), [(2, 1), (3, 1), (8, 1), (2, 2)])
def test_processes_and_ranks_do_not_change_the_gradient(processes, ranks):
    """Also where a batch has fewer sentences than there are processes."""
    batches = [small_batch(0, 7), small_batch(1, 2)]
    loss, expected = gradient_of(batches)
    each = run_ranks(ranks, lambda x: gradient_of(batches, processes, ranks=x))
    for other, gradient in each:
        assert_close(other, loss)
        assert_close(gradient, expected)


@forks
def test_several_processes_keep_one_copy_of_the_parameters():
    """Shared, and of the same type: the vector that they were in is freed."""
    model = small_model(dtype="float32")
    parameters = ParameterBuffer(model)
    old = weakref.ref(parameters.data)
    computed = CpuModel(model, parameters, 2)
    assert old() is None
    assert parameters.data.dtype == parameters.grad.dtype == np.float32
    computed.close()


@forks
def test_an_error_in_a_process_is_raised(monkeypatch):
    def fail(*_):
        raise ValueError("expected another batch")

    monkeypatch.setattr(parallel, "training_loss", fail)
    with pytest.raises(ValueError, match="expected another batch"):
        gradient_of([small_batch(0, 4)], 2)


@forks
def test_parameters_that_others_change_are_seen():
    """Those that the main process sets, as at the end of a run."""
    model = small_model()
    parameters = ParameterBuffer(model)
    computed = CpuModel(model, parameters, 2)
    batch = small_batch(0, 4)
    before = computed.forward_backward([batch], 0.0, (1, 1))
    parameters.data[...] = 0
    parameters_changed(parameters.data)
    after = computed.forward_backward([batch], 0.0, (1, 1))
    assert_close(after, np.log(model.config.vocab_size))
    assert before != after
    computed.close()
