"""Several ranks compute what one computes, and end if one of them dies or stalls."""

import dataclasses
import importlib
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
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from minitransformer.devices import connect_ranks
from minitransformer.model.parameters import ParameterBuffer
from minitransformer.runs.run_directory import RunDirectory
from minitransformer.settings.config import RanksConfig
from minitransformer.settings.options import UsageError
from minitransformer.training import distributed, launch, slurm
from minitransformer.training.distributed import Communicator, GradientAllReduce
from minitransformer.training.parallel import ThreadedModel
from minitransformer.training.slurm import with_slurm
from support.closeness import assert_close
from support.models import small_batch, small_model
from support.ranks import run_ranks
from support.scripts import TRAIN, with_tests_on_path, write_random_text

SMALL = (
    "--encoder-layers 1 --decoder-layers 1 --d-model 16 --d-ff 16 --num-heads 2 "
    "--vocab-size 60 --max-tokens 150 --warmup 10 --threads 1 --validate-every 10 "
    "--validate-bleu 5 --save-every 10 --log-every 5 --average 1 --dropout 0"
).split()
SLOW = ["--log-every", "1", "--save-every", "5", "--validate-every", "100000"]


def mpiexec() -> str | None:
    if find_spec("mpi4py") is None:
        return None
    try:
        return launch.find_mpiexec()
    except RuntimeError:
        return None


needs_mpi = pytest.mark.skipif(
    mpiexec() is None, reason="needs mpi4py and an MPI: pip install '.[mpi]'"
)


def test_all_gather_returns_the_bytes_of_each_rank():
    sent = [b"", b"one", b"\x00two" * 1000]
    for found in run_ranks(3, lambda ranks: ranks.all_gather(sent[ranks.rank])):
        assert found == sent
    assert Communicator().all_gather(b"alone") == [b"alone"]


def test_sums_of_numbers_have_double_precision():
    found = run_ranks(2, lambda ranks: ranks.all_reduce_numbers([2.0**40 + ranks.rank]))
    assert found == [[2.0**41 + 1]] * 2


