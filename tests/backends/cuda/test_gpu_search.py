"""Beam search on a GPU against the search on a processor, which loops follow."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from minitransformer.backends.cuda import device
from minitransformer.backends.cuda.beam_search import GraphSearch
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
from minitransformer.settings.decoding_config import DecodingConfig, TranslationConfig
from minitransformer.translation.batch_translation import score_targets, translate_ids
from minitransformer.translation.constraints import Constraints, Prefix
from minitransformer.translation.incremental_decoding import Ensemble
from minitransformer.translation.sampling import sample_ids
from support.closeness import assert_close
from support.cuda import backend_for
from support.host_blas import DTYPES
from support.models import tiny_config
from support.properties import within
from support.scripted_decoder import (
    ScriptedDecoder,
    random_log_probs,
    search_to_the_end,
)
from support.strategies import cases

# The largest error of a score, as a share of it and 1.
TOLERANCES = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}
TINY = tiny_config((2, 2), vocab_size=23)


def on_gpu(gpu, model, dtype="float32"):
    """Move a model's parameters to the GPU, matrices as `dtype`. Return the model."""
    for _, parameter in model.named_parameters():
        data = parameter.data
        data = data.astype(DTYPES[dtype] if data.ndim > 1 else np.float32)
        parameter.data = gpu.xp.asarray(data)
    return model


def tiny(**settings):
    return Transformer(replace(TINY, **settings), seed=2)


@settings(suppress_health_check=list(HealthCheck))
@given(
    vocab_size=st.integers(20, 50) | st.sampled_from([1300, 2000]),
    count=st.integers(1, 16),
    levels=st.sampled_from([1, 3, 1000]),
    dtype=st.sampled_from([*DTYPES]),
    seed=st.integers(0, 1000),
)
# 1,990 equal logits do not fit in the block's list of candidates.
@example(2000, 8, 1, "float32", 0)
def test_the_best_tokens_of_rows(gpu, vocab_size, count, levels, dtype, seed):
    """Against a sort of each row; ties go to the lower token."""
    logits = np.random.default_rng(seed).integers(0, levels, (3, vocab_size)) / 64
    logits = logits.astype(DTYPES[dtype])
    logits[1, 4:] = -np.inf
    best = top_tokens(gpu.xp.asarray(logits), count)
    values, tokens, totals = (to_host(array) for array in best)
    wide = logits.astype(float)
    assert_close(totals, np.log(np.exp(wide).sum(axis=1)), "float32")
    wide[:, [PAD_ID, UNK_ID, BOS_ID]] = -np.inf
    order = np.argsort(-wide, axis=1, kind="stable")[:, :count]
    assert (values == np.take_along_axis(wide, order, 1)).all()
    finite = np.isfinite(values)
    assert (tokens == order)[finite].all()
    assert finite.sum(axis=1).tolist() == [count, 1, count]


class ScriptedSteps(SearchSteps):
    """Steps whose logits are a table's; a graph could not hold what the host computes.

    Of each beam, the table is asked for the tokens that the search has chosen for it.
    """

    def __init__(self, gpu, table, shape):
        self.model = model = on_gpu(gpu, tiny())
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


@settings(max_examples=8, suppress_health_check=list(HealthCheck))
@given(
    beam=st.integers(1, 9),
    nbest=st.integers(1, 9),
    limits=st.lists(st.integers(1, 7), min_size=1, max_size=6),
    sharpness=st.sampled_from([0.0, 0.5, 3.0]),  # 0: all are ties
    seed=st.integers(0, 1000),
)
# Sentences that end later stand between others, and move together.
@example(3, 2, [9, 2, 2, 2, 8, 2, 2, 9, 2, 2, 2, 7], 0.3, 3)
def test_gpu_beam_search_equals_the_reference(
    gpu, beam, nbest, limits, sharpness, seed
):
    nbest = min(beam, nbest)
    table, limits = random_log_probs(seed, sharpness), np.array(limits)
    decoder = ScriptedDecoder(table, range(len(limits)))
    expected = search_to_the_end(decoder, limits, beam, 0.6, nbest)
    hypotheses, counts = scripted_search(gpu, table, limits, beam, nbest)
    assert len(decoder.counts) <= len(counts) <= len(decoder.counts) + 1
    # Of the step before the last, it is known which sentences are left.
    for step, rows in enumerate(counts, start=1):
        assert rows < 3 * (limits > step - 2).sum()
    assert_same(hypotheses, expected)


