"""Every differentiable operation, its forward pass beside its backward pass.

Each body runs on NumPy and CuPy arrays alike. Positional arguments are arrays and get
one gradient each, or None if they have none, such as ids and masks. Keyword arguments
are options. Shapes: B batch, S source, T target, D d_model, H heads, V vocabulary,
N rows (the tokens of all sentences).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from types import ModuleType
from typing import Any, Protocol

import numpy as np

from minitransformer.engine.autograd import (
    RowGradient,
    Tensor,
    Vjp,
    primitive,
    wrapper_in_use,
)
from minitransformer.engine.backend import Array, array_module, fused_kernel

# Added to the scores of masked positions (float32 or float64). Their weights become
# exactly zero; where a whole row is masked, its weights stay finite and sum to 1.
MASKED_SCORE = -1e9

# Added to the variance, inside the square root.
LAYER_NORM_EPSILON = 1e-6

# The loss computes this many logits at a time, few enough for the processor's cache,
# and at least MIN_ROWS_PER_CHUNK rows, enough for an efficient matrix product.
LOGITS_PER_CHUNK = 1 << 22
MIN_ROWS_PER_CHUNK = 256

# Products of so few rows are computed in pieces of so many multiplications, for which
# OpenBLAS has other code.
FEW_ROWS = 12
SMALL_PRODUCT = 500_000

# Exponentials of numbers nearer to 0 than this neither overflow nor vanish in float32.
SAFE_EXPONENT = 30

# Rows of at most this many scores are transposed before their maxima are taken.
SHORT_ROW = 32


# The noise of dropout


class RandomStream(Protocol):
    """A source of dropout masks, identified by a key of integers.

    Keys such as (seed, step, part) make the noise of a training step independent of
    everything drawn before, so that resuming a run needs no generator state.
    """

    def keep_mask(self, shape: tuple[int, ...], rate: float) -> tuple[Array, float]:
        """Draw a dropout mask, which is True for kept elements, and their factor.

        Elements are dropped independently of each other with probability `rate`. The
        factor is the inverse of the probability that an element is kept.
        """
        ...


class HostStream:
    """A stream of NumPy's SFC64 generator, for arrays on the processor.

    One random byte is drawn for each element. Bytes below t = int(256 rate) are
    dropped, which is a little too few. A Poisson number of further hits, each at a
    random element, makes up the rest: if its mean is m hits for each element, an
    element is spared with probability exp(-m), independently of the others.
    """

    def __init__(self, key: tuple[int, ...]) -> None:
        self._generator = np.random.Generator(np.random.SFC64(key))

    def keep_mask(self, shape: tuple[int, ...], rate: float) -> tuple[Array, float]:
        size = math.prod(shape)
        words = self._generator.integers(2**64, size=(size + 7) // 8, dtype=np.uint64)
        threshold = int(256 * rate)
        keep = words.view(np.uint8)[:size] >= threshold
        mean = size * math.log((1 - threshold / 256) / (1 - rate))
        hits = self._generator.random(self._generator.poisson(mean))
        keep[(size * hits).astype(np.intp)] = False
        return keep.reshape(shape), 1 / (1 - rate)


# Layers


@primitive
def dropout(x: Array, *, rate: float, rng: RandomStream) -> tuple[Array, Vjp]:
    """Zero a share `rate` of the elements and scale the rest to keep the mean (5.4)."""
    out, dropout_mask = _dropped(x, rate, rng)

    def vjp(g: Array) -> tuple[Array]:
        return (_apply_dropout(g, dropout_mask),)

    return out, vjp


@primitive
def linear(
    x: Array, weight: Array, bias: Array | None = None, *, relu: bool = False
) -> tuple[Array, Vjp]:
    """x W + b, or max(0, x W + b) as in the inner layer of equation 2.

    Shapes: x [..., n], weight [n, m], bias [m] -> [..., m]
    """
    xp = array_module(x)
    shape = x.shape
    rows = round_for(x.reshape(-1, shape[-1]), weight)  # [N, n]
    out = matmul(rows, weight, bias, relu)
    # The vjp keeps the output only for the ReLU, whose gradient is 0 where it is 0.
    activated = round_for(out, weight) if relu else None

    def vjp(g: Array) -> tuple[Array, Array, Array | None]:
        g = g.reshape(-1, weight.shape[1])
        if activated is not None:
            g = g * (activated > 0)
        # dx = g W^T, dW = x^T g, db = the sum of g over rows.
        db = None if bias is None else _ones(xp, g, len(g)) @ g
        g = round_for(g, weight)
        return matmul(g, weight.T).reshape(shape), matmul(rows.T, g), db

    return out.reshape(*shape[:-1], weight.shape[1]), vjp


def projections(x: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    """x W for several matrices W, which a kernel may multiply all at once.

    Where primitives are wrapped, each product is one of them.

    Shapes: x [..., n], weights each [n, any] -> each [..., any]
    """
    arrays = x.data, *[weight.data for weight in weights]
    kernel = fused_kernel("projections", arrays, None)
    if kernel and not wrapper_in_use():
        return [Tensor(product) for product in kernel(*arrays)]
    return [linear(x, weight) for weight in weights]


@primitive
def embedding(
    table: Array,
    ids: Array,
    positions: Array,
    *,
    scale: float = 1.0,
    rate: float = 0.0,
    rng: RandomStream | None = None,
) -> tuple[Array, Vjp]:
    """Dropout(table[ids] * scale + positions) (3.4, 3.5 and 5.4).

    Shapes: table [V, D], ids [B, T], positions [at least T, D] -> [B, T, D]
    """
    xp = array_module(table)
    length = ids.shape[-1]
    out = xp.take(table, ids, axis=0)
    out *= scale
    out += positions[:length]
    out, dropout_mask = _dropped(out, rate, rng)

    def vjp(g: Array) -> tuple[RowGradient, None, Array]:
        g = _apply_dropout(g, dropout_mask)
        # The gradient of a row of the table is the sum over the tokens that are its id.
        unique, sums = _sum_by_id(ids.reshape(-1), g.reshape(-1, g.shape[-1]))
        sums *= scale
        # That of a position, needed only if they are learned, sums over sentences.
        dpositions = xp.zeros_like(positions)
        dpositions[:length] = g.reshape(-1, *g.shape[-2:]).sum(axis=0)
        return RowGradient(unique, sums, len(table)), None, dpositions

    return out, vjp


@primitive
def attention(
    q: Array,
    k: Array,
    v: Array,
    mask: Array | None = None,
    *,
    num_heads: int,
    rate: float = 0.0,
    rng: RandomStream | None = None,
) -> tuple[Array, Vjp]:
    """softmax(Q K^T / sqrt(d_k)) V in each head (equation 1, 3.2.1 and 3.2.2).

    The heads lie side by side in the last axis. `mask` is True where a query may attend
    to a key; `rate` is dropout on the attention weights.

    Shapes: q [B, T, H d_k], k [B, S, H d_k], v [B, S, H d_v],
    mask broadcasting to [B, H, T, S] -> [B, T, H d_v]
    """
    xp = array_module(q)
    query, key, value = [split_heads(x, num_heads) for x in (q, k, v)]
    weights = attention_weights(query, key, mask)  # [B, H, T, S]
    dropped, dropout_mask = _dropped(weights, rate, rng)
    # Each head writes its product straight into its columns of the result.
    out = xp.empty((*q.shape[:-1], v.shape[-1]), dtype=q.dtype)  # [B, T, H d_v]
    xp.matmul(dropped, value, out=split_heads(out, num_heads))

    def vjp(g: Array) -> tuple[Array, Array, Array, None]:
        g = split_heads(g, num_heads)  # [B, H, T, d_v]
        dq, dk, dv = xp.empty_like(q), xp.empty_like(k), xp.empty_like(v)
        xp.matmul(dropped.swapaxes(-1, -2), g, out=split_heads(dv, num_heads))
        # Of P = softmax(S): dS = P * (dP - sum(dP * P)).
        dscores = g @ value.swapaxes(-1, -2)  # [B, H, T, S]
        _apply_dropout(dscores, dropout_mask, out=dscores)
        dscores -= _row_dot(xp, dscores, weights)[..., None]
        dscores *= weights
        dscores *= 1 / math.sqrt(query.shape[-1])
        xp.matmul(dscores, key, out=split_heads(dq, num_heads))
        xp.matmul(dscores.swapaxes(-1, -2), query, out=split_heads(dk, num_heads))
        return dq, dk, dv, None

    return out, vjp


def attention_weights(query: Array, key: Array, mask: Array | None) -> Array:
    """softmax(Q K^T / sqrt(d_k)) of each head, the weights of V in `attention`.

    Shapes: query [B, H, T, d_k], key [B, H, S, d_k], mask broadcasting to [B, H, T, S]
    -> [B, H, T, S]
    """
    xp = array_module(query)
    weights = query @ key.swapaxes(-1, -2)
    weights *= 1 / math.sqrt(query.shape[-1])
    if mask is not None and not (xp is np and mask.all()):
        weights += xp.where(mask, 0, MASKED_SCORE).astype(weights.dtype)
    softmax_in_place(xp, weights)
    return weights


@primitive
def add_layer_norm(
    x: Array,
    residual: Array,
    gain: Array,
    bias: Array,
    *,
    rate: float = 0.0,
    rng: RandomStream | None = None,
) -> tuple[Array, Vjp]:
    """LayerNorm(residual + Dropout(x)), which follows every sub-layer (3.1 and 5.4).

    The variance is biased.

    Shapes: x, residual [..., D], gain, bias [D] -> [..., D]
    """
    xp = array_module(x)
    shape = x.shape  # the vjp keeps the shape, and not x
    width = shape[-1]
    mean_weights = _filled(xp, x, width, 1 / width)  # mean(x) is a product
    dropped, dropout_mask = _dropped(x, rate, rng)
    normal = xp.add(dropped, residual, out=None if dropped is x else dropped)
    normal = normal.reshape(-1, width)  # [N, D]
    # Centre each row, and divide it by its standard deviation.
    normal -= (normal @ mean_weights)[:, None]
    variance = _row_dot(xp, normal, normal) / width
    deviation = xp.sqrt(variance + LAYER_NORM_EPSILON)
    inverse_deviation = (1 / deviation)[:, None]  # [N, 1]
    normal *= inverse_deviation
    out = normal * gain
    out += bias

    def vjp(g: Array) -> tuple[Array, Array, Array, Array]:
        g = g.reshape(normal.shape)
        ones = _ones(xp, g, len(g))
        # Of normal = (x - mean(x)) / deviation, where d is the gradient of normal:
        # dx = (d - mean(d) - normal * mean(d * normal)) / deviation.
        scaled = g * normal
        dgain, dbias = ones @ scaled, ones @ g
        mean_of_scaled = (scaled @ (gain * mean_weights))[:, None]
        dsum = xp.multiply(g, gain, out=scaled)  # in the same memory
        dsum -= (dsum @ mean_weights)[:, None]
        dsum -= normal * mean_of_scaled
        dsum *= inverse_deviation
        dsum = dsum.reshape(shape)
        return _apply_dropout(dsum, dropout_mask), dsum, dgain, dbias

    return out.reshape(shape), vjp


@primitive
def projected_cross_entropy(
    x: Array, weight: Array, targets: Array, *, label_smoothing: float, padding_id: int
) -> tuple[Array, Vjp]:
    """The label-smoothed loss of softmax(x W^T), summed over targets (3.4 and 5.4).

    The smoothed target is q = (1 - e) one-hot + e / V over all V classes. Targets equal
    to `padding_id` add nothing. The gradient is computed along with the loss, for a
    chunk of rows at a time, so that no [N, V] matrix exists.

    Shapes: x [..., D], weight [V, D], targets [...] -> scalar
    Units: nats, summed
    """
    xp = array_module(x)
    vocab_size, width = weight.shape
    flat_targets = targets.reshape(-1)
    used = xp.flatnonzero(flat_targets != padding_id)  # [N]
    rows, ids = x.reshape(-1, width)[used], flat_targets[used]
    smoothing = label_smoothing / vocab_size

    # The one-hot part of q, for a chunk of rows at a time.
    loss = 0.0
    drows = xp.empty_like(rows)
    dweight = None
    chunk = rows_per_chunk(vocab_size)
    for start in range(0, len(rows), chunk):
        part = slice(start, start + chunk)
        part_loss, drows[part], term = _one_hot_loss(
            rows[part], ids[part], weight, confidence=1 - label_smoothing
        )
        loss += part_loss
        dweight = term if dweight is None else xp.add(dweight, term, out=dweight)
    dweight = xp.zeros_like(weight) if dweight is None else dweight
    # The e / V of all classes: their logits are summed by products of sums.
    if smoothing > 0:
        weight_sum = _ones(xp, weight, vocab_size) @ weight
        row_sum = _ones(xp, rows, len(rows)) @ rows
        loss -= smoothing * float(row_sum @ weight_sum)
        drows -= smoothing * weight_sum
        dweight -= smoothing * row_sum
    # Padding gets a gradient of zero.
    dx = xp.zeros(x.shape, x.dtype)
    dx.reshape(-1, width)[used] = drows

    def vjp(g: Array) -> tuple[Array, Array, None]:
        return xp.multiply(dx, g, out=dx), xp.multiply(dweight, g, out=dweight), None

    return xp.asarray(loss, dtype=x.dtype), vjp


def _one_hot_loss(
    rows: Array, targets: Array, weight: Array, *, confidence: float
) -> tuple[float, Array, Array]:
    """Return the loss of rows whose q is `confidence` one-hot, drows and dweight.

    Shapes: rows [N, D], targets [N], weight [V, D] -> scalar, [N, D], [V, D]
    """
    row = array_module(rows).arange(len(rows))
    exponentials, totals, log_totals, target_logits = _softmax_terms(
        rows, weight, (row, targets)
    )
    loss = float((log_totals - confidence * target_logits).sum())
    # The gradient of the logits is exponentials / totals - q: 1 / totals scales rows.
    exponentials[row, targets] -= confidence * totals
    inverse_totals = (1 / totals)[:, None]
    terms = round_for(exponentials, weight)
    drows = matmul(terms, weight) * inverse_totals
    return loss, drows, matmul(terms.T, round_for(rows * inverse_totals, weight))


def _softmax_terms(
    rows: Array, weight: Array, targets: tuple[Array, Array]
) -> tuple[Array, Array, Array, Array]:
    """Return the terms of the loss that come from the logits, rows W^T.

    Returns: the exponentials of the logits, each row scaled by some factor; the sum of
    each row; its log-sum-exp; the logits of the targets.

    Shapes: rows [N, D], weight [V, D], targets each [N]
    -> [N, V], [N], [N], [N]
    """
    xp = array_module(rows)
    ones = _ones(xp, weight, len(weight))
    # A kernel may compute exponentials within the product, which is safe only if no
    # logit is far from 0.
    if kernel := fused_kernel("exponentials", (rows, weight), None):
        exponentials = kernel(rows, weight)
        with np.errstate(over="ignore"):  # `exp_is_safe` sees it
            totals = exponentials @ ones
        of_targets = exponentials[targets]
        if exp_is_safe(totals) and of_targets.all():
            return exponentials, totals, xp.log(totals), xp.log(of_targets)
    # Otherwise subtract the maximum of each row from the exponents.
    logits = matmul(round_for(rows, weight), weight.T)  # [N, V]
    target_logits = logits[targets]
    highest = logits.max(axis=-1)
    logits -= highest[:, None]
    exponentials = xp.exp(logits, out=logits)
    totals = exponentials @ ones
    return exponentials, totals, xp.log(totals) + highest, target_logits


# Products with matrices of parameters, which a kernel may compute in lower precision


def round_for(x: Array, weight: Array) -> Array:
    """Return what `matmul` multiplies by `weight` for x: x itself, or its rounding."""
    return fused_kernel("round_for", (x, weight), lambda x, weight: x)(x, weight)


def matmul(a: Array, b: Array, bias: Array | None = None, relu: bool = False) -> Array:
    """Return A B + bias, or its ReLU.

    A comes from `round_for`; B is a matrix of parameters, or from `round_for` too.

    Shapes: a [N, n], b [n, m], bias [m] -> [N, m]
    """
    return fused_kernel("matmul", (a, b), _matmul)(a, b, bias, relu)


def _matmul(a: Array, b: Array, bias: Array | None, relu: bool) -> Array:
    is_few = 1 < len(a) <= FEW_ROWS and a.size * b.shape[1] > SMALL_PRODUCT
    out = _product_of_few(a, b) if is_few and array_module(a) is np else a @ b
    if bias is not None:
        out += bias
    if relu:
        relu_in_place(out)
    return out


def relu_in_place(out: Array) -> None:
    """Replace negative numbers by 0. Shapes: out [N, m]"""
    # NumPy compares with a row more than twice as fast as with a number.
    xp = array_module(out)
    xp.maximum(out, _filled(xp, out, out.shape[1], 0), out=out)


def _product_of_few(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return A B for few rows of A, in pieces so small that BLAS reads B only once.

    For a larger product it copies B first. Shapes: a [N, n], b [n, m] -> [N, m]
    """
    step = max(SMALL_PRODUCT // a.size, 1)
    parts = [slice(i, i + step) for i in range(0, b.shape[1], step)]
    if b.flags.c_contiguous:
        out = np.empty((len(a), b.shape[1]), a.dtype)
        for part in parts:
            np.matmul(a, b[:, part], out=out[:, part])
        return out
    # B is transposed, such as the table of embeddings: return (B^T A^T)^T.
    turned = np.empty((b.shape[1], len(a)), a.dtype)
    columns = np.ascontiguousarray(a.T)
    for part in parts:
        np.matmul(b.T[part], columns, out=turned[part])
    return np.ascontiguousarray(turned.T)


# Helpers


def rows_per_chunk(vocab_size: int) -> int:
    """Return for how many rows the loss computes logits at a time.

    It is a multiple of 64, as kernels of products like numbers of rows to be.
    """
    return max(LOGITS_PER_CHUNK // vocab_size // 64 * 64, MIN_ROWS_PER_CHUNK)


def exp_is_safe(totals: Array) -> bool:
    """Whether the exponentials with these sums can be used as they are.

    If not, the maximum of each row has to be subtracted from the exponents first.
    """
    least, greatest = math.exp(-SAFE_EXPONENT), math.exp(SAFE_EXPONENT)
    return bool(((totals > least) & (totals < greatest)).all())


def _dropped(
    x: Array, rate: float, rng: RandomStream | None
) -> tuple[Array, tuple[Array | None, float]]:
    """Return Dropout(x), x itself if all is kept, and what `_apply_dropout` needs."""
    if rng is None or rate == 0:
        return x, (None, 1.0)
    dropout_mask = rng.keep_mask(x.shape, rate)
    return _apply_dropout(x, dropout_mask), dropout_mask


def _apply_dropout(
    x: Array, dropout_mask: tuple[Array | None, float], out: Array | None = None
) -> Array:
    """Return x times the factor where kept, 0 elsewhere; x itself if all is kept."""
    keep, scale = dropout_mask
    if keep is None:
        return x
    out = array_module(x).multiply(x, keep, out=out)
    out *= scale
    return out


def _ones(xp: ModuleType, like: Array, size: int) -> Array:
    """Return ones: a product with them sums rows or columns, faster than `sum`."""
    return _filled(xp, like, size, 1)


def _filled(xp: ModuleType, like: Array, size: int, value: float) -> Array:
    """Return a vector of one value, which nothing may change."""
    if xp is np:
        return _filled_on_host(size, value, like.dtype)
    return xp.full(size, value, dtype=like.dtype)


@functools.lru_cache(maxsize=32)
def _filled_on_host(size: int, value: float, dtype: np.dtype[Any]) -> np.ndarray:
    return np.full(size, value, dtype)


def _row_dot(xp: ModuleType, a: Array, b: Array) -> Array:
    """Sum a * b over the last axis."""
    return xp.einsum("...i,...i->...", a, b)


def split_heads(x: Array, num_heads: int) -> Array:
    """View [B, T, H d] as [B, H, T, d]."""
    width = x.shape[-1] // num_heads
    return x.reshape(*x.shape[:-1], num_heads, width).swapaxes(-2, -3)


def softmax_in_place(xp: ModuleType, scores: Array) -> None:
    """Replace `scores` by their softmax over the last axis."""
    length = scores.shape[-1]
    rows = scores.reshape(-1, length)
    # NumPy finds the maxima of short rows faster as those of the transpose's columns.
    columns = rows.T.copy() if length <= SHORT_ROW else rows.T
    scores -= columns.max(axis=0).reshape(*scores.shape[:-1], 1)
    xp.exp(scores, out=scores)
    totals = scores.reshape(rows.shape) @ _ones(xp, rows, length)
    scores *= (1 / totals).reshape(*scores.shape[:-1], 1)


def _sum_by_id(ids: Array, rows: Array) -> tuple[Array, Array]:
    """Sum the rows of equal ids [N]. Return the distinct ids [U], their sums [U, D]."""
    xp = array_module(rows)
    order = xp.argsort(ids, kind="stable")
    unique, starts = xp.unique(ids[order], return_index=True)
    return unique, xp.add.reduceat(rows[order], starts, axis=0)
