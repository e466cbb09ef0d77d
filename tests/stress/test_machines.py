"""Ranks on two machines, for which two network namespaces of this one stand.

One machine is cut off from the other: the ranks end and name what was lost, and the
script goes on when the machine is there again.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from importlib.util import find_spec

import numpy as np
import pytest
from safetensors.numpy import load_file

from support.scripts import LONG_RUN, ROOT, write_random_text

FAKE_SSH = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift; done
machine=$1
shift
exec ip netns exec "$machine" unshare --uts sh -c "hostname $machine; exec $*"
"""
PEER_TIMEOUT = 4  # seconds
TOOLS = "ip", "unshare", "mpiexec"


def ip(*arguments):
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


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


FLAGS = ["--steps", "200", "--log-every", "1", "--peer-timeout", str(PEER_TIMEOUT)]


def start(folder, names, environ, *flags):
    script = [str(ROOT / "examples" / "mpi.sh"), launcher(folder, names), *flags]
    return subprocess.Popen(
        ["ip", "netns", "exec", names[0], *script],
        cwd=folder,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def final(run):
    return load_file(run / "step-00000200.safetensors")


@pytest.mark.stress
def test_a_machine_that_is_cut_off_is_named_and_the_run_goes_on(tmp_path, machines):
    flags = [*write_random_text(tmp_path), *LONG_RUN, *FLAGS]
    environ = environment(tmp_path, PAUSE="1", RESTARTS="1")
    with start(tmp_path, machines, environ, "--run", "run", *flags) as process:
        seen = lines_until(process, r"^step +12 ")
        assert any("device      2 ranks, cpu, 1 worker each" in line for line in seen)
        ip("-n", machines[1], "link", "set", "cable", "down")
        cut = time.monotonic()
        lost = f"rank 0: expected an answer from rank 1 on {machines[1]}, got none for"
        lines_until(process, lost)
        assert time.monotonic() - cut < 2 * PEER_TIMEOUT + 2
        ip("-n", machines[1], "link", "set", "cable", "up")
        seen = lines_until(process, r"^done")
        assert any("restart 1 of 1" in line for line in seen)
        assert any(line.startswith("resumed     after step") for line in seen)
    assert process.returncode == 0
    with start(tmp_path, machines, environ, "--run", "whole", *flags) as unbroken:
        lines_until(unbroken, r"^done")
    ours, theirs = (final(tmp_path / run) for run in ("run", "whole"))
    for name, tensor in theirs.items():
        np.testing.assert_array_equal(ours[name], tensor)


@pytest.mark.stress
def test_the_data_goes_through_the_cable(tmp_path, machines):
    """Else the test above would not test what it says."""
    flags = [*write_random_text(tmp_path), *LONG_RUN, "--steps", "50", "--run", "run"]
    with start(tmp_path, machines, environment(tmp_path), *flags) as process:
        lines_until(process, r"^done")
    counter = "/sys/class/net/cable/statistics/rx_bytes"
    found = subprocess.run(
        ["ip", "netns", "exec", machines[0], "cat", counter], capture_output=True
    )
    tensors = load_file(tmp_path / "run" / "best.safetensors").items()
    parameters = sum(tensor.size for name, tensor in tensors if name != "tokenizer")
    assert int(found.stdout) > 0.9 * 50 * 4 * parameters  # a gradient for each step


@pytest.mark.stress
def test_of_three_ranks_only_the_one_that_stalls_is_named(tmp_path, machines):
    flags = [*write_random_text(tmp_path), *LONG_RUN, *FLAGS, "--steps", "100000"]
    three = f"{launcher(tmp_path, machines)[:-1]}3"
    command = [*three.split(), sys.executable, str(ROOT / "train.py"), "--run", "run"]
    with subprocess.Popen(
        ["ip", "netns", "exec", machines[0], *command, *flags],
        cwd=tmp_path,
        env=environment(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        lines_until(process, r"^step +12 ")
        ranks = json.loads((tmp_path / "run" / ".processes").read_text())
        os.kill(ranks[2], signal.SIGSTOP)
        [line] = lines_until(process, "expected an answer from")[-1:]
        assert line.count(" on ") == 1
        assert f"rank 2 on {machines[0]}, got none for" in line
        os.kill(ranks[2], signal.SIGKILL)


@pytest.mark.stress
def test_the_script_for_slurm_queues_the_job_again(tmp_path):
    """Stand-ins for `scontrol` and `squeue`: one machine, two ranks."""
    if not shutil.which("mpiexec", path=os.path.dirname(sys.executable)):
        pytest.skip("needs mpi4py and an MPI")
    write_tool(tmp_path / "scontrol", '#!/bin/sh\necho "$@" >>requeued\n')
    write_tool(tmp_path / "squeue", "#!/bin/sh\ncat state\n")
    (tmp_path / "state").write_text("RUNNING\n")
    flags = [*write_random_text(tmp_path), *LONG_RUN, "--run", "run", "--steps", "400"]
    slurm = {"SLURM_NTASKS": "2", "SLURM_CPUS_PER_TASK": "1", "SLURM_JOB_ID": "77"}
    environ = environment(tmp_path, **slurm, HYDRA_RMK="user", HYDRA_LAUNCHER="fork")
    command = [str(ROOT / "examples" / "slurm.sh"), *flags]
    options = {"cwd": tmp_path, "stdout": subprocess.PIPE, "text": True}
    options["stderr"] = subprocess.STDOUT
    train = ROOT / "train.py"
    (tmp_path / "train.py").symlink_to(train)
    with subprocess.Popen(command, env=environ, **options) as process:
        lines_until(process, r"^step ")
        process.send_signal(signal.SIGTERM)  # the time is nearly over
        lines_until(process, "^stopped     and saved")
    assert process.returncode == 128 + signal.SIGTERM
    assert (tmp_path / "requeued").read_text() == "requeue 77\n"
    again = {**environ, "SLURM_RESTART_COUNT": "1"}
    with subprocess.Popen(command, env=again, **options) as process:
        lines_until(process, "^resumed     after step")
        lines_until(process, "^done")
    assert process.returncode == 0
    assert (tmp_path / "requeued").read_text() == "requeue 77\n"
