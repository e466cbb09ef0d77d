"""Memory that runs out: the k-th array that NumPy makes gets none."""

import ctypes
import shutil
import subprocess
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

SOURCE = Path(__file__).with_suffix(".c")
SET_HANDLER = 304  # PyDataMem_SetHandler's place in NumPy's table of C functions


def failing_allocator(folder):
    """Return a context `fails_at(k)` for this thread, which yields what counts."""
    compiler = shutil.which("cc") or shutil.which("gcc") or pytest.skip("no C compiler")
    path = folder / "allocator.so"
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(path), str(SOURCE)]
    subprocess.run(command, check=True)
    library, python = ctypes.CDLL(str(path)), ctypes.pythonapi
    count, failing = (
        ctypes.c_long.in_dll(library, name) for name in ("allocations", "fails_at")
    )
    new, pointer = python.PyCapsule_New, python.PyCapsule_GetPointer
    new.restype, pointer.restype = ctypes.py_object, ctypes.c_void_p
    new.argtypes = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p
    pointer.argtypes = ctypes.py_object, ctypes.c_char_p
    address = ctypes.addressof(ctypes.c_char.in_dll(library, "handler"))
    capsule = new(address, b"mem_handler", None)
    table = pointer(np._core._multiarray_umath._ARRAY_API, None)
    table = ctypes.cast(table, ctypes.POINTER(ctypes.c_void_p))
    set_handler = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.py_object)(
        table[SET_HANDLER]
    )

    @contextmanager
    def fails_at(k):
        count.value, failing.value = 0, k
        before = set_handler(capsule)
        try:
            yield lambda: count.value
        finally:
            set_handler(before)
            failing.value = 0

    return fails_at
