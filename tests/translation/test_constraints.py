"""Constraints against exhaustive search, and prefixes of real text."""

import io
import itertools
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import sentencepiece

from minitransformer import load
from minitransformer.settings.config import EOS_ID, UNK_ID
from minitransformer.settings.decoding_config import TranslationConfig
from minitransformer.text.tokenizer import SPACE, Tokenizer
from minitransformer.translation.constraints import Constraints, PrefixFinder
from support.closeness import assert_close
from support.in_process import run_translate
from support.models import MAT_LINES, save_small_model
from support.scripted_decoder import (
    ScriptedDecoder,
    random_log_probs,
    search_to_the_end,
)
from support.scripts import SHORT

SHORT_OUTPUT = TranslationConfig(max_len_a=0, max_len_b=5)


def constrained_search(table, limit, nbest, prefixes, beam=None):
    """The search of one sentence with a beam that no candidate is lost from."""
    batch, constraints = np.array([0]), Constraints(prefixes)
    decoder = constraints.decoder(ScriptedDecoder(table, [0]), batch)
    return search_to_the_end(decoder, [limit], beam or 3**limit, 0.6, nbest)[0]


def ended(table, words, limit):
    """Every sequence of `words` that ends in time: score, log-probability, tokens."""
    for length in range(1, limit + 1):
        for chosen in itertools.product(words, repeat=length - 1):
            sequence = (*chosen, EOS_ID)
            log_prob = sum(
                table(0, sequence[:i])[token] for i, token in enumerate(sequence)
            )
            yield log_prob / ((5 + length) / 6) ** 0.6, log_prob, chosen


@pytest.fixture(scope="module")
def letters():
    """A tokenizer of few pieces, several of which begin alike."""
    lines = ["ab abb", "ba ab", "aab ab", "bab abb", "b a", "abb ba"] * 3
    return Tokenizer.train(lines, 15)


def allowed_by_definition(tokenizer, tokens, prefix):
    """Whether the text's first pieces are cut from text that begins with the prefix."""
    for end in range(1, len(tokens) + 1):
        [before, text] = tokenizer.decode([tokens[: end - 1], tokens[:end]])
        if not text.startswith(prefix):
            continue
        [cut] = tokenizer.encode([text])
        last = tokenizer.pieces(tokens[end - 1 : end])
        if last == [SPACE]:  # which precedes a letter that no piece begins with
            cut = [*cut, tokens[end - 1]]
        return not before.startswith(prefix) and cut == list(tokens[:end])
    return False


def test_a_vocabulary_without_a_space_before_the_first_word_is_refused():
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["ab abb", "ba ab"]),
        model_writer=model,
        minloglevel=2,
        model_type="char",
        add_dummy_prefix=False,
        hard_vocab_limit=False,
    )
    tokenizer = Tokenizer(model.getvalue())
    with pytest.raises(ValueError, match="--prefix: expected a vocabulary that puts"):
        PrefixFinder(tokenizer)


@pytest.mark.parametrize("prefix", ["ab \xad", "\ufeffab\u3000", " ab\t"])
def test_a_prefix_is_read_as_all_text(letters, prefix):
    """It ends with a space, whatever may follow that nobody sees."""
    assert PrefixFinder(letters).find(prefix) == PrefixFinder(letters).find("ab ")


@pytest.mark.parametrize(
    "prefix", ["a", "abb", "aab", "bab", "aab ", "b a", "ba ab", "ab ", "abbab", "babb"]
)
def test_the_best_of_all_translations_that_begin_with_a_prefix(letters, prefix):
    words = range(4, letters.vocab_size)
    found = PrefixFinder(letters).find(prefix)
    table = cache(random_log_probs(len(prefix), vocab_size=letters.vocab_size))
    limit = 4
    allowed = [
        (score, log_prob, tokens)
        for score, log_prob, tokens in ended(table, words, limit)
        if allowed_by_definition(letters, tokens, prefix)
    ]
    assert allowed or len(letters.encode([prefix])[0]) >= limit
    expected = sorted(allowed, reverse=True)[:9]
    best = constrained_search(table, limit, 9, [found], beam=1400)
    best = [h for h in best if len(h.tokens) < limit]  # what did not end is no match
    assert [h.tokens for h in best] == [tokens for *_, tokens in expected]
    assert_close([h.log_prob for h in best], [p for _, p, _ in expected])


