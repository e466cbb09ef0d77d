"""Vocabularies of one's own: the files of others, user symbols, other kinds."""

import io
import json
from dataclasses import replace

import pytest
import sentencepiece

from minitransformer.settings.config import ModelConfig, RunConfig, TrainingConfig
from minitransformer.settings.decoding_config import DecodingConfig
from minitransformer.settings.options import UsageError
from minitransformer.settings.presets import find_preset
from minitransformer.settings.text_config import VocabularyConfig
from minitransformer.text.cache import cached_tokenizer
from minitransformer.text.lines import TextPair
from minitransformer.text.own_vocabulary import read_own_vocabulary, with_size_of_file
from minitransformer.text.tokenizer import Tokenizer

LINES = [f"der kleine Hund Nummer {i} läuft über die Straße" for i in range(300)]
OTHERS = [*LINES[:3], "Hund \u4f60 ß", "\ufb01 Straße<x>", "  die  die ", ""]
SYMBOLS = ("<2de>", "__URL__", "\uff21", "\ufb01x")  # two of which NFKC would change


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


@pytest.fixture
def file(tmp_path):
    return tmp_path / "own.model"


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"model_type": "unigram", "vocab_size": 60},
        {"model_type": "char"},
        {"model_type": "word"},
        {"pad_id": 0, "unk_id": 1, "bos_id": 2, "eos_id": 3},
        {"pad_id": 3, "bos_id": -1, "eos_id": -1},
        {"byte_fallback": True, "vocab_size": 330},
        {"normalization_rule_name": "identity", "user_defined_symbols": ["<x>"]},
        {
            "unk_piece": "u" * 128, "pad_piece": "[PAD]", "bos_piece": "b" * 119,
            "eos_piece": "[SEP]" * 40, "character_coverage": 1.0,
            "pad_id": 9, "unk_id": 7, "bos_id": 8, "eos_id": 5,
        },
    ],
    ids=str,
)  # fmt: skip
def test_text_is_cut_as_the_file_says_whatever_its_ids_are(file, settings):
    file.write_bytes(trained(**settings))
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(file))
    ours = read_own_vocabulary(file)
    for line in OTHERS:
        expected = theirs.encode(line)
        [ids] = ours.encode([line])
        assert ours.pieces(ids) == theirs.id_to_piece(expected)
        assert ours.decode([ids]) == [theirs.decode(expected)]
        unknown = [i == theirs.unk_id() for i in expected]
        assert [i == 1 for i in ids] == unknown
    missing = sum(i < 0 for i in (theirs.pad_id(), theirs.bos_id(), theirs.eos_id()))
    assert ours.vocab_size == len(theirs) + missing
    assert len(set(ours.pieces(range(ours.vocab_size)))) == ours.vocab_size


@pytest.fixture(params=["bpe", "unigram", "file"])
def with_symbols(request, file):
    """A tokenizer with the symbols, learned or from a file that lacks them."""
    if request.param == "file":
        file.write_bytes(trained())
        return read_own_vocabulary(file, SYMBOLS)
    config = VocabularyConfig(vocab_type=request.param, user_symbols=SYMBOLS)
    return Tokenizer.train(LINES, 64, config=config)


@pytest.mark.parametrize("symbol", SYMBOLS)
def test_a_symbol_is_one_piece_wherever_it_stands(with_symbols, symbol):
    found = set()
    for line in (f"der {symbol} Hund", f"{symbol} die", f"Hund{symbol}Hund", symbol):
        [ids] = with_symbols.encode([line])
        assert with_symbols.pieces(ids).count(symbol) == 1
        assert with_symbols.decode([ids]) == [line]
        [found_here] = [i for i in ids if with_symbols.pieces([i]) == [symbol]]
        found.add(found_here)
    assert found == {4 + SYMBOLS.index(symbol)}


