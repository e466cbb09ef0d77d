"""Write the pages of the site as plain Markdown into build/pages.

    python docs/build.py && mkdocs build --strict

The site's builder needs no plugin for what is done here, so that another one can take
its place:

- README.md, CONTRIBUTING.md, CHANGELOG.md and the cards of the bundled models become
  pages, and links to source files lead to their entries in the reference.
- A line `::: minitransformer.engine.ops` becomes that module's docstrings, signatures
  and source, and `::: train.py` becomes the script.
- Equations become MathML, which browsers show without a script.

It fails if a module is missing from docs/source.md or from the reference.
"""

from __future__ import annotations

import ast
import inspect
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
DOCS, PACKAGE = ROOT / "docs", ROOT / "minitransformer"
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "minitransformer/models/en-de/README.md": "en-de.md",
    "minitransformer/models/de-en/README.md": "de-en.md",
}
SCRIPTS = "reference/scripts.md"
LABELS = "Shapes|Units|Raises|Returns|Yields|Differs|Elsewhere|Source|Example"
MARK = re.compile(r"^::: (\S+)$", re.MULTILINE)
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class Entry(NamedTuple):
    """A module, class or function of the reference, and the level of its heading."""

    name: str
    level: int
    text: str


def module_name(file: Path) -> str:
    return ".".join(file.with_suffix("").parts)


# The reference


def entries(module: str) -> Iterator[Entry]:
    """Yield the entries of a module, the module itself first."""
    file = Path(*module.split(".")).with_suffix(".py")
    source = (ROOT / file).read_text(encoding="utf-8")
    tree = ast.parse(source)
    yield Entry(module, 2, docstring(tree))
    yield from members(tree.body, module, 3, source.splitlines(keepends=True))


def members(
    body: list[ast.stmt], prefix: str, level: int, lines: list[str]
) -> Iterator[Entry]:
    for node in body:
        if isinstance(node, Definition) and not node.name.startswith("_"):
            name = f"{prefix}.{node.name}"
            signatures, whole = signature(node, lines), source_of(node, lines)
            folded = (
                '<details markdown="1"><summary>Source</summary>\n\n'
                f"~~~~python\n{whole}~~~~\n\n</details>"
            )
            parts = [f"~~~~python\n{signatures}~~~~", docstring(node), folded]
            yield Entry(name, level, "\n\n".join(part for part in parts if part))
            if isinstance(node, ast.ClassDef):
                yield from members(node.body, name, level + 1, lines)


def signature(node: Definition, lines: list[str]) -> str:
    """Return the head of a function, or that of a class with its constructor's."""
    head = "".join(lines[node.lineno - 1 : node.body[0].lineno - 1])
    if node.body[0].lineno == node.lineno:
        head = lines[node.lineno - 1]
    found = textwrap.dedent(head)
    if isinstance(node, ast.ClassDef):
        found = re.split(r"^(?=\s*(?:#|@))", found, flags=re.MULTILINE)[0]
        for x in node.body:
            if isinstance(x, ast.FunctionDef) and x.name == "__init__":
                found += textwrap.indent(signature(x, lines), "    ")
    return found


def source_of(node: Definition, lines: list[str]) -> str:
    first = min([node.lineno, *(x.lineno for x in node.decorator_list)])
    return textwrap.dedent("".join(lines[first - 1 : node.end_lineno]))


def docstring(node: ast.Module | Definition) -> str:
    """Return a docstring with bold labels, and with its indented examples as code."""
    text = inspect.cleandoc(ast.get_docstring(node) or "")
    text = re.sub(rf"(^|\n\n|\.\s)({LABELS}):", r"\1**\2:**", text)

    def code(match: re.Match[str]) -> str:
        lines = textwrap.dedent(match[1])
        language = "sh" if re.match(r"python |pip |bash ", lines) else "python"
        return f"```{language}\n{lines.strip()}\n```\n"

    return re.sub(r"(?<=\n\n)((?: {4}.*\n|\n(?= {4}))+)", code, f"{text}\n").strip()


def written(entry: Entry) -> str:
    short = entry.name if entry.level == 2 else entry.name.rpartition(".")[2]
    return f"{'#' * entry.level} {short} {{#{entry.name}}}\n\n{entry.text}"


# Links and equations


def outside_code(markdown: str, change: Callable[[str], str]) -> str:
    """Apply a change to everything but fenced and indented code."""
    fence = r"^(?P<fence>`{3,}|~{3,}).*?^(?P=fence)[`~]*$\n?"
    indented = r"(?<=\n\n)(?:(?: {4}|\t)[^\n]*\n|\n(?= {4}|\t))+"
    parts, end = [], 0
    for match in re.finditer(f"(?:{fence})|(?:{indented})", markdown, re.M | re.S):
        parts += [change(markdown[end : match.start()]), match[0]]
        end = match.end()
    return "".join([*parts, change(markdown[end:])])