CUT = "sat mat 7 cat"
CHANGES = {"beam": 4}, {"beam": 1}, {"nbest": 3}, {"sample": True, "nbest": 3}


@pytest.mark.parametrize("changes", [*CHANGES, {"max_input": 9}])
def test_every_translation_begins_with_its_prefix(translator, changes):
    config = replace(SHORT_OUTPUT, **changes)
    prefixes = [CUT[:end] for end in range(len(CUT) + 1)]
    lines = MAT_LINES[: len(prefixes)]
    found = translator.hypotheses(lines, config, 1, prefixes)
    for hypotheses, prefix in zip(found, prefixes, strict=True):
        texts = [h.text for h in hypotheses]
        decoded = translator.tokenizer.decode([h.tokens for h in hypotheses])
        # Between the parts of a long line there are spaces.
        assert texts == decoded or changes not in CHANGES
        assert 1 <= len(texts) <= config.nbest
        assert all(text.startswith(prefix) for text in texts)
        assert all(UNK_ID not in h.tokens for h in hypotheses)
    plain = translator.hypotheses(lines[:1], config)
    assert [h.tokens for h in found[0]] == [h.tokens for h in plain[0]]
    # With room for a few at once, others join those that are left.
    few = replace(config, decode_tokens=18 * config.beam)
    joined = translator.hypotheses(lines, few, 1, prefixes)
    assert [h.tokens for x in joined for h in x] == [h.tokens for x in found for h in x]


def test_a_prefix_has_room_in_the_longest_output(translator):
    [found] = translator.hypotheses(["on"], SHORT_OUTPUT, 1, [MAT_LINES[3] + " the"])
    prefix = PrefixFinder(translator.tokenizer).find(MAT_LINES[3] + " the")
    most = prefix.most_tokens
    [tokens] = translator.tokenizer.encode([MAT_LINES[3] + " the"])
    assert len(tokens) <= most <= len(tokens) + 3
    assert 6 < len(found[0].tokens) <= 6 + most


def test_impossible_constraints_name_the_line(translator, tmp_path):
    def refused(message, translator, config, lines, prefixes):
        with pytest.raises(ValueError, match=message):
            translator.translate(lines, config, 7, prefixes)

    for prefixes, message in (
        (["", "\u4f60"], "prefix of line 8: expected text that the vocabulary"),
        (["", "a", "x"], "expected prefixes for 2 lines, got 3"),
        (["", "\ud800"], "prefix of line 8: expected Unicode text"),
    ):
        refused(message, translator, SHORT_OUTPUT, ["a", "b"], prefixes)
    short = replace(SHORT_OUTPUT, max_input=3)
    translator.translate(["a"], short, 1, ["the"])
    for long in ("the cat sat on", "the cat " * 100_000):
        message = r"prefix of line 7: expected at most 3 tokens \(--max-input\), got"
        refused(message, translator, short, ["a"], [long])
    message = "prefix of line 7: expected none for a blank"
    refused(message, translator, SHORT_OUTPUT, [" "], ["the"])
    sharp = load(save_small_model(tmp_path / "sharp.safetensors"))
    sharp.model.embedding.table.data *= 1e4  # next to the best token, all have weight 0
    for drawn in (SHORT_OUTPUT, replace(SHORT_OUTPUT, sample=True)):
        message = "line 8: expected a translation with"
        refused(message, sharp, drawn, ["", "cat"], ["", "the cat sat on"])
    path = save_small_model(tmp_path / "l.st", positions="learned", max_positions=6)
    message = "the model has too few positions"
    refused(message, load(path), SHORT_OUTPUT, ["a"], ["the cat sat on the mat"])


def test_the_command_takes_prefixes_line_by_line(model_path, tmp_path):
    (tmp_path / "prefix").write_text("sat\n\nthe m\n")
    flags = ["--model", model_path, *SHORT, "--prefix", str(tmp_path / "prefix")]
    code, out, err = run_translate(*flags, "--buffer", "2", "cat", "", "mat")
    lines = out.split("\n")
    assert (code, err, len(lines)) == (0, "", 4)
    assert lines[0].startswith("sat")
    assert lines[1] == ""
    assert lines[2].startswith("the m")
    for sentences, got in ((["a"], "got more than 1"), (["a", "", "b", "c"], "got 3")):
        code, _, err = run_translate(*flags, "--buffer", "2", *sentences)
        assert code == 1
        assert f"prefix: expected a line for each source line, {got}" in err
