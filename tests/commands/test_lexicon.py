"""Translation probabilities, and translating with a shortlist of tokens."""

import numpy as np
import pytest

import train
import translate
from minitransformer.commands import lexicon
from minitransformer.commands.lexicon import train_lexicon
from minitransformer.model.transformer import Transformer
from minitransformer.settings.config import ModelConfig
from minitransformer.settings.decoding_config import DecodingConfig
from minitransformer.text.batches import ParallelCorpus
from minitransformer.text.ids import Ragged
from minitransformer.translation.batch_translation import translate_ids
from minitransformer.translation.shortlist import Lexicon
from support.in_process import run_main


def ragged(lines):
    lengths = [len(line) for line in lines]
    return Ragged(np.concatenate(lines), np.concatenate([[0], np.cumsum(lengths)]))


@pytest.mark.parametrize("iterations", [1, 4])
def test_probabilities_agree_with_a_loop_over_the_definition(iterations):
    """Equations 5 to 7 of Model 1, written out, for text whose words are random."""
    rng = np.random.default_rng(3)
    sides = [
        [rng.integers(4, 10, rng.integers(0, 5)) for _ in range(30)] for _ in range(2)
    ]
    probability = np.ones((10, 10))
    for _ in range(iterations):
        expected = np.zeros((10, 10))
        for source, target in zip(*sides, strict=True):
            for t in target:
                total = sum(probability[s, t] for s in source)
                for s in source:
                    expected[s, t] += probability[s, t] / total
        probability = expected / np.maximum(expected.sum(axis=1, keepdims=True), 1e-9)
    corpus = ParallelCorpus(*map(ragged, sides))
    learned = train_lexicon(corpus, 10, 3, iterations=iterations).translations
    for word in range(4, 10):
        found = learned.concatenate(np.array([word]))
        best = np.sort(probability[word])[::-1][:3]
        np.testing.assert_allclose(probability[word, found], best)


def test_a_shortlist_has_special_frequent_and_likely_tokens(tmp_path):
    sides = [[7, 8], [7], *[[]] * 8], [[21, 20, 21, 22], [20, 21], *[[22]] * 8]
    corpus = ParallelCorpus(*map(Ragged.from_lists, sides))  # blank pairs do not count
    assert train_lexicon(corpus, 30, frequent=9).frequent.tolist() == [21, 20, 22]
    learned, path = train_lexicon(corpus, 30, 1, frequent=2), tmp_path / "lexicon"
    learned.save(path)
    for found in (learned, Lexicon.load(path, 30)):
        assert found.shortlist(np.array([9])).tolist() == [0, 1, 2, 3, 9, 20, 21]
    with pytest.raises(ValueError, match="expected 50 word pieces, got 30"):
        Lexicon.load(path, 50)


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


def test_the_command_learns_from_a_run_for_translate(tmp_path, monkeypatch):
    words = ["red", "green", "blue", "one", "two", "cat", "dog"]
    rng = np.random.default_rng(0)
    lines = [" ".join(rng.choice(words, rng.integers(2, 6))) for _ in range(200)]
    for name, side in (("a", lines), ("b", [line.upper() for line in lines])):
        (tmp_path / name).write_text("".join(line + "\n" for line in side))
    small = (
        "--encoder-layers 1 --decoder-layers 1 --d-model 16 --d-ff 16 --num-heads 2 "
        "--vocab-size 60 --max-tokens 200 --steps 3 --threads 1 --run run"
    ).split()
    monkeypatch.chdir(tmp_path)
    files = "--train-source", "a", "--train-target", "b"
    assert run_main(train.main, *files, *small)[0] == 0
    sizes = "--translations", 2, "--frequent", 3
    code, out, error = run_main(lexicon.main, "run", "lexicon.safetensors", *sizes)
    assert (code, out) == (0, "wrote lexicon.safetensors from 200 pairs\n"), error
    written = Lexicon.load(tmp_path / "lexicon.safetensors", 60)
    assert (written.translations.lengths.max(), len(written.frequent)) == (2, 3)
    shortlist = ("--shortlist", "lexicon.safetensors", "--max-len-b", "3")
    lines = "red cat", "one"
    code, out, error = run_main(translate.main, "--model", "run", *shortlist, *lines)
    assert (code, out.count("\n")) == (0, 2), error
    assert run_main(lexicon.main, "nowhere", "x")[0] == 1
    for text in ("a", "b"):  # which the command would have read
        before = (tmp_path / text).read_bytes()
        code, _, error = run_main(lexicon.main, "run", text)
        assert (code, error.count("\n")) == (2, 1)
        assert f"file: expected no file that is read, got {text}" in error
        assert (tmp_path / text).read_bytes() == before
