"""Restricted self-attention (section 4) against attention under a band mask."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minitransformer import load
from minitransformer.commands.attention_maps import attention_maps
from minitransformer.engine import ops
from minitransformer.engine.autograd import PRIMITIVES, Tensor
from minitransformer.model.transformer import Transformer
from minitransformer.settings.config import ModelConfig
from minitransformer.training.cost import training_flops
from support.closeness import assert_close
from support.models import (
    check_cached_decoder,
    save_small_model,
)

windows = st.integers(1, 90)


def reach(window, causal):
    return ModelConfig(attention_window=window).neighbourhood(causal)


def band(length, before, after, mask=None):
    """What a position sees: its neighbourhood's keys that the mask allows, and itself.

    Shapes: mask [B, 1, 1, n] -> [n, n] or [B, 1, n, n]
    """
    seen = np.zeros((length, length), dtype=bool)
    for i in range(length):
        seen[i, max(i - before, 0) : i + after + 1] = True
    return seen if mask is None else (seen & mask) | np.eye(length, dtype=bool)


def masked_form(q, k, v, mask=None, *, before, after, **options):
    return ops.attention(q, k, v, band(q.shape[1], before, after, mask), **options)


@given(st.data(), st.integers(1, 70), windows, st.booleans(), st.integers(0, 1000))
def test_restricted_attention_equals_attention_under_a_band_mask(
    data, length, window, causal, seed
):
    rng = np.random.default_rng(seed)
    batch, heads, d_k, d_v = (data.draw(st.integers(1, 3)) for _ in range(4))
    q, k, v, g = (
        rng.standard_normal((batch, length, heads * d)) for d in (d_k, d_k, d_v, d_v)
    )
    mask = None
    if data.draw(st.booleans()):
        lengths = rng.integers(1, length + 1, batch)
        mask = (np.arange(length) < lengths[:, None])[:, None, None, :]
    before, after = reach(window, causal)
    out, vjp = PRIMITIVES["restricted_attention"](
        q, k, v, mask, num_heads=heads, before=before, after=after
    )
    expected, masked_vjp = PRIMITIVES["attention"](
        q, k, v, band(length, before, after, mask), num_heads=heads
    )
    for found, wanted in zip((out, *vjp(g)), (expected, *masked_vjp(g)), strict=True):
        if wanted is None:
            assert found is None
        else:
            np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("window", "sizes"), [(1, (0, 0)), (2, (1, 1)), (3, (1, 1)), (64, (32, 32))]
)
def test_a_neighbourhood_is_centred(window, sizes):
    assert reach(window, causal=False) == sizes
    assert reach(window, causal=True) == (sizes[0], 0)


def test_memory_grows_with_the_length_alone():
    peaks = []
    for length in (2048, 4096):
        x = Tensor(np.ones((1, length, 4), np.float32), requires_grad=True)
        tracemalloc.start()
        out = ops.restricted_attention(x, x, x, num_heads=1, before=32, after=32)
        out.backward(out.data)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert 1.8 < peaks[1] / peaks[0] < 2.2
    assert peaks[1] < 4096 * 4096  # an n x n mask of one byte each would be that


def model(window=None, **changes):
    settings = {"vocab_size": 20, "d_model": 8, "d_ff": 12, "num_heads": 2, "d_v": 3}
    layers = {"encoder_layers": 2, "decoder_layers": 2}
    config = ModelConfig(attention_window=window, **settings, **layers, **changes)
    return Transformer(config, seed=5, dtype="float64")


@pytest.mark.parametrize("window", [1, 5, 12, 40])
def test_the_ring_buffer_holds_the_window_and_no_more(window, monkeypatch):
    """Beams reordered, sentences dropped; teacher forcing is in the masked form."""
    monkeypatch.setattr(ops, "restricted_attention", masked_form)
    state, _ = check_cached_decoder(model(window), 50, leaving=(5, 30))
    for cache in state.caches:
        assert cache.used == window // 2 + 1
        assert len(cache.keys) <= 2 * cache.used


def test_attention_maps_are_zero_outside_the_window(tmp_path):
    translator = load(save_small_model(tmp_path / "x.safetensors", attention_window=4))
    line = "the cat number 7 sat on the mat"
    maps = attention_maps(translator, line)
    for weights, sizes in ((maps.encoder, (2, 2)), (maps.decoder, (2, 0))):
        assert_close(weights.sum(axis=-1), np.ones(weights.shape[:-1]), "float32")
        assert ((weights[0, 0] > 0) == band(len(weights[0, 0]), *sizes)).all()
    assert (maps.cross > 0).all()
    net = translator.model
    [ids] = translator.tokenizer.encode([line])
    x = net.embedding(np.array([[*ids, 3]]), None).data[0]
    part, d = net.encoder[0].self_attention, net.config.key_width
    q, k = (x @ weight.data[:, d : 2 * d] for weight in (part.query, part.key))
    scores = np.exp(q @ k.T / np.sqrt(d)) * band(len(x), 2, 2)
    assert_close(maps.encoder[0, 1], scores / scores.sum(1, keepdims=True), "float32")


def test_operations_count_the_keys_inside_the_window():
    """The difference to full attention is that of the pairs, at d_k + d_v each."""
    narrow, full = model(9).config, model().config
    pairs = 50 * (50 - 9) * narrow.encoder_layers
    pairs += 40 * (40 - 5) * narrow.decoder_layers
    saved = training_flops(full, 50, 40) - training_flops(narrow, 50, 40)
    assert saved == pytest.approx(6 * pairs * 2 * (4 + 3))
    assert training_flops(model(500).config, 50, 40) == training_flops(full, 50, 40)
