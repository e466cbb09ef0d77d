"""CUDA kernels against the reference operations in float64.

Each test runs with kernels built for the host, and on a GPU where there is one.
"""

import math
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from minitransformer.backends.cuda import device
from minitransformer.backends.cuda import ops as fused
from minitransformer.backends.cuda.optimizer import GpuAdam
from minitransformer.backends.cuda.philox import PhiloxStream
from minitransformer.engine.autograd import PRIMITIVES, Tensor, dense
from minitransformer.engine.backend import array_module, to_host
from minitransformer.settings.config import TrainingConfig
from minitransformer.training.loss_scale import LossScale
from minitransformer.training.optimizer import Adam
from support.closeness import assert_close
from support.host_blas import DTYPES
from support.philox import HostPhilox
from support.strict_cupy import GpuState

# The operations but for attention, with the places of parameters among their arrays.
PARAMETERS = {
    "dropout": (),
    "linear": (1, 2),
    "embedding": (0, 2),
    "add_layer_norm": (2, 3),
    "projected_cross_entropy": (1,),
}
# A warp's vectors, a block's columns, and the widest LayerNorm end at these.
WIDTHS = st.integers(1, 40) | st.sampled_from([264, 511, 515, 1023, 1024])


def case(name, seed, rows, width, columns, rate):
    """Arrays of a call in float64, float32 vectors and ids apart, and its options."""
    rng = np.random.default_rng(seed)
    draw, noise = rng.standard_normal, {"rate": rate} if rate else {}
    if name == "dropout":
        return [draw((2, rows, width))], {"rate": rate}
    if name == "linear":
        inputs = [draw((2, rows, width)), draw((width, columns)) / math.sqrt(width)]
        # Quarters are not rounded to 16 bits: so no ReLU is turned over.
        bias = rng.integers(-15, 16, columns) / 4
        return inputs + [bias] * (seed % 2), {"relu": bool(seed & 2)}
    if name == "embedding":
        ids = rng.integers(0, columns, (4, 2 * rows))[:, ::2]
        ids[:, :3] = 0
        arrays = [draw((columns, width)), ids, draw((rows + 2, width))]
        return arrays, {"scale": 1.7, **noise}
    if name == "add_layer_norm":
        # Sums of quarters, and their doubles, have no rounding in 16 bits.
        both = rng.integers(-15, 16, (2, 2, rows, width)) / 4
        return [*both, draw(width), draw(width)], noise
    assert name == "projected_cross_entropy"
    table = draw((columns, width)) / math.sqrt(width)
    targets = rng.integers(0, columns, (2, rows))
    targets[0, 0], targets[-1, -1] = 0, columns - 1
    options = {"label_smoothing": 0.1 * (seed % 2), "padding_id": 0}
    return [draw((2, rows, width)), table, targets], options


def converted(gpu, arrays, dtype):
    """Round to `dtype`, vectors to float32: for the device, and in float64."""
    arrays = [
        a if a.dtype.kind != "f" else a.astype(np.float32 if a.ndim == 1 else dtype)
        for a in arrays
    ]
    wide = [a if a.dtype.kind in "ib" else a.astype(np.float64) for a in arrays]
    return [gpu.xp.asarray(a) for a in arrays], wide


