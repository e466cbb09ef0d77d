"""What a GPU is asked to do in training, with arrays of NumPy in place of its own."""

import contextlib
import sys
import types

import numpy as np
import pytest
from conftest import assert_close
from hypothesis import given
from hypothesis import strategies as st
from test_distributed import together
from test_parallel import batch, small_model

from minitransformer.cuda import training
from minitransformer.cuda.device import graph_memory
from minitransformer.cuda.training import GpuModel, Inputs, rounded_up
from minitransformer.engine.precision import use_precision
from minitransformer.model.layers import ParameterBuffer
from minitransformer.settings.options import exit_code
from minitransformer.text.batches import Batch
from minitransformer.text.prefetch import Prefetcher
from minitransformer.training import parallel
from minitransformer.training.loss_scale import LossScale
from minitransformer.training.parallel import ThreadedModel


class OnDevice(np.ndarray):
    def set(self, host):
        self[...] = host


class CudaError(RuntimeError):
    """CuPy's error of a call of the driver."""


class Cuda:
    """As much of CuPy as training calls.

    What is computed while a stream records has no effect; the work is run again when
    the graph is launched.
    """

    def __init__(self, monkeypatch):
        self.said, self.work, self.watched, self.refuses = [], None, [], False
        self.xp = types.ModuleType("cupy")
        vars(self.xp).update({k: v for k, v in vars(np).items() if k[0] != "_"})
        self.xp.empty = lambda shape, dtype: np.empty(shape, dtype).view(OnDevice)
        self.xp.get_default_memory_pool = lambda: types.SimpleNamespace(
            free_all_blocks=lambda: self.said.append("freed")
        )
        self.xp.cuda = types.SimpleNamespace(
            Stream=lambda non_blocking: self,
            Device=lambda: types.SimpleNamespace(synchronize=lambda: None),
            get_current_stream=lambda: self,
            using_allocator=lambda malloc: contextlib.nullcontext(),
            MemoryPool=lambda allocate: types.SimpleNamespace(
                malloc=allocate,
                free_all_blocks=lambda: self.said.append("graphs freed"),
            ),
            MemoryPointer=lambda memory, offset: memory,
            runtime=types.SimpleNamespace(CUDARuntimeError=CudaError),
        )
        cupyx = types.ModuleType("cupyx")
        cupyx.empty_pinned = np.empty
        monkeypatch.setitem(sys.modules, "cupyx", cupyx)
        monkeypatch.setattr(parallel, "array_module", lambda array: self.xp)
        compute = GpuModel._compute

        def remembered(model, *arguments):
            self.work = lambda: compute(model, *arguments)
            self.watched = [model.parameters.grad, model._loss]
            self.work()

        monkeypatch.setattr(GpuModel, "_compute", remembered)

    def use(self):
        pass

    def synchronize(self):
        self.said.append("waited")

    def record(self):
        return types.SimpleNamespace(synchronize=lambda: self.said.append("copied"))

    def begin_capture(self):
        if self.refuses:
            raise CudaError("operation not permitted when stream is capturing")
        self.said.append("recorded")
        self.before = [array.copy() for array in self.watched]

    def end_capture(self):
        if self.refuses:
            raise CudaError("operation would result in a merge")
        for array, before in zip(self.watched, self.before, strict=True):
            array[...] = before
        work = self.work
        return types.SimpleNamespace(
            launch=lambda: (self.said.append("launched"), work())
        )


@pytest.fixture
def cuda(monkeypatch):
    return Cuda(monkeypatch)


def gpu_model(dropout=0.0, log=print, **options):
    model = small_model(dropout, "float32")
    parameters = ParameterBuffer(model)
    scale = LossScale(np, "fp32")
    return GpuModel(model, parameters, scale, log=log, **options)


def float64_model():
    model = small_model()
    return ThreadedModel(model, ParameterBuffer(model), 1)


def trimmed(seed, sentences, source, target):
    full = batch(seed, sentences)
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


def test_a_graph_of_each_shape_is_recorded_once_and_replayed(cuda):
    found = steps(gpu_model(0.3))
    again = ["copied", "launched"]
    assert cuda.said == ["recorded", *again, "recorded", *again]
    cuda.said.clear()
    expected = steps(gpu_model(0.3, graphs=False))
    assert cuda.said == []
    for (loss, gradient), (other, plain) in zip(found, expected, strict=True):
        assert loss == other
        np.testing.assert_array_equal(gradient, plain)


def test_padding_to_a_shape_changes_nothing(cuda):
    threaded = float64_model()
    for (loss, gradient), (other, plain) in zip(
        steps(gpu_model()), steps(threaded), strict=True
    ):
        assert_close(loss, other, "float32")
        assert_close(gradient, plain, "float32")


def test_without_graphs_it_goes_on_and_says_so(cuda):
    cuda.refuses, said = True, []
    found = steps(gpu_model(log=said.append))
    [line] = said
    assert line.startswith("graphs      none, work is launched kernel by kernel: ")
    expected = steps(gpu_model(graphs=False))
    assert [loss for loss, _ in found] == [loss for loss, _ in expected]


