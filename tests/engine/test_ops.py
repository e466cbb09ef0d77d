"""Every operation: its gradient against finite differences, its value against loops."""

import math
import weakref

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minitransformer.engine import ops
from minitransformer.engine.autograd import PRIMITIVES, dense
from minitransformer.engine.ops import HostStream
from support import elementary
from support.closeness import assert_close

STEP = 1e-6
sizes = st.integers(1, 4)


def strided(rng, *shape):
    """Random numbers that are not contiguous in memory."""
    wide = rng.standard_normal((*shape[:-1], 2 * shape[-1]))
    return wide[..., ::2]


@st.composite
def binary_case(draw, rng):
    shape = [draw(sizes), draw(sizes)]
    other = [1 if draw(st.booleans()) else n for n in shape][draw(st.integers(0, 1)) :]
    return (strided(rng, *shape), strided(rng, *other)), {}


@st.composite
def sum_case(draw, rng):
    return (strided(rng, draw(sizes), draw(sizes)),), {}


@st.composite
def dropout_case(draw, rng):
    options = {"rate": draw(st.sampled_from([0.1, 0.5])), "rng": (1, draw(sizes))}
    return (strided(rng, draw(sizes), 2 * draw(sizes)),), options


@st.composite
def linear_case(draw, rng):
    n, m = draw(sizes), draw(sizes)
    x = strided(rng, draw(sizes), draw(sizes), n)
    inputs = [x, strided(rng, n, m)]
    if draw(st.booleans()):
        inputs.append(strided(rng, m))
    return tuple(inputs), {"relu": draw(st.booleans())}


def _noise(draw):
    """Options of an operation with dropout inside: none, or a rate and a stream."""
    rate = draw(st.sampled_from([0.0, 0.3]))
    return {"rate": rate, "rng": (2, draw(sizes))} if rate else {}


@st.composite
def embedding_case(draw, rng):
    vocab, length, d = draw(sizes), draw(sizes), draw(sizes)
    ids = rng.integers(0, vocab, (draw(sizes), 2 * length))[:, ::2]
    inputs = strided(rng, vocab, d), ids, strided(rng, length + draw(sizes), d)
    return inputs, {"scale": 1.7, **_noise(draw)}


@st.composite
def attention_case(draw, rng):
    b, t, s, heads, d_k, d_v = (draw(sizes) for _ in range(6))
    inputs = [
        strided(rng, b, t, heads * d_k),
        strided(rng, b, s, heads * d_k),
        strided(rng, b, s, heads * d_v),
    ]
    mask = draw(st.sampled_from(["none", "padding", "full"]))
    if mask == "padding":
        lengths = rng.integers(1, s + 1, b)
        inputs.append((np.arange(s) < lengths[:, None])[:, None, None, :])
    elif mask == "full":
        allowed = rng.random((t, s)) < 0.6
        allowed[:, 0] = True
        inputs.append(allowed)
    return tuple(inputs), {"num_heads": heads, **_noise(draw)}


@st.composite
def layer_norm_case(draw, rng):
    shape, d = (draw(sizes), draw(sizes)), 2 + draw(sizes)
    inputs = [strided(rng, *shape, d) for _ in range(2)]
    return (*inputs, strided(rng, d), strided(rng, d)), _noise(draw)


@st.composite
def loss_case(draw, rng):
    b, t, d, vocab = draw(sizes), draw(sizes), draw(sizes), 2 + draw(sizes)
    targets = rng.integers(0, vocab, (b, t))
    inputs = strided(rng, b, t, d), strided(rng, vocab, d), targets
    smoothing = draw(st.sampled_from([0.0, 0.1, 0.7]))
    return inputs, {"label_smoothing": smoothing, "padding_id": 0}


CASES = {
    "add": binary_case,
    "multiply": binary_case,
    "sum_all": sum_case,
    "dropout": dropout_case,
    "linear": linear_case,
    "embedding": embedding_case,
    "attention": attention_case,
    "add_layer_norm": layer_norm_case,
    "projected_cross_entropy": loss_case,
}


