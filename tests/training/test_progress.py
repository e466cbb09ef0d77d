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
from minitransformer.training.cost import training_flops, training_memory
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
    memory = training_memory(config, 1000, 1, 6)
    assert lines[-1] == f"memory      about {memory / 1e6:,.0f} MB"


def test_memory_is_that_of_what_is_computed_at_once(monkeypatch):
    sides = [Ragged.from_lists([[5] * 9] * 1000)] * 2
    stream = BatchStream(ParallelCorpus(*sides), TrainingConfig(max_tokens=10_000))
    monkeypatch.setattr("minitransformer.training.parallel.TOKENS_TIMES_WIDTH", 8000)
    config, [*_, last] = summary(stream, processes=2)
    memory, more = (training_memory(config, n, 2, 10) / 1e6 for n in (2000, 10_000))
    assert f"{memory:,.0f}" != f"{more:,.0f}"
    assert last == f"memory      about {memory:,.0f} MB"


def test_lengths_that_are_read_from_disk_make_no_memory_overflow():
    """They are 32-bit integers; the estimate is of more than 2^31 bytes."""
    sides = [Ragged.from_lists([[5] * 9] * 4)] * 2
    assert sides[0].lengths.dtype == np.int32
    stream = BatchStream(ParallelCorpus(*sides), TrainingConfig(max_tokens=2_000_000))
    computed = types.SimpleNamespace(
        model=small_model(),
        tokens_at_once=2_000_000,
        num_processes=1,
        asynchronous=False,
    )
    *_, last = run_summary(stream, {}, {}, computed)
    memory = training_memory(computed.model.config, 2_000_000, 1, 10)
    assert memory > 2**31
    assert last == f"memory      about {memory / 1e6:,.0f} MB"


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
