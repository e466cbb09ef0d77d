"""Several models at once: averaged probabilities, by the definition."""

import numpy as np
import pytest

from minitransformer.model.transformer import Transformer
from minitransformer.settings.config import BOS_ID, EOS_ID
from minitransformer.translation.batch_translation import score_targets
from minitransformer.translation.incremental_decoding import (
    Ensemble,
    incremental_decoder,
)
from support.closeness import assert_close
from support.in_process import run_translate
from support.models import (
    SOURCE,
    confident_models,
    mean_next_probabilities,
    save_small_model,
    tiny_config,
)
from support.scripts import SHORT


def test_given_translations_are_scored_by_the_mean():
    members, pairs = confident_models(3), [([5, 6, 7], [4, 8]), ([6], [5, 4, 7])]
    scores = score_targets(Ensemble(members), *zip(*pairs, strict=True))
    for found, (source, target) in zip(scores, pairs, strict=True):
        steps = [target[:n] for n in range(len(target) + 1)]
        each = [mean_next_probabilities(members, source, x) for x in steps]
        expected = [np.log(p[y]) for p, y in zip(each, [*target, EOS_ID], strict=True)]
        assert_close(found, expected)


def test_the_command_translates_with_several_models(tmp_path):
    paths = [save_small_model(tmp_path / f"{n}.safetensors", d_k=n) for n in (4, 6)]
    flags = [flag for path in paths for flag in ("--model", path)]
    code, out, _ = run_translate(*flags, *SHORT, "the cat", "")
    assert (code, out.count("\n")) == (0, 2)


@pytest.mark.parametrize(("sizes", "told"), [((9, 10), "9, 10"), ((), "of none")])
def test_models_of_one_vocabulary_are_an_ensemble(sizes, told):
    members = [confident_models(1, size)[0] for size in sizes]
    with pytest.raises(ValueError, match=f"models of one vocabulary, got sizes {told}"):
        Ensemble(members)


def test_an_ensemble_returns_the_mean_of_the_probabilities():
    """Up to a constant factor, also after beams are reordered."""
    members = confident_models(3)
    decoder = incremental_decoder(Ensemble(members), SOURCE, 2)
    for rows, tokens, prefixes in (
        (None, [BOS_ID], [[]]),
        ([0, 0], [4, 5], [[4], [5]]),
        ([1, 0], [5, 4], [[5, 5], [4, 4]]),
    ):
        if rows is not None:
            decoder.select(np.array(rows))
        [weights] = decoder.step(np.array(tokens))
        found = weights.values / weights.sums[:, None]
        for row, prefix in zip(found, prefixes, strict=True):
            mean = mean_next_probabilities(members, SOURCE[0, :-1], prefix)
            assert_close(row[EOS_ID:], mean[EOS_ID:])
            assert not row[:EOS_ID].any()


def test_the_smallest_table_of_positions_limits_an_ensemble():
    learned = ({"positions": "learned", "max_positions": n} for n in (9, 5))
    first, *others = (Transformer(tiny_config(**x)) for x in ({}, *learned))
    assert Ensemble([first, *others]).position_limit == 5
    assert [m.position_limit for m in (first, *others)] == [None, 9, 5]
