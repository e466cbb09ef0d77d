"""A program that uses every public name, as its author's type checker sees it.

mypy --strict --follow-imports=silent tests/support/public_names.py
"""

from pathlib import Path

import minitransformer
from minitransformer import (
    DecodingConfig,
    ModelConfig,
    Tokenizer,
    TrainingConfig,
    Transformer,
    TranslationConfig,
    Translator,
    load,
    translate,
)


def sizes(config: ModelConfig) -> tuple[int, float]:
    return config.d_model, config.dropout


def translations(path: Path, lines: list[str]) -> list[str]:
    """Return the best translation of each line, and three with their scores."""
    translator: Translator = load(path, "other", device="cpu", threads=2)
    first: list[str] = translate(translator, lines, beam=5, length_penalty=0.6)
    config = TranslationConfig(**vars(DecodingConfig(beam=4, nbest=3)))
    found = translator.hypotheses(lines, config)
    return [*first, *(f"{h.text} {h.score}" for best in found for h in best)]


def parts(translator: Translator) -> list[str]:
    tokenizer: Tokenizer = translator.tokenizer
    model: Transformer = translator.single_model
    steps: int = TrainingConfig(steps=10).steps
    d_model, dropout = sizes(model.config)
    [ids] = tokenizer.encode(["A dog runs."])
    pieces: list[str] = tokenizer.pieces(ids)
    version: str = minitransformer.__version__
    return [*pieces, version, f"{steps} {d_model} {dropout}"]
