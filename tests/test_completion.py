"""What a shell offers to complete, against the help of each command."""

import re
import shutil
import subprocess
import sys

import pytest

from minitransformer.__main__ import COMMANDS, main
from minitransformer.settings.options import Parser
from minitransformer.settings.presets import PRESETS
from support.in_process import run_main

pytest.importorskip("shtab", reason="needs shtab: pip install '.[completion]'")

# Print what bash would offer for each line of standard input, of words with a tab.
ASK_BASH = r"""
source "$1"
function=$(complete -p minitransformer | sed 's/.*-F \([^ ]*\).*/\1/')
while IFS= read -r line; do
  mapfile -t COMP_WORDS < <(tr '\t' '\n' <<<"$line")
  COMP_CWORD=$((${#COMP_WORDS[@]} - 1)) COMPREPLY=()
  "$function"
  echo "${COMPREPLY[*]}"
done
"""


@pytest.fixture(scope="module")
def scripts(tmp_path_factory):
    """The completion of each shell, in a file."""
    folder = tmp_path_factory.mktemp("completion")
    for shell in ("bash", "zsh", "fish"):
        code, text, error = run_main(main, "completion", shell)
        assert (code, error) == (0, "")
        (folder / shell).write_text(text)
    return folder


def flags(command):
    """The flags that a command's help shows."""
    usage = run_main(main, command, "--help")[1].partition("\n\n")[0]
    return set(re.findall(r"\[(--?[\w-]+)", usage))


@pytest.mark.skipif(not shutil.which("bash"), reason="needs bash")
def test_bash_offers_every_command_and_flag(scripts):
    def offered(*lines):
        typed = "".join("\t".join(("minitransformer", *x)) + "\n" for x in lines)
        command = ["bash", "-c", ASK_BASH, "bash", str(scripts / "bash")]
        done = subprocess.run(
            command, input=typed, capture_output=True, text=True, check=True
        )
        return [set(line.split()) for line in done.stdout.splitlines()]

    with_flags = [name for name in COMMANDS if name not in ("completion", "parse")]
    found = offered(*([name, "-"] for name in with_flags))
    for name, offer in zip(with_flags, found, strict=True):
        assert offer >= flags(name), name
        assert "--attempt" not in offer  # which is not for users
    commands, presets, splits, shells, corpora = offered(
        [""], ["train", "--config", ""], ["parse", ""], ["completion", ""],
        ["corpora", "multi"],
    )  # fmt: skip
    assert commands - {"-h", "--help"} == COMMANDS.keys()
    assert presets == PRESETS.keys()
    assert splits >= {"linearise", "restore", "score"}
    assert shells >= {"bash", "zsh", "fish"}
    assert corpora == {"multi30k"}


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_can_read_theirs(scripts, shell):
    text = (scripts / shell).read_text()
    for flag in ("d-model", "max-len-a", "score", "resume"):
        assert re.search(rf"(--|-l ){flag}\b", text)
    if not shutil.which(shell):
        pytest.skip(f"needs {shell}")
    subprocess.run([shell, "-n", str(scripts / shell)], check=True)


def test_another_shell_is_refused_and_nothing_is_left_changed():
    code, out, error = run_main(main, "completion", "cmd")
    assert (code, out) == (2, "")
    assert "expected one of bash, zsh, " in error
    assert Parser.parse_args.__name__ == "parse_args"


def test_without_shtab_the_error_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "shtab", None)
    code, _, error = run_main(main, "completion", "bash")
    assert code == 1
    assert "pip install 'minitransformer[completion]'" in error
