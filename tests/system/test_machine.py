"""The processor and its memory, on machines that differ from this one, too."""

import ctypes
import os
import sys
import types
from pathlib import Path

import pytest

from minitransformer.system import machine


def fake_libc(monkeypatch, result):
    """Put a C library in place whose mallopt records its arguments."""
    calls = []

    def mallopt(name, value):
        calls.append((name, value))
        return result(name, value)

    def load(name):
        assert name == "libc.so.6"
        return types.SimpleNamespace(mallopt=mallopt)

    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(ctypes, "CDLL", load)
    return calls


def test_glibc_is_asked_to_keep_its_memory_in_one_heap(monkeypatch):
    calls = fake_libc(monkeypatch, lambda name, value: 1)
    assert machine.tune_allocator() is True
    # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD and M_ARENA_MAX of malloc.h
    assert dict(calls) == {-3: 2**30, -1: 2**31 - 1, -8: 1}


def test_an_older_glibc_maps_only_large_arrays(monkeypatch):
    """It refuses thresholds above 32 MiB (HEAP_MAX_SIZE / 2 in its malloc.c)."""
    calls = fake_libc(monkeypatch, lambda name, x: int(name != -3 or x <= 32 << 20))
    assert machine.tune_allocator() is True
    assert dict(calls) == {-3: 32 << 20, -1: 2**31 - 1, -8: 1}


def test_other_systems_are_left_as_they_are(monkeypatch):
    calls = fake_libc(monkeypatch, lambda name, value: 1)
    monkeypatch.setattr(sys, "platform", "darwin")
    assert machine.tune_allocator() is False
    assert not calls


@pytest.mark.parametrize(
    ("text", "expected"),
    [("max 100000", 8), ("150000 100000", 2), ("9900000 100000", 8), ("", 8)],
)
def test_a_container_may_ration_cores(monkeypatch, text, expected):
    monkeypatch.setattr(machine, "cores", lambda: set(range(8)))

    def read_text(path, encoding):
        assert (str(path), encoding) == ("/sys/fs/cgroup/cpu.max", "ascii")
        return text

    monkeypatch.setattr(machine.Path, "read_text", read_text)
    assert machine.num_cores() == expected


def test_cores_are_those_that_the_process_may_use(monkeypatch):
    monkeypatch.setattr(machine, "Path", lambda name: Path(os.devnull))  # no quota
    own = {0: {0, 3, 5}}
    monkeypatch.setattr(os, "sched_getaffinity", own.__getitem__, raising=False)
    assert machine.cores() == {0, 3, 5}
    assert machine.num_cores() == 3
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 7)
    assert machine.num_cores() == 7
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert machine.num_cores() == 1
