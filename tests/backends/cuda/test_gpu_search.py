"""Beam search on a GPU against the search on a processor, which loops follow."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from minitransformer.backends.cuda import device
from minitransformer.backends.cuda.beam_search import GraphSearch, start_search
from minitransformer.backends.cuda.search_steps import (
    SearchSteps,
    Shape,
    num_bytes,
    rounded_up,
    top_tokens,
)
from minitransformer.engine.autograd import no_grad
from minitransformer.engine.backend import to_host
from minitransformer.model.transformer import Transformer
from minitransformer.settings.config import BOS_ID, EOS_ID, PAD_ID, UNK_ID
from minitransformer.settings.decoding_config import TranslationConfig
from minitransformer.translation.batch_translation import translate_ids
from minitransformer.translation.constraints import Constraints, Prefix
from minitransformer.translation.incremental_decoding import CachedDecoder, Ensemble
from minitransformer.translation.sampling import sample_ids
from support.closeness import assert_close
from support.cuda import backend_for
from support.models import tiny_config
from support.scripted_decoder import (
    ScriptedDecoder,
    random_log_probs,
    search_to_the_end,
)

ml_dtypes = pytest.importorskip("ml_dtypes", reason="no bfloat16 without ml_dtypes")

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
TINY = tiny_config((2, 2), vocab_size=23)


def on_gpu(gpu, dtype="float32", **settings):
    """A small model with its matrices on the GPU."""
    model = Transformer(replace(TINY, **settings), seed=2)
    for _, parameter in model.named_parameters():
        data = parameter.data
        data = data.astype(DTYPES[dtype]) if data.ndim > 1 else data
        parameter.data = gpu.xp.asarray(data)
    return model


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_best_tokens_of_rows(gpu, dtype):
    """Against a sort of each row; ties go to the lower token."""
    logits = np.random.default_rng(4).standard_normal((5, 1300)).astype(DTYPES[dtype])
    logits[:, 700:710] = logits[:, 40:50] = logits.max() + 1
    logits[1, 4:] = -np.inf
    best = top_tokens(gpu.xp.asarray(logits), 12)
    values, tokens, totals = (to_host(array) for array in best)
    wide = logits.astype(float)
    assert_close(totals, np.log(np.exp(wide).sum(axis=1)), "float32")
    wide[:, [PAD_ID, UNK_ID, BOS_ID]] = -np.inf
    order = np.argsort(-wide, axis=1, kind="stable")[:, :12]
    assert (values == np.take_along_axis(wide, order, 1)).all()
    finite = np.isfinite(values)
    assert (tokens == order)[finite].all()
    assert finite.sum(axis=1).tolist() == [12, 1, 12, 12, 12]


@pytest.mark.parametrize("ties", [10, 1200])
def test_the_best_tokens_are_the_same_with_ever_more_ties(gpu, ties):
    """With 1,200 equal logits the candidates do not fit in the block's list."""
    logits = np.zeros((2, 2000), np.float32)
    logits[:, 100 : 100 + ties] = 1
    logits[1, 7] = 2
    values, tokens, _ = top_tokens(gpu.xp.asarray(logits), 8)
    assert to_host(tokens)[0].tolist() == list(range(100, 108))
    assert to_host(tokens)[1].tolist() == [7, *range(100, 107)]
    assert to_host(values)[1].tolist() == [2] + [1] * 7


class ScriptedSteps(SearchSteps):
    """Steps whose logits are a table's; a graph could not hold what the host computes.

    Of each beam, the table is asked for the tokens that the search has chosen for it.
    """

    def __init__(self, gpu, table, shape):
        self.model = model = on_gpu(gpu)
        self.table, self.counts = table, []
        block = gpu.xp.empty(num_bytes(model, shape), np.uint8)
        super().__init__(model, shape, block)
        self.histories = {}

    def run(self, size):
        self.compute(size)

    def logits(self, size):
        beams, position = self._shape.beams, int(to_host(self.arrays.position)[0])
        self.counts.append(size)
        origins, tokens = (
            to_host(array[:size]) for array in (self.arrays.origins, self.arrays.tokens)
        )
        sentences = to_host(self.arrays.sentences[:size])
        before, self.histories = self.histories, {}
        rows = []
        for row, sentence in enumerate(sentences.tolist()):
            for k in range(beams):
                history = ()
                if position:
                    origin = sentence, int(origins[row, k])
                    history = (*before.get(origin, ()), int(tokens[row, k]))
                self.histories[sentence, k] = history
                rows.append(self.table(sentence, history))
        return self._xp.asarray(np.array(rows, np.float32))


