"""Which library and device, and which body of an operation runs."""

import importlib
import sys
import types

import numpy as np
import pytest

from minitransformer.engine import backend, ops
from minitransformer.engine.autograd import Tensor


class OtherArray:
    """An array of another library, as CuPy's are."""

    shape, size = (1,), 1


def test_the_arrays_decide_which_body_runs(monkeypatch):
    def fused_add(a, b):
        return "fused", lambda g: (g, g)

    fused = types.ModuleType("minitransformer.cuda.ops")
    fused.find = lambda name, arrays: fused_add if name == "add" else None
    monkeypatch.setattr(backend, "_fused", lambda: fused)
    assert ops.add(Tensor(OtherArray()), Tensor(OtherArray())).data == "fused"
    numbers = Tensor(np.ones(1))
    assert ops.add(numbers, numbers).data == [2.0]
    assert backend.override("matmul", (OtherArray(),)) is None


def test_numpy_arrays_belong_to_numpy():
    assert backend.array_module(np.ones(2)) is np
    assert backend.array_module(np.float32(2)) is np
    assert backend.device_module("cpu") is np
    host = np.ones(3)
    assert backend.to_host(host) is host


@pytest.mark.parametrize("name", ["gpu", "cuda:one", "cpu:0", ""])
def test_unknown_devices_are_refused(name):
    with pytest.raises(ValueError, match="expected a device cpu, cuda or cuda:N"):
        backend.device_module(name)


def fake_cupy(monkeypatch, available, count=2):
    used = []
    cupy = types.ModuleType("cupy")
    cupy.cuda = types.SimpleNamespace(
        is_available=lambda: available,
        runtime=types.SimpleNamespace(getDeviceCount=lambda: count),
        Device=lambda index: types.SimpleNamespace(use=lambda: used.append(index)),
    )
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    return cupy, used


def test_a_gpu_is_selected(monkeypatch):
    cupy, used = fake_cupy(monkeypatch, available=True)
    assert backend.device_module("cuda") is cupy
    assert backend.device_module("cuda:1") is cupy
    assert used == [0, 1]
    with pytest.raises(RuntimeError, match="cuda:2: expected cuda:0 to cuda:1"):
        backend.device_module("cuda:2")


def test_what_a_gpu_needs_is_said(monkeypatch):
    fake_cupy(monkeypatch, available=False)
    with pytest.raises(RuntimeError, match="no CUDA driver or no GPU"):
        backend.device_module("cuda")
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(RuntimeError, match="device cuda needs CuPy: pip install"):
        backend.device_module("cuda")


def test_the_allocator_is_tuned_where_it_can_be(monkeypatch):
    monkeypatch.setattr(sys, "platform", "other")
    assert backend.tune_allocator() is False
    assert backend.num_cores() >= 1


def test_the_package_imports_without_cupy(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    for name in ("autograd", "ops", "layers", "transformer", "decoding", "parallel"):
        importlib.import_module(f"minitransformer.{name}")
