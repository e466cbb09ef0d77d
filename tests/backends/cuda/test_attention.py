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
from support.host_blas import DTYPES
from support.philox import HostPhilox
from support.properties import within
from support.strict_cupy import GpuState

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
    far=st.just(0),
)
@example(1, 67, 35, 16, 64, 0.25, "each", "bfloat16", True, 0, 0)
@example(2, 28, 28, 64, 64, 0.0, "padding", "float16", True, 0, 0)
@example(2, 13, 13, 16, 16, 0.0, "none", "float16", True, 9, 6)
@example(2, 13, 13, 16, 16, 0.0, "none", "float16", False, 9, 6)
def test_attention_and_its_gradients_follow_float64(
    gpu, heads, queries, keys, d_k, d_v, rate, kind, dtype, tensor_cores, seed, far
):
    """On the host, with a product of fragments written after the manual of PTX.

    Behind each sentence lies NaN, which nothing reads. Where queries are far from all
    keys, the rows of a tile beyond the last query, all zeros, are nearer.
    """
    # Draw arrays whose scores and whose gradients of weights are about 1.
    rng, xp = np.random.default_rng(seed), gpu.xp
    shapes = (queries, d_k), (keys, d_k), (keys, d_v), (queries, d_v)
    arrays = [rng.standard_normal((2, n, heads * d)) for n, d in shapes]
    arrays = [x * d_v**-0.25 if i > 1 else x for i, x in enumerate(arrays)]
    if far:
        arrays[0], arrays[1] = far + arrays[0] / 16, arrays[1] / 16 - far
    arrays = [x.astype(DTYPES[dtype]) for x in arrays]
    gaps = [(0, 0), (0, 8), (0, 0)]
    padded = [np.pad(x, gaps, constant_values=np.nan) for x in arrays]
    given = [xp.asarray(x)[:, :-8] for x in padded]

    # A mask leaves each query at least the first key.
    mask, given_mask = mask_of(kind, rng, heads, queries, keys, xp)

    # Compare the output and its gradients, in one order of threads or the other.
    options = {"num_heads": heads, "rate": rate}
    *qkv, g = given
    with (
        patch.object(gpu, "tensor_cores", tensor_cores),
        patch.object(GpuState, "backwards", bool(seed % 2)),
    ):
        stream = PhiloxStream((5,), xp)
        out, vjp = attention(*qkv, given_mask, **options, rng=stream)
        found = [out] if kind == "counts" else [out, *vjp(g)[:3]]
    *wide, exact_g = (x.astype(float) for x in arrays)
    options["rng"] = HostPhilox((5,))
    expected, expected_vjp = PRIMITIVES["attention"](*wide, mask, **options)
    for got, wanted in zip(found, [expected, *expected_vjp(exact_g)], strict=False):
        assert got.dtype == DTYPES[dtype]
        error = abs(to_host(got).astype(float) - wanted).max()
        within(error, TOLERANCES[dtype] * (abs(wanted).max() + 1))


def mask_of(kind, rng, heads, queries, keys, xp):
    """Return a mask as the definition has it, and as the kernel is given it.

    "transposed" is stored the other way round: the keys of a query do not lie side by
    side. "counts" are numbers of keys, of which there are only a forward pass.
    """
    if kind == "none":
        return None, None
    if kind == "counts":
        counts = rng.integers(1, keys + 1, rng.choice([1, 2])).astype(np.int32)
        counts = counts.reshape(-1, 1, 1, 1)
        return np.arange(keys) < counts, xp.asarray(counts)
    if kind == "causal":
        mask = np.tri(queries, keys, dtype=bool)
        return mask, xp.asarray(mask)
    shapes = {"padding": (2, 1, 1, keys), "each": (2, heads, queries, keys)}
    mask = rng.random(shapes.get(kind, (2, 1, queries, keys))) < 0.7
    mask[..., 0] = True
    if kind == "transposed":
        stored = np.ascontiguousarray(mask.swapaxes(-1, -2))
        return mask, xp.asarray(stored).swapaxes(-1, -2)
    return mask, xp.asarray(mask)


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