@pytest.mark.parametrize(
    ("bound", "expected"),
    [
        ([range(8)] * 3, [2, 2, 2]),  # all ranks may use all cores
        ([range(4), range(4, 8)], [4, 4]),  # each has its own
        ([(0, 1, 2, 3), (3, 4, 5)], [3, 2]),  # core 3 is shared
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
        with pytest.raises(RuntimeError, match=r"same colour.* differs .* on 1, 2$"):
            ranks.assert_equal(mine)

    run_ranks(4, work)


def gradient(ranks, batches, threads=1):
    net = small_model()
    parameters = ParameterBuffer(net)
    threaded = ThreadedModel(net, parameters, threads, communicator=ranks)
    for _ in range(2):  # the second starts from zero
        loss = threaded.forward_backward(batches, 0.1, (1, 1))
    threaded.close()
    return loss, parameters.grad.copy()


@pytest.mark.parametrize(("size", "threads"), [(2, 1), (3, 1), (5, 1), (2, 2)])
def test_ranks_do_not_change_the_gradient(size, threads, monkeypatch):
    monkeypatch.setattr(distributed, "BYTES_PER_BUCKET", 1000)
    batches = [
        small_batch(0, 7),
        small_batch(1, 2),
    ]  # fewer sentences than some have ranks
    loss, expected = gradient(Communicator(), batches)
    for other, found in run_ranks(size, lambda r: gradient(r, batches, threads)):
        assert_close(other, loss)
        assert_close(found, expected)


def test_gradient_buckets_start_in_one_order_and_cover_everything(monkeypatch):
    monkeypatch.setattr(distributed, "BYTES_PER_BUCKET", 600)
    parameters = ParameterBuffer(small_model())
    started = []

    class Recorder(Communicator):
        def start_all_reduce(self, array):
            started.append((array.ctypes.data - base) // 8)
            sizes.append(array.size)
            return lambda: None

    base, sizes = parameters.grad.ctypes.data, []
    gradients = GradientAllReduce(Recorder(), parameters)
    leaves = list(parameters.parameters.values())
    for leaf in (*leaves[::2], *leaves[1::2]):
        gradients.complete(leaf)
    assert len(started) > 3
    assert started == sorted(started, reverse=True)
    assert sum(sizes) == parameters.grad.size
    before = list(started)
    gradients.finish()
    assert started == before  # nothing was left to start
    for first in range(len(leaves) + 1):
        complete_from = sum(leaf.data.size for leaf in leaves[:first])
        ready = sum(start >= complete_from for start in started)
        assert gradients.num_ready(leaves[first:]) == ready
    gradients.complete(leaves[-1])
    gradients.finish()
    assert started == 2 * before


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, (0, 1, 0, 1, 0)),
        ({"PMI_RANK": "0", "PMI_SIZE": "1"}, (0, 1, 0, 1, 0)),
        ({"PMI_RANK": "3", "PMI_SIZE": "4"}, (3, 4, 3, 4, 1)),
        (
            {
                "PMI_RANK": "3",
                "PMI_SIZE": "4",
                "MPI_LOCALRANKID": "1",
                "MPI_LOCALNRANKS": "2",
            },
            (3, 4, 1, 2, 1),
        ),
        (
            {
                "OMPI_COMM_WORLD_RANK": "1",
                "OMPI_COMM_WORLD_SIZE": "2",
                "OMPI_COMM_WORLD_LOCAL_RANK": "0",
                "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
            },
            (1, 2, 0, 1, 1),
        ),
        ({"RANK": "0"}, (0, 1, 0, 1, 0)),  # which other programs set, too
        (  # srun --mpi=pmi2 with MPICH, ranks dealt out to two machines in turn
            {"PMI_RANK": "4", "PMI_SIZE": "6"}
            | {"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "3"},
            (4, 6, 2, 3, 1),
        ),
        (
            {
                "RANK": "9",
                "WORLD_SIZE": "16",
                "LOCAL_RANK": "1",
                "LOCAL_WORLD_SIZE": "8",
            },
            (9, 16, 1, 8, 0),
        ),
    ],
)
def test_ranks_are_read_from_the_environment_of_each_launcher(environ, expected):
    assert dataclasses.astuple(distributed.find_world(environ)) == expected


SLURM = {
    "SLURM_JOB_ID": "31234",
    "SLURM_STEP_ID": "1",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_STEP_NODELIST": "gpu[07-09,12],x",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
}


def test_a_task_of_slurm_finds_its_place_and_the_first_machine():
    found = with_slurm(SLURM)
    world = dataclasses.astuple(distributed.find_world(found))
    assert world == (5, 7, 1, 2, False)
    assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("gpu07", "21235")
    last = with_slurm(SLURM | {"SLURM_PROCID": "6", "SLURM_NODEID": "3"})
    assert last["LOCAL_WORLD_SIZE"] == "1"
    by_mpi = distributed.find_world(with_slurm(SLURM | {"PMIX_RANK": "5"}))
    assert by_mpi.by_mpi
    pmi2 = SLURM | {"PMI_RANK": "5", "PMI_SIZE": "7"}
    assert (
        dataclasses.astuple(distributed.find_world(with_slurm(pmi2)))[:4] == world[:4]
    )
    assert with_slurm(SLURM | {"MASTER_PORT": "9"})["MASTER_PORT"] == "9"
    torchrun = SLURM | {"RANK": "0"}
    assert with_slurm(torchrun) == torchrun
    job = {name: SLURM[name] for name in SLURM if "STEP" not in name}
    assert with_slurm(job) == job  # the job's script, which is no task
    with pytest.raises(RuntimeError, match=r"srun --mpi=pmi2.*got rank 5 of 7"):
        connect_ranks("cpu", RanksConfig(peer_timeout=1), SLURM)


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("n[1-3]", "n1"),
        ("rack[2-3]n[04,9]x,z", "rack2n04x"),
        ("a-b.c[010-012]", "a-b.c010"),
    ],
)
def test_the_first_machine_of_a_list(hosts, first):
    assert slurm.first_host(hosts) == first


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("SLURM_STEP_TASKS_PER_NODE", "2(x", "that srun sets, got .*=2\\(x"),
        ("SLURM_NODEID", "4", "that srun sets, got .*_NODEID=4"),
        ("SLURM_JOB_ID", "", "that srun sets, got SLURM_JOB_ID=,"),
        ("SLURM_LOCALID", None, "expected 'SLURM_LOCALID' from srun, found none"),
    ],
)
def test_variables_of_slurm_that_cannot_be_are_refused(name, value, message):
    environ = {k: v for k, v in (SLURM | {name: value}).items() if v is not None}
    with pytest.raises(ValueError, match=message):
        with_slurm(environ)
    environ.pop("SLURM_JOB_ID", None)
    with pytest.raises(ValueError, match=r"from srun|that srun sets"):
        with_slurm(environ)