@settings(max_examples=100, suppress_health_check=list(HealthCheck))
@given(
    name=st.sampled_from([*PARAMETERS]),
    seed=st.integers(0, 1000),
    rows=st.integers(1, 40),
    width=WIDTHS,
    columns=WIDTHS,
    rate=st.sampled_from([0.0, 0.5]),
    dtype=st.sampled_from([*DTYPES]),
)
# More ids than the threads of a block; rows longer than what a block holds of them.
@example("embedding", 1, 40, 1030, 3, 0.5, "float32")
@example("add_layer_norm", 1, 53, 515, 1, 0.5, "bfloat16")
@example("projected_cross_entropy", 5, 1, 8, 40_965, 0.0, "float32")
@example("projected_cross_entropy", 5, 1, 8, 40_965, 0.0, "bfloat16")
def test_kernels_follow_the_reference(
    gpu, name, seed, rows, width, columns, rate, dtype
):
    """The loss in chunks; and any order of threads gives the same bits."""
    arrays, options = case(name, seed, rows, width, columns, rate)
    inputs, wide = converted(gpu, arrays, DTYPES[dtype])

    def noise(stream):
        return {"rng": stream} if "rate" in options else {}

    # The output and gradients of the reference, in float64.
    reference = PRIMITIVES[name](*wide, **options, **noise(HostPhilox((5,))))
    expected, expected_vjp = reference
    is_loss = name == "projected_cross_entropy"
    g = np.asarray(np.random.default_rng(9).standard_normal(expected.shape))
    g = g.astype(np.float32 if is_loss else DTYPES[dtype])
    expected = [expected, *map(dense, expected_vjp(g.astype(float)))]

    # Those of the kernels, in both orders of threads.
    runs = []
    for backwards in (False, True):
        with (
            patch.object(GpuState, "backwards", backwards),
            patch.object(fused, "LOGITS_PER_CHUNK", 1),
            patch.object(fused, "ROWS_PER_TILE", 16),
        ):
            stream = PhiloxStream((5,), gpu.xp)
            out, vjp = fused.OPERATIONS[name](*inputs, **options, **noise(stream))
            runs.append([out, *map(dense, vjp(gpu.xp.asarray(g)))])

    # The output comes first, then the gradient of each array.
    for i, (got, again, wanted) in enumerate(
        zip(*runs, expected, strict=True), start=-1
    ):
        if wanted is None:
            assert got is None
            continue
        in_float32 = i in PARAMETERS[name] or (is_loss and i < 0)
        assert got.dtype == (np.float32 if in_float32 else DTYPES[dtype])
        assert got.shape == wanted.shape
        assert_close(to_host(got).astype(float), wanted, dtype)
        assert to_host(got).tobytes() == to_host(again).tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_matrix_products_take_contiguous_rows_or_columns(gpu, dtype):
    rng = np.random.default_rng(0)

    def draw(*shape):
        values = rng.standard_normal(shape).astype(DTYPES[dtype])
        return gpu.xp.asarray(values)

    def wide(x):
        return to_host(x).astype(float)

    for a, b in [
        (draw(5, 7), draw(7, 3)),
        (draw(7, 5).T, draw(3, 7).T),
        (draw(5, 14)[:, :7], draw(7, 9)[:, 2:5]),
        (draw(1, 7), draw(7, 1)),
        (draw(5, 1), draw(1, 3)),
    ]:
        shape = len(a), b.shape[1]
        expected = wide(a) @ wide(b)
        for dtype_out in {DTYPES[dtype], np.float32}:
            out = gpu.xp.asarray(np.ones((shape[0], shape[1] + 3), dtype_out))
            gpu.matmul(a, b, out[..., :-3], beta=2.0)
            name = dtype if dtype_out is not np.float32 else "float32"
            assert_close(wide(out)[..., :-3], expected + 2, name)
            assert (wide(out)[..., -3:] == 1).all()


def gpu_adam(gpu, data, low_precision=None, clip=None):
    """An optimizer of some parameters, with a loss scale of 8."""
    parameters = SimpleNamespace(data=gpu.xp.asarray(data.astype(np.float32)))
    parameters.low_precision = None
    if low_precision is not None:
        parameters.low_precision = gpu.xp.zeros(len(data), DTYPES[low_precision])
    scale = LossScale(gpu.xp, "fp16", (8.0, 0))
    return GpuAdam(parameters, TrainingConfig(clip_norm=clip), scale)


