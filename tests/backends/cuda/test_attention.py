"""Attention in one kernel each way, on shapes that fill its tiles and that do not."""

import sys
from unittest.mock import patch

import numpy as np
import pytest

from minitransformer.backends.cuda import device
from minitransformer.backends.cuda.attention import attention
from minitransformer.backends.cuda.philox import PhiloxStream
from minitransformer.engine.autograd import PRIMITIVES
from minitransformer.engine.backend import to_host
from support.closeness import assert_close
from support.philox import HostPhilox

ml_dtypes = pytest.importorskip("ml_dtypes", reason="no bfloat16 without ml_dtypes")

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
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


def follow(gpu, case, dtype, tensor_cores=False):
    """Compare a case with float64; return what was found."""
    arrays, mask, options = inputs_of(case, DTYPES[dtype])
    allowed = None if mask is None else gpu.xp.asarray(mask)
    rng = PhiloxStream((5,), gpu.xp)

    def attend(*qkv):
        return attention(*qkv, allowed, **options, rng=rng)

    given = [gpu.xp.asarray(x) for x in arrays]
    expected = {**options, "rng": HostPhilox((5,))}
    with patch.object(gpu, "tensor_cores", tensor_cores):
        return compare(attend, given, arrays, mask, dtype, **expected)


def compare(attend, given, arrays, mask, dtype, **options):
    """Compare `attend(q, k, v)` and its gradients with those of float64."""
    *qkv, g = given
    out, vjp = attend(*qkv)
    found = [to_host(x).astype(float) for x in (out, *vjp(g)[:3])]
    *wide, exact_g = (x.astype(float) for x in arrays)
    expected, expected_vjp = PRIMITIVES["attention"](*wide, mask, **options)
    exact = expected, *expected_vjp(exact_g)[:3]
    for got, wanted in zip(found, exact, strict=True):
        assert_close(got, wanted, dtype)
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_the_plain_body_follows_float64(gpu, case, dtype):
    follow(gpu, CASES[case], dtype)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("case", CASES)
def test_the_body_for_tensor_cores_follows_float64(gpu, case, dtype):
    """On the host, with a product of fragments written after the manual of PTX."""
    follow(gpu, CASES[case], dtype, True)


def test_the_order_of_threads_changes_no_bit(stand_in, host_gpu):
    results = []
    for backwards in (False, True):
        stand_in.backwards = backwards
        results.append(follow(host_gpu, CASES["many tiles"], "bfloat16", True))
    for a, b in zip(*results, strict=True):
        assert a.tobytes() == b.tobytes()


@pytest.mark.parametrize("length", [1, 12, 16, 17, 28, 32, 33])
@pytest.mark.parametrize("width", [64, 128])
def test_sentences_that_fill_tiles_and_that_do_not(host_gpu, length, width):
    """Only what exists of a tile is computed, in steps of 16 rows and keys."""
    case = 2, length, length, width, width, 0.0, "padding"
    for dtype, tensor_cores in [("float32", 0), ("bfloat16", 0), ("bfloat16", 1)]:
        follow(host_gpu, case, dtype, bool(tensor_cores))


@pytest.mark.parametrize("tensor_cores", [False, True])
def test_rows_that_do_not_exist_are_not_read(host_gpu, tensor_cores):
    """Beyond the sentences of 12 and 20 tokens lies NaN, of which nothing is seen."""
    host_gpu.tensor_cores = tensor_cores
    rng, arrays, given = np.random.default_rng(1), [], []
    for length in (12, 20, 20, 12):
        x = np.full((2, 40, 2 * 64), np.nan, np.float16)
        x[:, :length] = rng.standard_normal((2, length, 128))
        arrays.append(x[:, :length])
        given.append(host_gpu.xp.asarray(x)[:, :length])

    def attend(*qkv):
        return attention(*qkv, num_heads=2)

    compare(attend, given, arrays, None, "float16", num_heads=2)


