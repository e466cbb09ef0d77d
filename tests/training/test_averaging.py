"""The mean that a run ends with, against means in plain NumPy."""

import math
from pathlib import Path

import numpy as np
import pytest

from minitransformer.model.parameters import ParameterBuffer
from minitransformer.model.transformer import Transformer
from minitransformer.runs import checkpoint
from minitransformer.runs.checkpoint import Checkpoint
from minitransformer.runs.run_directory import RunDirectory
from minitransformer.runs.state import RunState
from minitransformer.settings.config import RunConfig, TrainingConfig
from minitransformer.settings.decoding_config import DecodingConfig
from minitransformer.text.tokenizer import Tokenizer
from minitransformer.training.averaging import average_last
from minitransformer.training.distributed import Communicator
from minitransformer.training.parallel import CpuModel
from support.models import CAT_LINES, tiny_config
from support.ranks import run_ranks

CONFIG = tiny_config(vocab_size=40)


class Ended:
    """A run that has saved its last four checkpoints, and ends.

    The cost of parameters is how far they are from the mean of the last three.
    """

    def __init__(self, folder):
        self.run, self.tokenizer = RunDirectory(folder), Tokenizer.train(CAT_LINES, 40)
        rng, size = np.random.default_rng(1), CONFIG.num_parameters
        self.saved = rng.normal(size=(4, size)).astype("float32")
        for number, values in enumerate(self.saved, start=1):
            self.save(self.run.checkpoint(number), values)

    def mean_of_last(self, n):
        return np.mean(self.saved[-n:], axis=0, dtype=float).astype("float32")

    def cost_of(self, values):
        return float(abs(values - self.mean_of_last(3)).max())

    def save(self, path, values, loss=math.inf, bleu=-1.0):
        model = Transformer(CONFIG)
        parameters = ParameterBuffer(model)
        parameters.data[...] = values
        state = RunState(best_loss=loss, best_bleu=bleu)
        saved = Checkpoint(model, self.tokenizer, parameters, state)
        checkpoint.save(path, saved, replace=True)

    def end(self, average=4, number=False, ranks=None, costs=None, **settings):
        """Return the lowest cost, the parameters and the log."""
        model, lines = Transformer(CONFIG), []
        run = RunDirectory(Path("none")) if ranks and ranks.rank else self.run
        parameters = ParameterBuffer(model)
        parallel = CpuModel(model, parameters, communicator=ranks)
        given = iter(costs or ())
        lowest = average_last(
            run,
            TrainingConfig(average=average, **settings),
            parallel,
            cost=None if number else lambda: next(given, self.cost_of(parameters.data)),
            log=lines.append,
        )
        parallel.close()
        return lowest, parameters.data, lines


@pytest.fixture
def ended(tmp_path):
    return Ended(tmp_path)


@pytest.mark.parametrize("best", [None, "worse", "damaged"])
def test_as_many_are_averaged_as_give_the_lowest_loss(ended, best):
    costs = [ended.cost_of(ended.mean_of_last(n)) for n in range(1, 5)]
    if best == "worse":
        ended.save(ended.run.best, ended.saved[0], 0.001)
    elif best == "damaged":
        ended.run.best.write_bytes(b"{}")
    loss, parameters, lines = ended.end()
    np.testing.assert_array_equal(parameters, ended.mean_of_last(3))
    assert loss == min(costs)
    expected = [f"average {n + 1}   validation" for n in range(4)]
    assert [line[:22] for line in lines[:4]] == expected
    assert [float(line.split()[-1]) for line in lines[:4]] == pytest.approx(
        costs, abs=1e-4
    )
    assert lines[4:] == ["averaged    the last 3 checkpoints"]
    assert len(ended.end(average=2)[-1]) == 3
    assert len(ended.end(average=9)[-1]) == 5


def test_a_run_that_goes_by_bleu_is_averaged_by_it(ended):
    """Whatever the losses are, and so are the average and the best compared later."""
    by_bleu = {"best_by": "bleu", "validate_bleu": 7}
    texts = {"train": ("a", "b"), "val": ("c", "d")}
    training = TrainingConfig(**by_bleu)
    settings = RunConfig("tiny", CONFIG, training, DecodingConfig(), texts)
    ended.run.config.write_text(settings.to_json())
    run, best = ended.run, (ended.run.best, ended.saved[0])
    ended.save(*best, loss=0.0, bleu=8.5)
    cost, parameters, lines = ended.end(costs=[-5, -9, -9, -7], **by_bleu)
    np.testing.assert_array_equal(parameters, ended.mean_of_last(3))
    assert cost == -9
    assert lines[1] == "average 2   validation BLEU 9.00"
    assert lines[4:] == ["averaged    the last 3 checkpoints"]
    ended.save(*best, loss=1.0, bleu=9.5)
    cost, parameters, lines = ended.end(costs=[-5, -9, -9, -7], **by_bleu)
    np.testing.assert_array_equal(parameters, ended.saved[0])
    named = "is better than best.safetensors, validation BLEU 9.50"
    assert (cost, lines[4:]) == (None, [f"averaged    none {named}"])
    ended.save(run.averaged, ended.saved[1])  # of an earlier end
    assert ended.end(costs=[-5, -9, -9, -7], **by_bleu)[0] is None
    assert run.preferred_checkpoint() == run.best


def test_what_has_no_finite_loss_is_not_averaged(ended):
    loss, parameters, lines = ended.end(costs=[math.inf, math.nan] * 2)
    assert loss is None
    kept = "step-00000004.safetensors, validation loss inf"
    assert lines[-1] == f"averaged    none is better than {kept}"
    np.testing.assert_array_equal(parameters, ended.saved[-1])
    for path in ended.run.checkpoints():
        path.unlink()
    assert ended.end()[0] is None


@pytest.mark.parametrize(
    ("best", "settings"),
    [(None, {}), (0.0, {}), (None, {"average": 2, "number": True})],
)
def test_all_ranks_end_with_the_parameters_of_rank_0(ended, best, settings):
    """The others have no files."""
    if best is not None:
        ended.save(ended.run.best, ended.saved[0], best)
    alone = ended.end(ranks=Communicator(), **settings)
    each = run_ranks(2, lambda ranks: ended.end(ranks=ranks, **settings))
    for _, parameters, _ in each:
        np.testing.assert_array_equal(parameters, alone[1])
