"""A model written for CTranslate2 translates as it does here."""

from __future__ import annotations

import numpy as np
import pytest

from minitransformer.commands import export
from minitransformer.engine.autograd import no_grad
from minitransformer.model.parameters import ParameterBuffer
from minitransformer.runs import checkpoint
from minitransformer.runs.checkpoint import Checkpoint
from minitransformer.settings.config import BOS_ID, EOS_ID, UNK_ID
from minitransformer.settings.decoding_config import DecodingConfig
from minitransformer.text.tokenizer import Tokenizer
from minitransformer.translation.batch_translation import translate_ids
from support.models import model_with_random_biases

LINES = [
    f"the {a} {b} sees a {c}."
    for a in ("old", "red", "small")
    for b in ("man", "dog", "house", "tree")
    for c in ("cat", "child", "river", "boat")
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(LINES, 64)


def possible_log_probs(model, source, tokens):
    """The log-probability of each token among those that a search may produce."""
    with no_grad():
        inputs = np.array([[*source, EOS_ID]]), np.array([[BOS_ID, *tokens]])
        logits = model.logits(model(*inputs)).data[0].astype(float)
    logits = logits[:, EOS_ID:] - logits[:, EOS_ID:].max(axis=1, keepdims=True)
    log_probs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return log_probs[np.arange(len(logits)), np.array([*tokens, EOS_ID]) - EOS_ID]


@pytest.mark.parametrize("positions", ["sinusoidal", "learned"])
def test_greedy_output_is_the_same_token_for_token(tmp_path, tokenizer, positions):
    ctranslate2 = pytest.importorskip("ctranslate2")
    model = model_with_random_biases(positions=positions, max_positions=40)
    model.embedding.table.data[UNK_ID] *= 3  # which then often has the highest logit
    path = tmp_path / "model.safetensors"
    checkpoint.save(path, Checkpoint(model, tokenizer, ParameterBuffer(model)))
    assert export.main(["ctranslate2", str(path), str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "tokenizer.model").read_bytes() == tokenizer.model
    small = ["ctranslate2", str(path), str(tmp_path / "int8"), "--quantization", "int8"]
    assert export.main(small) == 0
    sizes = [(tmp_path / x / "model.bin").stat().st_size for x in ("out", "int8")]
    assert sizes[1] < sizes[0]

    sources = tokenizer.encode(LINES)
    ours = translate_ids(
        model, sources, DecodingConfig(beam=1, max_len_a=0.0, max_len_b=20)
    )
    pieces = [tokenizer.pieces(line) for line in sources]
    theirs = ctranslate2.Translator(
        str(tmp_path / "out"), inter_threads=1, intra_threads=1
    ).translate_batch(
        pieces,
        beam_size=1,
        max_decoding_length=21,
        return_scores=True,
    )
    for source, mine, other in zip(sources, ours, theirs, strict=True):
        expected = tokenizer.pieces(mine[0].tokens)
        assert other.hypotheses[0][: len(expected)] == expected
        # It scores by the mean, we by the paper's penalty: compare where lengths agree.
        if len(expected) < 20:
            log_probs = possible_log_probs(model, source, mine[0].tokens)
            mean = np.mean(log_probs)
            np.testing.assert_allclose(other.scores[0], mean, rtol=1e-4, atol=1e-5)


def test_a_full_directory_and_unusual_head_widths_are_refused(
    tmp_path, tokenizer, capsys
):
    pytest.importorskip("ctranslate2")
    path = tmp_path / "model.safetensors"
    model = model_with_random_biases(d_k=4)
    checkpoint.save(path, Checkpoint(model, tokenizer, ParameterBuffer(model)))
    for output, code, error in (
        (tmp_path, 2, "a new or an empty"),
        (path, 2, "got one that is read"),
    ):
        assert export.main(["ctranslate2", str(path), str(output)]) == code
        assert error in capsys.readouterr().err
    assert export.main(["ctranslate2", str(path), str(tmp_path / "new")]) == 1
    assert "d_model / num_heads = 8, got 4 and 8" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
