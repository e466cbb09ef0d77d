"""Every default and every range check, as frozen dataclasses.

The command-line flags are generated from the fields: `d_model` becomes `--d-model`. The
defaults are the paper's base model (Table 3, row base, and section 5); `presets.py`
holds what differs from them.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from dataclasses import dataclass
from typing import ClassVar

from minitransformer.settings.options import (
    Checked,
    UsageError,
    from_dict,
    given,
    option,
)

# The number formats that a device may compute with (`engine/precision.py`).
PRECISIONS = ("fp32", "tf32", "bf16", "fp16")

# The ids of the special symbols in every vocabulary.
PAD_ID, UNK_ID, BOS_ID, EOS_ID = range(4)


@dataclass(frozen=True)
class ModelConfig(Checked):
    """The shape of the model, on which a checkpoint's weights depend (section 3)."""

    help_group: ClassVar[tuple[str, str]] = (
        "model",
        "the shape of the model (section 3)",
    )

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
    attention_window: int | None = option(
        None,
        "size r of the neighbourhood that self-attention considers (default all)",
        at_least=1,
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

    def neighbourhood(self, causal: bool) -> tuple[int, int] | None:
        """How many positions before and after its own one considers; None for all.

        Those of section 4 are centred, so that an even r makes r + 1 with its own.
        """
        if self.attention_window is None:
            return None
        reach = self.attention_window // 2
        return reach, 0 if causal else reach

    @property
    def num_parameters(self) -> int:
        """Trainable numbers, by arithmetic alone (tests compare the model's own)."""
        d, inner = self.d_model, self.d_ff
        attention = 2 * d * self.num_heads * (self.key_width + self.value_width)
        feed_forward, norm = 2 * d * inner + inner + d, 2 * d
        encoder = attention + feed_forward + 2 * norm
        decoder = 2 * attention + feed_forward + 3 * norm
        stacks = self.encoder_layers * encoder + self.decoder_layers * decoder
        return (self.vocab_size + (self.position_limit or 0)) * d + stacks

    @property
    def position_limit(self) -> int | None:
        """The longest sentence in tokens, or None where any length works."""
        return self.max_positions if self.positions == "learned" else None


@dataclass(frozen=True)
class TrainingConfig(Checked):
    """How to train: batches, optimizer, schedule and regularisation (section 5)."""

    help_group: ClassVar[tuple[str, str]] = (
        "training",
        "batches, optimizer, schedule, regularisation (section 5)",
    )

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
    checkpoint_minutes: float | None = option(
        None,
        "minutes between checkpoints, instead of --save-every (10 in section 6.1)",
        above=0,
    )
    keep_last: int = option(10, "checkpoints kept besides the best one", at_least=1)
    average: int = option(
        5, "last checkpoints averaged at the end (1 for none)", at_least=1
    )
    on_nonfinite: str = option(
        "stop",
        "what to do when a loss or gradient is NaN or infinite",
        choices=("stop", "skip"),
    )
    on_save_error: str = option(
        "stop",
        "what to do when a checkpoint cannot be written",
        choices=("stop", "continue"),
    )
    log_every: int = option(
        50, "updates between progress lines", at_least=1, aliases=("--log-interval",)
    )
    precision: str | None = option(
        None,
        "numbers that a GPU computes with (default bf16 where it has it, else fp32)",
        choices=PRECISIONS,
    )

    def saves(self, step: int, before: float, seconds: float) -> bool:
        """Whether to save after `step`, during which the run's clock went from `before`
        to `seconds`."""
        if self.checkpoint_minutes is None:
            return step % self.save_every == 0
        length = 60 * self.checkpoint_minutes
        return before // length < seconds // length


@dataclass(frozen=True)
class RanksConfig(Checked):
    """How many processes train, each a rank with a share of every batch."""

    help_group: ClassVar[tuple[str, str]] = "ranks", "processes that train together"

    ranks: int = option(1, "processes on CPUs, through MPI", at_least=1)
    gpus: int = option(1, "processes on GPUs 0, 1, ..., through NCCL", at_least=1)
    restarts: int = option(0, "times to go on when a rank has died", at_least=0)
    peer_timeout: float = option(600.0, "seconds to wait for other ranks", above=0)

    @property
    def several(self) -> bool:
        """Whether processes have to be started, rather than this one train."""
        return self.ranks > 1 or self.gpus > 1 or self.restarts > 0


@dataclass(frozen=True)
class DecodingConfig(Checked):
    """How to decode: beam search with a length penalty (section 6.1)."""

    help_group: ClassVar[tuple[str, str]] = (
        "decoding",
        "beam search with a length penalty (section 6.1)",
    )

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
    max_input: int = option(
        1024, "longest input translated in one piece, in tokens", at_least=1
    )
    long_input: str = option(
        "split",
        "what to do with longer input",
        choices=("split", "truncate", "error"),
    )
    decode_tokens: int = option(
        8192, "source tokens times beam size decoded together", at_least=1
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nbest > self.beam:
            raise ValueError(
                f"nbest: expected at most the beam ({self.beam}), got {self.nbest}"
            )


@dataclass(frozen=True)
class TextConfig(Checked):
    """The text to learn from: a folder, or files; by default the built-in corpus."""

    help_group: ClassVar[tuple[str, str]] = (
        "text",
        "a folder or files (default: the built-in corpus)",
    )

    data: str | None = option(
        None, "folder of train.LANG, val.LANG and test*.LANG, plain or .gz"
    )
    source: str | None = option(None, "source language, the ending of its files")
    target: str | None = option(None, "target language, the ending of its files")
    train_source: str | None = option(None, "source side of the training text")
    train_target: str | None = option(None, "target side of the training text")
    val_source: str | None = option(None, "source side of the validation text")
    val_target: str | None = option(None, "target side of the validation text")
    test_source: str | None = option(None, "source side of the test text")
    test_target: str | None = option(None, "target side of the test text")

    def __post_init__(self) -> None:
        super().__post_init__()
        halves = {split: pair for split, pair in self._named().items() if any(pair)}
        if halves:
            if self.data or self.source or self.target:
                raise ValueError("--data, --source, --target do not go with file names")
            for split in ("train", *halves):
                if None in halves.get(split, (None,)):
                    raise ValueError(f"expected --{split}-source and --{split}-target")
        elif self.data and not (self.source and self.target):
            raise ValueError("--data expects --source and --target, such as en and de")
        elif (self.source or self.target) and not self.data:
            raise ValueError("--source and --target need --data")

    def _named(self) -> dict[str, tuple[str | None, str | None]]:
        return {
            "train": (self.train_source, self.train_target),
            "val": (self.val_source, self.val_target),
            "test": (self.test_source, self.test_target),
        }

    @property
    def files(self) -> dict[str, tuple[str, str]]:
        """The named source and target file of each split that has any."""
        return {split: (s, t) for split, (s, t) in self._named().items() if s and t}


# What a resumed run may change: how long to go on and how to report, not what it is.
RESUMABLE = (
    "steps",
    "minutes",
    "patience",
    "keep_last",
    "average",
    "log_every",
    "precision",
    "on_nonfinite",
    "on_save_error",
)


@dataclass(frozen=True)
class RunConfig:
    """What a run directory's config.json holds: everything that the run depends on.

    `text` gives the source and target file of each split (train, val, test).
    """

    preset: str
    model: ModelConfig
    training: TrainingConfig
    decoding: DecodingConfig
    text: dict[str, tuple[str, str]]

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"

    def resumed(self, namespace: argparse.Namespace) -> RunConfig:
        """Apply the flags that a resumed run may change.

        Raises: UsageError if a flag would make it another run.
        """
        refused = list(given(namespace, TextConfig))
        for part in (self.model, self.training, self.decoding):
            for name, value in given(namespace, type(part)).items():
                if name not in RESUMABLE and value != getattr(part, name):
                    refused.append(name)
        if refused:
            allowed = ", ".join("--" + name.replace("_", "-") for name in RESUMABLE)
            raise UsageError(
                f"--{refused[0].replace('_', '-')}: cannot change in a resumed run; "
                f"what can: {allowed}"
            )
        changes = given(namespace, TrainingConfig)
        training = dataclasses.replace(self.training, **changes)
        return dataclasses.replace(self, training=training)

    @classmethod
    def from_json(cls, text: str) -> RunConfig:
        """Raises: ValueError if something is missing, unknown or out of range."""
        try:
            stored = json.loads(text)
            return cls(
                stored["preset"],
                from_dict(ModelConfig, stored["model"]),
                from_dict(TrainingConfig, stored["training"]),
                from_dict(DecodingConfig, stored["decoding"]),
                {split: (s, t) for split, (s, t) in stored["text"].items()},
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"expected a run's configuration: {error!r}") from error
