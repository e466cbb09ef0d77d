"""`minitransformer vocabulary`: what SentencePiece learns with its options."""

import re

import pytest

from minitransformer.commands import vocabulary
from minitransformer.text.tokenizer import SPACE, Tokenizer
from support.in_process import run_main

LINES = [f"der kleine Hund Nummer {i} läuft über die Straße" for i in range(300)]
SYMBOLS = ("<2de>", "__URL__", "\uff21", "\ufb01x")  # two of which NFKC would change


@pytest.fixture
def learn(tmp_path):
    def learn(*flags, lines=LINES, code=0):
        (tmp_path / "text").write_text("\n".join(lines) + "\n", encoding="utf-8")
        paths = tmp_path / "own.model", tmp_path / "text"
        paths[0].unlink(missing_ok=True)
        found, _, error = run_main(vocabulary.main, *paths, *flags)
        assert found == code, error
        return error if code else Tokenizer.read(paths[0])

    return learn


def test_without_options_it_is_what_training_learns(learn):
    own = learn("--vocab-size", 60)
    assert own.all_pieces() == Tokenizer.train(LINES, 60).all_pieces()


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_a_symbol_is_one_piece_wherever_it_stands(learn, kind):
    own = learn(
        "--vocab-size", 64, "--option", f"model_type={kind}", "--user-symbols", *SYMBOLS
    )
    for number, symbol in enumerate(SYMBOLS, start=4):
        assert own.keeps_whole(symbol)
        for line in (f"der {symbol} Hund", f"{symbol} die", f"Hund{symbol}Hund"):
            [ids] = own.encode([line])
            assert ids.count(number) == 1
            assert own.pieces([number]) == [symbol]
            assert own.decode([ids]) == [line]
    assert not own.keeps_whole("Hund")


def test_any_option_of_sentencepiece_can_be_named(learn):
    option = "--option", "add_dummy_prefix=false"
    for flags, begins in (((), True), (option, False)):
        own = learn("--vocab-size", 60, *flags)
        [ids] = own.encode(["die"])
        assert own.pieces(ids)[0].startswith(SPACE) == begins


@pytest.mark.parametrize(
    ("flags", "read"),
    [
        ([], "Stra\xdfe \ufb01 \xb2 A"),
        (["--option", "normalization_rule_name=nmt_nfkc"], "Stra\xdfe fi 2 A"),
        (["--option", "normalization_rule_name=nmt_nfkc_cf"], "stra\xdfe fi 2 a"),
    ],
)
def test_a_vocabulary_changes_text_only_if_it_is_asked_to(learn, flags, read):
    own = learn("--vocab-size", 60, *flags)
    text = "Stra\xdfe \ufb01  \xb2\xa0A"
    assert own.normalise(text).replace(SPACE, " ").split() == read.split()


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (["--option", "split"], 2, "--option: expected NAME=VALUE, got split"),
        (["--option", "nothing=1"], 1, "nothing"),
    ],
)
def test_wrong_options_are_refused(learn, flags, code, message):
    error = learn("--vocab-size", 60, *flags, code=code)
    assert re.search(message, error.splitlines()[-1])
