"""The scripts on GPUs that are none: what a first user of `--device cuda` does."""

import json
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import train
from minitransformer.api import load
from minitransformer.backends.cuda.training import GpuModel
from minitransformer.settings.decoding_config import DecodingConfig
from support.in_process import run_main, run_translate
from support.ranks import mpiexec, needs_mpi
from support.scripts import SHORT, SMALL_RUN, with_tests_on_path, write_random_text
from support.serving import running

pytestmark = pytest.mark.slow  # seconds each on kernels of the host

LINES = ["the cat number 7 sat on the mat", "", "and looked"]


def both(*flags):
    """The output with a processor and with a GPU, in float32."""
    results = [
        run_translate(*flags, "--device", *device)
        for device in (["cpu"], ["cuda", "--precision", "fp32"])
    ]
    assert [code for code, _, _ in results] == [0, 0], results
    return [out for _, out, _ in results]


def test_a_gpu_translates_and_scores_as_the_processor(stand_in, model_path, tmp_path):
    model = "--model", model_path
    flags = *model, "--beam", "3", "--nbest", "2", *SHORT, *LINES
    plain, found = both(*flags)
    assert len(found.splitlines()) == 5
    assert re.sub(r"-?\d+\.\d+", "", found) == re.sub(r"-?\d+\.\d+", "", plain)
    targets = tmp_path / "targets"
    targets.write_text("the mat\nlooked\ncat\n")
    plain, found = both(*model, "--score", str(targets), *LINES)
    numbers = [np.array(x.split(), float) for x in (plain, found)]
    np.testing.assert_allclose(*numbers, atol=1e-3)
    # The bfloat16 of a first user, who asks for no precision.
    code, out, err = run_translate("--device", "cuda", *flags)
    assert (code, len(out.splitlines())) == (0, 5), err


def test_attention_is_drawn_in_bfloat16(stand_in, model_path, tmp_path):
    page = tmp_path / "heads.html"
    flags = "--model", model_path, "--attention", page, *SHORT, "the cat sat"
    code, _, err = run_translate(*map(str, flags), "--device", "cuda")
    assert code == 0, err
    [data] = re.findall(r'\{"source".*?\}', page.read_text())
    weights = np.array(json.loads(data)["cross"]) / 1000
    np.testing.assert_allclose(weights.sum(axis=-1), 1, atol=0.02)


def test_a_server_keeps_to_the_gpu_of_its_model(stand_in, model_path):
    """The queue has a thread of its own, and CUDA gives that the first GPU."""
    # A machine with a GPU may have no libraries of a server.
    serve = pytest.importorskip("minitransformer.commands.serve")
    libretranslate = pytest.importorskip("minitransformer.commands.libretranslate")
    translator = load(model_path, device="cuda:1")
    translator.decoding = DecodingConfig(max_len_b=3)
    direction = libretranslate.Direction.of(translator, Path(model_path))
    with running(serve.Server([direction])) as server:
        for path in ("/translate", "/attention", "/translate"):
            body = json.dumps({"q": "the cat sat", "source": "auto", "target": "auto"})
            headers = {"Content-Type": "application/json"}
            address = server.address.rstrip("/") + path
            asked = urllib.request.Request(address, body.encode(), headers)
            urllib.request.urlopen(asked, timeout=60).read()  # raises if it is refused


def gpu_run(folder, *flags):
    data = write_random_text(folder, validation=5)
    small = "--steps 4 --log-every 2 --save-every 4 --validate-every 4".split()
    shape = "--max-tokens 60 --validate-bleu 2 --beam 1 --average 1".split()
    return [*data, *SMALL_RUN, *small, *shape, "--device", "cuda", *flags]


def test_a_first_training_ends_with_translations(stand_in, tmp_path, monkeypatch):
    """In bfloat16 with graphs; then it is resumed on another GPU."""
    monkeypatch.chdir(tmp_path)
    code, out, err = run_main(train.main, *gpu_run(tmp_path), "--run", "run")
    assert code == 0, err
    assert "device      cuda, bf16" in out
    assert stand_in.calls.count("launched") >= 1
    assert "kernel by kernel" not in out
    code, _, err = run_main(
        train.main, "--resume", "run", "--steps", 5, "--device", "cuda:1"
    )
    assert code == 0, err


@pytest.fixture
def run(stand_in, tmp_path, monkeypatch):
    """Run train.py on a small text, where `--device cuda` is the stand-in's."""
    monkeypatch.chdir(tmp_path)
    new = gpu_run(tmp_path, "--dropout", 0)

    def start(flags, code=0):
        given = [] if "--resume" in flags else new
        assert train.main([str(flag) for flag in (*given, *flags.split())]) == code

    return start


def losses(path):
    lines = map(json.loads, (path / "metrics.jsonl").read_text().splitlines())
    kinds = "loss", "validation_loss"
    return [line[k] for line in lines for k in kinds if k in line]


