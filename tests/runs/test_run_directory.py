"""Run directories: who may write there, what is found there, damaged files."""

import math
import shutil
import time
from contextlib import suppress
from dataclasses import replace

import pytest

from minitransformer.runs import run_directory
from minitransformer.runs.run_directory import RunDirectory, new_directory
from minitransformer.settings.config import TrainingConfig
from minitransformer.settings.decoding_config import DecodingConfig
from minitransformer.system import files
from support.locks import held_elsewhere
from support.runs import SETTINGS

RUN = replace(SETTINGS, decoding=DecodingConfig(beam=7, nbest=3))


@pytest.fixture
def run(tmp_path):
    """An empty directory for a run."""
    run = RunDirectory(tmp_path / "run")
    run.path.mkdir()
    return run


def test_a_run_directory_is_never_reused(run):
    run.path.rmdir()
    with run.lock():
        pass
    assert not run.path.exists()  # nothing came of it
    with run.lock():
        (run.path / ".config.json.partial").write_text("cut off by a crash")
        assert not run.unsaved.exists()
        run.begin(RUN, b"", False)
        assert run.unsaved.exists()
        assert run.read_config() == RUN
        hidden = {*run_directory.HIDDEN, ".config.json.partial"}
        assert {path.name for path in run.path.iterdir()} == {
            "config.json",
            "tokenizer.model",
            *hidden,
        }
        with pytest.raises(ValueError, match="expected a new or empty run directory"):
            run.require_free()


def test_two_processes_cannot_train_in_one_directory(run):
    with held_elsewhere(f"RunDirectory(Path({str(run.path)!r})).lock()") as other:
        run.config.write_text("{}")
        with pytest.raises(ValueError, match=r"another training is running here$"):
            run.lock(resumes=True).__enter__()
        other.kill()
        other.wait()
    with run.lock(resumes=True):  # the crash has released it
        pass


def test_what_killed_processes_left_is_swept_and_nothing_else(run):
    end = f".{'0a' * 8}.partial"
    swept = {f".best.safetensors{end}", f".step-00000010.safetensors{end}"}
    kept = {"mine", ".mine.partial", f".mine{end}", ".best.safetensors.0123.partial"}
    kept |= {f".step-1.safetensors{end}", "config.json"}
    for name in kept | swept:
        (run.path / name).write_bytes(b"x")
    with files.atomic_write(run.path / "translations") as file:  # by another process
        file.write(b"whole")
        with run.lock(resumes=True):
            left = {path.name for path in run.path.iterdir()}
    [partial] = (name for name in left if name.startswith(".translations"))
    assert left == {*kept, partial, *run_directory.HIDDEN[1:]}
    assert (run.path / "translations").read_bytes() == b"whole"


OF_THE_USER = [
    ["x"],
    [".lock"],
    [".Report.docx.partial", ".tmp-thesis/ch1"],
    [".training.lock", ".config.json.partial"],
    [".training.lock", f".mine.{'0' * 16}.partial"],
    [".training.lock", "train.log"],
]


@pytest.mark.parametrize("names", OF_THE_USER, ids=" ".join)
def test_a_directory_of_the_user_is_left_as_it_is(run, names):
    for name in names:
        (run.path / name).parent.mkdir(parents=True, exist_ok=True)
        (run.path / name).write_text("of the user")
    before = {path: path.stat() for path in run.path.rglob("*")}
    with pytest.raises(ValueError, match="expected a new or empty run directory, got"):
        run.lock().__enter__()
    assert {path: path.stat() for path in run.path.rglob("*")} == before


@pytest.mark.parametrize("made", [False, True])
def test_a_failed_start_leaves_nothing_and_removes_nothing_of_others(run, made):
    if not made:
        run.path.rmdir()
    with run.lock():
        run.unsaved.touch()
    assert [*run.path.parent.rglob("*")] == [run.path][:made]
    with run.lock():
        (run.path / "notes").touch()
    assert [path.name for path in run.path.iterdir()] == ["notes"]


def test_a_start_that_was_killed_is_begun_again(run):
    for name in (*run_directory.HIDDEN, f".config.json.{'7' * 16}.partial"):
        (run.path / name).touch()
    with run.lock():
        left = {path.name for path in run.path.iterdir()}
        assert left == {*run_directory.HIDDEN}
    assert not run.path.exists()


def moved(path):
    path.rename(path.with_name("old"))


def replaced(path):
    moved(path)
    shutil.copytree(path.with_name("old"), path)


