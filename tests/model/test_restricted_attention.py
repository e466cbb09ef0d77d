"""Restricted self-attention (section 4) against attention under a band mask."""

import dataclasses
import json
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minitransformer import load
from minitransformer.engine import ops
from minitransformer.engine.autograd import PRIMITIVES, Tensor
from minitransformer.engine.random_streams import HostStream
from minitransformer.model.loss import training_loss
from minitransformer.model.parameters import ParameterBuffer
from minitransformer.model.transformer import Transformer
from minitransformer.runs import checkpoint
from minitransformer.settings.config import BOS_ID, PAD_ID, UNK_ID, ModelConfig
from minitransformer.settings.decoding_config import DecodingConfig
from minitransformer.settings.options import from_dict
from minitransformer.training.cost import training_flops
from minitransformer.training.profiling import operations
from minitransformer.translation import export
from minitransformer.translation.attention_maps import attention_maps
from minitransformer.translation.batch_translation import translate_ids
from minitransformer.translation.ensemble import Ensemble
from minitransformer.translation.scoring import score_targets
from support.closeness import assert_close
from support.cuda import kernels_for
from support.damage import rewrite_checkpoint
from support.models import (
    check_cached_decoder,
    confident_models,
    mean_next_probabilities,
    model_with_random_biases,
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


def test_dropout_acts_on_the_attention_weights():
    """With one-hot values the result is the weights themselves."""
    rng, n, heads, rate = np.random.default_rng(0), 50, 2, 0.25
    q, k = (rng.standard_normal((1, n, heads * 3)) for _ in range(2))
    one_hot = np.tile(np.eye(n), heads)[None]
    near = {"num_heads": heads, "before": 9, "after": 9}
    whole, dropped = (
        ops.restricted_attention(q, k, one_hot, **near, **noise).data
        for noise in ({}, {"rate": rate, "rng": HostStream((1,))})
    )
    expected = masked_form(q, k, one_hot, **near).data
    assert_close(whole, expected)
    kept = dropped != 0
    assert_close(dropped[kept], expected[kept] / (1 - rate))
    assert abs(kept.sum() / (expected > 0).sum() - (1 - rate)) < 0.05


def test_blocks_of_restricted_attention_use_the_fused_kernel():
    fused = []

    def find(name, arrays):
        fused.append((name, [array.shape for array in arrays]))
        return PRIMITIVES[name]

    x = np.ones((2, 40, 6))
    with kernels_for(np.ndarray, find=find):
        ops.restricted_attention(x, x, x, num_heads=2, before=16, after=0)
    (outer, _), (inner, shapes) = fused
    assert (outer, inner) == ("restricted_attention", "attention")
    # Three blocks a sentence: queries, keys, values and mask of each.
    assert shapes == [(6, 16, 6), (6, 32, 6), (6, 32, 6), (6, 1, 16, 32)]


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


@pytest.mark.parametrize("window", [1, 6, 7, 100])
def test_gradients_equal_those_of_masked_attention(window, monkeypatch):
    rng, losses, gradients = np.random.default_rng(0), [], []
    source, target = rng.integers(4, 20, (3, 40)), rng.integers(4, 20, (3, 36))
    source[1, 20:], target[2, 9:] = PAD_ID, PAD_ID
    for form in (ops.restricted_attention, masked_form):
        monkeypatch.setattr(ops, "restricted_attention", form)
        net = model(window)
        buffer = ParameterBuffer(net)
        loss = training_loss(net, source, target, 0.1, None)
        loss.backward()
        losses.append(loss.data)
        gradients.append(buffer.grad)
    np.testing.assert_allclose(*losses, rtol=1e-13)
    np.testing.assert_allclose(*gradients, rtol=0, atol=1e-11)
    assert buffer.data.size == ParameterBuffer(model()).data.size
    if window == 100:  # it sees all
        whole = training_loss(model(), source, target, 0.1, None)
        np.testing.assert_allclose(losses[0], whole.data, rtol=1e-13)


@pytest.mark.parametrize("window", [1, 5, 12, 40])
def test_the_ring_buffer_holds_the_window_and_no_more(window, monkeypatch):
    """Beams reordered, sentences dropped; teacher forcing is in the masked form."""
    monkeypatch.setattr(ops, "restricted_attention", masked_form)
    state, _ = check_cached_decoder(model(window), 50, leaving=(5, 30))
    for cache in state.caches:
        assert cache.used == window // 2 + 1
        assert len(cache.keys) <= 2 * cache.used


def test_scores_and_ensembles_follow_the_window(monkeypatch):
    monkeypatch.setattr(ops, "restricted_attention", masked_form)
    members, source = (
        [model(3), model(), *confident_models(1, vocab_size=20)],
        [5, 6, 7, 8, 9],
    )
    config = DecodingConfig(beam=1, max_len_a=0, max_len_b=6)
    [[found]] = translate_ids(Ensemble(members), [source], config)
    prefix = []
    for token in found.tokens:
        p = mean_next_probabilities(members, source, prefix)
        p[[PAD_ID, UNK_ID, BOS_ID]] = 0
        assert int(p.argmax()) == token
        prefix.append(token)
    [[alone]] = translate_ids(members[0], [source], config)
    [(log_prob, tokens)] = score_targets(members[0], [source], [alone.tokens])
    if tokens <= 6:  # it ended by itself
        assert alone.log_prob == pytest.approx(log_prob)


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
    q, v = np.ones((2, 50, 8)), np.ones((2, 50, 6))
    options = {"before": 4, "after": 4}
    forward, backward = operations("restricted_attention", (q, q, v), options)
    assert forward == backward / 2 == 2 * 2 * 50 * 9 * 14


def test_checkpoints_older_than_the_window_load(tmp_path):
    """Those written before there was a window do not name it."""
    path = tmp_path / "x.safetensors"
    save_small_model(path)
    config = checkpoint.load(path).model.config
    stored = dataclasses.asdict(config)
    del stored["attention_window"]
    rewrite_checkpoint(path, config=json.dumps(stored))
    assert checkpoint.load(path).model.config == config
    del stored["d_ff"]
    with pytest.raises(ValueError, match="ModelConfig: unknown or missing d_ff"):
        from_dict(ModelConfig, stored)


def test_export_refuses_a_window():
    pytest.importorskip("ctranslate2")
    with pytest.raises(ValueError, match="got a window of 5"):
        export.ctranslate2_spec(model_with_random_biases(attention_window=5), [])
