"""16-bit copies, loss scaling and steps on a GPU, by kernels built for the host."""

import functools
from contextlib import closing

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minitransformer.backends.cuda.device import choose_precision, set_tf32
from minitransformer.backends.cuda.training import GpuModel
from minitransformer.backends.devices import open_device
from minitransformer.engine.backend import to_host
from minitransformer.model.parameters import ParameterBuffer
from minitransformer.model.transformer import Transformer
from minitransformer.settings.config import ModelConfig
from minitransformer.settings.options import UsageError
from minitransformer.text.batches import Batch
from minitransformer.training import loss_scale
from minitransformer.training.loss_scale import LossScale
from minitransformer.training.parallel import CpuModel

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


@functools.cache
def step_of(**sizes):
    """A batch of six layers on each side, and its loss and gradient in float64."""
    config = ModelConfig(dropout=0.0, **sizes)
    rng = np.random.default_rng(0)
    source, target = rng.integers(4, config.vocab_size, (2, 3, 7))
    source[1:, 5:] = target[2:, 4:] = 0
    model = active_model(config, "float64")
    parameters, batch = ParameterBuffer(model), Batch(source, target)
    with closing(CpuModel(model, parameters, 1)) as computed:
        loss = computed.forward_backward([batch], 0.1, (1, 1))
    return config, batch, loss, parameters.grad


NARROW = {"vocab_size": 100, "d_model": 32, "d_ff": 64, "num_heads": 2}


@pytest.mark.parametrize(
    ("gpu", "sizes"),
    [("host", NARROW), pytest.param("gpu", {}, marks=pytest.mark.slow)],
    indirect=["gpu"],
    ids=["narrow_on_the_stand_in", "base_on_a_gpu"],
)
@pytest.mark.parametrize("name", STEP_TOLERANCES)
def test_a_deep_step_with_graphs_follows_float64(request, gpu, sizes, name):
    """A narrow model on the stand-in, and base (Table 3) on a GPU."""
    # The real device outlives this test: the next one may compute in float32.
    request.addfinalizer(functools.partial(set_tf32, False))
    config, batch, loss, expected = step_of(**sizes)
    device, model = open_device("cuda", name), active_model(config)
    parameters = ParameterBuffer(model)
    parameters.move_to(device.xp, device.low_precision)
    if (low := parameters.low_precision) is not None:
        copy = to_host(parameters.data).astype(low.dtype)
        np.testing.assert_array_equal(to_host(low), copy)
    scale = LossScale(device.xp, device.precision)
    gpu_model = GpuModel(model, parameters, scale)
    for _ in range(2):  # the first is recorded, the second replayed
        found = float(gpu_model.forward_backward([batch], 0.1, (1, 1)))
        assert len(gpu_model._graphs) == 1
        assert found == pytest.approx(loss, rel=STEP_TOLERANCES[name])
        difference = parameters.grad.get() / float(scale.factor) - expected
        size = np.linalg.norm(expected)
        assert np.linalg.norm(difference) <= STEP_TOLERANCES[name] * size
