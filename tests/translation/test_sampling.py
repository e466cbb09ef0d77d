"""Samples: their frequencies against the softmax, and what they depend on."""

import json
from collections import Counter
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from minitransformer.settings.config import EOS_ID
from minitransformer.settings.decoding_config import TranslationConfig
from minitransformer.translation.sampling import (
    Draws,
)
from support.closeness import assert_close
from support.in_process import run_translate
from support.models import MAT_LINES
from support.scripted_decoder import (
    ScriptedDecoder,
    random_log_probs,
    search_to_the_end,
)
from support.scripts import SHORT

# The values that chi-square exceeds with probability 0.001, by degrees of freedom.
CRITICAL = [
    0.0, 10.828, 13.816, 16.266, 18.467, 20.515, 22.458, 24.322, 26.124, 27.877,
    29.588, 31.264, 32.909,
]  # fmt: skip

SAMPLE = TranslationConfig(sample=True, max_len_a=0, max_len_b=5)


def assert_drawn_from(counts, probabilities):
    """Compare how often each outcome came with its probability."""
    total = sum(counts.values())
    assert counts.keys() <= {x for x, p in probabilities.items() if p > 0}
    assert sum(probabilities.values()) == pytest.approx(1)
    terms = [
        (counts[outcome] - total * p) ** 2 / (total * p)
        for outcome, p in probabilities.items()
        if p > 0
    ]
    assert all(total * p >= 5 for p in probabilities.values() if p > 0)
    assert sum(terms) < CRITICAL[len(terms) - 1]


def next_probabilities(log_probs, temperature, top_k, top_p):
    """The distribution of the next token, by the definitions and one by one."""
    possible = {t: log_probs[t] / temperature for t in range(EOS_ID, len(log_probs))}
    ranked = sorted(possible, key=lambda t: -possible[t])[:top_k]
    total = sum(np.exp(possible[t]) for t in ranked)
    kept, mass = {}, 0.0
    for token in ranked:
        if mass < (top_p or 1):
            kept[token] = np.exp(possible[token]) / total
            mass += kept[token]
    return {token: p / mass for token, p in kept.items()}


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [
        (1.0, None, None),
        (0.5, None, None),
        (2.0, None, None),
        (1.0, 2, None),
        (1.0, None, 0.7),
        (2.0, 3, 0.6),
    ],
)
def test_outcomes_are_as_frequent_as_they_are_probable(temperature, top_k, top_p):
    table, limit, count = cache(random_log_probs(3, 0.4)), 2, 4000
    config = replace(SAMPLE, temperature=temperature, top_k=top_k, top_p=top_p)
    draws = Draws(config, [], [(1, n) for n in range(count)])
    decoder = draws.decoder(ScriptedDecoder(table, [0] * count), np.arange(count))
    found = search_to_the_end(decoder, [limit] * count, 1, 0.0, 1)
    expected = {}
    for first, p in next_probabilities(table(0, ()), temperature, top_k, top_p).items():
        if first == EOS_ID:
            expected[()] = p
            continue
        after = next_probabilities(table(0, (first,)), temperature, top_k, top_p)
        for second, q in after.items():
            expected[(first, second) if second != EOS_ID else (first,)] = p * q
    assert_drawn_from(Counter(h.tokens for [h] in found), expected)
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


def test_the_command_draws_samples(model_path):
    flags = ["--model", model_path, *SHORT, "--sample", "--nbest", "6"]
    code, out, err = run_translate(*flags, "the cat", "a mat")
    assert (code, err) == (0, "")
    lines = [line.split(" ||| ") for line in out.split("\n")[:-1]]
    assert [line[0] for line in lines] == ["0"] * 6 + ["1"] * 6
    assert len({text for _, text, _ in lines}) > 6
    assert run_translate(*flags, "the cat", "a mat")[1] == out
    more = ["--json", "--seed", "1", "--temperature", "1"]
    _, answers, _ = run_translate(*flags, *more, "the cat")
    texts = [t["text"] for t in json.loads(answers)["translations"]]
    assert texts == [text for _, text, _ in lines[:6]]
