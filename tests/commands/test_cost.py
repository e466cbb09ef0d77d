"""`minitransformer cost`, against Table 2 and arithmetic by hand."""

import pytest

from minitransformer.commands import cost


@pytest.mark.parametrize(
    ("config", "steps", "published"),
    [("base", 100_000, 3.3e18), ("big", 300_000, 2.3e19)],
)
def test_table_2_training_cost(config, steps, published, capsys):
    """Table 2, last column: time on eight P100 at 9.5 TFLOP/s each."""
    assert cost.main(["--config", config, "--steps", str(steps)]) == 0
    lines = capsys.readouterr().out.splitlines()
    [paper] = [float(x.split()[-1]) for x in lines if x.startswith("FLOP, by time")]
    [counted] = [float(x.split()[-1]) for x in lines if x.startswith("FLOP, counted")]
    assert paper == pytest.approx(published, rel=0.02)
    assert 0.2 < counted / paper < 0.6  # a GPU does not reach what it could


def test_the_papers_time_is_only_that_of_the_papers_models(capsys, tmp_path):
    """Parameters and operations of any model are counted; its time has to be given."""
    (tmp_path / "base.json").write_text('{"d_model": 64}')
    assert cost.main(["--config", str(tmp_path / "base.json")]) == 0
    assert "by time" not in capsys.readouterr().out
    assert cost.main(["--d-model", "256"]) == 0
    shown = capsys.readouterr().out
    assert "parameters" in shown
    assert "FLOP, counted" in shown
    assert "by time" not in shown
    assert cost.main(["--d-model", "256", "--device", "1x50"]) == 2
    assert "expected --seconds-a-step" in capsys.readouterr().err
    timed = ["--device", "2x50", "--seconds-a-step", "0.5", "--steps", "7200"]
    assert cost.main(["--d-model", "256", *timed]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert [x.split()[-1] for x in shown if x.startswith("hours on 2x50")] == ["1.0"]
    # 3,600 s x 2 GPUs x 50 TFLOP/s
    assert [x.split()[-1] for x in shown if "by time" in x] == ["3.60e+17"]


@pytest.mark.parametrize("flag", ["--dropout", "--learning-rate", "--seed"])
def test_settings_that_cost_nothing_are_no_flags(flag, capsys):
    with pytest.raises(SystemExit, match="2"):
        cost.main([flag, "0"])
    assert f"unrecognized argument {flag}" in capsys.readouterr().err


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf"])
def test_steps_that_take_no_time_are_refused(seconds, capsys):
    assert cost.main([f"--seconds-a-step={seconds}"]) == 2
    assert "--seconds-a-step: expected more than 0" in capsys.readouterr().err
