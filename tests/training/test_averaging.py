"""The mean that a run ends with, against means and losses in plain NumPy."""

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
from minitransformer.text.batches import ParallelCorpus
from minitransformer.text.ids import Ragged
from minitransformer.text.tokenizer import Tokenizer
from minitransformer.training.averaging import average_last
from minitransformer.training.distributed import Communicator
from minitransformer.training.evaluation import validate
from minitransformer.training.parallel import CpuModel
from support.models import CAT_LINES, tiny_config
from support.ranks import run_ranks
from support.reference import ReferenceTransformer

CONFIG = tiny_config(vocab_size=40)
# How far the checkpoints are from one point, and in which of two directions: the mean
# of the last three is nearest to it, and no checkpoint is near.
PLACES = [(9, 4), (2, -3), (-1, 2), (-1, 1)]


def corpus():
    """Twelve sentence pairs of random ids, each of four."""
    rng = np.random.default_rng(3)
    rows = [rng.integers(4, 40, (12, 4)).tolist() for _ in range(2)]
    return ParallelCorpus(*(Ragged.from_lists(side) for side in rows))


def reference_loss(model, values):
    """The mean negative log-likelihood of a token of the corpus with these parameters.

    The reference's loss counts padding out; here is none.
    """
    views = ParameterBuffer(model).views(values.astype(np.float64))
    reference = ReferenceTransformer(CONFIG, views)
    batch = corpus().batch(np.arange(12))
    return reference.loss(batch.source, batch.target, label_smoothing=0) / (12 * 5)


class Ended:
    """A run that has saved its last checkpoint, and ends."""

    def __init__(self, folder):
        self.run, self.tokenizer = RunDirectory(folder), Tokenizer.train(CAT_LINES, 40)
        rng = np.random.default_rng(1)
        self.model = Transformer(CONFIG)
        start = ParameterBuffer(self.model).data.copy()
        aims = rng.normal(0, 0.2, (2, start.size))
        self.saved = [(start + np.array(p) @ aims).astype("float32") for p in PLACES]
        for number, values in enumerate(self.saved, start=1):
            self.save(self.run.checkpoint(number), values)
        self.losses = [
            reference_loss(self.model, np.mean(self.saved[-n:], axis=0, dtype=float))
            for n in range(1, len(PLACES) + 1)
        ]

    def save(self, path, values, loss=math.inf, bleu=-1.0):
        model = Transformer(CONFIG)
        parameters = ParameterBuffer(model)
        parameters.data[...] = values
        state = RunState(best_loss=loss, best_bleu=bleu)
        saved = Checkpoint(model, self.tokenizer, parameters, state)
        checkpoint.save(path, saved, replace=True)

    def end(self, average=4, number=False, ranks=None, bleus=None, **settings):
        """Return the lowest cost, the parameters and the log."""
        model, lines = Transformer(CONFIG), []
        run = RunDirectory(Path("none")) if ranks and ranks.rank else self.run
        parallel = CpuModel(model, ParameterBuffer(model), communicator=ranks)
        training = TrainingConfig(average=average, **settings)
        limits = TrainingConfig(max_tokens=20)
        scores = iter(bleus or ())

        def cost():
            return -next(scores) if bleus else validate(parallel, corpus(), limits).loss

        lowest = average_last(
            run,
            training,
            parallel,
            cost=None if number else cost,
            log=lines.append,
        )
        parallel.close()
        return lowest, parallel.parameters.data, lines


@pytest.fixture
def ended(tmp_path):
    run = Ended(tmp_path)
    assert np.argsort(run.losses)[0] == 2  # the mean of the last three
    assert min(run.losses[1], run.losses[3]) > run.losses[2] + 0.01
    return run


def mean_of_last(ended, n):
    return np.mean(ended.saved[-n:], axis=0, dtype=float).astype("float32")


@pytest.mark.parametrize("best", [None, "worse", "damaged"])
def test_as_many_are_averaged_as_give_the_lowest_loss(ended, best):
    if best == "worse":
        ended.save(ended.run.best, ended.saved[0], ended.losses[2] + 0.001)
    elif best == "damaged":
        ended.run.best.write_bytes(b"{}")
    loss, parameters, lines = ended.end()
    np.testing.assert_array_equal(parameters, mean_of_last(ended, 3))
    assert loss == pytest.approx(ended.losses[2], rel=1e-5)
    expected = [f"average {n + 1}   validation" for n in range(4)]
    assert [line[:22] for line in lines[:4]] == expected
    assert [float(line.split()[-1]) for line in lines[:4]] == pytest.approx(
        ended.losses, abs=1e-4
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
    cost, parameters, lines = ended.end(bleus=[5, 9, 9, 7], **by_bleu)
    np.testing.assert_array_equal(parameters, mean_of_last(ended, 3))
    assert cost == -9
    assert lines[1] == "average 2   validation BLEU 9.00"
    assert lines[4:] == ["averaged    the last 3 checkpoints"]
    ended.save(*best, loss=1.0, bleu=9.5)
    cost, parameters, lines = ended.end(bleus=[5, 9, 9, 7], **by_bleu)
    np.testing.assert_array_equal(parameters, ended.saved[0])
    named = "is better than best.safetensors, validation BLEU 9.50"
    assert (cost, lines[4:]) == (None, [f"averaged    none {named}"])
    ended.save(run.averaged, ended.saved[1])  # of an earlier end
    assert ended.end(bleus=[5, 9, 9, 7], **by_bleu)[0] is None
    assert run.preferred_checkpoint() == run.best


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_what_has_no_finite_loss_is_not_averaged(ended):
    for path in ended.run.checkpoints():
        ended.save(path, ended.saved[0] * 1e30)
    loss, parameters, lines = ended.end()
    assert loss is None
    kept = f"step-{len(PLACES):08d}.safetensors, validation loss inf"
    assert lines[-1] == f"averaged    none is better than {kept}"
    np.testing.assert_array_equal(parameters, ended.saved[0] * np.float32(1e30))
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
