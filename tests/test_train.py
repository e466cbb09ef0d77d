"""train.py as a user runs it: what it writes, resuming, and what it refuses."""

import io
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from errno import ENOSPC
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import load_file

import train as train_script
from minitransformer.runs import checkpoint
from minitransformer.training import launch
from support.ranks import run_ranks
from support.scripts import ROOT, SMALL_RUN, TIMINGS, TRAIN, WORDS


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    rng = np.random.default_rng(0)
    for split, count in (("train", 300), ("val", 20), ("test", 20)):
        lines = [" ".join(rng.choice(WORDS, rng.integers(2, 9))) for _ in range(count)]
        (folder / f"{split}.en").write_text("\n".join(lines) + "\n")
        reverse = [" ".join(line.split()[::-1]) for line in lines]
        (folder / f"{split}.de").write_text("\n".join(reverse) + "\n")
    return folder


def train(cwd, *flags):
    return subprocess.run(
        [*TRAIN, *flags], cwd=cwd, capture_output=True, text=True, check=False
    )


def train_small(cwd, folder, run, *flags):
    data = ("--data", str(folder), "--source", "en", "--target", "de")
    result = train(cwd, *data, *SMALL_RUN, "--run", run, *flags)
    assert result.returncode == 0, result.stderr
    return result


def metrics(run):
    lines = [json.loads(x) for x in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in TIMINGS} for line in lines]


def weights(path):
    return {k: v.tobytes() for k, v in load_file(path).items()}


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory, folder):
    cwd = tmp_path_factory.mktemp("unbroken")
    result = train_small(cwd, folder, "run", "--steps", "40")
    return cwd / "run", result


def test_a_run_writes_what_it_promises(unbroken):
    run, result = unbroken
    names = {path.name for path in run.iterdir()}
    assert names >= {"config.json", "tokenizer.model", "metrics.jsonl", "train.log"}
    assert names >= {"best.safetensors", "averaged.safetensors"}
    steps = [f"step-{step:08d}.safetensors" for step in (10, 20, 30, 40)]
    assert sorted(n for n in names if n.startswith("step")) == steps
    assert (run / "train.log").read_text() == result.stdout
    for word in ("parameters", "padding", "GFLOP", "source +", "perplexity", "BLEU"):
        assert word in result.stdout
    lines = metrics(run)
    losses = [line["loss"] for line in lines if "loss" in line]
    assert len(losses) == 10
    assert losses[-1] < losses[0]
    assert {"validation_loss", "validation_accuracy", "validation_bleu"} <= {
        line for entry in lines for line in entry
    }


