"""Begin a run with the weights of another one: fine-tuning.

The paper trains every model from random parameters. A model that has learned from much
text needs little of another kind to learn that, too (Luong and Manning, 2015).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from zlib import crc32

from minitransformer.model.transformer import Transformer
from minitransformer.runs.checkpoint import Checkpoint, load
from minitransformer.runs.run_directory import find_checkpoint
from minitransformer.runs.shipped import shipped_model
from minitransformer.settings.config import ModelConfig, RunConfig
from minitransformer.settings.options import UsageError, build, flag_name
from minitransformer.text.tokenizer import Tokenizer

# What need not be as in the model that a run begins from.
MAY_DIFFER = {"vocab_size", "dropout", "attention_dropout", "relu_dropout"}


def choose_model(
    place: Path | None, preset: dict[str, Any], given: dict[str, Any]
) -> tuple[ModelConfig, tuple[str, str] | None]:
    """Return the settings of the model to train, and what it begins as, if anything.

    That is the place of another model (a path, or the name of a shipped one) and a
    digest of its content. `given` are the settings that flags name. If the model begins
    as another one, only the dropout is taken from `preset`.

    Raises: UsageError if a flag names another shape, or as `load`.
    """
    if place is None:
        return build(ModelConfig, preset, given), None
    path = find_checkpoint(place)
    start = load(path)
    config = start.model.config
    for name, value in given.items():
        if name not in MAY_DIFFER and value != (own := getattr(config, name)):
            expected = f"expected {own}, as in {place}, or nothing"
            raise UsageError(f"{flag_name(name)}: {expected}, got {value}")
    of_preset = preset.keys() & MAY_DIFFER - {"vocab_size"}
    settings = {**vars(config), **{name: preset[name] for name in of_preset}}
    name = str(place) if path == shipped_model(str(place)) else str(path.absolute())
    return build(ModelConfig, settings, given), (name, _digest(start))


def take_over(
    settings: RunConfig, model: Transformer, learn: Callable[[], Tokenizer]
) -> tuple[Tokenizer, str]:
    """Give a new model the weights of the one that `choose_model` found, if any.

    The new model has the vocabulary of the other if that has the right size and no file
    of another was named; else what `learn` returns. Of the embeddings, those of word
    pieces that both have are taken over.

    Returns: the vocabulary, and a line that says what was taken over

    Raises: ValueError if the other model has changed, or as `load`.
    """
    if settings.start is None:
        return learn(), ""
    place, digest = settings.start
    path = find_checkpoint(Path(place))
    other = load(path)
    if _digest(other) != digest:
        raise ValueError(f"{place}: it has changed since this run began from it")
    size = settings.model.vocab_size
    rows = {p: i for i, p in enumerate(other.tokenizer.all_pieces())}
    keeps = settings.vocabulary is None and size == other.tokenizer.vocab_size
    tokenizer = other.tokenizer if keeps else learn()
    pieces = enumerate(tokenizer.all_pieces())
    pairs = [(i, rows[piece]) for i, piece in pieces if piece in rows]
    mine, theirs = (list(ids) for ids in zip(*pairs, strict=True))
    values = other.parameters.views(other.parameters.data)
    for name, parameter in model.named_parameters():
        if parameter is model.embedding.table:
            parameter.data[mine] = values[name][theirs]
        else:
            parameter.data[...] = values[name]
    taken = f"with the embeddings of {len(mine):,} of {size:,} word pieces"
    return tokenizer, f"from        {place}, {taken}"


def _digest(start: Checkpoint) -> str:
    data = start.parameters.data.data
    return f"{crc32(start.tokenizer.model, crc32(data)):08x}"
