"""benchmarks/kernels.py, and what it says of attention's kernels."""

import shutil

import pytest

SASS = """
        /*0000*/                   S2R R0, SR_TID.X ;                /* 0x1 */
        /*0010*/                   LDC R1, c[0x0][0x210] ;           /* 0x2 */
        /*0020*/                   ISETP.GE.AND P0, PT, R0, 0x2, PT ;
        /*0030*/              @!P0 BRA 0x50 ;
        /*0040*/                   IMAD.MOV.U32 R1, RZ, RZ, 0x1 ;
        /*0050*/                   VIADD R1, R1, 0xffffffff ;
        /*0060*/                   LDG.E R2, desc[UR4][R4.64] ;
        /*0070*/                   ISETP.GT.AND P1, PT, R1, RZ, PT ;
        /*0080*/               @P1 BRA 0x50 ;
        /*0090*/               @P2 EXIT ;
        /*00a0*/                   EXIT ;
"""


@pytest.fixture
def kernels(benchmark):
    pytest.importorskip("ml_dtypes", reason="no bfloat16 without ml_dtypes")
    return benchmark("kernels")


def test_a_warp_runs_what_any_of_its_threads_runs(kernels, monkeypatch, tmp_path):
    """Threads 0 and 1 loop five times, while the others take the other branch."""
    sass = kernels.sass
    text = SASS.replace("@P2", "@!PT")

    def run(*_, **__):
        return type("Done", (), {"stdout": text})

    monkeypatch.setattr(sass.subprocess, "run", run)
    code = sass.disassemble(tmp_path, "kernel")
    counts = sass.Thread(code, {0x210: 5}, 1).run()
    assert (counts[0x40], counts[0x50], counts[0xA0]) == (0, 5, 1)
    assert sass.Thread(code, {0x210: 5}, 2).run()[0x50] == 1
    assert sass.count_instructions(code, {0x210: 5}, 64) == (27 + 11) / 2
    text = SASS
    code = sass.disassemble(tmp_path, "kernel")
    with pytest.raises(ValueError, match="a branch on data at 0x90"):
        sass.count_instructions(code, {0x210: 5}, 32)


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
    if not compiled.instructions:
        pytest.skip("no cuobjdump")
    forward = compiled.instructions["attention_64"]
    backward = compiled.instructions["attention_backward_64"]
    assert forward[12] < forward[28] <= 800
    assert backward[12] < backward[28] <= 1400
