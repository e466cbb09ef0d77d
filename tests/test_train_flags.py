"""The flags of train.py: how they are read, and what they ask for.

Nothing is trained here.
"""

import json
import os
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import train
from minitransformer.runs import starting_point
from minitransformer.runs.run_directory import RunDirectory
from minitransformer.runs.starting_point import choose_run, new_settings
from minitransformer.settings.config import ModelConfig, TrainingConfig
from minitransformer.settings.decoding_config import DecodingConfig
from minitransformer.settings.options import UsageError, make_config
from minitransformer.settings.text_config import TextConfig
from minitransformer.text.find import find_text
from minitransformer.training import distributed
from support.in_process import rows, run_main


def parse(*flags):
    return train.parse_arguments([str(flag) for flag in flags])


TEXT = "--train-source a --train-target b --val-source c --val-target d".split()


@pytest.fixture
def files(place):
    """The text that TEXT names: a few lines."""
    for name in "abcd":
        (place / name).write_text("x y\n" * 3)
    return {"train": (f"{place}/a", f"{place}/b"), "val": (f"{place}/c", f"{place}/d")}


# The command line

# The exit code, the flags (TEXT is above), and what the last line of the error says.
WRONG = """\
2 | --resume x --run y | --vocabulary and --dry-run are for a new
2 | --resume x --config tiny | --vocabulary and --dry-run are for a new
2 | --resume x --dry-run | --vocabulary and --dry-run are for a new
2 | --resume x --from y | --vocabulary and --dry-run are for a new
2 | --resume --dry-run | --vocabulary and --dry-run are for a new
2 | TEXT --ranks 2 --device cuda | --ranks starts processes on CPUs
2 | --gpus 2 | --gpus expects --device cuda, got cpu
2 | TEXT --gpus 2 --device cuda:1 | --gpus expects --device cuda, got cuda:1
2 | --eager | --eager does nothing with --device cpu
2 | --dry-run --ranks 2 | in one process: leave out --ranks and --gpus
2 | TEXT --dry-run --gpus 2 --device cuda | in one process: leave out --ranks and --gpus
2 | --ranks 0 | --ranks: expected a whole number of at least 1
2 | --threads 0 | --threads: expected a whole number of at least 1
2 | --dropout none | --dropout: expected a number, got 'none'
2 | --max-update 9 | argument --max-update; did you mean --steps?
2 | --lr 9 | argument --lr; did you mean --learning-rate?
2 | --nbest 2 | unrecognized argument --nbest
2 | --thread=2 | unrecognized argument --thread; did you mean --threads?
2 | --d-model 15 | d_model: expected an even number, got 15
2 | --d-model 10 | d_model: expected a multiple of num_heads (4), got 10
2 | --positions rotary | expected one of sinusoidal, learned, got rotary
2 | --dropout nan | --dropout: expected a number below 2^63, got nan
2 | --label-smoothing -0.1 | --label-smoothing: expected at least 0, got -0.1
2 | --warmup 0 | --warmup: expected at least 1, got 0
2 | --max-length 1 | --max-length: expected at least 2, got 1
2 | --beam 1000000000 | --beam: expected at most 1000, got 1000000000
2 | --dropout 1 | argument --dropout: expected below 1, got 1.0
2 | --steps 0 | --steps: expected at least 1, got 0
2 | --encoder-layers 999999999999 | a model of less than 2^40 parameters
2 | --config huge | --config
2 | --source en | --source and --target need --data
2 | --data a b --source en --target de | unrecognized argument b
2 | --data . | --data expects --source and --target
2 | --data . --source en --target en | expected two languages, got en for
1 | --data none --source en --target de | a folder of text, found none
1 | --data . --source en --target de | expected train.en and train.de
2 | --train-source a | expected --train-source and --train-target
2 | --val-source a | expected --train-source and --train-target
1 | --train-source x --train-target y | found none at
2 | --train-source a --train-target b --test-target a | --test-source and -
2 | --train-source a --train-target b --data . | do not go with file names
2 | --train-source a --train-target a | two files, or a .tmx
2 | --train-source a.tmx --train-target a.tmx | two files, or a .tmx
1 | --train-source a --train-target ./a | expected a target, got the source
2 | TEXT --best-by bleu --validate-bleu 0 | expects --validate-bleu above 0, got
2 | --train-source a --train-target b --best-by loss | expects validation
1 | --resume nowhere | expected a run directory, found no nowhere
1 | --resume | expected a training run in
2 | --max-positions 99 | --max-positions; did you mean --config?
2 | --beam 0 | --beam: expected at least 1, got 0
2 | TEXT --device cpu --precision fp16 | fp32 or bf16 with --device cpu
2 | TEXT --device tpu | --device: expected cpu, cuda or cuda:N, got 'tpu'
1 | --ranks 2 --data no --source en --target de | expected a folder
1 | --train-source pipe --train-target b | pipe: expected a file, got a pipe
1 | --train-source folder --train-target b | folder: expected a file, got a folder
1 | --data folder --source en --target de | train.en: expected a file, got a folder
1 | TEXT --cache a/c | .model: Not a directory; --cache names another folder
1 | TEXT --run a/r | a/r: Not a directory; --run names another folder, --re
2 | TEXT --positions learned --max-length 600 | positions (max_positions), 512, got 600
"""


