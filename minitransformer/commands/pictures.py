"""Pictures that matplotlib has drawn, written to files."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from minitransformer.system.files import write_bytes

# On dark pages, browsers draw white on black, not black on white, in the same hues.
DARK = b"@media (prefers-color-scheme: dark) "
DARK += b"{svg {filter: invert(0.9) hue-rotate(180deg)}}"


def write_picture(figure: Any, path: Path, dpi: int) -> None:
    """Write a figure as PNG or SVG, by the end of the file's name.

    An SVG shown by a browser is dark where pages are. Units: dpi dots an inch
    """
    drawn = io.BytesIO()
    undated = {"Date": None} if path.suffix == ".svg" else None
    figure.savefig(drawn, dpi=dpi, format=path.suffix[1:], metadata=undated)
    data = drawn.getvalue()
    if path.suffix == ".svg":
        data = data.replace(b"</style>", DARK + b"</style>", 1)
    write_bytes(path, data)
