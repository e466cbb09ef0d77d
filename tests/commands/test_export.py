"""A model written for CTranslate2 translates as it does here."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
from sentencepiece import SentencePieceProcessor

from minitransformer import load
from minitransformer.commands import average, export
from minitransformer.model.parameters import ParameterBuffer
from minitransformer.runs import checkpoint
from minitransformer.runs.checkpoint import Checkpoint
from minitransformer.runs.models import language_codes
from minitransformer.settings.config import EOS_ID, UNK_ID
from minitransformer.settings.decoding_config import DecodingConfig, TranslationConfig
from minitransformer.text.tokenizer import Tokenizer
from minitransformer.translation.batch_translation import translate_ids
from minitransformer.translation.plain_translator import Segment
from support.models import (
    logits_after,
    model_with_random_biases,
    save_run,
    save_small_model,
    softmax,
)

LINES = [
    f"the {a} {b} sees a {c}."
    for a in ("old", "red", "small")
    for b in ("man", "dog", "house", "tree")
    for c in ("cat", "child", "river", "boat")
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(LINES, 64)


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
    ).translate_batch(pieces, beam_size=1, max_decoding_length=21, return_scores=True)
    for source, mine, other in zip(sources, ours, theirs, strict=True):
        expected = tokenizer.pieces(mine[0].tokens)
        assert other.hypotheses[0][: len(expected)] == expected
        # It scores by the mean, we by the paper's penalty: compare where lengths agree.
        if len(expected) < 20:
            logits = logits_after(model, source, mine[0].tokens)[:, EOS_ID:]
            tokens = zip(
                np.log(softmax(logits)), [*mine[0].tokens, EOS_ID], strict=True
            )
            mean = np.mean([row[token - EOS_ID] for row, token in tokens])
            np.testing.assert_allclose(other.scores[0], mean, rtol=1e-4, atol=1e-5)


def test_a_full_directory_and_unusual_head_widths_are_refused(tmp_path, capsys):
    pytest.importorskip("ctranslate2")
    path = save_small_model(tmp_path / "model.safetensors", d_k=6)
    for output, code, error in (
        (tmp_path, 2, "a new or an empty"),
        (path, 2, "got one that is read"),
        (tmp_path / "new", 1, "d_model / num_heads = 4, got 6 and 4"),
    ):
        assert export.main(["ctranslate2", path, str(output)]) == code
        assert error in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


# A package for Argos Translate

ARGOS = """
import sys
from pathlib import Path
from argostranslate import package, translate

package.install_from_path(Path(sys.argv[1]))
found = translate.get_translation_from_codes("en", "de")
whole = type("Whole", (), {"split_sentences": lambda self, text: [text]})
found.underlying.sentencizer = whole()  # its own needs a download
print(*map(found.translate, sys.argv[2:]), sep="\\n")
"""
SENTENCES = [
    "Where is the station?",
    "The old man gave the small child a red apple.",
    "I don't think it's a café; Tom's “friend” never paid.",
]


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    pytest.importorskip("ctranslate2")
    path = tmp_path_factory.mktemp("argos") / "en_de.argosmodel"
    assert export.main(["argos", "en-de", str(path)]) == 0
    return path


@pytest.fixture
def greedy(shipped):
    """The model's own translations: what it leaves out is not copied."""
    segments = [Segment(x) for x in SENTENCES]
    best = shipped.translate_as_read(segments, TranslationConfig(beam=1))
    return [h.text for h, *_ in best]


def test_a_package_is_laid_out_as_argos_reads_it(package, greedy, tmp_path):
    ctranslate2 = pytest.importorskip("ctranslate2")
    zipfile.ZipFile(package).extractall(tmp_path)
    [folder] = tmp_path.iterdir()
    about = json.loads((folder / "metadata.json").read_text())
    assert (about["from_code"], about["to_code"]) == ("en", "de")
    assert {"package_version", "argos_version", "from_name", "to_name"} < about.keys()
    assert (folder / "README.md").read_text().startswith("# en to de")
    file = str(folder / "sentencepiece.model")
    pieces = SentencePieceProcessor(model_file=file)
    translator = ctranslate2.Translator(str(folder / "model"), compute_type="float32")
    encoded = pieces.encode(SENTENCES, out_type=str)
    results = translator.translate_batch(encoded, beam_size=1)
    assert [pieces.decode_pieces(x.hypotheses[0]) for x in results] == greedy


