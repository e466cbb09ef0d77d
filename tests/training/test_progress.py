"""The state of a run in checkpoints: what is refused, and what older runs hold."""

import dataclasses
import io
import json
import math
from errno import EIO
from pathlib import Path

import numpy as np
import pytest

from minitransformer.cli import OutputStream
from minitransformer.model.parameters import ParameterBuffer
from minitransformer.settings.config import (
    UNK_ID,
    TrainingConfig,
)
from minitransformer.settings.decoding_config import DecodingConfig
from minitransformer.text.batches import BatchStream, ParallelCorpus
from minitransformer.text.ids import Ragged
from minitransformer.text.pairs import TextPair
from minitransformer.training.cost import training_flops, training_memory
from minitransformer.training.loss_scale import LossScale
from minitransformer.training.parallel import CpuModel
from minitransformer.training.progress import (
    Progress,
    TrainingState,
    Window,
    run_summary,
)
from support.models import small_model

STATE = TrainingState(
    {"train": "0f"},
    step=20,
    epoch=1,
    position=3,
    seconds=1.5,
    best_loss=4.0,
    lowest_cost=-100.00000000000004,  # a BLEU that sacreBLEU rounded up
    skipped=2,
    learning_rate=1e-3,
    gradient_norm=math.inf,
    window=Window(10.0, 5.0, 6.0, 0.5, 0.0),
).to_json()


DECODING = dataclasses.asdict(DecodingConfig())

# What older states may lack.
MAY_BE_MISSING = {"gradient_norm", "best_bleu", "decoding"}
MAY_BE_MISSING |= {"pending_validations", "lowest_cost"}


def stored(**changes):
    """The state as JSON gives it back, with some values replaced or (None) removed."""
    state = json.loads(json.dumps(STATE))
    for name, value in changes.items():
        part = state["window"] if name in state["window"] else state
        part[name] = value
        if value is None:
            del part[name]
    return state


def test_a_state_survives_json():
    assert TrainingState.from_json(stored()).to_json() == STATE
    scaled = TrainingState.from_json(stored(loss_scale=[1024.0, 7]))
    assert scaled.loss_scale == (1024.0, 7)
    begun = TrainingState.from_json(stored(best_loss=math.inf))
    assert begun.best_loss == math.inf  # of a checkpoint written earlier
    unknown = dict.fromkeys(("best_loss", "lowest_cost", "gradient_norm"))
    found = TrainingState.from_json(stored() | unknown)
    assert (found.best_loss, found.lowest_cost) == (math.inf, math.inf)
    assert math.isnan(found.gradient_norm)
    with pytest.raises(ValueError, match="seconds None"):
        TrainingState.from_json(stored() | {"seconds": None})
    all_skipped = TrainingState.from_json(stored(step=2))
    assert all_skipped.step == all_skipped.skipped


def test_an_older_state_has_the_digest_of_the_training_text_alone():
    assert TrainingState.from_json(stored(text="0f")).text == {"train": "0f"}


def test_an_older_state_has_no_best_bleu_and_no_decoding():
    older = stored(best_bleu=None, decoding=None, pending_validations=None)
    state = TrainingState.from_json(older)
    assert (state.best_bleu, state.decoding) == (-1.0, {})
    assert state.pending_validations == 0
    assert DecodingConfig.of_run(older) == DecodingConfig.of_run(None)


@pytest.mark.parametrize("by", [None, "loss", "bleu"])
def test_in_an_older_state_the_best_validation_is_that_of_the_best_model(by):
    def validated(loss, bleu):
        older = stored(lowest_cost=None, best_bleu=30.0, validations_since_best=2)
        state = TrainingState.from_json(older)
        return state.count_validation(loss, bleu, by), state.validations_since_best

    better = (3.0, 20.0) if by != "bleu" else (5.0, 100.00000000000004)
    assert validated(*better) == (True, 0)
    assert validated(*((3.0, 20.0) if by == "bleu" else (5.0, 40.0))) == (False, 3)
    assert validated(4.0, 30.0) == (False, 3)
    assert validated(math.nan, math.nan) == (False, 3)


def test_a_state_says_how_its_run_decodes():
    config = DecodingConfig(beam=7, nbest=3, alpha=1.0)
    state = TrainingState({}, decoding=dataclasses.asdict(config)).to_json()
    found = DecodingConfig.of_run(json.loads(json.dumps(state)))
    assert found == DecodingConfig(beam=7, nbest=1, alpha=1.0)


@pytest.mark.parametrize(
    "wrong", [5, [], "beam", {"beam": 4}, {**DECODING, "beam": 0}, {**DECODING, "b": 1}]
)
def test_other_settings_of_decoding_are_refused(wrong):
    with pytest.raises(ValueError, match=r"expected|unknown or missing"):
        DecodingConfig.of_run(stored(decoding=wrong))


