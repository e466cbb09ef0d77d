"""Settings: their ranges, presets, flags and files, and the errors of commands."""

import argparse
import json
import os
import re
from dataclasses import fields, replace

import pytest

import train
import translate
from minitransformer import cli
from minitransformer.cli import ELSEWHERE
from minitransformer.settings import options
from minitransformer.settings.config import ModelConfig, RunConfig, TrainingConfig
from minitransformer.settings.decoding_config import DecodingConfig, TranslationConfig
from minitransformer.settings.options import UsageError, make_config
from minitransformer.settings.presets import PRESETS, find_preset, preset_for
from minitransformer.settings.text_config import TextConfig
from support.in_process import rows

ALL = (ModelConfig, TrainingConfig, DecodingConfig)


def parse(*flags):
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for cls in (TextConfig, *ALL):
        cli.add_arguments(parser, cls)
    return parser.parse_args(flags)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_in_range_and_hold_known_fields(name):
    known = {field.name for cls in ALL for field in fields(cls)}
    assert PRESETS[name].keys() <= known
    for cls in ALL:
        options.make_config(cls, PRESETS[name], {})


def test_the_defaults_are_those_of_base_but_for_batches_and_checkpoints():
    for cls in ALL:
        base, default = options.make_config(cls, PRESETS["base"], {}), cls()
        names = (f.name for f in fields(cls))
        differ = {n for n in names if getattr(base, n) != getattr(default, n)}
        assert differ <= {"max_tokens", "checkpoint_minutes", "average_by"}


@pytest.mark.parametrize("cls", ALL)
def test_every_field_has_a_flag(cls):
    flags, default = [], cls()
    for field in fields(cls):
        value = getattr(default, field.name)
        value = value[0] if isinstance(value, tuple) else value
        if value is None:
            value = (field.metadata["flag"]["choices"] or (99,))[0]
        flags += [options.flag_name(field.name), str(value)]
    names = {field.name for field in fields(cls)}
    assert options.flags_of(parse(*flags), cls).keys() == names


@pytest.mark.parametrize(
    ("cls", "values", "message"),
    [
        (ModelConfig, {"d_ff": 2**31}, r"expected a model of less than 2\^40"),
        (ModelConfig, {"d_model": "64"}, "d_model: expected int, got '64'"),
        (TrainingConfig, {"steps": 10**400}, r"steps: expected a number below 2\^63"),
        # With these, which have no flags, Adam would divide by zero.
        (TrainingConfig, {"epsilon": 0.0}, "epsilon: expected above 0, got 0.0"),
        (TrainingConfig, {"beta1": 1.0}, "beta1: expected below 1, got 1.0"),
        (TranslationConfig, {"top_p": 0.5}, "top_p: does nothing without sample"),
    ],
)
def test_wrong_values_are_refused(cls, values, message):
    with pytest.raises(UsageError, match=message):
        options.make_config(cls, {}, values)


def test_a_positive_argument_has_at_most_nine_digits():
    assert cli.positive("999999999") == 999_999_999
    for text in ("1000000000", "0", "-1", "1.5", "\N{SUPERSCRIPT TWO}", ""):
        with pytest.raises(argparse.ArgumentTypeError, match="at most nine digits"):
            cli.positive(text)


def run_config():
    configs = [options.make_config(cls, PRESETS["tiny"], {}) for cls in ALL]
    return RunConfig("tiny", *configs, {"train": ("a", "b")})


@pytest.mark.parametrize("part", ["model", "training", "decoding", "text"])
def test_a_damaged_run_config_is_refused(part):
    stored = json.loads(run_config().to_json())
    for damage in (None, [1]):
        with pytest.raises(ValueError, match="expected a run's configuration"):
            RunConfig.from_json(json.dumps({**stored, part: damage}))
    with pytest.raises(ValueError, match="Expecting value"):
        RunConfig.from_json("")


OLDER = {"vocab_type": "bpe", "user_symbols": [], "normalization": "nmt_nfkc"}


@pytest.mark.parametrize("file", [None, "/own.model"])
def test_an_older_run_named_the_file_of_its_vocabulary_among_other_settings(file):
    stored = {**json.loads(run_config().to_json()), "vocabulary": file}
    settings = RunConfig.from_json(json.dumps(stored))
    assert settings.vocabulary == file
    older = json.dumps({**stored, "vocabulary": {"tokenizer": file, **OLDER}})
    assert RunConfig.from_json(older) == settings


def test_settings_of_another_version_are_left_out():
    stored = json.loads(run_config().to_json())
    stored["training"] |= {"on_save_error": "continue"}
    stored |= {"weights": [], "tags": ["<x>"]}
    assert RunConfig.from_json(json.dumps(stored)) == run_config()


