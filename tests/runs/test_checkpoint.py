"""Checkpoints and run directories: saving, loading, averaging, damaged files."""

import errno
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from minitransformer import files
from minitransformer.model.parameters import ParameterBuffer
from minitransformer.model.transformer import Transformer
from minitransformer.runs import checkpoint
from minitransformer.runs.average import average_checkpoints
from minitransformer.runs.checkpoint import Checkpoint
from minitransformer.runs.run_directory import (
    ReadOnlyRunDirectory,
    RunDirectory,
    find_checkpoint,
    new_directory,
    newest_run,
)
from minitransformer.settings.config import (
    DecodingConfig,
    ModelConfig,
    RunConfig,
    TrainingConfig,
)
from minitransformer.text.tokenizer import Tokenizer
from support.damage import rewrite_checkpoint

LINES = [f"the cat number {i} sat on the mat" for i in range(100)]
TEXT = {"train": ("train.en", "train.de")}
RUN = RunConfig("tiny", ModelConfig(), TrainingConfig(), DecodingConfig(), TEXT)
CONFIG = ModelConfig(
    vocab_size=40,
    encoder_layers=1,
    decoder_layers=1,
    d_model=8,
    d_ff=16,
    num_heads=2,
)


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train(LINES, 40)


def make(tokenizer, seed=1, moments=True) -> Checkpoint:
    model = Transformer(CONFIG, seed)
    parameters = ParameterBuffer(model)
    both = parameters.data * 2, parameters.data**2
    state = {"step": 7, "loss": 0.1 + 0.2}
    return Checkpoint(model, tokenizer, parameters, state, both if moments else None)


@pytest.fixture
def saved(tmp_path, tokenizer):
    path = tmp_path / "step-00000007.safetensors"
    checkpoint.save(path, make(tokenizer))
    return path


def test_everything_comes_back_bit_for_bit(saved, tokenizer):
    original, loaded = make(tokenizer), checkpoint.load(saved, with_moments=True)
    np.testing.assert_array_equal(loaded.parameters.data, original.parameters.data)
    np.testing.assert_array_equal(loaded.moments, original.moments)
    assert loaded.state == original.state
    assert loaded.model.config == CONFIG
    assert loaded.tokenizer.model == tokenizer.model
    assert [p.name for p in saved.parent.iterdir()] == [saved.name]


def test_a_failed_save_leaves_the_old_file(saved, tokenizer, monkeypatch):
    before = saved.read_bytes()
    monkeypatch.setattr(files.os, "fsync", _disk_full)
    with pytest.raises(OSError, match="No space"):
        checkpoint.save(saved, make(tokenizer, seed=2))
    assert saved.read_bytes() == before
    assert [p.name for p in saved.parent.iterdir()] == [saved.name]


def _disk_full(descriptor):
    raise OSError(errno.ENOSPC, "No space left on device")


TABLE = "embedding.table"
LARGE_CONFIG = json.dumps({**vars(CONFIG), "d_ff": 10**9})
HUGE_CONFIG = json.dumps({**vars(CONFIG), "d_ff": 10**15, "encoder_layers": 10**9})
DEEP_JSON = "[" * 100_000
ONE_HEAD = json.dumps({**vars(CONFIG), "num_heads": 1})
OTHER_CONFIG = json.dumps({**vars(CONFIG), "d_ff": 32})


@pytest.mark.parametrize(
    ("tensors", "metadata", "message"),
    [
        ({TABLE: lambda t: t[:-1]}, {}, r"embedding.table: expected float32 \(40, 8\)"),
        ({TABLE: lambda t: t.astype(np.float64)}, {}, "expected float32.*got float64"),
        ({TABLE: lambda t: t * np.nan}, {}, "embedding.table: expected finite"),
        ({TABLE: lambda t: t + np.float32(1e-6)}, {}, "embedding.table: its checksum"),
        ({"tokenizer": lambda t: t[:9]}, {}, "tokenizer: its checksum"),
        ({}, {"config": LARGE_CONFIG}, "expected at least .* bytes, it is shorter"),
        ({}, {"config": HUGE_CONFIG}, "a model of less than 2\\^40 parameters"),
        ({}, {"config": DEEP_JSON}, "not a usable checkpoint"),
        ({}, {"checksums": "[]"}, "not a usable checkpoint"),
        ({}, {"format": "other"}, "expected format 'minitransformer 1', got 'other'"),
        ({}, {"config": "{}"}, "ModelConfig: unknown or missing"),
        ({}, {"config": "["}, "not a usable checkpoint"),
        ({}, {"config": OTHER_CONFIG}, r"expected float32 \(8, 32\)"),
        ({}, {"checksum": "1", "config": ONE_HEAD}, "checksum of its metadata differs"),
        ({}, {"checksum": "1", "state": "{}"}, "the checksum of its metadata differs"),
        ({"adam.mean": lambda t: t[1:]}, {}, "adam.mean: expected float32"),
    ],
)
def test_a_damaged_file_is_refused(saved, tensors, metadata, message):
    rewrite_checkpoint(saved, tensors, **metadata)
    with pytest.raises(
        ValueError, match=f"not a usable checkpoint.*{message}|{message}"
    ):
        checkpoint.load(saved, with_moments=True)