def test_killed_and_resumed_is_bit_identical(tmp_path, folder, unbroken):
    data = ("--data", str(folder), "--source", "en", "--target", "de")
    process = subprocess.Popen(
        [*TRAIN, *data, *SMALL_RUN, "--run", "run", "--steps", "40"],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    run = tmp_path / "run"
    deadline = time.monotonic() + 60
    while not (run / "step-00000020.safetensors").exists():
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    for path in run.glob("step-000000[34]0*"):  # if it got further before the kill
        path.unlink()
    result = train(tmp_path, "--resume", "run", "--threads", "2")
    assert result.returncode == 0, result.stderr
    assert "resumed     after step 20" in result.stdout
    expected = unbroken[0]
    for name in ("step-00000040", "averaged", "best"):
        file = f"{name}.safetensors"
        assert weights(run / file) == weights(expected / file)
    assert metrics(run) == metrics(expected)


def test_more_steps_continue_a_finished_run(tmp_path, folder, unbroken):
    train_small(tmp_path, folder, "run", "--steps", "20")
    result = train(tmp_path, "--resume", "run", "--steps", "40", "--threads", "2")
    assert result.returncode == 0, result.stderr
    file = "step-00000040.safetensors"
    assert weights(tmp_path / "run" / file) == weights(unbroken[0] / file)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_saves_and_stops(tmp_path, folder, number):
    data = ("--data", str(folder), "--source", "en", "--target", "de")
    process = subprocess.Popen(
        [*TRAIN, *data, *SMALL_RUN, "--run", "run", "--steps", "1000000"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
    )
    for line in process.stdout:
        if line.startswith("step"):
            break
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert "stopped" in output
    assert list((tmp_path / "run").glob("step-*.safetensors"))


def test_patience_and_minutes_end_a_run(tmp_path, folder):
    flags = ("--patience", "1", "--learning-rate", "1e-9", "--steps", "100000")
    result = train_small(tmp_path, folder, "patience", *flags, "--dropout", "0")
    assert "done" in result.stdout
    result = train_small(
        tmp_path, folder, "minutes\udcff", "--minutes", "0.01", "--steps", "100000"
    )
    assert r"done        minutes\udcff" in result.stdout  # a name that is no UTF-8


def test_checkpoints_are_saved_by_the_clock(tmp_path, folder):
    data = ("--data", str(folder), "--source", "en", "--target", "de")
    flags = ("--checkpoint-minutes", "0.0005", "--steps", "150", "--run", "run")
    result = train(tmp_path, *data, *SMALL_RUN, *flags, "--keep-last", "100")
    assert result.returncode == 0, result.stderr
    steps = [int(p.stem[5:]) for p in (tmp_path / "run").glob("step-*")]
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    seconds = max(json.loads(line).get("seconds", 0) for line in lines)
    assert 150 in steps
    assert 2 <= len(steps) <= 2 + seconds / 0.03
    assert any(step % 10 for step in steps)  # not those of --save-every


def test_accumulation_makes_larger_updates(tmp_path, folder):
    result = train_small(
        tmp_path,
        folder,
        "run",
        "--steps",
        "2",
        "--update-freq",
        "3",
        "--clip-norm",
        "1",
    )
    single = train_small(tmp_path, folder, "one", "--steps", "2")

    def tokens(output):
        line = next(x for x in output.split("\n") if x.startswith("update"))
        return int(line.split()[1].replace(",", ""))

    assert tokens(result.stdout) == pytest.approx(3 * tokens(single.stdout), abs=3)


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        ("--d-model 15", 2, "d_model: expected an even number, got 15"),
        ("--dropout 1", 2, "dropout: expected below 1, got 1.0"),
        ("--steps 0", 2, "steps: expected at least 1, got 0"),
        ("--steps many", 2, "--steps"),
        (f"--steps 1{'0' * 400}", 2, "steps: expected below 2^63"),
        ("--encoder-layers 999999999999", 2, "a model of less than 2^40 parameters"),
        (f"--threads 1{'0' * 400}", 2, "--threads: expected a whole number"),
        ("--config huge", 2, "--config"),
        ("--threads 0", 2, "--threads: expected a whole number of at least 1"),
        ("--no-such-flag", 2, "unrecognized argument --no-such-flag"),
        ("--source en", 2, "--source and --target need --data"),
        ("--data .", 2, "--data expects --source and --target"),
        ("--data none --source en --target de", 1, "expected a folder, found none"),
        ("--data . --source en --target de", 1, "expected train.en and train.de"),
        ("--train-source a", 2, "expected --train-source and --train-target"),
        ("--train-source a --train-target b", 1, "found none at"),
        ("--resume nowhere", 1, "expected a run directory, found no nowhere"),
        ("--resume", 1, "expected a training run in"),
        ("--resume x --run y", 2, "are for a new run, not --resume"),
        ("--nbest 2", 2, "unrecognized argument --nbest"),
        ("--max-positions 99", 2, "does nothing without --positions learned"),
        ("--beam 0", 2, "beam: expected at least 1, got 0"),
        ("--device cpu --precision bf16", 2, "expected fp32 with --device cpu, got"),
        ("--eager", 2, "--eager does nothing with --device cpu"),
        ("--device tpu", 1, "expected a device cpu, cuda or cuda:N, got 'tpu'"),
    ],
)
def test_bad_arguments_get_one_line(
    tmp_path, capsys, monkeypatch, flags, code, message
):
    monkeypatch.chdir(tmp_path)
    if "--device" in flags:
        (tmp_path / "t").write_text("a b c\n")
        flags += " --train-source t --train-target t"
    try:
        found = train_script.main(flags.split())
    except SystemExit as error:
        found = error.code
    error = capsys.readouterr().err
    assert (found, message in error) == (code, True), error
    assert "Traceback" not in error
    assert not list(tmp_path.glob("runs/*"))


def test_a_run_in_use_is_not_overwritten(tmp_path, folder, unbroken):
    run = unbroken[0]
    before = {path.name: path.read_bytes() for path in run.glob("[!.]*")}
    data = ("--data", str(folder), "--source", "en", "--target", "de")
    result = train(tmp_path, *data, *SMALL_RUN, "--run", str(run))
    assert result.returncode == 1
    assert "expected a new or empty run directory" in result.stderr
    assert not (tmp_path / "cache").exists()  # it is refused before the text is read
    assert before == {path.name: path.read_bytes() for path in run.glob("[!.]*")}


