"""The site fits a phone, and its builder needs nothing but plain Markdown."""

import importlib.util
import re
import sys
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

from support.browser import needs_browser, open_tab
from support.scripts import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SITE = ROOT / "build/site"


def load_builder():
    spec = importlib.util.spec_from_file_location("build", ROOT / "docs/build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_module_is_in_the_house_and_in_the_reference():
    builder = load_builder()
    assert builder.left_out(builder.read_pages()) == []


def test_an_entry_has_signature_labels_and_examples_as_code(monkeypatch, tmp_path):
    builder = load_builder()
    monkeypatch.setattr(builder, "ROOT", tmp_path)
    (tmp_path / "m.py").write_text(
        '"""A module, for example:\n\n    x = f(1)\n\nRaises: nothing."""\n\n\n'
        'def f(\n    x: int,\n) -> int:\n    """Return x."""\n    return x\n\n\n'
        "def _hidden():\n    pass\n"
    )
    module, function = builder.entries("m")
    code = "```python\nx = f(1)\n```"
    assert module.text == f"A module, for example:\n\n{code}\n\n**Raises:** nothing."
    assert (function.name, function.level) == ("m.f", 3)
    assert function.text.startswith("~~~~python\ndef f(\n    x: int,\n) -> int:\n~~~~")


def test_links_and_equations_change_outside_code_alone():
    builder = load_builder()
    pytest.importorskip("latex2mathml")
    page = "$x_1$ and `$y$`\n\n    $z$\n\n```sh\n$train\n```\n`engine.ops.linear`\n"
    made = builder.outside_code(page, builder.with_equations)
    assert made.count("<math") == 1
    assert "`$y$`\n\n    $z$\n\n```sh\n$train\n```\n" in made
    places = {"minitransformer.engine.ops.linear": "reference/engine.md#linear"}
    linked = builder.with_links(page, "a/b.md", places)
    assert "[`engine.ops.linear`](../reference/engine.md#linear)" in linked


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


@contextmanager
def served(folder):
    """Serve a folder on this machine, and yield its address."""
    handler = partial(Quiet, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


needs_site = pytest.mark.skipif(
    not SITE.is_dir(), reason="needs the site: python docs/build.py && mkdocs build"
)


# What people ask for, and the part of the page that answers it.
ASKED = {
    "TMX": "train-on-tmx",
    "CSV": "train-on-tmx-csv",
    "both directions": "serve-both-directions",
    "swap": "serve-both-directions",
    "browser extension": "browser-extension",
    "subtitles": "translate-subtitles",
    "use a GPU": "use-a-gpu",
    "property tests": "property-tests",
    "cite": "cite-it",
}


@needs_browser
@needs_site
def test_the_search_of_the_site_finds_what_people_ask_for():
    missing = {}
    with served(SITE) as address, open_tab() as tab:
        for words, answer in ASKED.items():
            tab.goto(f"{address}/index.html")
            tab.click("input.md-search__input")
            tab.keyboard.type(words)
            tab.wait_for_selector(".md-search-result__link")
            links = tab.eval_on_selector_all(
                ".md-search-result__link", "links => links.map(x => x.href)"
            )
            if not any("how-do-i.html" in x and answer in x for x in links):
                missing[words] = links
    assert missing == {}


@needs_browser
@needs_site
def test_no_page_scrolls_sideways_on_a_phone():
    pages = [path.relative_to(SITE).as_posix() for path in SITE.rglob("*.html")]
    assert len(pages) > 30
    phone = {"width": 390, "height": 844}
    widths = {}
    with served(SITE) as address, open_tab(viewport=phone) as tab:
        for page in pages:
            tab.goto(f"{address}/{page}", wait_until="domcontentloaded")
            widths[page] = tab.evaluate("document.scrollingElement.scrollWidth")
    assert {page: width for page, width in widths.items() if width > 390} == {}


def test_the_links_of_the_readme_lead_to_files_of_the_repository():
    """On the package index they have to be absolute."""
    with open(ROOT / "pyproject.toml", "rb") as file:
        hooks = tomllib.load(file)["tool"]["hatch"]["metadata"]["hooks"]
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    links = len(re.findall(r"\]\(", text)) - text.count("#gh-dark-mode-only")
    for change in hooks["fancy-pypi-readme"]["substitutions"]:
        text = re.sub(change["pattern"], change["replacement"], text)
    found = re.findall(r"(!?)\[[^\]]*\]\(([^)]+)\)", text)
    assert len(found) == links
    places = "raw.githubusercontent.com/minitransformer/minitransformer/main"
    for picture, link in found:
        place = (
            places
            if picture
            else "github.com/minitransformer/minitransformer/blob/main"
        )
        path = link.removeprefix(f"https://{place}/").partition("#")[0]
        assert (ROOT / path).exists(), link
