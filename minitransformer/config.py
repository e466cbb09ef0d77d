"""Every default and every range check, as frozen dataclasses.

The command-line flags are generated from the fields: `d_model` becomes `--d-model`. A
preset is a set of values that differ from the defaults, which are the paper's base
model (Table 3, row base, and section 5).
"""

from __future__ import annotations

import argparse
import dataclasses
import types
import typing
from dataclasses import dataclass, field
from typing import Any, TypeVar

C = TypeVar("C")

# The ids of the special symbols in every vocabulary.
PAD_ID, UNK_ID, BOS_ID, EOS_ID = range(4)


def option(
    default: Any,
    help: str,
    *,
    at_least: float | None = None,
    below: float | None = None,
    above: float | None = None,
    choices: tuple[str, ...] | None = None,
    aliases: tuple[str, ...] = (),
) -> Any:
    """A dataclass field with a help text, its range, and other names of its flag."""
    metadata = {
        "help": help,
        "at_least": at_least,
        "below": below,
        "above": above,
        "choices": choices,
        "aliases": aliases,
    }
    return field(default=default, metadata=metadata)


class Checked:
    """Checks every field against the range that its `option` gives."""

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        for f in dataclasses.fields(self):  # type: ignore[arg-type]
            value, rule = getattr(self, f.name), f.metadata
            kind, optional = _value_type(hints[f.name])
            if value is None and optional:
                continue
            if kind is float and type(value) is int:
                object.__setattr__(self, f.name, float(value))
            elif type(value) is not kind:
                raise ValueError(f"{f.name}: expected {kind.__name__}, got {value!r}")
            if kind is float and value != value:
                raise ValueError(f"{f.name}: expected a number, got {value}")
            if rule["at_least"] is not None and value < rule["at_least"]:
                raise ValueError(
                    f"{f.name}: expected at least {rule['at_least']}, got {value}"
                )
            if rule["above"] is not None and value <= rule["above"]:
                raise ValueError(
                    f"{f.name}: expected above {rule['above']}, got {value}"
                )
            if rule["below"] is not None and value >= rule["below"]:
                raise ValueError(
                    f"{f.name}: expected below {rule['below']}, got {value}"
                )
            if rule["choices"] is not None and value not in rule["choices"]:
                raise ValueError(
                    f"{f.name}: expected one of {', '.join(rule['choices'])}, "
                    f"got {value}"
                )


