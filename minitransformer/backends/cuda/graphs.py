"""CUDA graphs: how work is recorded, and the memory that they use."""

from __future__ import annotations

import contextlib
from types import ModuleType
from typing import Any

# The driver's number of an error, cudaErrorMemoryAllocation, which CuPy does not name.
OUT_OF_MEMORY = 2


class Recording:
    """Records what is launched on a stream as CUDA graphs, without running it.

    with Recording(stream) as recording:
        work()
    for graph in recording.graphs:
        graph.launch()

    Raises: errors of the driver, of cuBLAS and of CuPy, where they cannot be recorded
    """

    def __init__(self, stream: Any) -> None:
        self.graphs: list[Any] = []
        self._stream = stream

    def __enter__(self) -> Recording:
        self._stream.begin_capture()
        return self

    def cut(self) -> None:
        """End a graph, and begin the next."""
        self.graphs.append(self._stream.end_capture())
        self._stream.begin_capture()

    def __exit__(self, error: type | None, *_: object) -> None:
        if error is None:
            self.graphs.append(self._stream.end_capture())
            return
        with contextlib.suppress(Exception):  # only a consequence of the first error
            self._stream.end_capture()  # the stream must be usable again


def graph_memory(xp: ModuleType) -> Any:
    """Return a memory pool for CUDA graphs, which use its blocks at fixed addresses.

    A pool of CuPy frees its unused blocks when the driver has no memory left. This one
    keeps them, and frees those of the default pool instead.
    """

    def allocate(size: int) -> Any:
        for last_try in (False, True):
            try:
                return xp.cuda.MemoryPointer(xp.cuda.Memory(size), 0)
            except xp.cuda.runtime.CUDARuntimeError as error:
                # A faulty kernel is often noticed here only, by another error.
                if error.status != OUT_OF_MEMORY:
                    raise
                if last_try:
                    raise MemoryError(str(error)) from error
            xp.get_default_memory_pool().free_all_blocks()
        raise AssertionError

    class Pool(xp.cuda.MemoryPool):  # type: ignore[name-defined]
        """Frees its blocks once nothing uses it, which CuPy's own pool does not."""

        def __del__(self) -> None:
            with contextlib.suppress(Exception), xp.cuda.Device(index):
                self.free_all_blocks()

    index = xp.cuda.runtime.getDevice()
    pool = Pool(allocate)
    pool.set_limit(size=0)  # no limit, whatever CUPY_GPU_MEMORY_LIMIT says
    return pool
