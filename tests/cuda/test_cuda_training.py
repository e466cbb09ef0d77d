"""What a GPU is asked to do in training, with arrays of NumPy in place of its own."""

import contextlib
import types

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minitransformer.cuda import device, training
from minitransformer.cuda.device import graph_memory
from minitransformer.cuda.training import GpuModel, PaddedBatch, padded_length
from minitransformer.model.parameters import ParameterBuffer
from minitransformer.text.batches import Batch
from minitransformer.training.loss_scale import LossScale
from minitransformer.training.parallel import ThreadedModel
from support.closeness import assert_close
from support.cuda import CudaError
from support.models import small_batch, small_model
from support.ranks import run_ranks


def gpu_model(dropout=0.0, log=print, **options):
    model = small_model(dropout, "float32")
    parameters = ParameterBuffer(model)
    scale = LossScale(np, "fp32")
    return GpuModel(model, parameters, scale, log=log, **options)


def float64_model():
    model = small_model()
    return ThreadedModel(model, ParameterBuffer(model), 1)


def trimmed(seed, sentences, source, target):
    full = small_batch(seed, sentences)
    return Batch(full.source[:, :source], full.target[:, : target + 1])


def steps(model):
    """Gradients of four steps: of two shapes, after padding."""
    sizes = (7, 5, 3), (8, 6, 3), (3, 6, 4), (7, 6, 4)
    batches = [trimmed(seed, *size) for seed, size in enumerate(sizes)]
    found = []
    for step, one in enumerate(batches):
        loss = model.gradient([one], 0.1, (1, step))
        found.append((float(loss), model.parameters.grad.copy()))
    return found


def test_a_graph_of_each_shape_is_recorded_once_and_replayed(stand_in):
    found = steps(gpu_model(0.3))
    again = ["copied", "launched"]
    assert stand_in.calls == ["captured", *again, "captured", *again]
    stand_in.calls.clear()
    expected = steps(gpu_model(0.3, graphs=False))
    assert stand_in.calls == []
    for (loss, gradient), (other, plain) in zip(found, expected, strict=True):
        assert loss == other
        np.testing.assert_array_equal(gradient, plain)


def test_padding_to_the_shape_of_a_graph_changes_no_gradient(stand_in):
    threaded = float64_model()
    for (loss, gradient), (other, plain) in zip(
        steps(gpu_model()), steps(threaded), strict=True
    ):
        assert_close(loss, other, "float32")
        assert_close(gradient, plain, "float32")


def test_training_goes_on_without_graphs_and_says_so(stand_in):
    stand_in.refuses_capture, said = True, []
    found = steps(gpu_model(log=said.append))
    [line] = said
    assert line.startswith("graphs      none, work is launched kernel by kernel: ")
    expected = steps(gpu_model(graphs=False))
    assert [loss for loss, _ in found] == [loss for loss, _ in expected]


def test_ranks_that_compute_in_different_parts_agree(stand_in):
    batches = [small_batch(0, 7), small_batch(1, 2)]
    threaded = float64_model()
    loss = threaded.gradient(batches, 0.1, (1, 1))

    def work(ranks):
        model = gpu_model(communicator=ranks, graphs=False)
        model.parts = 1 + ranks.rank
        return model.gradient(batches, 0.1, (1, 1)), model.parameters.grad

    for other, found in run_ranks(3, work):
        assert_close(other, loss, "float32")
        assert_close(found, threaded.parameters.grad, "float32")


def few_rows(monkeypatch, most):
    compute = GpuModel._compute

    def limited(self, inputs, *rest):
        compute(self, inputs, *rest)
        if len(inputs.source) > most:
            raise MemoryError

    monkeypatch.setattr(GpuModel, "_compute", limited)


def test_running_out_of_gpu_memory_halves_the_parts_of_batches(stand_in, monkeypatch):
    said = []
    whole, model = gpu_model(), gpu_model(log=said.append)
    loss = whole.gradient([small_batch(0, 13)], 0.1, (1, 1))
    few_rows(monkeypatch, 4)
    assert_close(model.gradient([small_batch(0, 13)], 0.1, (1, 1)), loss, "float32")
    assert_close(model.parameters.grad, whole.parameters.grad, "float32")
    assert model.parts == 4
    assert "not enough for 78 + " in said[0]
    assert "computed in 2 parts" in said[0]
    assert "--max-tokens" in said[0]
    assert "computed in 4 parts" in said[1]
    freed = [word for word in stand_in.calls if word == "waited" or "freed" in word]
    assert freed == 2 * ["waited", "graphs freed", "freed"]