def assert_same(found, expected):
    for a, b in zip(found, expected, strict=True):
        assert [h.tokens for h in a] == [h.tokens for h in b]
        for name in ("score", "log_prob"):
            numbers = [[getattr(h, name) for h in hypotheses] for hypotheses in (a, b)]
            assert_close(*numbers, "float32")


@settings(max_examples=8, suppress_health_check=list(HealthCheck))
@given(
    case=cases(3, least=1, scales=(1.0, 0.3), least_width=2, vocab_size=st.just(30)),
    beam=st.integers(1, 4),
    dtype=st.sampled_from([*DTYPES]),
)
def test_a_translation_has_the_score_of_its_tokens_in_float64(gpu, case, beam, dtype):
    """By a whole pass of a model with the same rounded matrices, and by one here.

    Sentences end one after another, and those that are left move together.
    """
    exact, model = case.model(), on_gpu(gpu, case.model(), dtype)
    for (_, parameter), (_, rounded) in zip(
        exact.named_parameters(), model.named_parameters(), strict=True
    ):
        parameter.data = to_host(rounded.data).astype(float)
    config = DecodingConfig(beam=beam, nbest=beam, max_len_b=1)
    with backend_for(gpu.xp.ndarray):
        sources = case.sources * 2
        found = translate_ids(model, sources, config)
        for source, best in zip(sources, found, strict=True):
            longest = len(source) + 2
            pairs = [source] * len(best), [h.tokens for h in best]
            for h, *scores in zip(
                best,
                score_targets(exact, *pairs),
                score_targets(model, *pairs),
                strict=True,
            ):
                expected, again = (x[:longest].sum() for x in scores)
                for number in (h.log_prob, again):
                    error = abs(number - expected)
                    within(error, TOLERANCES[dtype] * (1 + abs(expected)))


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


@pytest.mark.parametrize("name", ["constrained", "sampled", "ensemble"])
def test_searches_that_ask_for_weights_are_those_of_the_reference(gpu, name):
    sources = [[5, 9, 4], [7], [12, 13, 5, 6, 8, 10], [20, 21], [4, 4, 4, 4]]
    config = TranslationConfig(beam=3, nbest=2, max_len_b=6)
    prefixes = [Prefix("", [5, n + 4], [[6], [7, 8]]) for n in range(5)]
    member = tiny(attention_window=3)
    model = Ensemble([member, member]) if name == "ensemble" else member

    def translations():
        if name == "sampled":
            return sample_ids(member, sources, replace(config, sample=True))
        constraints = Constraints(prefixes) if name == "constrained" else None
        return translate_ids(model, sources, config, constraints=constraints)

    expected = translations()
    on_gpu(gpu, member)
    with backend_for(gpu.xp.ndarray):
        assert_same(translations(), expected)


def test_a_step_that_cannot_be_recorded_is_computed(stand_in):
    config = TranslationConfig(beam=2, max_len_b=6)
    expected = translate_ids(tiny(), [[5, 6, 7]], config)
    stand_in.refuses_capture = True
    with pytest.warns(UserWarning, match="without CUDA graphs: operation"):
        found = translate_ids(on_gpu(stand_in, tiny()), [[5, 6, 7]], config)
    assert_same(found, expected)


def test_searches_share_the_graphs_and_the_memory_of_their_model(stand_in):
    """The memory is that of the largest; another graph is for other sizes only."""
    config = TranslationConfig(beam=2, max_len_a=0, max_len_b=6)
    short, long = [[5, 6]], [[n % 19 + 4 for n in range(40)]] * 3
    models = [tiny(d_ff=8), tiny(d_ff=12)]
    for model in models:
        expected = [translate_ids(model, sources, config) for sources in (short, long)]
        on_gpu(stand_in, model)
        for i, captured in (0, True), (0, False), (1, True), (0, True), (1, False):
            stand_in.calls.clear()
            found = translate_ids(model, (short, long)[i], config)
            assert_same(found, expected[i])
            assert ("captured" in stand_in.calls) == captured
            assert "launched" in stand_in.calls
    assert len(device.current().searches) == 2
    del models, model
    assert not len(device.current().searches)


def test_rounded_up_is_at_most_half_more():
    sizes = {rounded_up(n) for n in range(1, 100)}
    assert sizes == {1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128}
    assert all(n <= rounded_up(n) <= 3 * n / 2 for n in range(1, 5000))
