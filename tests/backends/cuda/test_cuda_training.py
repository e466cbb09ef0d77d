"""What a GPU is asked to do in training, by a stand-in of CuPy."""

import gc
from contextlib import closing

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minitransformer.backends.cuda import device, nccl
from minitransformer.backends.cuda.graphs import graph_memory
from minitransformer.backends.cuda.philox import PhiloxStream
from minitransformer.backends.cuda.training import GpuModel, PaddedBatch, padded_length
from minitransformer.engine.autograd import Tensor
from minitransformer.engine.backend import to_host
from minitransformer.model.layers import sinusoids
from minitransformer.model.parameters import ParameterBuffer
from minitransformer.text.batches import Batch
from minitransformer.training.loss_scale import LossScale
from minitransformer.training.parallel import CpuModel
from support.closeness import assert_close
from support.models import small_batch, small_model
from support.ranks import run_ranks


def gpu_model(xp, dropout=0.0, log=print, **options):
    model = small_model(dropout, "float32")
    parameters = ParameterBuffer(model)
    parameters.move_to(xp)
    scale = LossScale(xp, "fp32")
    return GpuModel(model, parameters, scale, log=log, **options)


def test_a_model_returns_to_its_stream(stand_in):
    """CuPy leaves it for the null stream where it copies a strided array."""
    model, batch = gpu_model(stand_in.xp), small_batch(0, 3)
    stream = stand_in.stream
    stand_in.xp.ones((2, 3), np.float32).T.get()
    assert stand_in.stream is not stream
    model.forward_backward([batch], 0.1, (1, 1))
    assert stand_in.stream is stream


@pytest.fixture(scope="module")
def float64_model():
    model = small_model()
    with closing(CpuModel(model, ParameterBuffer(model), 1)) as computed:
        yield computed


def trimmed(seed, sentences, source, target):
    full = small_batch(seed, sentences)
    return Batch(full.source[:, :source], full.target[:, : target + 1])


def steps(model):
    """Gradients of four steps: of two shapes, after padding, also of larger batches."""
    sizes = (8, 6, 3), (7, 5, 3), (3, 6, 4), (7, 6, 4)
    batches = [trimmed(seed, *size) for seed, size in enumerate(sizes)]
    found = []
    for step, one in enumerate(batches):
        loss = model.forward_backward([one], 0.1, (1, step))
        found.append((float(loss), to_host(model.parameters.grad).copy()))
    return found


def of_graphs(stand_in):
    return [x for x in stand_in.calls if x in ("captured", "launched", "copied")]


def test_a_graph_of_each_shape_is_recorded_once_and_replayed(stand_in):
    found = steps(gpu_model(stand_in.xp, 0.3))
    assert of_graphs(stand_in) == 2 * ["captured", "copied", "launched"]
    stand_in.calls.clear()
    expected = steps(gpu_model(stand_in.xp, 0.3, graphs=False))
    assert of_graphs(stand_in) == []
    for (loss, gradient), (other, plain) in zip(found, expected, strict=True):
        assert loss == other
        np.testing.assert_array_equal(gradient, plain)


@pytest.mark.parametrize("refused", [False, True])
def test_padding_to_the_shape_of_a_graph_changes_no_gradient(
    stand_in, float64_model, refused
):
    """Nor does it that no graph can be recorded, which is said."""
    stand_in.refuses_capture, said = refused, []
    found = steps(gpu_model(stand_in.xp, log=said.append))
    for (loss, gradient), (other, plain) in zip(
        found, steps(float64_model), strict=True
    ):
        assert_close(loss, other, "float32")
        assert_close(gradient, plain, "float32")
    assert [line.partition(":")[0] for line in said] == refused * [
        "graphs      none, work is launched kernel by kernel"
    ]


def test_ranks_that_compute_in_different_parts_agree(
    stand_in, float64_model, monkeypatch
):
    """Kernel by kernel, then by a graph for each bucket of gradients."""
    monkeypatch.setattr(nccl, "BYTES_PER_BUCKET", 600)
    batches = [small_batch(0, 7), small_batch(1, 2)]
    loss = float64_model.forward_backward(batches, 0.1, (1, 1))

    def work(ranks):
        stand_in.xp.cuda.Device(ranks.rank).use()
        model = gpu_model(stand_in.xp, communicator=ranks)
        model.parts = 1 + ranks.rank
        found = []
        for _ in range(2):
            loss = model.forward_backward(batches, 0.1, (1, 1))
            found.append((float(loss), to_host(model.parameters.grad).copy()))
        return found

    for found in run_ranks(3, work):
        for other, gradient in found:
            assert_close(other, loss, "float32")
            assert_close(gradient, float64_model.parameters.grad, "float32")


