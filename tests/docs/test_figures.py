"""Limits, sizes and lengths that the pages name are those of the code."""

import pkgutil
import re

import pytest

from minitransformer.settings.config import ModelConfig
from minitransformer.settings.options import make_config
from minitransformer.settings.presets import find_preset
from support.in_process import rows
from support.scripts import ROOT


def page(name):
    return re.sub(r"\s+", " ", (ROOT / name).read_text(encoding="utf-8"))


# A page, what it says, the name in the package and its value.
LIMITS = """
reliability | A line of more than 4 MiB | text.lines.MAX_LINE | 4194304
corpora | more than 32 KiB are left out | text.tokenizer.MAX_SENTENCE | 32768
flags | from 1,024 on, the 256 bytes | text.tokenizer.BYTES_FROM_SIZE | 1024
serve | 81,920 tokens times | commands.libretranslate.MAX_WAITING | 81920
serve | more than 65,536 bytes | commands.serve.MAX_BODY | 65536
serve | 16,384 tokens divided by the beam | commands.libretranslate.MAX_TOKENS | 16384
"""


@pytest.mark.parametrize(("name", "text", "limit", "value"), rows(LIMITS))
def test_limits_are_those_of_the_pages(name, text, limit, value):
    assert text in page(f"docs/{name}.md")
    assert pkgutil.resolve_name(f"minitransformer.{limit}") == int(value)


RESULTS = """
results | multi30k
results | small
parsing | examples/parsing-small.json
"""


@pytest.mark.parametrize(("name", "preset"), rows(RESULTS))
def test_results_are_of_models_that_the_presets_make(name, preset):
    _, settings = find_preset(preset)
    count = make_config(ModelConfig, settings, {}).num_parameters
    assert f"{count:,} parameters" in page(f"docs/{name}.md")


def test_the_core_is_as_long_as_the_pages_say():
    """The ten files that docs/source.md names first, and the rest of their folders."""
    package = ROOT / "minitransformer"
    walk = [ROOT / "train.py", ROOT / "translate.py"]
    walk += [
        package / f"{name}.py"
        for name in (
            "engine/autograd engine/ops model/layers model/transformer "
            "training/optimizer training/parallel translation/beam_search "
            "translation/incremental_decoding"
        ).split()
    ]
    core = {*walk, *package.glob("engine/*.py"), *package.glob("model/*.py")}
    for paths, name, sentence in (
        (walk, "docs/source.md", r"ten files of about ([\d,]+) lines"),
        (core, "README.md", r"about ([\d,]+) lines"),
    ):
        length = sum(len(x.read_text(encoding="utf-8").splitlines()) for x in paths)
        said = int(re.search(sentence, page(name))[1].replace(",", ""))
        assert said == pytest.approx(length, rel=0.1), f"{name}: {length} lines"
