"""What mkdocs.yml needs beyond its plugins, called by MkDocs while it builds the site.

- README.md, CONTRIBUTING.md, CHANGELOG.md and the card of the model that comes with the
  package become pages of the site.
- Links from a page to a source file lead to that file's entry in the reference.
- Equations are converted to MathML, so that browsers need no script for them.
- The labels of docstrings, such as "Raises", are bold.
- The build fails if a module is missing from docs/source.md or from the reference.
"""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "minitransformer"
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "minitransformer/models/en-de/README.md": "en-de.md",
}


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that lie outside docs/, and check that no module is left out."""
    for name, page in PAGES.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        text = re.sub(r"\]\((\.\./)*docs/", "](", text)
        if page == "index.md":
            text = f"---\nhide: [navigation]\n---\n\n{text}"
        files.append(File.generated(config, page, content=text))
    house = (ROOT / "docs/source.md").read_text(encoding="utf-8")
    reference = "\n".join(
        page.read_text(encoding="utf-8") for page in ROOT.glob("docs/reference/*.md")
    )
    for path in sorted(PACKAGE.glob("**/*.py")):
        file = path.relative_to(ROOT)
        if path.name in ("__init__.py", "__main__.py"):
            continue
        if f"](../{file})" not in house:
            raise PluginError(f"docs/source.md: expected a link to {file}")
        if not re.search(rf"^::: {_module(file)}$", reference, re.MULTILINE):
            raise PluginError(f"docs/reference: expected ::: {_module(file)}")
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn links to files of the repository into links to pages of the site."""
    up = "../" * page.file.src_uri.count("/")

    def link(match: re.Match[str]) -> str:
        text, target = match.groups()
        file = Path(target)
        if target in PAGES:
            return f"[{text}]({up}{PAGES[target]})"
        if target in ("train.py", "translate.py"):
            return f"[{text}]({up}reference/scripts.md#{file.stem}py)"
        if file.suffix == ".py" and file.parts[0] == "minitransformer":
            return f"[{text}][{_module(file)}]"
        if (ROOT / file).exists():  # a test or a benchmark: not on the site
            return text
        return match.group()

    pattern = r"\[([^][]+)\]\((?:\.\./)*((?:[\w.-]+/)*[\w.-]+)\)"
    if page.file.src_uri not in PAGES.values():
        pattern = pattern.replace(r"(?:\.\./)*", r"(?:\.\./)+")
    markdown = re.sub(pattern, link, markdown)
    rooms = "|".join(path.parent.name for path in PACKAGE.glob("*/__init__.py"))
    names = rf"(?<!\[)`((?:{rooms})(?:\.\w+)+(?<![A-Z\d]))`"  # constants: no entry
    return re.sub(names, r"[`\1`][minitransformer.\1]", markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Convert equations to MathML, and set off names that a line may not break."""
    html = re.sub(
        r'<span class="arithmatex">\\\((.+?)\\\)</span>([.,:;)]*)',
        lambda match: (
            f'<span class="unbroken">{convert(unescape(match[1]))}{match[2]}</span>'
        ),
        html,
        flags=re.DOTALL,
    )
    html = re.sub(
        r'<div class="arithmatex">\s*\\\[(.+?)\\\]\s*</div>',
        lambda match: convert(unescape(match[1]), display="block"),
        html,
        flags=re.DOTALL,
    )
    html = re.sub(r"<code>(--[^<]*)</code>", r'<code class="unbroken">\1</code>', html)
    html = re.sub(r"(<code>\w+::)(?=test_)", r"\1<wbr>", html)
    labels = "Shapes|Units|Raises|Returns|Yields|Differs|Elsewhere|Source|Example"
    return re.sub(rf"(<p>|\.\s)({labels}):", r"\1<b>\2:</b>", html)


def _module(file: Path) -> str:
    return ".".join(file.with_suffix("").parts)