@pytest.mark.parametrize(
    ("flags", "changed"),
    [
        ("--steps 123456", {"steps": 123_456}),
        ("--keep-last 77", {"keep_last": 77}),
        ("--precision bf16", {"precision": "bf16"}),
        ("--d-model 128 --steps 7", None),
        ("--seed 9", None),
        ("--beam 9", None),
        ("--best-by bleu", None),
        ("--data x", None),
    ],
)
def test_a_resumed_run_may_end_report_and_keep_otherwise(flags, changed):
    run = replace(run_config(), text={"train": ("a", "b"), "val": ("c", "d")})
    if changed is None:
        message = f"{flags.split()[0]}: cannot change in a resumed run"
        with pytest.raises(UsageError, match=message):
            run.resumed(parse(*flags.split()))
        return
    expected = replace(run, training=replace(run.training, **changed))
    assert run.resumed(parse(*flags.split())) == expected != run


def test_settings_from_a_file_build_on_a_preset(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text('{"config": "multi30k", "steps": 5, "model": {"d_model": 64}}')
    name, values = find_preset(str(path))
    assert name == "mine"
    assert values == {**PRESETS["multi30k"], "steps": 5, "d_model": 64}


# The name of a preset, what its file has, and what the error says.
WRONG_PRESETS = """\
multi3ok |  | or a preset, got multi3ok; did you mean multi30k?
own |  | or a preset, got own; presets are tiny, multi30k,
none.json |  | No such file
x.json | { | x.json:
x.json | [1] | expected an object of settings
x.json | {"d_modell": 1} | unknown setting d_modell; did you mean d_model
x.json | {"preset": "base"} | unknown setting preset
x.json | {"config": "bose"} | got bose; did you mean base?
x.toml | d_model = 8 | expected FILE.json or a preset, got x.toml
pipe.json |  | pipe.json: expected a file, got a pipe
"""


@pytest.mark.parametrize(("name", "text", "message"), rows(WRONG_PRESETS))
def test_wrong_presets_are_explained(place, name, text, message):
    os.mkfifo("pipe.json")  # which nobody writes to
    if text:
        (place / name).write_text(text)
    with pytest.raises(UsageError, match=re.escape(message)):
        find_preset(name)


@pytest.mark.parametrize(
    ("pairs", "name", "size"),
    [
        (20, "multi30k", 1262),
        (2000, "multi30k", 1922),
        (29_000, "multi30k", 10_000),
        (184_000, "small", 10_000),
        (4_500_000, "base", 37_000),
    ],
)
def test_the_number_of_pairs_chooses_a_preset(pairs, name, size):
    found, settings = preset_for(pairs)
    assert found == name
    assert settings == {**PRESETS[name], "vocab_size": size}


def test_every_flag_of_other_toolkits_leads_to_one_of_a_script(capsys):
    known = ""
    for script in (train.main, translate.main):
        with pytest.raises(SystemExit):
            script(["--help-all"])
        known += capsys.readouterr().out
    for flags in ELSEWHERE.values():
        for flag in flags.split():
            assert re.search(rf"{flag}\b", known)


def test_steps_between_checkpoints_replace_a_presets_minutes(tmp_path):
    def minutes(*flags, preset=PRESETS["base"]):
        values = options.flags_of(parse(*flags), TrainingConfig)
        return make_config(TrainingConfig, preset, values).checkpoint_minutes

    assert minutes() == 10
    assert minutes("--save-every", "7") is None
    assert minutes("--checkpoint-minutes", "3") == 3
    assert minutes("--checkpoint-minutes", "3", "--save-every", "7") == 3
    assert minutes("--checkpoint-minutes", "3", preset=PRESETS["multi30k"]) == 3
    mine = tmp_path / "mine.json"
    mine.write_text('{"config": "base", "save_every": 7}')
    assert minutes(preset=find_preset(str(mine))[1]) is None
    mine.write_text('{"config": "base", "steps": 7}')
    assert minutes(preset=find_preset(str(mine))[1]) == 10


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (MemoryError("of 512 bytes"), 1, "out of memory, try a lower --max-tokens"),
        (ValueError("a \x1b[2J\nü, \udcff"), 1, r"error: a \x1b[2J\nü, \udcff"),
        (KeyboardInterrupt(), 130, "train.py: error: interrupted"),
    ],
)
def test_an_error_is_one_line_that_can_be_printed(capsys, error, code, said):
    def work():
        raise error

    assert cli.exit_code("train.py", work) == code
    [line] = capsys.readouterr().err.splitlines()
    assert said in line
