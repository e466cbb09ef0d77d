"""The parameters that a run ends with: a mean of its last checkpoints (section 6.1)."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from minitransformer.engine.backend import array_module
from minitransformer.runs.checkpoint import Checkpoint, load, recorded_state
from minitransformer.runs.models import fingerprint, require_alike
from minitransformer.runs.run_directory import RunDirectory
from minitransformer.settings.config import TrainingConfig
from minitransformer.training.parallel import ParallelModel

# The difference in cost below which validation does not decide between two means; the
# mean of more checkpoints is taken. Units: nats, or BLEU.
TIE = 1e-3


def running_means(paths: Sequence[Path]) -> Iterator[Checkpoint]:
    """Yield the last checkpoint, the mean of the last two, of the last three and so on.

    It is one object, whose parameters change before it is yielded again.

    Raises: ValueError if there is no checkpoint, or if one differs in more than the
    parameters (`fingerprint`).
    """
    if not paths:
        raise ValueError("expected checkpoints to average, got none")
    result = load(paths[-1])
    newest = fingerprint(paths[-1], result)
    total = result.parameters.data.astype(np.float64)
    yield result

    # From the newest to the oldest, keep their sum in float64.
    for count, path in enumerate(reversed(paths[:-1]), start=2):
        other = load(path)
        require_alike(fingerprint(path, other), newest)
        total += other.parameters.data
        del other  # before the next one is read
        result.parameters.data[...] = total / count
        yield result


def mean_of(paths: Sequence[Path]) -> Checkpoint:
    """Return the last checkpoint, with the mean of the parameters of all."""
    return deque(running_means(paths), maxlen=1).pop()


def average_last(
    run: RunDirectory,
    training: TrainingConfig,
    parallel: ParallelModel,
    cost: Callable[[], float] | None,
    log: Callable[[str], None],
) -> float | None:
    """Set the parameters to the mean of the last n checkpoints.

    `cost` validates the parameters: their loss, or the negative of their BLEU. n is the
    number up to `average` of the lowest cost, or a larger one whose cost is within
    `TIE` of it. If the best checkpoint is better still, its parameters are taken.
    Without `cost`, n is `average`.

    Returns: the lowest cost (NaN without `cost`), or None if no mean was taken

    Differs: the paper averages a fixed number. While the loss still falls fast, a mean
    that reaches far back is worse than the last checkpoint.
    """
    # Rank 0 alone has files. The others learn how many there are, and the best cost.
    ranks = parallel.communicator
    paths: list[Path] = []
    best_path, best_cost = None, 0.0
    if not ranks.rank:
        paths = run.checkpoints()[-training.average :]
        best_path, best_cost = best_checkpoint(run, training, paths)
    number, best_cost = ranks.all_gather((len(paths), best_cost))[0]

    # Choose n by validation, or take all.
    lowest = math.nan
    if cost:
        costs = [best_cost]
        means = running_means(paths) if paths else itertools.repeat(None, number)
        for n, mean in enumerate(means, start=1):
            set_parameters(parallel, mean.parameters.data if mean else None)
            costs.append(cost())
            log(f"average {n:<4}validation {shown(costs[n], training)}")
        lowest = min(costs)
        number = best_number(costs)

    # Where no mean is good enough, take the best checkpoint. The average of an earlier
    # end is deleted, because translate.py would prefer it.
    parameters = None
    if number and paths:
        parameters = mean_of(paths[-number:]).parameters.data
    elif best_path is not None:
        run.averaged.unlink(missing_ok=True)
        parameters = load(best_path).parameters.data
        than = f"{best_path.name}, validation {shown(best_cost, training)}"
        log(f"averaged    none is better than {than}")
    set_parameters(parallel, parameters)
    if not number:
        return None
    log(f"averaged    the last {number} checkpoint{'s' * (number > 1)}")
    return lowest


def best_checkpoint(
    run: RunDirectory, training: TrainingConfig, paths: Sequence[Path]
) -> tuple[Path | None, float]:
    """Return the checkpoint of the best validation with its cost, or else the last."""
    with suppress(OSError, ValueError):  # it is missing or damaged
        return run.best, recorded_state(run.best).best_cost(training.best_by)
    return next(reversed(paths), None), math.inf


def best_number(costs: Sequence[float]) -> int:
    """Return how many checkpoints the best mean has, from the cost of each number.

    The number 0 stands for the best checkpoint. Of means that validation cannot tell
    apart, that of more checkpoints is best.
    """
    lowest = min(costs)
    number = max((n for n, x in enumerate(costs) if x < lowest + TIE), default=0)
    return 0 if number == 1 and costs[1] >= costs[0] else number


def set_parameters(parallel: ParallelModel, values: np.ndarray | None) -> None:
    """Set the parameters of all ranks to the values of rank 0, or to its parameters."""
    parameters = parallel.parameters
    if values is not None:
        parameters.data[...] = array_module(parameters.data).asarray(values)
    parallel.communicator.broadcast(parameters.data)
    parameters.data_changed()


def shown(cost: float, training: TrainingConfig) -> str:
    """Return a cost as a log names it."""
    return f"BLEU {-cost:.2f}" if training.best_by == "bleu" else f"loss {cost:.4f}"
