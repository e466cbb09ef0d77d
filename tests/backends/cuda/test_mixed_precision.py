"""16-bit copies, loss scaling and steps on a GPU, by kernels built for the host."""

from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minitransformer.backends.cuda.device import choose_precision, set_tf32
from minitransformer.backends.cuda.optimizer import GpuAdam
from minitransformer.backends.cuda.training import GpuModel
from minitransformer.backends.devices import open_device
from minitransformer.engine.backend import to_host
from minitransformer.model.parameters import ParameterBuffer
from minitransformer.model.transformer import Transformer
from minitransformer.settings.config import ModelConfig, TrainingConfig
from minitransformer.settings.options import UsageError
from minitransformer.text.batches import Batch
from minitransformer.training import loss_scale
from minitransformer.training.loss_scale import LossScale
from minitransformer.training.optimizer import Adam
from minitransformer.training.parallel import CpuModel
from support.closeness import assert_close
from support.models import small_batch, tiny_config

CONFIG = tiny_config(vocab_size=20, d_model=64, d_ff=128, num_heads=4, dropout=0.0)
# |got - expected| <= tolerance * |expected|, in Euclidean norms of whole gradients,
# where no ReLU is near zero: rounding turns some over, and each changes a gradient by
# more than this. In a small model of six layers on each side the gradients differ by
# 0.4%, 0.05% and 0.04%; with ReLUs near zero by 5.3%, 2.3% and 1.7%. A GPU may drop
# the bits that tf32 has not, where the stand-in rounds: then they differ by 0.17%.
STEP_TOLERANCES = {"fp32": 1e-5, "bf16": 1e-2, "fp16": 2e-3, "tf32": 4e-3}
ACTIVE = 3.0  # added to the biases before each ReLU


@pytest.mark.parametrize(
    ("capability", "asked", "expected"),
    [
        (90, None, "bf16"),
        (80, None, "bf16"),
        (75, None, "fp32"),
        (75, "fp16", "fp16"),
        (90, "tf32", "tf32"),
    ],
)
def test_a_gpu_computes_in_bf16_if_it_can(capability, asked, expected):
    assert choose_precision(asked, capability) == expected


def test_a_precision_that_the_device_lacks_is_refused():
    assert open_device("cpu").precision == open_device("cpu", "fp32").precision
    assert open_device("cpu").precision == "fp32"
    with pytest.raises(UsageError, match="fp32 or bf16 with --device cpu"):
        open_device("cpu", "fp16")
    expected = r"expected fp32 or fp16 on this GPU \(compute capability 7.5\), got bf16"
    with pytest.raises(UsageError, match=expected):
        choose_precision("bf16", 75)
    with pytest.raises(UsageError, match=r"fp32 or fp16 on this GPU .*, got int8"):
        choose_precision("int8", 75)


