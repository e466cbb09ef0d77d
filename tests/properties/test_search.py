"""Search by whole models, against the Transformer in plain NumPy and against loops."""

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from minitransformer.settings.config import BOS_ID, EOS_ID
from minitransformer.settings.decoding_config import DecodingConfig, TranslationConfig
from minitransformer.translation.batch_translation import score_targets, translate_ids
from minitransformer.translation.incremental_decoding import Ensemble
from minitransformer.translation.sampling import likeliest
from support.properties import within
from support.reference import ReferenceTransformer
from support.strategies import cases

pytestmark = pytest.mark.properties(share=3)

# Without ties, whose order the last bit of a sum decides.
SEARCHED = cases(12, least=1, scales=(1.0, 3.0), least_width=2).map(
    lambda case: replace(case, drawn=(*case.drawn, "table", "bias"))
)


@st.composite
def decodings(draw):
    """Settings of a search, whose batches have few sentences or all."""
    beam = draw(st.integers(1, 5))
    return DecodingConfig(
        beam=beam,
        nbest=draw(st.integers(1, beam)),
        alpha=draw(st.sampled_from([0.0, 0.6, 1.0, 3.0])),
        max_len_a=draw(st.sampled_from([0.0, 1.0, 1.5])),
        max_len_b=draw(st.integers(0, 6)),
        decode_tokens=beam * draw(st.sampled_from([25, 40, 1, 1000])),
    )


def check(found, expected):
    within(abs(found - expected), 1e-9 * (1 + abs(expected)))


@given(SEARCHED, decodings())
def test_a_translation_has_the_score_of_its_tokens(case, config):
    """The n best are sorted, different, and no longer than they may be."""
    model = case.model()
    ranked = translate_ids(model, case.sources, config)
    for source, best in zip(case.sources, ranked, strict=True):
        assert 1 <= len(best) <= config.nbest
        assert len({h.tokens for h in best}) == len(best)
        scores = [h.score for h in best]
        assert scores == sorted(scores, reverse=True)
        longest = math.floor(config.max_len_a * len(source) + config.max_len_b) + 1
        for h in best:
            # At the greatest length, another token may stand in the place of EOS.
            length = min(len(h.tokens) + 1, longest)
            assert len(h.tokens) <= longest
            assert not {0, 1, BOS_ID, EOS_ID} & {*h.tokens}
            [each] = score_targets(model, [source], [h.tokens])
            check(h.log_prob, each[:length].sum())
            check(h.score, h.log_prob / ((5 + length) / 6) ** config.alpha)


@given(SEARCHED, decodings())
def test_one_beam_takes_the_likeliest_token_of_the_reference(case, config):
    model, config = case.model(), replace(config, beam=1, nbest=1)
    parameters = {name: p.data for name, p in model.named_parameters()}
    reference = ReferenceTransformer(case.config, parameters)
    ranked = translate_ids(model, case.sources, config)
    for source, [h] in zip(case.sources, ranked, strict=True):
        ids = np.array([[*source, EOS_ID]]), np.array([[BOS_ID, *h.tokens]])
        [logits] = reference.logits(*ids)
        longest = math.floor(config.max_len_a * len(source) + config.max_len_b) + 1
        for row, token in zip(logits, [*h.tokens, EOS_ID][:longest], strict=False):
            likeliest_one = row[EOS_ID:].max()
            within(likeliest_one - row[token], 1e-9 * (1 + abs(likeliest_one)))


@given(SEARCHED, decodings(), st.integers(1, 3))
def test_other_sentences_and_the_same_model_again_change_no_translation(
    case, config, members
):
    """An ensemble of one model several times is that model."""
    model = case.model()
    together = translate_ids(Ensemble([model] * members), case.sources, config)
    for source, best in zip(case.sources, together, strict=True):
        [alone] = translate_ids(model, [source], config)
        assert [h.tokens for h in best] == [h.tokens for h in alone]
        for h, other in zip(best, alone, strict=True):
            check(h.score, other.score)


POWERS = st.lists(st.sampled_from([0, 1, 2, 4, 8]), min_size=1, max_size=9)


@given(
    weights=POWERS.filter(any),
    temperature=st.sampled_from([None, 1.0, 0.5]),
    top_k=st.none() | st.integers(1, 10),
    top_p=st.none() | st.sampled_from([0.125, 0.25, 0.5, 0.75, 1.0]),
)
@example(weights=[4, 2, 1], temperature=None, top_k=2, top_p=None)
def test_samples_are_drawn_among_the_likeliest(weights, temperature, top_k, top_p):
    """Of equal weights all are kept, or none."""
    config = TranslationConfig(
        sample=True, temperature=temperature, top_k=top_k, top_p=top_p
    )
    [found] = likeliest(np.array([weights], np.float32), config)
    powers = [Fraction(w) ** (2 if temperature == 0.5 else 1) for w in weights]
    ranked = sorted(powers, reverse=True)[:top_k]
    count = mass = 0
    for power in ranked:
        if mass < Fraction(top_p or 1) * sum(ranked):
            count += 1
            mass += power
    least = ranked[count - 1] if top_k or top_p not in (None, 1.0) else 0
    kept = [power if power >= least else 0 for power in powers]
    scale = float(max(powers)) / found.max()
    assert [x * scale for x in found.tolist()] == [float(x) for x in kept]
