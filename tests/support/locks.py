"""Locks that another process holds."""

import subprocess
import sys
from contextlib import contextmanager

from support.scripts import with_tests_on_path


@contextmanager
def held_elsewhere(lock):
    """Hold `lock`, an expression, in another process; yield that process.

    It ends when its standard input is closed.
    """
    code = f"""
import sys
from pathlib import Path
from minitransformer.runs.run_directory import RunDirectory
from minitransformer.system.files import file_lock

with {lock}:
    print("held", flush=True)
    sys.stdin.read()
"""
    command, pipes = [sys.executable, "-c", code], {"stdin": -1, "stdout": -1}
    with subprocess.Popen(command, env=with_tests_on_path(), **pipes) as process:
        assert process.stdout.readline() == b"held\n"
        yield process