def test_every_operation_has_a_gradient_case():
    assert elementary.add.__name__ in PRIMITIVES
    assert CASES.keys() == PRIMITIVES.keys()


def run(name, inputs, options):
    """Call the body on arrays; equal keys give equal dropout noise."""
    if "rng" in options:
        options = {**options, "rng": HostStream(options["rng"])}
    return PRIMITIVES[name](*inputs, **options)


@pytest.mark.parametrize("name", CASES)
@given(data=st.data(), seed=st.integers(0, 1000))
def test_gradients_match_central_differences(name, data, seed):
    """Inputs are read only, and no result shares memory with them."""
    rng = np.random.default_rng(seed)
    inputs, options = data.draw(CASES[name](rng))
    out, vjp = run(name, inputs, options)
    upstream = strided(rng, *out.shape) if out.ndim else np.asarray(0.7)
    for array in (*inputs, upstream):
        array.flags.writeable = False
    out, vjp = run(name, inputs, options)
    assert not any(np.shares_memory(out, array) for array in inputs)
    gradients = [dense(gradient) for gradient in vjp(upstream)]
    assert len(gradients) >= len(inputs)
    for i, (array, gradient) in enumerate(zip(inputs, gradients, strict=False)):
        if array.dtype != np.float64:
            assert gradient is None
            continue
        assert gradient.shape == array.shape
        expected = np.empty(array.shape)
        for index in np.ndindex(array.shape):
            sides = []
            for step in (STEP, -STEP):
                moved = array.copy()
                moved[index] += step
                changed = [*inputs[:i], moved, *inputs[i + 1 :]]
                sides.append((run(name, changed, options)[0] * upstream).sum())
            expected[index] = (sides[0] - sides[1]) / (2 * STEP)
        np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", CASES)
@given(data=st.data(), seed=st.integers(0, 1000))
def test_float32_follows_float64(name, data, seed):
    rng = np.random.default_rng(seed)
    check_float32(name, *data.draw(CASES[name](rng)), rng)


def test_float32_follows_float64_where_the_deviation_is_small():
    """LayerNorm's gradient is divided by the deviation, here 1/29."""
    x = np.array([[[0.66710003, 2.23299373, 0.95771318]]])
    residual = np.array([[[1.96987956, 0.47943205, 1.6791144]]])
    gain = np.array([0.86255415, 1.4376596, -2.26665477])
    bias = np.array([-0.35789142, -1.87603185, -1.85739591])
    for seed in range(100):
        inputs = x, residual, gain, bias
        check_float32("add_layer_norm", inputs, {}, np.random.default_rng(seed))


def check_float32(name, inputs, options, rng):
    """Compare float32 with float64, each gradient in units of its largest element."""
    out, vjp = run(name, inputs, options)
    upstream = np.asarray(rng.standard_normal(out.shape))
    single = [a.astype(np.float32) if a.dtype == np.float64 else a for a in inputs]
    out32, vjp32 = run(name, single, options)
    assert out32.dtype == np.float32
    assert_close(out32, out, "float32")
    found = vjp32(upstream.astype(np.float32)), vjp(upstream)
    for a, b in zip(*(map(dense, x) for x in found), strict=True):
        if b is not None:
            assert a.dtype == np.float32
            unit = max(1, abs(b).max())
            assert_close(a / unit, b / unit, "float32")


@pytest.mark.parametrize("d_k", [4, 64, 512])
def test_scores_have_variance_1_for_any_d_k(d_k):
    """As footnote 4 wants it, for queries and keys of mean 0 and variance 1."""
    rng, heads, keys = np.random.default_rng(0), 2, 400
    query, key = (rng.standard_normal((1, heads, keys, d_k)) for _ in range(2))
    scores = np.log(ops.attention_weights(query, key, None))
    scores -= scores.mean(axis=-1, keepdims=True)
    assert scores.var() == pytest.approx(1, rel=0.1)


