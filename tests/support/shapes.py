"""Checks the "Shapes:" lines of the package's docstrings at every call of the tests.

A line names parameters (or, of a class, attributes) with their axes, and after an arrow
the results:

    Shapes: q [B, T, H d_k], k, v [B, S, H d_k], mask broadcasting to [B, 1, T, S]
    -> [B, T, H d_k]

An axis is a number, a symbol, a product such as `B K`, a sum such as `T + 1`, a call of
`max` or of a function of the module, `at least` or `1 or` one of these, or `any`; `...`
stands for any number of axes. A symbol has one value in a call. The name of a number
among the parameters and attributes stands for it, and that of a list for its length.
`each` speaks of all arrays of a list; `scalar` is an array without axes, or a number.
A type may follow. None and what is no array are passed over, "as `name`" repeats the
line of another function, and a method without a line has that of its base class.
"""

import ast
import builtins
import functools
import importlib.abc
import importlib.machinery
import inspect
import numbers
import re
import sys
from typing import NamedTuple

END = r"\n\s*\n|\n\s*(?=(?:Units|Raises|Returns|Yields|Differs|Elsewhere|Example):)"
ITEM = re.compile(
    r"(?P<names>(?:\w+, )*\w+ )??(?P<kind>each |broadcasting to )?"
    r"(?:\[(?P<axes>[^]]*)\]|scalar)(?: (?P<dtype>[a-z]+\d*))?(?:, |$)"
)


class Axis(NamedTuple):
    """One axis: its text, the symbols in it, and what computes it from their values."""

    text: str
    symbols: tuple[str, ...] = ()
    code: object = None


class Claim(NamedTuple):
    """What a line says of one parameter, attribute or result."""

    name: str
    kind: str
    axes: tuple[Axis, ...]
    dtype: str | None


def line_of(docstring):
    """Return what a docstring says of shapes, on one line, or None."""
    _, found, rest = (docstring or "").partition("Shapes: ")
    return " ".join(re.split(END, rest)[0].split()) if found else None


def parse(line):
    """Return the claims of a line: on what goes in, and on what comes out."""
    both = []
    for part in line.split("->") if "->" in line else (line, ""):
        claims, rest = [], part.strip()
        while rest:
            item = ITEM.match(rest)
            if not item:
                raise ValueError(f"expected names and [axes], got {rest!r}")
            texts = re.split(r", (?![^(]*\))", item["axes"]) if item["axes"] else []
            kind, axes = (item["kind"] or "").strip(), tuple(map(_axis, texts))
            for name in (item["names"] or "").strip().split(", "):
                claims.append(Claim(name, kind, axes, item["dtype"]))
            rest = rest[item.end() :]
        both.append(claims)
    inside, outside = both
    return inside, outside


def _axis(text):
    if text in ("...", "any"):
        return Axis(text)
    plain = text.removeprefix("at least ").removeprefix("1 or ").replace("'", "_")
    # What stands side by side is a product.
    plain = re.sub(r"(?<=[\w)]) +(?=[\w(])", " * ", plain)
    nodes = ast.walk(ast.parse(plain, mode="eval"))
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    return Axis(text, tuple(sorted(names)), compile(plain, text, "eval"))


def mistake(claims, shapes, scope):
    """Return how some shapes contradict their claims, or None.

    `scope(symbol)` is what a name stands for beside the arrays, or None.
    """
    known, left = {}, []
    for claim, shape in zip(claims, shapes, strict=True):
        axes, texts = list(claim.axes), [axis.text for axis in claim.axes]
        if "..." in texts:
            place = texts.index("...")
            end = max(place + len(shape) - len(axes) + 1, place)
            free = shape[place:end]
            if known.setdefault("...", free) != free:
                return f"... is {list(known['...'])} and {list(free)}"
            shape = (*shape[:place], *shape[end:])
            del axes[place]
        elif claim.kind == "broadcasting to":
            axes = axes[max(len(axes) - len(shape), 0) :]
        if len(axes) != len(shape):
            return f"{claim.name or 'the result'} has {len(shape)} axes"
        stretches = claim.kind == "broadcasting to"
        left += [
            pair
            for pair in zip(axes, shape, strict=True)
            if pair[0].code
            and not ((stretches or pair[0].text.startswith("1 or ")) and pair[1] == 1)
        ]

    # Symbols that stand alone come first, then what has one unknown symbol.
    left.sort(key=lambda pair: len(pair[0].text))
    while left:
        waiting = []
        for axis, size in left:
            values = {s: known.get(s, scope(s)) for s in axis.symbols}
            unknown = [symbol for symbol, value in values.items() if value is None]
            least = axis.text.startswith("at least ")
            if len(unknown) == 1 and not least:
                value = _solve(axis.code, values, unknown[0], size)
                if value is not None:
                    known[unknown[0]] = value
                    continue
            if unknown:
                waiting.append((axis, size))
            else:
                expected = eval(axis.code, values)
                if size < expected if least else size != expected:
                    return f"expected {axis.text} = {expected}, got {size}"
        if len(waiting) == len(left):
            break
        left = waiting
    for axis, size in left:  # A product of unknown symbols is the same everywhere.
        if known.setdefault(axis.text, size) != size:
            return f"{axis.text} is {known[axis.text]} and {size}"
    return None