@pytest.mark.parametrize("shape", [(2, 1, 9, 7), (1, 1, 9, 1), (9, 7), (2, 3, 1, 7)])
def test_masks_in_any_layout(host_gpu, shape):
    """Stored the other way round: the keys of a query do not lie side by side."""
    rng, xp = np.random.default_rng(2), host_gpu.xp
    lengths = 9, 7, 7, 9
    arrays = [rng.standard_normal((2, n, 3 * 8)).astype(np.float32) for n in lengths]
    mask = rng.random((*shape[:-2], shape[-1], shape[-2])) < 0.7
    allowed = xp.asarray(mask).swapaxes(-1, -2)

    def attend(*qkv):
        return attention(*qkv, allowed, num_heads=3)

    given, mask = [*map(xp.asarray, arrays)], mask.swapaxes(-1, -2)
    compare(attend, given, arrays, mask, "float32", num_heads=3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_wider_than_the_kernels_go_to_the_reference(gpu, dtype):
    case = 1, 5, 6, 130, 131, 0.2, "padding"
    arrays, mask, options = inputs_of(case, DTYPES[dtype])
    allowed, rng = gpu.xp.asarray(mask), PhiloxStream((5,), gpu.xp)

    def attend(*qkv):
        return attention(*qkv, allowed, **options, rng=rng)

    given = [gpu.xp.asarray(x) for x in arrays]
    assert attend(*given[:3])[0].dtype == DTYPES[dtype]
    rng.reseed((5,))
    compare(attend, given, arrays, mask, dtype, **options, rng=HostPhilox((5,)))


def test_more_sentences_than_a_grid_is_wide_go_to_the_reference(host_gpu, monkeypatch):
    monkeypatch.setattr(sys.modules[attention.__module__], "MAX_SENTENCES", 2)
    rng, xp = np.random.default_rng(4), host_gpu.xp
    q = rng.standard_normal((3, 5, 16)).astype(np.float32)
    monkeypatch.setattr(host_gpu, "launch", None)
    out, _ = attention(*[xp.asarray(q)] * 3, num_heads=2)
    expected, _ = PRIMITIVES["attention"](*[q.astype(float)] * 3, num_heads=2)
    assert_close(to_host(out).astype(float), expected, "float32")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("capability", ["75", "80"])
def test_tensor_cores_multiply_16_bits_where_the_gpu_has_them(
    stand_in, monkeypatch, dtype, capability
):
    monkeypatch.setattr(stand_in.xp.cuda.Device, "compute_capability", capability)
    gpu = device.current()
    q = gpu.xp.asarray(np.ones((1, 3, 8), DTYPES[dtype]))
    attention(q, q, q, num_heads=1)
    [options] = gpu._modules
    used = any("TENSOR_CORES" in option for option in options)
    assert used == (q.dtype.itemsize == 2 and capability == "80")


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("counts", [[3], [1, 40, 17]])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sentence_attends_to_as_many_keys_as_are_counted(gpu, dtype, counts, heads):
    """As a mask of these keys allows, also with heads that the reference takes."""
    rng, xp, width = np.random.default_rng(6), gpu.xp, 144 // heads
    shapes = (3, 2, heads * width), (3, 40, heads * width), (3, 40, heads * width)
    arrays = [rng.standard_normal(shape).astype(DTYPES[dtype]) for shape in shapes]
    given = [xp.asarray(x) for x in arrays]
    numbers = xp.asarray(np.array(counts, np.int32).reshape(-1, 1, 1, 1))
    out, _ = attention(*given, numbers, num_heads=heads)
    mask = (np.arange(40) < np.array(counts)[:, None])[:, None, None]
    wide = [x.astype(float) for x in arrays]
    expected, _ = PRIMITIVES["attention"](*wide, mask, num_heads=heads)
    assert_close(to_host(out).astype(float), expected, dtype)


@pytest.mark.parametrize("tensor_cores", [False, True])
def test_queries_that_are_far_from_every_key_have_finite_gradients(
    host_gpu, tensor_cores
):
    """The rows of a tile beyond the last query, all zeros, are nearer to the keys."""
    host_gpu.tensor_cores = tensor_cores
    rng, size = np.random.default_rng(9), (2, 13, 2 * 16)
    q, k, v, g = (rng.standard_normal(size).astype(np.float16) for _ in range(4))
    q, k = 6 + q / 16, k / 16 - 6  # scores of about -144
    arrays = [q, k, v, g]

    def attend(*qkv):
        return attention(*qkv, num_heads=2)

    given = [host_gpu.xp.asarray(x) for x in arrays]
    compare(attend, given, arrays, None, "float16", num_heads=2)