def test_a_run_goes_from_gpu_to_cpu_and_back(run, tmp_path):
    """Its files are portable, and of float32."""
    run("--run mixed --steps 4 --device cuda --precision fp16")
    run("--run whole --device cpu")
    mixed = losses(tmp_path / "mixed")
    assert mixed == pytest.approx(losses(tmp_path / "whole"), rel=5e-3)
    path = tmp_path / "mixed" / "step-00000004.safetensors"
    types = {tensor.dtype.name for tensor in load_file(path).values()}
    assert types == {"float32", "uint8"}
    run("--resume mixed --steps 6 --threads 1 --precision fp32")
    assert losses(tmp_path / "mixed")[-1] < mixed[0]
    by_validation = "--average-by validation --average 1"
    run(f"--resume mixed --steps 8 --device cuda --precision fp16 {by_validation}")
    log = (tmp_path / "mixed" / "train.log").read_text()
    assert f"average 1   validation loss {losses(tmp_path / 'mixed')[-1]:.4f}" in log
    assert "device      cuda, fp16" in log
    assert "loss scale 65,536, 0 skipped" in log


def poisoned(monkeypatch, step):
    """Make the gradient of one step infinite."""
    forward_backward = GpuModel.forward_backward

    def infinite(self, batches, label_smoothing, key):
        loss = forward_backward(self, batches, label_smoothing, key)
        if key[1:] == (step,):
            self.parameters.grad[3] = np.inf
        return loss

    monkeypatch.setattr(GpuModel, "forward_backward", infinite)


def test_on_a_gpu_an_infinite_gradient_stops_the_run_at_the_report(
    run, tmp_path, monkeypatch, capsys
):
    poisoned(monkeypatch, 3)
    run("--run run --steps 8 --device cuda --save-every 1", code=1)
    [line] = capsys.readouterr().err.splitlines()
    assert "step 3, epoch" in line  # where it is saved, and so looked at
    assert "losses and gradients, got 1 not finite (the last: in" in line
    tensors = load_file(sorted((tmp_path / "run").glob("step-*"))[-1])
    assert all(np.isfinite(tensor).all() for tensor in tensors.values())


def test_an_infinite_gradient_halves_the_scale_and_resuming_is_exact(
    run, tmp_path, monkeypatch
):
    poisoned(monkeypatch, 1)
    poisoned(monkeypatch, 3)
    run("--run scaled --steps 4 --device cuda --precision fp16")
    log = (tmp_path / "scaled" / "train.log").read_text()
    assert "loss scale 16,384, 2 skipped" in log
    assert "finite" not in log.partition("memory")[2]
    flags = "--device cuda --precision fp16 --dropout 0.3 --validate-bleu 0 --steps"
    run(f"--run unbroken {flags} 4")
    run(f"--run broken {flags} 2")
    run("--resume broken --device cuda --threads 1 --steps 4")
    ends = [
        load_file(tmp_path / name / "step-00000004.safetensors")
        for name in ("unbroken", "broken")
    ]
    for name, tensor in ends[0].items():
        np.testing.assert_array_equal(tensor, ends[1][name])


RANK = """
import shutil, sys
from pathlib import Path
import pytest
from support import host_device, strict_cupy

compiler = shutil.which("g++") or shutil.which("clang++")
libraries = host_device.build(compiler, Path(sys.argv[1]))
strict_cupy.install(pytest.MonkeyPatch(), libraries)
strict_cupy.install_nccl(pytest.MonkeyPatch())
{more}
import train
sys.exit(train.main(sys.argv[2:]))
"""


def run_two_gpus(libraries, *flags, more=""):
    """Two ranks, each with the stand-in; `more` is done there before the training."""
    kernels = Path(next(iter(libraries.values()))._name).parents[1]
    command = [mpiexec(), "-n", 2, sys.executable, "-c", RANK.format(more=more)]
    return subprocess.run(
        [str(x) for x in (*command, kernels, *flags)],
        env=with_tests_on_path(),
        capture_output=True,
        text=True,
        timeout=120,
    )


@needs_mpi
def test_two_gpus_train_as_one(stand_in, host_libraries, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = gpu_run(tmp_path, "--dropout", 0, "--precision", "fp32")
    assert run_main(train.main, *flags, "--run", "one")[0] == 0
    done = run_two_gpus(host_libraries, *flags, "--run", "two", "--gpus", 2)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    found = [
        load_file(tmp_path / name / "step-00000004.safetensors")
        for name in ("one", "two")
    ]
    for name, tensor in found[0].items():
        if tensor.dtype == np.float32:
            np.testing.assert_allclose(tensor, found[1][name], rtol=1e-3, atol=1e-5)


SPOILED = """
from minitransformer.backends.cuda import nccl

broadcast = nccl.NcclCommunicator.broadcast

def spoiled(self, array):
    broadcast(self, array)
    if self.rank:
        array[5] = 9.0

nccl.NcclCommunicator.broadcast = spoiled
strict_cupy.GpuState.largest_copy = 1 << 14
"""


@needs_mpi
def test_ranks_whose_parameters_differ_end_at_a_report(
    host_libraries, tmp_path, monkeypatch
):
    """The checksum of the parameters is computed where they are."""
    monkeypatch.chdir(tmp_path)
    flags = *gpu_run(tmp_path, "--run", "run"), "--save-every", 100
    done = run_two_gpus(host_libraries, *flags, "--precision", "fp32", more=SPOILED)
    assert done.returncode != 0
    assert "expected all ranks to have the same parameters" in done.stderr