def scripted_search(gpu, table, limits, beam, nbest):
    """Return the hypotheses of a search on the GPU, and the rows of each step."""
    device.current().use_recordable_stream()
    steps = ScriptedSteps(
        gpu, table, Shape(len(limits), beam, nbest, 16, 16).rounded_up()
    )
    with no_grad():
        state = steps.model.start_decoding(gpu.xp.asarray([[5]] * len(limits)))
    search = GraphSearch(steps, state, np.arange(len(limits)), np.array(limits), 0.6)
    return [hypotheses for _, hypotheses in search.step()], steps.counts


@pytest.mark.parametrize(("beam", "nbest"), [(1, 1), (2, 1), (4, 2), (9, 2)])
def test_gpu_beam_search_equals_the_reference(gpu, beam, nbest):
    limits = np.array([1, 2, 3, 5, 5, 7])
    if beam == 9:
        limits = limits[2:4]
    for seed, sharpness in enumerate([0.0, 0.5, 3.0, 3.0]):
        table = random_log_probs(seed, sharpness)
        decoder = ScriptedDecoder(table, range(len(limits)))
        expected = search_to_the_end(decoder, limits, beam, 0.6, nbest)
        hypotheses, counts = scripted_search(gpu, table, limits, beam, nbest)
        assert len(decoder.counts) <= len(counts) <= len(decoder.counts) + 1
        for a, b in zip(hypotheses, expected, strict=True):
            assert [h.tokens for h in a] == [h.tokens for h in b]
            for got, hypothesis in zip(a, b, strict=True):
                assert_close(got.score, hypothesis.score, "float32")
                assert_close(got.log_prob, hypothesis.log_prob, "float32")


def test_sentences_that_are_left_move_together(gpu):
    """Those that end later stand between others. Each ends as if it were alone."""
    limits = [9, 2, 2, 2, 8, 2, 2, 9, 2, 2, 2, 7]
    table = random_log_probs(3, 0.3)
    together, counts = scripted_search(gpu, table, limits, 3, 2)
    assert counts[0] == 12
    assert counts[-1] in (1, 2, 3, 4)
    for sentence, limit in enumerate(limits):
        own_table = partial(lambda number, _, history: table(number, history), sentence)
        alone, _ = scripted_search(gpu, own_table, [limit], 3, 2)
        assert [h.tokens for h in alone[0]] == [h.tokens for h in together[sentence]]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("when", [0, 2])
def test_logits_that_are_not_finite_are_refused_by_both_searches(gpu, bad, when):
    """A row of them or one NaN, in the first step or later."""
    ordinary = random_log_probs(1, 0.5)

    def diverging(sentence, history):
        logits = ordinary(sentence, history).copy()
        if len(history) == when and sentence == 1:
            logits[4 if np.isnan(bad) else slice(None)] = bad
        logits[EOS_ID] = -30 if len(history) < when else logits[EOS_ID]
        return logits

    decoder = ScriptedDecoder(diverging, range(2))
    searches = (
        lambda: search_to_the_end(decoder, [9, 9], 3, 0.6, 1),
        lambda: scripted_search(gpu, diverging, [9, 9], 3, 1),
    )
    for search in searches:
        with (
            pytest.raises(ValueError, match="a model whose outputs are finite"),
            np.errstate(all="ignore"),
        ):
            search()


