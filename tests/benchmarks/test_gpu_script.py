"""benchmarks/gpu.sh gives every stage its turn, whatever fails or hangs."""

import gzip
import os
import shutil
import subprocess
import time

import pytest

from support.scripts import ROOT

pytestmark = pytest.mark.skipif(
    shutil.which("timeout") is None, reason="needs bash and timeout of GNU"
)

STAGES = ["env", "tests", "train", "speed", "translate", "profile", "compiled"]

# In place of Python: one stage fails, one hangs, one hangs and will not end, and one
# leaves a process behind. Kernels that were compiled are a file in CuPy's cache.
PYTHON = """#!/usr/bin/env bash
[[ $* = *check_device* ]] || echo "python $*" | cut -c 1-100
[ ! -d "$CUPY_CACHE_DIR" ] || touch "$CUPY_CACHE_DIR/$(basename "$0")"
case $* in
  *"-m pytest"*) exec sleep 60 ;;
  *train.py*) mkdir -p "$WORK/run"; echo "step 1 loss 7" | tee "$WORK/run/train.log" ;;
  *"sides compiled"*) trap "" INT; for i in {1..60}; do sleep 1; done ;;
  *translate.py*) exit 3 ;;
  *profile_step.py*) sleep 60 & echo "left $!"; exit 0 ;;
  *check_device*) [ -z "${NO_GPU:-}" ] || { echo "no GPU was found" >&2; exit 1; } ;;
esac
"""


@pytest.fixture
def gpu_sh(tmp_path):
    """Run a copy of the script with stubs; return its code, output and seconds."""
    for name in ("benchmarks", ".gpu/text", "bin"):
        (tmp_path / name).mkdir(parents=True)
    shutil.copy(ROOT / "benchmarks" / "gpu.sh", tmp_path / "benchmarks")
    for name in ("python", "nvidia-smi"):
        (tmp_path / "bin" / name).write_text(PYTHON)
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / ".gpu/flags").write_text("--vocab-size 99\n")
    for name in ("test.en.gz", "test.de.gz"):
        (tmp_path / ".gpu/text" / name).write_bytes(gzip.compress(b"a line\n"))
    environ = {k: v for k, v in os.environ.items() if k not in ("STAGES", "SOURCE")}
    environ |= {"PYTHON": str(tmp_path / "bin/python"), "WORK": str(tmp_path / "work")}
    environ |= {"OUT": str(tmp_path / "out"), "LIMIT": "1", "GRACE": "1"}
    environ["PATH"] = f"{tmp_path}/bin:{environ['PATH']}"

    def start(*arguments, **settings):
        began = time.monotonic()
        done = subprocess.run(
            ["bash", "benchmarks/gpu.sh", *arguments],
            cwd=tmp_path,
            env=environ | settings,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=60,
        )
        return done.returncode, done.stdout, time.monotonic() - began

    return start


def codes(output):
    """What the script says of each stage that ended."""
    lines = [line.split() for line in output.splitlines() if line.startswith("== ")]
    return {line[1].strip(":"): int(line[3]) for line in lines if line[2] == "code"}


def test_every_stage_has_its_turn(gpu_sh, tmp_path):
    code, output, seconds = gpu_sh()
    assert code == 1
    assert codes(output) == {
        "env": 0,
        "tests": 124,  # of `timeout`, after the first signal
        "train": 0,
        "speed": 0,
        "translate": 3,
        "profile": 0,
        "compiled": 137,  # after the second
    }
    assert output.splitlines()[-1] == "== failed: tests translate compiled"
    assert seconds < 15
    found = {path.name: path.stat().st_size for path in (tmp_path / "out").iterdir()}
    expected = {"log.txt", "train.log", "speed.json", "compiled.json"}
    assert found.keys() == expected | {"kernel_cache.tgz"}
    log = (tmp_path / "out/log.txt").read_text()
    assert "step 1 loss 7" in log
    assert "--vocab-size 99 --run" not in output  # lines are cut at 200 characters
    left = int(log.split("left ")[1].split()[0])
    with pytest.raises(ProcessLookupError):
        os.kill(left, 0)


def test_without_a_gpu_it_ends_in_one_line(gpu_sh, tmp_path):
    code, output, _ = gpu_sh(NO_GPU="1")
    assert (code, output) == (1, "no GPU was found\n")
    assert not (tmp_path / "out").exists()


def test_the_deadline_bounds_all_stages(gpu_sh):
    code, output, seconds = gpu_sh("tests", "compiled", "env", DEADLINE="4")
    assert code == 1
    assert codes(output)["tests"] == 124
    assert "== env: no time is left" in output
    assert seconds < 6
