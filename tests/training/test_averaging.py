"""The mean that a run ends with, against means in plain NumPy."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minitransformer.model.parameters import ParameterBuffer
from minitransformer.model.transformer import Transformer
from minitransformer.runs import checkpoint
from minitransformer.runs.checkpoint import Checkpoint
from minitransformer.runs.run_directory import RunDirectory
from minitransformer.runs.state import RunState
from minitransformer.settings.config import TrainingConfig
from minitransformer.text.tokenizer import Tokenizer
from minitransformer.training.averaging import average_last, best_number
from minitransformer.training.parallel import CpuModel
from support.models import CAT_LINES, tiny_config
from support.ranks import run_ranks
from support.runs import SETTINGS

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


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    return Ended(tmp_path_factory.mktemp("ended"))


def test_as_many_are_averaged_as_give_the_lowest_loss(ended):
    """If the best checkpoint is damaged, it is as if there were none."""
    costs = [ended.cost_of(ended.mean_of_last(n)) for n in range(1, 5)]
    ended.run.best.write_bytes(b"{}")
    loss, parameters, lines = ended.end()
    np.testing.assert_array_equal(parameters, ended.mean_of_last(3))
    assert loss == min(costs)
    expected = [f"average {n + 1}   validation loss {costs[n]:.4f}" for n in range(4)]
    assert lines == [*expected, "averaged    the last 3 checkpoints"]


def test_a_run_that_goes_by_bleu_is_averaged_by_it(ended):
    """Whatever the losses are, and so are the average and the best compared later."""
    ended.save(ended.run.best, ended.saved[0], loss=1.0, bleu=9.5)
    training = TrainingConfig(best_by="bleu", validate_bleu=7)
    texts = {"train": ("a", "b"), "val": ("c", "d")}
    settings = replace(SETTINGS, training=training, text=texts)
    ended.run.config.write_text(settings.to_json())
    _, _, lines = ended.end(costs=[-5, -9, -9, -7], best_by="bleu")
    assert lines[1] == "average 2   validation BLEU 9.00"
    named = "is better than best.safetensors, validation BLEU 9.50"
    assert lines[4:] == [f"averaged    none {named}"]
    assert ended.run.preferred_checkpoint() == ended.run.best


@given(
    costs=st.lists(
        st.sampled_from([1.0, 2.0, 3.0, math.inf, math.nan]), min_size=4, max_size=4
    ),
    best=st.sampled_from([math.inf, 0.5, 2.5]),
    by=st.sampled_from(["loss", "bleu"]),
    average=st.sampled_from([4, 2, 9]),
    size=st.sampled_from([1, 2]),
)
def test_a_run_ends_with_the_mean_that_costs_least_or_the_best(
    ended, costs, best, by, average, size
):
    """So do other ranks, which have no files."""
    ended.run.best.unlink(missing_ok=True)
    if best < math.inf:
        found = {"loss": best} if by == "loss" else {"bleu": -best}
        ended.save(ended.run.best, ended.saved[0], **found)
    ended.save(ended.run.averaged, ended.saved[1])  # of an earlier end
    all_costs = [best, *costs[:average]]
    number = best_number(all_costs)
    expected = ended.saved[0 if best < math.inf else -1]
    if number:
        expected = ended.mean_of_last(number)

    def end(ranks):
        return ended.end(average, ranks=ranks, costs=costs, best_by=by)

    for cost, parameters, _ in run_ranks(size, end):
        np.testing.assert_array_equal(parameters, expected)
        assert cost == (min(all_costs) if number else None)
    assert ended.run.averaged.exists() == (number > 0)


def test_a_given_number_is_averaged(ended):
    for _, parameters, _ in run_ranks(2, lambda ranks: ended.end(2, True, ranks)):
        np.testing.assert_array_equal(parameters, ended.mean_of_last(2))


def test_a_run_without_checkpoints_has_no_mean(tmp_path):
    ended = Ended(tmp_path)
    for path in ended.run.checkpoints():
        path.unlink()
    assert ended.end()[0] is None
