"""Beam search against exhaustive search, the cached decoder against the full one."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minitransformer.model.transformer import Transformer
from minitransformer.settings.config import BOS_ID, EOS_ID, PAD_ID, UNK_ID
from minitransformer.settings.decoding_config import DecodingConfig, TranslationConfig
from minitransformer.system import workers
from minitransformer.text.tokenizer import Tokenizer
from minitransformer.translation import batch_translation
from minitransformer.translation.batch_translation import translate_ids
from minitransformer.translation.beam_search import BeamSearch
from minitransformer.translation.incremental_decoding import Ensemble
from minitransformer.translation.translator import Translator
from support.closeness import assert_close
from support.models import tiny_config
from support.scripted_decoder import (
    VOCAB,
    ScriptedDecoder,
    random_log_probs,
    search_to_the_end,
)

FREE = [i for i in range(VOCAB) if i not in (PAD_ID, UNK_ID, BOS_ID, EOS_ID)]


def search(table, limits, beam, alpha, nbest=1, sentences=None):
    sentences = range(len(limits)) if sentences is None else sentences
    decoder = ScriptedDecoder(table, sentences)
    return search_to_the_end(decoder, limits, beam, alpha, nbest), decoder


def all_hypotheses(table, sentence, limit, alpha):
    """Every ended sequence, and if none could end in time every longest one."""
    found = []
    for length in range(1, limit + 1):
        for words in itertools.product(FREE, repeat=length - 1):
            sequence = (*words, EOS_ID)
            log_prob = sum(
                table(sentence, sequence[:i])[token] for i, token in enumerate(sequence)
            )
            penalty = ((5 + length) / 6) ** alpha
            found.append((log_prob / penalty, log_prob, words))
    return sorted(found, reverse=True)


@given(st.integers(0, 10_000), st.sampled_from([0.0, 0.6, 1.0]), st.integers(1, 3))
def test_a_wide_beam_is_exhaustive_search(seed, alpha, nbest):
    limit, table = 4, random_log_probs(seed)
    [found], _ = search(table, [limit], 3**limit, alpha, nbest)
    expected = all_hypotheses(table, 0, limit, alpha)[:nbest]
    assert [h.tokens for h in found] == [tokens for *_, tokens in expected]
    assert_close([h.score for h in found], [s for s, *_ in expected])
    assert_close([h.log_prob for h in found], [p for _, p, _ in expected])


def search_by_the_definition(table, limit, beam, alpha, nbest):
    """Beam search of one sentence that ends when `beam` beams have, or at the limit."""
    live, finished = [((), 0.0)], []
    for length in range(1, limit + 1):
        candidates = [
            ((*words, token), log_prob + float(table(0, words)[token]))
            for words, log_prob in live
            for token in [EOS_ID, *FREE]
        ]
        candidates.sort(key=lambda candidate: -candidate[1])
        for words, log_prob in candidates[:beam]:
            if words[-1] == EOS_ID:
                score = log_prob / ((5 + length) / 6) ** alpha
                finished.append((score, words[:-1]))
        live = [c for c in candidates if c[0][-1] != EOS_ID][:beam]
        if len(finished) >= beam:
            break
    if not finished:
        finished = [(p / ((5 + limit) / 6) ** alpha, words) for words, p in live]
    return sorted(finished, key=lambda hypothesis: -hypothesis[0])[:nbest]


@settings(max_examples=10 * settings.default.max_examples)
@given(
    seed=st.integers(0, 10_000),
    sharpness=st.sampled_from([1.0, 2.0, 4.0]),
    limit=st.integers(3, 10),
    beam=st.integers(1, 4),
    alpha=st.sampled_from([0.0, 0.6, 1.5, 4.0]),
    nbest=st.integers(1, 4),
)
def test_an_early_end_changes_no_result(seed, sharpness, limit, beam, alpha, nbest):
    """Where a sentence may end soon, but a longer one may score more."""
    plain, nbest = random_log_probs(seed, sharpness), min(nbest, beam)

    def table(sentence, history):
        log_probs = plain(sentence, history)
        log_probs[EOS_ID] += 1.5 if len(history) < 2 else -1.0
        return log_probs - np.log(np.exp(log_probs).sum())

    [found], _ = search(table, [limit], beam, alpha, nbest)
    expected = search_by_the_definition(table, limit, beam, alpha, nbest)
    assert [h.tokens for h in found] == [words for _, words in expected]
    assert_close([h.score for h in found], [score for score, _ in expected])


@given(st.integers(0, 10_000), st.integers(1, 4), st.integers(0, 5))
def test_searches_that_join_find_what_they_find_alone(seed, beam, together_from):
    """Whether they join before the first step, in the midst, or are done before."""
    limits, table = np.array([6, 9, 1, 7, 9]), random_log_probs(seed)
    parts, found = [], {}
    for sentences in (np.array([3, 0]), np.array([1, 4, 2])):
        decoder = ScriptedDecoder(table, sentences)
        part = BeamSearch(
            decoder, sentences, limits[sentences], beam_size=beam, alpha=0.6, nbest=2
        )
        while len(part.sentences) and part.length < together_from:
            found.update(part.step())
        parts += [part] if len(part.sentences) else []
    if len(parts) == 2:
        left = [*parts[0].sentences, *parts[1].sentences]
        parts[0].join(parts[1])
        assert parts[0].sentences.tolist() == left
    for part in parts[:1]:
        while len(part.sentences):
            found.update(part.step())
    alone, _ = search(table, limits, beam, 0.6, nbest=2)
    assert sorted(found) == [0, 1, 2, 3, 4]
    for sentence, expected in enumerate(alone):
        assert [h.tokens for h in found[sentence]] == [h.tokens for h in expected]
        assert_close([h.score for h in found[sentence]], [h.score for h in expected])


def test_the_search_ends_when_the_live_beams_can_only_draw():
    def table(sentence, history):
        row = np.full(VOCAB, -50.0)
        row[[EOS_ID, 4]] = math.log(0.5)
        return row

    [[found]], decoder = search(table, [10], 3, 0.0)
    assert found.tokens == ()
    assert decoder.counts == [1]


def test_finished_sentences_leave_the_batch():
    def table(sentence, history):
        row = np.full(VOCAB, -50.0)
        row[EOS_ID] = -60.0
        row[EOS_ID if len(history) >= 2 * sentence else 4] = -0.01
        return row

    found, decoder = search(table, [20, 20, 20], 2, 0.6)
    assert [len(h[0].tokens) for h in found] == [0, 2, 4]
    assert decoder.counts == [3, 4, 4, 2, 2]  # one beam at first


def model(positions="sinusoidal", dtype="float64"):
    sizes = {"vocab_size": 20, "d_model": 16, "d_ff": 24, "num_heads": 4, "d_v": 3}
    config = tiny_config((2, 2), **sizes, positions=positions, max_positions=40)
    return Transformer(config, seed=5, dtype=dtype)


def of_kind(kind):
    """A model whose caches forget, or several models."""
    if kind == "ensemble":
        return Ensemble([model(), model("learned")])
    return Transformer(replace(model().config, attention_window=5), 5, "float64")


@pytest.mark.parametrize(("kind", "threads"), [("restricted", 1), ("ensemble", 2)])
def test_batches_that_are_filled_up_change_no_translation(kind, threads, monkeypatch):
    net = of_kind(kind)
    rng, joined, join = np.random.default_rng(7), [], BeamSearch.join
    for embedding in (m.embedding for m in getattr(net, "members", [net])):
        embedding.table.data *= 2  # ends come soon, and late

    def watched(self, other):
        joined.append(self.length)
        join(self, other)

    monkeypatch.setattr(BeamSearch, "join", watched)
    monkeypatch.setattr(workers, "CAN_FORK", False)  # to see all of them
    sources = [list(rng.integers(4, 20, n)) for n in rng.integers(1, 12, 40)]
    settings = {"beam": 3, "nbest": 2, "max_len_b": 20}
    config = DecodingConfig(**settings, decode_tokens=3 * 60)
    together = translate_ids(net, sources, config, threads)
    assert max(joined) > 1
    joined.clear()
    for source, found in zip(sources, together, strict=True):
        [alone] = translate_ids(net, [source], config)
        assert [h.tokens for h in found] == [h.tokens for h in alone]
        assert_close([h.score for h in found], [h.score for h in alone])
    assert not joined


def test_the_longest_output_is_the_input_length_plus_50_tokens():
    """Section 6.1, for a model to which the end always is the least likely."""
    net = model()
    inputs = [[5], [4, 5, 6], [7] * 9]
    one = np.zeros(16)
    one[0] = 1.0
    for layer in net.decoder:  # whose outputs are the same for any input
        layer.feed_forward_norm.gain.data[:] = 0
        layer.feed_forward_norm.bias.data[:] = one
    table = net.embedding.table.data
    table[:, 0] = np.arange(20) / 20
    table[EOS_ID, 0] = -5
    found = translate_ids(net, inputs, DecodingConfig())
    assert [len(h[0].tokens) for h in found] == [1 + 50 + 1, 3 + 50 + 1, 9 + 50 + 1]


def test_learned_positions_bound_the_output():
    net = model("learned")
    config = DecodingConfig(beam=1, max_len_b=500)
    [[found]] = translate_ids(net, [[4, 5, 6]], config)
    assert len(found.tokens) <= 40
    with pytest.raises(ValueError, match="at most 40 tokens"):
        translate_ids(net, [[4] * 50], config)


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train([f"the cat number {i} sat down" for i in range(50)], 40)


def test_long_input_is_divided_between_words_or_refused(tokenizer):
    net = Transformer(replace(model().config, vocab_size=40), seed=5)
    line = " the cat sat down" * 30
    translator = Translator(net, tokenizer)
    settings = {"beam": 2, "max_len_b": 2, "nbest": 2, "max_input": 25}
    config = TranslationConfig(**settings)
    [divided] = translator.divide([line], config, [""])
    parts = tokenizer.encode([text for _, text in divided])
    assert "".join(itertools.chain(*divided)) == line
    assert {space for space, _ in divided} == {" "}
    assert all(0 < len(part) <= 25 for part in parts)
    assert max(map(len, parts)) < 2 * min(map(len, parts))
    [found] = translator.hypotheses([line], config)
    each = translate_ids(net, parts, config)
    for rank in range(2):
        tokens = [t for part in each for t in part[rank].tokens]
        assert found[rank].tokens == tuple(tokens)
        for name in ("score", "log_prob"):
            total = sum(getattr(part[rank], name) for part in each)
            assert_close(getattr(found[rank], name), total)

    refused = TranslationConfig(**settings, split="never")
    with pytest.raises(ValueError, match=r"line 8: expected at most 25 word pieces"):
        translator.hypotheses(["the cat", line], refused, first_line=7)
    [unbroken] = translator.divide(["c" * 60], config, [""])
    parts = tokenizer.encode([text for _, text in unbroken])
    assert max(map(len, parts)) <= 25
    assert "".join(itertools.chain(*unbroken)) == "c" * 60


def test_a_batch_of_beams_has_at_most_decode_tokens(translator, monkeypatch):
    """Padding and EOS counted, and on several threads a share of the tokens each."""
    sizes, plain = [], batch_translation.incremental_decoder

    def measured(model, source, beam_size):
        sizes.append(source.size * beam_size)
        return plain(model, source, beam_size)

    monkeypatch.setattr(batch_translation, "incremental_decoder", measured)
    monkeypatch.setattr(workers, "CAN_FORK", False)  # to see all of them
    lines = translator.tokenizer.encode(["the cat"] * 24)
    tokens = len(lines[0]) + 1
    config = DecodingConfig(beam=3, decode_tokens=5 * 3 * tokens, max_len_b=1)
    for threads, most in ((1, 5), (8, 3)):
        sizes.clear()
        translate_ids(translator.single_model, lines, config, threads)
        assert max(sizes) == most * tokens * 3
        assert sum(sizes) == 24 * tokens * 3
