"""TranslationQuality against sacreBLEU, and the paper's BLEU against words by hand."""

import re
import subprocess
import sys

import numpy as np
import pytest
from sacrebleu.metrics import BLEU, CHRF

from minitransformer.translation.quality import (
    compound_split_bleu,
    report,
    translation_quality,
)
from support.closeness import assert_close

REFERENCES = ["Der Hund läuft über die Straße.", "Eine Frau schläft.", "Ja."]
OUTPUTS = ["Der Hund läuft auf der Straße.", "Eine Frau schläft.", "Nein."]


def test_scores_are_sacrebleus():
    found = translation_quality(OUTPUTS, REFERENCES)
    bleu, chrf = BLEU(), CHRF()
    assert found.bleu == bleu.corpus_score(OUTPUTS, [REFERENCES]).score
    score = chrf.corpus_score(OUTPUTS, [REFERENCES]).score
    assert f"\nchrF {score:.2f} (" in report(OUTPUTS, REFERENCES)
    assert "tok:13a" in found.bleu_signature
    assert "case:mixed" in found.bleu_signature
    assert found.length == 1.0
    assert found.exact == 1 / 3


def test_the_length_is_counted_in_words_and_punctuation():
    shorter = translation_quality(["Der Hund läuft.", "Eine Frau."], REFERENCES[:2])
    assert shorter.length == (4 + 3) / (7 + 4)
    assert "length 63.6% of the references" in report(
        ["Der Hund läuft.", "Eine Frau."], REFERENCES[:2]
    )
    assert translation_quality(["a"], [""]).length == 1


@pytest.mark.parametrize(("outputs", "references"), [(["a"], []), ([], [])])
def test_missing_references_are_refused(outputs, references):
    with pytest.raises(ValueError, match="expected as many references"):
        translation_quality(outputs, references)


CHINESE = [
    "\u6211\u7684\u670b\u53cb\u5728\u5b66\u6821\u3002",
    "\u4ed6\u5f88\u597d\u3002",
]


@pytest.mark.parametrize("name", [None, "zh", "char", "13a"])
def test_words_are_found_by_sacrebleus_tokeniser_of_that_name(name):
    outputs = [CHINESE[0].replace("\u5b66\u6821", "\u5bb6"), CHINESE[1]]
    found = translation_quality(outputs, CHINESE, name)
    whole = {"effective_order": True} if name == "13a" else {}  # one word a line
    expected = BLEU(tokenize=name or "zh", **whole)
    assert found.bleu == expected.corpus_score(outputs, [CHINESE]).score
    assert found.bleu_signature == str(expected.get_signature())


def test_japanese_is_compared_by_characters_if_no_tokeniser_is_named():
    lines = ["\u732b\u306f\u5e8a\u306b\u3044\u307e\u3059\u3002"] * 9
    assert "tok:char" in translation_quality(lines, lines).bleu_signature


def test_text_is_compared_in_one_form():
    lines = [
        f"Der {n}. Hu\xadnd la\u0308uft  u\u0308ber\xa0die Stra\xdfe."
        for n in range(20)
    ]
    outputs = [f"Der {n}. Hund l\xe4uft \xfcber die Stra\xdfe.\t" for n in range(20)]
    for sides in ((outputs, lines), (lines, outputs)):
        assert "(100.00 to 100.00)" in report(*sides).split("\n")[0]
        assert translation_quality(*sides).exact == 1


@pytest.mark.parametrize(
    ("apart", "tokenizer", "told"),
    [(3, None, True), (2, None, False), (3, "none", False), (3, "13a", True)],
)
def test_tokenised_references_are_named_once_in_our_words(
    caplog, apart, tokenizer, told
):
    """Of five sentences; sacreBLEU would warn of a hundred lines, in three others."""
    lines = ["Ein Hund lief ."] * apart + ["Ein Hund lief."] * (5 - apart) + ["Ja ?"]
    found = report(lines * 100, lines * 100, None, tokenizer)
    assert found.count("look tokenised, --bleu-tokenizer none") == told
    assert not caplog.records


@pytest.mark.parametrize("tokenizer", [None, "none"])
def test_the_advice_for_tokenised_references_makes_the_number_right(tokenizer):
    """The translations are detokenised text, which no flag makes tokenised."""
    translations = ["Er sagt, er mag Hunde (und Katzen)."] * 9
    tokenised = ["Er sagt , er mag Hunde ( und Katzen ) ."] * 9
    found = report(translations, tokenised, None, tokenizer).splitlines()[-1]
    moses = pytest.importorskip("sacremoses").MosesDetokenizer("de")
    assert "detokenise them (sacremoses detokenize)" in found
    references = [moses.detokenize(line.split()) for line in tokenised]
    assert translation_quality(translations, references).bleu == pytest.approx(100)