@pytest.mark.parametrize(
    ("rank", "size"), [("4", "4"), ("-1", "4"), ("x", "4"), ("0", "0")]
)
def test_impossible_ranks_are_refused(rank, size):
    with pytest.raises(
        ValueError, match=f"RANK below WORLD_SIZE, got RANK={rank}, WORLD_SIZE={size}"
    ):
        distributed.find_world({"RANK": rank, "WORLD_SIZE": size})


def test_processors_need_mpi():
    with pytest.raises(RuntimeError, match="expected ranks started by MPI"):
        connect_ranks(
            "cpu", RanksConfig(peer_timeout=1), {"RANK": "1", "WORLD_SIZE": "2"}
        )


@pytest.mark.parametrize(("device", "got"), [("cpu", "--device cpu"), ("cuda", "one")])
def test_a_precision_of_sums_needs_several_gpus(device, got):
    with pytest.raises(UsageError, match=rf"expects several GPUs .*, got {got}$"):
        connect_ranks(device, RanksConfig(reduce_precision="bf16"), {})


def test_gpus_need_an_address(monkeypatch):
    with pytest.raises(RuntimeError, match="expected MASTER_ADDR"):
        connect_ranks(
            "cuda", RanksConfig(peer_timeout=1), {"RANK": "1", "WORLD_SIZE": "2"}
        )


def test_nccl_all_reduces_on_a_stream_of_its_own(monkeypatch):
    """What CuPy is asked to do, with arrays of NumPy in place of its own."""
    said = []
    answers = []  # of the driver, to whether the GPU has come to an event

    class Event:
        ptr = 7

    class Stream:
        def __init__(self, non_blocking=False):
            self.name = "sums" if non_blocking else "kernels"

        def record(self):
            said.append(f"record {self.name}")
            return Event()

        def wait_event(self, event):
            said.append(f"{self.name} waits")

    class Group:
        def all_reduce(self, source, out, op, stream):
            said.append(f"{op} on {stream.name}")
            out *= 2  # as if the other rank had the same

        def broadcast(self, array, root, stream):
            said.append(f"broadcast from {root} on {stream.name}")

        def stop(self):
            said.append("the store has ended")

    class OnDevice(np.ndarray):
        def get(self):
            return np.asarray(self)

    cupy = types.ModuleType("cupy")
    cupy.asarray = lambda *a, **k: np.array(*a, **k).view(OnDevice)
    cupy.cuda = types.SimpleNamespace(
        Stream=Stream,
        get_current_stream=Stream,
        is_available=lambda: True,
        runtime=types.SimpleNamespace(
            getDeviceCount=lambda: 2,
            eventQuery=lambda event: answers.pop(0),
            eventSynchronize=lambda event: said.append(f"waited for {event}"),
        ),
        Device=lambda number: types.SimpleNamespace(
            use=lambda: said.append(f"GPU {number}")
        ),
    )
    nccl = types.ModuleType("cupyx.distributed")
    nccl.init_process_group = lambda size, rank, **where: (
        said.append((size, rank, where)) or Group()
    )
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setitem(sys.modules, "cupyx.distributed", nccl)
    environ = launch.rank_environment(1, 2, 4000)
    ranks = connect_ranks("cuda", RanksConfig(peer_timeout=1), environ)
    assert ranks.device("cuda") == "cuda:1"
    where = {"host": "127.0.0.1", "port": 4000}
    assert said == ["GPU 1", (2, 1, where), "the store has ended"]
    said.clear()
    gradient = np.ones(3)
    ranks.start_all_reduce(gradient)()
    assert gradient.tolist() == [2, 2, 2]
    asked = ["record kernels", "sums waits", "sum on sums", "record sums"]
    assert said == [*asked, "kernels waits"]
    for last in (0, 700):  # an error of the driver ends the waiting, too
        said.clear()
        answers[:] = [600, 600, last]
        assert ranks.all_reduce_numbers([1.5, 2]) == [3, 4]
        assert not answers
        assert said == [*asked, "waited for 7"]
    cupy.cuda.runtime.eventQuery = lambda event: 600
    ranks.timeout = 0.01
    with pytest.raises(RuntimeError, match=r"the other ranks"):
        ranks.all_reduce_numbers([1.5])
    cupy.cuda.runtime.eventQuery = lambda event: 0
    assert ranks.all_gather(b"")[1] == b""
    said.clear()
    ranks.broadcast(gradient)
    assert said == ["broadcast from 0 on kernels"]
    under_mpi = {"PMI_RANK": "0", "PMI_SIZE": "2"}
    said.clear()
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", types.ModuleType("mpi4py.MPI"))
    connect_ranks("cuda", RanksConfig(peer_timeout=1), under_mpi)
    assert said == ["GPU 0", (2, 0, {"use_mpi": True}), "the store has ended"]
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", None)  # not installed
    with pytest.raises(RuntimeError, match=r"need mpi4py: pip install"):
        connect_ranks("cuda", RanksConfig(peer_timeout=1), under_mpi)


