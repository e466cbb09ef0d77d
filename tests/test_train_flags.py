"""The flags of train.py: how they are read, and what they ask for.

Nothing is trained here.
"""

import json
import os
import re
import sys
from pathlib import Path

import pytest

import train
from minitransformer.runs.run_directory import RunDirectory
from minitransformer.settings.config import ModelConfig, RanksConfig, TrainingConfig
from minitransformer.settings.decoding_config import DecodingConfig
from minitransformer.settings.options import UsageError
from minitransformer.training import launch
from minitransformer.training.distributed import Communicator
from support.in_process import run_main


@pytest.fixture
def place(tmp_path, monkeypatch):
    """An empty folder, in which the test works."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def parse(*flags):
    return train.parse_arguments([str(flag) for flag in flags])


# The command line

DEFAULTS = {
    "config": None,
    "device": "cpu",
    "threads": None,
    "eager": False,
    "run": None,
    "start": None,
    "resume": None,
    "attempt": None,
    "dry_run": False,
    "profile": None,
    "cache": Path("cache"),
    "processes": RanksConfig(),
    "lasting": 1,
}


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", {}),
        ("--config x", {"config": "x"}),
        ("--device cuda --eager", {"device": "cuda", "eager": True}),
        ("--threads 3", {"threads": 3}),
        ("--run d", {"run": Path("d")}),
        ("--save-dir d", {"run": Path("d")}),
        ("--resume", {"resume": True}),
        ("--from d", {"start": Path("d")}),
        ("--resume d", {"resume": Path("d")}),
        ("--attempt 0", {"attempt": 0, "lasting": launch.LASTING_ERROR}),
        ("--dry-run", {"dry_run": True}),
        ("--profile", {"profile": 20}),
        ("--profile 3", {"profile": 3}),
        ("--cache d", {"cache": Path("d")}),
        ("--source en --d-model 8", {"source": "en", "d_model": 8}),
        ("--steps 3 --beam 2", {"steps": 3, "beam": 2}),
        ("--ranks 2", {"ranks": 2, "processes": RanksConfig(ranks=2)}),
        ("--restarts 1", {"restarts": 1, "processes": RanksConfig(restarts=1)}),
        (
            "--device cuda --gpus 2",
            {"device": "cuda", "gpus": 2, "processes": RanksConfig(gpus=2)},
        ),
        ("--device cuda:1", {"device": "cuda:1"}),
        (  # which one process may have, too
            "--dry-run --peer-timeout 5",
            {
                "dry_run": True,
                "peer_timeout": 5.0,
                "processes": RanksConfig(peer_timeout=5.0),
            },
        ),
    ],
)
def test_flags_are_read(flags, expected):
    assert vars(parse(*flags.split())) == {**DEFAULTS, **expected}


NEW_ONLY = (
    "--run, --config, --from, --profile and --dry-run are for a new run, not --resume"
)
ALONE = (
    "--profile and --dry-run run in one process: leave out --ranks, --gpus, "
    "--restarts and --reduce-precision"
)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--resume x --run y", NEW_ONLY),
        ("--resume x --config tiny", NEW_ONLY),
        ("--resume x --profile", NEW_ONLY),
        ("--resume x --from y", NEW_ONLY),
        ("--resume --dry-run", NEW_ONLY),
        ("--ranks 2 --device cuda", "--ranks starts processes on CPUs"),
        ("--gpus 2", "--gpus expects --device cuda, got cpu"),
        ("--gpus 2 --device cuda:1", "--gpus expects --device cuda, got cuda:1"),
        ("--eager", "--eager does nothing with --device cpu"),
        ("--profile --ranks 2", ALONE),
        ("--dry-run --restarts 1", ALONE),
        ("--dry-run --gpus 2 --device cuda", ALONE),
        ("--dry-run --reduce-precision bf16", ALONE),
        ("--ranks 2 --reduce-precision bf16", "--reduce-precision is for --gpus, not"),
        (
            "--reduce-precision fp16",
            "--reduce-precision: expected one of fp32, bf16, got fp16",
        ),
        ("--ranks 0", "argument --ranks: expected at least 1, got 0"),
        ("--threads 0", "--threads: expected a whole number of at least 1"),
        ("--profile 0", "--profile: expected a whole number of at least 1"),
        ("--dropout none", "--dropout: expected a number, got 'none'"),
        ("--attempt x", "--attempt: expected a whole number, got 'x'"),
        ("--nbest 2", "unrecognized argument --nbest"),
        ("--thread 2", "unrecognized argument --thread; did you mean --threads?"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(flags, message):
    code, out, error = run_main(train.main, *flags.split())
    assert (code, out) == (2, "")
    last = error.splitlines()[-1]
    assert last.startswith("train.py: error: ")
    assert message in last


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        ("--d-model 15", 2, "d_model: expected an even number, got 15"),
        ("--dropout 1", 2, "argument --dropout: expected below 1, got 1.0"),
        ("--steps 0", 2, "--max-update: expected at least 1, got 0"),
        ("--steps many", 2, "--steps"),
        (f"--steps 1{'0' * 400}", 2, "--max-update: expected a number below 2^63"),
        ("--encoder-layers 999999999999", 2, "a model of less than 2^40 parameters"),
        (f"--threads 1{'0' * 400}", 2, "--threads: expected a whole number"),
        ("--config huge", 2, "--config"),
        ("--source en", 2, "--source and --target need --data"),
        ("--data a b --source en --target de", 2, "unrecognized argument b"),
        ("--data .", 2, "--data expects --source and --target"),
        ("--data . --source en --target en", 2, "expected two languages, got en for"),
        (
            "--data none --source en --target de",
            1,
            "expected a folder of text, found none",
        ),
        ("--data . --source en --target de", 1, "expected train.en and train.de"),
        ("--train-source a", 2, "expected --train-source and --train-target"),
        ("--train-source a --train-target b", 1, "found none at"),
        ("--train-source a --train-target b --attempt 0", 1, "found none at"),
        ("--data no --source en --target de --attempt 0", 65, "expected a folder"),
        ("--train-source t --train-target t --best-by loss", 2, "expects validation"),
        ("--resume nowhere", 1, "expected a run directory, found no nowhere"),
        ("--resume", 1, "expected a training run in"),
        ("--max-positions 99", 2, "does nothing without --positions learned"),
        ("--beam 0", 2, "--beam-size: expected at least 1, got 0"),
        (
            "--device cpu --precision fp16",
            2,
            "fp32-onednn or bf16 with --device cpu",
        ),
        ("--device tpu", 2, "--device: expected cpu, cuda or cuda:N, got 'tpu'"),
        ("--ranks 2 --data no --source en --target de", 1, "expected a folder"),
    ],
)
def test_bad_arguments_get_one_line(place, flags, code, message):
    (place / "t").write_text("a b c\n")
    if "--device" in flags:
        flags += " --train-source t --train-target t"
    found, _, error = run_main(train.main, *flags.split())
    last = error.splitlines()[-1]
    assert (found, message in last) == (code, True), error
    assert last.startswith("train.py: error: ")
    assert "Traceback" not in error
    assert not list(place.glob("runs/*"))


def test_an_error_is_the_only_line(place):
    message = "expected a run directory, found no nowhere/config.json"
    ended = run_main(train.main, "--resume", "nowhere")
    assert ended == (1, "", f"train.py: error: {message}\n")


def test_the_help_shows_every_flag_with_a_text(monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    code, out, _ = run_main(train.main, "--help")
    assert code == 0
    assert out.startswith("usage: train.py [-h]")
    assert "\nTrain a Transformer" in out
    out = out.replace("--run DIR, ", "--run, ")  # as from Python 3.13 on
    flags = {
        "--config NAME": "(default tiny)",
        "--device DEVICE": "(default cpu)",
        "--threads N": "(default all cores)",
        "--eager": "",
        "--run, --save-dir DIR": "(default runs/CONFIG-TIME)",
        "--resume [DIR]": "(default the newest run)",
        "--dry-run": "",
        "--profile [N]": "(default 20)",
        "--cache DIR": "(default cache)",
        "--d-model N": "(default 512)",
        "--ranks N": "(default 1)",
    }
    for flag, end in flags.items():
        found = re.search(rf"^  {re.escape(flag)}\s+(\w.*)", out, re.MULTILINE)
        assert len(found[1].split()) >= 2, flag
        assert found[1].endswith(end)
    assert "attempt" not in out
    assert "    python train.py --resume " in out
    assert "The run directory receives" in out


# The settings and the run directory


def named_text(place):
    """Write text of a few lines; return the flags that name it, and its files."""
    for name in ("a", "b", "c", "d"):
        (place / name).write_text("x y\n" * 3)
    sides = ("train-source", "train-target", "val-source", "val-target")
    flags = [x for side in zip(sides, "abcd", strict=True) for x in side]
    flags[::2] = [f"--{side}" for side in sides]
    found = {"train": ("a", "b"), "val": ("c", "d")}
    return flags, {k: tuple(str(place / x) for x in v) for k, v in found.items()}


def test_flags_override_a_preset(place):
    preset = {"d_model": 6, "num_heads": 3, "d_ff": 5, "warmup": 7, "steps": 9}
    (place / "own.json").write_text(json.dumps({**preset, "beam": 3, "alpha": 0.5}))
    flags, files = named_text(place)
    settings = "--config own.json --d-ff 4 --steps 2 --alpha 0.25".split()
    config = train.new_config(parse(*settings, *flags))
    assert config.preset == "own"
    assert config.model == ModelConfig(d_model=6, num_heads=3, d_ff=4)
    assert config.training == TrainingConfig(warmup=7, steps=2)
    assert config.decoding == DecodingConfig(beam=3, alpha=0.25)
    assert config.text == files


def test_without_flags_the_tiny_preset_learns_the_built_in_corpus(place, monkeypatch):
    flags, files = named_text(place)
    pairs = train.find_text(train.build(train.TextConfig, {}, vars(parse(*flags))))
    asked = []
    monkeypatch.setattr(train, "built_in_corpus", lambda x: asked.append(x) or pairs)
    config = train.new_config(parse("--cache", "kept"))
    assert (config.preset, config.text) == ("tiny", files)
    assert asked == [Path("kept")]
    train.new_config(parse(*flags))
    assert len(asked) == 1


def test_checkpoints_come_by_updates_or_by_minutes(place):
    flags, _ = named_text(place)
    often = train.new_config(parse(*flags, "--config", "base", "--save-every", 9))
    assert (often.training.save_every, often.training.checkpoint_minutes) == (9, None)
    both = parse(*flags, "--save-every", 9, "--checkpoint-minutes", 5)
    with pytest.raises(UsageError, match="--save-every does nothing with --check"):
        train.new_config(both)


@pytest.mark.parametrize("flag", ["--patience", "--validate-every"])
def test_flags_of_validation_expect_text_for_it(place, flag):
    flags, files = named_text(place)
    assert "val" in files
    train.new_config(parse(*flags, flag, 3))
    train_alone = flags[: flags.index("--val-source")]
    with pytest.raises(UsageError, match=f"{flag} expects validation text, found none"):
        train.new_config(parse(*train_alone, flag, 3))
    # The preset's own patience is not refused: it is for runs with validation text.
    tuned = train.new_config(parse(*train_alone, "--config", "finetune"))
    assert tuned.training.patience
    with pytest.raises(UsageError, match="--patience expects"):
        tuned.resumed(parse("--patience", 3))


def test_a_limit_of_positions_is_for_learned_ones(place):
    flags, _ = named_text(place)
    learned = [*flags, "--positions", "learned"]
    limited = train.new_config(parse(*learned, "--max-positions", 9))
    assert limited.model.position_limit == 9
    assert train.new_config(parse(*learned)).model.position_limit == 512
    with pytest.raises(UsageError, match="--positions learned"):
        train.new_config(parse(*flags, "--max-positions", 9))


def test_rank_0_names_a_new_run(place):
    flags, _ = named_text(place)
    assert train.choose_run(parse(*flags), 1)[0] == Path()
    assert not (place / "runs").exists()
    path, settings, resumes = train.choose_run(parse(*flags, "--steps", 3), 0)
    assert (path.parent, path.is_dir()) == (Path("runs"), True)
    assert path.name.startswith("tiny-")
    assert (settings.training.steps, resumes) == (3, False)
    path, _, resumes = train.choose_run(parse(*flags, "--run", "own"), 0)
    assert (path, resumes) == (Path("own"), False)
    assert train.choose_run(parse(*flags, "--run", "own"), 1)[0] == Path("own")


def test_a_run_is_continued_with_its_settings(place):
    flags, _ = named_text(place)
    settings = train.new_config(parse(*flags, "--d-ff", 4, "--steps", 3))
    for name in ("runs/one", "runs/two"):
        RunDirectory(place / name).path.mkdir(parents=True)
        RunDirectory(place / name).begin(settings, b"", False)
    os.utime(place / "runs" / "one", (1, 1))
    for resume, name in (([], "two"), (["runs/one"], "one")):
        args = parse("--resume", *resume, "--steps", 5)
        path, found, resumes = train.choose_run(args, 0)
        assert (path, resumes) == (Path("runs") / name, True)
        assert (found.model, found.training.steps) == (settings.model, 5)


def test_a_restart_continues_the_run_that_the_first_attempt_began(place):
    flags, _ = named_text(place)

    def attempt(number, *more):
        return train.choose_run(parse(*flags, *more, "--attempt", number), 0)

    settings = train.new_config(parse(*flags))
    assert attempt(1, "--run", "run") == (Path("run"), settings, False)
    Path("run").mkdir()
    RunDirectory(Path("run")).begin(settings, b"", False)
    assert attempt(1, "--run", "run") == (Path("run"), settings, True)
    assert not attempt(0, "--run", "run")[2]
    assert not attempt(1)[2]
    assert not train.choose_run(parse(*flags, "--run", "run"), 0)[2]


# The command's work


def test_a_rank_that_fails_ends_the_others(place, monkeypatch, capsys):
    ended, asked = [], []

    class Rank(Communicator):
        def abort(self, code):
            ended.append(code)

    def connect(device, config):
        asked.append((device, config))
        ranks = Rank()
        ranks.rank, ranks.size = 1, 2
        return ranks

    def fail(error):
        def run_training(args, ranks):
            assert (args.config, ranks.rank) == ("x", 1)
            if isinstance(error, int):
                return error
            raise error

        monkeypatch.setattr(train, "run_training", run_training)
        return run_main(train.main, "--peer-timeout", 5, "--config", "x", *more)

    monkeypatch.setattr(train, "connect_ranks", connect)
    more = ()
    code, _, error = fail(RuntimeError("broken"))
    assert (code, error) == (1, "train.py: error: rank 1: broken\n")
    assert fail(UsageError("wrong"))[0] == 2
    assert fail(ValueError("damaged"))[0] == 1
    more = ("--attempt", 0)
    assert fail(ValueError("damaged"))[0] == launch.LASTING_ERROR
    assert ended == [1, 2, 1, launch.LASTING_ERROR]
    assert asked == [("cpu", RanksConfig(peer_timeout=5.0))] * 4
    for code in (0, 143):
        assert fail(code)[0] == code
    assert len(ended) == 4


@pytest.fixture
def launched(monkeypatch):
    """What is launched, and the devices that are looked for, instead of doing so."""
    calls, devices = [], []

    def launch_training(*arguments):
        calls.append(arguments)
        return 7

    monkeypatch.setattr(train, "launch_training", launch_training)
    monkeypatch.setattr(train, "check_device", devices.append)
    return calls, devices


def test_ranks_are_launched_with_the_flags(place, monkeypatch, launched):
    calls, devices = launched
    flags, _ = named_text(place)
    flags += ["--ranks", "2"]
    monkeypatch.setattr(sys, "argv", ["train.py", *flags])
    assert run_main(lambda flags: train.main())[0] == 7
    command, run, resumes, processes = calls[0]
    script = Path(train.__file__).absolute()
    assert command == [sys.executable, str(script), *flags]
    assert run.path.parent == Path("runs")
    assert (resumes, processes) == (False, RanksConfig(ranks=2))
    assert not run.path.exists()  # nothing was begun there
    (place / "kept").mkdir()
    assert run_main(train.main, *flags, "--run", "kept")[0] == 7
    assert calls[1][0] == [*command, "--run", "kept"]
    assert calls[1][1].path == Path("kept")
    assert (place / "kept").is_dir()
    (place / "kept" / "notes").write_text("")
    code, _, error = run_main(train.main, *flags, "--run", "kept")
    assert (code, "new or empty run directory" in error) == (1, True)
    assert len(calls) == 2
    assert devices == ["cpu"] * 3


def test_ranks_on_gpus_need_the_last_of_them(place, launched):
    calls, devices = launched
    flags, _ = named_text(place)
    run_main(train.main, *flags, "--device", "cuda", "--gpus", 3)
    run_main(train.main, *flags, "--device", "cuda:1", "--restarts", 1)
    run_main(train.main, *flags, "--device", "cuda", "--gpus", 2)
    assert devices == ["cuda:2", "cuda:1", "cuda:1"]
    assert [call[3].gpus for call in calls] == [3, 1, 2]


def test_a_run_is_resumed_by_ranks(place, launched):
    calls, _ = launched
    flags, _ = named_text(place)
    settings = train.new_config(parse(*flags))
    run = RunDirectory(place / "run")
    run.path.mkdir()
    run.begin(settings, b"", False)
    assert run_main(train.main, "--resume", "run", "--ranks", 2)[0] == 7
    assert (calls[0][1].path, calls[0][2]) == (Path("run"), True)
    assert run.config.exists()


def test_a_run_from_a_model_has_the_preset_finetune(model_path, place):
    flags, _ = named_text(place)
    tuned = train.new_config(parse("--from", model_path, *flags))
    assert (tuned.preset, tuned.training.learning_rate) == ("finetune", 3e-4)
    other = train.new_config(parse("--from", model_path, "--config", "base", *flags))
    assert other.preset == "base"


def test_an_empty_name_of_a_preset_is_not_the_usual_one(place):
    flags, _ = named_text(place)
    with pytest.raises(UsageError, match="expected"):
        train.new_config(parse("--config", "", *flags))