@pytest.mark.parametrize(
    "hostile",
    [
        *({name: None} for name in sorted(STATE.keys() - MAY_BE_MISSING)),
        *({name: None} for name in STATE["window"]),
        {"step": -1},
        {"step": 1.5},
        {"step": True},
        {"step": "20"},
        {"step": 10**400},
        {"step": 1},  # fewer than were skipped
        {"epoch": -1},
        {"position": -5},
        {"position": []},
        {"seconds": math.nan},
        {"seconds": math.inf},
        {"seconds": -1.0},
        {"seconds": 10**400},
        {"best_loss": math.nan},
        {"best_loss": -math.inf},
        {"best_loss": 10**400},
        {"best_bleu": math.nan},
        {"best_bleu": -2.0},
        {"lowest_cost": math.nan},
        {"lowest_cost": "1"},
        {"validations_since_best": -9},
        {"pending_validations": 0.5},
        {"skipped": -1},
        {"learning_rate": math.nan},
        {"gradient_norm": "x" * 10_000},
        {"loss_scale": [0.0, -1]},
        {"loss_scale": [math.nan, 1]},
        {"loss_scale": 5},
        {"loss_scale": "ab"},
        {"decoding": 5},
        {"window": 5},
        {"window": []},
        {"target": -1.0},
        {"loss": math.nan},
        {"text": 5},
        {"text": [1, 2]},
    ],
    ids=str,
)
def test_a_hostile_state_is_refused_in_one_line(hostile):
    with pytest.raises(ValueError, match="expected the state of a run, got") as error:
        TrainingState.from_json(stored(**hostile))
    assert len(str(error.value)) < 200


@pytest.mark.parametrize("state", [None, [], 5, "state", {}, [[]]])
def test_what_is_no_state_is_refused(state):
    with pytest.raises(ValueError, match="expected the state of a run, got"):
        TrainingState.from_json(state)


class Closing(io.StringIO):
    def write(self, text):
        if "broken" in text:
            raise OSError(EIO, "the terminal is gone")
        return super().write(text)

    def flush(self):
        raise OSError(EIO, "the terminal is gone")


def test_a_lossy_stream_drops_what_fails_and_goes_on():
    inner = Closing()
    stream = OutputStream(inner)
    for line in ("one", "broken", "two"):
        print(line, file=stream, flush=True)
    assert inner.getvalue() == "one\n\ntwo\n"
    inner.close()
    print("closed", file=stream, flush=True)


def test_the_start_says_what_an_update_costs():
    """Two batches of 12 pairs make an update; tokens are counted with EOS."""
    sides = [Ragged.from_lists([[5] * n] * 12) for n in (3, 5)]
    settings = TrainingConfig(max_tokens=1000, accumulate=2)
    stream = BatchStream(ParallelCorpus(*sides), settings)
    assert len(stream) == 1
    model = small_model()
    threaded = CpuModel(model, ParameterBuffer(model), 1)
    lines = run_summary(stream, {}, {}, threaded)
    flops = training_flops(model.config, 4.0, 6.0) * 24  # 0.0 GFLOP
    tokens = f"update      {24 * 4} source + {24 * 6} target tokens, "
    assert f"{tokens}{flops / 1e9:,.1f} GFLOP" in lines
    memory = training_memory(model.config, 1000, 1)
    assert f"memory      about {memory / 1e6:,.0f} MB" in lines
    threaded.close()


def test_memory_is_that_of_what_is_computed_at_once(monkeypatch):
    sides = [Ragged.from_lists([[5] * 9] * 1000)] * 2
    stream = BatchStream(ParallelCorpus(*sides), TrainingConfig(max_tokens=10_000))
    model = small_model()
    monkeypatch.setattr("minitransformer.training.parallel.TOKENS_TIMES_WIDTH", 8000)
    threaded = CpuModel(model, ParameterBuffer(model), 2)
    memory, more = (training_memory(model.config, n, 2) / 1e6 for n in (2000, 10_000))
    assert f"{memory:,.0f}" != f"{more:,.0f}"
    last = run_summary(stream, {}, {}, threaded)[-1]
    assert last == f"memory      about {memory:,.0f} MB"
    threaded.close()


@pytest.mark.parametrize(
    ("unknown", "told"), [(0, None), (1, None), (2, "0.0% of the source and 0.2%")]
)
def test_the_start_says_if_the_vocabulary_lacks_characters(unknown, told):
    """Of 1,000 target pieces, some are unknown; the end of sentence is one of them."""
    target = [[UNK_ID] * unknown + [5] * (1001 - unknown)]
    sides = [Ragged.from_lists(ids) for ids in ([[5] * 1001], target)]
    stream = BatchStream(ParallelCorpus(*sides), TrainingConfig(max_length=2000))
    model = small_model()
    threaded = CpuModel(model, ParameterBuffer(model), 1)
    found = [x for x in run_summary(stream, {}, {}, threaded) if "unknown " in x]
    assert len(found) == (told is not None)
    assert not told or told in found[0]
    threaded.close()


def test_the_start_says_what_validation_and_test_text_there_is():
    sides = [Ragged.from_lists([[5] * 3] * 2)] * 2
    stream = BatchStream(ParallelCorpus(*sides), TrainingConfig())
    model = small_model()
    threaded = CpuModel(model, ParameterBuffer(model), 1)
    pair = TextPair(Path("a/val.en"), Path("a/val.de"))
    for text, told in (
        ({}, ("none", "none")),
        ({"val": pair}, ("a/val.en, a/val.de, 2 pairs", "none")),
        ({"test": pair}, ("none", "a/val.en, a/val.de, 2 pairs")),
    ):
        lines = run_summary(stream, text, dict.fromkeys(text, stream.corpus), threaded)
        expected = "held out    for validation {}; for the test {}"
        assert expected.format(*told) in lines
    threaded.close()


@pytest.mark.parametrize(("factor", "reported"), [(2.0, 0), (1.0, 0), (0.5, 3)])
def test_skipped_updates_are_reported_once_no_scale_can_help(factor, reported):
    scale = LossScale(np, "fp16", (factor, 0))
    progress = Progress(TrainingState({}), scale)
    progress.state.skipped = 3
    assert progress.synchronize() == reported
