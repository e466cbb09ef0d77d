"""What is compared before a run begins or goes on: checkpoints, text and settings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, replace

import numpy as np

from minitransformer.runs.checkpoint import Checkpoint
from minitransformer.runs.run_directory import RunDirectory
from minitransformer.settings.config import RunConfig
from minitransformer.settings.options import UsageError
from minitransformer.text.batches import ParallelCorpus
from minitransformer.text.pairs import TextPair
from minitransformer.training.distributed import Communicator

# How messages name the splits of the text.
SPLITS = {"train": "training", "val": "validation", "test": "test"}


def last_checkpoint(run: RunDirectory, settings: RunConfig) -> Checkpoint | None:
    """Load the checkpoint to resume from, or return None if none was ever saved.

    Raises: ValueError if the run's checkpoints are gone or damaged, or if config.json
    has other settings of the model.
    """
    if not (paths := run.checkpoints()):
        results = run.best, run.averaged, run.metrics
        found = [path.name for path in results if path.exists()]
        if found and not run.is_unsaved():
            raise ValueError(
                f"{run.path}: expected a checkpoint step-*.safetensors to resume from, "
                f"found only {', '.join(found)}, which a new beginning would replace: "
                "train with another --run, or delete this"
            )
        return None
    start = run.load_to_resume(paths[-1])
    for name, value in vars(start.model.config).items():
        if (edited := getattr(settings.model, name)) != value:
            raise ValueError(
                f"{run.config}: expected {name} {value}, as in {paths[-1].name}, got "
                f"{edited}; a resumed run keeps its model"
            )
    return start


def check_positions(settings: RunConfig, corpora: Mapping[str, ParallelCorpus]) -> None:
    """Raises: UsageError if text is longer than the learned positions (Table 3, E).

    Pairs above `max_length` are left out, and test text is translated in parts.
    """
    limit = settings.model.position_limit or math.inf
    for split in corpora.keys() - {"test"}:
        corpus, at_most = corpora[split], settings.training.max_length
        longest = np.maximum(corpus.source.lengths, corpus.target.lengths) + 1
        needed = longest[corpus.filter_by_length(at_most)].max()
        if needed > limit:
            raise UsageError(
                f"max_positions: expected at least {needed}, the tokens of the longest "
                f"sentence of the {SPLITS[split]} text, EOS counted (of those up to "
                f"--max-length {at_most}), got {limit}"
            )


def remember_text(start: Checkpoint, text: Mapping[str, TextPair]) -> None:
    """Compare each split with the text that the run began with, or remember it.

    Raises: ValueError if a split has changed.
    """
    found = {split: pair.digest() for split, pair in text.items()}
    for split, pair in text.items():
        if start.state.text.get(split, found[split]) != found[split]:
            raise ValueError(
                f"{pair}: the {SPLITS[split]} text has changed since this "
                "run began, so the run cannot be resumed"
            )
    start.state = replace(start.state, text={**start.state.text, **found})


def check_ranks(
    ranks: Communicator,
    settings: RunConfig,
    start: Checkpoint,
    cores: int,
    precision: str,
) -> None:
    """Raises: RuntimeError if the ranks would not train the same in the same way."""
    shared = {"threads": cores, "state": asdict(start.state)}
    shared["vocabulary"] = start.tokenizer.checksum
    for part in (settings.model, settings.training, settings.decoding):
        shared |= vars(part)
    ranks.assert_equal({**shared, "precision": precision})
