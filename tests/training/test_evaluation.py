"""Validation, against one batch at a time."""

import math

import numpy as np

from minitransformer.model.parameters import ParameterBuffer
from minitransformer.model.transformer import Transformer
from minitransformer.settings.config import TrainingConfig
from minitransformer.text.batches import ParallelCorpus
from minitransformer.text.ids import Ragged
from minitransformer.text.pairs import TextPair
from minitransformer.text.tokenizer import Tokenizer
from minitransformer.training import evaluation
from minitransformer.training.evaluation import (
    TokenStatistics,
    token_statistics,
    validate,
)
from minitransformer.training.parallel import CpuModel
from support.closeness import assert_close
from support.models import tiny_config

CONFIG = tiny_config(vocab_size=40)


def test_validation_is_the_sum_over_sentences_that_are_short_enough():
    rng = np.random.default_rng(0)
    sides = []
    for _ in range(2):
        lengths = [*rng.integers(1, 9, 20), 9 * len(sides) + 1, 10 - 9 * len(sides)]
        starts = np.concatenate([[0], np.cumsum(lengths)])
        sides.append(Ragged(rng.integers(4, 40, starts[-1]), starts))
    corpus = ParallelCorpus(*sides)
    model = Transformer(CONFIG, dtype="float64")
    computed = CpuModel(model, ParameterBuffer(model), 2)
    total = validate(computed, corpus, TrainingConfig(max_tokens=30, max_length=9))
    alone = [corpus.batch(np.array([i])) for i in range(20)]
    each = [token_statistics(model, batch) for batch in alone]
    assert_close(total.nll, sum(part.nll for part in each))
    assert total.correct == sum(part.correct for part in each)
    assert total.tokens == corpus.target.lengths[:20].sum() + 20  # EOS counted
    assert TokenStatistics(1e6, 0, 1).perplexity == math.exp(700)
    computed.close()


def test_pairs_are_translated_if_they_fit_with_eos_counted(tmp_path):
    text = TextPair(tmp_path / "val.en", tmp_path / "val.de")
    text.source.write_text("a a\na a a\na a a a\na\n")
    text.target.write_text("a\na\na\na a a a\n")
    tokenizer = Tokenizer.train(["a a b"] * 9, 8)
    lengths = [len(ids) for ids in tokenizer.encode(["a a a", "a a a a"])]
    assert lengths[0] < lengths[1]
    training = TrainingConfig(max_length=lengths[0] + 1)
    expected = [("a a", "a"), ("a a a", "a")]
    assert evaluation.samples(text, tokenizer, training) == expected
