"""What depends on the way of installing: optional libraries, the names of scripts."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

# The scripts of a source tree; from a wheel they are commands of `minitransformer`.
SCRIPTS = re.compile(r"(?<![\w/.-])(?:python )?(train|translate)\.py\b")
IN_TREE = Path(__file__).parents[2].joinpath("train.py").is_file()


def as_installed(text: str) -> str:
    """Return text for users with the scripts called as they are called here."""
    return text if IN_TREE else SCRIPTS.sub(r"minitransformer \1", text)


def import_extra(module: str, extra: str, need: str) -> Any:
    """Import a module that `pip install 'minitransformer[extra]'` installs.

    Raises: RuntimeError with `need` and that command if it cannot be imported.
    """
    try:
        return importlib.import_module(module)
    except (ImportError, RuntimeError) as error:
        install = f"pip install 'minitransformer[{extra}]'"
        raise RuntimeError(f"{need}: {install} ({error})") from error