def test_the_papers_bleu_is_that_of_words_split_by_hand():
    """What Moses and the compound splitting make of each line, worked out by hand."""
    pytest.importorskip("sacremoses")
    outputs = """Der E-Mail-Dienst, „gut“.
Das kostet 3,50 Euro & mehr, sagt Anna.
Sie sahen Otto bzw. Anna im Park""".split("\n")
    references = """Der E-Mail-Dienst ist gut.
Das kostet 3,50 Euro & mehr, sagt er.
Sie sahen Otto bzw. Anna im Haus""".split("\n")
    words = """Der E ##AT##-##AT## Mail ##AT##-##AT## Dienst , „ gut &quot; .
Das kostet 3,50 Euro &amp; mehr , sagt Anna .
Sie sahen Otto bzw. Anna im Park""".split("\n")
    expected = """Der E ##AT##-##AT## Mail ##AT##-##AT## Dienst ist gut .
Das kostet 3,50 Euro &amp; mehr , sagt er .
Sie sahen Otto bzw. Anna im Haus""".split("\n")
    plain = BLEU(tokenize="none", smooth_method="none", force=True)
    for n in (1, 2, 3):
        score = plain.corpus_score(words[:n], [expected[:n]]).score
        assert_close(compound_split_bleu(outputs[:n], references[:n], "de"), score)
    with pytest.raises(ValueError, match="--compound-split: expected one"):
        compound_split_bleu(outputs, references, "xx")


def test_the_papers_bleu_is_not_smoothed():
    """No four words are the same in a row."""
    pytest.importorskip("sacremoses")
    outputs, references = ["one two three four five"], ["one two three x four five"]
    assert compound_split_bleu(outputs, references, "en") == 0
    assert BLEU(force=True).corpus_score(outputs, [references]).score > 10


def noisy(references, share, seed):
    """The references, with as large a share of their words replaced."""
    rng = np.random.default_rng(seed)
    lines = [line.split() for line in references]
    return [" ".join("?" if rng.random() < share else x for x in y) for y in lines]


def test_an_interval_has_the_middle_95_of_100_resampled_scores():
    """Nearly all lines are right: around the mean it would reach beyond 100."""
    references = [f"Das ist der {n}. Satz von neun langen Sätzen." for n in range(9)]
    outputs = [*references[1:], "Etwas ganz anderes steht hier."]
    references.append(references.pop(0))
    rows = np.random.default_rng(12345).choice(9, (1000, 9))
    lines = re.findall(r"\((\S+) to (\S+)\)", report(outputs, references))
    for metric, found in zip((BLEU(), CHRF()), lines, strict=True):
        scores = [
            metric.corpus_score(
                [outputs[i] for i in row], [[references[i] for i in row]]
            )
            for row in rows
        ]
        expected = np.percentile([x.score for x in scores], [2.5, 97.5])
        assert [*map(float, found)] == pytest.approx(expected, abs=0.006)
        assert float(found[1]) <= 100


def test_p_is_that_of_sacrebleus_command(tmp_path):
    references = [f"w{i} x y. z{i % 7} a b c" for i in range(200)]
    systems = noisy(references, 0.10, 1), noisy(references, 0.13, 2)
    paths = [tmp_path / name for name in ("reference", "ours", "other")]
    for path, lines in zip(paths, (references, *systems), strict=True):
        path.write_text("\n".join(lines) + "\n")
    command = [sys.executable, "-m", "sacrebleu", paths[0], "-i", paths[2], paths[1]]
    command += ["-m", "bleu", "chrf", "--paired-bs", "--format", "text", "-w", "4"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    *others, ours, chrf = map(float, re.findall(r"(\d+\.\d+) \(\d", done.stdout))
    p_values = re.findall(r"p = (\d\.\d+)", done.stdout)
    found = report(systems[0], references, other=systems[1]).split("\n")[-2:]
    for i, (name, score) in enumerate((("BLEU", ours), ("chrF", chrf))):
        assert found[i].startswith(f"{name} of --compare {others[i]:.2f}: ")
        assert found[i].endswith(
            f"{score - others[i]:+.2f}, p = {float(p_values[i]):.3f}"
        )