def test_a_resumed_run_refuses_to_become_another(tmp_path, unbroken):
    result = train(tmp_path, "--resume", str(unbroken[0]), "--d-ff", "64")
    assert result.returncode == 2
    assert "--d-ff: cannot change in a resumed run" in result.stderr


def test_changed_text_cannot_be_resumed(tmp_path, folder):
    copy = tmp_path / "text"
    copy.mkdir()
    for path in folder.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    train_small(tmp_path, copy, "run", "--steps", "2")
    (copy / "train.en").write_text((copy / "train.en").read_text().upper())
    result = train(tmp_path, "--resume", "run", "--steps", "4")
    assert result.returncode == 1
    assert "the training text has changed" in result.stderr


@pytest.fixture
def run_train(capsys, monkeypatch, tmp_path):
    """Run train.py without a new process; return its code, output and errors."""
    monkeypatch.chdir(tmp_path)
    handlers = [signal.getsignal(s) for s in launch.STOP_SIGNALS]

    def run(*flags):
        try:
            code = train_script.main([str(flag) for flag in flags])
        except SystemExit as error:
            code = error.code
        assert handlers == [signal.getsignal(s) for s in launch.STOP_SIGNALS]
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def finished(tmp_path, unbroken):
    """A copy of a finished run."""
    return Path(shutil.copytree(unbroken[0], tmp_path / "finished"))


def data_flags(folder):
    return ["--data", folder, "--source", "en", "--target", "de"]


@pytest.mark.parametrize("left", ["best.safetensors", "averaged.safetensors", None])
def test_results_without_a_checkpoint_are_not_begun_anew(run_train, finished, left):
    for path in finished.glob("*.safetensors"):
        if path.name != left:
            path.unlink()
    before = {path.name: path.read_bytes() for path in finished.glob("[!.]*")}
    code, _, error = run_train("--resume", finished, "--minutes", "1e-300")
    assert (code, error.count("\n")) == (1, 1)
    found = ", ".join(filter(None, (left, "metrics.jsonl")))
    assert f"found only {found}, which a new beginning would replace" in error
    assert before == {path.name: path.read_bytes() for path in finished.glob("[!.]*")}


def test_sizes_edited_in_the_configuration_are_refused(run_train, finished):
    config = json.loads((finished / "config.json").read_text())
    config["model"]["d_ff"] = 64
    (finished / "config.json").write_text(json.dumps(config))
    code, _, error = run_train("--resume", finished, "--steps", 50)
    expected = "expected d_ff 32, as in step-00000040.safetensors, got 64"
    assert (code, expected in error, "config.json" in error) == (1, True, True), error


@pytest.mark.parametrize(
    ("split", "name"), [("train", "training"), ("val", "validation"), ("test", "test")]
)
def test_the_text_of_every_split_is_compared(run_train, finished, folder, split, name):
    copy = shutil.copytree(folder, finished.parent / "text")
    config = json.loads((finished / "config.json").read_text())
    config["text"] = {
        split: [str(copy / Path(path).name) for path in pair]
        for split, pair in config["text"].items()
    }
    (finished / "config.json").write_text(json.dumps(config))
    (copy / f"{split}.de").write_text((copy / f"{split}.de").read_text().upper())
    code, _, error = run_train("--resume", finished, "--steps", 41)
    assert (code, f"the {name} text has changed" in error) == (1, True), error


@pytest.mark.parametrize(
    ("longer", "flags", "message"),
    [
        ("train", [], "of the training text, EOS counted and --max-length 256, got"),
        ("train", ["--max-length", "10"], None),
        ("val", [], "of the validation text, EOS counted, got 20"),
        ("test", [], None),  # translated in parts
        ("test", ["--long-input", "error"], "of the test text, EOS counted, got 20"),
    ],
)
def test_text_beyond_the_positions_is_refused_before_training(
    run_train, tmp_path, longer, flags, message
):
    for split in ("train", "val", "test"):
        extra = ["one two three four " * 6] * (split == longer)
        text = "\n".join(["one two", "three four", "two one"] * 20 + extra) + "\n"
        for side in ("en", "de"):
            (tmp_path / f"{split}.{side}").write_text(text)
    small = [*data_flags(tmp_path), *SMALL_RUN, "--vocab-size", 24, "--steps", 1]
    limits = ["--positions", "learned", "--max-positions", 20, "--run", "run"]
    code, _, error = run_train(*small, *limits, "--beam", 1, *flags)
    if message is None:
        assert (code, error) == (0, "")
        return
    assert (code, error.count("\n")) == (2, 1), error
    assert "--max-positions: expected at least " in error
    assert message in error
    assert not (tmp_path / "run").exists()


