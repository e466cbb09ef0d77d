"""The state of a run, as checkpoints of this version and of older ones hold it."""

import dataclasses
import json
import math

import pytest

from minitransformer.runs.state import RunState, Window, json_of
from minitransformer.settings.config import TrainingConfig
from minitransformer.settings.decoding_config import DecodingConfig

STATE = RunState(
    text={"train": "0f"},
    step=20,
    position=3,
    seconds=1.5,
    best_loss=4.0,
    best_bleu=30.0,
    gradient_norm=2.0,
    loss_scale=(1024.0, 7),
    decoding=DecodingConfig(beam=7, alpha=1.0),
    window=Window(loss=5.0, target=9.0),
)


def stored(state):
    return json.loads(json_of(dataclasses.asdict(state)))


def test_a_state_is_read_as_it_was_written():
    assert RunState.from_json(stored(STATE)) == STATE
    begun = RunState.from_json(stored(RunState()))
    assert begun.best_loss == math.inf
    assert math.isnan(begun.gradient_norm)


def test_older_states_lack_fields():
    older = stored(STATE) | {"decoding": {}}
    older |= {"lowest_cost": 3.0, "tags": ["<2de>"]}  # which have left since
    for name in ("best_bleu", "pending_validations"):
        del older[name]
    state = RunState.from_json(older)
    assert state.text == {"train": "0f"}
    assert state.best_bleu == -1
    assert state.decoding == DecodingConfig()
    assert RunState.from_json({}).step == 0


def test_a_state_says_how_its_run_decodes_with_one_translation_a_line():
    several = stored(STATE) | {"decoding": {**vars(STATE.decoding), "nbest": 3}}
    assert RunState.from_json(several).decoding == STATE.decoding


@pytest.mark.parametrize(
    "wrong",
    [
        {"window": 5},
        {"loss_scale": 5},
        {"languages": 5},
        {"decoding": {**vars(DecodingConfig()), "beam": 0}},
    ],
    ids=str,
)
def test_what_is_no_state_is_refused(wrong):
    with pytest.raises((ValueError, TypeError, AttributeError)):
        RunState.from_json(stored(STATE) | wrong)


def test_a_run_ends_at_its_first_limit():
    training = TrainingConfig(steps=20, minutes=0.5, patience=2)
    assert RunState(step=20).used_up(training) == "--steps 20"
    assert RunState(seconds=30.0).used_up(training) == "--minutes 0.5"
    assert RunState(validations_since_best=2).used_up(training) == "--patience 2"
    assert RunState(step=19, seconds=29.9).used_up(training) is None


@pytest.mark.parametrize(
    ("step", "seconds", "minutes", "said"),
    [
        (50, 100.0, None, "step     50/8,000  1%, 4:25:00 left"),  # 100 * 159 s
        (4000, 600.0, 60.0, "step  4,000/8,000  50%, 0:10:00 left"),
        (50, 100.0, 5.0, "step     50/8,000  33% of 5 minutes, 0:03:20 left"),
        (8000, 9.0, None, "step  8,000/8,000  100%, 0:00:00 left"),
        (20, 301.0, 5.0, "step     20/8,000  100% of 5 minutes, 0:00:00 left"),
    ],
)
def test_the_time_that_is_left_is_that_of_the_sooner_limit(
    step, seconds, minutes, said
):
    state, training = RunState(step=step, seconds=seconds), {"minutes": minutes}
    assert state.outlook(TrainingConfig(steps=8000, **training)) == said
