"""benchmarks/kernels.py: what NVIDIA's compiler says of the kernels."""

import shutil

import pytest

REPORT = """
ptxas info    : Compiling entry function 'scale' for 'sm_90'
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 20 registers, used 0 barriers
ptxas info    : Compiling entry function 'top_tokens' for 'sm_90'
    8 bytes stack frame, 16 bytes spill stores, 24 bytes spill loads
ptxas info    : Used 30 registers, used 1 barriers, 8516 bytes smem
"""


@pytest.fixture
def kernels(benchmark):
    pytest.importorskip("ml_dtypes", reason="no bfloat16 without ml_dtypes")
    return benchmark("kernels")


def test_spilled_registers_are_an_error(kernels, monkeypatch, capsys):
    resources = kernels.resources(REPORT)
    assert resources == {"scale": (20, 0, 0), "top_tokens": (30, 8516, 40)}
    compiled = kernels.Compiled("", resources)
    monkeypatch.setattr(kernels, "compile_kernels", lambda arch, kind: compiled)
    monkeypatch.setattr("sys.argv", ["kernels.py", "--type", "bf16"])
    assert kernels.main() == 1
    out, error = capsys.readouterr()
    assert out.splitlines()[-1].split() == ["top_tokens", "30", "8516", "40"]
    assert error == "kernels.py: error: 40 bytes are spilled\n"
    del resources["top_tokens"]
    assert kernels.main() == 0


@pytest.mark.slow
@pytest.mark.skipif(
    not (shutil.which("nvcc") and shutil.which("ptxas")), reason="no nvcc, ptxas"
)
def test_what_attention_takes_of_a_multiprocessor(kernels):
    """Of sm_90: 65,536 registers, and 1 KiB of shared memory more for each block."""
    compiled = kernels.compile_kernels("sm_90", "bf16+")
    taken = compiled.resources
    assert {name for name, used in taken.items() if used.spilled} == set()
    assert max(used.shared for used in taken.values()) <= 48 * 1024 - 1024
    for name, blocks in {"attention_64": 7, "attention_backward_64": 5}.items():
        assert blocks * 128 * taken[name].registers <= 65_536, name
        assert blocks * (taken[name].shared + 1024) <= 227 * 1024, name