def test_argos_translate_installs_a_package_and_translates(package, greedy, tmp_path):
    if importlib.util.find_spec("argostranslate") is None:
        pytest.skip("argostranslate is not installed")
    folders = ("XDG_DATA_HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME")
    theirs = dict.fromkeys(folders, str(tmp_path))
    theirs |= {"ARGOS_BEAM_SIZE": "1", "ARGOS_COMPUTE_TYPE": "float32"}
    command = [sys.executable, "-c", ARGOS, str(package), *SENTENCES]
    found = subprocess.run(
        command, env={**os.environ, **theirs}, capture_output=True, text=True
    )
    assert found.stdout.splitlines() == greedy, found.stderr


def test_a_package_has_the_languages_of_the_run_or_of_flags(
    model_path, tmp_path, capsys
):
    pytest.importorskip("ctranslate2")
    path = tmp_path / "x.argosmodel"
    given = ["argos", model_path, str(path)]
    assert export.main(given) == 2
    assert "expected --languages, such as en de" in capsys.readouterr().err
    assert not path.exists()
    assert export.main([*given, "--languages", "fr", "it"]) == 0
    about = zipfile.ZipFile(path).read("minitransformer-fr_it/metadata.json")
    assert json.loads(about)["to_code"] == "it"


# How sure a model is


def test_a_model_is_calibrated_by_text(model_path, tmp_path, capfd):
    text, path, mean = (tmp_path / x for x in ("text", "new", "mean"))
    lines = ["the cat sat", "", "on the mat", "the mat"]
    text.write_text("\n".join(lines))
    known = checkpoint.recorded_state(Path(model_path)).log_prob_quantiles
    given = ["float16", model_path, str(path), "--calibrate", str(text)]
    assert (export.main(given), known) == (0, ())
    assert average.main([str(mean), str(path)]) == 0
    capfd.readouterr()
    # As the model reads them: of numbers that it invents, it would be unsure.
    model = load(mean)
    best = model.translate_as_read([Segment(x) for x in lines if x], model.decoding)
    sure = sorted(h.confidence for h, *_ in best)
    np.testing.assert_allclose(sure, [0, 0.5, 1], atol=0.02)
    text.write_text("\n")
    given[2] = str(tmp_path / "other")
    assert export.main(given) == 1
    assert "expected lines to translate, found none" in capfd.readouterr().err
    assert export.main(["int8", *given[1:3], "--languages", "en", "de"]) == 2
    assert "--languages does nothing with int8" in capfd.readouterr().err


def test_an_exported_model_keeps_its_direction(place):
    """Wherever it lies, and whatever lies beside it."""
    run = save_run(place / "mine", {"best": {}}, ("a.en", "b.fr"))
    assert export.main(["float16", str(run.path), "copy"]) == 0
    assert language_codes(Path("copy")) == ("en", "fr")
    other = save_run(place / "other", {}, ("a.de", "b.cs"))
    shutil.copy("copy", other.path / "copy")
    assert language_codes(other.path / "copy") == ("en", "fr")


def test_no_model_is_put_into_the_folder_of_another_run(place, capsys):
    """What differs is said as where checkpoints are averaged."""
    run = save_run(place / "mine", {"best": {}}, ("a.en", "b.fr"))
    save_run(place / "back", {"best": {}}, ("a.fr", "b.en"))
    for folder, code in (("back", 1), ("mine", 0)):
        assert export.main(["float16", str(run.path), f"{folder}/copy"]) == code
        error = "mine/best.safetensors: its direction differs" * code
        assert error in capsys.readouterr().err
        assert Path(folder, "copy").exists() != bool(code)
