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
    command, pipe = [sys.executable, "-c", code], subprocess.PIPE
    environment = with_tests_on_path()
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment) as process:
        assert process.stdout.readline() == b"held\n"
        yield process