# What `import cupyx.distributed` does of all that CuPy 14.2 does there.
CUPYX_DISTRIBUTED = """
try:
    from mpi4py import MPI
except ImportError:
    MPI = None

class Group:
    def stop(self): pass

def init_process_group(size, rank, **where):
    assert MPI is None, "an MPI that nobody asked for"
    return Group()
"""


@pytest.mark.parametrize("mpi", ["raise RuntimeError('cannot load MPI library')", ""])
def test_nccl_needs_no_mpi_where_ranks_have_an_address(monkeypatch, tmp_path, mpi):
    """mpi4py is installed: without an MPI, or with one, which is not started."""
    for file, text in {
        "mpi4py/MPI": mpi,
        "cupyx/distributed": CUPYX_DISTRIBUTED,
    }.items():
        path = tmp_path / f"{file}.py"
        path.parent.mkdir()
        path.with_name("__init__.py").touch()
        path.write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("mpi4py", "mpi4py.MPI", "cupyx", "cupyx.distributed"):
        monkeypatch.setitem(sys.modules, name, None)  # to be restored after the test
        del sys.modules[name]
    cupy = types.SimpleNamespace(cuda=types.SimpleNamespace(Stream=lambda **_: None))
    module = importlib.import_module("minitransformer.cuda.nccl")
    monkeypatch.setattr(module, "select_gpu", lambda name: cupy)
    environ = launch.rank_environment(1, 2, 4000)
    connect_ranks("cuda", RanksConfig(), environ)
    assert "mpi4py.MPI" not in sys.modules
    if mpi:  # which ranks that MPI started do need
        under_mpi = {"PMI_RANK": "0", "PMI_SIZE": "2"}
        with pytest.raises(RuntimeError, match=r"install .*cannot load MPI library"):
            connect_ranks("cuda", RanksConfig(), under_mpi)


def test_waiting_for_other_ranks_times_out():
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=r"other ranks, got none for 0.2 s"):
        distributed.poll(lambda: False, 0.2)
    assert time.monotonic() - began < 2


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_random_text(
        tmp_path_factory.mktemp("text"), validation=21
    )  # odd, for two ranks


def train(folder, *flags, code=0):
    environ = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        [*TRAIN, *flags], cwd=folder, capture_output=True, text=True, env=environ
    )
    assert done.returncode == code, done.stderr
    return done


def records(run):
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


