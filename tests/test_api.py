"""The package as a library: load a model and translate with it."""

import ast
import re
import subprocess
import sys

import pytest

import minitransformer
from minitransformer.__main__ import main
from support.in_process import run_translate
from support.models import CAT_LINES, save_small_run
from support.scripts import ROOT, SHORT


def test_load_and_translate_equal_the_command(model_path, translator):
    options = {"max_len_a": 0, "max_len_b": 5}
    lines, prefix = CAT_LINES[:3], ["the", "", "sat"]
    found = minitransformer.translate(translator, lines, **options)
    code, out, _ = run_translate("--model", model_path, *SHORT, *lines)
    assert code == 0
    assert found == out.splitlines()
    drawn = {"sample": True, "seed": 2, **options}
    found = minitransformer.translate(translator, lines, prefix=prefix, **drawn)
    config = minitransformer.TranslationConfig(**drawn)
    assert found == translator.translate(lines, config, prefixes=prefix)
    assert all(map(str.startswith, found, prefix))


@pytest.mark.parametrize(
    "written", [["average"], ["export", "float16"]], ids=["mean", "16 bits"]
)
def test_a_checkpoint_that_left_its_run_decodes_as_in_the_run(tmp_path, written):
    run = save_small_run(tmp_path / "run", beam=3, alpha=1.0, max_len_b=4)
    [source], alone = (tmp_path / "run").glob("*.safetensors"), str(tmp_path / "alone")
    paths = [alone, str(source)] if written == ["average"] else [str(source), alone]
    assert main([*written, *paths]) == 0
    expected = minitransformer.load(run).decoding
    assert (expected.beam, expected.alpha, expected.max_len_b) == (3, 1.0, 4)
    assert minitransformer.load(alone).decoding == expected


@pytest.mark.parametrize(
    ("lines", "options", "message"),
    [
        (None, {}, "expected a list of lines, got None"),
        (["one"], {"prefix": 5}, "expected a list of prefixes, got 5"),
        (["one", None], {}, "expected a list of lines, got None in it"),
        (["one"], {"beams": 2}, "expected options of TranslationConfig, got beams"),
        (["one"], {"prefix": "a"}, "expected a list of prefixes, got 'a"),
        (["one"], {"prefix": []}, "expected prefixes for 1 lines, got 0"),
        (["one"], {"top_k": 2}, "top_k: does nothing without sample"),
        (["one"], {"sample": True, "nbest": 10_001}, "nbest: expected at most 10000"),
        (["one"], {"nbest": 2}, "nbest: does nothing here, use Translator.hypotheses"),
        (["one"], {"alignment": True}, "alignment: does nothing here"),
    ],
)
def test_wrong_arguments_are_refused(translator, lines, options, message):
    with pytest.raises(ValueError, match=message):
        minitransformer.translate(translator, lines, **options)


@pytest.mark.parametrize(("lines", "others"), [("a", ""), ("a", "ab"), ("ab", "a")])
def test_each_line_needs_a_translation(translator, lines, others):
    message = f"translations for {len(lines)} lines, got {len(others)}"
    with pytest.raises(ValueError, match=message):
        translator.score([*lines], [*others], translator.decoding)


def test_every_public_name_is_there():
    for name in minitransformer.__all__:
        assert getattr(minitransformer, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = minitransformer.nothing


def test_importing_the_package_imports_no_library():
    code = "import sys, minitransformer; print('numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "False\n"


def test_the_program_for_type_checkers_uses_every_public_name():
    text = (ROOT / "tests" / "support" / "public_names.py").read_text(encoding="utf-8")
    names = {
        node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)
    }
    assert names >= set(minitransformer.__all__)


def test_the_version_is_the_same_everywhere():
    places = {
        "pyproject.toml": r'^version = "(.*)"$',
        "CITATION.cff": r"^version: (.*)$",
    }
    for name, pattern in places.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        assert re.findall(pattern, text, re.MULTILINE) == [minitransformer.__version__]


@pytest.mark.parametrize("method", ["translate", "hypotheses", "score"])
def test_one_string_is_no_list_of_lines(translator, method):
    others = ["the cat"] if method == "score" else []
    with pytest.raises(ValueError, match="expected a list of lines, got 'the"):
        getattr(translator, method)("the cat", *others, translator.decoding)


def test_what_is_no_model_is_refused():
    for path in (5, None, ["en-de"]):
        with pytest.raises(ValueError, match="expected a path or a name of a model"):
            minitransformer.load(path)
    with pytest.raises(ValueError, match="device: expected cpu, cuda or cuda:N, got N"):
        minitransformer.load("en-de", device=None)
    with pytest.raises(ValueError, match="expected a model that `load` returned"):
        minitransformer.translate("en-de", ["the cat"])
