"""Randomly changed input gets one clear error: no crash, no hang, no memory."""

import json
import random
import subprocess
import sys

import numpy as np
import pytest

from minitransformer.settings.config import ModelConfig, RunConfig, TrainingConfig
from minitransformer.settings.decoding_config import DecodingConfig
from minitransformer.text.tokenizer import Tokenizer
from minitransformer.training.progress import TrainingState
from support.fuzz_targets import TARGETS, Target, check_refusal
from support.fuzzing import MAX_SECONDS, Judge, minimised, mutated, random_inputs
from support.scripts import with_tests_on_path

WINDOW = {"loss": 1.0, "source": 9.0, "target": 9.0, "seconds": 0.5, "left_out": 0.0}
STATE = TrainingState({"train": ""}, step=2, position=1, seconds=1.5).to_json()


def state(**changes):
    """The state of a run in a checkpoint, with some values changed."""
    return b"\x02" + json.dumps(STATE | {"window": WINDOW} | changes).encode()


def metrics(**values):
    """A line of metrics.jsonl, and one that is in order."""
    lines = {"step": 1, **values}, {"step": 2, "loss": 3.5}
    return b"\x00" + "\n".join(map(json.dumps, lines)).encode()


def settings(text):
    """The config.json of a run that names this text."""
    parts = ModelConfig(), TrainingConfig(), DecodingConfig()
    return b"\x00" + RunConfig("base", *parts, text).to_json().encode()


# The targets' inputs that once failed, as short as they could be made, with the error.
FOUND = [
    ("checkpoints", b"\x04\xe6\xb1a\xff"),  # IndexError: all logits are NaN
    ("metrics", b"\x00\xff\x88"),  # UnicodeDecodeError
    ("metrics", b"\x00" + b"[" * 100_000),  # RecursionError
    ("metrics", metrics(loss=1)),  # KeyError: no seconds
    ("metrics", metrics(loss=1, seconds=1)),  # KeyError: no speed
    ("metrics", metrics(gradient_norm=None)),  # TypeError
    ("metrics", metrics(gradient_norm=10**400)),  # OverflowError
    ("metrics", metrics(gradient_norm=float("nan"))),  # ValueError: NaN to integer
    ("metrics", metrics(seconds={})),  # TypeError
    ("metrics", metrics(step=10**400)),  # OverflowError
    ("metrics", b'\x00{"step": 1, "loss": 0}\n{"step": 2, "loss": 1e-320}'),
    ("metrics", metrics(loss=float("inf"), seconds=[])),  # TypeError
    ("metrics", state(epoch={})),  # TypeError
    ("metrics", state(epoch=-1)),  # ValueError of NumPy
    ("metrics", state(position=float("nan"))),  # TypeError
    ("metrics", state(position=-9)),  # IndexError
    ("metrics", state(best_loss="")),  # TypeError
    ("metrics", state(step="")),  # TypeError
    ("metrics", state(skipped=float("inf"))),  # OverflowError
    ("metrics", state(seconds="")),  # TypeError
    ("metrics", state(loss_scale=[2.0, 10**30])),  # OverflowError
    ("metrics", state(window={"source": [], "seconds": 1.0})),  # TypeError
    ("metrics", state(window=WINDOW | {"left_out": 10**30})),  # OverflowError
    ("settings", b'\x01{"minutes": 1%s}' % (b"0" * 400)),  # OverflowError
    ("settings", b"\x01" + b"[" * 100_000),  # RecursionError
    ("settings", settings({"train": [1.0, "x"]})),  # TypeError
    ("arguments", b"\x00-\x0c"),  # a message with control characters
    ("trees", b"\x00" * 256),  # a message of more than 1,000 characters
]


def run(folder, count, seed):
    """Feed the targets in a process of its own, which may crash without the tests."""
    code = (
        "import json, pathlib, sys; from support.fuzzing import fuzz_randomly\n"
        "folder, count, seed = sys.argv[1:]\n"
        "rows = fuzz_randomly(pathlib.Path(folder), int(count), int(seed))\n"
        "print(json.dumps(rows))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder), str(count), str(seed)],
        env=with_tests_on_path(),
        capture_output=True,
        text=True,
        errors="replace",
    )
    assert done.returncode == 0, (
        f"seed {seed}: {done.returncode}\n{done.stderr[-3000:]}"
    )
    rows = json.loads(done.stdout.splitlines()[-1])
    for row in rows:
        assert row["inputs"] == count
        assert not row["failures"], row
        assert row["slowest_ms"] < 1000 * MAX_SECONDS, row
        assert row["peak_mb"] < 300, row
    return rows


def test_randomly_changed_input_of_every_kind_gets_one_error(tmp_path):
    rows = run(tmp_path / "0", 40, seed=0)
    assert {row["target"] for row in rows} == TARGETS.keys()


@pytest.mark.stress
def test_many_randomly_changed_inputs_get_one_error_each(tmp_path):
    for seed in (1, 2):
        print(run(tmp_path / str(seed), 1000, seed))


@pytest.mark.parametrize(("name", "data"), FOUND)
def test_what_failed_once_is_refused(name, data, tmp_path):
    TARGETS[name](tmp_path).run(data)


def test_mutations_change_the_data():
    rng = random.Random(0)
    data = bytes(range(256)) * 4
    assert np.mean([mutated(data, rng) != data for _ in range(200)]) > 0.9


class Faulty(Target):
    """A target that fails on some inputs in two ways, and refuses others."""

    def __init__(self, folder):
        super().__init__(folder)
        self.seeds = [b"0 good", b"0 bad"]

    def run(self, data):
        if b"bad" in data:
            raise KeyError("bad")
        if b"worse" in data:
            int("worse")


def test_failures_are_found_named_and_made_short(tmp_path):
    target = Faulty(tmp_path)
    judge = Judge(target.run, tmp_path)
    for data in (b"0 good", b"0 this is bad", b"0 bad", b"0 a worse one"):
        judge(data)
    assert {name.split("-")[0] for name in judge.failures} == {"KeyError", "ValueError"}
    [kept] = [path for path in tmp_path.glob("failure-KeyError*") if not path.suffix]
    assert kept.read_bytes() == b"0 bad"
    assert minimised(target.run, b"0 this is a bad one") == b"0bad"
    assert len(list(random_inputs(target, 20, seed=0))) == 20


def test_only_errors_of_this_project_are_refusals():
    with pytest.raises(ValueError, match="expected a SentencePiece model") as refused:
        Tokenizer(b"x")
    check_refusal(refused.value)
    for wrong in (int, json.loads):
        with pytest.raises(ValueError, match=r"'x'|Expecting") as error:
            wrong("x")
        with pytest.raises(type(error.value)):
            check_refusal(error.value)
