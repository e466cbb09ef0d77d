"""Settings shared by all tests."""

import shutil

import numpy as np
import pytest
from hypothesis import settings

settings.register_profile(
    "repeatable", deadline=None, max_examples=25, derandomize=True
)
settings.load_profile("repeatable")

# One table of tolerances: |got - expected| <= absolute + relative * |expected|.
TOLERANCES = {
    "float64": (1e-10, 1e-9),
    "float32": (2e-5, 2e-4),
    "float16": (8e-3, 8e-3),
    "bfloat16": (5e-2, 5e-2),
}


def assert_close(got, expected, dtype="float64"):
    absolute, relative = TOLERANCES[dtype]
    np.testing.assert_allclose(got, expected, rtol=relative, atol=absolute)


@pytest.fixture(scope="session")
def libraries(tmp_path_factory):
    """kernels.cu, built for the host."""
    pytest.importorskip("ml_dtypes", reason="no bfloat16 without ml_dtypes")
    import host_device

    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler: kernels.cu is not built for the host")
    return host_device.build(compiler, tmp_path_factory.mktemp("host_cuda"))


@pytest.fixture(params=["host", "gpu"])
def gpu(request, monkeypatch):
    """The device under test; `gpu.xp` has its arrays."""
    from minitransformer.cuda import device

    if request.param == "host":
        import host_device

        host = host_device.HostDevice(request.getfixturevalue("libraries"))
        monkeypatch.setattr(device, "current", lambda: host)
        return host
    cupy = pytest.importorskip("cupy", reason="no GPU without CuPy")
    if not cupy.cuda.is_available():
        pytest.skip("no GPU")
    return device.current()
