"""TranslationQuality against sacreBLEU, validation against one batch at a time."""

import math

import numpy as np
import pytest
from sacrebleu.metrics import BLEU, CHRF

from minitransformer.model.parameters import ParameterBuffer
from minitransformer.model.transformer import Transformer
from minitransformer.settings.config import ModelConfig
from minitransformer.text.batches import ParallelCorpus
from minitransformer.text.ids import Ragged
from minitransformer.training import evaluation, parallel
from minitransformer.training.evaluation import (
    TokenStatistics,
    compound_split_bleu,
    token_statistics,
    translation_quality,
    validate,
)
from minitransformer.training.parallel import ThreadedModel
from support.closeness import assert_close

REFERENCES = ["Der Hund läuft über die Straße.", "Eine Frau schläft.", "Ja."]
OUTPUTS = ["Der Hund läuft auf der Straße.", "Eine Frau schläft.", "Nein."]


def test_scores_are_sacrebleus():
    found = translation_quality(OUTPUTS, REFERENCES)
    bleu, chrf = BLEU(), CHRF()
    assert found.bleu == bleu.corpus_score(OUTPUTS, [REFERENCES]).score
    assert found.chrf == chrf.corpus_score(OUTPUTS, [REFERENCES]).score
    assert "tok:13a" in found.bleu_signature
    assert "case:mixed" in found.bleu_signature
    assert found.length == 1.0
    assert found.exact == 1 / 3
    assert str(found).count("\n") == 2


def test_the_length_is_counted_in_words_and_punctuation():
    shorter = translation_quality(["Der Hund läuft.", "Eine Frau."], REFERENCES[:2])
    assert shorter.length == (4 + 3) / (7 + 4)
    assert "length 63.6% of the references" in str(shorter)
    assert translation_quality(["a"], [""]).length == 1


def test_each_corpus_has_a_bleu_of_its_own_and_one_alone_is_measured_once(monkeypatch):
    pairs = [("", reference) for reference in REFERENCES]
    measured = []

    def counting(translations, references):
        measured.append(list(translations))
        return translation_quality(translations, references)

    monkeypatch.setattr(evaluation, "translation_quality", counting)
    assert evaluation.quality_of_samples(OUTPUTS, {1: pairs}).by_corpus == {}
    assert measured == [OUTPUTS]
    two = {1: pairs[:2], 2: [], 3: pairs[2:]}
    each = evaluation.quality_of_samples(OUTPUTS, two).by_corpus
    assert each.keys() == {1, 3}
    assert each[1] == BLEU().corpus_score(OUTPUTS[:2], [REFERENCES[:2]]).score
    assert measured[1:] == [OUTPUTS, OUTPUTS[:2], OUTPUTS[2:]]


@pytest.mark.parametrize(("outputs", "references"), [(["a"], []), ([], [])])
def test_missing_references_are_refused(outputs, references):
    with pytest.raises(ValueError, match="expected as many references"):
        translation_quality(outputs, references)


def test_the_papers_bleu_is_that_of_words_split_by_hand():
    """What Moses and the compound splitting make of each line, worked out by hand."""
    pytest.importorskip("sacremoses")
    outputs = ["Der E-Mail-Dienst, „gut“.", "Das kostet 3,50 Euro & mehr, sagt Anna."]
    references = ["Der E-Mail-Dienst ist gut.", "Das kostet 3,50 Euro & mehr, sagt er."]
    words = [
        "Der E ##AT##-##AT## Mail ##AT##-##AT## Dienst , „ gut &quot; .",
        "Das kostet 3,50 Euro &amp; mehr , sagt Anna .",
    ]
    expected = [
        "Der E ##AT##-##AT## Mail ##AT##-##AT## Dienst ist gut .",
        "Das kostet 3,50 Euro &amp; mehr , sagt er .",
    ]
    plain = BLEU(tokenize="none", smooth_method="none", force=True)
    expected_score = plain.corpus_score(words, [expected]).score
    assert_close(compound_split_bleu(outputs, references, "de"), expected_score)
    with pytest.raises(ValueError, match="--compound-split: expected one"):
        compound_split_bleu(outputs, references, "xx")


CONFIG = ModelConfig(
    vocab_size=40, encoder_layers=1, decoder_layers=1, d_model=8, d_ff=8, num_heads=2
)


def test_validation_is_the_sum_over_sentences():
    rng = np.random.default_rng(0)
    sides = []
    for _ in range(2):
        starts = np.concatenate([[0], np.cumsum(rng.integers(1, 9, 20))])
        sides.append(Ragged(rng.integers(4, 40, starts[-1]), starts))
    corpus = ParallelCorpus(*sides)
    model = Transformer(CONFIG, dtype="float64")
    threaded = ThreadedModel(model, ParameterBuffer(model), 2)
    total = validate(threaded, corpus, 30)
    alone = [corpus.batch(np.array([i])) for i in range(20)]
    each = [token_statistics(model, batch.source, batch.target) for batch in alone]
    assert_close(total.nll, sum(part.nll for part in each))
    assert total.correct == sum(part.correct for part in each)
    assert total.tokens == corpus.target.lengths.sum() + 20  # EOS counted
    assert TokenStatistics(1e6, 0, 1).perplexity == math.exp(700)
    threaded.close()


def test_a_thread_takes_no_more_at_once_in_validation_than_in_training(monkeypatch):
    """Of sentences of 5 tokens, EOS counted, at most 3 where it has 12 tokens."""
    rows, sizes = [[7] * 4] * 20, []
    corpus = ParallelCorpus(*(Ragged.from_lists(rows) for _ in range(2)))
    plain = evaluation.token_statistics

    def measured(model, source, target):
        sizes.append(source.size)
        return plain(model, source, target)

    monkeypatch.setattr(parallel, "TOKENS_TIMES_WIDTH", 8 * 12)
    monkeypatch.setattr(evaluation, "token_statistics", measured)
    model = Transformer(CONFIG)
    threaded = ThreadedModel(model, ParameterBuffer(model), 2)
    assert validate(threaded, corpus, 1000).tokens == sum(sizes) == 20 * 5
    threaded.close()
    assert 5 < max(sizes) <= 1.25 * 12


def test_the_papers_bleu_is_not_smoothed():
    """No four words are the same in a row."""
    pytest.importorskip("sacremoses")
    outputs, references = ["one two three four five"], ["one two three x four five"]
    assert compound_split_bleu(outputs, references, "en") == 0
    assert BLEU(force=True).corpus_score(outputs, [references]).score > 10


def test_the_papers_bleu_knows_the_abbreviations_of_the_language():
    """The full stop of bzw. is no word of its own in German."""
    pytest.importorskip("sacremoses")
    outputs = ["Sie sahen Otto bzw. Anna im Park"]
    references = ["Sie sahen Otto bzw. Anna im Haus"]
    plain = BLEU(tokenize="none", smooth_method="none", force=True)
    expected = plain.corpus_score(outputs, [references]).score  # 7 words each
    assert_close(compound_split_bleu(outputs, references, "de"), expected)
