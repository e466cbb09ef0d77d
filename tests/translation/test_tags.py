"""Tags before source lines: what a model expects, and what it gets."""

from dataclasses import replace

import numpy as np
import pytest

from minitransformer import load
from minitransformer.__main__ import main
from minitransformer.model.transformer import Transformer
from minitransformer.settings.decoding_config import DecodingConfig, TranslationConfig
from minitransformer.settings.options import UsageError
from minitransformer.text.tokenizer import Tokenizer
from minitransformer.translation.alignment import piece_weights
from minitransformer.translation.attention_maps import attention_maps
from minitransformer.translation.tags import Tags, tags_of
from minitransformer.translation.translator import Translator
from support.models import CAT_LINES, save_small_model, small_model

KNOWN = ["<2de>", "<2fr>"]
CONFIG = DecodingConfig(max_input=8)


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train(CAT_LINES, 60, user_defined_symbols=KNOWN)


def encoded(tokenizer, known, chosen, *lines, **settings):
    """What a translator gives its model for lines: the pieces of each part, joined."""
    tags = Tags(tokenizer, known, chosen)
    translator = Translator(small_model(), tokenizer, tags=tags)
    found = translator.encode(lines, replace(CONFIG, **settings), first_line=7)
    return [["".join(tokenizer.pieces(part)) for part in parts] for parts in found]


@pytest.mark.parametrize(
    ("known", "chosen", "line"),
    [
        (KNOWN, "<2de>", "the cat"),
        (KNOWN, "<2de>", "<2de> the cat"),
        (KNOWN, None, "<2de> the cat"),
        (KNOWN[:1], "<2de>", "the cat"),
        (["", *KNOWN], "<2de>", "the cat"),
        (["", *KNOWN], None, "<2de> the cat"),
        ([], None, "<2de> the cat"),
    ],
)
def test_the_tag_of_a_line_is_its_own_or_the_chosen_one(tokenizer, known, chosen, line):
    assert encoded(tokenizer, known, chosen, line, "", " ") == [
        ["▁<2de>▁the▁cat"], [""], [""],
    ]  # fmt: skip


@pytest.mark.parametrize("chosen", [None, ""])
def test_lines_have_no_tag_if_a_corpus_had_none(tokenizer, chosen):
    assert encoded(tokenizer, ["", "<2de>"], chosen, "the cat") == [["▁the▁cat"]]


def test_what_training_encodes_is_what_translation_encodes(tokenizer):
    tags = Tags(tokenizer, KNOWN, "<2fr>")
    translator = Translator(small_model(), tokenizer, tags=tags)
    [[found]] = translator.encode(["the cat sat"], DecodingConfig())
    assert [found] == tokenizer.encode(["<2fr> the cat sat"])


@pytest.mark.parametrize("line", ["<2fr> ", ""])
def test_each_part_of_a_long_line_has_the_tag(tokenizer, line):
    text = "the cat number 77 sat on the mat and looked"
    [parts] = encoded(tokenizer, KNOWN, None if line else "<2fr>", line + text)
    assert len(parts) > 1
    assert all(part.startswith("▁<2fr>▁") for part in parts)
    whole = "".join(part.removeprefix("▁<2fr>") for part in parts)
    assert whole.replace("▁", " ").strip() == text
    limit = CONFIG.max_input
    ids = tokenizer.encode([part.replace("▁", " ") for part in parts])
    assert max(map(len, ids)) <= limit
    with pytest.raises(ValueError, match=f"line 7: expected at most {limit} word"):
        encoded(tokenizer, KNOWN, "<2fr>", text, long_input="error")


def test_a_line_of_nothing_but_a_tag_is_blank(tokenizer):
    assert encoded(tokenizer, KNOWN, None, "<2de>", " <2fr> ") == [[""], [""]]


@pytest.mark.parametrize(
    ("chosen", "line", "message"),
    [
        (None, "the cat", "line 8: expected one of the model's tags <2de>, <2fr> at"),
        (None, "the <2de> cat", "line 8: expected one of the model's tags"),
        (
            "<2de>",
            "<2fr> the",
            "line 8: expected no other tag than --tag .<2de>., got .<2f",
        ),
    ],
)
def test_a_wrong_or_missing_tag_is_refused_with_its_line(
    tokenizer, chosen, line, message
):
    with pytest.raises(ValueError, match=message):
        encoded(tokenizer, KNOWN, chosen, "", line)


@pytest.mark.parametrize("state", [None, {}, {"tags": 5}, {"tags": "ab"}, {"tags": {}}])
def test_a_damaged_state_has_no_tags(state):
    assert tags_of(state) == []


def test_an_unknown_tag_is_refused(tokenizer):
    with pytest.raises(
        UsageError, match="--tag: expected '<2de>', '<2fr>', got '<2x>'"
    ):
        Tags(tokenizer, KNOWN, "<2x>")
    with pytest.raises(UsageError, match="expected '<2de>', '<2fr>', got ''"):
        Tags(tokenizer, KNOWN, "")


