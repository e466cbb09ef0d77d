"""The script for Slurm, with stand-ins for Slurm's programs."""

import os
import re
import shutil
import signal
import subprocess
import sys

import pytest

from support.scripts import LONG_RUN, ROOT, write_random_text

SRUN = """#!/bin/sh
echo $$ >srun.pid
exec mpiexec -n 2 $(echo "$@" | sed 's/--mpi=pmi2 --cpus-per-task=1//')
"""


def write_tool(path, text):
    path.write_text(text)
    path.chmod(0o755)


def lines_until(process, pattern):
    """Read the output until a line has `pattern`; return the lines."""
    lines = []
    for line in process.stdout:
        lines.append(line)
        if re.search(pattern, line):
            return lines
    raise AssertionError(f"no {pattern} in:\n{''.join(lines)}")


@pytest.mark.stress
def test_the_script_for_slurm_queues_the_job_again(tmp_path):
    """Stand-ins for Slurm's programs: one machine, two ranks."""
    if not shutil.which("mpiexec", path=os.path.dirname(sys.executable)):
        pytest.skip("needs mpi4py and an MPI")
    write_tool(tmp_path / "scontrol", '#!/bin/sh\necho "$@" >>requeued\n')
    write_tool(tmp_path / "squeue", "#!/bin/sh\ncat state\n")
    write_tool(tmp_path / "srun", SRUN)
    (tmp_path / "state").write_text("RUNNING\n")
    flags = [*write_random_text(tmp_path), *LONG_RUN, "--steps", "400"]
    slurm = {"SLURM_CPUS_PER_TASK": "1", "SLURM_JOB_ID": "77"}
    # `python` and `mpiexec` of this environment come first, then these programs.
    path = [str(tmp_path), os.path.dirname(sys.executable), os.environ["PATH"]]
    slurm |= {"HYDRA_RMK": "user", "HYDRA_LAUNCHER": "fork"}
    slurm |= {"PYTHONPATH": str(ROOT), "PATH": os.pathsep.join(path)}
    environ = {**os.environ, **slurm}
    command = [str(ROOT / "examples" / "slurm.sh"), "run", *flags]
    options = {"cwd": tmp_path, "stdout": subprocess.PIPE, "text": True}
    options |= {"stderr": subprocess.STDOUT, "env": environ}
    (tmp_path / "train.py").symlink_to(ROOT / "train.py")
    with subprocess.Popen(command, **options) as process:
        lines_until(process, r"^step ")
        step = int((tmp_path / "srun.pid").read_text())
        os.kill(step, signal.SIGTERM)  # the time is nearly over
        lines_until(process, "^stopped     and saved")
    assert process.returncode == 128 + signal.SIGTERM
    assert (tmp_path / "requeued").read_text() == "requeue 77\n"
    with subprocess.Popen(command, **options) as process:
        lines_until(process, "^resumed     after step")
        lines_until(process, "^done")
    assert process.returncode == 0
    assert (tmp_path / "requeued").read_text() == "requeue 77\n"
