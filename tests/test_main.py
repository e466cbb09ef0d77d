"""`python -m minitransformer`: the list of commands, their help, and wrong names."""

import importlib
import io
import itertools
import os
import re
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from subprocess import PIPE, STDOUT

import pytest
from packaging.requirements import Requirement

import train
import translate
from minitransformer.__main__ import COMMANDS, main
from support.in_process import rows
from support.scripts import ROOT, TRAIN, TRANSLATE

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MODULES = {
    name: importlib.import_module(f"minitransformer.{place}")
    for name, (place, _) in COMMANDS.items()
    if not place.endswith(".py")
}


AS_INSTALLED = """
import sys
from minitransformer.__main__ import main

for arguments in sys.argv[1:]:
    try:
        main(arguments.split())
    except SystemExit:
        pass
    print("", flush=True)
"""


def test_a_wheel_names_its_commands(tmp_path):
    """A wheel has the scripts within the package, and no train.py beside it."""
    package = tmp_path / "minitransformer"
    (package / "scripts").mkdir(parents=True)
    for part in (ROOT / "minitransformer").iterdir():
        (package / part.name).symlink_to(part)
    for name in ("train.py", "translate.py"):
        (package / "scripts" / name).symlink_to(ROOT / name)
    expected = {
        "train --help": "\n    minitransformer train --resume ",
        "translate --help": "usage: minitransformer translate [-h]",
        "translate --beem 2": "minitransformer translate: error: unrec",
        "train --resume": "none: run minitransformer train first",
        "export --help": "from which minitransformer train --from begins.",
        "translate --beam 1 Hello.": "minitransformer translate: using ",
    }
    done = subprocess.run(
        [sys.executable, "-c", AS_INSTALLED, *expected],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        stdout=PIPE,
        stderr=STDOUT,
        text=True,
    )
    for part in expected.values():
        assert part in done.stdout
    assert not re.search(r"(train|translate)\.py", done.stdout)


@pytest.mark.parametrize("arguments", [[], ["-h"], ["--help"]])
def test_every_command_is_listed_in_a_line(capsys, arguments):
    assert main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    listed = [re.fullmatch(r"  (\w+) +(\S.*)", line) for line in lines]
    found = {match[1]: match[2] for match in listed if match}
    assert found == {name: what for name, (_, what) in COMMANDS.items()}
    assert found.keys() >= {"train", "translate", "average", "corpora", "split"}
    assert found.keys() >= {"plot", "export", "parse"}
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize("name", MODULES)
def test_help_shows_an_example_that_names_the_command(capsys, name):
    with pytest.raises(SystemExit) as ended:
        MODULES[name].main(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    examples = text.partition("example")[2].splitlines()[1:]
    called = re.compile(rf"    (python -m )?minitransformer {name} ")
    assert [line for line in examples if called.match(line)], text
    assert text.splitlines()[0].startswith(f"usage: minitransformer {name} ")


@pytest.mark.parametrize("script", [train, translate])
def test_scripts_are_commands(script, tmp_path, capsys):
    """From any folder, with the help that the script itself prints."""
    name = script.__name__
    command = [sys.executable, "-m", "minitransformer", name]
    flags = {"cwd": tmp_path, "capture_output": True, "text": True}
    found = subprocess.run([*command, "--help"], **flags)
    assert (found.returncode, found.stderr) == (0, "")
    assert f"\n    python {name}.py" in found.stdout
    with pytest.raises(SystemExit):
        script.main(["--help"])
    assert found.stdout == capsys.readouterr().out


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


@pytest.mark.parametrize("module", ["argparse", "numpy", "minitransformer.cli"])
@pytest.mark.parametrize("command", [TRAIN, TRANSLATE], ids=["train", "translate"])
def test_ctrl_c_while_a_script_loads_its_modules_is_one_line(command, module):
    """Python tells of each module that it has loaded."""
    python, script = command
    loading = [python, "-X", "importtime", script, "--help"]
    with subprocess.Popen(loading, stdout=PIPE, stderr=PIPE, text=True) as process:
        for line in process.stderr:
            if line.split("|")[-1].strip() == module:
                process.send_signal(signal.SIGINT)
                break
        rest = [x for x in process.stderr if not x.startswith("import time:")]
    assert rest == [f"{Path(script).name}: error: interrupted\n"]
    assert process.returncode == 130


def pipe_without_reader():
    reader, writer = os.pipe()
    os.close(reader)
    return writer


@pytest.mark.parametrize(
    ("output", "code", "error"),
    [
        (lambda: "/dev/full", 1, "error: No space left on device\n"),
        (pipe_without_reader, 141, ""),
    ],
    ids=["full disk", "closed pipe"],
)
@pytest.mark.parametrize("unbuffered", [False, True])
@pytest.mark.parametrize("command", [["--help"], ["runs"]])
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


# A wrong command; of each, what is wrong with its flags (2) and what it reads (1).
WRONG = """\
2 | trian | expected a command, got trian; did you mean train?
2 | exprot | expected a command, got exprot; did you mean export?
2 | zzz | expected a command, got zzz; minitransformer --help lists them
1 | average mean none | found no file
2 | corpora wmt99 x | argument corpus: invalid choice: 'wmt99'
1 | export float16 none out | none
2 | parse linearise out penn --split a=9 | a=9: expected more trees, got 1
1 | parse linearise out none | none
1 | parse score penn none | none
2 | parse score penn penn --cutof 3 | unrecognized argument --cutof
1 | plot none | expected a run directory, found no none/metrics.jsonl
2 | plot x -o x.pdf | expected .png or .svg, got x.pdf
1 | split penn out --source a --target b | expected source TAB target
1 | split pairs out --source a --target b | more than 4,000 different source sentences
2 | split pairs out --source a --target a | expected two different endings
2 | train --steps 0 | argument --steps: expected at least 1
1 | translate --model none x | none
"""


@pytest.mark.parametrize(("code", "arguments", "message"), rows(WRONG))
def test_errors_are_one_line(arguments, code, message, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "penn").write_text("(TOP (S (NN a)))\n")
    (tmp_path / "pairs").write_text("v\tw\nx\ty\n")
    try:
        found = main(arguments.split())
    except SystemExit as ended:
        found = ended.code
    [line] = capfd.readouterr().err.splitlines()
    assert (found, ": error: " in line, message in line) == (int(code), True, True), (
        line
    )
    assert {path.name for path in tmp_path.iterdir()} == {"penn", "pairs"}
