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
import inspect
import numbers
import re
from importlib.machinery import SourceFileLoader
from typing import NamedTuple

END = r"\n\s*\n|\n\s*(?=(?:Units|Raises|Returns|Yields|Differs|Elsewhere|Example):)"
ITEM = re.compile(
    r"(?P<names>(?:\w+, )*\w+ )??(?P<kind>each |broadcasting to )?"
    r"(?:\[(?P<axes>[^]]*)\]|scalar)(?: (?P<dtype>[a-z]+\d*))?(?:, |$)"
)

CALLS = {}  # how often each line was checked
MISTAKES = []  # also where something caught the error


class Axis(NamedTuple):
    """One axis: its text, and the expression in it with its symbols, if any."""

    text: str
    plain: str = ""
    symbols: tuple[str, ...] = ()


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


def parse(part):
    """Return the claims of what stands on one side of the arrow."""
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
    return claims


def _axis(text):
    if text in ("...", "any"):
        return Axis(text)
    plain = text.removeprefix("at least ").removeprefix("1 or ").replace("'", "_")
    # What stands side by side is a product.
    plain = re.sub(r"(?<=[\w)]) +(?=[\w(])", " * ", plain)
    nodes = ast.walk(ast.parse(plain, mode="eval"))
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    return Axis(text, plain, tuple(sorted(names)))


def mistake(found, known):
    """Return how the shapes found contradict their claims, or None.

    `known` has the values of names.
    """
    left, known = [], dict(known)
    for claim, shape, _ in found:
        axes, texts = list(claim.axes), [axis.text for axis in claim.axes]
        if "..." in texts:
            start = texts.index("...")
            end = max(start + len(shape) - len(axes) + 1, start)
            free = shape[start:end]
            if known.setdefault("...", free) != free:
                return f"... is {list(known['...'])} and {list(free)}"
            del axes[start]
            shape = (*shape[:start], *shape[end:])
        elif claim.kind == "broadcasting to":
            axes = axes[max(len(axes) - len(shape), 0) :]
        if len(axes) != len(shape):
            return f"{claim.name or 'the result'} has {len(shape)} axes"
        for axis, size in zip(axes, shape, strict=True):
            may_be_1 = claim.kind == "broadcasting to" or axis.text.startswith("1 or ")
            if axis.plain and not (may_be_1 and size == 1):
                left.append((axis, size))

    # Symbols that stand alone come first. A product with one that has no value yet is
    # the same everywhere.
    for axis, size in sorted(left, key=lambda pair: len(pair[0].text)):
        if known.keys() >= {*axis.symbols}:
            expected = eval(axis.plain, {}, known)
        else:
            expected = known.setdefault(axis.plain, size)
        least = axis.text.startswith("at least ")
        if size < expected if least else size != expected:
            return f"expected {axis.text} = {expected}, got {size}"
    return None


# Watching the package


def _shape(value):
    shape = getattr(value, "shape", None)
    return () if shape is None and isinstance(value, numbers.Number) else shape


def _dtype(value):
    array = value if hasattr(value, "dtype") else getattr(value, "data", None)
    return str(getattr(array, "dtype", None))  # of an array or a Tensor


def _number(value):
    """Return what a name in a line stands for: a number, a length or nothing."""
    if isinstance(value, numbers.Integral):
        return value
    return len(value) if hasattr(value, "__len__") else None


def _find(name, given):
    """Return a parameter, an attribute of `self`, or None."""
    return given[name] if name in given else getattr(given.get("self"), name, None)


