"""Threads, accumulation and repeatability of a training step's gradient."""

import threading
import time

import numpy as np
import pytest

from minitransformer.engine.random_streams import HostStream
from minitransformer.model.loss import training_loss
from minitransformer.model.parameters import ParameterBuffer
from minitransformer.training import distributed, parallel
from minitransformer.training.distributed import Communicator
from minitransformer.training.parallel import ThreadedModel
from support.closeness import assert_close
from support.models import small_batch, small_model
from support.ranks import run_ranks


def gradient(batches, threads, dropout=0.0, dtype="float64", ranks=None):
    model = small_model(dropout, dtype)
    parameters = ParameterBuffer(model)
    threaded = ThreadedModel(model, parameters, threads, ranks)
    threaded.forward_backward(batches, 0.1, (1, 1))
    loss = threaded.forward_backward(
        batches, 0.1, (1, 1)
    )  # the second starts from zero
    threaded.close()
    return loss, parameters.grad.copy()


def test_the_gradient_is_that_of_the_mean_loss():
    """With the noise of the key, one part of each batch after the other."""
    batches = [small_batch(0, 7), small_batch(1, 2)]
    tokens = sum((batch.target[:, 1:] != 0).sum() for batch in batches)
    model, total = small_model(0.3), 0.0
    parameters = ParameterBuffer(model)
    parameters.grad[:] = 0
    for i, batch in enumerate(batches):
        noise = HostStream((1, 1, i))
        loss = training_loss(model, batch.source, batch.target, 0.1, noise)
        loss.backward(1.0)
        total += float(loss.data)
    found, grad = gradient(batches, 1, 0.3)
    assert 0 < total < np.inf
    assert_close(found, total / tokens)
    assert_close(grad, parameters.grad / tokens)


@pytest.mark.parametrize("threads", [2, 3, 8])
def test_threads_do_not_change_the_gradient(threads):
    batches = [small_batch(0, 7), small_batch(1, 2)]
    loss, expected = gradient(batches, 1)
    other, found = gradient(batches, threads)
    assert_close(other, loss)
    assert_close(found, expected)


def test_accumulation_weighs_by_tokens():
    parts = [small_batch(0, 7), small_batch(1, 3)]
    loss, together = gradient(parts, 1)
    tokens = [part.target_tokens for part in parts]
    alone = [gradient([part], 1) for part in parts]
    weights = [n / sum(tokens) for n in tokens]
    assert_close(loss, sum(w * x for w, (x, _) in zip(weights, alone, strict=True)))
    mean = sum(w * g for w, (_, g) in zip(weights, alone, strict=True))
    assert_close(together, mean)


def test_a_step_repeats_bit_for_bit():
    first, second = (gradient([small_batch(0, 9)], 2, 0.3, "float32") for _ in range(2))
    assert first[0] == second[0]
    np.testing.assert_array_equal(first[1], second[1])


def test_the_threads_of_all_ranks_share_a_batch(monkeypatch):
    """Of 17 sentences of 6 tokens, each of 4 threads takes at most 2 at once."""
    batch, computed = small_batch(0, 17), []
    loss, expected = gradient([batch], 1)
    training_loss = parallel.training_loss

    def remember(model, source, *rest):
        computed.append(source)
        return training_loss(model, source, *rest)

    monkeypatch.setattr(parallel, "TOKENS_TIMES_WIDTH", 8 * (2 * 6) + 7)
    monkeypatch.setattr(parallel, "training_loss", remember)
    for other, found in run_ranks(2, lambda r: gradient([batch], 2, ranks=r)):
        assert_close(other, loss)
        assert_close(found, expected)
    assert len(computed) == 2 * 4 * 3  # gradients, threads, rounds
    assert max(map(len, computed)) == 2
    sentences = sorted(np.concatenate(computed).tolist())
    assert sentences == sorted(2 * batch.source.tolist())


def test_each_thread_has_a_replica_and_no_more_threads_run():
    model = small_model()
    threaded = ThreadedModel(model, ParameterBuffer(model), 2)
    assert len(threaded.replicas) == 2
    both = threading.Barrier(2)
    assert set(threaded.map(lambda item: both.wait(10), range(2))) == {0, 1}

    def work(item):
        time.sleep(0.01)
        return threading.get_ident()

    assert len(set(threaded.map(work, range(8)))) <= 2
    threaded.close()


def test_tokens_at_once_are_those_of_all_threads(monkeypatch):
    model = small_model()  # of width 8
    monkeypatch.setattr(parallel, "TOKENS_TIMES_WIDTH", 87)
    threaded = ThreadedModel(model, ParameterBuffer(model), 3)
    assert threaded.tokens_at_once == 30
    monkeypatch.setattr(parallel, "TOKENS_TIMES_WIDTH", 7)  # narrower than the model
    assert threaded.tokens_at_once == 3
    threaded.close()


def test_a_bucket_is_summed_once_complete_while_the_others_are_not(monkeypatch):
    """The batch takes three rounds, of which the last completes the gradient."""
    monkeypatch.setattr(distributed, "BYTES_PER_BUCKET", 600)
    monkeypatch.setattr(parallel, "TOKENS_TIMES_WIDTH", 8 * (3 * 6))
    started = []

    class Recorder(Communicator):
        def start_all_reduce(self, array):
            started.append((array, array.copy(), parameters.grad.copy()))
            return lambda: None

    model = small_model()
    parameters = ParameterBuffer(model)
    threaded = ThreadedModel(model, parameters, 1, Recorder())
    threaded.forward_backward([small_batch(0, 9)], 0.1, (1, 1))
    threaded.close()
    assert len(started) > 3
    for bucket, at_start, _ in started:
        np.testing.assert_array_equal(bucket, at_start)
    assert (started[0][2] != parameters.grad).any()
