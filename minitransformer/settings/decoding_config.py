"""The settings of decoding: beam search (6.1), and options beyond the paper."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar

from minitransformer.settings.options import (
    Config,
    Settings,
    UsageError,
    make_config,
    option,
)


@dataclass(frozen=True)
class DecodingConfig(Config):
    """How to decode: beam search with a length penalty (section 6.1)."""

    help_group: ClassVar[str] = "beam search (section 6.1)"

    beam: int = option(4, "beam size; 1 is greedy", at_least=1, at_most=1000)
    alpha: float = option(
        0.6,
        "length penalty: scores are divided by ((5 + length) / 6)^alpha",
        at_least=0,
        at_most=10,
    )
    nbest: int = option(
        1,
        "translations per sentence, at most the beam; fewer if no more have ended",
        at_least=1,
        at_most=10_000,
    )
    max_len_a: float = option(
        1.0,
        "a in the longest output, a * input length + b tokens",
        at_least=0,
        at_most=100,
    )
    max_len_b: int = option(
        50,
        "b in the longest output, a * input length + b tokens",
        at_least=0,
        at_most=10_000,
    )
    split: str = option(
        "auto",
        "which lines are divided into sentences (auto: lines of more sentences than in "
        "training text)",
        choices=("auto", "always", "never"),
    )
    max_input: int = option(
        1024, "longest input that is translated at once, in tokens", at_least=1
    )
    decode_tokens: int = option(
        8192, "source tokens times beam size in a batch of decoding", at_least=1
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nbest > self.beam:
            raise ValueError(
                f"nbest: expected at most the beam ({self.beam}), got {self.nbest}"
            )


@dataclass(frozen=True)
class TranslationConfig(DecodingConfig):
    """How to translate: beam search, and options beyond the paper.

    These are samples, alignments and figures of words. Training does not need them, so
    they are not stored with a run.
    """

    help_group: ClassVar[str] = "samples and alignments (beyond the paper)"

    sample: bool = option(
        False,
        "sample translations instead of searching; --nbest says how many per line",
    )
    temperature: float | None = option(
        None,
        "sample: divide logits by this (default 1)",
        at_least=0.01,
        at_most=100,
    )
    top_k: int | None = option(
        None, "sample: draw among the N likeliest tokens (default all)", at_least=1
    )
    top_p: float | None = option(
        None,
        "sample: draw among the likeliest tokens that together have this probability",
        above=0,
        at_most=1,
    )
    seed: int | None = option(
        None, "sample: the seed of the random numbers (default 1)", at_least=0
    )
    alignment: bool = option(
        False, "write which words were made from which, as pairs `source-target`"
    )
    words: bool = option(False, "with --json: write each word's log-probability (nats)")

    @classmethod
    def changed(cls, defaults: DecodingConfig, values: Settings) -> TranslationConfig:
        """Return defaults, overridden by the values of flags, a program or a request.

        Raises: UsageError if a value is unknown, out of range or does nothing.
        """
        if unknown := values.keys() - {field.name for field in fields(cls)}:
            raise UsageError(f"expected options of {cls.__name__}, got {min(unknown)}")
        if values.get("sample") and "beam" in values:
            raise UsageError("beam: does nothing with sample")
        return make_config(cls, vars(defaults), values)

    def __post_init__(self) -> None:
        if self.sample:  # the beam does not limit the number of samples
            Config.__post_init__(self)
            return
        super().__post_init__()
        for name in ("temperature", "top_k", "top_p", "seed"):
            if getattr(self, name) is not None:
                raise ValueError(f"{name}: does nothing without sample")
