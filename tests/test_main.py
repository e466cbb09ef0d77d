"""`python -m minitransformer`: the list of commands, their help, and wrong names."""

import importlib
import io
import itertools
import os
import re
import subprocess
import sys
from contextlib import ExitStack

import pytest
from packaging.requirements import Requirement

from minitransformer import __main__ as command_line
from minitransformer.__main__ import COMMANDS, main
from support.scripts import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MODULES = {
    name: importlib.import_module(f"minitransformer.{place}")
    for name, (place, _) in COMMANDS.items()
    if not place.endswith(".py")
}


def python(*arguments, cwd=ROOT):
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, capture_output=True, text=True
    )


def help_of(name, capsys):
    """The `--help` of a command, which must end well."""
    with pytest.raises(SystemExit) as ended:
        MODULES[name].main(["--help"])
    assert ended.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["-h"], ["--help"]])
def test_every_command_is_listed_in_a_line(capsys, arguments):
    assert main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    listed = [re.fullmatch(r"  (\w+) +(\S.*)", line) for line in lines]
    found = {match[1]: match[2] for match in listed if match}
    assert found == {name: what for name, (_, what) in COMMANDS.items()}
    assert found.keys() >= {"train", "translate", "average", "corpora", "split"}
    assert found.keys() >= {"cost", "plot", "lexicon", "export", "parse"}
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize(
    ("name", "meant"), [("trian", "train"), ("exprot", "export"), ("zzz", None)]
)
def test_an_unknown_command_gets_one_line_and_a_suggestion(capsys, name, meant):
    assert main([name]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert f"expected a command, got {name}" in line
    assert ("did you mean" in line) == (meant is not None)
    if meant:
        assert f"did you mean {meant}?" in line


@pytest.mark.parametrize("name", MODULES)
def test_help_shows_an_example_that_names_the_command(capsys, name):
    text = help_of(name, capsys)
    examples = text.partition("example")[2].splitlines()[1:]
    called = re.compile(rf"    (python -m )?minitransformer {name} ")
    assert [line for line in examples if called.match(line)], text
    assert text.splitlines()[0].startswith(f"usage: minitransformer {name} ")


@pytest.mark.parametrize("name", MODULES)
def test_help_is_no_docstring(capsys, monkeypatch, name):
    before = help_of(name, capsys)
    monkeypatch.setattr(MODULES[name], "__doc__", "Changed prose.")
    assert help_of(name, capsys) == before


@pytest.mark.parametrize("name", ["train", "translate"])
def test_scripts_are_commands(name, tmp_path):
    """From any folder, with the help that the script itself prints."""
    found = python("-m", "minitransformer", name, "--help", cwd=tmp_path)
    assert (found.returncode, found.stderr) == (0, "")
    assert f"\n    python {name}.py" in found.stdout
    assert found.stdout == python(f"{name}.py", "--help").stdout


@pytest.mark.parametrize("name", ["train", "translate"])
def test_help_of_scripts_is_no_docstring(name, tmp_path):
    text = (ROOT / f"{name}.py").read_text(encoding="utf-8")
    assert text.startswith('"""')
    changed = '"""Changed prose."""\n' + text.split('"""', 2)[2]
    (tmp_path / f"{name}.py").write_text(changed, encoding="utf-8")
    found = python(str(tmp_path / f"{name}.py"), "--help")
    assert (found.returncode, found.stderr) == (0, "")
    assert found.stdout == python(f"{name}.py", "--help").stdout


def test_scripts_get_their_arguments_and_exit_code(tmp_path):
    found = python("-m", "minitransformer", "train", "--steps", "0", cwd=tmp_path)
    assert found.returncode == 2
    expected = "argument --steps/--max-update: expected at least 1, got 0"
    assert found.stderr == f"train.py: error: {expected}\n"


def test_commands_get_their_arguments_and_exit_code(tmp_path):
    command = ["-m", "minitransformer", "average", "mean.safetensors", "none"]
    found = python(*command, cwd=tmp_path)
    assert found.returncode == 1
    assert found.stderr.count("\n") == 1
    assert "found no file" in found.stderr


def test_the_installed_command_is_this_one():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert 'minitransformer = "minitransformer.__main__:main"' in text
    assert callable(command_line.main)


def test_the_lock_has_what_its_extras_need():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    extras = project["project"]["optional-dependencies"]
    lock = (ROOT / "requirements-dev.lock").read_text(encoding="utf-8")
    pinned = re.findall(r"^([\w-]+)==(\S+)", lock, re.MULTILINE)
    needed = [*project["project"]["dependencies"]]
    needed += [f"minitransformer[{x}]" for x in re.findall(r"--extra (\w+)", lock)]
    assert "minitransformer[dev]" in needed
    for requirement in map(Requirement, needed):  # which grows meanwhile
        if requirement.name == "minitransformer":
            needed += itertools.chain(*(extras[extra] for extra in requirement.extras))
            continue
        name = requirement.name.lower().replace("_", "-")
        versions = [version for found, version in pinned if found == name]
        assert any(map(requirement.specifier.contains, versions)), requirement
    assert any(x.startswith("onednn") for x in needed)


def test_ctrl_c_while_modules_are_loaded_is_one_line(capsys, monkeypatch):
    def interrupted(name):
        raise KeyboardInterrupt

    monkeypatch.setattr(importlib, "import_module", interrupted)
    assert main(["average", "--help"]) == 130
    assert capsys.readouterr().err == "minitransformer average: error: interrupted\n"


def pipe_without_reader():
    reader, writer = os.pipe()
    os.close(reader)
    return writer


@pytest.mark.parametrize(
    ("output", "code", "error"),
    [
        (lambda: "/dev/full", 1, "standard output: No space left on device\n"),
        (pipe_without_reader, 141, ""),
    ],
    ids=["full disk", "closed pipe"],
)
@pytest.mark.parametrize("unbuffered", [False, True])
@pytest.mark.parametrize("command", [["--help"], ["cost", "--steps", "9"]])
def test_output_that_cannot_be_written(
    capsys, monkeypatch, command, unbuffered, output, code, error
):
    """Its end is written when the command has done its work: that may fail, too."""
    with ExitStack() as stack:
        raw = stack.enter_context(
            open(output(), "wb", buffering=0 if unbuffered else -1)
        )
        stdout = io.TextIOWrapper(raw, write_through=unbuffered)
        stack.enter_context(monkeypatch.context()).setattr("sys.stdout", stdout)
        assert main(command) == code
    written = capsys.readouterr().err
    assert written.endswith(error)
    assert written.count("\n") == bool(error)