def test_ranks_share_batches_whatever_their_memory():
    batches = [batch(0, 7), batch(1, 2)]
    threaded = float64_model()
    loss = threaded.gradient(batches, 0.1, (1, 1))

    def work(ranks):
        model = gpu_model(communicator=ranks)
        model.parts = 1 + ranks.rank
        return model.gradient(batches, 0.1, (1, 1)), model.parameters.grad

    for other, found in together(3, work):
        assert_close(other, loss, "float32")
        assert_close(found, threaded.parameters.grad, "float32")


def few_rows(monkeypatch, most):
    compute = GpuModel._compute

    def limited(self, inputs, *rest):
        compute(self, inputs, *rest)
        if len(inputs.source) > most:
            raise MemoryError

    monkeypatch.setattr(GpuModel, "_compute", limited)


def test_out_of_memory_halves_what_is_computed_at_once(cuda, monkeypatch):
    said = []
    whole, model = gpu_model(), gpu_model(log=said.append)
    loss = whole.gradient([batch(0, 13)], 0.1, (1, 1))
    few_rows(monkeypatch, 4)
    assert_close(model.gradient([batch(0, 13)], 0.1, (1, 1)), loss, "float32")
    assert_close(model.parameters.grad, whole.parameters.grad, "float32")
    assert model.parts == 4
    assert "not enough for 78 + " in said[0]
    assert "computed in 2 parts" in said[0]
    assert "--max-tokens" in said[0]
    assert "computed in 4 parts" in said[1]
    freed = [word for word in cuda.said if word == "waited" or "freed" in word]
    assert freed == 2 * ["waited", "graphs freed", "freed"]


def test_one_sentence_that_memory_does_not_hold_is_named(cuda, monkeypatch):
    few_rows(monkeypatch, 0)
    with pytest.raises(RuntimeError, match=r"memory with 6 source and 4 target"):
        gpu_model(log=[].append).gradient([batch(0, 3)], 0.1, (1, 1))


def test_out_of_memory_elsewhere_is_one_line(capsys):
    def work():
        raise MemoryError("Out of memory allocating 512 bytes")

    assert exit_code("train.py", work) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert "out of memory, try a lower --max-tokens" in line


def test_the_graphs_memory_is_never_given_back_to_make_room(cuda):
    tries = []

    def memory(size):
        tries.append(size)
        if len(tries) < 2 or size > 100:
            raise CudaError("cudaErrorMemoryAllocation: out of memory")
        return f"{size} bytes"

    cuda.xp.cuda.Memory = memory
    pool = graph_memory(cuda.xp)
    assert pool.malloc(8) == "8 bytes"
    assert cuda.said == ["freed"]
    with pytest.raises(MemoryError, match="out of memory"):
        pool.malloc(1000)


@given(st.integers(1, 5000))
def test_the_ladder_has_few_steps_and_wastes_little(count):
    found = rounded_up(count)
    assert count <= found
    assert found - count < max(2, count / 16)
    assert rounded_up(found) == found
    assert len({rounded_up(n) for n in range(1, 257)}) == 64


def test_inputs_forget_the_last_batch():
    inputs = Inputs(np, 8, 8, 8)
    inputs.fill(batch(0, 8))
    inputs.fill(trimmed(1, 2, 3, 4))
    assert (inputs.source[2:] == 0).all()
    assert (inputs.source[:, 3:] == 0).all()
    np.testing.assert_array_equal(inputs.target[:2, :5], trimmed(1, 2, 3, 4).target)


class Numbers:
    """Counts, as a stream of batches of three an epoch."""

    epoch = position = 0

    def __next__(self):
        if self.position == 3:
            self.epoch, self.position = self.epoch + 1, 0
        self.position += 1
        return self.epoch, self.position


def test_reading_ahead_stands_where_nothing_was_read_ahead():
    ahead, plain = Prefetcher(Numbers()), Numbers()
    for _ in range(10):
        assert (ahead.epoch, ahead.position) == (plain.epoch, plain.position)
        assert next(ahead) == next(plain)


def test_libraries_that_are_missing_are_named(monkeypatch):
    device = types.ModuleType("minitransformer.cuda.device")

    def current():
        raise ImportError("Failure finding libcublas\nlooked in many places")

    device.current = current
    monkeypatch.setitem(sys.modules, "minitransformer.cuda.device", device)
    with pytest.raises(RuntimeError, match=r"libraries of CUDA: .*libcublas\)$"):
        use_precision("bf16", types.ModuleType("cupy"))


def test_many_shapes_do_not_take_all_memory(cuda, monkeypatch):
    monkeypatch.setattr(training, "MOST_GRAPHS", 1)
    steps(gpu_model())
    assert cuda.said.count("recorded") == 1
    assert cuda.said.count("launched") == 2


def test_what_is_being_copied_is_kept(cuda, monkeypatch):
    monkeypatch.setattr(training, "MOST_IN_FLIGHT", 1)
    steps(gpu_model(graphs=False))
    assert cuda.said == ["copied"] * 3
