"""Named settings: how each differs from the defaults in `config.py`."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from minitransformer.settings.config import ModelConfig, TrainingConfig
from minitransformer.settings.decoding_config import DecodingConfig
from minitransformer.settings.options import (
    Settings,
    UsageError,
    merged,
    read_settings,
    suggestion,
)

PRESETS: dict[str, Settings] = {
    # The built-in corpus: a few minutes on two CPU cores. 256 of the pieces are bytes.
    "tiny": {
        "vocab_size": 1256,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "d_model": 128,
        "d_ff": 512,
        "num_heads": 4,
        "dropout": 0.0,
        "max_tokens": 1024,
        "steps": 1000,
        "minutes": 3.0,
        "learning_rate": 3e-3,
        "warmup": 400,
        "validate_every": 500,
        "validate_bleu": 200,
        "save_every": 50,
        "average": 8,
    },
    # Multi30k's 29,000 captions, on which larger models overfit.
    "multi30k": {
        "vocab_size": 10_000,
        "encoder_layers": 4,
        "decoder_layers": 4,
        "d_model": 128,
        "d_ff": 256,
        "num_heads": 4,
        "dropout": 0.3,
        "max_tokens": 4096,
        "steps": 8000,
        "learning_rate": 5e-3,
        "warmup": 2000,
        "validate_every": 200,
        "save_every": 200,
        "average": 10,
    },
    # Half of base's widths, heads and layers, for some 100,000 short sentence pairs.
    "small": {
        "vocab_size": 10_000,
        "encoder_layers": 3,
        "decoder_layers": 3,
        "d_model": 256,
        "d_ff": 1024,
        "num_heads": 4,
        "max_tokens": 4096,
        "steps": 10_000,
        "learning_rate": 1e-3,
        "warmup": 2000,
        "validate_every": 500,
        "save_every": 500,
    },
    # Training that begins --from a model, with a few thousand pairs of another kind.
    "finetune": {
        "max_tokens": 2048,
        "steps": 2000,
        "learning_rate": 3e-4,
        "warmup": 100,
        "validate_every": 100,
        "save_every": 100,
        "patience": 5,
        "average": 10,
    },
    # Table 3, row base, with the batches of section 5.1 and the checkpoints of 6.1.
    "base": {"max_tokens": 25_000, "checkpoint_minutes": 10.0, "average_by": "number"},
    # Table 3, row big.
    "big": {
        "d_model": 1024,
        "d_ff": 4096,
        "num_heads": 16,
        "dropout": 0.3,
        "steps": 300_000,
        "max_tokens": 25_000,
        "checkpoint_minutes": 10.0,
        "average": 20,
        "average_by": "number",
        "keep_last": 20,
    },
    # Table 4 and section 6.3, which gives neither dropout nor learning rate: both kinds
    # of dropout are tensor2tensor's, and equation 3 has the warm-up of base.
    "parsing": {
        "split": "never",
        "vocab_size": 16_000,
        "encoder_layers": 4,
        "decoder_layers": 4,
        "d_model": 1024,
        "dropout": 0.2,
        "attention_dropout": 0.2,
        "max_tokens": 25_000,
        "max_length": 512,
        "validate_bleu": 0,
        "checkpoint_minutes": 10.0,
        "average_by": "number",
        "beam": 21,
        "alpha": 0.3,
        "max_len_b": 300,
    },
}

# How the rows of Table 3 between base and big differ from base; steps are the same.
# (A) heads, (B) d_k, (C) size, (D) dropout and label smoothing, (E) learned positions.
TABLE_3: dict[str, Settings] = {
    "a-h1": {"num_heads": 1, "d_k": 512, "d_v": 512},
    "a-h4": {"num_heads": 4, "d_k": 128, "d_v": 128},
    "a-h16": {"num_heads": 16, "d_k": 32, "d_v": 32},
    "a-h32": {"num_heads": 32, "d_k": 16, "d_v": 16},
    "b-dk16": {"d_k": 16},
    "b-dk32": {"d_k": 32},
    "c-n2": {"encoder_layers": 2, "decoder_layers": 2},
    "c-n4": {"encoder_layers": 4, "decoder_layers": 4},
    "c-n8": {"encoder_layers": 8, "decoder_layers": 8},
    "c-d256": {"d_model": 256, "d_k": 32, "d_v": 32},
    "c-d1024": {"d_model": 1024, "d_k": 128, "d_v": 128},
    "c-ff1024": {"d_ff": 1024},
    "c-ff4096": {"d_ff": 4096},
    "d-dropout0": {"dropout": 0.0},
    "d-dropout2": {"dropout": 0.2},
    "d-smoothing0": {"label_smoothing": 0.0},
    "d-smoothing2": {"label_smoothing": 0.2},
    "e-learned": {"positions": "learned"},
}

PRESETS |= {
    # Section 6.3 with the 17 million sentences of the larger corpora.
    "parsing-semi": {**PRESETS["parsing"], "vocab_size": 32_000},
    # Table 2, English-French: 32,000 word pieces (5.1), and 0.1 as big's dropout (6.1).
    "base-en-fr": {**PRESETS["base"], "vocab_size": 32_000},
    "big-en-fr": {**PRESETS["big"], "vocab_size": 32_000, "dropout": 0.1},
    **{f"base-{row}": {**PRESETS["base"], **v} for row, v in TABLE_3.items()},
}


# How many training pairs are many: `small` made the bundled model of 184,000, and base
# learned from 4.5 million in the paper. Few are nearer to the 29,000 of Multi30k.
FEW_PAIRS, MANY_PAIRS = 75_000, 1_000_000

# The entries of a run's config.json that are no settings of model or training.
OF_RUNS = {"preset", "train", "val", "test", "vocabulary", "start"}


def preset_for(pairs: int) -> tuple[str, Settings]:
    """Return the default preset for a number of training pairs: name and settings.

    The fewer pairs, the fewer word pieces.
    """
    name = "small" if pairs >= FEW_PAIRS else "multi30k"
    name = "base" if pairs >= MANY_PAIRS else name
    size = PRESETS[name].get("vocab_size", ModelConfig.vocab_size)
    return name, {**PRESETS[name], "vocab_size": min(size, 1256 + pairs // 3)}


def find_preset(name: str) -> tuple[str, Settings]:
    """Return the name and the settings of a preset, or of a JSON file.

    A file may name a preset as `config`, and override it. The config.json of a run is
    such a file, too: its text, vocabulary and start are left out.

    Raises: UsageError if there is no such preset or file, or a setting is unknown.
    """
    if name in PRESETS:
        return name, PRESETS[name]
    path = Path(name)
    if path.suffix != ".json":
        hint = suggestion(name, PRESETS) or f"; presets are {', '.join(PRESETS)}"
        raise UsageError(f"--config: expected FILE.json or a preset, got {name}{hint}")

    # Find the preset that the file is based on.
    values = read_settings(path)
    base = values.pop("config", None)
    if base is not None and str(base) not in PRESETS:
        raise UsageError(
            f"{path}: config: expected the name of a preset, got {base}"
            f"{suggestion(str(base), PRESETS)}"
        )

    # Leave out what else a run has, and refuse unknown settings.
    if values.keys() >= OF_RUNS - {"val", "test"}:
        values = {x: y for x, y in values.items() if x not in OF_RUNS}
    classes = ModelConfig, TrainingConfig, DecodingConfig
    known = {f.name for cls in classes for f in dataclasses.fields(cls)}
    if unknown := sorted(values.keys() - known):
        hint = suggestion(unknown[0], known)
        raise UsageError(f"{path}: unknown setting {unknown[0]}{hint}")
    return path.stem, merged(PRESETS[base] if base else {}, values)
