"""Attention in one kernel each way, of any sizes, with any mask in any layout."""

import sys
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from minitransformer.backends.cuda import device
from minitransformer.backends.cuda.attention import attention
from minitransformer.backends.cuda.philox import PhiloxStream
from minitransformer.engine.autograd import PRIMITIVES
from minitransformer.engine.backend import to_host
from support.closeness import assert_close
from support.philox import HostPhilox
from support.properties import within

ml_dtypes = pytest.importorskip("ml_dtypes", reason="no bfloat16 without ml_dtypes")

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
# The largest error, as a share of the largest number and 1.
TOLERANCES = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}


# The kernels divide queries and keys into tiles of 8, 16 or 32, and steps of 16. Their
# widths are 64 and 128; wider heads go to the reference.
LENGTHS = st.integers(1, 70) | st.sampled_from([12, 16, 28, 32, 33])
WIDTHS = st.integers(1, 131) | st.sampled_from([8, 64, 128])
MASKS = ["none", "causal", "padding", "each", "transposed", "counts"]


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(
    heads=st.integers(1, 3),
    queries=LENGTHS,
    keys=LENGTHS,
    d_k=WIDTHS,
    d_v=WIDTHS,
    rate=st.sampled_from([0.0, 0.0, 0.3]),
    kind=st.sampled_from(MASKS),
    dtype=st.sampled_from([*DTYPES]),
    tensor_cores=st.booleans(),
    seed=st.integers(0, 1000),
)
@example(1, 67, 35, 16, 64, 0.25, "each", "bfloat16", True, 0)
@example(2, 28, 28, 64, 64, 0.0, "padding", "float16", True, 0)
def test_attention_and_its_gradients_follow_float64(
    gpu, heads, queries, keys, d_k, d_v, rate, kind, dtype, tensor_cores, seed
):
    """On the host, with a product of fragments written after the manual of PTX."""
    # Draw arrays whose scores and whose gradients of weights are about 1.
    rng, xp = np.random.default_rng(seed), gpu.xp
    shapes = (queries, d_k), (keys, d_k), (keys, d_v), (queries, d_v)
    arrays = [rng.standard_normal((2, n, heads * d)) for n, d in shapes]
    arrays = [x * d_v**-0.25 if i > 1 else x for i, x in enumerate(arrays)]
    arrays = [x.astype(DTYPES[dtype]) for x in arrays]

    # A mask leaves each query at least the first key.
    mask, given_mask = mask_of(kind, rng, heads, queries, keys)
    if given_mask is not None:
        given_mask = xp.asarray(given_mask)
    if kind == "transposed":
        given_mask = given_mask.swapaxes(-1, -2)

    def attend(*qkv):
        options = {"num_heads": heads, "rate": rate, "rng": PhiloxStream((5,), xp)}
        return attention(*qkv, given_mask, **options)

    options = {"num_heads": heads, "rate": rate, "rng": HostPhilox((5,))}
    with patch.object(gpu, "tensor_cores", tensor_cores):
        compare(
            attend, [*map(xp.asarray, arrays)], arrays, mask, dtype, kind, **options
        )


def mask_of(kind, rng, heads, queries, keys):
    """Return a mask as the definition has it, and as the kernel is given it.

    "transposed" is stored the other way round: the keys of a query do not lie side by
    side. "counts" are numbers of keys, of which there are only a forward pass.
    """
    if kind == "none":
        return None, None
    if kind == "counts":
        counts = rng.integers(1, keys + 1, rng.choice([1, 2])).astype(np.int32)
        counts = counts.reshape(-1, 1, 1, 1)
        return np.arange(keys) < counts, counts
    if kind == "causal":
        mask = np.tri(queries, keys, dtype=bool)
        return mask, mask
    shapes = {"padding": (2, 1, 1, keys), "each": (2, heads, queries, keys)}
    mask = rng.random(shapes.get(kind, (2, 1, queries, keys))) < 0.7
    mask[..., 0] = True
    if kind == "transposed":
        return mask, np.ascontiguousarray(mask.swapaxes(-1, -2))
    return mask, mask


def compare(attend, given, arrays, mask, dtype, kind="", **options):
    """Compare `attend(q, k, v)` and its gradients with those of float64."""
    *qkv, g = given
    out, vjp = attend(*qkv)
    *wide, exact_g = (x.astype(float) for x in arrays)
    expected, expected_vjp = PRIMITIVES["attention"](*wide, mask, **options)
    pairs = [(out, expected)]
    if kind != "counts":
        pairs += zip(vjp(g)[:3], expected_vjp(exact_g)[:3], strict=True)
    for found, wanted in pairs:
        assert found.dtype == arrays[0].dtype
        error = abs(to_host(found).astype(float) - wanted).max()
        within(error, TOLERANCES[dtype] * (abs(wanted).max() + 1))


@pytest.mark.parametrize("tensor_cores", [False, True])
def test_rows_that_do_not_exist_are_not_read(host_gpu, tensor_cores):
    """Beyond the sentences of 12 and 20 tokens lies NaN, of which nothing is seen."""
    host_gpu.tensor_cores = tensor_cores
    rng, arrays, given = np.random.default_rng(1), [], []
    for length in (12, 20, 20, 12):
        x = np.full((2, 40, 2 * 64), np.nan, np.float16)
        x[:, :length] = rng.standard_normal((2, length, 128)) / 3
        arrays.append(x[:, :length])
        given.append(host_gpu.xp.asarray(x)[:, :length])

    def attend(*qkv):
        return attention(*qkv, num_heads=2)

    compare(attend, given, arrays, None, "float16", num_heads=2)


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