@pytest.mark.parametrize("low_precision", [None, "float16", "bfloat16"])
@pytest.mark.parametrize("clip", [None, 2.0])
def test_fused_adam_equals_the_reference(gpu, low_precision, clip):
    rng = np.random.default_rng(1)
    start, *gradients = rng.standard_normal((3, 3001))
    training = TrainingConfig()
    constants = training.beta1, training.beta2, training.epsilon
    adam = Adam(start.copy(), *constants, clip_norm=clip)
    fused_adam = gpu_adam(gpu, start, low_precision, clip)
    for gradient in gradients:
        scaled = gpu.xp.asarray((8 * gradient).astype(np.float32))
        found = fused_adam.step(scaled, None, 0.01)
        expected = adam.step(gradient, 0.0, 0.01)
        assert_close([float(x) for x in found], expected, "float32")
    parameters = fused_adam.parameters
    for got, expected in [
        (parameters.data, adam.parameters),
        (fused_adam.first_moment, adam.first_moment),
        (fused_adam.second_moment, adam.second_moment),
    ]:
        assert_close(to_host(got), expected, "float32")
    if low_precision is not None:
        rounded = to_host(parameters.data).astype(DTYPES[low_precision])
        assert (to_host(parameters.low_precision) == rounded).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_gradient_that_is_not_finite_changes_nothing(gpu, bad):
    gradient = np.ones(300, np.float32)
    gradient[123] = bad
    adam = gpu_adam(gpu, np.ones(300))
    adam.restore(4, np.ones(300, np.float32), np.ones(300, np.float32))
    norm, finite = adam.step(gpu.xp.asarray(gradient), None, 0.01)
    assert not finite
    assert not np.isfinite(float(norm))
    assert adam.steps == 4
    for array in (adam.parameters.data, adam.first_moment, adam.second_moment):
        assert (to_host(array) == 1).all()


def parameter_of(array):
    """A parameter with a gradient of zeros."""
    parameter = Tensor(array, requires_grad=True)
    parameter.grad = array_module(array).zeros(array.shape, np.float32)
    return parameter


@pytest.mark.parametrize("name", ["linear", "embedding", "add_layer_norm"])
def test_gradients_of_parameters_are_added_in_place(gpu, name):
    """What a vjp returns elsewhere is in `grad` twice after two, and not returned."""
    arrays, options = case(name, 5, rows=9, width=20, columns=7, rate=0.0)
    inputs, _ = converted(gpu, arrays, np.float32)
    parameters = [parameter_of(inputs[place]) for place in PARAMETERS[name]]
    buffer = SimpleNamespace(parameters=dict(enumerate(parameters)))

    def gradients():
        out, vjp = fused.OPERATIONS[name](*inputs, **options)
        found = vjp(gpu.xp.ones(out.shape, out.dtype))
        return [found[place] for place in PARAMETERS[name]]

    expected = [to_host(gradient) for gradient in gradients()]
    with fused.adding_to(buffer):
        assert [*gradients(), *gradients()] == 4 * [None]
    for parameter, gradient in zip(parameters, expected, strict=True):
        assert_close(to_host(parameter.grad), 2 * gradient, "float32")
    assert all(gradient is not None for gradient in gradients())


def test_positions_that_are_not_learned_get_no_gradient(gpu):
    arrays, options = case("embedding", 4, rows=9, width=20, columns=7, rate=0.0)
    inputs, _ = converted(gpu, arrays, np.float32)
    learned = SimpleNamespace(parameters={"table": parameter_of(inputs[0])})
    with fused.adding_to(learned):
        out, vjp = fused.embedding(*inputs, **options)
        assert vjp(out)[2] is None


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_add_up_in_new_arrays(gpu, dtype):
    """Also where one is a part of a larger array."""
    rng = np.random.default_rng(2)
    a, b = rng.standard_normal((2, 5, 77)).astype(DTYPES[dtype])
    inputs = gpu.xp.asarray(a), gpu.xp.asarray(np.stack([b, b], axis=1))[:, 0]
    assert (to_host(fused.add_arrays(*inputs)) == a + b).all()
    assert (to_host(inputs[0]) == a).all()