IN_FLOAT64 = """
import sys
import numpy as np
from minitransformer.devices import connect_ranks
from minitransformer.model.parameters import ParameterBuffer
from minitransformer.settings.config import RanksConfig
from minitransformer.training.distributed import checksum
from minitransformer.training.optimizer import Adam
from minitransformer.training.parallel import ThreadedModel
from minitransformer.training.slurm import with_slurm
from support.models import small_batch, small_model

ranks = connect_ranks("cpu", RanksConfig(peer_timeout=60))
net = small_model()
parameters = ParameterBuffer(net)
adam = Adam(parameters.data, 0.9, 0.98, 1e-9)
threaded = ThreadedModel(net, parameters, 1, communicator=ranks)
losses, first = [], None
for step in range(20):
    loss = threaded.forward_backward([small_batch(step, 9)], 0.1, (1, step))
    losses.append(loss)
    first = parameters.grad.copy() if first is None else first
    adam.update(parameters.grad, 1e-3)
ranks.assert_equal({"parameters": checksum(parameters.data)})
if ranks.rank == 0:
    np.savez(sys.argv[1], losses=losses, gradient=first, parameters=parameters.data)
threaded.close()
if sys.platform == "linux":  # no abort can leave shared memory behind
    ranks.all_reduce_numbers([0.0])  # all have come this far
    mapped = [x for x in open("/proc/self/maps") if "/dev/shm/mpich" in x]
    assert all("(deleted)" in line for line in mapped), mapped
"""


@needs_mpi
def test_one_two_and_four_ranks_agree_in_float64(tmp_path):
    found = {}
    environ = {
        **with_tests_on_path(),
        # Open MPI starts no more ranks than there are cores, unless told to.
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    }
    for size in (1, 2, 4):
        out = tmp_path / f"{size}.npz"
        command = [mpiexec(), "-n", str(size), sys.executable, "-c", IN_FLOAT64, out]
        subprocess.run(command, check=True, env=environ)
        found[size] = dict(np.load(out))
    for size in (2, 4):
        for name in ("losses", "gradient", "parameters"):
            np.testing.assert_allclose(
                found[size][name], found[1][name], rtol=1e-6, atol=1e-12
            )


@needs_mpi
def test_training_on_two_ranks_equals_training_on_one(tmp_path, data):
    train(tmp_path, *data, *SMALL, "--steps", "20", "--run", "one")
    done = train(tmp_path, *data, *SMALL, "--steps", "20", "--run", "two", "--ranks=2")
    assert "device      2 ranks, cpu, 1 worker each" in done.stdout
    one, two = records(tmp_path / "one"), records(tmp_path / "two")
    assert [sorted(line) for line in one] == [sorted(line) for line in two]
    names = ("loss", "gradient_norm", "validation_loss", "validation_bleu")
    for a, b in zip(one, two, strict=True):
        for name in {*names} & {*a}:
            assert b[name] == pytest.approx(a[name], rel=1e-5), (a["step"], name)
    ours, theirs = (
        load_file(tmp_path / run / "step-00000020.safetensors")
        for run in ("one", "two")
    )
    for name, tensor in ours.items():
        np.testing.assert_allclose(theirs[name], tensor, rtol=1e-3, atol=1e-5)


@needs_mpi
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_a_run_resumes_on_another_number_of_ranks(tmp_path, data, before, after):
    flags = (*data, *SMALL, "--run", "run")
    train(tmp_path, *flags, "--steps", "10", f"--ranks={before}")
    train(tmp_path, "--resume", "run", "--steps", "20", f"--ranks={after}")
    train(tmp_path, *data, *SMALL, "--steps", "20", "--run", "whole")
    ours, theirs = (records(tmp_path / run)[-1] for run in ("run", "whole"))
    assert ours["step"] == theirs["step"] == 20
    assert ours["validation_loss"] == pytest.approx(theirs["validation_loss"], rel=1e-5)


def start(folder, data, *flags):
    """Start two ranks and wait until they have saved something to resume from."""
    environ = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [*TRAIN, *data, *SMALL, *SLOW, "--run", "run", "--ranks=2", *flags],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environ,
    )
    for line in process.stdout:
        if line.startswith("step") and int(line.split()[1].replace(",", "")) >= 8:
            break
    ranks = RunDirectory(folder / "run").processes()
    return process, ranks


def all_end(processes):
    """Whether none of some processes runs 5 s from now; their parents may be slow."""
    deadline = time.monotonic() + 5
    left = set(processes)
    while left and time.monotonic() < deadline:
        for number in list(left):
            try:
                state = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2]
            except OSError:
                state = " Z"
            if state.split()[0] == "Z":
                left.remove(number)
        time.sleep(0.05)
    return not left