@pytest.mark.parametrize(("code", "flags", "message"), rows(WRONG))
def test_bad_arguments_get_one_line(place, files, flags, code, message):
    os.mkfifo("pipe")
    (place / "folder" / "train.en").mkdir(parents=True)
    (place / "folder" / "train.de").write_text("a b c\n")
    flags = flags.replace("TEXT", " ".join(TEXT))
    found, _, error = run_main(train.main, *flags.split())
    last = error.splitlines()[-1]
    assert (found, message in last) == (int(code), True), error
    assert last.startswith("train.py: error: ")
    assert "Traceback" not in error
    assert not list(place.glob("runs/*"))


def test_the_help_shows_twenty_flags_and_on_request_all():
    usual, every = (
        set(re.findall(r"^  (--[\w-]+)", run_main(train.main, flag)[1], re.MULTILINE))
        for flag in ("--help", "--help-all")
    )
    assert {"--config", "--device", "--steps", "--ranks"} <= usual < every
    assert len(usual - {"--help-all"}) == 20
    assert len(every - {"--help-all"}) <= 60


# The settings and the run directory


def settings(*flags):
    return new_settings(parse(*TEXT, *flags))


def test_flags_override_a_preset(place, files):
    preset = {"d_model": 6, "num_heads": 3, "d_ff": 5, "warmup": 7, "steps": 9}
    (place / "own.json").write_text(json.dumps({**preset, "beam": 3, "alpha": 0.5}))
    flags = "--config own.json --d-ff 4 --steps 2 --alpha 0.25"
    config = settings(*flags.split())
    assert config.preset == "own"
    assert config.model == ModelConfig(d_model=6, num_heads=3, d_ff=4)
    assert config.training == TrainingConfig(warmup=7, steps=2)
    assert config.decoding == DecodingConfig(beam=3, alpha=0.25)
    assert config.text == files


def test_without_flags_the_tiny_preset_learns_the_built_in_corpus(files, monkeypatch):
    pairs = find_text(make_config(TextConfig, {}, vars(parse(*TEXT))))
    asked = []
    monkeypatch.setattr(
        starting_point, "built_in_corpus", lambda x: asked.append(x) or pairs
    )
    config = new_settings(parse("--cache", "kept"))
    assert (config.preset, config.text) == ("tiny", files)
    assert asked == [Path("kept")]
    settings()
    assert len(asked) == 1


def test_own_text_has_the_preset_for_its_number_of_pairs(place, files):
    few = settings()
    assert (few.preset, few.model.vocab_size) == ("multi30k", 1257)
    assert settings("--vocab-size", 50).model.vocab_size == 50
    for name in "ab":
        (place / name).write_text("x y\n" * 80_000)
    more = settings("--steps", 7, "--d-model", 64)
    assert (more.preset, more.model.encoder_layers) == ("small", 3)
    assert (more.training.steps, more.model.d_model) == (7, 64)
    assert settings("--config", "multi30k").preset == "multi30k"


def test_a_file_has_flags_which_others_override(place, files):
    """A line of it is read as a shell reads it."""
    text = " ".join(TEXT)
    lines = f"# mine\n{text} --steps 9\n\n--run 'runs/my own' --device cuda:1  # GPU\n"
    (place / "own.flags").write_text(lines)
    args = parse("@own.flags", "--device", "cpu", "--dropout", 0.25)
    assert (args.run, args.device) == (Path("runs/my own"), "cpu")
    found = new_settings(args)
    assert (found.training.steps, found.model.dropout) == (9, 0.25)
    assert found.text == files
    code, _, error = run_main(train.main, "@none.flags")
    assert (code, error.count("\n"), "none.flags" in error) == (2, 1, True)


