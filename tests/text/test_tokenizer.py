"""The joint vocabulary of both languages."""

import io
import itertools
import json
import os
import re
from collections import Counter

import pytest
import sentencepiece

from minitransformer.settings.config import BOS_ID, EOS_ID, PAD_ID, UNK_ID
from minitransformer.text import tokenizer as tokenizer_module
from minitransformer.text.cache import cached_tokenizer
from minitransformer.text.pairs import TextPair
from minitransformer.text.tokenizer import Tokenizer

LINES = [f"der kleine Hund Nummer {i} läuft über die Straße" for i in range(300)]
EMOJI, FAMILY = "\U0001f642", "\U0001f468\u200d\U0001f469\u200d\U0001f467"
OTHERS = [*LINES[:3], "Hund \u4f60 ß", "\ufb01 Straße<x>", "  die  die ", ""]


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train(LINES, 80)


def test_text_survives_the_round_trip(tokenizer):
    ids = tokenizer.encode(LINES)
    assert tokenizer.decode(ids) == LINES
    special = {PAD_ID, UNK_ID, BOS_ID, EOS_ID}
    assert not special & {i for line in ids for i in line}
    assert tokenizer.vocab_size == 80


def test_a_smaller_vocabulary_has_no_bytes(tokenizer):
    [ids] = tokenizer.encode(["der \u4f60"])
    assert UNK_ID in ids
    assert not [p for p in tokenizer.pieces(range(80)) if p.startswith("<0x")]


def merges(text, count):
    """The first pieces that byte-pair encoding joins (Sennrich et al., 2016)."""
    words = Counter("\u2581" + word for word in text.split())
    symbols = {word: tuple(word) for word in words}
    found = []
    for _ in range(count):
        pairs = Counter()
        for word, parts in symbols.items():
            for pair in itertools.pairwise(parts):
                pairs[pair] += words[word]
        (best, most), (_, second) = pairs.most_common(2)
        assert most > second  # else it is arbitrary which pair is joined
        found.append("".join(best))
        for word, parts in symbols.items():
            joined, rest = [], list(parts)
            while rest:
                size = 2 if tuple(rest[:2]) == best else 1
                joined.append("".join(rest[:size]))
                del rest[:size]
            symbols[word] = tuple(joined)
    return found


def test_both_languages_share_the_pieces_that_byte_pair_encoding_joins(tmp_path):
    sides = {
        "en": "banana than than the than than and ten",
        "de": "der esse an und hat um man um",
    }
    for side, text in sides.items():
        (tmp_path / f"train.{side}").write_text(f"{text}\n" * 7, encoding="utf-8")
    expected = merges(" ".join(sides.values()), 5)
    assert "\u2581th" in expected  # which only English has
    assert "\u2581u" in expected  # and only German
    characters = set("\u2581".join(sides.values())) - {" "}
    size = 4 + len(expected) + len(characters)
    pair = TextPair(tmp_path / "train.en", tmp_path / "train.de")
    learned = cached_tokenizer(pair, size, tmp_path, 1)
    assert learned.vocab_size == size
    assert learned.pieces(range(4, 9)) == expected


def test_long_lines_are_learned_from():
    tokenizer = Tokenizer.train(["ab"] * 9 + ["QZ " * 5000], 12)
    assert UNK_ID not in tokenizer.encode(["QZ"])[0]


def test_a_vocabulary_is_at_most_as_large_as_its_text_supports():
    """Each of its words is one piece of the largest one."""
    words = "low lower lowest".split()
    largest = Tokenizer.train([" ".join(words)] * 5, 900)
    assert [len(ids) for ids in largest.encode(words)] == [1, 1, 1]
    assert largest.vocab_size < 40


def test_a_vocabulary_too_small_is_refused_with_the_limit():
    with pytest.raises(ValueError, match=r"at least \d+ word pieces.*got 12") as error:
        Tokenizer.train(LINES, 12)
    least = int(re.search(r"\d+", str(error.value))[0])
    assert Tokenizer.train(LINES, least).vocab_size == least


# Models that were made elsewhere


