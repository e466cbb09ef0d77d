"""Use a trained model from Python.

For example:

    from minitransformer import load, translate

    model = load("runs/NAME")
    translate(model, ["The old man sees a dog."], beam=5)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from os import PathLike
from pathlib import Path

from minitransformer.backends.devices import multiplies_int8_fast, open_device
from minitransformer.runs import checkpoint
from minitransformer.runs.models import find_checkpoint, fingerprint, require_alike
from minitransformer.settings.config import UNK_ID
from minitransformer.settings.decoding_config import DecodingConfig, TranslationConfig
from minitransformer.system.machine import tune_allocator
from minitransformer.text.glossary import read_glossary
from minitransformer.text.lines import as_list_of_str
from minitransformer.translation.batch_translation import translate_ids
from minitransformer.translation.incremental_decoding import Ensemble
from minitransformer.translation.translator import Translator


def load(
    *paths: str | Path,
    device: str = "cpu",
    precision: str | None = None,
    threads: int | None = None,
    tag: str | None = None,
    glossary: str | Path | Mapping[str, str] | None = None,
) -> Translator:
    """Load a run directory, a checkpoint or a shipped model by its name.

    The default is the newest run in ./runs that has ended and learned from text of the
    user, or else the shipped model. Several paths make an ensemble: its probabilities
    are averaged, and it decodes with the settings of the first run. `device` is "cpu",
    "cuda" or "cuda:N". `precision` holds for all models of this process (see
    `devices.open_device`); models that are stored in 8 bits have products in int8 by
    default, on a processor where these are faster. A processor translates on one core;
    on Linux, `threads` above 1 divides the lines of a call among so many forked
    processes. Do not ask for them in a program whose other threads hold locks. From now
    on, this process keeps the memory that it frees for reuse (`tune_allocator`). `tag`
    is put before every line, for a model of several corpora. `glossary` has
    translations of terms, or is a file of them (`read_glossary`).

    Raises: ValueError, OSError or RuntimeError saying what is wrong or missing.
    """
    # Read the checkpoints, and open the device.
    if wrong := [path for path in paths if not isinstance(path, str | PathLike)]:
        raise ValueError(f"expected a path or a name of a model, got {wrong[0]!r}")
    if isinstance(glossary, str | PathLike):
        glossary = read_glossary(Path(glossary))
    tune_allocator()
    named: list[Path | None] = [Path(path) for path in paths] or [None]
    places = [find_checkpoint(path) for path in named]
    checkpoints = [checkpoint.load(place) for place in places]
    if precision is None and device == "cpu":
        are_in_8_bits = all(loaded.stored == "int8" for loaded in checkpoints)
        precision = "int8" if are_in_8_bits and multiplies_int8_fast() else "fp32"
    opened = open_device(device, precision, threads)
    tokenizer = checkpoints[0].tokenizer
    state = checkpoints[0].state
    first = fingerprint(places[0], checkpoints[0])
    for place, loaded in zip(places, checkpoints, strict=True):
        require_alike(fingerprint(place, loaded), first, ("tokenizer", "direction"))
        loaded.parameters.move_to(opened.xp, opened.low_precision)
        # Round or copy the parameters now: forked workers share the results.
        loaded.parameters.data_changed()
    models = [loaded.model for loaded in checkpoints]
    model = models[0] if len(models) == 1 else Ensemble(models)
    if opened.precision == "int8":
        # Translate once: the first use of a parameter makes its integers, which forked
        # workers then share.
        shortest = DecodingConfig(beam=1, max_len_a=0, max_len_b=1)
        translate_ids(model, [[UNK_ID]], shortest)
    return Translator(
        model,
        tokenizer,
        num_threads=opened.num_threads,
        decoding=state.decoding,
        tag=tag,
        median_sentences=state.median_sentences,
        glossary=glossary,
        quantiles=state.log_prob_quantiles,
    )


def translate(
    translator: Translator,
    lines: Iterable[str],
    prefix: Iterable[str] | None = None,
    **options: float | str,
) -> list[str]:
    """Return the best translation of each line, or with `sample=True` one at random.

    `prefix` has the beginning of the translation of each line. `options` are fields of
    `TranslationConfig`, such as `beam=5`; their defaults are the settings of the run
    that was loaded. `Translator.hypotheses` returns several translations of a line,
    their scores and word alignments.

    Raises: ValueError if an option is unknown, out of range or does nothing, or if a
    line has no translation within its constraints.
    """
    if not isinstance(translator, Translator):
        raise ValueError(f"expected a model that `load` returned, got {translator!r}")
    lines = as_list_of_str("lines", lines)
    config = TranslationConfig.changed(translator.decoding, options)
    for name in options.keys() & {"nbest", "alignment"}:
        raise ValueError(f"{name}: does nothing here, use Translator.hypotheses")
    return translator.translate(lines, config, prefixes=prefix)
