"""Each exercise fails as it stands, and passes as the package has it."""

import re
import runpy
import shutil
import subprocess
import sys

import pytest

from support.scripts import ROOT, with_tests_on_path

FILE = ROOT / "examples" / "exercises.py"
LIST = runpy.run_path(str(FILE))["LIST"]
# The quickest comes first.
NAMES = sorted(re.findall(r"^\w+", LIST, re.MULTILINE), key="norm".__ne__)


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """What the script copies from, elsewhere."""
    tree = tmp_path_factory.mktemp("tree")
    ignored = shutil.ignore_patterns("__pycache__", "*.safetensors")
    for part in ("minitransformer", "tests", "examples"):
        shutil.copytree(ROOT / part, tree / part, ignore=ignored)
    for part in ("pyproject.toml", "train.py", "translate.py"):
        shutil.copy(ROOT / part, tree)
    return tree


def run(tree, *arguments):
    environ = with_tests_on_path()
    environ.pop("PYTHONPATH")  # the copy's own package is tested
    return subprocess.run(
        [sys.executable, str(tree / "examples" / "exercises.py"), *arguments],
        env=environ,
        capture_output=True,
        encoding="utf-8",
    )


@pytest.mark.parametrize(
    "name",
    [NAMES[0], *(pytest.param(x, marks=pytest.mark.slow) for x in NAMES[1:])],
)
def test_an_exercise_fails_until_it_is_written(tree, name):
    done = run(tree, name)
    assert done.returncode == 1, done.stdout + done.stderr
    [place] = re.findall(r"^write \S+ in (.*)$", done.stdout, re.MULTILINE)
    assert "NotImplementedError: write " in done.stdout
    package = tree / "build" / "exercises" / name / "minitransformer"
    assert place.startswith(str(package))
    file = place.removeprefix(f"{package}/")
    shutil.copy(ROOT / "minitransformer" / file, place)
    again = run(tree, name)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "write" not in again.stdout


def test_hints_are_given_on_request(tree):
    assert run(tree).stdout.count("\n") == len(NAMES)
    hint = run(tree, NAMES[-1], "--hint").stdout.strip()
    assert hint
    assert hint in LIST


def test_it_is_short():
    assert len(FILE.read_text(encoding="utf-8").splitlines()) <= 80
