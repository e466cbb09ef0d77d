"""CUDA kernels against the reference operations in float64.

Each test runs with kernels built for the host, and on a GPU where there is one.
"""

import inspect
import math
import re
import shutil
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from minitransformer.backends.cuda import device
from minitransformer.backends.cuda import ops as fused
from minitransformer.backends.cuda.optimizer import GpuAdam
from minitransformer.backends.cuda.philox import PhiloxStream
from minitransformer.engine.autograd import PRIMITIVES, Tensor, dense
from minitransformer.engine.backend import Backend, to_host
from minitransformer.model.transformer import Transformer, training_loss
from minitransformer.settings.config import TrainingConfig
from minitransformer.training.loss_scale import LossScale
from minitransformer.training.optimizer import Adam
from support.closeness import assert_close
from support.cuda import backend_for
from support.models import tiny_config
from support.philox import HostPhilox

ml_dtypes = pytest.importorskip("ml_dtypes", reason="no bfloat16 without ml_dtypes")

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def case(name, seed):
    """Arrays of a call in float64, float32 vectors and ids apart, and its options."""
    rng = np.random.default_rng(seed)
    draw = rng.standard_normal
    n, d, v = [(3, 5, 7), (37, 40, 19), (9, 264, 131)][seed % 3]
    if name == "dropout":
        return [draw((2, n, d))], {"rate": 0.3}
    if name == "linear":
        inputs = [draw((2, n, d)), draw((d, v))]
        return inputs + [draw(v)] * (seed % 2), {"relu": seed > 1}
    if name == "embedding":
        ids = rng.integers(0, v, (20 if seed == 2 else 4, 2 * n))[:, ::2]
        ids[:, :3] = 1
        d = 1030 if seed == 3 else d
        return [draw((v, d)), ids, draw((n + 2, d))], {"scale": 1.7, "rate": 0.25}
    if name == "attention":
        heads, t, s = [(2, 3, 5), (3, 7, 33), (4, 1, 70)][seed % 3]
        d_k, d_v = [(8, 16), (5, 3), (16, 16)][seed % 3]
        shapes = (2, t, heads * d_k), (2, s, heads * d_k), (2, s, heads * d_v)
        mask = [
            [(rng.random((2, 1, 1, s)) < 0.7)],
            [np.tri(t, s, s - t, dtype=bool)],
            [],
        ][seed % 3]
        options = {"num_heads": heads, "rate": 0.2 * (seed % 2)}
        return [*(draw(shape) for shape in shapes), *mask], options
    if name == "add_layer_norm":
        d = [5, 40, 1024][seed % 3]
        inputs = [draw((2, n, d)) + 3, draw((2, n, d)), draw(d), draw(d)]
        return inputs, {"rate": 0.1 * (seed % 2)}
    assert name == "projected_cross_entropy"
    v = 2100 if seed == 5 else v
    inputs = [draw((2, n, d)), draw((v, d)) / math.sqrt(d), rng.integers(0, v, (2, n))]
    inputs[2][0, 0] = 0
    return inputs, {"label_smoothing": 0.1 * (seed % 2), "padding_id": 0}


def converted(gpu, arrays, dtype):
    """Round to `dtype`, vectors to float32: for the device, and in float64."""
    arrays = [
        a if a.dtype.kind != "f" else a.astype(np.float32 if a.ndim == 1 else dtype)
        for a in arrays
    ]
    wide = [a if a.dtype.kind in "ib" else a.astype(np.float64) for a in arrays]
    return [gpu.xp.asarray(a) for a in arrays], wide


def stream_of(key, xp):
    return HostPhilox(key) if xp is np else PhiloxStream(key, xp)


def noise(options, xp):
    """The same masks for both: those of counters."""
    return {**options, "rng": stream_of((5,), xp)} if "rate" in options else {}


def run_both(gpu, name, seed, dtype):
    arrays, options = case(name, seed)
    inputs, wide = converted(gpu, arrays, dtype)
    out, vjp = fused.OPERATIONS[name](*inputs, **{**options, **noise(options, gpu.xp)})
    expected, expected_vjp = PRIMITIVES[name](
        *wide, **{**options, **noise(options, np)}
    )
    upstream = np.random.default_rng(9).standard_normal(expected.shape)
    upstream = np.asarray(upstream).astype(to_host(out).dtype)
    gradients = [dense(g) for g in vjp(gpu.xp.asarray(upstream))]
    expected_gradients = [dense(g) for g in expected_vjp(upstream.astype(float))]
    return inputs, (out, gradients), (expected, expected_gradients)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", fused.OPERATIONS)
def test_kernels_follow_the_reference(gpu, name, seed, dtype):
    check_kernel(gpu, name, seed, dtype)


