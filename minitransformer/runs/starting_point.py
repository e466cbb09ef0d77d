"""The start of a run: its settings, and a new model or the weights of another one.

The paper trains every model from random parameters. A model that has learned from much
text needs little of another kind to learn that, too (Luong and Manning, 2015).
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from zlib import crc32

import numpy as np

from minitransformer.model.parameters import ParameterBuffer
from minitransformer.model.transformer import Transformer
from minitransformer.runs.checkpoint import Checkpoint, load
from minitransformer.runs.models import find_checkpoint, newest_run, shipped_model
from minitransformer.runs.run_directory import RunDirectory, new_directory
from minitransformer.runs.state import RunState
from minitransformer.settings.config import ModelConfig, RunConfig, TrainingConfig
from minitransformer.settings.decoding_config import DecodingConfig
from minitransformer.settings.options import (
    Settings,
    UsageError,
    flag_name,
    flags_of,
    make_config,
)
from minitransformer.settings.presets import (
    MANY_PAIRS,
    find_preset,
    preset_for,
)
from minitransformer.settings.text_config import TextConfig
from minitransformer.text.cache import cached_tokenizer
from minitransformer.text.find import find_text
from minitransformer.text.grammar.corpus import built_in_corpus
from minitransformer.text.pairs import TextPair
from minitransformer.text.tokenizer import Tokenizer

# The settings that may differ from those of the model that a run begins from.
MAY_DIFFER = {"vocab_size", "dropout", "attention_dropout", "relu_dropout"}

# How messages name the splits of the text.
SPLITS = {"train": "training", "val": "validation", "test": "test"}


def choose_run(args: argparse.Namespace, rank: int) -> tuple[Path, RunConfig, bool]:
    """Return the run's directory and settings, and whether it is continued.

    Rank 0 alone names and makes the directory of a new run. `args` are the flags.
    """
    if args.resume is None:
        settings = new_settings(args)
        new = args.run or (Path() if rank else new_directory(settings.preset))
        return new, settings, False
    run = newest_run() if args.resume is True else RunDirectory(args.resume)
    return run.path, run.read_config().resumed(args), True


def new_settings(args: argparse.Namespace) -> RunConfig:
    """Combine a preset with the flags."""
    # The user's text, if flags name some.
    text = None
    if text_flags := flags_of(args, TextConfig):
        text = find_text(make_config(TextConfig, {}, text_flags))

    # The preset: named, or chosen by the number of training pairs.
    if args.config or args.start or text is None:
        name, preset = find_preset(
            args.config or ("finetune" if args.start else "tiny")
        )
    else:
        lines = text["train"].lines()
        name, preset = preset_for(sum(1 for _ in itertools.islice(lines, MANY_PAIRS)))

    # The shape of the model; the word pieces of a file decide their number.
    sizes = flags_of(args, ModelConfig)
    if args.vocabulary and "vocab_size" in sizes:
        raise UsageError("--vocab-size does nothing with --vocabulary")
    model, start = choose_model(args.start, preset, sizes)

    # All together, with the other flags.
    text = text or built_in_corpus(args.cache)
    settings = RunConfig(
        preset=name,
        model=model,
        training=make_config(TrainingConfig, preset, flags_of(args, TrainingConfig)),
        decoding=make_config(DecodingConfig, preset, flags_of(args, DecodingConfig)),
        text={split: pair.paths for split, pair in text.items()},
        vocabulary=args.vocabulary and str(args.vocabulary.absolute()),
        start=start,
    )
    settings.refuse_useless(args)
    return settings


def choose_model(
    place: Path | None, preset: Settings, named: Settings
) -> tuple[ModelConfig, str | None]:
    """Return the settings of the model to train, and the place of the model it copies.

    `named` are the settings of flags. A model that begins with the weights at `place`,
    a path or the name of a shipped model, takes only the dropout from `preset`.

    Raises: UsageError if a flag names another shape, or as `load`.
    """
    if place is None:
        return make_config(ModelConfig, preset, named), None

    # Its shape is that of the other model.
    path = find_checkpoint(place)
    config = load(path).model.config
    for name, value in named.items():
        if name not in MAY_DIFFER and value != (own := getattr(config, name)):
            expected = f"expected {own}, as in {place}, or nothing"
            raise UsageError(f"{flag_name(name)}: {expected}, got {value}")

    # Its dropout may be another.
    of_preset = preset.keys() & MAY_DIFFER - {"vocab_size"}
    settings = {**vars(config), **{name: preset[name] for name in of_preset}}
    name = str(place) if path == shipped_model(str(place)) else str(path.absolute())
    return make_config(ModelConfig, settings, named), name


def last_checkpoint(run: RunDirectory) -> Checkpoint | None:
    """Load the checkpoint to resume from, or return None if none was ever saved.

    Raises: ValueError if the run's checkpoints are gone or damaged.
    """
    if paths := run.checkpoints():
        try:
            return load(paths[-1], with_moments=True)
        except ValueError as error:
            helps = "delete it to go on from the one before, or train.py --from that"
            raise ValueError(f"{error}; {helps}") from error
    if run.metrics.exists() and not run.unsaved.exists():
        raise ValueError(
            f"{run.path}: expected a checkpoint step-*.safetensors to resume from, "
            "found none, and a new beginning would replace what is here: train with "
            "another --run, or delete this"
        )
    return None


def first_checkpoint(
    settings: RunConfig, train: TextPair, cache: Path, cores: int
) -> tuple[Checkpoint, str]:
    """Choose the vocabulary (5.1) and draw the parameters: the state at step 0.

    With --from, the parameters are copied from that model, which is validated before
    the first update. Also returns a line for the log about the vocabulary, or "".

    Raises: as `load` and `first_tokenizer`.
    """
    # The model has a row of the embedding for each piece that there is.
    other = load(find_checkpoint(Path(settings.start))) if settings.start else None
    tokenizer = first_tokenizer(settings, other, train, cache, cores)
    size = tokenizer.vocab_size
    config = replace(settings.model, vocab_size=size)
    model = Transformer(config, settings.training.seed)
    line = ""
    if size < settings.model.vocab_size and settings.vocabulary is None:
        asked = f"not {settings.model.vocab_size:,}"
        line = f"vocabulary  {size:,} word pieces, {asked}: the text supports no more"

    # The weights of another model.
    if other is not None:
        count = copy_weights(other, model, tokenizer)
        copied = f"{count:,} of {size:,} word pieces"
        line = f"from        {settings.start}, with the embeddings of {copied}"

    # The state before the first update.
    parameters = ParameterBuffer(model)
    state = RunState(
        decoding=settings.decoding,
        origin=crc32(parameters.data),
        pending_validations=int(other is not None),
    )
    return Checkpoint(model, tokenizer, parameters, state), line


def first_tokenizer(
    settings: RunConfig,
    other: Checkpoint | None,
    train: TextPair,
    cache: Path,
    cores: int,
) -> Tokenizer:
    """Return the vocabulary of a file, or of the other model, or learn one."""
    size = settings.model.vocab_size
    if settings.vocabulary is not None:
        return Tokenizer.read(Path(settings.vocabulary))
    if other is not None and other.tokenizer.vocab_size == size:
        return other.tokenizer
    return cached_tokenizer(train, size, cache, cores)


def copy_weights(other: Checkpoint, model: Transformer, tokenizer: Tokenizer) -> int:
    """Copy another model's weights to a new model with this vocabulary.

    Returns: how many word pieces both vocabularies have, whose embeddings are copied
    """
    # The shared word pieces, with their rows in either embedding.
    other_rows = {piece: i for i, piece in enumerate(other.tokenizer.all_pieces())}
    pieces = enumerate(tokenizer.all_pieces())
    shared = [(i, other_rows[piece]) for i, piece in pieces if piece in other_rows]
    rows, copied_rows = np.transpose(shared)

    # The weights.
    values = other.parameters.views(other.parameters.data)
    for name, parameter in model.named_parameters():
        if parameter is model.embedding.table:
            parameter.data[rows] = values[name][copied_rows]
        else:
            parameter.data[...] = values[name]
    return len(rows)


def remember_text(start: Checkpoint, text: Mapping[str, TextPair]) -> None:
    """Compare the digest of each split with that of the run's text, or remember it.

    Raises: ValueError if a split has changed.
    """
    digests = {split: pair.digest() for split, pair in text.items()}
    for split, pair in text.items():
        if start.state.text.get(split, digests[split]) != digests[split]:
            raise ValueError(
                f"{pair}: the {SPLITS[split]} text has changed since this "
                "run began, so the run cannot be resumed"
            )
    start.state = replace(
        start.state,
        text={**start.state.text, **digests},
        languages=text["train"].languages,
    )
