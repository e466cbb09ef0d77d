"""How sure a model is: of each word by hand, and of a line among validation text."""

import json
from dataclasses import replace

import numpy as np
import pytest

from minitransformer import load
from minitransformer.runs.state import RunState
from minitransformer.settings.decoding_config import TranslationConfig
from minitransformer.translation.confidence import quantiles
from support.in_process import run_translate
from support.models import logits_after, save_small_model, softmax
from support.scripts import SHORT

SENTENCES = ["Where is the station?", "The cat saw an unbelievably old tree."]


def test_each_word_has_the_sum_of_its_tokens(shipped):
    config = TranslationConfig(words=True, nbest=2, split="always")
    paragraph = f" {SENTENCES[0]}  {SENTENCES[1]}"
    *apart, both, blank = shipped.hypotheses([*SENTENCES, paragraph, ""], config)
    tokenizer = shipped.tokenizer
    for source, found in zip(tokenizer.encode(SENTENCES), apart, strict=True):
        for h in found:
            logits = logits_after(shipped.single_model, source, h.tokens)
            of_tokens = zip(np.log(softmax(logits)), h.tokens, strict=False)
            by_hand = np.array([row[token] for row, token in of_tokens])
            begins = [x.startswith("\u2581") for x in tokenizer.pieces(h.tokens)]
            words = np.cumsum(begins) - 1
            assert [word for word, _ in h.words] == h.text.split()
            for n, (_, log_prob) in enumerate(h.words):
                assert log_prob == pytest.approx(by_hand[words == n].sum(), rel=1e-3)
    assert max(len(h.tokens) - len(h.words) for x in apart for h in x) > 2
    for n, h in enumerate(both):
        assert [w for w, _ in h.words] == h.text.split()
        sums = [x for _, x in apart[0][n].words + apart[1][n].words]
        np.testing.assert_allclose([x for _, x in h.words], sums, rtol=1e-3)
    assert blank[0].words == ()
    [[copy]] = shipped.hypotheses(
        ["Visit https://a.org/x now."], replace(config, nbest=1)
    )
    found = dict(copy.words)
    assert [*found] == copy.text.split()
    [unread] = [x for x in found if found[x] is None]
    assert unread.rstrip(".") == "https://a.org/x"


def test_confidence_is_a_share_of_the_sentences_that_are_known(shipped):
    config = TranslationConfig(split="always")
    known = np.linspace(-2, 0, 21).tolist()
    lines = [*SENTENCES, " ".join(SENTENCES), "asdf qwer zxcv"]
    calibrated = load("en-de", threads=1)
    calibrated.quantiles = known
    found = [best for best, *_ in calibrated.hypotheses(lines, config)]
    for line, h in zip(lines, found, strict=True):
        if line in SENTENCES:  # --score: the end of the sentence is a token, too
            [(log_prob, length, _)] = shipped.score([line], [h.text], config)
            assert h.confidence == pytest.approx(1 + log_prob / length / 2, abs=1e-3)
    sure = [h.confidence for h in found]
    assert sure[2] == pytest.approx(min(sure[:2]), abs=1e-3)
    assert sure[3] < min(sure[:2])
    calibrated.quantiles = ()
    assert calibrated.hypotheses(lines[:1], config)[0][0].confidence is None


@pytest.mark.parametrize(
    ("known", "confidence", "said"),
    [
        ((), None, ""),
        (np.linspace(-99, -98, 21), 1.0, ""),
        (np.linspace(-1e-9, 0, 21), 0.0, "the model is unsure of 2 of 3 lines"),
    ],
)
def test_lines_of_which_the_model_is_unsure_are_counted(
    tmp_path, known, confidence, said
):
    state = RunState(log_prob_quantiles=quantiles(known) if len(known) else ())
    path = save_small_model(tmp_path / "x.safetensors", state)
    flags = ("--model", path, *SHORT, "and", "", "and")  # it writes no digits
    code, _, error = run_translate(*flags)
    assert (code, error.count("\n")) == (0, bool(said)), error
    assert said in error
    _, out, _ = run_translate("--json", *flags)
    assert '"words"' not in out
    _, out, _ = run_translate("--json", "--words", *flags)
    found = [json.loads(line)["translations"][0] for line in out.splitlines()]
    assert [x["confidence"] for x in found] == [confidence, None, confidence]
    for best in found:
        assert [word for word, _ in best["words"]] == best["text"].split()
