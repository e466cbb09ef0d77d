"""A trained model in three lines of Python:

    from minitransformer import load, translate
    model = load("runs/NAME")
    translate(model, ["A dog runs."], beam=5)

Several paths make an ensemble.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from minitransformer import backend, checkpoint
from minitransformer.checkpoint import Checkpoint
from minitransformer.config import DecodingConfig
from minitransformer.decoding import Hypothesis, translate_lines
from minitransformer.lexicon import Lexicon
from minitransformer.options import build
from minitransformer.precision import choose_precision, use_precision
from minitransformer.steppers import Ensemble
from minitransformer.tokenizer import Tokenizer
from minitransformer.transformer import Transformer


class Translator:
    """A model or several, with their tokenizer, and perhaps a list of likely words."""

    def __init__(
        self,
        model: Transformer | Ensemble,
        tokenizer: Tokenizer,
        lexicon: Lexicon | None = None,
    ) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.shortlist = lexicon.shortlist if lexicon else None

    @property
    def single(self) -> Transformer:
        """The model. Raises: ValueError if there are several."""
        if isinstance(self.model, Ensemble):
            raise ValueError(f"expected one model, got {len(self.model.members)}")
        return self.model

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
    *paths: str | Path,
    device: str = "cpu",
    shortlist: str | Path | None = None,
    precision: str | None = None,
) -> Translator:
    """Load a run directory or checkpoint; by default the newest run in ./runs.

    Several make an ensemble, whose probabilities are averaged. `shortlist` is a file of
    `python -m minitransformer.lexicon`, `precision` as in training.

    Raises: FileNotFoundError, or ValueError saying what is wrong with a file.
    """
    backend.tune_allocator()
    xp = backend.device_module(device)
    half = use_precision(choose_precision(precision, xp), xp)
    found: list[Checkpoint] = []
    for path in map(Path, paths) if paths else [None]:
        loaded = checkpoint.load(checkpoint.resolve(path))
        loaded.parameters.move_to(xp, half)
        if found and loaded.tokenizer.model != found[0].tokenizer.model:
            raise ValueError(f"{path}: its tokenizer differs from that of {paths[0]}")
        found.append(loaded)
    tokenizer, lexicon = found[0].tokenizer, None
    if shortlist is not None:
        lexicon = Lexicon.load(Path(shortlist), tokenizer.vocab_size)
    models = [loaded.model for loaded in found]
    model = models[0] if len(models) == 1 else Ensemble(models)
    return Translator(model, tokenizer, lexicon)


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
