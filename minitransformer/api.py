"""Use a trained model from Python.

    from minitransformer import load, translate

    model = load("runs/NAME")
    translate(model, ["A dog runs."], beam=5)

Several paths make an ensemble.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from minitransformer.devices import open_device
from minitransformer.engine.machine import tune_allocator
from minitransformer.runs import checkpoint
from minitransformer.runs.checkpoint import Checkpoint
from minitransformer.runs.run_directory import find_checkpoint
from minitransformer.settings.config import DecodingConfig
from minitransformer.settings.options import build
from minitransformer.translation.lexicon import Lexicon
from minitransformer.translation.steppers import Ensemble
from minitransformer.translation.translator import Translator


def load(
    *paths: str | Path,
    device: str = "cpu",
    precision: str | None = None,
    threads: int | None = None,
    shortlist: str | Path | None = None,
) -> Translator:
    """Load a run directory or checkpoint, by default the newest run in ./runs.

    Several models form an ensemble, whose probabilities are averaged. `device`,
    `precision` and `threads` are those of `devices.open_device`; `shortlist` is a file
    written by `python -m minitransformer lexicon`.

    Raises: FileNotFoundError, or ValueError saying what is wrong with a file.
    """
    tune_allocator()
    opened = open_device(device, precision, threads)
    found: list[Checkpoint] = []
    for path in map(Path, paths) if paths else [None]:
        loaded = checkpoint.load(find_checkpoint(path))
        loaded.parameters.move_to(opened.xp, opened.low_precision)
        if found and loaded.tokenizer.model != found[0].tokenizer.model:
            raise ValueError(f"{path}: its tokenizer differs from that of {paths[0]}")
        found.append(loaded)
    tokenizer, lexicon = found[0].tokenizer, None
    if shortlist is not None:
        lexicon = Lexicon.load(Path(shortlist), tokenizer.vocab_size)
    models = [loaded.model for loaded in found]
    model = models[0] if len(models) == 1 else Ensemble(models)
    return Translator(model, tokenizer, opened.num_threads, lexicon)


def translate(
    translator: Translator, lines: Sequence[str], **options: float | str
) -> list[str]:
    """Translate lines. `options` are fields of `DecodingConfig`, such as beam=5.

    Raises: ValueError if an option is unknown or out of range.
    """
    if isinstance(lines, str):
        raise ValueError("expected a list of lines, got one string")
    if unknown := options.keys() - DecodingConfig.__dataclass_fields__.keys():
        raise ValueError(f"expected options of DecodingConfig, got {min(unknown)}")
    config = build(DecodingConfig, {}, options)
    found = translator.hypotheses(lines, config)
    return translator.text([best for best, *_ in found])