@pytest.mark.parametrize("keep", [0, 7, 100, -10])
def test_a_truncated_file_is_refused(saved, keep):
    saved.write_bytes(saved.read_bytes()[:keep])
    with pytest.raises(ValueError, match="not a usable checkpoint"):
        checkpoint.load(saved)


def test_missing_and_extra_tensors_are_named(saved):
    tensors = load_file(saved)
    with checkpoint.safe_open(saved, framework="np") as file:
        metadata = file.metadata()
    save_file({**tensors, "\x1b[2J": np.zeros(1)}, saved, metadata)
    with pytest.raises(ValueError, match=r"expected no tensor '\\x1b\[2J'"):
        checkpoint.load(saved)
    del tensors[TABLE]
    save_file(tensors, saved, metadata)
    with pytest.raises(ValueError, match=r"expected a tensor embedding\.table"):
        checkpoint.load(saved)


def test_one_digit_of_the_settings_is_noticed(saved):
    """A model of one head has the same tensors as one of two."""
    data = saved.read_bytes()
    changed = data.replace(rb"\"num_heads\": 2", rb"\"num_heads\": 1")
    assert changed != data
    saved.write_bytes(changed)
    with pytest.raises(ValueError, match="the checksum of its metadata differs"):
        checkpoint.load(saved)


def test_checkpoints_without_a_checksum_of_the_metadata_load(saved):
    """Those that were written before there was one."""
    state = json.dumps({"step": 8})
    rewrite_checkpoint(saved, state=state)
    assert checkpoint.load(saved, with_moments=True).state == {"step": 8}


def test_the_file_is_what_safetensors_writes(saved, tmp_path):
    tensors = load_file(saved)
    with checkpoint.safe_open(saved, framework="np") as file:
        save_file(tensors, tmp_path / "other", file.metadata())
        names = set(file.keys())
    again = load_file(tmp_path / "other")
    assert names == again.keys()
    assert all((tensors[name] == again[name]).all() for name in names)


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_a_checkpoint_has_the_mode_that_the_umask_leaves(saved, tokenizer, umask):
    other = saved.with_name("other.safetensors")
    before = os.umask(umask)
    try:
        checkpoint.save(other, make(tokenizer))
    finally:
        os.umask(before)
    assert other.stat().st_mode & 0o777 == 0o666 & ~umask


