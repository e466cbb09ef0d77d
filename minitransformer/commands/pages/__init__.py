"""The pages that a browser shows: HTML, scripts and a style sheet."""

from __future__ import annotations

from importlib import resources


def page(name: str, **values: str | float) -> str:
    """Return a page of this folder as one document that loads nothing else.

    Comments such as /*style.css*/ become the file that they name, those such as
    /*DATA*/ the value of that name.
    """
    folder = resources.files(__name__)
    text = (folder / name).read_text("utf-8")
    for part in ("style.css", "attention.js", "translate.js"):
        text = text.replace(f"/*{part}*/", (folder / part).read_text("utf-8"))
    for key, value in values.items():
        text = text.replace(f"/*{key}*/", str(value))
    return text
