"""Array libraries, and which body of an operation runs."""

import sys
import types

import numpy as np
import pytest

from minitransformer.engine import backend
from minitransformer.engine.autograd import Tensor
from support import elementary
from support.cuda import backend_for


class OtherArray:
    """An array of another library, as CuPy's are."""

    shape, size, flags = (1,), 1, types.SimpleNamespace(c_contiguous=True)

    def get(self):
        return np.arange(3)


def fused_add(a, b):
    return "fused", lambda g: (g, g)


def find_add(name, arrays):
    return fused_add if name == "add" else None


def test_array_types_decide_which_kernel_runs():
    other, numbers = Tensor(OtherArray()), Tensor(np.ones(1))
    with backend_for(OtherArray, backend=backend.Backend(find_kernel=find_add)):
        assert elementary.add(other, other).data == "fused"
        assert elementary.add(numbers, other).data == "fused"
        assert elementary.add(numbers, numbers).data == [2.0]
        body = backend.fused_kernel("linear", (OtherArray(),), "the reference")
        assert body == "the reference"
    with pytest.raises(TypeError):
        elementary.add(other, other)


def test_other_arrays_belong_to_cupy(monkeypatch):
    cupy = types.ModuleType("cupy")
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    assert backend.array_module(OtherArray()) is cupy
    assert backend.to_host(OtherArray()).tolist() == [0, 1, 2]


def test_what_has_gaps_is_copied_before_it_comes_to_the_host():
    class Strided(OtherArray):
        flags = types.SimpleNamespace(c_contiguous=False)
        copies = 0

        def copy(self):
            Strided.copies += 1
            return OtherArray()

    assert backend.to_host(Strided()).tolist() == [0, 1, 2]
    assert Strided.copies == 1


def test_a_backend_is_told_that_parameters_have_changed():
    parameters, told = np.ones(3), []
    listening = backend.Backend(parameters_changed=told.append)
    with backend_for(np.ndarray, backend=listening):
        backend.parameters_changed(parameters)
    [found] = told
    assert found is parameters
    backend.parameters_changed(parameters)  # does nothing without a backend
    assert len(told) == 1
