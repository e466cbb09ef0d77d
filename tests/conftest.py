"""Settings and fixtures of all tests; support/ has what else they share.

Fixtures import what they need themselves, so that a fault in one room of the package
fails the tests of that room alone.
"""

import importlib
import shutil
import signal
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import settings

from support import properties, shapes

shapes.install()  # before a test imports the package

settings.load_profile("repeatable")


def pytest_addoption(pluginmanager):
    """Draw the cases of properties, a few or for some minutes."""
    pluginmanager.register(properties, "properties")


def pytest_make_parametrize_id(val, argname):
    """Name bytes by their argument: those of gzip have the time, which selects none."""
    return argname if isinstance(val, bytes) else None


def pytest_configure():
    """Let programs that tests start heed signals, even if these tests ignore them.

    Under `nohup pytest &`, a script ignores SIGHUP and SIGINT. A program inherits what
    is ignored, but not what has a handler.
    """
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    hangup = getattr(signal, "SIGHUP", None)
    if hangup is not None and signal.getsignal(hangup) == signal.SIG_IGN:
        signal.signal(hangup, lambda number, frame: None)


def pytest_terminal_summary(terminalreporter):
    """Say why tests were skipped, in a line for each reason."""
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = Counter(report.longrepr[2] for report in skipped)
    for reason, count in reasons.most_common():
        reason = reason.removeprefix("Skipped: ")
        terminalreporter.write_line(f"skipped {count:4}: {reason}")
    count, calls = sum(map(bool, shapes.CALLS.values())), sum(shapes.CALLS.values())
    terminalreporter.write_line(f"shapes of {count} functions in {calls:,} calls")
    for line in shapes.MISTAKES:
        terminalreporter.write_line(line)


def pytest_sessionfinish(session):
    """Fail if a shape was wrong, also where the test did not see the error."""
    if shapes.MISTAKES and not session.exitstatus:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(scope="session")
def model_path(tmp_path_factory):
    """A small untrained model, saved."""
    from support.models import save_small_model

    return save_small_model(tmp_path_factory.mktemp("model") / "x.safetensors")


@pytest.fixture(scope="session")
def translator(model_path):
    """The small untrained model, which no test changes."""
    from minitransformer import load

    return load(model_path, threads=1)


@pytest.fixture(scope="session")
def loaded_model():
    from minitransformer import load

    return load("en-de", precision="fp32", threads=1)


@pytest.fixture
def shipped(loaded_model):
    """The model that comes with the package, in float32, which no test changes."""
    from minitransformer.backends.devices import open_device

    open_device("cpu")  # a test before this one may have chosen another precision
    return loaded_model


@pytest.fixture
def place(tmp_path, monkeypatch):
    """An empty folder, in which the test works."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def box(place, model_path, monkeypatch):
    """A package whose model is small and in 16 bits, seen from an empty folder."""
    from minitransformer.commands import export
    from minitransformer.runs import models

    monkeypatch.setattr(models, "SHIPPED", place / "models")
    half = place / "models" / "en-de" / "model.safetensors"
    half.parent.mkdir(parents=True)
    card = half.with_name("README.md")
    card.write_text("# en-de: English to German\n\nIts card.\n")
    assert export.main(["float16", model_path, str(half)]) == 0
    return half


@pytest.fixture
def benchmark(monkeypatch):
    """Import a script of benchmarks/ by its name."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    return importlib.import_module


@pytest.fixture(scope="session")
def host_libraries(request, tmp_path_factory):
    """The kernels, built for the host, by the type of activations."""
    pytest.importorskip("ml_dtypes", reason="no bfloat16 without ml_dtypes")
    from support import host_device

    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler: the kernels are not built for the host")
    cache = getattr(request.config, "cache", None)
    folder = cache.mkdir("kernels") if cache else tmp_path_factory.mktemp("kernels")
    return host_device.build(compiler, folder)


@pytest.fixture
def stand_in(host_libraries, monkeypatch):
    """A machine with GPUs that are none, in the place of CuPy: their state."""
    from support.cuda import backend_for
    from support.strict_cupy import install

    gpu = install(monkeypatch, host_libraries)
    with backend_for(gpu.xp.ndarray):
        yield gpu
    gpu.close()


@pytest.fixture
def host_gpu(stand_in):
    """The stand-in's device, of the class that drives a real GPU."""
    from minitransformer.backends.cuda import device

    return device.current()


@pytest.fixture(params=["host", "gpu"])
def gpu(request):
    """The device under test; `gpu.xp` has its arrays."""
    if request.param == "host":
        return request.getfixturevalue("host_gpu")
    from minitransformer.backends.cuda import device

    cupy = pytest.importorskip("cupy", reason="no GPU without CuPy")
    if not cupy.cuda.is_available():
        pytest.skip("no GPU")
    return device.current()
