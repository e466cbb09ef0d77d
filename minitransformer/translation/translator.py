"""Translation of text with a trained model, or with several."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from minitransformer.model.transformer import Transformer
from minitransformer.settings.config import DecodingConfig
from minitransformer.text.tokenizer import Tokenizer
from minitransformer.translation.batch_translation import translate_ids
from minitransformer.translation.beam_search import Hypothesis
from minitransformer.translation.incremental_decoding import Ensemble
from minitransformer.translation.lexicon import Lexicon
from minitransformer.translation.scoring import score_targets
from minitransformer.translation.tags import Tags


class Translator:
    """A model or an ensemble with its tokenizer, and a lexicon for shortlists if any.

    It translates on `num_threads` threads; `decoding` is how it decodes unless it is
    told otherwise. `tags` are those of the source lines. Where a method takes
    `first_line`, that is the number by which errors call the first of its lines.
    """

    def __init__(
        self,
        model: Transformer | Ensemble,
        tokenizer: Tokenizer,
        num_threads: int = 1,
        lexicon: Lexicon | None = None,
        decoding: DecodingConfig | None = None,
        tags: Tags | None = None,
    ) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.num_threads, self.decoding = num_threads, decoding or DecodingConfig()
        self.tags = tags or Tags(tokenizer)
        self.shortlist = lexicon.shortlist if lexicon else None

    def use_device(self) -> None:
        """Have this thread compute where the model is, if that is one of several GPUs.

        CUDA has every thread begin with the first.
        """
        table = self.model.embedding.table.data
        if not isinstance(table, np.ndarray):
            table.device.use()

    @property
    def single_model(self) -> Transformer:
        """The model. Raises: ValueError if there are several."""
        if isinstance(self.model, Ensemble):
            raise ValueError(f"expected one model, got {len(self.model.members)}")
        return self.model

    def translate(
        self, lines: Sequence[str], config: DecodingConfig, first_line: int = 1
    ) -> list[str]:
        """Return the best translation of each line."""
        return self.text([h[0] for h in self.hypotheses(lines, config, first_line)])

    def hypotheses(
        self, lines: Sequence[str], config: DecodingConfig, first_line: int = 1
    ) -> list[list[Hypothesis]]:
        """Return the `config.nbest` best translations of each line, best first.

        A line that is too long is translated in parts. Its n-th best translation
        consists of the n-th best of every part, whose scores are added.
        """
        encoded = self.encode(lines, config, first_line)
        sources = [part for parts in encoded for part in parts]
        threads, shortlist = self.num_threads, self.shortlist
        found = iter(translate_ids(self.model, sources, config, threads, shortlist))
        return [_joined([next(found) for _ in parts]) for parts in encoded]

    def score(
        self,
        lines: Sequence[str],
        translations: Sequence[str],
        config: DecodingConfig,
        first_line: int = 1,
    ) -> list[tuple[float, int]]:
        """Return the log-probability in nats and the length of given translations.

        Raises: ValueError if there are several models, or if a line is too long.
        """
        model, whole = self.single_model, replace(config, long_input="error")
        no_tags = Tags(self.tokenizer)
        sources, targets = (
            [ids for [ids] in self.encode(side, whole, first_line, tags)]
            for side, tags in ((lines, self.tags), (translations, no_tags))
        )
        return score_targets(
            model, sources, targets, config.decode_tokens, self.num_threads
        )

    def encode(
        self,
        lines: Sequence[str],
        config: DecodingConfig,
        first_line: int = 1,
        tags: Tags | None = None,
    ) -> list[list[list[int]]]:
        """Return the ids of each line in parts: one, unless the line is too long.

        Every part begins with the tag of its line; `tags` replaces those of the source.
        A line of more than `max_input` ids, or of more than the model has positions
        for, is treated as `long_input` says.

        Raises: ValueError that names the line if `long_input` is "error" or if it has
        not the tag that it needs.
        """
        positions = (self.model.config.position_limit or math.inf) - 1  # one is EOS's
        limit = int(min(config.max_input, positions))
        encoded, tags = [], tags or self.tags
        for number, ids in enumerate(self.tokenizer.encode(lines), start=first_line):
            tag, text = tags.divide(ids, number)
            if len(tag) + len(text) > limit and config.long_input == "error":
                raise ValueError(
                    f"line {number}: expected at most {limit} word pieces "
                    f"(--max-input, or the model's positions), got {len(ids)}"
                )
            parts = [
                [*tag, *part]
                for part in self.tokenizer.split(text, max(limit - len(tag), 1))
            ]
            encoded.append(parts if config.long_input == "split" else parts[:1])
        return encoded

    def text(self, hypotheses: Sequence[Hypothesis]) -> list[str]:
        """Detokenise. A line feed within a translation becomes a space."""
        decoded = self.tokenizer.decode([h.tokens for h in hypotheses])
        return [line.replace("\n", " ").replace("\r", " ") for line in decoded]


def _joined(parts: list[list[Hypothesis]]) -> list[Hypothesis]:
    """Join the hypotheses of a line's parts, the n-th best of each to one."""
    return [
        Hypothesis(
            tuple(itertools.chain.from_iterable(h.tokens for h in ranked)),
            sum(h.score for h in ranked),
            sum(h.log_prob for h in ranked),
        )
        for ranked in zip(*parts, strict=False)
    ]
