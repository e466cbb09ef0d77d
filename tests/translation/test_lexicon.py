"""Translation probabilities, and translating with a shortlist of tokens."""

import subprocess
import sys

import numpy as np
import pytest

from minitransformer.model.transformer import Transformer
from minitransformer.settings.config import ModelConfig
from minitransformer.settings.decoding_config import DecodingConfig
from minitransformer.text.batches import ParallelCorpus
from minitransformer.text.ids import Ragged
from minitransformer.translation import lexicon
from minitransformer.translation.batch_translation import translate_ids
from minitransformer.translation.lexicon import Lexicon, train_lexicon
from support.scripts import ROOT


def ragged(lines):
    lengths = [len(line) for line in lines]
    return Ragged(np.concatenate(lines), np.concatenate([[0], np.cumsum(lengths)]))


def reversed_corpus(pairs=400, words=20):
    """Word w becomes w + 20, in the opposite order."""
    rng = np.random.default_rng(0)
    source = [rng.choice(words, rng.integers(2, 7), False) + 10 for _ in range(pairs)]
    return ParallelCorpus(ragged(source), ragged([line[::-1] + 20 for line in source]))


def test_training_finds_the_dictionary_that_made_the_corpus():
    learned = train_lexicon(reversed_corpus(), 60, translations=1, frequent=3)
    for word in range(10, 30):
        assert word + 20 in learned.shortlist(np.array([word]))
    # The four special tokens, three frequent ones, one translation of each word.
    assert len(learned.shortlist(np.array([12, 12, 17]))) <= 4 + 3 + 2


def test_probabilities_agree_with_a_loop_over_the_definition():
    """One iteration of equations 5 to 7 of Model 1, written out."""
    corpus = reversed_corpus(30, 6)
    expected = np.zeros((60, 60))
    for i in range(30):
        source = corpus.source.ids[
            corpus.source.starts[i] : corpus.source.starts[i + 1]
        ]
        target = corpus.target.ids[
            corpus.target.starts[i] : corpus.target.starts[i + 1]
        ]
        for t in target:
            for s in source:
                expected[s, t] += 1 / len(source)
    for word in range(10, 16):
        [best] = np.flatnonzero(expected[word] == expected[word].max())[:1]
        learned = train_lexicon(corpus, 60, translations=1, frequent=1, iterations=1)
        found = learned.translations
        [only] = found.ids[found.starts[word] : found.starts[word + 1]]
        assert expected[word, only] == pytest.approx(expected[word, best])


def test_a_token_that_the_text_lacks_can_be_copied():
    learned = train_lexicon(reversed_corpus(), 60, translations=1, frequent=1)
    assert 5 in learned.shortlist(np.array([5, 12]))
    assert 12 not in learned.shortlist(np.array([5, 12]))


def test_a_large_corpus_is_sampled(monkeypatch):
    monkeypatch.setattr(lexicon, "MAX_LINKS", 3000)
    learned = train_lexicon(reversed_corpus(), 60, translations=1)
    assert 32 in learned.shortlist(np.array([12]))


def test_a_lexicon_loads_again_and_a_foreign_file_is_refused(tmp_path):
    learned = train_lexicon(reversed_corpus(), 60)
    learned.save(tmp_path / "l.safetensors")
    again = Lexicon.load(tmp_path / "l.safetensors", 60)
    source = np.array([11, 25])
    np.testing.assert_array_equal(again.shortlist(source), learned.shortlist(source))
    with pytest.raises(ValueError, match="expected 50 word pieces, got 60"):
        Lexicon.load(tmp_path / "l.safetensors", 50)
    Lexicon(Ragged(np.array([70]), np.array([0, *[1] * 60])), np.array([4])).save(
        tmp_path / "bad.safetensors"
    )
    with pytest.raises(ValueError, match="expected token ids below 60"):
        Lexicon.load(tmp_path / "bad.safetensors", 60)
    (tmp_path / "text").write_text("no")
    with pytest.raises(ValueError, match="not a usable lexicon"):
        Lexicon.load(tmp_path / "text", 60)


def test_a_shortlist_restricts_the_output_and_a_full_one_changes_nothing():
    config = ModelConfig(
        vocab_size=40,
        encoder_layers=1,
        decoder_layers=2,
        d_model=16,
        d_ff=24,
        num_heads=2,
    )
    model = Transformer(config, seed=5)
    sources = [[7, 8, 9], [30, 31], [], [12] * 6]
    settings = DecodingConfig(beam=3, max_len_b=8, nbest=2)
    plain = translate_ids(model, sources, settings)
    full = translate_ids(model, sources, settings, shortlist=lambda ids: np.arange(40))
    for a, b in zip(plain, full, strict=True):
        assert [h.tokens for h in a] == [h.tokens for h in b]
        np.testing.assert_allclose([h.score for h in a], [h.score for h in b], 1e-6)
    allowed = np.array([0, 1, 2, 3, 11, 13, 17])
    table = model.embedding.table.data
    table[13] *= 5
    table[17] = -table[13]  # so that one of the two is likely
    few = translate_ids(model, sources, settings, shortlist=lambda ids: allowed)
    words = {t for found in few for h in found for t in h.tokens}
    assert words <= set(allowed.tolist()) - {0, 1, 2, 3}
    assert words


def test_the_command_learns_from_a_run_for_translate(tmp_path):
    words = ["red", "green", "blue", "one", "two", "cat", "dog"]
    rng = np.random.default_rng(0)
    lines = [" ".join(rng.choice(words, rng.integers(2, 6))) for _ in range(200)]
    for name, side in (("a", lines), ("b", [line.upper() for line in lines])):
        (tmp_path / name).write_text("".join(line + "\n" for line in side))
    small = (
        "--encoder-layers 1 --decoder-layers 1 --d-model 16 --d-ff 16 --num-heads 2 "
        "--vocab-size 60 --max-tokens 200 --steps 3 --threads 1 --run run"
    ).split()

    def python(*command):
        return subprocess.run(
            [sys.executable, *command], cwd=tmp_path, capture_output=True, text=True
        )

    train = [str(ROOT / "train.py"), "--train-source", "a", "--train-target", "b"]
    assert python(*train, *small).returncode == 0
    made = python("-m", "minitransformer", "lexicon", "run", "lexicon.safetensors")
    assert made.returncode == 0, made.stderr
    assert "from 200 pairs" in made.stdout
    shortlist = ("--shortlist", "lexicon.safetensors", "--max-len-b", "3")
    done = python(
        str(ROOT / "translate.py"), "--model", "run", *shortlist, "red cat", "one"
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 2
    assert python("-m", "minitransformer", "lexicon", "nowhere", "x").returncode == 1