def test_a_full_disk_behind_standard_output_costs_lines(
    run_train, tmp_path, folder, monkeypatch
):
    class Full(io.StringIO):
        def write(self, text):
            raise OSError(ENOSPC, "No space left on device")

    monkeypatch.setattr(sys, "stdout", Full())
    flags = [*data_flags(folder), *SMALL_RUN, "--steps", 2, "--run", "run"]
    code, _, _ = run_train(*flags)
    assert code == 0
    assert "done" in (tmp_path / "run" / "train.log").read_text()


@pytest.mark.skipif(os.name != "posix", reason="needs a shell")
@pytest.mark.parametrize("output", ["| head -n 1", "<&- >&-", "2> /dev/full >&2"])
def test_a_closed_or_broken_output_ends_no_training(tmp_path, folder, output):
    flags = map(str, [*data_flags(folder), *SMALL_RUN, "--steps", 30, "--run", "run"])
    script = f'"$@" {output}; exit "${{PIPESTATUS[0]}}"'
    command = ["bash", "-c", script, "bash", *TRAIN, *flags]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "done" in (tmp_path / "run" / "train.log").read_text()
    assert (tmp_path / "run" / "step-00000030.safetensors").exists()
    json.loads((tmp_path / "run" / "config.json").read_text())


def test_results_that_cannot_be_written_do_not_end_a_run(
    run_train, tmp_path, folder, monkeypatch
):
    real = checkpoint.save

    def save(path, saved):
        if not path.name.startswith("step"):
            raise OSError(ENOSPC, "No space left on device", str(path))
        real(path, saved)

    monkeypatch.setattr(checkpoint, "save", save)
    flags = [*data_flags(folder), *SMALL_RUN, "--steps", 20, "--run", "run"]
    code, out, error = run_train(*flags, "--on-save-error", "continue")
    assert (code, error) == (0, "")
    for name in ("best", "averaged"):
        assert re.search(rf"not saved .*{name}.*; training continues", out), name
    assert "BLEU" in out[out.index("test  ") :]
    loaded = checkpoint.load(tmp_path / "run" / "step-00000020.safetensors")
    assert loaded.state["best_loss"] == math.inf
    assert loaded.state["validations_since_best"] == 0
    code, _, error = run_train(*flags[:-1], "other")
    assert (code, "best.safetensors: No space left on device" in error) == (1, True)


def test_ranks_that_receive_different_signals_stop_by_the_largest():
    def work(ranks):
        number = [None, signal.SIGTERM, signal.SIGINT][ranks.rank]
        trainer = SimpleNamespace(ranks=ranks, signal=number, began=0.0)
        trainer.state = SimpleNamespace(seconds=0.0)
        train_script.Trainer.sync_stop(trainer)
        return trainer.stopped_by, trainer.state.seconds

    found = run_ranks(3, work)
    assert found == [(signal.SIGTERM, found[0][1])] * 3


def test_an_unwritable_place_is_named(tmp_path, folder):
    (tmp_path / "file").write_text("")
    data = ("--data", str(folder), "--source", "en", "--target", "de")
    result = train(tmp_path, *data, *SMALL_RUN, "--run", "file/run")
    assert result.returncode == 1
    assert result.stderr.count("\n") == 1
    assert "file/run" in result.stderr


def test_a_vocabulary_too_large_names_the_limit(tmp_path, folder):
    data = ("--data", str(folder), "--source", "en", "--target", "de")
    result = train(tmp_path, *data, *SMALL_RUN, "--vocab-size", "5000", "--run", "run")
    assert result.returncode == 1
    assert "vocab_size: expected at most" in result.stderr
    assert not os.path.exists(tmp_path / "run")


def test_a_dry_run_says_what_it_would_do_and_writes_nothing(tmp_path, folder):
    data = ("--data", str(folder), "--source", "en", "--target", "de")
    result = train(tmp_path, *data, *SMALL_RUN, "--dry-run")
    assert result.returncode == 0, result.stderr
    for word in ("device", "parameters", "text", "update", "memory"):
        assert re.search(rf"^{word} +\S", result.stdout, re.MULTILINE), word
    assert "step" not in result.stdout
    assert not (tmp_path / "runs").exists()


def test_profile_prints_a_table_and_leaves_nothing_behind(tmp_path, folder):
    data = ("--data", str(folder), "--source", "en", "--target", "de")
    result = train(tmp_path, *data, *SMALL_RUN, "--profile", "4")
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("operation"))
    names = {line[:34].strip() for line in lines[start + 1 :]}
    for operation in ("linear", "attention", "add_layer_norm", "embedding"):
        assert {f"{operation} forward", f"{operation} backward"} <= names
    assert {"adam", "everything else", "a step"} <= {name.strip() for name in names}
    assert not (tmp_path / "runs").exists()
    assert "--resume" in train(tmp_path, "--resume", "x", "--profile").stderr