WRITES = [
    lambda run: run.record(1, loss=0.5),
    lambda run: run.append(run.path / "train.log", "a line"),
    lambda run: run.begin(RUN, b"pieces", False),
    lambda run: run.save(run.best, None),
]


@pytest.mark.parametrize("change", [moved, replaced, shutil.rmtree])
def test_a_training_that_lost_its_directory_writes_nothing_more(run, tmp_path, change):
    with run.lock():
        run.config.write_text("{}")
        run.record(1, loss=0.5)
        for step in (1, 2):
            run.checkpoint(step).write_bytes(b"x")
        change(run.path)
        before = {path: path.stat() for path in tmp_path.rglob("*")}
        for write in WRITES:
            with pytest.raises(ValueError, match="run: this directory was moved, rem"):
                write(run)
        with suppress(ValueError):  # which are no longer there, or not its own
            run.prune(TrainingConfig(keep_last=1, average=1))
        with suppress(ValueError):
            run.truncate_metrics(0)
    assert {path: path.stat() for path in tmp_path.rglob("*")} == before


def test_runs_of_one_second_have_names_of_their_own(tmp_path, monkeypatch):
    moment = time.struct_time((2025, 1, 2, 13, 4, 5, 3, 2, 0))
    strftime = time.strftime
    monkeypatch.setattr("time.strftime", lambda form: strftime(form, moment))
    folder = tmp_path / "of" / "runs"
    runs = [new_directory("tiny", folder) for _ in range(3)]
    assert [path.name for path in runs] == [
        "tiny-20250102-130405",
        "tiny-20250102-130405-2",
        "tiny-20250102-130405-3",
    ]
    with RunDirectory(runs[1]).lock():
        pass  # a failed start
    assert sorted(folder.iterdir()) == [runs[0], runs[2]]


def test_copies_are_no_checkpoints(run):
    run.checkpoint(8).write_bytes(b"")
    run.checkpoint(100_000_000).write_bytes(b"")
    copies = "step-00000009 (copy)", "step-9", "step-copy", "step-٠٠٠٠٠٠٠٩", "step-"
    for name in copies:
        (run.path / f"{name}.safetensors").write_bytes(b"")
    run.checkpoint(10).mkdir()
    run.checkpoint(99_999_999).symlink_to("nowhere")
    assert run.checkpoints() == [run.checkpoint(8), run.checkpoint(100_000_000)]
    run.prune(TrainingConfig(keep_last=1, average=1))
    assert len(list(run.path.iterdir())) == 3 + len(copies)


def test_metrics_after_a_checkpoint_are_forgotten(run):
    """And those of the end, which is now another; a validation may come again."""
    lines = [
        {"step": 0, "validation_loss": 3.0},
        {"step": 4, "loss": 2.0},
        {"step": 4, "validation_loss": 1.0},
        {"step": 5, "loss": 2.0},
        {"step": 4, "test_bleu": 30.0},
    ]
    for line in lines:
        run.record(**line)
    for validates, left in ((False, 3), (True, 2)):
        run.truncate_metrics(4, validates)
        assert run.read_metrics() == lines[:left]


def test_a_run_has_no_metrics_at_first(run):
    with pytest.raises(ValueError, match=r"expected a run directory, found no .*metr"):
        run.read_metrics()
    run.config.write_text("{}")
    assert run.read_metrics() == []


def test_numbers_that_are_not_finite_are_null(run):
    rate = 0.1 + 0.2
    run.record(1, loss=math.nan, norm=math.inf, low=-math.inf, rate=rate)
    run.append(run.metrics, '{"step": 2, "loss": NaN}')  # of an earlier version
    run.truncate_metrics(2)
    assert run.metrics.read_text().splitlines() == [
        f'{{"step": 1, "loss": null, "norm": null, "low": null, "rate": {rate}}}',
        '{"step": 2, "loss": null}',
    ]


def test_lines_that_are_no_metrics_are_skipped(run):
    for line in ("5", "[1]", "null", '{"loss": 0.5}', '{"step": "1"}', '{"step": 1'):
        run.append(run.metrics, line)
    run.record(7)
    run.append(run.metrics, "[" * 100_000)
    assert run.read_metrics() == [{"step": 7}]


def test_a_resumed_run_keeps_its_new_settings_and_writes_nothing_twice(
    run, monkeypatch
):
    run.begin(RUN, b"pieces", False)
    changed = replace(RUN, training=replace(RUN.training, steps=77))
    run.begin(changed, b"pieces", True)
    assert run.read_config() == changed
    monkeypatch.setattr(run_directory, "write_bytes", None)
    run.begin(changed, b"pieces", True)
    assert run.tokenizer.read_bytes() == b"pieces"