def mathml(latex: str, display: str = "inline") -> str:
    """Return an equation whose characters mean nothing in Markdown."""
    from latex2mathml.converter import convert

    return re.sub(
        r"(?<=>)[^<>]+(?=<)",
        lambda match: re.sub(r"[*_|\[\]`\\]", lambda c: f"&#{ord(c[0])};", match[0]),
        convert(latex.strip(), display=display),
    )


def with_equations(text: str) -> str:
    def equation(match: re.Match[str]) -> str:
        if match["block"]:
            return f"<div>{mathml(match['block'], 'block')}</div>"
        if match["inline"]:
            made = mathml(match["inline"]) + match["end"]
            return f'<span class="unbroken">{made}</span>'
        return match[0]

    code = r"(?P<ticks>`+).+?(?P=ticks)"
    block, inline = r"\$\$(?P<block>.+?)\$\$", r"\$(?!\s)(?P<inline>[^$]+?)(?<!\s)\$"
    pattern = rf"{code}|{block}|{inline}(?P<end>[.,:;)]*)"
    return re.sub(pattern, equation, text, flags=re.S)


def with_links(text: str, page: str, places: dict[str, str]) -> str:
    """Turn links to files of the repository, and names of code, into links of the site.

    `places` has the page and the anchor of each entry of the reference.
    """
    up = "../" * page.count("/")

    def link(match: re.Match[str]) -> str:
        words, target = match.groups()
        file = Path(target)
        if target in PAGES:
            return f"[{words}]({up}{PAGES[target]})"
        if target in ("train.py", "translate.py"):
            return f"[{words}]({up}{SCRIPTS}#{file.stem}py)"
        if (name := module_name(file)) in places and file.suffix == ".py":
            return f"[{words}]({up}{places[name]})"
        if (ROOT / file).exists():  # a test or a benchmark: not on the site
            return words
        return match[0]

    def reference(match: re.Match[str]) -> str:
        name = match[1].removeprefix("minitransformer.")
        place = places.get(f"minitransformer.{name}")
        return f"[{match[0]}]({up}{place})" if place else match[0]

    outside = "*" if page in PAGES.values() else "+"
    target = rf"(?:\.\./){outside}((?:[\w.-]+/)*[\w.-]+)"
    text = re.sub(rf"\[([^][]+)\]\({target}\)", link, text)
    text = re.sub(r"(?<!\[)`([\w.]+\.\w+)`", reference, text)
    text = re.sub(r"`(test_\w+::)(test_\w+)`", r"`\1`<wbr>`\2`", text)
    return re.sub(r"(`--[\w-]+(?: [\w-]+)?`)(?!\])", r"\1{.unbroken}", text)


# The pages


def read_pages() -> dict[str, str]:
    """Return the text of every page by its name on the site."""
    pages = {}
    for path in sorted(DOCS.rglob("*.md")):
        name = path.relative_to(DOCS).as_posix()
        pages[name] = path.read_text(encoding="utf-8")
    for file, name in PAGES.items():
        text = (ROOT / file).read_text(encoding="utf-8")
        pages[name] = re.sub(r"\]\((\.\./)*docs/", "](", text)
    pages["index.md"] = f"---\nhide: [navigation]\n---\n\n{pages['index.md']}"
    return pages


def left_out(pages: dict[str, str]) -> list[str]:
    """Return a line for each module on no page, and for each one that is not there."""
    listed = {name for text in pages.values() for name in MARK.findall(text)}
    modules = sorted(name for name in listed if not name.endswith(".py"))
    lines = [
        f"docs/reference: {name} is not there"
        for name in modules
        if not (ROOT / f"{name.replace('.', '/')}.py").exists()
    ]
    for path in sorted(PACKAGE.rglob("*.py")):
        file = path.relative_to(ROOT)
        if path.name in ("__init__.py", "__main__.py"):
            continue
        if f"](../{file.as_posix()})" not in pages["source.md"]:
            lines.append(f"docs/source.md: expected a link to {file}")
        if module_name(file) not in listed:
            lines.append(f"docs/reference: expected ::: {module_name(file)}")
    return lines


def build(folder: Path) -> None:
    """Write all pages and their pictures into a new folder."""
    pages = read_pages()
    if lines := left_out(pages):
        raise ValueError("\n".join(lines))
    found = {
        name: list(entries(name))
        for text in pages.values()
        for name in MARK.findall(text)
        if not name.endswith(".py")
    }
    places = {
        entry.name: f"{page}#{entry.name}"
        for page, text in pages.items()
        for module in MARK.findall(text)
        for entry in found.get(module, ())
    }

    def expanded(match: re.Match[str]) -> str:
        if match[1].endswith(".py"):
            script = (ROOT / match[1]).read_text(encoding="utf-8")
            return f"~~~~python\n{script}~~~~"
        return "\n\n".join(map(written, found[match[1]]))

    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(DOCS, folder, ignore=shutil.ignore_patterns("*.md", "*.py", "__*"))
    for page, text in pages.items():
        text = outside_code(text, with_equations)
        text = MARK.sub(expanded, text)
        links = partial(with_links, page=page, places=places)
        text = outside_code(text, links)
        path = folder / page
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    try:
        build(ROOT / "build/pages")
    except ValueError as error:
        sys.exit(str(error))