@needs_mpi
def test_a_killed_rank_is_named_and_the_run_goes_on_bit_for_bit(tmp_path, data):
    process, ranks = start(tmp_path, data, "--steps", "400")
    os.kill(ranks[1], signal.SIGKILL)
    killed = time.monotonic()
    out, error = process.communicate(timeout=30)
    assert time.monotonic() - killed < 30
    assert process.returncode == 1
    assert "train.py: error: rank 1 ended unexpectedly" in error
    assert "train.py --resume run continues from the last checkpoint" in out
    assert "Traceback" not in error
    assert all_end(ranks)
    train(tmp_path, "--resume", "run", "--ranks=2")
    flags = (*data, *SMALL, *SLOW, "--steps", "400", "--ranks=2")
    train(tmp_path, *flags, "--run", "whole")
    ours, theirs = (
        load_file(tmp_path / run / "step-00000400.safetensors")
        for run in ("run", "whole")
    )
    for name, tensor in theirs.items():
        np.testing.assert_array_equal(ours[name], tensor)


@needs_mpi
def test_a_run_restarts_by_itself(tmp_path, data):
    process, ranks = start(tmp_path, data, "--steps", "400", "--restarts", "1")
    os.kill(ranks[0], signal.SIGKILL)
    out, error = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "restart 1 of 1" in error
    assert "resumed     after step" in out
    assert (tmp_path / "run" / "step-00000400.safetensors").exists()


@needs_mpi
def test_a_signal_saves_once_and_stops_all(tmp_path, data):
    process, ranks = start(tmp_path, data, "--steps", "100000")
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM
    assert out.count("stopped     and saved") == 1
    assert all_end(ranks)
    train(tmp_path, "--resume", "run", "--steps", "9")  # nothing is left to do


@needs_mpi
def test_a_second_signal_ends_all_at_once(tmp_path, data):
    process, ranks = start(tmp_path, data, "--steps", "100000")
    os.kill(ranks[0], signal.SIGSTOP)  # so that the first has no effect
    process.send_signal(signal.SIGINT)
    time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM
    assert all_end(ranks)


@needs_mpi
def test_ranks_end_with_their_launcher(tmp_path, data):
    process, ranks = start(tmp_path, data, "--steps", "100000")
    process.kill()
    process.communicate(timeout=30)
    assert all_end(ranks)


@needs_mpi
def test_a_closed_output_ends_no_ranks(tmp_path, data):
    process, _ = start(tmp_path, data, "--steps", "60")
    process.stdout.close()
    with process.stderr:
        assert process.wait(timeout=60) == 0
    assert (tmp_path / "run" / "step-00000060.safetensors").exists()


@needs_mpi
def test_a_second_training_leaves_the_first_alone(tmp_path, data):
    process, _ = start(tmp_path, data, "--steps", "100000")
    done = train(tmp_path, "--resume", "run", "--ranks=2", "--restarts=1", code=1)
    assert "another training is running here" in done.stderr
    assert "restart" not in done.stderr
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=30)
    assert "stopped     and saved" in out