def few_rows(monkeypatch, most):
    compute = GpuModel._compute

    def limited(self, inputs, *rest):
        compute(self, inputs, *rest)
        if len(inputs.source) > most:
            raise MemoryError

    monkeypatch.setattr(GpuModel, "_compute", limited)


def test_running_out_of_gpu_memory_halves_the_parts_of_batches(stand_in, monkeypatch):
    said = []
    whole = gpu_model(stand_in.xp)
    loss = float(whole.forward_backward([small_batch(0, 13)], 0.1, (1, 1)))
    expected = to_host(whole.parameters.grad)
    few_rows(monkeypatch, 4)
    model = gpu_model(stand_in.xp, log=said.append)
    gc.collect()  # models of other tests free their memory, too
    stand_in.calls.clear()
    found = float(model.forward_backward([small_batch(0, 13)], 0.1, (1, 1)))
    assert_close(found, loss, "float32")
    assert_close(to_host(model.parameters.grad), expected, "float32")
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
        gpu_model(stand_in.xp, log=[].append).forward_backward(
            [small_batch(0, 3)], 0.1, (1, 1)
        )


def test_graph_memory_frees_the_default_pool_to_make_room(stand_in, monkeypatch):
    """And has no limit of its own, whatever CUPY_GPU_MEMORY_LIMIT says."""
    pool = graph_memory(stand_in.xp)
    kept = stand_in.default_pool.malloc(1 << 21)
    stand_in.bytes_left = 1 << 21
    del kept
    block = pool.malloc(3 << 20)
    assert stand_in.calls == ["freed"]
    with pytest.raises(MemoryError, match="out of memory"):
        pool.malloc(2 << 20)
    del block


def test_positions_are_not_in_memory_that_graphs_use_again(stand_in):
    """Sinusoids for a long batch, between two replays of a graph of short ones."""
    short = [trimmed(seed, 7, 6, 4) for seed in range(2)]
    long = Batch(np.full((1, 40), 5), np.full((1, 4), 5))
    model = gpu_model(stand_in.xp)
    model.model.embedding.positions = Tensor(sinusoids(8, 8).astype(np.float32))
    for step, batch in enumerate((short[0], long, short[1])):
        model.forward_backward([batch], 0.1, (1, step))
    table = to_host(model.model.embedding.positions.data)
    assert len(table) >= 40
    assert_close(table, sinusoids(len(table), 8), "float32")


@given(st.integers(1, 5000))
def test_padded_lengths_are_few_and_waste_little(count):
    found = padded_length(count)
    assert count <= found
    assert found - count < max(2, count / 16)
    assert padded_length(found) == found
    assert len({padded_length(n) for n in range(1, 257)}) == 64


def test_padding_is_not_among_the_tokens_of_a_padded_batch(stand_in):
    inputs, batch = PaddedBatch(stand_in.xp, 4, 8, 4), small_batch(1, 2)
    inputs.fill(batch)
    found = [(to_host(order) >= 0).sum() for order in inputs.sorted_tokens.values()]
    assert found == [(ids > 0).sum() for ids in (batch.source, batch.target[:, :-1])]


def test_libraries_that_are_missing_are_named(monkeypatch):
    def current():
        raise ImportError("Failure finding libcublas\nlooked in many places")

    monkeypatch.setattr(device, "current", current)
    monkeypatch.setenv("CUPY_TF32", "0")
    with pytest.raises(RuntimeError, match=r"libraries of CUDA: .*libcublas\)$"):
        device.set_tf32(False)


@pytest.mark.parametrize("graphs", [False, True])
def test_no_two_parts_have_the_same_noise(stand_in, monkeypatch, graphs):
    """Of two steps, two accumulated batches, two ranks, and two parts of each."""
    monkeypatch.setattr(GpuModel, "_compute", lambda self, *inputs: None)
    keys, reseed = set(), PhiloxStream.reseed

    def remember(stream, key):
        keys.add(key)
        reseed(stream, key)

    monkeypatch.setattr(PhiloxStream, "reseed", remember)

    def work(communicator):
        stand_in.xp.cuda.Device(communicator.rank).use()
        model = gpu_model(stand_in.xp, 0.3, communicator=communicator, graphs=graphs)
        model.parts = 2
        for step in (1, 2):
            batches = [small_batch(0, 4), small_batch(1, 8)]
            model.forward_backward(batches, 0.1, (1, step))

    run_ranks(2, work)
    assert len(keys) == 16
    assert {key[:2] for key in keys} == {(1, 1), (1, 2)}
