"""The processor and its memory, on machines that differ from this one, too."""

import os
from pathlib import Path

import pytest

from minitransformer.system import machine


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


@pytest.mark.parametrize(
    ("maker", "flags", "fast"),
    [
        ("AuthenticAMD", "avx2 avx512f avx512_bf16", True),
        ("AuthenticAMD", "avx2 avx512f", False),
        ("GenuineIntel", "avx512_bf16 amx_bf16", True),
        ("GenuineIntel", "avx512_bf16", False),
        ("", "", False),
    ],
)
def test_bf16_is_fast_on_the_processors_of_the_table(tmp_path, maker, flags, fast):
    """The table is that of docs/flags.md."""
    file = tmp_path / "cpuinfo"
    if maker:
        file.write_text(f"vendor_id\t: {maker}\nflags\t\t: fpu {flags}\n")
    assert machine.multiplies_bf16_fast(file) == fast