@given(st.lists(st.booleans(), max_size=30))
def test_the_scale_halves_on_overflow_and_doubles_after_a_while(steps):
    growth, loss_scale.GROWTH_STEPS = loss_scale.GROWTH_STEPS, 3
    scale = LossScale(np, "fp16")
    for finite in steps:
        scale.update(np.asarray(finite))
    loss_scale.GROWTH_STEPS = growth
    history = "".join("." if finite else "x" for finite in steps)
    stretches = [len(stretch) for stretch in history.split("x")]
    doublings = sum(length // 3 for length in stretches)
    assert scale.factor == 65536 * 2.0 ** (doublings - history.count("x"))
    assert scale.finite_steps == stretches[-1] % 3
    again = LossScale(np, "fp16", (float(scale.factor), int(scale.finite_steps)))
    assert (again.factor, again.finite_steps) == (scale.factor, scale.finite_steps)
    assert again.factor.dtype == np.float32


def test_only_fp16_scales_its_loss():
    for name in ("fp32", "tf32", "bf16"):
        scale = LossScale(np, name, (8.0, 1))
        scale.update(np.asarray(False))
        assert scale.factor == 1


def active_model(config, dtype="float32"):
    """A model of random float32 numbers whose ReLUs are not near zero."""
    model, exact = Transformer(config, seed=1, dtype=dtype), Transformer(config, seed=1)
    for (name, parameter), (_, source) in zip(
        model.named_parameters(), exact.named_parameters(), strict=True
    ):
        parameter.data[...] = source.data
        if name.endswith("bias_1"):
            parameter.data += ACTIVE
    return model


def reference(batches, config=CONFIG):
    """Loss and gradient in float64, of batches that are not padded further."""
    model = active_model(config, "float64")
    parameters = ParameterBuffer(model)
    threaded = CpuModel(model, parameters, 1)
    loss = threaded.forward_backward(batches, 0.1, (1, 1))
    threaded.close()
    return loss, parameters


def model_on(device, config=CONFIG):
    model = active_model(config)
    parameters = ParameterBuffer(model)
    parameters.move_to(device.xp, device.low_precision)
    scale = LossScale(device.xp, device.precision)
    return GpuModel(model, parameters, scale), parameters, scale


@pytest.mark.parametrize("name", STEP_TOLERANCES)
def test_a_mixed_precision_step_follows_float64(stand_in, name):
    batches = [small_batch(0, 5), small_batch(1, 2)]
    loss, expected = reference(batches)
    gpu_model, parameters, scale = model_on(open_device("cuda", name))
    for parts in (1, 3) if name == "fp32" else (1,):
        gpu_model.parts = parts
        found = gpu_model.forward_backward(batches, 0.1, (1, 1))
        assert float(found) == pytest.approx(loss, rel=STEP_TOLERANCES[name])
        gradient = to_host(parameters.grad).astype(float) / float(scale.factor)
        difference = gradient - expected.grad
        size = np.linalg.norm(expected.grad)
        assert np.linalg.norm(difference) <= STEP_TOLERANCES[name] * size
    clip = 0.5 * np.linalg.norm(gradient)
    training = TrainingConfig(clip_norm=float(clip))
    gpu_adam = GpuAdam(parameters, training, scale)
    adam = Adam(expected.data, training.beta1, training.beta2, training.epsilon)
    for _ in range(2):
        norm, finite = gpu_adam.step(parameters.grad, found, 1e-3)
        adam.update(gradient, 1e-3, 0.5)
        assert finite
        assert float(norm) == pytest.approx(2 * clip, rel=1e-5)
    assert_close(to_host(parameters.data), expected.data, "float32")
    if (low := parameters.low_precision) is not None:
        copy = to_host(parameters.data).astype(low.dtype)
        np.testing.assert_array_equal(to_host(low), copy)


def step_of(**sizes):
    """A batch of six layers on each side, and its loss and gradient in float64."""
    config = ModelConfig(dropout=0.0, **sizes)
    rng = np.random.default_rng(0)
    source, target = rng.integers(4, config.vocab_size, (2, 4, 9))
    source[2:, 6:] = target[3:, 5:] = 0
    one = Batch(source, target)
    return config, one, *reference([one], config)


@pytest.fixture(scope="module")
def step_of_base_on_a_gpu():
    return step_of()


@pytest.fixture(scope="module")
def step_of_narrow():
    return step_of(vocab_size=300, d_model=32, d_ff=128, num_heads=4)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["narrow", "base_on_a_gpu"])
@pytest.mark.parametrize("name", STEP_TOLERANCES)
def test_a_deep_step_with_graphs_follows_float64(request, where, name):
    """A narrow model on the stand-in, and base (Table 3) on a GPU."""
    if where == "narrow":
        request.getfixturevalue("stand_in")
    else:
        cupy = pytest.importorskip("cupy", reason="no GPU without CuPy")
        if not cupy.cuda.is_available():
            pytest.skip("no GPU")
        # The real device outlives this test: the next one may compute in float32.
        request.addfinalizer(partial(set_tf32, False))
    config, one, loss, expected = request.getfixturevalue(f"step_of_{where}")
    gpu_model, parameters, scale = model_on(open_device("cuda", name), config)
    assert len(gpu_model._graphs) == 0
    for graphs in (1, 1):  # the first is recorded, the second replayed
        found = float(gpu_model.forward_backward([one], 0.1, (1, 1)))
        assert len(gpu_model._graphs) == graphs
        assert found == pytest.approx(loss, rel=STEP_TOLERANCES[name])
        difference = parameters.grad.get() / float(scale.factor) - expected.grad
        size = np.linalg.norm(expected.grad)
        assert np.linalg.norm(difference) <= STEP_TOLERANCES[name] * size