@pytest.mark.parametrize(
    ("name", "window"),
    [("plain", 3), ("constrained", None), ("sampled", 3), ("ensemble", None)],
)
def test_translations_are_those_of_the_reference(gpu, name, window):
    """Twice: the second time, the steps of known shapes are replayed."""
    sources = [[5, 9, 4], [7], [12, 13, 5, 6, 8, 10], [20, 21], [4, 4, 4, 4]] * 3
    config = TranslationConfig(beam=3, nbest=2, max_len_b=6)
    prefixes = [Prefix("", [5, n % 19 + 4], [[6], [7, 8]]) for n in range(15)]
    member = Transformer(replace(TINY, attention_window=window), seed=2)
    model = Ensemble([member, member]) if name == "ensemble" else member

    def translations():
        if name == "sampled":
            return sample_ids(member, sources, replace(config, sample=True))
        constraints = Constraints(prefixes) if name == "constrained" else None
        return translate_ids(model, sources, config, constraints=constraints)

    expected = translations()
    for _, parameter in member.named_parameters():
        parameter.data = gpu.xp.asarray(parameter.data)
    with backend_for(gpu.xp.ndarray):
        for _ in range(2):
            for a, b in zip(translations(), expected, strict=True):
                assert [h.tokens for h in a] == [h.tokens for h in b]
                got, scores = ([h.score for h in hypotheses] for hypotheses in (a, b))
                assert_close(got, scores, "float32")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_logits_of_16_bits_are_those_of_the_plain_decoder(gpu, dtype):
    """In every step, with the beams that the search has chosen."""
    model = on_gpu(gpu, dtype)
    source = gpu.xp.asarray(np.random.default_rng(7).integers(4, 23, (3, 5)))
    limits = np.full(3, 6)
    with no_grad(), backend_for(gpu.xp.ndarray):
        plain = CachedDecoder(model, source, 2)
        search = start_search(
            CachedDecoder(model, source, 2),
            np.arange(3),
            limits,
            beam_size=2,
            alpha=0.6,
            nbest=1,
        )
        steps = search._steps
        steps.start(search._state, limits, 0.6)
        arrays, rows = steps.arrays, np.repeat(np.arange(3), 1)
        tokens = gpu.xp.asarray(np.full(3, BOS_ID))
        for step in range(5):
            logits = to_host(steps.logits(3)).astype(float).reshape(3, 2, -1)
            [weights] = plain.step(tokens)
            expected = to_host(weights.values) / to_host(weights.sums)[:, None]
            found = np.exp(logits - logits.max(axis=2, keepdims=True))
            found /= found.sum(axis=2, keepdims=True)
            found[..., :EOS_ID] = 0
            beams = found[:, :1] if step == 0 else found
            assert_close(beams.reshape(len(expected), -1), expected, dtype)
            # Choose beams and tokens for both.
            rng = np.random.default_rng(step)
            origins = rng.integers(0, 1 if step == 0 else 2, (3, 2)).astype(np.int32)
            chosen = rng.integers(4, 23, (3, 2)).astype(np.int32)
            arrays.origins[...] = gpu.xp.asarray(origins)
            arrays.tokens[...] = gpu.xp.asarray(chosen)
            arrays.position += 1
            rows = np.arange(3)[:, None] * (1 if step == 0 else 2) + origins
            plain.select(gpu.xp.asarray(rows.reshape(-1)))
            tokens = gpu.xp.asarray(chosen.reshape(-1))


def test_a_step_that_cannot_be_recorded_is_computed(stand_in):
    config = TranslationConfig(beam=2, max_len_b=6)
    model = on_gpu(SimpleNamespace(xp=stand_in.xp))
    stand_in.refuses_capture = True
    with pytest.warns(UserWarning, match="without CUDA graphs: operation"):
        found = translate_ids(model, [[5, 6, 7]], config)
    expected = translate_ids(Transformer(TINY, seed=2), [[5, 6, 7]], config)
    assert [h.tokens for h in found[0]] == [h.tokens for h in expected[0]]


def test_a_graph_is_recorded_once_for_each_number_of_rows(stand_in):
    config = TranslationConfig(beam=2, max_len_b=6, max_len_a=0)
    model = on_gpu(SimpleNamespace(xp=stand_in.xp))
    sources = [[5, 6, 7], [9, 4], [11, 5, 8]]
    translate_ids(model, sources, config)
    recorded = stand_in.calls.count("captured")
    stand_in.calls.clear()
    translate_ids(model, sources, config)
    assert recorded
    assert "captured" not in stand_in.calls
    assert "launched" in stand_in.calls


def test_arrays_of_another_model_or_of_larger_batches_take_the_place_of_others(
    stand_in,
):
    """The memory of a model's searches is that of the largest."""
    config = TranslationConfig(beam=2, max_len_b=6)
    models = [on_gpu(SimpleNamespace(xp=stand_in.xp), d_ff=n) for n in (8, 12)]
    short, long = [[5, 6]], [[n % 19 + 4 for n in range(40)]] * 3
    for model, d_ff in zip(models, (8, 12), strict=True):
        for sources in (short, long, short):
            found = translate_ids(model, sources, config)
            reference = Transformer(replace(TINY, d_ff=d_ff), seed=2)
            expected = translate_ids(reference, sources, config)
            assert [[h.tokens for h in a] for a in found] == [
                [h.tokens for h in a] for a in expected
            ]
    assert len(device.current().searches) == 2
    del models, model
    assert not len(device.current().searches)


def test_rounded_up_is_at_most_half_more():
    sizes = {rounded_up(n) for n in range(1, 100)}
    assert sizes == {1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128}
    assert all(n <= rounded_up(n) <= 3 * n / 2 for n in range(1, 5000))