def test_symbols_that_a_file_has_are_kept_and_others_added(file):
    file.write_bytes(trained(user_defined_symbols=["<x>"]))
    assert read_own_vocabulary(file).encode(["<x>"]) != [[]]
    before = read_own_vocabulary(file).vocab_size
    for symbols, added in ((["<x>"], 0), (["<x>", "<y>"], 1), (["er", "<y>"], 1)):
        ours = read_own_vocabulary(file, symbols)
        assert ours.vocab_size == before + added
        assert ours.pieces(range(4, 4 + len(symbols))) == symbols


def test_a_model_of_words_cannot_keep_symbols(file):
    file.write_bytes(trained(model_type="word"))
    with pytest.raises(
        ValueError, match=r"own\.model: expected a model that can keep <a>"
    ):
        read_own_vocabulary(file, ["<a>"])


@pytest.mark.parametrize(
    "damage",
    [lambda x: b"", lambda x: b"text\n" * 99, lambda x: x[:-100], lambda x: x[:500],
     lambda x: x.replace("ß".encode(), b"\xff\xff")],
)  # fmt: skip
def test_a_file_of_something_else_is_named(file, damage):
    file.write_bytes(damage(trained()))
    with pytest.raises(
        ValueError, match=r"^\S*own\.model: expected a SentencePiece mod"
    ):
        read_own_vocabulary(file)


def test_other_ids_are_refused_where_they_are_not_changed():
    with pytest.raises(ValueError, match=r"ids 0, 1, 2, 3, got \(-1, 0, 1, 2\)"):
        Tokenizer(trained())


def test_a_missing_file_is_named(file):
    with pytest.raises(FileNotFoundError, match=r"own\.model"):
        with_size_of_file({}, VocabularyConfig(tokenizer=str(file)))


def test_the_file_decides_the_size_of_the_vocabulary(file):
    file.write_bytes(trained())
    own = VocabularyConfig(tokenizer=str(file), user_symbols=("<a>",))
    size = read_own_vocabulary(file).vocab_size
    assert with_size_of_file({"d_ff": 4}, own) == {
        "d_ff": 4,
        "vocab_size": size + 1,
    }
    with pytest.raises(UsageError, match="--vocab-size does nothing with --tokenizer"):
        with_size_of_file({"vocab_size": 80}, own)
    learned = VocabularyConfig()
    assert with_size_of_file({"vocab_size": 80}, learned) == {"vocab_size": 80}


# What is learned


def pieces(**settings):
    size = settings.pop("size", 60)
    learned = Tokenizer.train(LINES, size, config=VocabularyConfig(**settings))
    return set(learned.pieces(range(learned.vocab_size)))


def test_a_unigram_vocabulary_is_the_one_of_sentencepiece_on_any_number_of_threads():
    config = VocabularyConfig(vocab_type="unigram")
    ours = Tokenizer.train(LINES, 60, 1, config)
    assert ours.model == Tokenizer.train(LINES, 60, 3, config).model
    theirs = sentencepiece.SentencePieceProcessor(
        model_proto=trained(
            model_type="unigram", vocab_size=60, character_coverage=1.0, pad_id=0,
            unk_id=1, bos_id=2, eos_id=3, num_threads=8,
        )
    )  # fmt: skip
    assert ours.pieces(range(60)) == theirs.id_to_piece(list(range(60)))
    assert pieces() != set(ours.pieces(range(60)))


def test_rare_characters_are_left_out_by_coverage():
    assert "ß" in pieces()
    lines = [*LINES * 4, "\u4f60"]
    for coverage, known in ((1.0, True), (0.995, False)):
        config = VocabularyConfig(character_coverage=coverage)
        [[*_, last]] = Tokenizer.train(lines, 60, 1, config).encode(["der \u4f60"])
        assert (last != 1) == known


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("nmt_nfkc", "Hund A"), ("nfkc_cf", "hund a"),
        ("nmt_nfkc_cf", "hund a"), ("identity", "Hund \uff21"),
    ],
)  # fmt: skip
def test_characters_are_normalised_by_rule(rule, expected):
    config = VocabularyConfig(normalization=rule)
    tokenizer = Tokenizer.train([*LINES, "A \uff21 a"], 60, 1, config)
    assert tokenizer.decode(tokenizer.encode(["Hund \uff21"])) == [expected]


