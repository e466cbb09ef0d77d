"""Several ranks compute what one computes, and all end if one of them dies."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import types
from dataclasses import replace
from pathlib import Path

import pytest

import train
from minitransformer.backends.devices import connect_ranks
from minitransformer.backends.onednn import bfloat16
from minitransformer.runs import checkpoint
from minitransformer.runs.run_directory import RunDirectory
from minitransformer.training import distributed
from minitransformer.training.lifecycle import TrainingRun
from support.in_process import run_main
from support.ranks import mpiexec, needs_mpi, run_ranks
from support.runs import SETTINGS, assert_same_results, steps
from support.scripts import TRAIN, is_running, with_tests_on_path, write_random_text

SMALL = (
    "--encoder-layers 1 --decoder-layers 1 --d-model 16 --d-ff 16 --num-heads 2 "
    "--vocab-size 60 --max-tokens 150 --warmup 10 --threads 1 --validate-every 10 "
    "--validate-bleu 5 --save-every 10 --log-every 5 --average 1 --dropout 0"
).split()
SLOW = ["--log-every", "1", "--save-every", "5", "--validate-every", "100000"]


@pytest.mark.parametrize(
    ("bound", "expected"),
    [
        ([range(8)] * 3, [2, 2, 2]),  # all ranks may use all cores
        ([range(4), range(4, 8)], [4, 4]),  # each has its own
        ([(0,), (0,)], [1, 1]),
        ([range(4), "other machine"], [4, 4]),
    ],
)
def test_a_rank_takes_its_share_of_the_cores(monkeypatch, bound, expected):
    here = threading.local()  # a rank is a thread in this test
    monkeypatch.setattr(distributed, "cores", lambda: here.cores)
    monkeypatch.setattr(distributed, "num_cores", lambda: len(here.cores))
    monkeypatch.setattr(distributed.platform, "node", lambda: here.machine)

    def work(ranks):
        mine = bound[ranks.rank]
        here.machine = "other" if mine == "other machine" else "this"
        here.cores = set(range(4) if mine == "other machine" else mine)
        return ranks.num_cores()

    assert run_ranks(len(bound), work) == expected


def test_ranks_that_differ_are_named():
    def work(ranks):
        ranks.assert_equal({"size": 1, "colour": "red"})
        mine = {"size": 1, "colour": "red" if ranks.rank in (0, 3) else "blue"}
        told = (
            'the same colour, got "red" on rank 0, "blue" on rank 1, "blue" on rank 2$'
        )
        with pytest.raises(RuntimeError, match=told):
            ranks.assert_equal(mine)

    run_ranks(4, work)


@pytest.mark.parametrize(
    ("state", "precision", "told"),
    [
        ({"text": {"val": "0f"}}, "fp32", 'digest of the validation text, got .*"0f"'),
        ({"text": {"test": "1e"}}, "fp32", "digest of the test text, got null on rank"),
        ({"step": 20}, "fp32", "step of the checkpoint, got 0 on rank 0, 20 on rank 1"),
        ({}, "bf16", 'precision, got "fp32" on rank 0, "bf16" on rank 1'),
    ],
)
def test_ranks_that_would_train_otherwise_are_told_why(
    tmp_path, model_path, state, precision, told
):
    """One has other text, another checkpoint or another kind of device."""
    start = checkpoint.load(Path(model_path))
    settings = replace(SETTINGS, model=start.model.config)

    def work(ranks):
        changes = state if ranks.rank else {}
        mine = replace(start, state=replace(start.state, **changes))
        directory = RunDirectory(tmp_path)
        run = TrainingRun(directory, settings, ranks, mine, cores=1)
        with pytest.raises(RuntimeError, match=f"expected all ranks .* same {told}"):
            run.check_ranks(precision if ranks.rank else "fp32")

    run_ranks(2, work)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    odd = 61  # for two ranks
    return write_random_text(tmp_path_factory.mktemp("text"), validation=odd)


ENVIRON = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}


def train_by_ranks(*flags):
    """Train with two ranks; return what they print."""
    command = [*TRAIN, *map(str, flags), "--ranks=2"]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRON)
    assert done.returncode == 0, done.stderr
    return done.stdout


BY_FOUR = r"""
from minitransformer.backends.devices import connect_ranks
from support.closeness import assert_close
from support.models import gradient_of, small_batch

ranks = connect_ranks("cpu")
each = range(ranks.size)
assert ranks.size == 4
assert ranks.all_gather(b"\x00x" * ranks.rank) == [b"\x00x" * rank for rank in each]
exact = 2.0**40 * ranks.size + sum(each)  # more digits than a float32 has
assert ranks.all_reduce_numbers([2.0**40 + ranks.rank]) == [exact]
batches = [small_batch(0, 9)]
for mine, expected in zip(gradient_of(batches, ranks=ranks), gradient_of(batches)):
    assert_close(mine, expected)