def test_a_checkpoint_is_written_to_a_pipe(saved, tokenizer, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    found = []
    reader = threading.Thread(
        target=lambda: found.append((tmp_path / "pipe").read_bytes())
    )
    reader.start()
    checkpoint.save(tmp_path / "pipe", make(tokenizer))
    reader.join()
    assert found == [saved.read_bytes()]


def test_a_damaged_newest_checkpoint_says_that_deleting_it_helps(tmp_path, tokenizer):
    run = RunDirectory(tmp_path)
    first, last = run.checkpoint(99_999_999), run.checkpoint(100_000_000)
    checkpoint.save(first, make(tokenizer))
    last.write_bytes(first.read_bytes()[:-1])
    with pytest.raises(ValueError, match=f"delete it, .* goes on from {first.name}"):
        run.load_to_resume(last)
    last.unlink()
    assert run.load_to_resume(run.checkpoints()[-1]).state["step"] == 7
    first.write_bytes(b"")
    with pytest.raises(ValueError, match="not a usable checkpoint") as error:
        run.load_to_resume(first)
    assert "delete" not in str(error.value)


def test_weights_without_moments_cannot_be_resumed(tmp_path, tokenizer):
    path = tmp_path / "x.safetensors"
    checkpoint.save(path, make(tokenizer, moments=False))
    checkpoint.load(path)
    with pytest.raises(ValueError, match="no optimizer state"):
        checkpoint.load(path, with_moments=True)


def test_averaging_is_the_mean(tmp_path, tokenizer):
    paths, values = [], []
    for seed in (1, 2, 3):
        paths.append(tmp_path / f"{seed}.safetensors")
        one = make(tokenizer, seed)
        checkpoint.save(paths[-1], one)
        values.append(one.parameters.data.astype(np.float64))
    averaged = average_checkpoints(paths)
    np.testing.assert_allclose(
        averaged.parameters.data, np.mean(values, axis=0), rtol=1e-6, atol=1e-9
    )
    view = averaged.model.embedding.table.data
    assert np.shares_memory(view, averaged.parameters.data)


def test_averaging_refuses_other_models(tmp_path, saved, tokenizer):
    with pytest.raises(ValueError, match="expected checkpoints to average, got none"):
        average_checkpoints([])
    other = tmp_path / "other.safetensors"
    one = make(Tokenizer.train([x.upper() for x in LINES], 40))
    checkpoint.save(other, one)
    with pytest.raises(ValueError, match="its tokenizer differs"):
        average_checkpoints([other, saved])


def test_a_shortage_of_memory_is_not_called_damage(saved, monkeypatch):
    def short_of_memory(config, seed):
        raise MemoryError

    monkeypatch.setattr(checkpoint, "Transformer", short_of_memory)
    with pytest.raises(MemoryError):
        checkpoint.load(saved)


def test_a_run_directory_is_never_reused(tmp_path):
    run = RunDirectory(tmp_path / "run")
    with run.lock([7]):
        pass
    assert not run.path.exists()  # nothing came of it
    with run.lock([7, 8]):
        assert run.processes() == [7, 8]
        (run.path / ".config.json.partial").write_text("cut off by a crash")
        run.create(RUN)
        assert run.read_config() == RUN
        with pytest.raises(ValueError, match="expected a new or empty run directory"):
            run.create(RUN)


def test_two_processes_cannot_train_in_one_directory(tmp_path):
    run = RunDirectory(tmp_path / "run")
    hold = (
        "import sys, time; from pathlib import Path;"
        "from minitransformer.runs.run_directory import RunDirectory\n"
        "with RunDirectory(Path(sys.argv[1])).lock([7]):\n"
        "    Path(sys.argv[1], 'config.json').write_text('{}')\n"
        "    print('held', flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", hold, str(run.path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"held\n"
        for _ in range(2):
            with pytest.raises(ValueError, match=r"another training is.*process 7"):
                run.lock([8]).__enter__()
            (run.path / ".lock").unlink(missing_ok=True)  # which does not help
        other.kill()
        other.wait()
    with run.lock([8]):  # the crash has released it
        for damaged in ("", "[7", "7", '{"a": 1}', '["7"]', "[-1]", "[" * 100_000):
            (run.path / ".processes").write_text(damaged)
            assert run.processes() == []


def test_what_killed_processes_left_is_swept_and_nothing_else(tmp_path):
    run = RunDirectory(tmp_path / "run")
    run.path.mkdir()
    for name in (".best.safetensors.0123.partial", ".tmpAb12", "config.json", "mine"):
        (run.path / name).write_bytes(b"x")
    with files.atomic_write(run.path / "translations") as file:  # by another process
        file.write(b"whole")
        with run.lock([7]):
            left = {
                path.name for path in run.path.iterdir() if path.suffix != ".partial"
            }
    assert left == {"config.json", "mine", ".lock", ".processes"}
    assert (run.path / "translations").read_bytes() == b"whole"


@pytest.mark.parametrize("through", ["directory", "link", "."])
def test_an_empty_directory_of_the_user_stays(tmp_path, monkeypatch, through):
    own = tmp_path / "own"
    own.mkdir()
    (tmp_path / "link").symlink_to(own)
    monkeypatch.chdir(own)
    places = {"directory": own, "link": tmp_path / "link", ".": Path()}
    with (
        pytest.raises(KeyError),
        RunDirectory(places[through]).lock([7]),
    ):
        raise KeyError
    assert list(own.iterdir()) == []


@pytest.mark.parametrize("kind", ["pipe", "link"])
def test_a_lock_that_is_no_file_is_refused(tmp_path, kind):
    lock, other = tmp_path / ".lock", tmp_path / "other"
    os.mkfifo(lock) if kind == "pipe" else lock.symlink_to(other)
    with pytest.raises(OSError, match=r"\.lock"), RunDirectory(tmp_path).lock([7]):
        pass
    assert not other.exists()


@pytest.mark.parametrize("kind", ["pipe", "link"])
def test_a_log_that_is_no_file_costs_the_line(tmp_path, capsys, kind):
    run, other = RunDirectory(tmp_path), tmp_path / "other"
    os.mkfifo(run.metrics) if kind == "pipe" else run.metrics.symlink_to(other)
    run.record(1, loss=0.5)
    assert "metrics.jsonl: a line was lost" in capsys.readouterr().err
    assert not other.exists()


def test_a_name_that_is_no_utf8_can_be_logged(tmp_path):
    run = RunDirectory(tmp_path)
    run.append(tmp_path / "train.log", os.fsdecode(b"run \xff"))
    assert (tmp_path / "train.log").read_text() == "run \\udcff\n"


def test_runs_of_one_second_have_names_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setattr("time.strftime", lambda form: "20250101-120000")
    runs = [new_directory("tiny", tmp_path / "runs") for _ in range(3)]
    assert [path.name for path in runs] == [
        "tiny-20250101-120000",
        "tiny-20250101-120000-2",
        "tiny-20250101-120000-3",
    ]
    with RunDirectory(runs[1]).lock([7]):
        pass  # a failed start
    RunDirectory(runs[2]).remove_if_empty()  # none at all
    assert list((tmp_path / "runs").iterdir()) == runs[:1]


def test_a_runs_folder_that_leads_nowhere_is_an_error(tmp_path):
    (tmp_path / "runs").symlink_to("nowhere")
    with pytest.raises(FileExistsError, match="runs"):
        new_directory("tiny", tmp_path / "runs")


def test_only_rank_0_refuses_a_directory_in_use(tmp_path):
    (tmp_path / "mine").write_text("")
    with pytest.raises(ValueError, match="expected a new or empty run directory"):
        RunDirectory(tmp_path).require_empty()
    ReadOnlyRunDirectory(tmp_path).require_empty()


def test_find_checkpoint_prefers_averaged_then_best_then_newest(tmp_path):
    run = RunDirectory(tmp_path / "runs" / "a")
    run.path.mkdir(parents=True)
    run.config.write_text("{}")
    with pytest.raises(FileNotFoundError, match="expected a checkpoint in"):
        find_checkpoint(run.path)
    with pytest.raises(FileNotFoundError, match="found none with a checkpoint"):
        find_checkpoint(None, tmp_path / "runs")
    for path in (run.checkpoint(9), run.checkpoint(10), run.best, run.averaged):
        path.write_bytes(b"")
        assert find_checkpoint(run.path) == path
    newer = tmp_path / "runs" / "b"
    newer.mkdir()
    (newer / "config.json").write_text("{}")
    later = run.path.stat().st_mtime + 60
    os.utime(newer, (later, later))
    assert find_checkpoint(None, tmp_path / "runs") == run.averaged
    assert newest_run(tmp_path / "runs").path == newer  # which can be resumed
    assert find_checkpoint(run.best) == run.best
    with pytest.raises(FileNotFoundError, match="expected a training run in"):
        find_checkpoint(None, tmp_path / "none")


def test_pruning_keeps_the_newest(tmp_path):
    run = RunDirectory(tmp_path)
    for step in (5, 100_000_000, 20, 15):
        run.checkpoint(step).write_bytes(b"")
    run.prune(2)
    assert run.checkpoints() == [run.checkpoint(20), run.checkpoint(100_000_000)]


def test_copies_are_no_checkpoints(tmp_path):
    run = RunDirectory(tmp_path)
    run.checkpoint(8).write_bytes(b"")
    run.checkpoint(100_000_000).write_bytes(b"")
    copies = "step-00000009 (copy)", "step-9", "step-copy", "step-٠٠٠٠٠٠٠٩", "step-"
    for name in copies:
        (tmp_path / f"{name}.safetensors").write_bytes(b"")
    run.checkpoint(10).mkdir()
    run.checkpoint(99_999_999).symlink_to("nowhere")
    assert run.checkpoints() == [run.checkpoint(8), run.checkpoint(100_000_000)]
    run.prune(1)
    assert len(list(tmp_path.iterdir())) == 3 + len(copies)


def test_metrics_after_a_checkpoint_are_forgotten(tmp_path):
    run = RunDirectory(tmp_path)
    for step in (1, 2, 2, 3):
        run.record(step, loss=0.5)
    for odd in ("5", "[1]", "null", '{"loss": 0.5}', '{"step": "1"}', '{"step": 1'):
        run.append(run.metrics, odd)
    run.truncate_metrics(2)
    steps = [json.loads(x)["step"] for x in run.metrics.read_text().splitlines()]
    assert steps == [1, 2, 2]