def _solve(code, values, symbol, size):
    """Return the whole number for which a linear expression has a value, or None."""
    at = [eval(code, {**values, symbol: x}) for x in (0, 1, 2)]
    slope = at[1] - at[0]
    if not slope or at[2] - at[1] != slope or (size - at[0]) % slope:
        return None
    return (size - at[0]) // slope


# Watching the package


CALLS = {}  # how often each line was checked
MISTAKES = []  # also where something caught the error


def _shape(value):
    return () if isinstance(value, numbers.Number) else getattr(value, "shape", None)


def _dtype(value):
    array = value if hasattr(value, "dtype") else value.data  # of a Tensor
    return str(array.dtype)


def _number(value):
    """Return what a name in a line stands for: a number, a length or nothing."""
    if isinstance(value, numbers.Integral):
        return value
    return len(value) if hasattr(value, "__len__") else None


def _arrays(claims, values):
    """Yield each claim with each array that it is about."""
    for claim, value in zip(claims, values, strict=True):
        several = value if claim.kind == "each" and value is not None else (value,)
        yield from ((claim, x) for x in several if _shape(x) is not None)


class Line:
    """A line, and the combinations of shapes that it was found to be true of."""

    def __init__(self, name, line, module):
        self.name, self.line, self.true = name, line, set()
        self.inside, self.outside = parse(line)
        claims = (*self.inside, *self.outside)
        symbols = {s for c in claims for axis in c.axes for s in axis.symbols}
        found = {s: module.get(s, getattr(builtins, s, None)) for s in symbols}
        self.functions = {s: value for s, value in found.items() if callable(value)}
        # Longer ones than N and d_k may be names of numbers.
        symbols -= self.functions.keys()
        self.symbols = [symbol for symbol in symbols if len(symbol) > 3]
        self.names = {claim.name for claim in self.inside}
        CALLS[name] = 0

    def require(self, names):
        """Fail unless all names of the line are among those that exist."""
        if unknown := self.names - set(names):
            self.fail(f"what is {unknown}?")

    def fail(self, reason):
        MISTAKES.append(f"{self.name}: Shapes: {self.line}: {reason}")
        raise AssertionError(MISTAKES[-1])

    def check(self, find, result, key):
        """Compare a call: `find(name)` returns a parameter or attribute, or None.

        `key` stands for its shapes, unless it is None.
        """
        pairs = list(_arrays(self.inside, [find(claim.name) for claim in self.inside]))
        if self.outside and result is not None:
            results = result if len(self.outside) > 1 else (result,)
            pairs += _arrays(self.outside, results)
        claims, shapes = [claim for claim, _ in pairs], [_shape(x) for _, x in pairs]
        sizes = {s: _number(find(s)) for s in self.symbols} | self.functions
        wrong = mistake(claims, shapes, sizes.get)
        for claim, value in pairs:
            if claim.dtype and claim.dtype != _dtype(value):
                wrong = f"the type of {claim.name or 'the result'} is {_dtype(value)}"
        if wrong:
            got = zip(claims, shapes, strict=True)
            got = ", ".join(f"{c.name} {list(shape)}".strip() for c, shape in got)
            self.fail(f"{wrong}; got {got}")
        self.true.add(key)
        self.true.discard(None)


# What is seldom new is recognised quickly: `key` has all that a line speaks of.
WRAPPER = """
def wrapper({declared}):
    result = _function({passed})
    _calls[_name] += 1
    try:
        _key = {key}
    except (AttributeError, TypeError):
        _key = None
    if _key not in _true:
        given = {given}
        _check(lambda name: _find(name, given), result, _key)
    return result
"""


def _find(name, given):
    return given[name] if name in given else getattr(given.get("self"), name, None)