"""


@needs_mpi
def test_four_ranks_agree_with_one_in_float64():
    # Open MPI starts no more ranks than there are cores, unless told to.
    more = {"PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}
    command = [mpiexec(), "-n", "4", sys.executable, "-c", BY_FOUR]
    subprocess.run(command, check=True, env=with_tests_on_path() | more)


# What an update consists of, in as many ways as there are settings for it.
MODES = {
    "accumulate": {"accumulate": 3, "clip_norm": 0.2, "label_smoothing": 0.3},
    "model": {
        "relu_dropout": 0.2,
        "attention_dropout": 0.4,
        "decay": 5,
        "positions": "learned",
        "attention_window": 4,
        "d_k": 5,
        "d_v": 3,
    },
    "bf16": {"precision": "bf16", "clip_norm": 0.1, "accumulate": 2},
    "chosen": {"clip_norm": 0.3, "best_by": "bleu", "patience": 2},
}


@needs_mpi
@pytest.mark.parametrize("mode", MODES)
def test_two_ranks_compute_the_bits_of_two_processes(place, data, mode):
    """Both divide a batch into two parts, and a sum of two numbers has no order.

    What one process computes is compared with NumPy in test_train_reference.py, and
    what two compute with that in test_parallel.py.
    """
    if mode == "bf16":
        try:
            bfloat16.open_kernels()
        except RuntimeError as error:
            pytest.skip(str(error))
    (place / "own.json").write_text(json.dumps(MODES[mode]))
    more = "--encoder-layers 2 --decoder-layers 2 --validate-every 4 --save-every 4 "
    more += "--dropout 0.2 --average 3 --steps 9 --config own.json"
    flags = *data, *SMALL, *more.split()
    out = train_by_ranks(*flags, "--run", "ranks")
    assert re.search(PROCESSES + ", each cpu, 1 worker", out, re.MULTILINE)
    processes = "--run", "processes", "--threads", 2
    assert run_main(train.main, *flags, *processes)[0] == 0
    assert_same_results("ranks", "processes")
    assert len(steps("ranks")) > 1


PROCESSES = r"^device      2 ranks \(processes (\d+), (\d+)\)"


def start(data):
    """Start two ranks and wait until they have saved something to resume from."""
    flags = *data, *SMALL, *SLOW, "--steps", "100000", "--run", "run", "--ranks=2"
    process = subprocess.Popen(
        [*TRAIN, *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRON,
    )
    for line in process.stdout:
        if device := re.match(PROCESSES, line):
            ranks = [*map(int, device.groups())]
        if line.startswith("step") and int(line.split()[1].partition("/")[0]) >= 8:
            break
    return process, ranks


def all_end(processes):
    """Whether none of some processes runs 5 s from now; their parents may be slow."""
    deadline = time.monotonic() + 5
    while any(map(is_running, processes)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(is_running, processes))


@pytest.mark.slow
@needs_mpi
def test_a_killed_rank_ends_all_and_the_run_goes_on_bit_for_bit(place, data):
    process, ranks = start(data)
    os.kill(ranks[1], signal.SIGKILL)
    out, error = process.communicate(timeout=30)
    assert process.returncode
    # The launcher names a process: the killed rank, or one that it ended after it.
    assert any(str(rank) in out + error for rank in ranks)
    assert all_end(ranks)
    last = "--steps", steps("run")[-1] + 6
    train_by_ranks("--resume", "run", *last)
    train_by_ranks(*data, *SMALL, *SLOW, *last, "--run", "whole")
    assert_same_results("run", "whole")


@needs_mpi
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_launcher_saves_once_and_stops_all(place, data, number):
    process, ranks = start(data)
    process.send_signal(number)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 128 + number
    assert out.count("stopped     and saved") == 1
    assert all_end(ranks)
    code, *_ = run_main(train.main, "--resume", "run", "--steps", 9)
    assert code == 0  # nothing is left to do


@needs_mpi
def test_ranks_with_other_settings_are_refused(place, data):
    rank = [*TRAIN, *data, *SMALL, "--steps", "5", "--run", "run"]
    two = ["-n", "1", *rank, "--seed", "1", ":", "-n", "1", *rank, "--seed", "2"]
    done = subprocess.run([mpiexec(), *two], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    expected = "expected all ranks to have the same seed, got 1 on rank 0, 2 on rank 1"
    assert expected in done.stderr
    assert not (place / "run" / "config.json").exists()


def find_mpi(monkeypatch, environ, connected):
    """Look for an MPI that connects so many ranks; return what was found, and it."""
    world = types.SimpleNamespace(Get_size=lambda: connected)
    mpi = types.SimpleNamespace(COMM_WORLD=world)
    monkeypatch.setattr(distributed, "import_extra", lambda *args: mpi)
    return distributed.find_mpi(environ), mpi


@pytest.mark.parametrize(
    ("environ", "size"),
    [
        ({}, None),
        ({"PMI_RANK": "0", "PMI_SIZE": "1", "SLURM_STEP_NUM_TASKS": "4"}, None),
        ({"PMI_SIZE": "4", "SLURM_STEP_NUM_TASKS": "2"}, 4),  # mpiexec in a job
        ({"OMPI_COMM_WORLD_SIZE": "3"}, 3),
        ({"SLURM_STEP_NUM_TASKS": "2", "PMIX_RANK": "0"}, 2),
    ],
)
def test_launchers_say_how_many_ranks_there_are(monkeypatch, environ, size):
    found, mpi = find_mpi(monkeypatch, environ, size)
    assert found is (mpi if size else None)


@pytest.mark.parametrize(
    "environ",
    [
        {"OMPI_COMM_WORLD_SIZE": "4"},  # mpi4py belongs to MPICH
        {"SLURM_STEP_NUM_TASKS": "4"},  # srun without --mpi
        {"WORLD_SIZE": "4"},  # torchrun
    ],
)
def test_ranks_that_no_mpi_connects_are_refused(monkeypatch, environ):
    with pytest.raises(RuntimeError, match="started 4 ranks, but mpi4py connects 1"):
        find_mpi(monkeypatch, environ, 1)


def test_without_mpi_one_line_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", None)
    for name, value in {"PMI_RANK": "0", "PMI_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    for device in ("cpu", "cuda"):
        with pytest.raises(RuntimeError, match=r"need mpi4py and an MPI: pip install"):
            connect_ranks(device)
    monkeypatch.setattr(shutil, "which", lambda *args, **options: None)
    with pytest.raises(RuntimeError, match=r"pip install 'minitransformer\[mpi\]'"):
        distributed.find_mpiexec()
