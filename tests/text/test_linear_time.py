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
from minitransformer.text.markup import html_lines
from minitransformer.text.sentences import (
    CONTEXT,
    Sentence,
    halved,
    split_sentences,
)
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


def in_halves(text):
    return halved(Sentence("", text), lambda part: len(part) < 999)


# The library regex knows other expressions: whole functions that use it are tried.
OF_REGEX = {
    "text/clean.py": clean,
    "text/sentences.py": in_halves,
    "translation/quality.py": lambda text: choose_tokenizer([text]),
}

TAGS = ["</script ", "<p> ", " ", "\n ", "\r"]

# What is long if it is repeated, for functions whose loops have to be linear.
REPEATED = {
    html_lines: [*"< <p <p> <!-- <script <script> <style> </style &a".split(), *TAGS],
    split_sentences: [". ", "z. B. ", "。", ".'", "[1]", " ", "( ", "a", " »", "I... "],
    in_halves: [". ", "。", " ", "( ", "a", " »"],
}

# These see the characters before or after one place alone, and at most so many.
SHORT = {"LAST": CONTEXT, "ITEM": CONTEXT, "ENDS_WIDE": CONTEXT}

# These are not linear. The list only shrinks: take out what is mended.
ALLOWED = set()

SHORTEST = 500
SLOW = 3e-5  # seconds for so many characters: then there are four times as many
SLOW_IF_SHORT = 5e-3
LIMIT = 1.0
PLAIN = [*"a1 .-_'<\n!"]
AROUND = ("", ""), ("a", "\0")


def modules():
    """Yield the name within the package, the module and the tree of each file."""
    package = sorted((ROOT / "minitransformer").rglob("*.py"))
    for path in (*package, ROOT / "train.py", ROOT / "translate.py"):
        if "cuda" in path.parts or path.name == "__main__.py":
            continue
        place = path.relative_to(ROOT)
        module = importlib.import_module(".".join(place.with_suffix("").parts))
        tree = ast.parse(path.read_text(encoding="utf-8"))
        yield place.as_posix().removeprefix("minitransformer/"), module, tree


def patterns():
    """Yield the file, the name and the pattern of each, and the method that uses it.

    To match all of a text is easier than to search it.
    """
    files = list(modules())
    methods = {}  # of each name
    for *_, tree in files:
        for name, method in re.findall(r"\b(\w+)\.(\w+)\(", ast.unparse(tree)):
            methods.setdefault(name, set()).add(method)
    for file, module, tree in files:
        names = {
            node.value: ast.unparse(node.targets[0])
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign)
        }
        for node in ast.walk(tree):
            function = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            library, _, method = function.partition(".")
            assert library != "regex" or file in OF_REGEX
            if library != "re" or method not in FUNCTIONS:
                continue
            name = names.get(node)
            used = {method, *methods.get(name, ())} - {"compile"}
            flags = re.findall(r"\bre\.[A-Z]+\b", ast.unparse(node))
            try:
                text = eval(ast.unparse(node.args[0]), vars(module))
                each = [(text, eval("|".join({*flags, "0"})))]
            except NameError:
                each = LOCAL[file]
            for text, flag in each:
                way = "fullmatch" if used == {"fullmatch"} else "sub"
                yield file, name, re.compile(text, flag), way


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


def use(pattern, way, text):
    if way == "sub":
        pattern.sub("", text)
    else:
        pattern.fullmatch(text)


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
    found = list(patterns())
    assert len(found) > 40
    for file, name, pattern, way in found:
        longest = SHORT.get(name, 4 * SHORTEST)
        work = partial(use, pattern, way)
        if text := hostile_text(work, atoms(pattern), longest):
            slow.setdefault(file, []).append((name, way, text))
    assert slow.keys() == ALLOWED, slow


@pytest.mark.parametrize("place", OF_REGEX)
def test_what_uses_the_library_regex_takes_linear_time(place):
    parts = [*"a1 .-'<\n)»\u0301\u2026\u3002"]
    assert hostile_text(OF_REGEX[place], parts, slow=25 * SLOW) is None


@pytest.mark.parametrize(
    ("function", "unit"),
    [(function, unit) for function in REPEATED for unit in REPEATED[function]],
)
def test_long_text_takes_no_time(function, unit):
    """It would be minutes if it were quadratic."""
    text = unit * (40_000 // len(unit))
    began = time.process_time()
    for around in ("", "<script>", "a."):
        function(f"{around}{text}x")
    assert time.process_time() - began < 5


NOT_LINEAR = r"(a+)+$", r"\s+$", r"<b[^>]*>", r"(?:\w+\d?)*!"
LINEAR = r"\w+", r"(?<!\s)\s+x"


@pytest.mark.parametrize("text", [*NOT_LINEAR, *LINEAR])
def test_what_is_not_linear_is_noticed(text):
    pattern = re.compile(text)
    hostile = hostile_text(pattern.search, atoms(pattern))
    assert (hostile is None) == (text in LINEAR)
