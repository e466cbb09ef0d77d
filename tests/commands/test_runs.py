"""The command that lists runs and deletes some."""

import errno
from pathlib import Path

import pytest

from minitransformer.commands.runs import main
from minitransformer.runs.run_directory import RunDirectory
from support.in_process import rows
from support.locks import held_elsewhere
from support.models import BUILT_IN, save_run


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """A folder with a run that ended, and one that did not."""
    monkeypatch.chdir(tmp_path)
    state = {"step": 900, "best_bleu": 25.108}
    save_run(
        Path("runs/talks"), {"best": state, "step-00001040": {"step": 1040}}, steps=9
    )
    save_run(Path("runs/toy"), {}, BUILT_IN, age=60)
    return tmp_path


def files(folder="runs"):
    return sorted(str(p.relative_to(folder)) for p in Path(folder).rglob("*.*"))


def test_runs_are_listed_with_size_updates_bleu_and_text(capsys):
    RunDirectory(Path("runs/talks")).record(1040, ended="--steps 1040")
    size = 0
    for path in Path("runs/talks").iterdir():
        size += len(path.read_bytes())
    assert main([]) == 0
    rows = capsys.readouterr().out.splitlines()
    talks = "talks/train.en.gz to talks/train.de, 900 updates, validation BLEU 25.11"
    assert [row.strip() for row in rows] == [
        f"{size / 1e6:.1f} MB  runs/talks/best.safetensors ({talks})",
        "0.0 MB  expected a checkpoint in runs/toy, found none, not ended",
    ]
    Path("runs/talks/config.json").write_text("{}")
    assert main(["runs"]) == 0
    assert "config.json: expected a run's conf" in capsys.readouterr().out
    assert main(["elsewhere"]) == 0
    assert capsys.readouterr().out.startswith("no runs in ")


@pytest.mark.parametrize("name", ["talks", "runs/talks", "./runs/talks/"])
def test_what_is_named_is_deleted_and_nothing_else(capsys, name):
    assert main(["--delete", name, name]) == 0
    assert files() == ["toy/config.json"]
    assert not Path("runs/talks").exists()
    assert capsys.readouterr().out.startswith("deleted runs/talks, 0.1 MB\n")


def test_files_of_the_user_stay(capsys):
    for name in (
        "talks/test.out",
        "talks/step-00001040 (copy).safetensors",
        "notes.txt",
    ):
        Path("runs", name).write_text("mine")
    Path("runs/talks/train.log").write_text("said")
    assert main(["--delete", "toy", "talks"]) == 0
    kept = ["step-00001040 (copy).safetensors", "test.out"]
    assert files() == ["notes.txt", *(f"talks/{name}" for name in kept)]
    assert f"but not {', '.join(kept)}" in capsys.readouterr().out


# Names, and what the error says.
NO_RUNS = """
talk | talk: expected one run, found none; did you mean talks?
toy nothing | nothing: expected one run, found none
other | other: expected one run, found none
runs | runs: expected one run, found none
talks/best.safetensors | expected one run, found none
twice | twice: expected one run, found
../old/talks | ../old/talks: expected one run, found none
./toy | ./toy: expected one run, found none
toy/ | toy/: expected one run, found none
.. | ..: expected one run, found none
"""


@pytest.mark.parametrize(("names", "message"), rows(NO_RUNS))
def test_what_is_no_run_or_might_be_another_is_refused(place, capsys, names, message):
    save_run(Path("twice"), {})
    save_run(Path("runs/twice"), {})
    save_run(Path("old/talks"), {})  # "../old/talks" in runs/
    save_run(Path("config"), {})
    Path("config/config.json").rename("config.json")  # ".." in runs/
    Path("runs/other").mkdir()
    Path("runs/other/config.json").write_text('{"model_type": "bert"}')
    before = files(place)
    assert main(["--delete", *names.split()]) == 2
    assert message in capsys.readouterr().err
    assert files(place) == before


def test_a_run_that_is_gone_is_not_suggested(capsys):
    assert main(["--delete", "toy"]) == 0
    Path("runs/toy").mkdir()
    Path("runs/toy/notes.txt").write_text("mine")
    assert main(["--delete", "toy"]) == 2
    assert capsys.readouterr().err.endswith("toy: expected one run, found none\n")
    assert main(["nowhere", "--delete", "x"]) == 2
    assert capsys.readouterr().err.endswith("x: expected one run, found none\n")


def test_of_several_runs_all_are_deleted_or_none(place, monkeypatch, capsys):
    before = files()
    rename = Path.rename

    def refused(path, target):
        if path == Path("runs/talks/step-00001040.safetensors"):
            raise PermissionError(errno.EPERM, "Operation not permitted", str(path))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refused)
    assert main(["--delete", "toy", "talks"]) == 1
    message = "step-00001040.safetensors: Operation not permitted\n"
    assert capsys.readouterr().err.endswith(message)
    assert {*before} <= {*files()}
    assert not list(place.rglob("*.partial"))
    monkeypatch.undo()
    monkeypatch.chdir(place)
    assert main(["--delete", "toy", "talks"]) == 0
    assert files() == []


def test_a_run_in_progress_is_refused(place, capsys):
    before = files()
    with held_elsewhere("RunDirectory(Path('runs/talks')).lock(True)"):
        assert main(["--delete", "toy", "talks"]) == 1
        error = capsys.readouterr().err
        assert error.endswith("talks: another training is running here\n")
        assert set(before) <= set(files())
    assert main(["--delete", "toy", "talks"]) == 0
    assert not RunDirectory(Path("runs/talks")).path.exists()
