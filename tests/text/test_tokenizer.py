"""The joint vocabulary of both languages."""

import re

import pytest

from minitransformer.settings.config import BOS_ID, EOS_ID, PAD_ID, UNK_ID
from minitransformer.text.tokenizer import Tokenizer

LINES = [f"der kleine Hund Nummer {i} läuft über die Straße" for i in range(300)]


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train(LINES, 80)


def test_text_survives_the_round_trip(tokenizer):
    ids = tokenizer.encode(LINES)
    assert tokenizer.decode(ids) == LINES
    special = {PAD_ID, UNK_ID, BOS_ID, EOS_ID}
    assert not special & {i for line in ids for i in line}
    assert tokenizer.vocab_size == 80


def test_the_serialised_model_is_the_same_tokenizer(tokenizer):
    assert Tokenizer(tokenizer.model).encode(LINES) == tokenizer.encode(LINES)


def test_learning_is_deterministic(tokenizer):
    assert Tokenizer.train(LINES, 80).model == tokenizer.model


def test_a_vocabulary_too_large_is_refused_with_the_limit():
    with pytest.raises(ValueError, match=r"expected at most \d+ word pieces.*got 9000"):
        Tokenizer.train(LINES, 9000)


def test_a_vocabulary_too_small_is_refused_with_the_limit():
    with pytest.raises(ValueError, match=r"at least \d+ word pieces.*got 12") as error:
        Tokenizer.train(LINES, 12)
    least = int(re.search(r"\d+", str(error.value))[0])
    assert Tokenizer.train(LINES, least).vocab_size == least


def test_no_text_is_refused():
    with pytest.raises(ValueError, match="could not learn 100 word pieces"):
        Tokenizer.train([], 100)


def test_bytes_that_are_no_tokenizer_are_refused():
    with pytest.raises(ValueError, match="expected a SentencePiece model"):
        Tokenizer(b"not a model")


def test_a_model_whose_pieces_are_no_text_is_refused_when_it_is_loaded(tokenizer):
    damaged = tokenizer.model.replace("ß".encode(), b"\xff\xff", 1)
    with pytest.raises(ValueError, match="expected a SentencePiece model"):
        Tokenizer(damaged)
