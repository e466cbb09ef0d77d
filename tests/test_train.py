"""train.py as a user runs it, in a process of its own.

What needs none is in test_train_flags.py and test_train_in_process.py.
"""

import os
import subprocess

import pytest

from support.scripts import SMALL_RUN, TRAIN, write_random_text


@pytest.mark.skipif(os.name != "posix", reason="needs a shell")
@pytest.mark.parametrize("output", ["| head -n 1", "2> /dev/full >&2", ">&- 2>&-"])
def test_a_closed_or_broken_output_ends_no_training(tmp_path, output):
    flags = (
        *write_random_text(tmp_path),
        *SMALL_RUN,
        *"--steps 10 --threads 1 --run run".split(),
    )
    script = f'"$@" {output}; exit "${{PIPESTATUS[0]}}"'
    command = ["bash", "-c", script, "bash", *TRAIN, *flags]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "done" in (tmp_path / "run" / "train.log").read_text()
    assert (tmp_path / "run" / "step-00000010.safetensors").exists()
