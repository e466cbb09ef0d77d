"""The parameters that a run ends with: a mean of its last checkpoints (section 6.1)."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from minitransformer.engine.backend import array_module
from minitransformer.runs.checkpoint import Checkpoint, load, recorded_state
from minitransformer.runs.run_directory import RunDirectory
from minitransformer.settings.config import TrainingConfig
from minitransformer.training.parallel import ParallelModel

# Where validation tells two models apart by less than this, it cannot say which is the
# better one, and the mean of more checkpoints is taken. Units: nats, or BLEU.
TIE = 1e-3


def running_means(paths: Sequence[Path]) -> Iterator[Checkpoint]:
    """Yield the last checkpoint, the mean of the last two, of the last three and so on.

    It is one object, whose parameters change before it is yielded again.

    Raises: ValueError if there is no checkpoint, or settings or tokenizers differ.
    """
    if not paths:
        raise ValueError("expected checkpoints to average, got none")
    result = load(paths[-1])
    total = result.parameters.data.astype(np.float64)
    yield result
    for count, path in enumerate(reversed(paths[:-1]), start=2):
        other = load(path)
        if other.model.config != result.model.config:
            raise ValueError(f"{path}: its configuration differs from {paths[-1]}")
        if other.tokenizer.model != result.tokenizer.model:
            raise ValueError(f"{path}: its tokenizer differs from that of {paths[-1]}")
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

    `cost` validates them: the loss, or the negative of BLEU. n is the number up to
    `average` of the lowest cost, or a larger one whose cost is within `TIE` of it. If
    the best checkpoint is better still, the parameters are its. Without `cost`, n is
    `average`.

    Returns: the lowest cost (NaN without `cost`), or None if there is no new mean

    Differs: the paper averages a fixed number. While the loss still falls fast, a mean
    that reaches far back is worse than the last checkpoint.
    """
    ranks, parameters = parallel.communicator, parallel.parameters

    def set_parameters(values: np.ndarray | None) -> None:
        """Set those of all ranks to what rank 0 says, if anything."""
        if values is not None:
            parameters.data[...] = array_module(parameters.data).asarray(values)
        ranks.broadcast(parameters.data)
        parameters.data_changed()

    def shown(value: float) -> str:
        return (
            f"BLEU {-value:.2f}" if training.best_by == "bleu" else f"loss {value:.4f}"
        )

    # Rank 0 alone has files.
    paths, least, best = list[Path](), 0.0, None
    if not ranks.rank:
        paths = run.checkpoints()[-training.average :]
        least, best = math.inf, next(reversed(paths), None)
        with suppress(ValueError):  # it is missing or damaged
            least, best = recorded_state(run.best).best_cost(training.best_by), run.best
    count, lowest = ranks.all_reduce_numbers([float(len(paths)), least])

    # Of each mean, find the cost.
    chosen, number, means = None, 0, running_means(paths)
    for n in range(1, int(count) + 1):
        mean = None if ranks.rank else next(means).parameters.data
        if cost is None:
            chosen, number = mean, n
            continue
        set_parameters(mean)
        found = cost()
        log(f"average {n:<4}validation {shown(found)}")
        if found < lowest or (n > 1 and found < lowest + TIE):
            lowest, number = min(found, lowest), n
            chosen = None if mean is None else mean.copy()

    # Take the best.
    if not number and best is not None:
        run.remove(run.averaged)  # that of an earlier end, which would be preferred
        chosen = load(best).parameters.data
        log(f"averaged    none is better than {best.name}, validation {shown(lowest)}")
    set_parameters(chosen)
    if not number:
        return None
    log(f"averaged    the last {number} checkpoint{'s' * (number > 1)}")
    return math.nan if cost is None else lowest