@needs_mpi
def test_ranks_with_other_settings_are_refused(tmp_path, data):
    rank = [*TRAIN, *data, *SMALL, "--steps", "5", "--run", "run"]
    two = ["-n", "1", *rank, "--seed", "1", ":", "-n", "1", *rank, "--seed", "2"]
    done = subprocess.run(
        [mpiexec(), *two], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    expected = "expected all ranks to have the same seed; it differs from rank 0's on 1"
    assert expected in done.stderr
    assert not (tmp_path / "run" / "config.json").exists()


# A rank that never connects: rank 1 ends as it is told, and rank 0 waits for ever.
NEVER_CONNECTED = """
import os, sys, time
if (os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"]) == "0":
    time.sleep(60)
code = int(sys.argv[1])
os.kill(os.getpid(), -code) if code < 0 else sys.exit(code)
"""


@needs_mpi
@pytest.mark.parametrize("code", [3, -launch.KILL, -signal.SIGTERM])
def test_a_rank_that_ends_before_it_connects_ends_all(tmp_path, code):
    command = [sys.executable, "-c", NEVER_CONNECTED, str(code)]
    began = time.monotonic()
    ranks = launch.MpiRanks(command, 2, tmp_path)
    assert ranks.wait([]) == code
    assert ranks.failed == "rank 1"
    assert time.monotonic() - began < 20
    assert all_end(int(path.read_text()) for path in tmp_path.glob("*.pid"))


@pytest.mark.parametrize(
    ("code", "starts", "expected"),
    [
        (0, 1, 0),
        (1, 3, 1),
        (-launch.KILL, 3, 1),
        (2, 1, 2),
        (launch.LASTING_ERROR, 1, 1),
        (128 + signal.SIGTERM, 1, 128 + signal.SIGTERM),
    ],
)
def test_only_what_may_pass_is_tried_again(tmp_path, code, starts, expected):
    script = (
        "import os, sys\n"
        "open('starts', 'a').write('x')\n"
        f"os.kill(os.getpid(), -{code}) if {code} < 0 else sys.exit({code})\n"
    )
    command = ["env", "-C", str(tmp_path), sys.executable, "-c", script]
    run, restarts = RunDirectory(tmp_path / "run"), RanksConfig(restarts=2)
    assert launch.launch_training(command, run, False, restarts) == expected
    assert (tmp_path / "starts").read_text() == "x" * starts


def test_a_rank_gets_the_run_and_starts_no_others(tmp_path):
    script = (
        "import sys\n"
        "open(sys.argv[1], 'a').write(' '.join(sys.argv[2:]) + '\\n')\n"
        "sys.exit(1)\n"
    )
    flags = [str(tmp_path / "said"), "--restarts", "1"]
    command = [sys.executable, "-c", script, *flags]
    run, restarts = RunDirectory(tmp_path / "run"), RanksConfig(restarts=1)
    for resumes in (False, True):
        assert launch.launch_training(command, run, resumes, restarts) == 1
    alone = "--ranks 1 --gpus 1 --restarts 0"
    assert (tmp_path / "said").read_text().splitlines() == [
        f"--restarts 1 {place} {run.path} --attempt {attempt} {alone}"
        for place in ("--run", "--resume")
        for attempt in (0, 1)
    ]


def test_a_rank_on_a_gpu_that_fails_ends_the_others(tmp_path):
    script = (
        "import os, sys, time\n"
        "rank, size = (os.environ[x] for x in ('LOCAL_RANK', 'WORLD_SIZE'))\n"
        "assert os.environ['RANK'] == rank and size == '3'\n"
        "time.sleep(60) if rank != '1' else sys.exit(3)\n"
    )
    began = time.monotonic()
    ranks = launch.SeparateRanks([sys.executable, "-c", script], 3)
    assert ranks.wait([]) == 3
    assert ranks.failed == "rank 1"
    codes = [process.poll() for process in ranks._processes]
    assert codes == [-signal.SIGTERM, 3, -signal.SIGTERM]
    assert time.monotonic() - began < 50


def test_a_terminal_that_closes_may_say_so_twice(tmp_path):
    """The rank has the time to save."""
    script = (
        "import os, signal, sys, time\n"
        "def stop(*_):\n"
        "    signal.signal(signal.SIGTERM, signal.SIG_DFL)\n"
        "    os.kill(os.getppid(), signal.SIGHUP)\n"
        "    time.sleep(1)\n"
        "    open(sys.argv[1], 'w').write('saved')\n"
        "    os._exit(143)\n"
        "signal.signal(signal.SIGTERM, stop)\n"
        "os.kill(os.getppid(), signal.SIGHUP)\n"
        "time.sleep(60)\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "said")]
    run = RunDirectory(tmp_path / "run")
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup has it ignored
    try:
        code = launch.launch_training(command, run, False, RanksConfig())
    finally:
        signal.signal(signal.SIGHUP, before)
    assert code == 128 + signal.SIGHUP
    assert (tmp_path / "said").read_text() == "saved"


@pytest.mark.parametrize(
    ("code", "expected"), [(0, 0), (3, 3), (-signal.SIGTERM, 128 + signal.SIGTERM)]
)
def test_a_rank_under_mpi_notes_how_it_ended(tmp_path, monkeypatch, code, expected):
    monkeypatch.setenv("PMI_RANK", "1")
    script = f"import os; os.kill(os.getpid(), -{code}) if {code} < 0 else exit({code})"
    command = [sys.executable, "-c", script]
    assert launch.run_rank(tmp_path, os.getpid(), command) == expected
    assert (tmp_path / "1.code").read_text() == str(code)
    assert all_end([int((tmp_path / "1.pid").read_text())])


def test_a_rank_under_mpi_ends_when_its_launcher_is_gone(tmp_path, monkeypatch):
    monkeypatch.setenv("PMI_RANK", "0")
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        gone.wait()
    waiting = [sys.executable, "-c", "import time; time.sleep(60)"]
    assert launch.run_rank(tmp_path, gone.pid, waiting) == 128 + signal.SIGKILL


def test_the_mpi_beside_this_python_is_preferred(tmp_path, monkeypatch):
    for path in ("here/mpirun", "elsewhere/mpiexec"):
        (tmp_path / path).parent.mkdir()
        (tmp_path / path).touch()
        (tmp_path / path).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "elsewhere"))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "here" / "python"))
    assert launch.find_mpiexec() == str(tmp_path / "here" / "mpirun")
    (tmp_path / "here" / "mpirun").unlink()
    assert launch.find_mpiexec() == str(tmp_path / "elsewhere" / "mpiexec")


