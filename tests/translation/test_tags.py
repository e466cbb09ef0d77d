"""The tag that `--tag` puts before source lines."""

from dataclasses import replace

import pytest

from minitransformer.model.transformer import Transformer
from minitransformer.settings.decoding_config import TranslationConfig
from minitransformer.settings.options import UsageError
from minitransformer.text.tokenizer import Tokenizer
from minitransformer.translation.translator import Translator
from support.models import CAT_LINES, small_model, tiny_config

CONFIG = TranslationConfig(max_input=8)


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train(CAT_LINES, 60, user_defined_symbols=["<2de>", "<2fr>"])


def encoded(tokenizer, tag, *lines, **settings):
    """What a translator gives its model for lines: the pieces of each part, joined."""
    translator = Translator(small_model(), tokenizer, tag=tag)
    found, config = [], replace(CONFIG, **settings)
    divided = translator.divide(lines, config, [""] * len(lines))
    for number, sentences in enumerate(divided, 7):
        texts = [text for _, text in sentences]
        ids = translator.encode(texts, config, [number] * len(texts))
        found.append(["".join(tokenizer.pieces(part)) for part in ids])
    return found


def test_every_line_that_is_not_blank_gets_the_tag(tokenizer):
    found = [["▁<2de>▁the▁cat"], [""], [""]]
    assert encoded(tokenizer, "<2de>", "the cat", "", " ") == found
    assert encoded(tokenizer, None, "<2de> the cat", "", " ") == found
    with pytest.raises(ValueError, match="line 8: expected no tag, --tag puts it"):
        encoded(tokenizer, "<2de>", "", "<2de> the cat")


def test_each_part_of_a_long_line_has_the_tag(tokenizer):
    text = "the cat number 77 sat on the mat and looked"
    [parts] = encoded(tokenizer, "<2fr>", text)
    assert len(parts) > 1
    assert all(part.startswith("▁<2fr>▁") for part in parts)
    whole = "".join(part.removeprefix("▁<2fr>") for part in parts)
    assert whole.replace("▁", " ").strip() == text
    limit = CONFIG.max_input
    ids = tokenizer.encode([part.replace("▁", " ") for part in parts])
    assert max(map(len, ids)) <= limit
    with pytest.raises(ValueError, match=f"line 7: expected at most {limit} word"):
        encoded(tokenizer, "<2fr>", text, split="never")


def test_a_given_translation_has_no_tag(tokenizer):
    model = Transformer(tiny_config(vocab_size=tokenizer.vocab_size))
    tagged = Translator(model, tokenizer, tag="<2de>")
    found = tagged.score(["the cat"], ["the mat"], TranslationConfig())
    plain = Translator(model, tokenizer)
    read = ["<2de> the cat"]
    assert found == plain.score(read, ["the mat"], TranslationConfig())


def test_a_tag_and_the_symbol_of_a_vocabulary_may_be_composed_or_not():
    tokenizer = Tokenizer.train(CAT_LINES, 60, user_defined_symbols=["<\xe9>"])
    expected = encoded(tokenizer, "<\xe9>", "the cat")
    assert expected == [["\u2581<\xe9>\u2581the\u2581cat"]]
    assert encoded(tokenizer, "<e\u0301>", "the cat") == expected


@pytest.mark.parametrize("wrong", ["<2x>", "the cat", ""])
def test_a_tag_is_a_symbol_of_the_vocabulary(tokenizer, wrong):
    with pytest.raises(UsageError, match="--tag: expected a symbol of the vocab"):
        Translator(small_model(), tokenizer, tag=wrong)