def test_a_sentence_too_long_for_the_memory_is_named(stand_in, monkeypatch):
    few_rows(monkeypatch, 0)
    with pytest.raises(RuntimeError, match=r"memory with 6 source and 4 target"):
        gpu_model(log=[].append).gradient([small_batch(0, 3)], 0.1, (1, 1))


def test_graph_memory_frees_the_default_pool_to_make_room(stand_in):
    tries = []

    def memory(size):
        tries.append(size)
        if len(tries) < 2 or size > 100:
            raise CudaError("cudaErrorMemoryAllocation: out of memory")
        return f"{size} bytes"

    stand_in.xp.cuda.Memory = memory
    pool = graph_memory(stand_in.xp)
    assert pool.malloc(8) == "8 bytes"
    assert stand_in.calls == ["freed"]
    with pytest.raises(MemoryError, match="out of memory"):
        pool.malloc(1000)
    assert stand_in.limits == [0]  # none, whatever CUPY_GPU_MEMORY_LIMIT says


def test_positions_are_not_in_memory_that_graphs_use_again(stand_in):
    model, available = gpu_model(), []

    def using_allocator(malloc):
        available.append(model.model.embedding.positions.shape[0])
        return contextlib.nullcontext()

    stand_in.xp.cuda.using_allocator = using_allocator
    long = Batch(np.full((2, 300), 5), np.full((2, 4), 5))
    model.gradient([long], 0.1, (1, 1))
    assert available[0] >= 300


def test_the_first_error_of_a_recording_is_reported():
    def refuse():
        raise CudaError("the capture was invalidated")

    stream = types.SimpleNamespace(begin_capture=lambda: None, end_capture=refuse)
    with pytest.raises(ZeroDivisionError):
        device.record(stream, lambda: 1 / 0)
    with pytest.raises(CudaError, match="was invalidated"):
        device.record(stream, lambda: 1)


def test_an_interrupted_recording_leaves_the_stream_usable():
    def interrupt():
        raise KeyboardInterrupt

    ended = []
    stream = types.SimpleNamespace(
        begin_capture=lambda: None, end_capture=lambda: ended.append(True)
    )
    with pytest.raises(KeyboardInterrupt):
        device.record(stream, interrupt)
    assert ended


@given(st.integers(1, 5000))
def test_padded_lengths_are_few_and_waste_little(count):
    found = padded_length(count)
    assert count <= found
    assert found - count < max(2, count / 16)
    assert padded_length(found) == found
    assert len({padded_length(n) for n in range(1, 257)}) == 64


def test_a_padded_batch_keeps_nothing_of_the_last_one(stand_in):
    inputs = PaddedBatch(stand_in.xp, 8, 8, 8)
    inputs.fill(small_batch(0, 8))
    inputs.fill(trimmed(1, 2, 3, 4))
    assert (inputs.source[2:] == 0).all()
    assert (inputs.source[:, 3:] == 0).all()
    np.testing.assert_array_equal(inputs.target[:2, :5], trimmed(1, 2, 3, 4).target)


def test_libraries_that_are_missing_are_named(monkeypatch):
    def current():
        raise ImportError("Failure finding libcublas\nlooked in many places")

    monkeypatch.setattr(device, "current", current)
    monkeypatch.setenv("CUPY_TF32", "0")
    with pytest.raises(RuntimeError, match=r"libraries of CUDA: .*libcublas\)$"):
        device.set_tf32(False)


def test_the_number_of_graphs_is_limited(stand_in, monkeypatch):
    monkeypatch.setattr(training, "MAX_GRAPHS", 1)
    steps(gpu_model())
    assert stand_in.calls.count("captured") == 1
    assert stand_in.calls.count("launched") == 2


def test_the_number_of_batches_in_flight_is_limited(stand_in, monkeypatch):
    monkeypatch.setattr(training, "MAX_IN_FLIGHT", 1)
    steps(gpu_model(graphs=False))
    assert stand_in.calls == ["copied"] * 3