def test_activations_that_no_gradient_needs_are_not_kept():
    """The output of a linear layer, and what LayerNorm reads."""
    x, weight, gain = np.ones((3, 4)), np.ones((4, 4)), np.ones(4)
    out, linear_vjp = PRIMITIVES["linear"](x, weight, gain)
    watched = [weakref.ref(out.base)]
    del out
    sublayer, residual = np.ones((2, 3, 4)), np.ones((2, 3, 4))
    watched += [weakref.ref(sublayer), weakref.ref(residual)]
    out, norm_vjp = PRIMITIVES["add_layer_norm"](sublayer, residual, gain, gain)
    watched.append(weakref.ref(out.base))
    del out, sublayer, residual
    assert [ref() for ref in watched] == [None] * 4
    assert linear_vjp(x)[0].shape == (3, 4)
    assert norm_vjp(np.ones((2, 3, 4)))[0].shape == (2, 3, 4)


@pytest.mark.parametrize("length", [3, 200])
def test_a_softmax_in_place_may_be_that_of_a_view(length):
    """Of memory in another order, no rows can be made without a copy."""
    scores = np.random.default_rng(1).normal(size=(length, 4, 5)).T[::2]
    powers = [[[math.exp(x) for x in row] for row in part] for part in scores]
    expected = [[[x / sum(row) for x in row] for row in part] for part in powers]
    ops.softmax_in_place(np, scores)
    assert_close(scores, expected)


@pytest.mark.parametrize("scale", [30, 1e4])
def test_large_scores_do_not_overflow(scale):
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 3, 4), dtype=np.float32) for _ in range(3))
    out, vjp = PRIMITIVES["attention"](q * scale, k * scale, v, num_heads=2)
    assert np.isfinite(out).all()
    assert all(np.isfinite(g).all() for g in vjp(out)[:3])
    weight = rng.standard_normal((6, 4), dtype=np.float32)
    loss, _ = PRIMITIVES["projected_cross_entropy"](
        q * scale, weight, np.ones((1, 3), int), label_smoothing=0.1, padding_id=0
    )
    assert np.isfinite(loss)


@pytest.mark.parametrize("hidden", [[], [0], [0, 2]])
def test_a_mask_hides_keys_as_if_they_were_not_there(hidden):
    """Also where it hides none."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 3, 4)) for _ in range(3))
    kept = np.delete(np.arange(3), hidden)
    found, _ = PRIMITIVES["attention"](q, k, v, np.isin(range(3), kept), num_heads=2)
    alone = PRIMITIVES["attention"](q, k[:, kept], v[:, kept], num_heads=2)
    assert_close(found, alone[0])


def test_a_batch_of_no_sentences_has_a_shape():
    x, weight = np.zeros((0, 3, 4)), np.ones((4, 6))
    out, vjp = PRIMITIVES["linear"](x, weight)
    assert out.shape == (0, 3, 6)
    assert [g.shape for g in vjp(out)[:2]] == [x.shape, weight.shape]
    assert PRIMITIVES["attention"](x, x, x, num_heads=2)[0].shape == x.shape


@given(st.integers(1, 14), st.integers(1, 9), st.integers(1, 40), st.booleans())
def test_products_of_few_rows_in_pieces_are_those_of_loops(rows, n, m, transposed):
    rng = np.random.default_rng(n)
    x, weight, bias = strided(rng, rows, n), rng.random((n, m)), rng.random(m)
    weight = np.asfortranarray(weight) if transposed else weight
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "SMALL_PRODUCT", 20)
        found = ops.matmul(x, weight, bias)
    expected = [
        [
            math.fsum(a * b for a, b in zip(row, column, strict=True))
            for column in weight.T
        ]
        for row in x
    ]
    assert_close(found, expected + bias)


@pytest.mark.parametrize(
    ("totals", "expected"),
    [
        ([], True),
        ([math.exp(29), math.exp(-29)], True),
        ([1.0, math.exp(30)], False),
        ([math.exp(-30), 1.0], False),
        ([0.0, 1.0], False),
        ([1.0, math.inf], False),
        ([math.nan, 1.0], False),
    ],
)
def test_exponentials_are_safe_if_none_can_have_overflowed(totals, expected):
    assert ops.exp_is_safe(np.array(totals)) is expected
