"""Samples: their frequencies against the softmax, and what they depend on."""

import json
from collections import Counter
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from minitransformer.settings.config import EOS_ID
from minitransformer.settings.decoding_config import TranslationConfig
from minitransformer.translation.sampling import Draws, likeliest
from support.closeness import assert_close
from support.in_process import run_translate
from support.models import MAT_LINES
from support.scripted_decoder import (
    ScriptedDecoder,
    random_log_probs,
    search_to_the_end,
)
from support.scripts import SHORT

SAMPLE = TranslationConfig(sample=True, max_len_a=0, max_len_b=5)


@pytest.mark.parametrize("cut", [{}, {"temperature": 2.0, "top_k": 3, "top_p": 0.6}])
def test_outcomes_are_as_frequent_as_they_are_probable(cut):
    """By the weights with which tokens are drawn, of which a property says more."""
    table, limit, count = cache(random_log_probs(3, 0.4)), 2, 4000
    config = replace(SAMPLE, **cut)
    draws = Draws(config, [], [(1, n) for n in range(count)])
    decoder = draws.decoder(ScriptedDecoder(table, [0] * count), np.arange(count))
    found = search_to_the_end(decoder, [limit] * count, 1, 0.0, 1)

    def next_probabilities(history):
        weights = np.exp(table(0, history), dtype=np.float32)
        weights[:EOS_ID] = 0
        [kept] = likeliest(weights[None], config)
        return enumerate(kept / kept.sum())

    probabilities = Counter()
    for first, p in next_probabilities(()):
        after = next_probabilities((first,)) if first != EOS_ID else [(EOS_ID, 1)]
        for second, q in after:
            tokens = tuple(x for x in (first, second) if x != EOS_ID)
            probabilities[tokens] += p * q
    counts = Counter(h.tokens for [h] in found)
    assert counts.keys() <= probabilities.keys()
    for tokens, p in probabilities.items():
        assert abs(counts[tokens] - count * p) <= 3.5 * np.sqrt(count * p * (1 - p))
    for [h] in found[:50]:  # log-probabilities are those of the model, at temperature 1
        sequence = (*h.tokens, EOS_ID)[:limit]
        log_probs = [table(0, sequence[:i])[t] for i, t in enumerate(sequence)]
        assert_close(h.log_prob, sum(log_probs))


def tokens_of(translator, lines, config):
    return [[h.tokens for h in found] for found in translator.hypotheses(lines, config)]


@pytest.mark.parametrize("top_p", [None, 0.9])
def test_samples_depend_on_the_line_alone(translator, top_p):
    """Not on other lines, their order, the batch, threads, or the number of samples."""
    lines = ["", *MAT_LINES[:6], "mat", MAT_LINES[0]]
    config = replace(SAMPLE, nbest=3, top_p=top_p)
    together = tokens_of(translator, lines, config)
    assert together[0] == [()] * 3
    assert together[1] == together[-1]
    assert len({tuple(samples) for samples in together}) == len(lines) - 1
    assert tokens_of(translator, lines[::-1], config) == together[::-1]
    for line, samples in zip(lines, together, strict=True):
        assert tokens_of(translator, [line], config) == [samples]
    few = tokens_of(translator, lines, replace(config, nbest=2, decode_tokens=1))
    assert few == [samples[:2] for samples in together]
    threads = load_with(translator, num_threads=3)
    assert tokens_of(threads, lines, config) == together
    assert tokens_of(translator, lines, replace(config, seed=1)) == together
    for seed in (0, 2):
        assert tokens_of(translator, lines, replace(config, seed=seed)) != together


def load_with(translator, **changes):
    return type(translator)(translator.model, translator.tokenizer, **changes)


def test_the_command_draws_samples(translator, model_path):
    lines = ["the cat", "a mat"]
    ranked = translator.hypotheses(lines, replace(SAMPLE, nbest=6))
    rows = [
        f"{number} ||| {h.text} ||| {h.score:.4f}\n"
        for number, found in enumerate(ranked)
        for h in found
    ]
    flags = ["--model", model_path, *SHORT, "--sample", "--nbest", "6"]
    assert run_translate(*flags, *lines) == (0, "".join(rows), "")
    assert len({*rows}) > 6
    more = ["--json", "--seed", "1", "--temperature", "1"]
    _, answers, _ = run_translate(*flags, *more, *lines)
    first = json.loads(answers.splitlines()[0])
    assert [x["text"] for x in first["translations"]] == [h.text for h in ranked[0]]