def check_kernel(gpu, name, seed, dtype):
    inputs, (out, gradients), (expected, wide) = run_both(
        gpu, name, seed, DTYPES[dtype]
    )
    is_loss = name == "projected_cross_entropy"
    assert out.dtype == (np.float32 if is_loss else DTYPES[dtype])
    assert_close(to_host(out).astype(float), expected, dtype)
    parameters = {"linear": (1, 2), "embedding": (0, 2), "add_layer_norm": (2, 3)}
    parameters["projected_cross_entropy"] = (1,)
    for i, (got, gradient) in enumerate(zip(gradients, wide, strict=True)):
        if gradient is None:
            assert got is None
            continue
        is_parameter = i in parameters.get(name, ())
        assert got.dtype == (np.float32 if is_parameter else DTYPES[dtype])
        assert got.shape == inputs[i].shape
        assert_close(to_host(got).astype(float), gradient, dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", fused.OPERATIONS)
def test_the_order_of_threads_changes_no_bit(stand_in, host_gpu, name, dtype):
    """No kernel reads what another thread has yet to write, or has overwritten."""
    results = []
    for backwards in (False, True):
        stand_in.backwards = backwards
        _, (out, gradients), _ = run_both(host_gpu, name, 1, DTYPES[dtype])
        results.append([out, *(g for g in gradients if g is not None)])
    for a, b in zip(*results, strict=True):
        assert to_host(a).tobytes() == to_host(b).tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 3), (101, 511), (53, 515), (31, 1023)])
def test_layer_norm_of_odd_shapes(stand_in, host_gpu, rows, width, dtype):
    """Blocks with several rows to walk, or too few; any order of threads, same bits."""
    rng, found = np.random.default_rng(rows), []
    arrays = [*rng.standard_normal((3, rows, width)), *rng.standard_normal((2, width))]
    inputs, wide = converted(host_gpu, arrays, DTYPES[dtype])
    (g, *inputs), (wide_g, *wide) = inputs, wide
    assert rows == 1 or rows > 2 * host_gpu.num_processors * fused.WARPS / 2
    for stand_in.backwards in (False, True):
        rate = {"rate": 0.3, "rng": PhiloxStream((5,), host_gpu.xp)}
        found.append(fused.add_layer_norm(*inputs, **rate)[1](g))
    rate["rng"] = HostPhilox((5,))
    expected = PRIMITIVES["add_layer_norm"](*wide, **rate)[1](wide_g)
    for got, again, gradient in zip(*found, expected, strict=True):
        assert_close(to_host(got).astype(float), gradient, dtype)
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


@pytest.mark.parametrize("name", ["linear", "embedding", "add_layer_norm"])
def test_gradients_of_parameters_are_added_in_place(gpu, name):
    """What a vjp returns elsewhere is in `grad` twice after two, and not returned."""
    arrays, options = case(name, 5)
    inputs, _ = converted(gpu, arrays, np.float32)
    places = {"linear": (1, 2), "embedding": (0, 2), "add_layer_norm": (2, 3)}[name]
    parameters = [Tensor(inputs[place], requires_grad=True) for place in places]
    for parameter in parameters:
        parameter.grad = gpu.xp.zeros(parameter.shape, np.float32)
    buffer = SimpleNamespace(parameters=dict(enumerate(parameters)))

    def gradients():
        out, vjp = fused.OPERATIONS[name](*inputs, **options, **noise(options, gpu.xp))
        found = vjp(gpu.xp.ones(out.shape, out.dtype))
        return [found[place] for place in places]

    options.pop("rate", None)
    expected = [to_host(gradient) for gradient in gradients()]
    with fused.adding_to(buffer):
        assert [*gradients(), *gradients()] == 4 * [None]
    for parameter, gradient in zip(parameters, expected, strict=True):
        assert_close(to_host(parameter.grad), 2 * gradient, "float32")
    assert all(gradient is not None for gradient in gradients())


def test_positions_that_are_not_learned_get_no_gradient(gpu):
    arrays, options = case("embedding", 4)
    (table, ids, positions), _ = converted(gpu, arrays, np.float32)
    parameter = Tensor(table, requires_grad=True)
    parameter.grad = gpu.xp.zeros(parameter.shape, np.float32)
    with fused.adding_to(SimpleNamespace(parameters={"table": parameter})):
        out, vjp = fused.embedding(table, ids, positions, scale=options["scale"])
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


def test_the_loss_in_chunks_follows_the_reference(gpu, monkeypatch):
    monkeypatch.setattr(fused, "LOGITS_PER_CHUNK", 1)
    monkeypatch.setattr(fused, "ROWS_PER_TILE", 16)
    check_kernel(gpu, "projected_cross_entropy", 1, "float32")


TINY = tiny_config(
    (2, 2),
    vocab_size=23,
    d_model=24,
    d_ff=40,
    num_heads=3,
    dropout=0.1,
    attention_dropout=0.1,
    relu_dropout=0.1,
)


def gradients_of(model, xp, batch):
    """Loss and gradients by name of a training step, with masks of counters."""
    rng = stream_of((3,), xp)
    loss = training_loss(model, *(xp.asarray(ids) for ids in batch), 0.1, rng)
    loss.backward(1 / 20)
    grads = {n: to_host(p.grad).astype(float) for n, p in model.named_parameters()}
    return float(to_host(loss.data)), grads


