"""Both scripts and the locks where everything that Windows lacks is taken away.

`support/windows/sitecustomize.py` takes it away. This cannot show that the package runs
on Windows, only that it needs nothing that is missing there.
"""

import os
import signal
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import load_file

import train
import translate
from support.in_process import run_main
from support.scripts import LONG_RUN, ROOT, SHORT, SMALL_RUN, TRAIN, write_random_text

pytestmark = pytest.mark.skipif(
    not os.path.isdir("/proc/self/fd"), reason="the stand-in for Windows needs /proc"
)

PATH = (ROOT / "tests/support/windows", ROOT, ROOT / "tests")
ENVIRON = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, PATH))}

EVERYTHING = """
import importlib, os, pkgutil, sys
import minitransformer, train, translate
assert sys.modules["fcntl"] is None and not hasattr(os, "fork")
for module in pkgutil.walk_packages(minitransformer.__path__, "minitransformer."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
flags, short = sys.argv[1].split(), sys.argv[2].split()
assert train.main([*flags, "--steps", "10", "--run", "run"]) == 0
assert train.main(["--resume", "run", "--steps", "20"]) == 0
for _ in range(2):  # the second replaces the first
    assert translate.main([*short, "--model", "run", "--output", "out", "one dog"]) == 0
sys.exit(translate.main([*short, "--model", "run"]))
"""


def windows(script, *arguments, **options):
    command = [sys.executable, "-W", "error", "-c", script, *map(str, arguments)]
    return subprocess.run(command, env=ENVIRON, capture_output=True, **options)


def test_training_and_translation_have_the_same_results(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = [*write_random_text(tmp_path), *SMALL_RUN, "--keep-last", "2"]
    lines = b"red cat\nblue dog\nhouse\n"
    (tmp_path / "in").write_bytes(lines)
    names = " ".join(flags), " ".join(SHORT)
    done = windows(EVERYTHING, *names, input=lines, cwd=tmp_path)
    assert done.returncode == 0, done.stderr.decode()
    assert not list(tmp_path.glob("**/*.partial"))
    here = tmp_path / "here"
    assert run_main(train.main, *flags, "--steps", "20", "--run", here)[0] == 0
    for name in ("step-00000020", "averaged", "best"):
        ours, theirs = (load_file(f"{run}/{name}.safetensors") for run in ("run", here))
        assert ours.keys() == theirs.keys()
        for tensor, values in theirs.items():
            np.testing.assert_array_equal(ours[tensor], values)
    of_file = run_main(translate.main, *SHORT, "--model", here, "--input", "in")[1]
    assert done.stdout.endswith(of_file.encode())
    assert of_file.count("\n") == 3
    one = run_main(translate.main, *SHORT, "--model", here, "one dog")[1]
    assert (tmp_path / "out").read_bytes() == one.encode()


LOCKS = """
import os, subprocess, sys
from pathlib import Path
from minitransformer.files import atomic_write, file_lock, sweep
folder, old = Path(sys.argv[1]), Path(sys.argv[1], "old")

def refused(path):
    try:
        with file_lock(path, wait=False, create=True):
            return False
    except TimeoutError:
        return True

if len(sys.argv) > 2:
    sys.exit(not all(map(refused, (folder, folder / "lock"))))
with file_lock(folder, wait=False), file_lock(folder / "lock", False, create=True):
    assert refused(folder) and refused(folder / "lock")
    subprocess.run([sys.executable, __file__, folder, "other"], check=True)
assert not refused(folder) and not refused(folder / "lock")
assert sorted(os.listdir(folder.parent)) == [folder.name]  # no lock is left beside it
with atomic_write(old) as file:
    (folder / ".old.0123456789abcdef.partial").write_bytes(b"of a process that died")
    sweep(folder, ".*partial")  # deletes that one, and cannot delete what is open
    file.write(b"new")
assert old.read_bytes() == b"new"
os.symlink(old, folder / "link")
try:
    file_lock(folder / "link", wait=False).__enter__()
except OSError as error:
    assert "symbolic link" in str(error)
"""


def test_locks_keep_others_out_and_leave_nothing(tmp_path):
    folder, script = tmp_path / "parent" / "folder", tmp_path / "script.py"
    folder.mkdir(parents=True)
    script.write_text(LOCKS)
    command = [sys.executable, str(script), str(folder)]
    done = subprocess.run(command, env=ENVIRON, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert sorted(os.listdir(folder)) == ["link", "lock", "old"]


def test_an_old_file_that_is_read_is_waited_for(tmp_path):
    script = (
        "import sys, threading; from pathlib import Path\n"
        "from minitransformer.files import write_bytes\n"
        "path = Path(sys.argv[1]); path.write_bytes(b'old')\n"
        "reader = open(path, 'rb')\n"
        "threading.Timer(0.3, reader.close).start(); write_bytes(path, b'new')\n"
        "assert reader.closed and path.read_bytes() == b'new'"
    )
    assert windows(script, tmp_path / "a").returncode == 0


def test_a_launcher_passes_on_a_break_and_refuses_ranks(tmp_path):
    command = [*TRAIN, *write_random_text(tmp_path), *LONG_RUN, "--run", "run"]
    options = {"cwd": tmp_path, "env": ENVIRON, "text": True}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    flags = ["--restarts", "1", "--steps", "100000"]
    with subprocess.Popen([*command, *flags], **options, **pipes) as launcher:
        for line in launcher.stdout:
            if line.startswith("step"):
                break
        launcher.send_signal(signal.SIGUSR2)  # which stands for Ctrl-Break
        out, error = launcher.communicate(timeout=60)
    assert launcher.returncode == 128 + signal.SIGUSR2, error
    assert "stopped     and saved" in out
    done = subprocess.run([*command[:-1], "two", "--ranks", "2"], **options, **pipes)
    assert done.returncode == 1
    assert "--ranks: expected Linux or macOS, got Windows" in done.stderr
    assert not (tmp_path / "two").exists()
