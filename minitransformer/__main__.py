"""The command line of the package: `python -m minitransformer COMMAND`."""

from __future__ import annotations

import importlib
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from minitransformer.cli import exit_code, package_version
from minitransformer.settings.options import suggestion

# The commands, where their `main` is, and their help. The two scripts are files at the
# top of a source tree, and in the folder `scripts` of a wheel.
COMMANDS = {
    "train": ("train.py", "train a model (section 5)"),
    "translate": ("translate.py", "translate, score and serve (section 6.1)"),
    "file": ("commands.file", "translate subtitles, catalogues and other files"),
    "runs": ("commands.runs", "list training runs, and delete some"),
    "average": ("commands.average", "average the parameters of checkpoints"),
    "corpora": ("commands.corpora", "download a public corpus"),
    "mix": ("commands.mix", "make one corpus of several"),
    "split": ("commands.split", "split sentence pairs into train, val and test"),
    "vocabulary": ("commands.vocabulary", "learn a vocabulary by SentencePiece"),
    "plot": ("commands.plot", "plot loss, BLEU and speed of runs"),
    "export": ("commands.export", "write a model in 16 bits or for CTranslate2"),
    "parse": ("commands.parse", "trees to text and back, and their scores"),
}


def usage() -> str:
    """Return the list of commands, a line each."""
    head = "usage: minitransformer COMMAND ... (or python -m minitransformer COMMAND)\n"
    lines = (f"  {name:<11}{what}" for name, (_, what) in COMMANDS.items())
    foot = (
        "\nminitransformer COMMAND --help says more about one of them, and\n"
        "minitransformer --version which version this is."
    )
    return "\n".join((head, *lines, foot))


def main_of(command: str) -> Callable[[Sequence[str]], int]:
    """Return the function that a command calls with its arguments."""
    place, _ = COMMANDS[command]
    if not place.endswith(".py"):
        return importlib.import_module(f"minitransformer.{place}").main
    script = Path(__file__).parent / "scripts" / place
    if not script.exists():
        script = Path(__file__).parents[1] / place
    return runpy.run_path(str(script))["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    name, *rest = (sys.argv[1:] if arguments is None else arguments) or [""]
    if name in ("", "-h", "--help"):
        return exit_code("minitransformer", lambda: print(usage()))
    if name == "--version":
        return exit_code("minitransformer", lambda: print(package_version()))
    if name not in COMMANDS:
        hint = suggestion(name, COMMANDS)
        print(
            f"minitransformer: error: expected a command, got {name}{hint}; "
            "minitransformer --help lists them",
            file=sys.stderr,
        )
        return 2
    try:
        return main_of(name)(rest)
    except KeyboardInterrupt:  # while modules were loaded: commands handle others
        print(f"minitransformer {name}: error: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