@pytest.mark.parametrize(
    ("dtype", "tolerance", "shift"),
    [("float32", 1e-5, 0), ("float16", 5e-3, 3), ("bfloat16", 2e-2, 3)],
)
@pytest.mark.parametrize("relu_dropout", [0.0, 0.1])
def test_a_training_step_follows_float64(gpu, dtype, tolerance, shift, relu_dropout):
    """In 16 bits with ReLUs that are not near zero, where rounding turns some over."""
    rng = np.random.default_rng(0)
    batch = rng.integers(3, 23, (3, 7)), rng.integers(3, 23, (3, 6))
    batch[0][1, 5:] = batch[1][2, 4:] = 0
    config = replace(TINY, relu_dropout=relu_dropout)
    model = Transformer(config, seed=1, dtype="float32")
    for name, parameter in model.named_parameters():
        data = parameter.data
        if name.endswith("bias_1"):
            data += shift
        if data.ndim > 1:
            data = data.astype(DTYPES[dtype])
        parameter.data = gpu.xp.asarray(data)
    model.embedding.positions.data = gpu.xp.asarray(model.embedding.positions.data)
    twin = Transformer(config, seed=1, dtype="float64")
    rounded = dict(model.named_parameters())
    for name, parameter in twin.named_parameters():
        parameter.data = to_host(rounded[name].data).astype(float)
    loss, expected = gradients_of(twin, np, batch)

    calls = set()

    def find(name, arrays):
        calls.add(name)
        return fused.find_kernel(name, arrays)

    with backend_for(gpu.xp.ndarray, backend=Backend(find_kernel=find)):
        got_loss, got = gradients_of(model, gpu.xp, batch)
    needed = {*fused.OPERATIONS} - {"dropout"}
    assert needed <= calls <= needed | {"dropout", "add_arrays", "projections"}
    assert abs(got_loss - loss) <= tolerance * loss
    difference = sum(((got[n] - expected[n]) ** 2).sum() for n in expected)
    length = sum((gradient**2).sum() for gradient in expected.values())
    assert difference <= tolerance**2 * length


@pytest.mark.parametrize("name", fused.OPERATIONS)
def test_kernels_have_the_names_and_signatures_of_the_reference(name):
    def parameters(body):
        found = inspect.signature(body).parameters.values()
        return [(p.name, p.kind, p.default) for p in found]

    assert parameters(fused.OPERATIONS[name]) == parameters(PRIMITIVES[name])


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


@pytest.mark.slow
@pytest.mark.skipif(
    not (shutil.which("nvcc") and shutil.which("ptxas")), reason="no nvcc, ptxas"
)
def test_kernels_compile_for_gpus(benchmark):
    """As .ci/run does for every type and more GPUs; and to what they should."""
    compiled = benchmark("kernels").compile_kernels("sm_90", "bf16")
    ptx, resources = compiled.ptx, compiled.resources
    assert {name for name, used in resources.items() if used.spilled} == set()
    # Two blocks of 256 threads share the 65,536 registers of a multiprocessor.
    assert resources["layer_norm_backward"].registers <= 128
    assert resources["cross_entropy"].registers <= 85  # two of 384
    body = dict(re.findall(r"\.entry (\w+)\((.*?)\n}", ptx, re.DOTALL))
    for name in ("bias_relu", "dropout", "embedding", "add_layer_norm"):
        assert not re.search(r"(div|rem)\.[su]64", body[name]), name
    for name in ("bias_relu", "add_layer_norm", "layer_norm_backward", "embedding"):
        assert "ld.global.v4.f32" in body[name], name


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
    arrays, _ = case("embedding", 3)
    (table, ids, positions), _ = converted(gpu, arrays, np.float32)
    order = fused.sort_tokens(ids)
    order[order >> 32 == 1] = -1
    out, vjp = fused.embedding(table, ids, positions)
    g = gpu.xp.asarray(np.random.default_rng(2).standard_normal(out.shape, np.float32))
    parameter = Tensor(table, requires_grad=True)
    parameter.grad = gpu.xp.zeros(parameter.shape, np.float32)
    expected = to_host(vjp(g)[0])
    expected[1] = 0
    orders = {device.address(ids): order}
    with fused.adding_to(SimpleNamespace(parameters={"table": parameter}), orders):
        vjp(g)
    assert (to_host(parameter.grad) == expected).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_of_logits_longer_than_the_registers(gpu, dtype):
    """One row, whose end is read twice, with a target there."""
    rng = np.random.default_rng(8)
    vocab_size = 40_965
    x, table = rng.standard_normal((1, 8)), rng.standard_normal((vocab_size, 8))
    targets = np.array([vocab_size - 2])
    inputs, wide = converted(gpu, [x, table, targets], DTYPES[dtype])
    options = {"label_smoothing": 0.1, "padding_id": 0}
    loss, vjp = fused.projected_cross_entropy(*inputs, **options)
    expected, expected_vjp = PRIMITIVES["projected_cross_entropy"](*wide, **options)
    assert_close(float(loss), expected, dtype)
    dx = vjp(gpu.xp.ones((), np.float32))[0]
    assert_close(to_host(dx).astype(float), expected_vjp(1.0)[0], dtype)
