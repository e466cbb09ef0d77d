"""What is counted and said of a run while it is trained."""

import types
from pathlib import Path

import numpy as np
import pytest

from minitransformer.model.parameters import ParameterBuffer
from minitransformer.runs.state import RunState
from minitransformer.settings.config import TrainingConfig
from minitransformer.text.batches import BatchStream, ParallelCorpus
from minitransformer.text.ids import Ragged
from minitransformer.text.pairs import TextPair
from minitransformer.training.cost import training_flops
from minitransformer.training.loss_scale import LossScale
from minitransformer.training.parallel import CpuModel
from minitransformer.training.progress import Progress, Update, run_summary
from support.models import small_model


def summary(stream, text=(), processes=1):
    """What a run says at its start; corpora of validation and test are its own."""
    model = small_model()
    computed = CpuModel(model, ParameterBuffer(model), processes)
    corpora = dict.fromkeys(text, stream.corpus)
    lines = run_summary(stream, dict(text), corpora, computed)
    computed.close()
    return model.config, lines


def test_the_start_says_what_an_update_costs():
    """Two batches of 12 pairs make an update; tokens are counted with EOS."""
    sides = [Ragged.from_lists([[5] * n] * 12) for n in (3, 5)]
    settings = TrainingConfig(max_tokens=1000, accumulate=2)
    stream = BatchStream(ParallelCorpus(*sides), settings)
    assert len(stream) == 1
    config, lines = summary(stream)
    flops = training_flops(config, 4.0, 6.0) * 24  # 0.0 GFLOP
    tokens = f"update      {24 * 4} source + {24 * 6} target tokens, "
    assert f"{tokens}{flops / 1e9:,.1f} GFLOP" in lines


PAIR = TextPair(Path("a/val.en"), Path("a/val.de"))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ({}, ("none", "none")),
        ({"val": PAIR}, ("a/val.en, a/val.de, 2 pairs", "none")),
        ({"test": PAIR}, ("none", "a/val.en, a/val.de, 2 pairs")),
    ],
)
def test_the_start_says_what_validation_and_test_text_there_is(text, told):
    sides = [Ragged.from_lists([[5] * 3] * 2)] * 2
    stream = BatchStream(ParallelCorpus(*sides), TrainingConfig())
    stream.corpus.notes = ["changed     x"]
    _, lines = summary(stream, text)
    expected = "held out    for validation {}; for the test {}"
    assert expected.format(*told) in lines
    assert "changed     x" in lines


@pytest.mark.parametrize(("factor", "reported"), [(2.0, 0), (1.0, 0), (0.5, 3)])
def test_skipped_updates_are_reported_once_no_scale_can_help(factor, reported):
    progress = Progress(RunState())
    stream = types.SimpleNamespace(epoch=0, position=0)
    scale = LossScale(np, "fp16", (factor, 0))
    for _ in range(3):
        progress.add(Update([], 1.0, np.nan, np.nan, np.False_, scale), stream)
    assert progress.synchronize() == reported
    assert (progress.state.skipped, progress.synchronize()) == (3, 0)
