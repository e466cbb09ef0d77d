"""Attention in one kernel each way, on shapes that fill its tiles and that do not."""

import numpy as np
import pytest

from minitransformer.backends.cuda import attention
from minitransformer.backends.cuda.philox import PhiloxStream, draw_mask
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
    shape = (2, options["num_heads"], case[1], case[2])
    dropout = draw_mask(shape, options["rate"], PhiloxStream((5,), gpu.xp))

    def attend(*qkv):
        return attention.in_one_kernel(*qkv, allowed, shape, dropout, tensor_cores)

    given = [gpu.xp.asarray(x) for x in arrays]
    options["rng"] = HostPhilox((5,))
    return compare(attend, given, arrays, mask, dtype, **options)


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
    rng, arrays, given = np.random.default_rng(1), [], []
    for length in (12, 20, 20, 12):
        x = np.full((2, 40, 2 * 64), np.nan, np.float16)
        x[:, :length] = rng.standard_normal((2, length, 128))
        arrays.append(x[:, :length])
        given.append(host_gpu.xp.asarray(x)[:, :length])
    shape = (2, 2, 12, 20)
    rest = None, shape, draw_mask(shape, 0.0, None), tensor_cores

    def attend(*qkv):
        return attention.in_one_kernel(*qkv, *rest)

    compare(attend, given, arrays, None, "float16", num_heads=2)


@pytest.mark.parametrize("shape", [(2, 1, 9, 7), (1, 1, 9, 1), (9, 7), (2, 3, 1, 7)])
def test_masks_in_any_layout(host_gpu, shape):
    """Stored the other way round: the keys of a query do not lie side by side."""
    rng, xp = np.random.default_rng(2), host_gpu.xp
    lengths = 9, 7, 7, 9
    arrays = [rng.standard_normal((2, n, 3 * 8)).astype(np.float32) for n in lengths]
    mask = rng.random((*shape[:-2], shape[-1], shape[-2])) < 0.7
    allowed = xp.asarray(mask).swapaxes(-1, -2)
    shape = (2, 3, 9, 7)
    rest = allowed, shape, draw_mask(shape, 0.0, None), False

    def attend(*qkv):
        return attention.in_one_kernel(*qkv, *rest)

    given, mask = [*map(xp.asarray, arrays)], mask.swapaxes(-1, -2)
    compare(attend, given, arrays, mask, "float32", num_heads=3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_wider_than_the_kernels_go_to_the_reference(gpu, dtype):
    case = 1, 5, 6, 130, 131, 0.2, "padding"
    arrays, mask, options = inputs_of(case, DTYPES[dtype])
    allowed, rng = gpu.xp.asarray(mask), PhiloxStream((5,), gpu.xp)

    def attend(*qkv):
        return attention.attention(*qkv, allowed, **options, rng=rng)

    given = [gpu.xp.asarray(x) for x in arrays]
    assert attend(*given[:3])[0].dtype == DTYPES[dtype]
    rng.reseed((5,))
    compare(attend, given, arrays, mask, dtype, **options, rng=HostPhilox((5,)))


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


def test_more_sentences_than_a_grid_is_wide_go_to_the_reference(host_gpu, monkeypatch):
    monkeypatch.setattr(attention, "MAX_SENTENCES", 2)
    rng, xp = np.random.default_rng(4), host_gpu.xp
    q = rng.standard_normal((3, 5, 16)).astype(np.float32)
    monkeypatch.setattr(attention, "in_one_kernel", None)
    out, _ = attention.attention(*[xp.asarray(q)] * 3, num_heads=2)
    expected, _ = PRIMITIVES["attention"](*[q.astype(float)] * 3, num_heads=2)
    assert_close(to_host(out).astype(float), expected, "float32")


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