class Line:
    """A line, and the combinations of shapes that it was found to be true of."""

    def __init__(self, name, line, module):
        self.name, self.line, self.true = name, line, set()
        inside, _, outside = line.partition("->")
        self.inside, self.outside = parse(inside), parse(outside)
        self.claims = (*self.inside, *self.outside)
        self.names = [claim.name for claim in self.inside]
        numbered = enumerate(self.claims)  # those of which more than a shape matters
        self.special = [(i, c) for i, c in numbered if c.dtype or c.kind == "each"]
        symbols = {s for c in self.claims for axis in c.axes for s in axis.symbols}
        found = {s: module.get(s, getattr(builtins, s, None)) for s in symbols}
        self.functions = {s: value for s, value in found.items() if callable(value)}
        # Longer ones than N and d_k may be names of numbers.
        symbols -= self.functions.keys()
        self.symbols = [symbol for symbol in symbols if len(symbol) > 3]
        CALLS[name] = 0

    def require(self, names):
        """Fail unless all names of the line are among those that exist."""
        if unknown := set(self.names).difference(names):
            self.fail(f"what is {unknown}?")

    def fail(self, reason):
        MISTAKES.append(f"{self.name}: Shapes: {self.line}: {reason}")
        raise AssertionError(MISTAKES[-1])

    def check(self, given, result=None):
        """Compare a call with these arguments, or an object that is given as `self`."""
        CALLS[self.name] += 1
        values = [*map(given.get, self.names)]
        several = len(self.outside) > 1 and result is not None
        values += result if several else [result] * len(self.outside)
        sizes = [_number(_find(symbol, given)) for symbol in self.symbols]
        key = [getattr(value, "shape", value is None) for value in values]
        for place, claim in self.special:
            several = claim.kind == "each" and values[place] is not None
            value = values[place]
            key.append(tuple(map(_shape, value)) if several else _dtype(value))
        if (key := (*key, *sizes)) in self.true:  # as nearly always
            return
        found = []
        for claim, value in zip(self.claims, values, strict=True):
            several = claim.kind == "each" and value is not None
            arrays = [
                x for x in (value if several else [value]) if _shape(x) is not None
            ]
            found += [(claim, _shape(x), claim.dtype and _dtype(x)) for x in arrays]
        known = zip(self.symbols, sizes, strict=True)
        known = {symbol: size for symbol, size in known if size is not None}
        wrong = mistake(found, self.functions | known)
        for claim, _, dtype in found:
            if claim.dtype != dtype:
                wrong = f"the type of {claim.name or 'the result'} is {dtype}"
        if wrong:
            got = [f"{claim.name} {list(shape)}".strip() for claim, shape, _ in found]
            self.fail(f"{wrong}; got {', '.join(got)}")
        self.true.add(key)


def _watched(function, name, line, module):
    """Return a function whose calls are checked."""
    line, parameters = Line(name, line, module), inspect.signature(function).parameters
    line.require(parameters)
    names, defaults = [*parameters], {k: p.default for k, p in parameters.items()}

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        result = function(*args, **kwargs)
        given = zip(names, args, strict=False)
        line.check({**defaults, **dict(given), **kwargs}, result)
        return result

    return wrapper


def _watch_attributes(owner, name, line, module):
    """Check the attributes of each new object of a class."""
    construct = owner.__new__ if issubclass(owner, tuple) else owner.__init__
    line = Line(name, line, module)

    @functools.wraps(construct)
    def wrapper(*args, **kwargs):
        result = construct(*args, **kwargs)
        made = result or args[0]
        if type(made) is owner:
            given = {
                name: getattr(made, name) for name in line.names if hasattr(made, name)
            }
            line.require(given)
            line.check({**given, "self": made})
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
        name, line = f"{room}.{key}", _line_of(names, [value.__doc__])
        if inspect.isfunction(value) and line:
            setattr(module, key, _watched(value, name, line, names))
        elif inspect.isclass(value):
            if line:
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


def install():
    """Check all modules of the package that are imported from now on."""
    execute = SourceFileLoader.exec_module

    def exec_module(loader, module):
        execute(loader, module)
        if module.__name__.startswith("minitransformer."):
            watch(module)

    SourceFileLoader.exec_module = exec_module