def test_every_setting_has_a_vocabulary_of_its_own_in_the_cache(tmp_path):
    pair = TextPair(tmp_path / "s", tmp_path / "t")
    for path in (pair.source, pair.target):
        path.write_text("\n".join(LINES), encoding="utf-8")
    configs = [
        VocabularyConfig(),
        VocabularyConfig(vocab_type="unigram"),
        VocabularyConfig(user_symbols=("<a>",)),
        VocabularyConfig(character_coverage=0.99),
        VocabularyConfig(normalization="identity"),
    ]
    for known, config in enumerate(configs * 2):
        found = cached_tokenizer(pair, 60, tmp_path / "cache", 1, config)
        files = {path.name for path in (tmp_path / "cache").glob("*.model")}
        assert len(files) == min(known, 4) + 1
        same = Tokenizer.train([x for x in LINES for _ in "st"], 60, 1, config)
        assert found.pieces(range(60)) == same.pieces(range(60))
    assert f"{pair.digest()}-bpe60-bytes.model" in files  # the name of earlier versions


def test_a_vocabulary_that_has_grown_since_the_run_began_is_refused(tmp_path):
    """Its run would save checkpoints that nothing can load."""
    path = tmp_path / "own.model"
    pair, config = TextPair(path, path), VocabularyConfig(tokenizer=str(path))
    for size in (60, 62):
        path.write_bytes(Tokenizer.train(LINES, size).model)
        if size == 60:
            begun = cached_tokenizer(pair, size, tmp_path, 1, config)
    assert begun.vocab_size == 60
    with pytest.raises(ValueError, match=r"own\.model: expected 60 .* got 62"):
        cached_tokenizer(pair, begun.vocab_size, tmp_path, 1, config)


# Settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"user_symbols": ("a b",)}, "--user-symbols: expected a symbol .* got 'a b'"),
        ({"user_symbols": ("<a>", "")}, "--user-symbols: expected a symbol .* got ''"),
        ({"user_symbols": ("<a>,",)}, "--user-symbols: expected a symbol .* got ''"),
        (
            {"user_symbols": ("</s>",)},
            "--user-symbols: expected a symbol .* got '</s>'",
        ),
        ({"user_symbols": ("<0x4A>",)}, "got '<0x4A>'"),
        ({"user_symbols": ("\u2581a",)}, "--user-symbols: expected a symbol"),
        ({"user_symbols": ("\udcff",)}, "--user-symbols: expected a symbol"),
        ({"user_symbols": 5}, "user_symbols: expected str, got 5"),
        ({"character_coverage": 0.9}, "character_coverage: expected at least 0.98"),
        ({"vocab_type": "word"}, "vocab_type: expected one of bpe, unigram, got word"),
        ({"tokenizer": "x", "vocab_type": "unigram"}, "--vocab-type does nothing with"),
        ({"tokenizer": "x", "normalization": "nfkc"}, "--normalization does nothing"),
    ],
)
def test_wrong_vocabularies_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        VocabularyConfig(**settings)


def test_symbols_are_divided_by_commas_and_each_counts_once():
    config = VocabularyConfig(user_symbols=("<a>,<b>", "<c>", "<a>"))
    assert config.user_symbols == ("<a>", "<b>", "<c>")
    assert VocabularyConfig(user_symbols="<a>") == VocabularyConfig(
        user_symbols=["<a>"]
    )


def test_older_configurations_learn_as_they_did(tmp_path):
    configs = ModelConfig(), TrainingConfig(), DecodingConfig()
    run = RunConfig("base", *configs, {"train": ("a", "b")})
    stored = json.loads(run.to_json())
    del stored["vocabulary"]
    del stored["training"]["best_by"]
    assert RunConfig.from_json(json.dumps(stored)) == run
    unigram = replace(run, vocabulary=VocabularyConfig(vocab_type="unigram"))
    (tmp_path / "config.json").write_text(unigram.to_json())
    _, preset = find_preset(str(tmp_path / "config.json"))
    assert preset["vocab_type"] == "unigram"
    assert not preset.keys() & {"train"}
