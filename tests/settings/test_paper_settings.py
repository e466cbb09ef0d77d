"""The presets against the numbers of the paper, which are written out here."""

from dataclasses import asdict

import pytest

from minitransformer.settings.config import ModelConfig, TrainingConfig
from minitransformer.settings.decoding_config import DecodingConfig
from minitransformer.settings.options import make_config
from minitransformer.settings.presets import PRESETS


def settings(preset):
    """Every setting of a preset by name."""
    model, *others = (
        make_config(cls, PRESETS[preset], {})
        for cls in (ModelConfig, TrainingConfig, DecodingConfig)
    )
    found = {"d_k": model.key_width, "d_v": model.value_width}
    for config in (model, *others):
        found = asdict(config) | found
    return found


# What all models of sections 3, 5 and 6.1 have.
BATCHES = {"max_tokens": 25_000, "accumulate": 1}
OPTIMIZER = {
    "beta1": 0.9,
    "beta2": 0.98,
    "epsilon": 1e-9,
    "warmup": 4000,
    "learning_rate": None,
    "clip_norm": None,
}
REGULARISATION = {"attention_dropout": 0.0, "relu_dropout": 0.0}
DECODING = {"beam": 4, "alpha": 0.6, "max_len_a": 1.0, "max_len_b": 50}
ALWAYS = {**BATCHES, **OPTIMIZER, **REGULARISATION, **DECODING}


def check(preset, **expected):
    found = settings(preset)
    assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize(("size", "count"), [("base", 5), ("big", 20)])
def test_base_and_big_save_every_ten_minutes_and_average_the_last(size, count):
    for preset in (size, f"{size}-en-fr"):
        check(preset, checkpoint_minutes=10.0, average=count, average_by="number")
        assert settings(preset)["keep_last"] >= count


def test_english_french_has_32_000_pieces_and_less_dropout_in_big():
    for size in ("base", "big"):
        changes = {"vocab_size": 32_000, "dropout": 0.1}
        assert settings(f"{size}-en-fr") == {**settings(size), **changes}


def test_parsing_is_that_of_section_6_3():
    shape = {"encoder_layers": 4, "decoder_layers": 4, "d_model": 1024}
    decoding = {"beam": 21, "alpha": 0.3, "max_len_a": 1.0, "max_len_b": 300}
    for preset, pieces in (("parsing", 16_000), ("parsing-semi", 32_000)):
        check(preset, vocab_size=pieces, **shape, **decoding, **BATCHES, **OPTIMIZER)
        check(preset, max_length=512)  # which docs/paper.md names


# Table 3, with what it leaves out filled in from its row base.
COLUMNS = "encoder_layers d_model d_ff num_heads d_k d_v dropout label_smoothing steps"
TABLE_3 = """\
base              6   512  2048   8   64   64  0.1  0.1  100000
base-a-h1         6   512  2048   1  512  512  0.1  0.1  100000
base-a-h4         6   512  2048   4  128  128  0.1  0.1  100000
base-a-h16        6   512  2048  16   32   32  0.1  0.1  100000
base-a-h32        6   512  2048  32   16   16  0.1  0.1  100000
base-b-dk16       6   512  2048   8   16   64  0.1  0.1  100000
base-b-dk32       6   512  2048   8   32   64  0.1  0.1  100000
base-c-n2         2   512  2048   8   64   64  0.1  0.1  100000
base-c-n4         4   512  2048   8   64   64  0.1  0.1  100000
base-c-n8         8   512  2048   8   64   64  0.1  0.1  100000
base-c-d256       6   256  2048   8   32   32  0.1  0.1  100000
base-c-d1024      6  1024  2048   8  128  128  0.1  0.1  100000
base-c-ff1024     6   512  1024   8   64   64  0.1  0.1  100000
base-c-ff4096     6   512  4096   8   64   64  0.1  0.1  100000
base-d-dropout0   6   512  2048   8   64   64  0.0  0.1  100000
base-d-dropout2   6   512  2048   8   64   64  0.2  0.1  100000
base-d-smoothing0 6   512  2048   8   64   64  0.1  0.0  100000
base-d-smoothing2 6   512  2048   8   64   64  0.1  0.2  100000
base-e-learned    6   512  2048   8   64   64  0.1  0.1  100000
big               6  1024  4096  16   64   64  0.3  0.1  300000
"""
ROWS = {name: values for name, *values in map(str.split, TABLE_3.splitlines())}


@pytest.mark.parametrize("row", ROWS)
def test_every_row_of_table_3(row):
    found = settings(row)
    expected = [*map(float, ROWS[row])]
    assert [found[name] for name in COLUMNS.split()] == expected
    assert found["decoder_layers"] == found["encoder_layers"]
    assert found["positions"] == ("learned" if "learned" in row else "sinusoidal")
    check(row, vocab_size=37_000, attention_window=None, **ALWAYS)


def test_table3_trains_big_for_three_times_the_steps(benchmark, monkeypatch, tmp_path):
    """By the commands that the benchmark runs, without training."""
    table3 = benchmark("table3")
    assert list(table3.PAPER) == list(ROWS)
    commands = []

    class Done:
        returncode = 0

    def run(command, **options):
        commands.append(command)
        return Done

    monkeypatch.setattr(table3.subprocess, "run", run)
    monkeypatch.setattr("sys.argv", ["table3.py", "--data", "d", "--runs", "."])
    monkeypatch.chdir(tmp_path)
    args, flags = table3.parse_arguments()
    for row in ROWS:
        table3.train(args, row, 1, flags)
    steps = {c[c.index("--config") + 1]: c[c.index("--steps") + 1] for c in commands}
    assert len(steps) == 20
    assert steps.pop("big.json") == "300000"
    assert set(steps.values()) == {"100000"}
    for command in commands:
        assert command[command.index("--average") + 1] == "1"  # no averaging (6.2)
