"""Characters that the training text lacks, as pieces of their bytes."""

import itertools
import json
import random

import numpy as np
import pytest

from minitransformer.commands.attention_maps import attention_maps
from minitransformer.model.transformer import Transformer
from minitransformer.settings.config import UNK_ID
from minitransformer.settings.decoding_config import DecodingConfig, TranslationConfig
from minitransformer.text.tokenizer import Tokenizer
from minitransformer.translation.beam_search import Hypothesis
from minitransformer.translation.plain_translator import Segment
from minitransformer.translation.translator import Translator
from support.models import tiny_config

EMOJI = "\N{SLIGHTLY SMILING FACE}"


@pytest.fixture(scope="module")
def translator():
    rng = random.Random(1)
    words = ["".join(rng.choices("abcdefghij", k=5)) for _ in range(2000)]
    lines = [f"{a} {b}" for a, b in itertools.pairwise(words)]
    model = Transformer(tiny_config(vocab_size=1024))
    return Translator(model, Tokenizer.train(lines, 1024))


def text_of(translator, data):
    """The translation that consists of the pieces of these bytes."""
    names = translator.tokenizer.pieces(range(1024))
    ids = tuple(names.index(f"<0x{byte:02X}>") for byte in data)
    [written] = translator._written(Segment(""), [Hypothesis(ids, 0.0, 0.0)], None)
    return written.text


def test_no_character_is_unknown(translator):
    tokenizer = translator.tokenizer
    line = f"abc {EMOJI} \u4f60 a"
    [ids] = tokenizer.encode([line])
    assert UNK_ID not in ids
    assert tokenizer.decode([ids]) == [line]
    assert tokenizer.vocab_size == 1024
    pieces = tokenizer.pieces(ids)
    of_bytes = [f"<0x{byte:02X}>" for byte in f"{EMOJI}\u4f60".encode()]
    assert [piece for piece in pieces if piece.startswith("<")] == of_bytes
    # Bytes that are no UTF-8, and whole characters among them.
    broken = [ids[pieces.index(piece)] for piece in of_bytes[:3]]
    assert tokenizer.decode([[*broken, ids[-1]], broken[:1]])[0].endswith(" a")
    assert tokenizer.decode([broken[1:]]) == ["\ufffd" * 2]


def test_any_bytes_become_one_line_of_text(translator):
    assert text_of(translator, f"{EMOJI} \u4f60".encode()) == f"{EMOJI} \u4f60"
    assert text_of(translator, b"a\xe4\xbd!\n\r") == "a!  "
    rng = np.random.default_rng(0)
    for length in range(1, 40):
        text = text_of(translator, rng.bytes(length))
        assert "\n" not in text
        text.encode()  # there is no lone surrogate in it


def test_a_sentence_with_unknown_characters_is_translated(translator):
    [text] = translator.translate([f"abc {EMOJI}"], DecodingConfig(max_len_b=5))
    assert "\u2047" not in text  # as SentencePiece writes the unknown token


@pytest.mark.parametrize(
    ("line", "other"),
    [
        ("ab \xe9a c", "ab e\u0301a c"),
        ("ab \xe9a c", "\ufeffab\xa0\x85e\xad\u0301a\x1fc\r"),
        ("\ud55c ab", "\u1112\u1161\u11ab\u2028ab"),
        ("_ab", "\u2581ab"),
        ("", "\u200b\xad\0\r"),
    ],
    ids=["accent", "controls", "syllable", "blank", "nothing"],
)
def test_text_that_looks_the_same_is_the_same(translator, line, other):
    """Also as a prefix, which is read as other text is."""
    config = TranslationConfig(max_len_a=0, max_len_b=5)
    for prefixes in (["", ""], ["e\xe9" * bool(line), "ee\u0301" * bool(line)]):
        one, two = translator.hypotheses([line, other], config, 1, prefixes)
        assert [h.tokens for h in one] == [h.tokens for h in two]
        assert any(prefixes) or one[0].text == two[0].text


def test_maps_of_attention_name_the_bytes(translator):
    written = attention_maps(translator, f"a{EMOJI}").to_json()
    assert "<" not in written  # which would be markup in a page
    emoji = ["<0xF0>", "<0x9F>", "<0x99>", "<0x82>"]
    assert json.loads(written)["source"][-5:] == [*emoji, "end"]