def test_the_settings_of_a_run_are_a_preset(place, files, model_path):
    flags = "--from", model_path, "--steps", 3, "--beam", 2, "--save-every", 7
    run = settings(*flags)
    (place / "config.json").write_text(run.to_json())
    again = settings("--config", "config.json")
    assert again == replace(run, preset="config", start=None)


FILES = "train-source train-target val-source val-target test-source test-target"
NAMES = f"{FILES} data source target run from resume cache vocabulary".split()


@pytest.mark.parametrize("flag", NAMES)
def test_an_empty_name_is_refused(place, flag):
    before = sorted(place.rglob("*"))
    given = ("--train-source", "x", "--train-target", "y", f"--{flag}", "")
    code, _, error = run_main(train.main, *given)
    expected = f"argument --{flag}: expected a name, got an empty one"
    assert (code, error) == (2, f"train.py: error: {expected}\n")
    assert sorted(place.rglob("*")) == before


@pytest.mark.parametrize("flag", ["--patience", "--validate-every", "--validate-bleu"])
def test_flags_of_validation_expect_text_for_it(files, flag):
    settings(flag, 3)
    train_alone = TEXT[:4]
    with pytest.raises(UsageError, match=f"{flag} expects validation text, found none"):
        new_settings(parse(*train_alone, flag, 3))
    # The preset's own patience is not refused: it is for runs with validation text.
    tuned = new_settings(parse(*train_alone, "--config", "finetune"))
    assert tuned.training.patience
    with pytest.raises(UsageError, match="--patience expects"):
        tuned.resumed(parse("--patience", 3))


def test_rank_0_names_a_new_run(files):
    assert choose_run(parse(*TEXT), 1)[0] == Path()
    assert not Path("runs").exists()
    path, chosen, resumes = choose_run(parse(*TEXT, "--steps", 3), 0)
    assert (path.parent, path.is_dir()) == (Path("runs"), True)
    assert path.name.startswith("multi30k-")
    assert (chosen.training.steps, resumes) == (3, False)
    for rank in (0, 1):
        path, _, resumes = choose_run(parse(*TEXT, "--run", "own"), rank)
        assert (path, resumes) == (Path("own"), False)


def test_a_run_is_continued_with_its_settings(files):
    begun = settings("--d-ff", 4, "--steps", 3)
    for name in ("runs/one", "runs/two"):
        run = RunDirectory(Path(name))
        run.path.mkdir(parents=True)
        run.begin(begun, b"", False)
    os.utime("runs/one", (1, 1))
    for resume, name in (([], "two"), (["runs/one"], "one")):
        args = parse("--resume", *resume, "--steps", 5)
        path, found, resumes = choose_run(args, 0)
        assert (path, resumes) == (Path("runs") / name, True)
        assert (found.model, found.training.steps) == (begun.model, 5)


# The command's work


@pytest.mark.parametrize(
    ("flags", "count", "device"),
    [("--ranks 2", 2, "cpu"), ("--gpus 3 --device cuda", 3, "cuda:2")],
)
def test_mpi_starts_the_ranks_once_the_flags_are_checked(
    files, monkeypatch, flags, count, device
):
    small = "--d-model 8 --d-ff 8 --num-heads 2 --validate-bleu 0 --steps 1 --run run"
    flags = [*TEXT, *flags.split(), *small.split()]
    started, devices = [], []

    def execve(path, command, environ):
        started.append(command)
        raise RuntimeError("replaced")

    monkeypatch.setattr(os, "execve", execve)
    monkeypatch.setattr(os, "dup2", lambda *args: None)
    monkeypatch.setattr(train, "check_device", devices.append)
    monkeypatch.setattr(distributed, "find_mpiexec", lambda: "mpiexec")
    run_main(train.main, *flags)
    script = str(Path(train.__file__).absolute())
    rank = [sys.executable, script, *flags]
    assert started == [["mpiexec", "-n", str(count), *rank]]
    assert devices == [device]
    monkeypatch.setenv("PMI_RANK", "0")  # a rank starts no others
    run_main(train.main, *flags)
    assert len(started) == 1


def test_a_run_from_a_model_has_the_preset_finetune(model_path, files):
    tuned = settings("--from", model_path)
    assert (tuned.preset, tuned.training.learning_rate) == ("finetune", 3e-4)
    other = settings("--from", model_path, "--config", "base")
    assert other.preset == "base"
