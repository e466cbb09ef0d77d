"""Training in forked processes computes what threads compute."""

import numpy as np
import pytest

from minitransformer.engine.backend import parameters_changed
from minitransformer.model.parameters import ParameterBuffer
from minitransformer.training import parallel
from minitransformer.training.forked import ForkedModel
from minitransformer.training.optimizer import Adam
from minitransformer.training.parallel import ThreadedModel
from minitransformer.workers import CAN_FORK
from support.closeness import assert_close
from support.models import small_batch, small_model

pytestmark = pytest.mark.skipif(
    not CAN_FORK, reason="processes are forked on Linux only"
)

KINDS = [ThreadedModel, ForkedModel]


def updates(kind, count, steps=3, dropout=0.3, dtype="float64"):
    """Return losses, the last gradient and the parameters after some updates."""
    model = small_model(dropout, dtype)
    parameters = ParameterBuffer(model)
    computed = kind(model, parameters, count)
    adam = Adam(parameters.data, 0.9, 0.98, 1e-9, 1.0, count, computed.map)
    batches, losses = [small_batch(0, 7), small_batch(1, 2)], []
    for step in range(steps):
        losses.append(computed.forward_backward(batches, 0.1, (1, step)))
        adam.step(parameters.grad, losses[-1], 0.01)
    computed.close()
    views = parameters.views(parameters.data)
    for name, parameter in model.named_parameters():
        np.testing.assert_array_equal(parameter.data, views[name])
    return losses, parameters.grad, parameters.data


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("rounds", [1, 2])
def test_processes_compute_what_threads_compute(count, rounds, monkeypatch):
    """Also with dropout, whose noise depends on the number of parts."""
    if rounds > 1:
        monkeypatch.setattr(parallel, "TOKENS_TIMES_WIDTH", 8 * 2 * 6)
    for found, expected in zip(*(updates(k, count) for k in KINDS), strict=True):
        assert_close(found, expected)


def test_the_same_number_of_processes_repeats_bit_for_bit():
    first, second = (updates(ForkedModel, 2, dtype="float32") for _ in range(2))
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a, b)


def test_there_may_be_fewer_sentences_than_processes():
    found = []
    for kind, count in zip(KINDS, (1, 3), strict=True):
        model = small_model()
        parameters = ParameterBuffer(model)
        computed = kind(model, parameters, count)
        loss = computed.forward_backward([small_batch(0, 2)], 0.1, (1, 1))
        found.append((loss, parameters.grad.copy()))
        computed.close()
    for a, b in zip(*found, strict=True):
        assert_close(a, b)


def test_an_error_in_a_process_is_raised(monkeypatch):
    def fail(*_):
        raise ValueError("expected another batch")

    monkeypatch.setattr(parallel, "training_loss", fail)
    model = small_model()
    forked = ForkedModel(model, ParameterBuffer(model), 2)
    with pytest.raises(ValueError, match="expected another batch"):
        forked.forward_backward([small_batch(0, 4)], 0.1, (1, 1))
    forked.close()


def test_parameters_that_others_change_are_seen(monkeypatch):
    """Those that the main process sets, as at the end of a run."""
    model = small_model()
    parameters = ParameterBuffer(model)
    forked = ForkedModel(model, parameters, 2)
    batch = small_batch(0, 4)
    before = forked.forward_backward([batch], 0.0, (1, 1))
    parameters.data[...] = 0
    parameters_changed(parameters.data)
    after = forked.forward_backward([batch], 0.0, (1, 1))
    assert_close(after, np.log(model.config.vocab_size))
    assert before != after
    forked.close()
