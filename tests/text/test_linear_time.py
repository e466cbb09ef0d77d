"""Reading takes a time that is linear in the length, however hostile the text.

The syntax tree of the package says where its regular expressions are. Hostile strings
are made of what an expression itself names: its literals, and a character of each of
its classes. Those that take long are made longer, again and again.
"""

import ast
import importlib
import itertools
import re
import signal
import time
from contextlib import contextmanager
from functools import partial

import pytest

from minitransformer.runs.run_directory import NAMES
from minitransformer.system.files import unfinished
from minitransformer.text.clean import clean
from minitransformer.text.glossary import Glossary
from minitransformer.text.sentences import CONTEXT, Sentence, halved
from minitransformer.translation.quality import choose_tokenizer
from support.scripts import ROOT

try:
    from re import _parser as parser  # from Python 3.11 on
except ImportError:
    import sre_parse as parser

FUNCTIONS = "compile search match fullmatch split findall finditer sub subn".split()

# The values of expressions that only exist while a function runs.
LOCAL = {
    "text/glossary.py": [(Glossary({"a b": "c", "a": "b"})._pattern.pattern, 0)],
    "system/files.py": [(unfinished(NAMES), 0), (unfinished("a"), 0)],
}

# The library regex knows other expressions: whole functions that use it are tried.
OF_REGEX = {
    "text/clean.py": clean,
    "text/sentences.py": lambda text: halved(
        Sentence("", text), lambda x: len(x) < 999
    ),
    "translation/quality.py": lambda text: choose_tokenizer([text]),
}

# These see the characters before or after one place alone, and at most so many.
SHORT = {"LAST": CONTEXT, "ITEM": CONTEXT, "ENDS_WIDE": CONTEXT}

# These are not linear. The list only shrinks: take out what is mended.
ALLOWED = set()

SHORTEST = 1000
SLOW = 2e-4  # seconds for so many characters: then there are four times as many
SLOW_IF_SHORT = 5e-3
LIMIT = 1.0
PLAIN = [*"a1 .-_'<\n!"]
AROUND = ("", ""), ("a", "\0")


def modules():
    """Yield the name within the package, the module and the tree of each file."""
    for path in sorted((ROOT / "minitransformer").rglob("*.py")):
        if "cuda" not in path.parts and path.name != "__main__.py":
            place = path.relative_to(ROOT).with_suffix("")
            module = importlib.import_module(".".join(place.parts))
            tree = ast.parse(path.read_text(encoding="utf-8"))
            yield str(path.relative_to(ROOT / "minitransformer")), module, tree
    for name in ("train", "translate"):
        module = importlib.import_module(name)
        yield name, module, ast.parse((ROOT / f"{name}.py").read_text(encoding="utf-8"))


def is_of(node, module):
    """Whether a node is a call of a function of a module."""
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == module
    )


def patterns():
    """Yield the place of each pattern, the pattern, and the methods that use it."""
    files = list(modules())
    calls = {}  # of the methods of each name of a pattern
    for _, _, tree in files:
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr in FUNCTIONS:
                name = ast.unparse(node.value).rpartition(".")[2]
                calls.setdefault(name, set()).add(node.attr)
    for file, module, tree in files:
        names = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                names[node.value] = node.targets[0].id
        for node in ast.walk(tree):
            if is_of(node, "regex"):
                assert file in OF_REGEX
            if not (is_of(node, "re") and node.func.attr in FUNCTIONS):
                continue
            name = names.get(node, "")
            used = {node.func.attr}
            if node.func.attr == "compile":
                used = calls.get(name, {"findall", "split"})
            flags = [x for x in ast.walk(node) if ast.unparse(x).startswith("re.")]
            flags = [
                x for x in map(ast.unparse, flags) if re.fullmatch(r"re\.[A-Z]+", x)
            ]
            try:
                text = eval(ast.unparse(node.args[0]), vars(module))
                each = [(text, eval("|".join({*flags, "0"})))]
            except NameError:
                each = LOCAL[file]
            for text, flag in each:
                yield file, name, re.compile(text, flag), used


def atoms(pattern):
    """Return what a hostile string is made of: literals, and a character of a class."""
    literals = set()

    def walk(parsed):
        word = ""
        for code, value in parsed:
            kind = str(code)
            if kind == "LITERAL":
                word += chr(value)
                continue
            literals.add(word)
            word = ""
            if kind == "IN":
                walk([x for x in value if str(x[0]) == "LITERAL"][:1])
                ranges = [x[1][0] for x in value if str(x[0]) == "RANGE"]
                literals.update(map(chr, ranges[:1]))
            for part in value if isinstance(value, tuple | list) else ():
                inner = part if isinstance(part, list) else [part]
                for one in inner:
                    if isinstance(one, parser.SubPattern):
                        walk(one)
        literals.add(word)

    walk(parser.parse(pattern.pattern, pattern.flags))
    single = sorted({x for word in literals for x in (word, word[:1])} - {""}, key=len)
    return list(dict.fromkeys([*PLAIN, *single[:8], *single[-6:]]))


@contextmanager
def at_most(seconds):
    def late(number, frame):
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def use(pattern, method, text):
    if method in ("sub", "subn"):
        getattr(pattern, method)("", text)
    elif method == "finditer":
        for _ in pattern.finditer(text):
            pass
    else:
        getattr(pattern, method)(text)


def seconds(apply, parts, length):
    """Return how long a text of this length takes, with the middle part repeated."""
    opening, pump, end = parts
    text = opening + pump * (length // len(pump)) + end
    start = time.process_time()
    with at_most(LIMIT):
        apply(text)
    return time.process_time() - start


def hostile_text(apply, parts, longest=4 * SHORTEST, slow=SLOW):
    """Return the parts of a string for which the time is not linear, or None."""
    pumps = [*parts, *map("".join, itertools.product(parts, repeat=2))]
    for (opening, end), pump in itertools.product(AROUND, pumps):
        text = opening, pump, end
        taken = partial(seconds, apply, text)
        try:
            if longest < SHORTEST:
                if taken(longest) > SLOW_IF_SHORT:
                    return text
            # 16 times if the time is quadratic. A busy machine may err once.
            elif taken(SHORTEST) > slow and all(
                taken(4 * SHORTEST) > 9 * taken(SHORTEST) for _ in range(5)
            ):
                return text
        except TimeoutError:
            return text
    return None


def test_every_pattern_takes_linear_time():
    slow = {}
    count = 0
    for file, name, pattern, methods in patterns():
        for method in methods - {"compile"}:
            count += 1
            longest = SHORT.get(name, 4 * SHORTEST)
            work = partial(use, pattern, method)
            if text := hostile_text(work, atoms(pattern), longest):
                slow.setdefault(file, []).append((name, method, text))
    assert count > 40
    assert slow.keys() == ALLOWED, slow


@pytest.mark.parametrize("place", OF_REGEX)
def test_what_uses_the_library_regex_takes_linear_time(place):
    parts = [*"a1 .-'<\n)»\u0301\u2026\u3002"]
    assert hostile_text(OF_REGEX[place], parts, slow=25 * SLOW) is None


@pytest.mark.parametrize(
    ("pattern", "is_linear"),
    [
        (r"(a+)+$", False),
        (r"\s+$", False),
        (r"<b[^>]*>", False),
        (r"(?:\w+\d?)*!", False),
        (r"\w+", True),
        (r"(?<!\s)\s+x", True),
    ],
)
def test_what_is_not_linear_is_noticed(pattern, is_linear):
    pattern = re.compile(pattern)
    text = hostile_text(pattern.search, atoms(pattern))
    assert (text is None) == is_linear
