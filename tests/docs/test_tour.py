"""Every snippet of the tour runs, on a model trained by its own command."""

import json
import os
import re
import runpy
import subprocess
import sys

import pytest

from minitransformer.settings.presets import find_preset
from support.scripts import ROOT, TRAIN


@pytest.mark.slow
def test_the_tour_runs(tmp_path, monkeypatch):
    tour = (ROOT / "docs" / "tour.md").read_text(encoding="utf-8")
    [command] = re.findall(r"^```sh\npython train.py (.*)\n```$", tour, re.MULTILINE)
    done = subprocess.run(
        [*TRAIN, *command.split(), "--steps", "120"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    monkeypatch.chdir(tmp_path)
    snippets = re.findall(r"^```python\n(.*?)^```$", tour, re.MULTILINE | re.DOTALL)
    assert len(snippets) > 8
    names: dict[str, object] = {}
    for snippet in snippets:
        exec(compile(snippet, "docs/tour.md", "exec"), names)


def test_the_examples_for_contributors_run(tmp_path):
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    snippets = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    code = tmp_path / "code.py"
    code.write_text("\n".join(snippets))
    subprocess.run([sys.executable, str(code)], check=True)
    [preset] = re.findall(r"^```json\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    (tmp_path / "mine.json").write_text(preset)
    name, values = find_preset(str(tmp_path / "mine.json"))
    assert (name, values["d_model"], values["vocab_size"]) == ("mine", 192, 10_000)


def test_links_lead_to_files():
    for page in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")):
        text = page.read_text(encoding="utf-8")
        for target in re.findall(r"\]\(([^)#]+)\)", text):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_notebook_is_the_tour():
    made = runpy.run_path(str(ROOT / "docs" / "notebook.py"))["written"]
    page = (ROOT / "docs" / "tour.md").read_text(encoding="utf-8")
    book = json.loads(made())
    sources = ["".join(cell["source"]) for cell in book["cells"]]
    snippets = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert len(snippets) > 8
    for snippet in snippets:
        assert snippet.strip() in sources
    # What was run last is not shown: it would grow old.
    assert not any(cell.get("outputs") for cell in book["cells"])
