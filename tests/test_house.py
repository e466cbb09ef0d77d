"""Which room of the package imports which, and that tests stand as the package does.

A room is a folder of the package, or a file beside the folders. An import counts
wherever it stands: at the top, inside a function, for types alone, or by a module's
name in a string.
"""

import ast
import functools
import re
import shutil
from graphlib import CycleError, TopologicalSorter

import pytest

from support.in_process import rows
from support.scripts import ROOT

PACKAGE, TESTS = ROOT / "minitransformer", ROOT / "tests"
BELOW_RUNS = {"engine", "settings", "system", "text", "model"}
CORE = {*BELOW_RUNS, "runs", "training", "translation"}
EVERYTHING = {*CORE, "backends", "cli"}
MAY_IMPORT = {
    "engine": set(),
    "settings": set(),
    "system": set(),
    "model": {"engine", "settings"},
    "text": {"settings", "system"},
    "runs": BELOW_RUNS,
    "training": {*BELOW_RUNS, "runs"},
    "translation": {*BELOW_RUNS, "runs"},
    "backends": CORE,
    "cli": {"settings"},
    "commands": {*EVERYTHING, "api"},
    "api": EVERYTHING,
    "__init__": {*EVERYTHING, "api"},
    "__main__": {"cli", "settings", "__init__", "commands"},
}


def module_names(tree, files):
    """Yield the modules of the package that a file imports or names in a string."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = "minitransformer." * (node.level > 0)
            yield from (f"{package}{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from re.findall(
                r"^minitransformer$|\bminitransformer(?:\.\w+)+", node.value
            )
            if "." in node.value and node.value.lstrip(".") in files:
                yield f"minitransformer.{node.value.lstrip('.')}"


@functools.cache
def import_graph(package):
    """Return the files, such as `engine.ops`, that each file of the package imports."""
    files = {
        ".".join(path.relative_to(package).with_suffix("").parts): path
        for path in package.rglob("*.py")
    }

    def file_of(module):
        parts = module.split(".")[1:]
        while parts and ".".join(parts) not in files:
            if ".".join((*parts, "__init__")) in files:
                return ".".join((*parts, "__init__"))
            parts.pop()
        return ".".join(parts) or "__init__"

    graph = {}
    for name, path in files.items():
        modules = module_names(ast.parse(path.read_text(encoding="utf-8")), files)
        named = {file_of(m) for m in modules if m.split(".")[0] == "minitransformer"}
        graph[name] = named - {name}
    return graph


def room_of(name):
    return name.split(".")[0]


def violations(package):
    """Return a line for each import that the table forbids, and for each circle."""
    graph, rooms, found = import_graph(package), {}, []
    for name, others in graph.items():
        room = room_of(name)
        outside = {other for other in others if room_of(other) != room}
        rooms.setdefault(room, set()).update(map(room_of, outside))
        found += [
            f"{name} imports {other}"
            for other in outside
            if room_of(other) not in MAY_IMPORT[room]
        ]
    for kind, edges in (("files", graph), ("rooms", rooms)):
        try:
            TopologicalSorter(edges).prepare()
        except CycleError as error:
            found.append(f"a circle of {kind}: {' -> '.join(error.args[1])}")
    return found


def test_every_room_imports_only_from_those_above_it():
    assert violations(PACKAGE) == []


def test_every_room_is_in_the_table():
    assert {room_of(name) for name in import_graph(PACKAGE)} == MAY_IMPORT.keys()


ROOMS = """
engine/ops.py | import minitransformer.backends.cuda.ops | engine.ops imports backends.cuda.ops
text/grammar/words.py | if X: import minitransformer.engine.ops | text.grammar.words imports engine.ops
translation/beam_search.py | f('minitransformer.training') | translation.beam_search imports training.__init__
engine/backend.py | HOME = 'backends.cuda.ops' | engine.backend imports backends.cuda.ops
cli.py | NAME = 'minitransformer' | cli imports __init__
"""  # noqa: E501
CIRCLE = """
engine/backend.py | import minitransformer.engine.ops | a circle of files:
"""


@pytest.mark.parametrize("planted", [ROOMS, CIRCLE])
def test_planted_violations_are_named(tmp_path, planted):
    package = tmp_path / "minitransformer"
    ignore = shutil.ignore_patterns("__pycache__", "models")
    shutil.copytree(PACKAGE, package, ignore=ignore)
    for file, line, _ in rows(planted):
        with open(package / file, "a", encoding="utf-8") as code:
            code.write(f"\n{line}\n")
    found = "\n".join(violations(package))
    for *_, message in rows(planted):
        assert message in found


def test_no_test_imports_another():
    for path in TESTS.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        imports = re.findall(
            r"\b(?:from|import) +((?:tests\.|test_|conftest)\S*)", text
        )
        assert imports == [], path


def test_tests_mirror_the_rooms():
    """A test is in the folder of a room that it imports, or beside, for a script."""
    rooms = {path.name for path in PACKAGE.iterdir() if any(path.rglob("*.py"))}
    others = {"benchmarks", "docs", "examples", "properties", "stress", "support"}
    folders = {path.relative_to(TESTS).parts[0] for path in TESTS.glob("*/**/*.py")}
    assert folders == rooms | others
    for room in rooms:
        for path in (TESTS / room).rglob("test_*.py"):
            text = path.read_text(encoding="utf-8")
            assert re.search(rf"minitransformer(\.| import ){room}", text), path
    beside = {f"test_{path.stem.strip('_')}" for path in PACKAGE.glob("*.py")}
    beside |= {"test_train", "test_translate", "test_house", "test_golden"}
    beside |= {"test_style"}
    for path in TESTS.glob("test_*.py"):
        assert any(path.stem.startswith(name) for name in beside), path
