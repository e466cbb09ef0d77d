"""Optional libraries, which the extras of the package install."""

from __future__ import annotations

import importlib
from typing import Any


def import_extra(module: str, extra: str, need: str) -> Any:
    """Import a module that `pip install 'minitransformer[extra]'` installs.

    Raises: RuntimeError with `need` and that command if it cannot be imported.
    """
    try:
        return importlib.import_module(module)
    except (ImportError, RuntimeError) as error:
        install = f"pip install 'minitransformer[{extra}]'"
        raise RuntimeError(f"{need}: {install} ({error})") from error
