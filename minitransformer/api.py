"""A trained model in three lines of Python:

from minitransformer import load, translate
model = load("runs/NAME")
translate(model, ["A dog runs."], beam=5)
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from minitransformer import backend, checkpoint
from minitransformer.config import DecodingConfig
from minitransformer.decoding import Hypothesis, translate_lines
from minitransformer.lexicon import Lexicon
from minitransformer.options import build
from minitransformer.tokenizer import Tokenizer
from minitransformer.transformer import Transformer


class Translator:
    """A model with its tokenizer, and perhaps a list of likely words."""

    def __init__(
        self, model: Transformer, tokenizer: Tokenizer, lexicon: Lexicon | None = None
    ) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.shortlist = lexicon.shortlist if lexicon else None

    def hypotheses(
        self,
        lines: Sequence[str],
        config: DecodingConfig,
        threads: int | None = None,
        first: int = 1,
    ) -> list[list[Hypothesis]]:
        """The `config.nbest` best translations of each line, best first.

        `first` is the number of the first line, for errors.
        """
        return translate_lines(
            self.model,
            self.tokenizer,
            lines,
            config,
            threads or backend.num_cores(),
            self.shortlist,
            first,
        )

    def text(self, hypotheses: Sequence[Hypothesis]) -> list[str]:
        """Detokenise; a translation never holds a line's end."""
        decoded = self.tokenizer.decode([h.tokens for h in hypotheses])
        return [line.replace("\n", " ").replace("\r", " ") for line in decoded]


def load(
    path: str | Path | None = None,
    device: str = "cpu",
    shortlist: str | Path | None = None,
) -> Translator:
    """Load a run directory or checkpoint; by default the newest run in ./runs.

    `shortlist` is a file of `python -m minitransformer.lexicon`.

    Raises: FileNotFoundError, or ValueError saying what is wrong with a file.
    """
    backend.tune_allocator()
    xp = backend.device_module(device)
    loaded = checkpoint.load(checkpoint.resolve(None if path is None else Path(path)))
    loaded.parameters.move_to(xp)
    lexicon = None
    if shortlist is not None:
        lexicon = Lexicon.load(Path(shortlist), loaded.tokenizer.vocab_size)
    return Translator(loaded.model, loaded.tokenizer, lexicon)


def translate(
    translator: Translator,
    lines: Sequence[str],
    threads: int | None = None,
    **options: float | str,
) -> list[str]:
    """Translate lines; `options` are the fields of `DecodingConfig`, such as beam=5.

    Raises: ValueError if an option is unknown or out of range.
    """
    if isinstance(lines, str):
        raise ValueError("expected a list of lines, got one string")
    if unknown := options.keys() - DecodingConfig.__dataclass_fields__.keys():
        raise ValueError(f"expected options of DecodingConfig, got {min(unknown)}")
    config = build(DecodingConfig, {}, options)
    found = translator.hypotheses(lines, config, threads)
    return translator.text([best for best, *_ in found])
