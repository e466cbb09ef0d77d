"""The package as a library: three lines in a notebook."""

import subprocess
import sys

import pytest
from test_translate import LINES, model  # noqa: F401  (a fixture)

import minitransformer


def test_three_lines_translate(model, capfd):  # noqa: F811
    translator = minitransformer.load(model)
    options = {"max_len_a": 0, "max_len_b": 5}
    found = minitransformer.translate(translator, LINES[:3], threads=1, **options)
    from test_translate import SHORT, in_process

    code, out, _ = in_process(capfd, "--model", model, *SHORT, *LINES[:3])
    assert code == 0
    assert found == out.splitlines()


@pytest.mark.parametrize(
    ("lines", "options", "message"),
    [
        ("one", {}, "expected a list of lines"),
        (["one"], {"beams": 2}, "expected options of DecodingConfig, got beams"),
        (["one"], {"beam": 0}, "beam: expected at least 1, got 0"),
    ],
)
def test_wrong_use_is_said(model, lines, options, message):  # noqa: F811
    with pytest.raises(ValueError, match=message):
        minitransformer.translate(minitransformer.load(model), lines, **options)


def test_every_public_name_is_there():
    for name in minitransformer.__all__:
        assert getattr(minitransformer, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = minitransformer.nothing


def test_the_package_itself_imports_nothing():
    code = "import sys, minitransformer; print('numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "False\n"
