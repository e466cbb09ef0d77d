"""Which device is opened, and what is said where there is none."""

import sys

import numpy as np
import pytest

from minitransformer import api
from minitransformer.backends.cuda import device as cuda_device
from minitransformer.backends.devices import check_device, open_device
from minitransformer.commands import export
from minitransformer.engine.backend import backend_of
from minitransformer.settings.options import UsageError
from support import strict_cupy


def test_the_processor_is_always_there():
    check_device("cpu")
    opened = open_device("cpu", num_threads=3)
    assert (opened.xp, opened.num_threads, opened.low_precision) == (np, 3, None)
    assert opened.description == "cpu, 3 workers"
    assert open_device("cpu").num_threads >= 1


@pytest.mark.parametrize("name", ["gpu", "cuda:one", "cpu:0", ""])
def test_unknown_devices_are_refused(name):
    with pytest.raises(UsageError, match="--device: expected cpu, cuda or cuda:N"):
        open_device(name)


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("asked", [None, "fp32", "int8"])
@pytest.mark.parametrize("stored", ["float16", "int8"])
def test_models_in_8_bits_have_products_in_int8_where_these_are_faster(
    model_path, tmp_path, monkeypatch, stored, asked, fast
):
    pytest.importorskip("numkong", reason="no NumKong")
    monkeypatch.setattr(api, "multiplies_int8_fast", lambda: fast)
    path = tmp_path / "small.safetensors"
    assert export.main([stored, model_path, str(path)]) == 0
    api.load(path, precision=asked, threads=1)
    found = backend_of(np.zeros(1)).precision
    open_device("cpu")
    assert found == (asked or ("int8" if stored == "int8" and fast else "fp32"))


def test_a_gpu_is_selected(monkeypatch):
    gpu = strict_cupy.install(monkeypatch, libraries={}, gpus=2)
    check_device("cuda:1")  # takes no memory of the GPU that it finds
    assert gpu.local.device == 0
    assert cuda_device.select_gpu("cuda:1") is gpu.xp
    assert gpu.local.device == 1
    with pytest.raises(RuntimeError, match="cuda:2: expected cuda:0 to cuda:1"):
        check_device("cuda:2")


def test_what_a_gpu_needs_is_said(monkeypatch):
    gpu = strict_cupy.install(monkeypatch, libraries={})
    monkeypatch.setattr(gpu.xp.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="no CUDA driver or no GPU"):
        open_device("cuda")
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(RuntimeError, match=r"device cuda needs CuPy .*: pip install"):
        open_device("cuda")
