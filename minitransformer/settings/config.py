"""The settings of a model, of training and of a run, with defaults and limits.

The fields become flags: `d_model` becomes `--d-model`. The defaults are those of the
paper's base model (sections 5 and 6.1, Table 3); `presets.py` has others.

Differs: batches have 4,096 tokens instead of 25,000, checkpoints are saved every 1,000
updates instead of every ten minutes, and the validation loss decides how many of the
last checkpoints are averaged. The presets of the paper's models do all three as the
paper says. Training leaves out pairs of more than 256 tokens a side, which the paper
does not mention: few sentences are longer, and they would need much memory.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from dataclasses import dataclass
from typing import ClassVar

from minitransformer.settings.decoding_config import DecodingConfig
from minitransformer.settings.options import (
    Config,
    UsageError,
    flag_name,
    flags_of,
    from_dict,
    make_config,
    option,
)
from minitransformer.settings.text_config import TextConfig

# The number formats of training (`cuda/precision.py`): all on a GPU, fp32 and bf16 on a
# CPU.
PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
PRECISION_HELP = "number format (default fp32; on a GPU bf16 if it can)"

# The tokenizers of sacreBLEU that need no dictionaries of further packages.
BLEU_TOKENIZERS = ("13a", "intl", "zh", "char", "none")
BLEU_TOKENIZER_HELP = (
    "how sacreBLEU finds words (default by the script of the references)"
)

# The ids of the special symbols in every vocabulary.
PAD_ID, UNK_ID, BOS_ID, EOS_ID = range(4)


@dataclass(frozen=True)
class ModelConfig(Config):
    """The shape of the model (section 3) and its dropout (section 5.4)."""

    help_group: ClassVar[str] = "the model (section 3)"

    vocab_size: int = option(
        37_000, "word pieces in the joint vocabulary", at_least=8, at_most=1_000_000
    )
    encoder_layers: int = option(6, "layers of the encoder", at_least=1)
    decoder_layers: int = option(6, "layers of the decoder", at_least=1)
    d_model: int = option(512, "width of the model, d_model", at_least=2)
    d_ff: int = option(2048, "width inside the feed-forward layers, d_ff", at_least=1)
    num_heads: int = option(8, "heads of each attention, h", at_least=1)
    d_k: int | None = option(
        None, "width of each head's queries and keys (default d_model / h)", at_least=1
    )
    d_v: int | None = option(
        None, "width of each head's values (default d_model / h)", at_least=1
    )
    dropout: float = option(
        0.1, "dropout of sub-layer outputs and embeddings, P_drop", at_least=0, below=1
    )
    attention_dropout: float = option(
        0.0, "dropout of attention weights", at_least=0, below=1
    )
    relu_dropout: float = option(
        0.0, "dropout inside the feed-forward layers", at_least=0, below=1
    )
    positions: str = option(
        "sinusoidal", "kind of positional encoding", choices=("sinusoidal", "learned")
    )
    max_positions: int = option(
        512, "longest possible sentence with learned positions, in tokens", at_least=1
    )
    attention_window: int | None = option(
        None, "restrict self-attention to a neighbourhood of N (section 4)", at_least=1
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
        if self.num_parameters >= 1 << 40:
            raise ValueError(
                f"expected a model of less than 2^40 parameters, got one of "
                f"{self.num_parameters:,}: --d-model, --d-ff, --vocab-size and others"
            )

    @property
    def key_width(self) -> int:
        return self.d_k or self.d_model // self.num_heads

    @property
    def value_width(self) -> int:
        return self.d_v or self.d_model // self.num_heads

    @property
    def num_parameters(self) -> int:
        """The number of parameters, computed without making the model."""
        d = self.d_model
        attention = 2 * d * self.num_heads * (self.key_width + self.value_width)
        feed_forward = 2 * d * self.d_ff + self.d_ff + d
        norm = 2 * d
        encoder = attention + feed_forward + 2 * norm
        decoder = 2 * attention + feed_forward + 3 * norm
        stacks = self.encoder_layers * encoder + self.decoder_layers * decoder
        return (self.vocab_size + (self.position_limit or 0)) * d + stacks

    @property
    def position_limit(self) -> int | None:
        """The longest sentence in tokens, EOS counted, or None if there is no limit."""
        return self.max_positions if self.positions == "learned" else None


@dataclass(frozen=True)
class TrainingConfig(Config):
    """How to train: batches, optimizer, schedule and regularisation (section 5)."""

    help_group: ClassVar[str] = "training (section 5)"

    max_tokens: int = option(
        4096, "tokens in a batch, of the longer language", at_least=1
    )
    accumulate: int = option(1, "gradient accumulation: batches per update", at_least=1)
    steps: int = option(100_000, "updates to train for in all", at_least=1)
    minutes: float | None = option(None, "minutes to train for in all", above=0)
    learning_rate: float | None = option(
        None,
        "learning rate at its peak (default (d_model * warmup)^-0.5, equation 3)",
        above=0,
    )
    warmup: int = option(4000, "updates until the learning rate peaks", at_least=1)
    decay: int = option(
        0, "last updates, in which the learning rate falls to zero", at_least=0
    )
    beta1: float = option(0.9, "decay of Adam's first moment", at_least=0, below=1)
    beta2: float = option(0.98, "decay of Adam's second moment", at_least=0, below=1)
    epsilon: float = option(1e-9, "Adam's epsilon", above=0)
    clip_norm: float | None = option(
        None, "scale larger gradients down to this norm (default never)", above=0
    )
    label_smoothing: float = option(
        0.1, "probability spread over the vocabulary, epsilon_ls", at_least=0, below=1
    )
    seed: int = option(1, "seed of parameters, batches and dropout", at_least=0)
    max_length: int = option(
        256, "leave out longer pairs (tokens a side, EOS counted)", at_least=2
    )
    validate_every: int = option(1000, "updates between validations", at_least=1)
    validate_bleu: int = option(
        500, "sentences translated for BLEU in a validation; 0 for none", at_least=0
    )
    bleu_tokenizer: str | None = option(
        None,
        BLEU_TOKENIZER_HELP,
        choices=BLEU_TOKENIZERS,
    )
    patience: int | None = option(
        None, "stop after this many validations without a better one", at_least=1
    )
    best_by: str | None = option(
        None,
        "measure of the best validation so far (default loss)",
        choices=("loss", "bleu"),
    )
    save_every: int = option(1000, "updates between checkpoints", at_least=1)
    checkpoint_minutes: float | None = option(
        None, "minutes between checkpoints, not updates (section 6.1: 10)", above=0
    )
    keep_last: int = option(10, "checkpoints kept, at least --average", at_least=1)
    average: int = option(
        5, "average at most so many checkpoints at the end of training", at_least=1
    )
    average_by: str | None = option(
        None,
        "average as many as validate best (default), or exactly --average",
        choices=("validation", "number"),
    )
    log_every: int = option(50, "updates between progress lines", at_least=1)
    precision: str | None = option(
        None,
        PRECISION_HELP,
        choices=PRECISIONS,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.best_by == "bleu" and not self.validate_bleu:
            raise ValueError("--best-by bleu expects --validate-bleu above 0, got 0")

    def checkpoint_due(self, step: int, before: float, after: float) -> bool:
        """Whether to save a checkpoint after `step`.

        Units: `before` and `after` are seconds of training before and after that step.
        """
        if self.checkpoint_minutes is None:
            return step % self.save_every == 0
        interval = 60 * self.checkpoint_minutes
        return before // interval < after // interval

    def is_regular(self, step: int) -> bool:
        """Whether a checkpoint was due, and not only saved because the run stopped."""
        return self.checkpoint_minutes is not None or step % self.save_every == 0

    @property
    def num_kept(self) -> int:
        """The number of checkpoints that are kept to resume from and to average."""
        return max(self.keep_last, self.average)


# Settings that have no flag of train.py: presets have them, and files for --config.
ONLY_IN_FILES = tuple(
    "d_k d_v attention_dropout relu_dropout max_positions attention_window beta1 beta2 "
    "epsilon nbest max_len_a max_len_b split max_input decode_tokens".split()
)

# All settings that flags and files may name.
SETTINGS = TextConfig, ModelConfig, TrainingConfig, DecodingConfig

# The settings that may change when a run is resumed: its end, its reports, which
# checkpoints it keeps and averages, and its precision.
RESUMABLE = (
    "steps decay minutes patience keep_last average average_by log_every precision"
).split()


@dataclass(frozen=True)
class RunConfig:
    """All settings of a training run, which its directory's config.json stores.

    `text` has the source and the target file of each split (train, val, test).
    `vocabulary` is the file of its word pieces, or None if the run learned them.
    `start` names the checkpoint that the run began with, if any.
    """

    preset: str
    model: ModelConfig
    training: TrainingConfig
    decoding: DecodingConfig
    text: dict[str, tuple[str, str]]
    vocabulary: str | None = None
    start: str | None = None

    def __post_init__(self) -> None:
        if self.training.best_by and "val" not in self.text:
            raise UsageError("--best-by expects validation text, found none")

    def refuse_useless(self, namespace: argparse.Namespace) -> None:
        """Refuse flags that have no effect with these settings, and too few positions.

        A preset may have settings without effect, since it is made for many runs.
        """
        limit = self.model.position_limit
        longest = self.training.max_length
        if limit is not None and longest > limit:
            learned = f"the learned positions (max_positions), {limit}"
            raise UsageError(f"--max-length: expected at most {learned}, got {longest}")
        for name in ("patience", "validate_every", "validate_bleu"):
            asked = name in namespace and getattr(self.training, name)
            if asked and "val" not in self.text:
                raise UsageError(
                    f"{flag_name(name)} expects validation text, found none"
                )

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"

    def resumed(self, namespace: argparse.Namespace) -> RunConfig:
        """Apply the flags that a resumed run may change (RESUMABLE).

        Raises: UsageError if there is another flag of a setting, or one is wrong.
        """
        for cls in SETTINGS:
            for name in flags_of(namespace, cls):
                if name not in RESUMABLE:
                    can = ", ".join(map(flag_name, RESUMABLE))
                    raise UsageError(
                        f"{flag_name(name)}: cannot change in a resumed run; "
                        f"what can: {can}"
                    )
        changes = flags_of(namespace, TrainingConfig)
        training = make_config(TrainingConfig, vars(self.training), changes)
        resumed = dataclasses.replace(self, training=training)
        resumed.refuse_useless(namespace)
        return resumed

    @classmethod
    def from_json(cls, text: str) -> RunConfig:
        """Raises: ValueError if something is missing or out of range."""
        try:
            stored = json.loads(text)
            vocabulary = stored["vocabulary"]
            if isinstance(vocabulary, dict):  # of the runs in tests/golden
                vocabulary = vocabulary["tokenizer"]
            return cls(
                preset=stored["preset"],
                model=from_dict(ModelConfig, stored["model"]),
                training=from_dict(TrainingConfig, stored["training"]),
                decoding=from_dict(DecodingConfig, stored["decoding"]),
                text={split: (a, b) for split, (a, b) in stored["text"].items()},
                vocabulary=vocabulary,
                start=stored["start"],
            )
        except (KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"expected a run's configuration: {error!r}") from error
