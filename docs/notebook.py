"""Write the tour as a notebook, docs/tour.ipynb, or run that notebook.

    python docs/notebook.py
    python docs/notebook.py --run    # in a new folder; needs nbclient and ipykernel

The repository keeps the page alone, from which the notebook is made.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE, NOTEBOOK = ROOT / "docs" / "tour.md", ROOT / "docs" / "tour.ipynb"
# Jupyter begins in docs/, the command in the source tree.
TRAIN = """\
import os
import sys

if not os.path.exists("train.py"):
    os.chdir("..")
!{{sys.executable}} {command}"""


def cells(page: str) -> list[tuple[str, str]]:
    """Divide a page into cells, each with its kind; the page's outputs are left out."""
    divided: list[tuple[str, str]] = []
    parts = re.split(r"^```(\w+)\n(.*?)^```$\n?", page, flags=re.MULTILINE | re.DOTALL)
    for i in range(0, len(parts), 3):
        if text := parts[i].strip("\n"):
            divided.append(("markdown", text))
        if i + 1 < len(parts) and parts[i + 1] == "python":
            divided.append(("code", parts[i + 2].strip("\n")))
        elif i + 1 < len(parts) and parts[i + 1] == "sh":
            command = parts[i + 2].strip().removeprefix("python ")
            divided.append(("code", TRAIN.format(command=command)))
    return divided


def notebook(page: str) -> dict[str, Any]:
    """Return a page as a notebook of the format 4.5."""
    made = []
    for number, (kind, text) in enumerate(cells(page)):
        cell = {"cell_type": kind, "id": f"cell-{number}", "metadata": {}}
        cell["source"] = text.splitlines(keepends=True)
        if kind == "code":
            cell |= {"execution_count": None, "outputs": []}
        made.append(cell)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return {"cells": made, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def written() -> str:
    """Return the tour as the text of a notebook."""
    return json.dumps(notebook(PAGE.read_text(encoding="utf-8")), indent=1) + "\n"


def run(few_steps: str = "--steps 120 --validate-every 120 --average 1") -> None:
    """Run the notebook, with a shorter training. Raises: an error of nbclient."""
    import nbclient
    import nbformat

    text = written().replace("--steps 1000", few_steps)
    os.environ["PYTHONPATH"] = str(ROOT)
    with tempfile.TemporaryDirectory() as folder:
        for name in ("train.py", "cache"):  # the text that a training has encoded
            if (ROOT / name).exists():
                (Path(folder) / name).symlink_to(ROOT / name)
        book = nbformat.reads(text, as_version=4)
        client = nbclient.NotebookClient(
            book, timeout=300, resources={"metadata": {"path": folder}}
        )
        client.execute()
    ran = [cell for cell in book.cells if cell.cell_type == "code"]
    print(f"{NOTEBOOK.name}: {len(ran)} cells ran")


if __name__ == "__main__":
    if "--run" in sys.argv:
        run()
    else:
        NOTEBOOK.write_bytes(written().encode())