def test_a_model_without_recorded_tags_has_those_of_its_vocabulary(tokenizer):
    """Its corpus was made by `minitransformer mix`: tags are part of the text."""
    translator = Translator(small_model(), tokenizer, tags=Tags(tokenizer, [], "<2de>"))
    expected = tokenizer.encode(["<2de> the cat"])
    for line in ("the cat", "<2de> the cat"):
        assert translator.encode([line], DecodingConfig(), 1) == [expected]
    for wrong in ("<2x>", "the cat", ""):
        with pytest.raises(UsageError, match="--tag: expected a symbol of the vocab"):
            Tags(tokenizer, [], wrong)


def test_scores_are_of_tagged_lines_and_of_targets_without_tag(tokenizer, monkeypatch):
    calls = []
    monkeypatch.setattr(
        "minitransformer.translation.translator.score_targets",
        lambda *arguments: calls.append(arguments),
    )
    tags = Tags(tokenizer, KNOWN, "<2de>")
    translator = Translator(small_model(), tokenizer, tags=tags)
    translator.score(["the cat"], ["the mat"], DecodingConfig())
    _, sources, targets, *_ = calls[0]
    assert sources == tokenizer.encode(["<2de> the cat"])
    assert targets == tokenizer.encode(["the mat"])


@pytest.mark.parametrize("state", [None, [], {}, {"tags": [5]}, {"tags": []}])
def test_a_checkpoint_without_tags_has_none(state):
    assert tags_of(state) == []
    assert tags_of({"tags": ["<a>", ""]}) == ["<a>", ""]


def aligning(tokenizer, chosen=None):
    """A translator whose model is sure enough that links are not all to one word."""
    model = Transformer(replace(small_model().config, vocab_size=60), seed=1)
    model.embedding.table.data *= 3
    return Translator(model, tokenizer, tags=Tags(tokenizer, KNOWN, chosen))


def words_of(pieces):
    return [
        sum(p.startswith("▁") for p in pieces[: n + 1]) - 1 for n in range(len(pieces))
    ]


@pytest.mark.parametrize("tagged", [False, True])
def test_words_of_given_translations_are_aligned_without_the_tag(tokenizer, tagged):
    """By the definition: the pieces of the tag count for no word."""
    text, target = "the cat number 77 sat on", "mat the cat looked"
    translator = aligning(tokenizer, None if tagged else "<2de>")
    line = f"<2de> {text}" if tagged else text
    [found] = translator.align([line], [target], DecodingConfig())
    source, ids = tokenizer.encode([f"<2de> {text}", target])
    [weights] = piece_weights(translator.model, [source], [ids])
    in_source, in_target = (words_of(tokenizer.pieces(x)) for x in (source[2:], ids))
    sums = np.zeros((4, 6))
    for t, j in enumerate(in_target):
        for s, i in enumerate(in_source):
            sums[j, i] += weights[t, s + 2]
    best = sums.argmax(axis=1).tolist()
    assert len(set(best)) > 1
    assert found == tuple(sorted((i + tagged, j) for j, i in enumerate(best)))


@pytest.mark.parametrize("text", ["the cat 7", "the cat number 77 sat on the mat"])
def test_links_of_a_line_do_not_count_a_tag_that_it_lacks(tokenizer, text):
    """In one part and in several, each of which begins with the tag."""
    config = TranslationConfig(max_input=8, max_len_a=0, max_len_b=9, alignment=True)
    [[lacks]] = aligning(tokenizer, "<2de>").hypotheses([text], config)
    [[has]] = aligning(tokenizer).hypotheses([f"<2de> {text}"], config)
    assert has.tokens == lacks.tokens
    assert has.alignment == tuple((i + 1, j) for i, j in lacks.alignment)
    assert {i for i, _ in lacks.alignment} <= {*range(len(text.split()))}
    maps = [
        attention_maps(translator, line, replace(config, alignment=False)).words
        for translator, line in (
            (aligning(tokenizer, "<2de>"), "the cat"),
            (aligning(tokenizer), "<2de> the cat"),
        )
    ]
    np.testing.assert_allclose(maps[0], maps[1][..., 1:], rtol=1e-6)


@pytest.mark.parametrize("command", [["average"], ["export", "float16"]])
def test_what_is_written_from_a_checkpoint_keeps_its_tags(tmp_path, command):
    source, alone = tmp_path / "x.safetensors", tmp_path / "alone.safetensors"
    save_small_model(source, {"tags": ["the", ""]})
    paths = [alone, source] if command == ["average"] else [source, alone]
    assert main([*command, *map(str, paths)]) == 0
    assert load(alone, tag="the").tags.names == "the"