@dataclass(frozen=True)
class ModelConfig(Checked):
    """The shape of the model: what a checkpoint's weights depend on (section 3)."""

    vocab_size: int = option(
        37_000,
        "word pieces in the joint vocabulary",
        at_least=8,
        aliases=("--bpe-size",),
    )
    encoder_layers: int = option(6, "encoder layers, N", at_least=1)
    decoder_layers: int = option(6, "decoder layers, N", at_least=1)
    d_model: int = option(512, "width of the model", at_least=2)
    d_ff: int = option(2048, "width inside the feed-forward layers", at_least=1)
    num_heads: int = option(8, "attention heads, h", at_least=1)
    d_k: int | None = option(
        None, "width of a head's queries and keys (default d_model / h)", at_least=1
    )
    d_v: int | None = option(
        None, "width of a head's values (default d_model / h)", at_least=1
    )
    dropout: float = option(
        0.1, "dropout on sub-layers and embeddings, P_drop", at_least=0, below=1
    )
    attention_dropout: float = option(
        0.0, "dropout on attention weights", at_least=0, below=1
    )
    relu_dropout: float = option(
        0.0, "dropout inside the feed-forward layers", at_least=0, below=1
    )
    positions: str = option(
        "sinusoidal",
        "kind of positional encoding",
        choices=("sinusoidal", "learned"),
    )
    max_positions: int = option(
        512, "longest sentence in tokens with learned positions", at_least=1
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.d_model % 2:
            raise ValueError(f"d_model: expected an even number, got {self.d_model}")
        if self.d_model % self.num_heads and None in (self.d_k, self.d_v):
            raise ValueError(
                f"d_model: expected a multiple of num_heads ({self.num_heads}), "
                f"got {self.d_model}; or give d_k and d_v"
            )

    @property
    def key_width(self) -> int:
        return self.d_k or self.d_model // self.num_heads

    @property
    def value_width(self) -> int:
        return self.d_v or self.d_model // self.num_heads

    @property
    def max_length(self) -> int | None:
        """The longest sentence in tokens, or None where any length works."""
        return self.max_positions if self.positions == "learned" else None


@dataclass(frozen=True)
class TrainingConfig(Checked):
    """How to train: batches, optimizer, schedule and regularisation (section 5)."""

    max_tokens: int = option(
        4096,
        "source tokens, and about as many target tokens, in a batch",
        at_least=1,
        aliases=("--batch-tokens",),
    )
    accumulate: int = option(
        1,
        "batches whose gradients make one update",
        at_least=1,
        aliases=("--update-freq",),
    )
    steps: int = option(
        100_000,
        "optimizer updates in all",
        at_least=1,
        aliases=("--max-update",),
    )
    minutes: float | None = option(
        None, "stop after this many minutes of training in all", above=0
    )
    learning_rate: float | None = option(
        None,
        "peak of the schedule (default (d_model * warmup)^-0.5, equation 3)",
        above=0,
        aliases=("--lr",),
    )
    warmup: int = option(
        4000,
        "updates until the learning rate peaks",
        at_least=1,
        aliases=("--warmup-updates",),
    )
    beta1: float = option(0.9, "Adam's decay of the mean", at_least=0, below=1)
    beta2: float = option(0.98, "Adam's decay of the square", at_least=0, below=1)
    epsilon: float = option(1e-9, "Adam's epsilon", above=0)
    clip_norm: float | None = option(
        None, "scale gradients down to this norm (the paper does not)", above=0
    )
    label_smoothing: float = option(
        0.1, "probability spread over all classes, epsilon_ls", at_least=0, below=1
    )
    seed: int = option(1, "seed of everything random", at_least=0)
    max_length: int = option(
        256, "training pairs with a longer side, in tokens, are left out", at_least=2
    )
    validate_every: int = option(
        1000,
        "updates between validations",
        at_least=1,
        aliases=("--validate-interval-updates",),
    )
    validate_bleu: int = option(
        500, "validation sentences translated for BLEU (0 for none)", at_least=0
    )
    patience: int | None = option(
        None, "stop after this many validations without a better loss", at_least=1
    )
    save_every: int = option(
        1000,
        "updates between checkpoints",
        at_least=1,
        aliases=("--save-interval-updates",),
    )
    keep_last: int = option(10, "checkpoints kept besides the best one", at_least=1)
    average: int = option(
        5, "last checkpoints averaged at the end (1 for none)", at_least=1
    )
    log_every: int = option(
        50, "updates between progress lines", at_least=1, aliases=("--log-interval",)
    )


@dataclass(frozen=True)
class DecodingConfig(Checked):
    """How to decode: beam search with a length penalty (section 6.1)."""

    beam: int = option(
        4, "beam size (1 is greedy search)", at_least=1, aliases=("--beam-size",)
    )
    alpha: float = option(
        0.6,
        "length penalty: scores are divided by ((5 + length) / 6)^alpha",
        at_least=0,
        aliases=("--length-penalty",),
    )
    nbest: int = option(1, "translations a sentence, at most the beam", at_least=1)
    max_len_a: float = option(
        1.0, "longest output is a * input length + b: a", at_least=0
    )
    max_len_b: int = option(50, "longest output is a * input length + b: b", at_least=0)
    decode_tokens: int = option(
        4096, "source tokens times beam size decoded together", at_least=1
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nbest > self.beam:
            raise ValueError(
                f"nbest: expected at most the beam ({self.beam}), got {self.nbest}"
            )


PRESETS: dict[str, dict[str, Any]] = {
    # The built-in corpus: a few minutes on two CPU cores.
    "tiny": {
        "vocab_size": 1000,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "d_model": 128,
        "d_ff": 512,
        "num_heads": 4,
        "dropout": 0.0,
        "max_tokens": 2048,
        "steps": 2000,
        "minutes": 3.0,
        "learning_rate": 3e-3,
        "warmup": 300,
        "validate_every": 250,
        "save_every": 50,
    },
    # Multi30k's 29,000 captions: larger models overfit.
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
    # Table 3, row base; 25,000 source and target tokens a batch on one device.
    "base": {"max_tokens": 25_000},
    # Table 3, row big.
    "big": {
        "d_model": 1024,
        "d_ff": 4096,
        "num_heads": 16,
        "dropout": 0.3,
        "steps": 300_000,
        "max_tokens": 25_000,
        "average": 20,
        "keep_last": 20,
    },
}


def build(cls: type[C], preset: str, values: dict[str, Any]) -> C:
    """Make a config of class `cls` from a preset with some values replaced.

    Raises: ValueError if the preset is unknown or a value is out of range.
    """
    if preset not in PRESETS:
        raise ValueError(f"expected a config of {', '.join(PRESETS)}, got {preset!r}")
    names = {f.name for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    merged = {**PRESETS[preset], **values}
    return cls(**{k: v for k, v in merged.items() if k in names})


def from_dict(cls: type[C], values: dict[str, Any]) -> C:
    """Make a config from a JSON object that must hold exactly its fields.

    Raises: ValueError naming the fields that are unknown or missing.
    """
    names = {f.name for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    if wrong := sorted(names.symmetric_difference(values)):
        raise ValueError(f"{cls.__name__}: unknown or missing {', '.join(wrong)}")
    return cls(**values)


def add_arguments(parser: argparse.ArgumentParser, cls: type) -> None:
    """Add a flag for every field of the config class `cls`, in a group of its own."""
    summary = (cls.__doc__ or cls.__name__).splitlines()[0]
    title, _, description = summary.rstrip(".").partition(": ")
    group = parser.add_argument_group(title, description)
    hints = typing.get_type_hints(cls)
    for f in dataclasses.fields(cls):
        kind, optional = _value_type(hints[f.name])
        default = "" if optional else f" (default {f.default})"
        group.add_argument(
            "--" + f.name.replace("_", "-"),
            *f.metadata["aliases"],
            dest=f.name,
            type=kind,
            default=argparse.SUPPRESS,
            choices=f.metadata["choices"],
            metavar=None if f.metadata["choices"] else kind.__name__.upper(),
            help=f.metadata["help"] + default,
        )


def given(namespace: argparse.Namespace, cls: type) -> dict[str, Any]:
    """Return the fields of `cls` whose flags were given on the command line."""
    return {
        f.name: getattr(namespace, f.name)
        for f in dataclasses.fields(cls)
        if hasattr(namespace, f.name)
    }


def _value_type(hint: Any) -> tuple[type, bool]:
    """Return (int, float or str; whether None is allowed) of a field's annotation."""
    if isinstance(hint, types.UnionType):
        kinds = [kind for kind in hint.__args__ if kind is not type(None)]
        return kinds[0], True
    return hint, False