def test_masked_rows_and_large_scores_stay_finite(gpu):
    """A row without keys attends evenly, large scores and logits do not overflow."""
    xp = gpu.xp
    q = xp.asarray(np.random.default_rng(0).standard_normal((1, 2, 8), np.float32))
    nothing = xp.zeros((1, 1, 1, 2), bool)
    out, _ = fused.attention(q, q, q, nothing, num_heads=2)
    mean = to_host(q).mean(axis=1, keepdims=True)
    assert_close(to_host(out), np.broadcast_to(mean, (1, 2, 8)), "float32")
    out, vjp = fused.attention(q * 1e4, q * 1e4, q, num_heads=2)
    assert all(np.isfinite(to_host(g)).all() for g in (out, *vjp(q)[:3]))
    targets, options = xp.ones((1, 2), np.int64), {"label_smoothing": 0.1}
    loss, _ = fused.projected_cross_entropy(
        q * 1e4, q[0], targets, padding_id=0, **options
    )
    assert np.isfinite(to_host(loss))
    loss, vjp = fused.projected_cross_entropy(q, q[0], targets, padding_id=1, **options)
    assert loss == 0
    assert not any(to_host(g).any() for g in vjp(xp.ones((), np.float32))[:2])


def test_relu_passes_nan_on(gpu):
    x = gpu.xp.asarray(np.array([[np.nan, 1.0], [1.0, 1.0]], np.float32))
    out, _ = fused.linear(x, gpu.xp.ones((2, 3), np.float32), relu=True)
    assert np.isnan(to_host(out)).tolist() == [[True] * 3, [False] * 3]


def test_arrays_that_kernels_do_not_take_go_to_the_reference():
    x, wide = np.ones((2, 4), np.float32), np.ones((2, 4))
    half, broad = x.astype(np.float16), np.ones((1, fused.MAX_WIDTH + 1), np.float32)
    taken = (
        ("linear", x, x.T, x[0]),
        ("linear", half, half.T, x[0]),
        ("embedding", half, np.ones(2, int), x),
        ("add_layer_norm", x, x, x[0], x[0]),
    )
    for name, *arrays in taken:
        assert fused.find_kernel(name, tuple(arrays)) is fused.OPERATIONS[name]
    assert fused.find_kernel("add_arrays", (x, x)) is fused.add_arrays
    for name, *arrays in (
        ("linear", wide, wide.T),
        ("linear", half, x.T),
        ("linear", half, half.T, half[0]),
        ("add_layer_norm", broad, broad, broad[0], broad[0]),
        ("add", x, x),
        ("transpose", half),
        ("add_arrays", wide, wide),
    ):
        assert fused.find_kernel(name, tuple(arrays)) is None


@pytest.mark.parametrize("largest", [20, 2**31 - 2])
def test_tokens_are_sorted_by_id_and_then_by_place(gpu, largest):
    ids = np.random.default_rng(3).integers(0, 20, (7, 100))
    ids[ids == 19] = largest
    for found in (
        fused.sort_tokens(ids),
        to_host(fused.sort_tokens(gpu.xp.asarray(ids))),
    ):
        order = np.argsort(ids, axis=None, kind="stable")
        assert (found & 0xFFFFFFFF == order).all()
        assert (found >> 32 == ids.reshape(-1)[order]).all()


def test_an_order_may_leave_tokens_out(gpu):
    """Those of a negative id get no gradient."""
    arrays, _ = case("embedding", 3, rows=9, width=20, columns=7, rate=0.0)
    (table, ids, positions), _ = converted(gpu, arrays, np.float32)
    order = fused.sort_tokens(ids)
    order[order >> 32 == 1] = -1
    out, vjp = fused.embedding(table, ids, positions)
    g = gpu.xp.asarray(np.random.default_rng(2).standard_normal(out.shape, np.float32))
    parameter = parameter_of(table)
    expected = to_host(vjp(g)[0])
    expected[1] = 0
    orders = {device.address(ids): order}
    with fused.adding_to(SimpleNamespace(parameters={"table": parameter}), orders):
        vjp(g)
    assert (to_host(parameter.grad) == expected).all()