def _watched(function, name, line, module):
    """Return a function whose calls are checked."""
    line, parameters = Line(name, line, module), inspect.signature(function).parameters
    line.require(parameters)
    context = {"_function": function, "_calls": CALLS, "_name": name}
    context |= {"_true": line.true, "_check": line.check, "_find": _find}
    context |= {"_shape": _shape, "_number": _number, "_dtype": _dtype}

    declared, passed = [], []
    for key, p in parameters.items():
        star = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "")
        only_by_name = p.kind is p.KEYWORD_ONLY
        if only_by_name and not any(text.startswith("*") for text in declared):
            declared.append("*")
        context[f"_of_{key}"] = p.default
        declared.append(star + key + f"=_of_{key}" * (p.default is not p.empty))
        passed.append(f"{key}={key}" if only_by_name else star + key)

    several = len(line.outside) > 1
    values = [(claim, claim.name) for claim in line.inside]
    values += [
        (claim, f"result[{i}]" if several else "result")
        for i, claim in enumerate(line.outside)
    ]
    parts = [
        f"tuple(map(_shape, {x} or ()))"
        if claim.kind == "each"
        else f"_shape({x})"
        if not claim.axes
        else f"({x} if {x} is None else {x}.shape)"
        for claim, x in values
    ]
    parts += [f"_dtype({x})" for claim, x in values if claim.dtype]
    parts += [
        f"_number({s})" if s in parameters else f"_number(getattr(self, {s!r}, None))"
        for s in line.symbols
        if s in parameters or "self" in parameters
    ]
    given = ", ".join(f"{key!r}: {key}" for key in parameters)
    code = WRAPPER.format(
        declared=", ".join(declared),
        passed=", ".join(passed),
        key=f"({', '.join(parts)},)",
        given=f"{{{given}}}",
    )
    exec(code, context)
    return functools.wraps(function)(context["wrapper"])


def _watch_attributes(owner, name, line, module):
    """Check the attributes of each new object of a class."""
    construct = owner.__new__ if issubclass(owner, tuple) else owner.__init__
    line = Line(name, line, module)

    @functools.wraps(construct)
    def wrapper(*args, **kwargs):
        result = construct(*args, **kwargs)
        made = result or args[0]
        if type(made) is owner:
            CALLS[name] += 1
            key = tuple(_shape(getattr(made, n, None)) for n in line.names)
            key += tuple(_number(getattr(made, n, None)) for n in line.symbols)
            if key not in line.true:
                line.require(filter(functools.partial(hasattr, made), line.names))
                line.check(lambda n: getattr(made, n, None), None, key)
        return result

    setattr(owner, construct.__name__, wrapper)


def _line_of(module, docstrings):
    """Return the first line of some docstrings, or that which it names."""
    line = next(filter(None, map(line_of, docstrings)), None)
    if line and (found := re.fullmatch(r"as `(\w+)`", line)):
        line = line_of(module[found[1]].__doc__)
    return line


def watch(module):
    """Have every function, class and method of a module checked that has a line."""
    names, room = vars(module), module.__name__.partition(".")[2]
    for key, value in list(names.items()):
        if getattr(value, "__module__", None) != module.__name__:
            continue
        name = f"{room}.{key}"
        if inspect.isfunction(value):
            if line := _line_of(names, [value.__doc__]):
                setattr(module, key, _watched(value, name, line, names))
        elif inspect.isclass(value):
            if line := _line_of(names, [value.__doc__]):
                _watch_attributes(value, name, line, names)
            _watch_methods(value, name, names)


def _watch_methods(owner, name, module):
    for key, value in list(vars(owner).items()):
        kind = type(value)
        if kind is functools.cached_property and (line := line_of(value.__doc__)):
            value.func = _watched(value.func, f"{name}.{key}", line, module)
        function = value.fget if kind is property else getattr(value, "__func__", value)
        if key == "__init__" or not inspect.isfunction(function):
            continue
        docs = [vars(c)[key].__doc__ for c in owner.__mro__ if key in vars(c)]
        if line := _line_of(module, docs):
            found = _watched(function, f"{name}.{key}", line, module)
            decorated = kind in (property, classmethod, staticmethod)
            setattr(owner, key, kind(found) if decorated else found)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if not name.startswith("minitransformer."):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec and spec.loader and hasattr(spec.loader, "exec_module"):
            execute = spec.loader.exec_module

            def exec_module(module):
                execute(module)
                watch(module)

            spec.loader.exec_module = exec_module
        return spec


def install():
    """Check all modules of the package that are imported from now on."""
    sys.meta_path.insert(0, _Finder())
