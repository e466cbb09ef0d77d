"""Use a trained model from Python, for example:

from minitransformer import load, translate

model = load("runs/NAME")
translate(model, ["A dog runs."], beam=5)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from minitransformer.devices import open_device
from minitransformer.engine.machine import tune_allocator
from minitransformer.runs import checkpoint
from minitransformer.runs.run_directory import decoding_defaults, find_checkpoint
from minitransformer.settings.config import DecodingConfig
from minitransformer.settings.options import build
from minitransformer.translation.incremental_decoding import Ensemble
from minitransformer.translation.lexicon import Lexicon
from minitransformer.translation.translator import Translator


def load(
    *paths: str | Path,
    device: str = "cpu",
    precision: str | None = None,
    threads: int | None = None,
    shortlist: str | Path | None = None,
) -> Translator:
    """Load a run directory, a checkpoint or a shipped model by its name.

    The default is the newest run in ./runs, or else the shipped model. Several paths
    make an ensemble, whose probabilities are averaged, and which decodes as the run of
    the first. `device` is "cpu", "cuda" or "cuda:N"; `devices.open_device` explains
    `precision` and `threads`.
    `shortlist` is a file that `python -m minitransformer lexicon` has written.

    Raises: ValueError, OSError or RuntimeError saying what is wrong or missing.
    """
    tune_allocator()
    opened = open_device(device, precision, threads)
    places: list[Path | None] = [Path(path) for path in paths] or [None]
    found = [find_checkpoint(place) for place in places]
    decoding = decoding_defaults(found[0])
    checkpoints = [checkpoint.load(path) for path in found]
    tokenizer, lexicon = checkpoints[0].tokenizer, None
    for place, loaded in zip(places, checkpoints, strict=True):
        if loaded.tokenizer.model != tokenizer.model:
            raise ValueError(f"{place}: its tokenizer differs from that of {paths[0]}")
        loaded.parameters.move_to(opened.xp, opened.low_precision)
    if shortlist is not None:
        lexicon = Lexicon.load(Path(shortlist), tokenizer.vocab_size)
    models = [loaded.model for loaded in checkpoints]
    model = models[0] if len(models) == 1 else Ensemble(models)
    return Translator(model, tokenizer, opened.num_threads, lexicon, decoding)


def translate(
    translator: Translator, lines: Sequence[str], **options: float | str
) -> list[str]:
    """Return the best translation of each line.

    `options` are fields of `DecodingConfig`, such as `beam=5`; what is not given is as
    in the run that was loaded.

    Raises: ValueError if an option is unknown or out of range.
    """
    if isinstance(lines, str):
        raise ValueError("expected a list of lines, got one string")
    if unknown := options.keys() - {field.name for field in fields(DecodingConfig)}:
        raise ValueError(f"expected options of DecodingConfig, got {min(unknown)}")
    config = build(DecodingConfig, vars(translator.decoding), options)
    return translator.translate(lines, config)
