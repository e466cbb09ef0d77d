"""Ranks on two machines, for which two network namespaces of this one stand."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from importlib.util import find_spec

import pytest
from safetensors.numpy import load_file

from support.scripts import LONG_RUN, ROOT, write_random_text

FAKE_SSH = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift; done
machine=$1
shift
exec ip netns exec "$machine" unshare --uts sh -c "hostname $machine; exec $*"
"""
SRUN = """#!/bin/sh
echo $$ >srun.pid
exec mpiexec -n 2 $(echo "$@" | sed 's/--mpi=pmi2 --cpus-per-task=1//')
"""
TOOLS = "ip", "unshare", "mpiexec"


def ip(*arguments):
    done = subprocess.run(["ip", *arguments], check=True, capture_output=True)
    return done.stdout


def environment(folder, **more):
    """`python` and `mpiexec` of this environment come first, then tools of `folder`."""
    path = [str(folder), os.path.dirname(sys.executable), os.environ["PATH"]]
    # Processes of one kernel would share memory: only TCP goes through the namespaces.
    only_tcp = {"UCX_TLS": "tcp,self", "FI_PROVIDER": "tcp", "PYTHONPATH": str(ROOT)}
    return {**os.environ, **only_tcp, "PATH": os.pathsep.join(path), **more}


def write_tool(path, text):
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def machines(tmp_path):
    """The names of two machines with a cable between them."""
    path = environment(tmp_path)["PATH"]
    missing = [tool for tool in TOOLS if not shutil.which(tool, path=path)]
    if missing or os.geteuid() or find_spec("mpi4py") is None:
        pytest.skip(f"needs root, mpi4py, {', '.join(missing or TOOLS)}")
    version = subprocess.run(
        [shutil.which("mpiexec", path=path), "--version"], capture_output=True
    )
    if b"HYDRA" not in version.stdout:
        pytest.skip("needs the mpiexec of MPICH")
    write_tool(tmp_path / "fake_ssh", FAKE_SSH)
    names = [f"mt{os.getpid()}{letter}" for letter in "ab"]
    try:
        for name in names:
            ip("netns", "add", name)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces: {error.stderr.decode()}")
    one, two = names
    ip("link", "add", "cable", "netns", one, "type", "veth",
       "peer", "name", "cable", "netns", two)  # fmt: skip
    try:
        for number, name in enumerate(names, start=1):
            ip("-n", name, "addr", "add", f"10.213.7.{number}/24", "dev", "cable")
            for device in ("lo", "cable"):
                ip("-n", name, "link", "set", device, "up")
        while b"state UP" not in ip("-n", two, "link", "show", "cable"):
            time.sleep(0.1)  # the carrier comes a moment later
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "pids", name], capture_output=True)
            ip("netns", "del", name)


def launcher(folder, names):
    """Return MPI's command for two ranks, one on each machine."""
    hosts = folder / "hosts"
    hosts.write_text("".join(f"{name}\n" for name in names))
    ssh = f"-launcher ssh -launcher-exec {folder / 'fake_ssh'} -f {hosts}"
    return f"mpiexec -iface cable {ssh} -n 2"


def lines_until(process, pattern):
    """Read the output until a line has `pattern`; return the lines."""
    lines = []
    for line in process.stdout:
        lines.append(line)
        if re.search(pattern, line):
            return lines
    raise AssertionError(f"no {pattern} in:\n{''.join(lines)}")


@pytest.mark.stress
def test_two_machines_train_through_the_cable(tmp_path, machines):
    flags = [*write_random_text(tmp_path), *LONG_RUN, "--steps", "50", "--run", "run"]
    command = [*launcher(tmp_path, machines).split(), "python", str(ROOT / "train.py")]
    with subprocess.Popen(
        ["ip", "netns", "exec", machines[0], *command, *flags],
        cwd=tmp_path,
        env=environment(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        lines_until(process, r"^done")
    counter = "/sys/class/net/cable/statistics/rx_bytes"
    found = subprocess.run(
        ["ip", "netns", "exec", machines[0], "cat", counter], capture_output=True
    )
    tensors = load_file(tmp_path / "run" / "best.safetensors").items()
    parameters = sum(tensor.size for name, tensor in tensors if name != "tokenizer")
    assert int(found.stdout) > 0.9 * 50 * 4 * parameters  # a gradient for each step


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
    environ = environment(tmp_path, **slurm, HYDRA_RMK="user", HYDRA_LAUNCHER="fork")
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
