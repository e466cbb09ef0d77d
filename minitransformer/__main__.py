"""The command line of the package: `python -m minitransformer COMMAND`."""

from __future__ import annotations

import importlib
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from minitransformer.settings.options import suggestion

# The commands, where their `main` is, and what they do. The two scripts are files of
# their own, at the top of a source tree and in the folder `scripts` of a wheel.
COMMANDS = {
    "train": ("train.py", "train a model (section 5)"),
    "translate": ("translate.py", "translate, score and serve (section 6.1)"),
    "average": ("runs.average", "average the parameters of checkpoints"),
    "corpora": ("text.corpora", "download a public corpus"),
    "split": ("text.split", "split sentence pairs into train, val and test"),
    "cost": ("training.cost", "parameters, operations and hours of a model"),
    "plot": ("training.plot", "plot loss, BLEU and speed of runs"),
    "lexicon": ("translation.lexicon", "learn likely translations, for --shortlist"),
    "export": ("translation.export", "write a model in 16 bits or for CTranslate2"),
    "parse": ("parsing.parsing", "trees to text and back, and their scores"),
    "completion": ("completion", "complete commands and flags in a shell"),
}


def usage() -> str:
    """Return the list of commands, a line each."""
    head = "usage: minitransformer COMMAND ... (or python -m minitransformer COMMAND)\n"
    lines = (f"  {name:<11}{what}" for name, (_, what) in COMMANDS.items())
    foot = "\nminitransformer COMMAND --help says more about one of them."
    return "\n".join((head, *lines, foot))


def script_path(name: str) -> Path:
    """Return where train.py or translate.py is."""
    package = Path(__file__).parent
    return next(
        p for p in (package / "scripts" / name, package.parent / name) if p.exists()
    )


def run_script(name: str, arguments: Sequence[str]) -> None:
    """Run train.py or translate.py as if it had been called by its path."""
    path = script_path(name)
    sys.argv = [str(path), *arguments]
    runpy.run_path(str(path), run_name="__main__")


def main(arguments: Sequence[str] | None = None) -> int:
    name, *rest = (sys.argv[1:] if arguments is None else arguments) or [""]
    if name in ("", "-h", "--help"):
        print(usage())
        return 0
    if name not in COMMANDS:
        hint = suggestion(name, COMMANDS)
        print(
            f"minitransformer: error: expected a command, got {name}{hint}; "
            "minitransformer --help lists them",
            file=sys.stderr,
        )
        return 2
    place, _ = COMMANDS[name]
    try:
        if place.endswith(".py"):
            run_script(place, rest)
            return 0
        return int(importlib.import_module(f"minitransformer.{place}").main(rest))
    except KeyboardInterrupt:  # while modules were loaded: commands handle others
        print(f"minitransformer {name}: error: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
