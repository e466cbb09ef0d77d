"""Stand-ins for a GPU: NumPy in the place of CuPy, kernels for arrays of NumPy."""

import contextlib
import functools
import sys
import types

import numpy as np

from minitransformer.cuda import training
from minitransformer.cuda.incremental_decoding import GraphDecoder
from minitransformer.cuda.ops import find_kernel
from minitransformer.cuda.training import GpuModel
from minitransformer.engine.backend import register_kernels


class DeviceArray(np.ndarray):
    """An array that is filled as CuPy's are."""

    def set(self, host):
        self[...] = host

    def get(self):
        return np.asarray(self)


class CudaError(RuntimeError):
    """CuPy's error of a call of the driver."""


class StandInCuda:
    """As much of CuPy as training and decoding call, with one stream: this object.

    `calls` names what it was asked to do. What training computes while the stream
    captures has no effect; the work is run again when the graph is launched. With
    `refuses_capture`, capturing fails as it may on a GPU.
    """

    ptr = 1

    def __init__(self, monkeypatch):
        self.calls, self.limits = [], []  # limits: of memory pools
        self.refuses_capture = False
        self.xp = types.ModuleType("cupy")
        vars(self.xp).update({k: v for k, v in vars(np).items() if k[0] != "_"})
        self.xp.empty = lambda shape, dtype: np.empty(shape, dtype).view(DeviceArray)
        self.xp.get_default_memory_pool = lambda: types.SimpleNamespace(
            free_all_blocks=lambda: self.calls.append("freed")
        )
        self.xp.cuda = types.SimpleNamespace(
            Stream=lambda non_blocking: self,
            Device=lambda: types.SimpleNamespace(synchronize=lambda: None),
            get_current_stream=lambda: self,
            using_allocator=lambda malloc: contextlib.nullcontext(),
            MemoryPool=lambda allocate: types.SimpleNamespace(
                malloc=allocate,
                set_limit=lambda size: self.limits.append(size),
                free_all_blocks=lambda: self.calls.append("graphs freed"),
            ),
            MemoryPointer=lambda memory, offset: memory,
            runtime=types.SimpleNamespace(CUDARuntimeError=CudaError),
        )
        cupyx = types.ModuleType("cupyx")
        cupyx.empty_pinned = np.empty
        monkeypatch.setitem(sys.modules, "cupyx", cupyx)
        monkeypatch.setattr(training, "array_module", lambda array: self.xp)
        for kind in (GpuModel, GraphDecoder):
            monkeypatch.setattr(kind, "_compute", self.remembers(kind._compute))

    def remembers(self, compute):
        """Return `compute`, but what it computes last is known to `end_capture`."""

        def remembered(model, *arguments):
            training = isinstance(model, GpuModel)
            work = functools.partial(compute, model, *arguments)
            self.watched = [model.parameters.grad, model._loss] if training else []
            self.before = [array.copy() for array in self.watched]
            result = work()  # which other threads may be doing at the same time
            self.work, self.result = work, result
            return result

        return remembered

    def use(self):
        pass

    def synchronize(self):
        self.calls.append("waited")

    def record(self):
        return types.SimpleNamespace(synchronize=lambda: self.calls.append("copied"))

    def begin_capture(self):
        if self.refuses_capture:
            raise CudaError("operation not permitted when stream is capturing")
        self.calls.append("captured")

    def end_capture(self):
        if self.refuses_capture:
            raise CudaError("operation would result in a merge")
        for array, before in zip(self.watched, self.before, strict=True):
            array[...] = before
        work, result = self.work, self.result

        def launch():
            self.calls.append("launched")
            found = work()
            if result is not None:
                result[...] = found

        return types.SimpleNamespace(launch=launch)


@contextlib.contextmanager
def kernels_for(*array_types, find=find_kernel):
    """Have operations on arrays of some types look up their kernels."""
    try:
        for array_type in array_types:
            register_kernels(array_type, find)
        yield
    finally:
        for array_type in array_types:
            register_kernels(array_type, None)


@contextlib.contextmanager
def no_kernels():
    """Inside a test whose NumPy arrays take kernels, do without them for a while."""
    for array_type in (np.ndarray, DeviceArray):
        register_kernels(array_type, None)
    yield
    for array_type in (np.ndarray, DeviceArray):
        register_kernels(array_type, find_kernel)
