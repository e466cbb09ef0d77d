"""Translate text with a trained model, or with several."""

from __future__ import annotations

from collections.abc import Sequence

from minitransformer.model.transformer import Transformer
from minitransformer.settings.config import DecodingConfig
from minitransformer.text.tokenizer import Tokenizer
from minitransformer.translation.beam_search import Hypothesis
from minitransformer.translation.decode import translate_lines
from minitransformer.translation.lexicon import Lexicon
from minitransformer.translation.steppers import Ensemble


class Translator:
    """A model or an ensemble, its tokenizer, and perhaps a lexicon of likely words.

    `num_threads` threads translate, each some of the sentences.
    """

    def __init__(
        self,
        model: Transformer | Ensemble,
        tokenizer: Tokenizer,
        num_threads: int = 1,
        lexicon: Lexicon | None = None,
    ) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.num_threads = num_threads
        self.shortlist = lexicon.shortlist if lexicon else None

    @property
    def single(self) -> Transformer:
        """The model. Raises: ValueError if there are several."""
        if isinstance(self.model, Ensemble):
            raise ValueError(f"expected one model, got {len(self.model.members)}")
        return self.model

    def hypotheses(
        self, lines: Sequence[str], config: DecodingConfig, first_line: int = 1
    ) -> list[list[Hypothesis]]:
        """Return the `config.nbest` best translations of each line, best first.

        `first_line` is the number of the first line, which errors name.
        """
        return translate_lines(
            self.model,
            self.tokenizer,
            lines,
            config,
            self.num_threads,
            self.shortlist,
            first_line,
        )

    def text(self, hypotheses: Sequence[Hypothesis]) -> list[str]:
        """Detokenise. A line feed within a translation becomes a space."""
        decoded = self.tokenizer.decode([h.tokens for h in hypotheses])
        return [line.replace("\n", " ").replace("\r", " ") for line in decoded]
