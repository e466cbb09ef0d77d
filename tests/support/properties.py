"""Runs of the properties, which are the tests that draw their cases by Hypothesis.

    pytest -m properties --minutes 10 [--seed 7] [--device cuda] [--precision bf16]

`pytest` draws a few cases of each, the same ones every time. With `--minutes`, new ones
are drawn until the time is over, of which each property has its share, and a table says
how many there were and how large an error was, as a share of what is allowed. What
fails is made as small as it goes, printed, kept, and tried first by every run
thereafter.
"""

import time
from collections import Counter
from functools import wraps
from pathlib import Path
from zlib import crc32

import pytest
from hypothesis import HealthCheck, Phase, is_hypothesis_test, settings
from hypothesis.database import DirectoryBasedExampleDatabase
from hypothesis.errors import UnsatisfiedAssumption

FAILURES = Path(__file__).parents[2] / ".hypothesis" / "examples"
KEPT = {
    "deadline": None,
    "database": DirectoryBasedExampleDatabase(FAILURES),
    "print_blob": True,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.filter_too_much],
}
settings.register_profile("repeatable", max_examples=25, **KEPT)
settings.register_profile("timed", max_examples=40, **KEPT)
UNSHRUNK = {**KEPT, "database": None, "phases": [Phase.explicit, Phase.generate]}
settings.register_profile("unshrunk", max_examples=25, **UNSHRUNK)

CASES = Counter()  # how many were drawn of each property, up to one that fails
FAILED = set()
ERRORS = {}  # the largest of each property
SEEDS = {}
RUNNING = []  # the property that runs, if any


def within(error, bound):
    """Require that an error is below its bound, and note the share of it."""
    share = float(error) / float(bound)
    if RUNNING:
        ERRORS[RUNNING[0]] = max(ERRORS.get(RUNNING[0], 0.0), share)
    assert share <= 1, f"{error:.3g} is more than {bound:.3g}"


def pytest_addoption(parser):
    group = parser.getgroup("properties")
    group.addoption(
        "--minutes", type=float, help="draw cases of properties for so long"
    )
    group.addoption("--seed", type=int, help="the seed of the cases that are drawn")
    group.addoption("--device", default="cpu", help="the device of whole models")
    group.addoption("--precision", help="the precision of whole models (default: all)")


def pytest_configure(config):
    line = "properties(share=1): draws its cases, for a share of the --minutes"
    config.addinivalue_line("markers", line)
    if config.getoption("minutes"):
        settings.load_profile("timed")


def pytest_collection_modifyitems(config, items):
    for item in items:
        if is_hypothesis_test(getattr(item, "function", None)):
            if item.get_closest_marker("properties") is None:
                item.add_marker("properties")
            test = item.function.hypothesis
            if not hasattr(test.inner_test, "counted"):
                test.inner_test = _counted(test.inner_test)


def _counted(test):
    """Return a test that counts its cases, up to one that fails."""

    @wraps(test)
    def counted(*args, **kwargs):
        try:
            test(*args, **kwargs)
        except UnsatisfiedAssumption:
            raise
        except Exception:
            FAILED.update(RUNNING)
            raise
        CASES.update([name for name in RUNNING if name not in FAILED])

    counted.counted = True
    return counted


def _share(item):
    marker = item.get_closest_marker("properties")
    return marker.kwargs.get("share", 1) if marker else 0


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """Draw the cases of a property: once, or again and again until its time is over."""
    test, config = pyfuncitem.obj, pyfuncitem.config
    if not is_hypothesis_test(test):
        return None
    name = pyfuncitem.nodeid.removeprefix("tests/")
    asked = config.getoption("seed")
    first = crc32(name.encode()) if asked is None else asked
    minutes = config.getoption("minutes")
    if minutes and asked is None:
        first = time.time_ns() % 1_000_000

    # The time that is left is divided among the properties that are left.
    items = pyfuncitem.session.items
    left = items[items.index(pyfuncitem) :]
    if not hasattr(config, "properties_end"):
        config.properties_end = time.monotonic() + 60 * (minutes or 0)
    seconds = config.properties_end - time.monotonic()
    end = time.monotonic() + seconds * _share(pyfuncitem) / sum(map(_share, left))

    RUNNING[:] = [name]
    SEEDS[name] = first
    names = pyfuncitem._fixtureinfo.argnames
    arguments = {argument: pyfuncitem.funcargs[argument] for argument in names}
    try:
        while True:
            # Not by `hypothesis.seed`, which would keep no failures.
            test._hypothesis_internal_use_seed = first
            test(**arguments)
            first += 1
            if time.monotonic() >= end:
                return True
    finally:
        RUNNING.clear()


def pytest_terminal_summary(terminalreporter):
    """Print the table of a run with --minutes."""
    if not terminalreporter.config.getoption("minutes"):
        return
    line = terminalreporter.write_line
    line(f"{'property':<70}{'cases':>9}{'error/bound':>13}{'first seed':>12}")
    for name, seed in SEEDS.items():
        error = f"{ERRORS[name]:.3f}" if name in ERRORS else "-"
        error = "failed" if name in FAILED else error
        line(f"{name.rpartition('/')[2]:<70}{CASES[name]:>9,}{error:>13}{seed:>12}")
    line(f"{'all':<70}{CASES.total():>9,}")
