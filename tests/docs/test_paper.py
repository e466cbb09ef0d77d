"""Every name in docs/paper.md exists, and every test of a promise or a property.

So does every flag and preset on all pages.
"""

import functools
import pkgutil
import re
import shlex
import subprocess
import sys

import pytest

from minitransformer.settings.presets import find_preset
from support.scripts import ROOT

PAGE = (ROOT / "docs" / "paper.md").read_text(encoding="utf-8")
PACKAGE = "minitransformer"
TESTED = [ROOT / "docs" / f"{name}.md" for name in ("reliability", "properties")]
TESTS = [
    name
    for path in TESTED
    for name in re.findall(r"`(test_\w+::test_\w+)`", path.read_text(encoding="utf-8"))
]
NAMES = sorted({*re.findall(r"`([^`]+)`", PAGE), *TESTS})
PAGES = [*ROOT.glob("docs/*.md"), *ROOT.glob("minitransformer/models/*/*.md")]
CODE = r"^ {4}(python .*)$|^(python .*)$|`(python [^`]+)`"
COMMANDS = [
    "".join(found).partition(" #")[0]
    for path in sorted(PAGES)
    for found in re.findall(
        CODE, path.read_text(encoding="utf-8").replace("\\\n", " "), re.MULTILINE
    )
]


def check_name(name: str) -> None:
    if match := re.fullmatch(r"(test_\w+)::(test_\w+)", name):
        module, function = match.groups()
        [path] = (ROOT / "tests").rglob(f"{module}.py")
        text = path.read_text(encoding="utf-8")
        made = rf"^(def {function}\(|{function} = )"  # or by Hypothesis
        assert re.search(made, text, re.MULTILINE)
    elif name.startswith("--"):
        assert re.search(rf"{name}\b", usage("train.py") + usage("translate.py"))
    elif "/" in name:
        assert (ROOT / name).exists()
    else:
        pkgutil.resolve_name(name if name == PACKAGE else f"{PACKAGE}.{name}")


@functools.cache
def usage(*script: str) -> str:
    every = "--help-all" if script[0] in ("train.py", "translate.py") else "--help"
    command = [sys.executable, *script, every]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout


@pytest.mark.parametrize("name", NAMES)
def test_a_name_on_the_page_exists(name):
    check_name(name)


@pytest.mark.parametrize(
    "wrong", ["engine.ops.atention", "test_ops::test_x", "--no-such"]
)
def test_a_name_that_does_not_exist_is_found_out(wrong):
    with pytest.raises((AssertionError, AttributeError)):
        check_name(wrong)


@pytest.mark.slow
def test_the_commands_use_flags_and_presets_that_exist():
    assert len(COMMANDS) > 100
    for command in COMMANDS:
        _, *words = shlex.split(command)
        # The first needs a library of developers, the second is no script.
        if words[0] in ("tests/mutation.py", "-c"):
            continue
        script = words[: words.index("minitransformer") + 2 if words[0] == "-m" else 1]
        if script[-1] == "parse":  # has commands of its own
            script = words[: len(script) + 1]
        known = "" if script[-1] == "COMMAND" else usage(*script)
        if script == ["benchmarks/table3.py"]:  # hands further flags to train.py
            known += usage("train.py")
        for flag in (word for word in words if word.startswith("--")):
            assert re.search(rf"{flag}\b", known), f"{script} {flag}"
        if "--config" in words:
            find_preset(words[words.index("--config") + 1])


def test_every_numbered_part_of_the_paper_is_there():
    parts = "3.1 3.2.1 3.2.2 3.2.3 3.3 3.4 3.5 4 5.1 5.2 5.3 5.4 6.1".split()
    parts += [f"Table {i}" for i in range(1, 5)] + [f"equation {i}" for i in (1, 2, 3)]
    parts += ["Figure 1", "Figure 2", "Figures 3 to 5"]
    first_cells = " ".join(re.findall(r"^\| ([^|]+) \|", PAGE, re.MULTILINE))
    assert [part for part in parts if part not in first_cells] == []


def test_every_row_names_a_test_that_needs_no_other_library():
    rows = [line for line in PAGE.splitlines() if line.startswith("| ")]
    tables = [row for row in rows if "---" not in row and "what it says" not in row]
    assert len(tables) > 50
    for row in tables:
        tests = re.findall(r"`(test_\w+)::(test_\w+)`", row)
        assert tests, row
        assert not [t for t in tests if "torch" in t[0]], row