def test_a_hangup_that_is_ignored_stays_so(monkeypatch):
    received = []
    old = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with launch.stop_signals_handled(received.append):
            os.kill(os.getpid(), signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGTERM)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, old)
    assert received == [signal.SIGTERM]


def test_an_mpi_other_than_the_launchers_is_refused(monkeypatch):
    alone = types.SimpleNamespace(Get_rank=lambda: 0, Get_size=lambda: 1)
    mpi = types.SimpleNamespace(COMM_WORLD=alone)
    monkeypatch.setattr(distributed, "import_extra", lambda *args: mpi)
    environ = {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4"}
    with pytest.raises(RuntimeError, match="rank 2 of 4, but mpi4py is rank 0 of 1"):
        connect_ranks("cpu", RanksConfig(peer_timeout=1), environ)


def test_a_rank_that_never_answered_is_named_without_its_machine(monkeypatch):
    def never(*arguments):
        return types.SimpleNamespace(Test=lambda: False)

    comm = types.SimpleNamespace(
        Get_rank=lambda: 0,
        Get_size=lambda: 2,
        Iallreduce=never,
        Isend=never,
        Irecv=never,
    )
    mpi = types.SimpleNamespace(
        COMM_WORLD=comm, IN_PLACE=None, Get_processor_name=lambda: "here"
    )
    monkeypatch.setattr(distributed, "import_extra", lambda *args: mpi)
    environ = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}
    with pytest.raises(RuntimeError, match="rank 1 on an unknown machine"):
        connect_ranks("cpu", RanksConfig(peer_timeout=0.2), environ)


@needs_mpi
def test_a_stalled_rank_is_reported(tmp_path, data):
    flags = ("--steps", "100000", "--peer-timeout", "2")
    process, ranks = start(tmp_path, data, *flags)
    os.kill(ranks[1], signal.SIGSTOP)
    _, error = process.communicate(timeout=30)
    assert process.returncode == 1
    assert re.search(r"rank 0: expected an answer from rank 1 on \S+, got none", error)
    assert all_end(ranks)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--ranks", "2", "--device", "cuda"], "--ranks starts processes on CPUs"),
        (["--gpus", "2"], "--gpus expects --device cuda"),
        (["--ranks", "2", "--profile"], "--profile and --dry-run run in one process"),
        (["--ranks", "0"], "argument --ranks: expected at least 1, got 0"),
        (["--restarts", "-1"], "argument --restarts: expected at least 0, got -1"),
        (["--peer-timeout", "0"], "argument --peer-timeout: expected above 0"),
    ],
)
def test_flags_that_do_not_go_together(tmp_path, flags, message):
    done = train(tmp_path, *flags, code=2)
    assert message in done.stderr


@pytest.mark.skipif(find_spec("cupy") is not None, reason="needs a place without CuPy")
def test_without_cupy_one_line_says_how_to_install_it(tmp_path):
    done = train(tmp_path, "--device", "cuda", "--gpus", "2", code=1)
    [line] = done.stderr.splitlines()
    assert "device cuda needs CuPy: pip install" in line


def test_without_mpi_the_error_says_how_to_install_it(tmp_path, data, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda *args, **options: None)
    with pytest.raises(RuntimeError, match=r"pip install 'minitransformer\[mpi\]'"):
        launch.find_mpiexec()
