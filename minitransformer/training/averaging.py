"""The parameters that a run ends with: a mean of its last checkpoints (section 6.1)."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np

from minitransformer.engine.backend import array_module
from minitransformer.runs.average import average_checkpoints, running_means
from minitransformer.runs.checkpoint import load, recorded_cost
from minitransformer.runs.run_directory import RunDirectory
from minitransformer.settings.config import TrainingConfig
from minitransformer.text.batches import ParallelCorpus
from minitransformer.training.evaluation import validate
from minitransformer.training.parallel import ParallelModel
from minitransformer.training.progress import TrainingState

# Where validation tells two models apart by less than this, it cannot say which is the
# better one, and the mean of more checkpoints is taken. Units: nats, or BLEU.
TIE = 1e-3


def set_final_parameters(
    run: RunDirectory,
    training: TrainingConfig,
    parallel: ParallelModel,
    validation: ParallelCorpus | None,
    state: TrainingState,
    log: Callable[[str], None],
    validation_bleu: Callable[[], float],
) -> bool:
    """Set the parameters to those that the run ends with; return if they are new.

    They are the mean of the last n checkpoints, for the n up to `average` that gives
    the lowest validation loss, or for a larger n if `TIE` makes no difference of the
    two. The lowest loss becomes the state's `best_loss`. If that of the best model in
    the run's directory is lower still, the parameters are that model's. With `best_by`
    "bleu", the highest `validation_bleu` decides instead. With `average_by` "number",
    and without such text, n is `average`.

    Differs: the paper averages a fixed number, as "number" does. While the loss still
    falls fast, a mean that reaches far back is worse than the last checkpoint.
    """
    ranks, parameters = parallel.communicator, parallel.parameters
    paths = [] if ranks.rank else run.checkpoints()[-training.average :]
    [count] = map(int, ranks.all_reduce_numbers([float(len(paths))]))

    def set_parameters(values: np.ndarray | None) -> None:
        """Set those of all ranks to what rank 0 says, if anything."""
        if values is not None:
            parameters.data[...] = array_module(parameters.data).asarray(values)
        ranks.broadcast(parameters.data)
        parameters.data_changed()

    if validation is None or training.average_by == "number":
        averages = count > 1 and not ranks.rank
        set_parameters(average_checkpoints(paths).parameters.data if averages else None)
        if count > 1:
            log(f"averaged    the last {count} checkpoints")
        elif not ranks.rank and run.averaged.exists():
            made = load(run.averaged).state["step"]
            if made < state.step:  # else it would be preferred to what is newer
                run.averaged.unlink()
        return count > 1
    corpus, by_bleu = validation, training.best_by == "bleu"

    def cost() -> float:
        if by_bleu:
            return -validation_bleu()
        return validate(parallel, corpus, training.max_tokens).loss

    def shown(value: float) -> str:
        return f"BLEU {-value:.2f}" if by_bleu else f"loss {value:.4f}"

    means = running_means(paths)
    to_beat, kept = (0.0, None) if ranks.rank else _to_beat(run, training.best_by)
    [lowest] = ranks.all_reduce_numbers([to_beat])
    chosen, number = None, 0
    for n in range(1, count + 1):
        mean = None if ranks.rank else next(means).parameters.data
        set_parameters(mean)
        found = cost()
        log(f"average {n:<4}validation {shown(found)}")
        if found < lowest or (n > 1 and found < lowest + TIE):
            lowest, number = min(found, lowest), n
            chosen = None if mean is None else mean.copy()
    if not number and kept is not None:
        chosen = load(kept).parameters.data
        known = f"{kept.name}, validation {shown(lowest)}"
        log(f"averaged    none is better than {known}")
    set_parameters(chosen)
    if number:
        log(f"averaged    the last {number} checkpoint{'s' * (number > 1)}")
        if by_bleu:
            state.best_bleu = -lowest
        else:
            state.best_loss = lowest
    return number > 0


def _to_beat(run: RunDirectory, best_by: str | None) -> tuple[float, Path | None]:
    """Return the `recorded_cost` of the best model in the directory, and the model.

    An older average that is no better than the best checkpoint is removed. A damaged
    file is passed over. Without either, the cost is infinite, and the model is the last
    checkpoint, if there is one.
    """
    costs = {path: recorded_cost(path, best_by) for path in (run.averaged, run.best)}
    if costs[run.averaged] >= costs[run.best]:
        run.averaged.unlink()
        del costs[run.averaged]
    readable = [path for path, cost in costs.items() if not math.isnan(cost)]
    if not readable:
        return math.inf, next(reversed(run.checkpoints()), None)
    kept = min(readable, key=lambda path: costs[path])
    return costs[kept], kept