def poisoned(tmp_path, folder, *flags):
    """Train with gradients of which the tenth has a NaN in one parameter."""
    (tmp_path / "poison.py").write_text(
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import numpy as np, train\n"
        "from minitransformer.training.parallel import ThreadedModel\n"
        "real, calls = ThreadedModel.gradient, []\n"
        "def gradient(self, *args):\n"
        "    loss = real(self, *args)\n"
        "    calls.append(1)\n"
        "    if len(calls) == 10:\n"
        "        views = self.parameters.views(self.parameters.grad)\n"
        "        views['decoder.0.feed_forward.bias_1'][3] = np.nan\n"
        "    return loss\n"
        "ThreadedModel.gradient = gradient\n"
        "sys.exit(train.main(sys.argv[2:]))\n"
    )
    command = [sys.executable, "poison.py", str(ROOT), *SMALL_RUN, "--save-every", "5"]
    data = ["--data", str(folder), "--source", "en", "--target", "de"]
    limits = ["--steps", "14", "--run", "run"]
    return subprocess.run(
        [*command, *data, *limits, *flags],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_nan_stops_and_names_step_batch_and_parameter(tmp_path, folder):
    result = poisoned(tmp_path, folder)
    assert result.returncode == 1
    assert "step 10, epoch 1, batch 1: " in result.stderr
    assert "first in decoder.0.feed_forward.bias_1" in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert [p.name for p in (tmp_path / "run").glob("step*")] == [
        "step-00000005.safetensors"
    ]


def test_a_nan_is_skipped_on_request(tmp_path, folder):
    result = poisoned(tmp_path, folder, "--on-nonfinite", "skip")
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("; skipped") == 1
    tensors = load_file(tmp_path / "run" / "step-00000014.safetensors")
    assert all(np.isfinite(t).all() for t in tensors.values())
    resumed = train(tmp_path, "--resume", "run", "--steps", "16")
    assert resumed.returncode == 0, resumed.stderr


def limited(cwd, blocks, *flags):
    """Run train.py where no file may grow beyond `blocks` of 1,024 bytes."""
    script = f'ulimit -f {blocks}; exec "$@"'
    return subprocess.run(
        ["bash", "-c", script, "bash", *TRAIN, *flags],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.skipif(os.name != "posix", reason="needs ulimit")
def test_a_full_disk_stops_or_not_and_harms_no_checkpoint(tmp_path, folder):
    ended = train_small(tmp_path, folder, "whole", "--steps", "10")
    size = (tmp_path / "whole" / "step-00000010.safetensors").stat().st_size
    blocks = size // 1024 - 9
    assert "done" in ended.stdout
    data = ["--data", str(folder), "--source", "en", "--target", "de"]
    stopped = limited(
        tmp_path, blocks, *data, *SMALL_RUN, "--steps", "20", "--run", "run"
    )
    assert stopped.returncode == 1
    assert "step-00000010.safetensors" in stopped.stderr
    assert len(stopped.stderr.splitlines()) == 1
    assert not list((tmp_path / "run").glob("step*"))
    assert not list((tmp_path / "run").glob(".*partial"))
    for name in ("best.safetensors", "metrics.jsonl"):  # of the run that failed
        (tmp_path / "run" / name).unlink()
    train(tmp_path, "--resume", "run", "--steps", "10")
    before = (tmp_path / "run" / "step-00000010.safetensors").read_bytes()
    flags = ["--resume", "run", "--steps", "20", "--on-save-error", "continue"]
    going_on = limited(tmp_path, blocks, *flags)
    assert "training continues" in going_on.stdout
    assert "step     20" in going_on.stdout
    assert (tmp_path / "run" / "step-00000010.safetensors").read_bytes() == before


@pytest.mark.skipif(
    os.name != "posix" or os.geteuid() == 0, reason="root may write anywhere"
)
def test_a_read_only_directory_is_an_error_of_one_line(tmp_path, folder):
    (tmp_path / "fixed").mkdir()
    (tmp_path / "fixed").chmod(0o500)
    data = ["--data", str(folder), "--source", "en", "--target", "de"]
    result = train(tmp_path, *data, *SMALL_RUN, "--run", "fixed/run")
    assert result.returncode == 1
    assert "Permission denied" in result.stderr
    assert len(result.stderr.splitlines()) == 1
