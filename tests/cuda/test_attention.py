"""Attention in one kernel each way, on shapes that fill its tiles and that do not."""

import numpy as np
import pytest

from minitransformer.cuda import attention, device
from minitransformer.cuda.dropout import draw_mask
from minitransformer.cuda.philox import PhiloxStream
from minitransformer.engine.autograd import PRIMITIVES
from minitransformer.engine.backend import to_host
from support.closeness import assert_close

ml_dtypes = pytest.importorskip("ml_dtypes", reason="no bfloat16 without ml_dtypes")

DTYPES = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
}
# Heads, queries, keys, d_k, d_v, rate of dropout, the mask's shape.
CASES = {
    "one tile": (2, 28, 28, 64, 64, 0.0, "padding"),
    "odd, with dropout": (3, 7, 13, 5, 3, 0.3, "none"),
    "many tiles": (1, 67, 35, 16, 64, 0.25, "each"),
    "causal": (2, 33, 33, 32, 32, 0.1, "causal"),
    "wide": (1, 19, 37, 128, 100, 0.2, "padding"),
    "one query": (2, 1, 70, 24, 24, 0.0, "padding"),
}


def inputs_of(case, dtype):
    heads, queries, keys, d_k, d_v, rate, kind = case
    rng = np.random.default_rng(len(kind) + keys)
    shapes = (queries, d_k), (keys, d_k), (keys, d_v), (queries, d_v)
    arrays = [
        rng.standard_normal((2, length, heads * d)).astype(dtype)
        for length, d in shapes
    ]
    masks = {
        "none": None,
        "causal": np.tri(queries, keys, dtype=bool),
        "padding": rng.random((2, 1, 1, keys)) < 0.7,
        "each": rng.random((2, heads, queries, keys)) < 0.7,
    }
    return arrays, masks[kind], {"num_heads": heads, "rate": rate}


def run(gpu, case, dtype, tensor_cores):
    (*qkv, g), mask, options = inputs_of(case, DTYPES[dtype])
    xp, heads = gpu.xp, options["num_heads"]
    shape = (2, heads, case[1], case[2])
    dropout = draw_mask(shape, options["rate"], PhiloxStream((5,), xp))
    arrays = [xp.asarray(x) for x in qkv]
    allowed = None if mask is None else xp.asarray(mask)
    out, vjp = attention.in_one_kernel(*arrays, allowed, shape, dropout, tensor_cores)
    found = [to_host(x).astype(float) for x in (out, *vjp(xp.asarray(g))[:3])]
    wide = [x.astype(float) for x in qkv]
    options["rng"] = PhiloxStream((5,), np)
    expected, expected_vjp = PRIMITIVES["attention"](*wide, mask, **options)
    return found, [expected, *expected_vjp(g.astype(float))[:3]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_the_plain_body_follows_float64(gpu, case, dtype):
    for got, expected in zip(*run(gpu, CASES[case], dtype, False), strict=True):
        assert_close(got, expected, dtype)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("case", CASES)
def test_the_body_for_tensor_cores_follows_float64(gpu, case, dtype):
    """On the host, with a product of fragments written after the manual of PTX."""
    for got, expected in zip(*run(gpu, CASES[case], dtype, True), strict=True):
        assert_close(got, expected, dtype)


def test_the_order_of_threads_changes_no_bit(stand_in, host_gpu):
    results = []
    for backwards in (False, True):
        stand_in.backwards = backwards
        results.append(run(host_gpu, CASES["many tiles"], "bfloat16", True)[0])
    for a, b in zip(*results, strict=True):
        assert a.tobytes() == b.tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_wider_than_the_kernels_go_to_products(gpu, dtype):
    case = 1, 5, 6, 130, 131, 0.0, "padding"
    (*qkv, g), mask, options = inputs_of(case, DTYPES[dtype])
    arrays = [gpu.xp.asarray(x) for x in (*qkv, mask)]
    out, vjp = attention.attention(*arrays, **options)
    wide = [x.astype(float) for x in qkv]
    expected, expected_vjp = PRIMITIVES["attention"](*wide, mask, **options)
    assert_close(to_host(out).astype(float), expected, dtype)
    gradients = vjp(gpu.xp.asarray(g))[:3]
    for got, gradient in zip(gradients, expected_vjp(g.astype(float)), strict=False):
        assert_close(to_host(got).astype(float), gradient, dtype)


def attend(gpu, dtype=np.float16):
    q = gpu.xp.asarray(np.ones((1, 3, 8), dtype))
    launched = []
    launch = gpu.launch
    gpu.launch = lambda *a, **k: (
        launched.append(k.get("tensor_cores")),
        launch(*a, **k),
    )
    attention.attention(q, q, q, num_heads=1)
    del gpu.launch
    return launched


def test_tensor_cores_are_used_once_they_agree(host_gpu):
    assert attend(host_gpu)[-1] is True
    assert attend(host_gpu) == [True]  # compared only once
    assert host_gpu.verdicts == {"tensor cores in float16": True}
    assert attend(host_gpu, np.float32) == [False]


@pytest.mark.parametrize("fault", ["wrong", "refused"])
def test_tensor_cores_that_disagree_are_not_used(host_gpu, monkeypatch, fault):
    plain = attention.in_one_kernel

    def faulty(*arguments):
        out, vjp = plain(*arguments)
        if arguments[-1] and fault == "refused":
            raise RuntimeError("no kernel image is available\nfor execution")
        if arguments[-1]:
            out[0, 5, 6] += 0.5
        return out, vjp

    monkeypatch.setattr(attention, "in_one_kernel", faulty)
    problem = "no kernel image is available$" if fault == "refused" else "other results"
    with pytest.warns(
        UserWarning, match=f"without tensor cores in float16: .*{problem}"
    ):
        assert attend(host_gpu)[-1] is False
    assert attend(host_gpu) == [False]


def test_the_tiles_of_python_are_those_of_the_kernels():
    assert (attention.TILE_THREADS, attention.WIDTHS) == (128, (64, 128))
    source = device.kernel_source()
    assert "constexpr int TILE_THREADS = 128" in source
    assert "SIZE = (WIDTH == 64 ? 4 : 2) * VECTOR" in source