def trained(**settings):
    """A model as spm_train makes it, with its defaults: no padding, other ids."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES),
        model_writer=model,
        minloglevel=2,
        hard_vocab_limit=False,
        **{"model_type": "bpe", "vocab_size": 80} | settings,
    )
    return model.getvalue()


OTHER_SETTINGS = """
{}
{"model_type": "unigram", "vocab_size": 60}
{"model_type": "char"}
{"model_type": "word"}
{"pad_id": 0, "unk_id": 1, "bos_id": 2, "eos_id": 3}
{"pad_id": 3, "bos_id": -1, "eos_id": -1}
{"byte_fallback": true, "vocab_size": 330}
{"control_symbols": ["<pad>"]}
{"normalization_rule_name": "identity", "user_defined_symbols": ["<x>"]}
"""
# Pieces whose lengths in bytes take one byte and two.
LONG_NAMES = {
    "unk_piece": "u" * 128, "pad_piece": "[PAD]", "bos_piece": "b" * 119,
    "eos_piece": "[SEP]" * 40, "character_coverage": 1.0,
    "pad_id": 9, "unk_id": 7, "bos_id": 8, "eos_id": 5,
}  # fmt: skip


@pytest.mark.parametrize(
    "settings", [*OTHER_SETTINGS.split("\n")[1:-1], json.dumps(LONG_NAMES)]
)
def test_text_is_cut_as_the_file_says_whatever_its_ids_are(tmp_path, settings):
    file = tmp_path / "own.model"
    file.write_bytes(trained(**json.loads(settings)))
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(file))
    ours = Tokenizer.read(file)
    for line in OTHERS:
        expected = theirs.encode(line)
        [ids] = ours.encode([line])
        assert ours.pieces(ids) == theirs.id_to_piece(expected)
        assert ours.decode([ids]) == [theirs.decode(expected)]
        unknown = [i == theirs.unk_id() for i in expected]
        assert [i == 1 for i in ids] == unknown
    known = theirs.id_to_piece(list(range(len(theirs))))
    ids = {"<pad>": theirs.pad_id(), "<s>": theirs.bos_id(), "</s>": theirs.eos_id()}
    missing = [name for name in ids.keys() - {*known} if ids[name] < 0]
    assert ours.vocab_size == len(theirs) + len(missing)
    assert len(set(ours.pieces(range(ours.vocab_size)))) == ours.vocab_size


@pytest.mark.parametrize(
    "settings",
    """treat_whitespace_as_suffix=1 remove_extra_whitespaces=0 add_dummy_prefix=0
    treat_whitespace_as_suffix=1,remove_extra_whitespaces=0 split_by_whitespace=0
    allow_whitespace_only_pieces=1""".split(),
)
def test_spaces_come_out_as_they_went_in_whatever_a_model_does_with_them(settings):
    flags = dict(flag.split("=") for flag in settings.split(","))
    ours = Tokenizer(trained(vocab_size=120, **flags))
    lines = [*LINES[:3], "die", "a"]
    assert ours.decode(ours.encode(lines)) == lines
    assert ours.encode(["", "   ", " \xa0\xad\u200b"]) == [[]] * 3


@pytest.mark.parametrize(
    "damage",
    [lambda x: b"", lambda x: b"text\n" * 99, lambda x: x[:-100], lambda x: x[:500],
     lambda x: x.replace("ß".encode(), b"\xff\xff")],
)  # fmt: skip
def test_a_file_of_something_else_is_named(tmp_path, damage):
    file = tmp_path / "own.model"
    file.write_bytes(damage(trained()))
    with pytest.raises(
        ValueError, match=r"^\S*own\.model: expected a SentencePiece mod"
    ):
        Tokenizer.read(file)


def test_a_pipe_is_no_vocabulary(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match=r"pipe: expected a Sent\S+ model, got a pipe"):
        Tokenizer.read(tmp_path / "pipe")


def test_symbols_that_a_model_lacks_have_no_text():
    ours = Tokenizer(trained())
    [ids] = ours.encode(["die Straße"])
    assert ours.decode([[PAD_ID, BOS_ID, *ids, EOS_ID, PAD_ID]]) == ["die Straße"]
    assert ours.written()[:4] == [""] * 4
    assert ours.pieces(range(4)) == ["<pad>", "<unk>", "<s>", "</s>"]


def test_a_vocabulary_is_that_of_all_lines_not_of_the_first(monkeypatch):
    monkeypatch.setattr(tokenizer_module, "MAX_SENTENCES", 200)
    learned = Tokenizer.train(["ab ab"] * 200 + ["yz yz"] * 2000, 12)
    assert UNK_ID not in learned.encode(["ab yz"])[0]
