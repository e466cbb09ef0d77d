"""What is counted and said of a run while it is trained."""

import types
from pathlib import Path

import numpy as np
import pytest

from minitransformer.model.parameters import ParameterBuffer
from minitransformer.runs.state import RunState
from minitransformer.settings.config import TrainingConfig
from minitransformer.settings.decoding_config import DecodingConfig
from minitransformer.text.batches import BatchStream, ParallelCorpus
from minitransformer.text.ids import Ragged
from minitransformer.text.pairs import TextPair
from minitransformer.training.cost import training_flops, training_memory
from minitransformer.training.loss_scale import LossScale
from minitransformer.training.parallel import CpuModel
from minitransformer.training.progress import Progress, Update, run_summary
from support.models import small_model


def test_the_start_says_what_an_update_costs():
    """Two batches of 12 pairs make an update; tokens are counted with EOS."""
    sides = [Ragged.from_lists([[5] * n] * 12) for n in (3, 5)]
    settings = TrainingConfig(max_tokens=1000, accumulate=2)
    stream = BatchStream(ParallelCorpus(*sides), settings)
    assert len(stream) == 1
    model = small_model()
    threaded = CpuModel(model, ParameterBuffer(model), 1)
    lines = run_summary(stream, {}, {}, threaded, DecodingConfig())
    flops = training_flops(model.config, 4.0, 6.0) * 24  # 0.0 GFLOP
    tokens = f"update      {24 * 4} source + {24 * 6} target tokens, "
    assert f"{tokens}{flops / 1e9:,.1f} GFLOP" in lines
    memory = training_memory(model.config, 1000, 1, 6)
    assert lines[-1].startswith(f"memory      about {memory / 1e6:,.0f} MB, at most ")
    threaded.close()


def test_memory_is_that_of_what_is_computed_at_once(monkeypatch):
    sides = [Ragged.from_lists([[5] * 9] * 1000)] * 2
    stream = BatchStream(ParallelCorpus(*sides), TrainingConfig(max_tokens=10_000))
    model = small_model()
    monkeypatch.setattr("minitransformer.training.parallel.TOKENS_TIMES_WIDTH", 8000)
    threaded = CpuModel(model, ParameterBuffer(model), 2)
    memory, more = (
        training_memory(model.config, n, 2, 10) / 1e6 for n in (2000, 10_000)
    )
    assert f"{memory:,.0f}" != f"{more:,.0f}"
    last = run_summary(stream, {}, {}, threaded, DecodingConfig())[-1]
    assert last.startswith(f"memory      about {memory:,.0f} MB, at most ")
    threaded.close()


def test_the_start_says_what_validation_and_test_text_there_is():
    sides = [Ragged.from_lists([[5] * 3] * 2)] * 2
    stream = BatchStream(ParallelCorpus(*sides), TrainingConfig())
    stream.corpus.notes = ["changed     x"]
    model = small_model()
    threaded = CpuModel(model, ParameterBuffer(model), 1)
    pair = TextPair(Path("a/val.en"), Path("a/val.de"))
    for text, told in (
        ({}, ("none", "none")),
        ({"val": pair}, ("a/val.en, a/val.de, 2 pairs", "none")),
        ({"test": pair}, ("none", "a/val.en, a/val.de, 2 pairs")),
    ):
        corpora = dict.fromkeys(text, stream.corpus)
        lines = run_summary(stream, text, corpora, threaded, DecodingConfig())
        expected = "held out    for validation {}; for the test {}"
        assert expected.format(*told) in lines
        assert "changed     x" in lines
    threaded.close()


@pytest.mark.parametrize(("factor", "reported"), [(2.0, 0), (1.0, 0), (0.5, 3)])
def test_skipped_updates_are_reported_once_no_scale_can_help(factor, reported):
    scale = LossScale(np, "fp16", (factor, 0))
    progress, stream = Progress(RunState(), scale), types.SimpleNamespace(epoch=0)
    stream.position = 0
    for _ in range(3):
        progress.add(Update([], 1.0, np.nan, np.nan, np.False_), stream)
    assert progress.synchronize() == reported
    assert (progress.state.skipped, progress.synchronize()) == (3, 0)
