"""Translation of text with a trained model, or with several."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from minitransformer.model.transformer import Transformer
from minitransformer.settings.decoding_config import DecodingConfig, TranslationConfig
from minitransformer.settings.options import UsageError
from minitransformer.text.tokenizer import Tokenizer
from minitransformer.translation.alignment import Links, TextInParts, align_words
from minitransformer.translation.batch_translation import score_targets, translate_ids
from minitransformer.translation.beam_search import Hypothesis
from minitransformer.translation.constraints import Constraints, Prefix, PrefixFinder
from minitransformer.translation.incremental_decoding import Ensemble
from minitransformer.translation.sampling import sample_ids


class Translator:
    """A model or an ensemble with its tokenizer.

    It translates on `num_threads` workers; `decoding` is how it decodes by default.
    `tag` is a symbol of the vocabulary that is put before every source line. Where a
    method takes `first_line`, that is the number by which errors call the first of its
    lines.

    Raises: UsageError if the tag is no symbol of the vocabulary.
    """

    def __init__(
        self,
        model: Transformer | Ensemble,
        tokenizer: Tokenizer,
        num_threads: int = 1,
        decoding: DecodingConfig | None = None,
        tag: str | None = None,
    ) -> None:
        if tag is not None and not tokenizer.keeps_whole(tag):
            raise UsageError(f"--tag: expected a symbol of the vocabulary, got {tag!r}")
        self.model, self.tokenizer = model, tokenizer
        self.tag = tokenizer.encode([tag])[0] if tag else []
        self.num_threads, self.decoding = num_threads, decoding or DecodingConfig()

    def use_device(self) -> None:
        """Select the model's GPU in this thread, which CUDA begins with the first."""
        table = self.model.embedding.table.data
        if not isinstance(table, np.ndarray):
            table.device.use()

    @property
    def single_model(self) -> Transformer:
        """The model. Raises: UsageError if there are several."""
        if isinstance(self.model, Ensemble):
            raise UsageError(f"expected one --model, got {len(self.model.members)}")
        return self.model

    # From lines to word pieces, to their translations, and back to text

    def translate(
        self,
        lines: Sequence[str],
        config: DecodingConfig,
        first_line: int = 1,
        prefixes: Iterable[str] | None = None,
    ) -> list[str]:
        """Return the best translation of each line."""
        found = self.hypotheses(lines, config, first_line, prefixes)
        return [best.text for best, *_ in found]

    def hypotheses(
        self,
        lines: Sequence[str],
        config: DecodingConfig,
        first_line: int = 1,
        prefixes: Iterable[str] | None = None,
    ) -> list[list[Hypothesis]]:
        """Return the `config.nbest` best translations of each line, best first.

        A line that is too long is translated in parts. Its n-th best translation
        consists of the n-th best of every part, whose scores are added. `prefixes` has
        what the translation of each line begins with; an empty one asks for nothing.
        A `TranslationConfig` may ask for other constraints, samples or word alignments.

        Raises: ValueError naming a line that has no translation within its constraints.
        """
        if not isinstance(config, TranslationConfig):
            config = TranslationConfig(**vars(config))
        lines = as_list_of_str("lines", lines)
        prefixes = _prefix_of_each(prefixes, lines)
        encoded = self.encode(lines, config, first_line)
        starts = self._prefixes(prefixes, encoded, config, first_line)
        found = iter(self._translate_parts(encoded, config, starts))
        in_parts = [[next(found) for _ in parts] for parts in encoded]
        joined = [
            self._written(_joined(parts), prefix)
            for parts, prefix in zip(in_parts, prefixes, strict=True)
        ]
        for number, best in enumerate(joined, first_line):
            if not best:
                expected = "expected a translation within the constraints, found none"
                raise ValueError(f"line {number}: {expected}")
        if not config.alignment:
            return joined
        sources = self.sources_in_parts(lines, encoded)
        pairs = [
            (source, TextInParts(h.text, [part[n].tokens for part in parts]))
            for source, best, parts in zip(sources, joined, in_parts, strict=True)
            for n, h in enumerate(best)
        ]
        links = iter(self._align(pairs, config))
        return [[replace(h, alignment=next(links)) for h in best] for best in joined]

    def encode(
        self,
        lines: Sequence[str],
        config: DecodingConfig,
        first_line: int = 1,
        targets: bool = False,
    ) -> list[list[list[int]]]:
        """Return the ids of each line in parts: one, unless the line is too long.

        Every part begins with the tag, unless these are `targets`. A line of more than
        `max_input` ids, or of more than the model has positions for, is treated as
        `long_input` says.

        Raises: ValueError that names the line if `long_input` is "error", or if it
        begins with the tag.
        """
        positions = (self.model.position_limit or math.inf) - 1  # one is EOS's
        limit = int(min(config.max_input, positions))
        what = "translation of line" if targets else "line"
        tag, encoded = [] if targets else self.tag, []
        for number, text in enumerate(self.tokenizer.encode(lines), start=first_line):
            if tag and text[: len(tag)] == tag:
                raise ValueError(f"line {number}: expected no tag, --tag puts it there")
            length = len(tag) + len(text)
            if length > limit and config.long_input == "error":
                raise ValueError(
                    f"{what} {number}: expected at most {limit} word pieces "
                    f"(--max-input, or the model's positions), got {length}"
                )
            parts = self.tokenizer.split(text, max(limit - len(tag), 1))
            parts = parts if config.long_input == "split" else parts[:1]
            encoded.append([[*tag, *part] if part else [] for part in parts])
        return encoded

    def _translate_parts(
        self,
        encoded: Sequence[list[list[int]]],
        config: TranslationConfig,
        starts: Sequence[Prefix | None],
    ) -> list[list[Hypothesis]]:
        """Translate each part of all lines, of which some begin with a prefix."""
        sources = list(itertools.chain.from_iterable(encoded))
        given = self.model, sources, config, self.num_threads
        if config.sample:
            return sample_ids(*given, starts)
        asked = config.min_len or config.no_repeat_ngram or any(starts)
        constraints = Constraints(config, starts) if asked else None
        return translate_ids(*given, constraints)

    def _written(self, found: Sequence[Hypothesis], prefix: str) -> list[Hypothesis]:
        """Detokenise. A line feed within a translation becomes a space.

        The model sees the prefix normalised; the text starts with it exactly as given.

        Raises: ValueError if there was too little room for the prefix.
        """
        decoded = self.tokenizer.decode([h.tokens for h in found])
        lines = [line.replace("\n", " ").replace("\r", " ") for line in decoded]
        start = self._finder.find(prefix) if prefix else None
        texts = [start.restore(x, prefix) if start else prefix + x for x in lines]
        return [replace(h, text=x) for h, x in zip(found, texts, strict=True)]

    # Prefixes

    @cached_property
    def _finder(self) -> PrefixFinder:
        return PrefixFinder(self.tokenizer)

    def _prefixes(
        self,
        prefixes: Sequence[str],
        encoded: Sequence[list[list[int]]],
        config: DecodingConfig,
        first_line: int,
    ) -> list[Prefix | None]:
        """Return the prefix of each part of each line, which only the first one has.

        Raises: ValueError naming a line that is blank, or whose prefix is impossible.
        """
        result: list[Prefix | None] = []
        each = zip(prefixes, encoded, strict=True)
        for number, (text, parts) in enumerate(each, first_line):
            try:
                prefix = self._finder.find(text, config.max_input) if text else None
                if prefix and not parts[0]:
                    raise ValueError(f"expected none for a blank line, got {text!r}")
            except ValueError as error:
                raise ValueError(f"prefix of line {number}: {error}") from error
            result += [prefix, *[None] * (len(parts) - 1)]
        return result

    # Given translations: their scores, and which words were made from which

    def score(
        self,
        lines: Sequence[str],
        translations: Sequence[str],
        config: DecodingConfig,
        first_line: int = 1,
    ) -> list[tuple[float, int]]:
        """Return the log-probability in nats and the length of given translations.

        Raises: ValueError if there are several models, if a line is too long, or if
        there is not one translation for each.
        """
        model, whole = self.single_model, replace(config, long_input="error")
        lines = as_list_of_str("lines", lines)
        translations = as_list_of_str("translations", translations, len(lines))
        sources = [ids for [ids] in self.encode(lines, whole, first_line)]
        targets = [ids for [ids] in self.encode(translations, whole, first_line, True)]
        max_tokens = config.decode_tokens // config.beam
        return score_targets(model, sources, targets, max_tokens, self.num_threads)

    def align(
        self,
        lines: Sequence[str],
        translations: Sequence[str],
        config: DecodingConfig,
        first_line: int = 1,
    ) -> list[Links]:
        """Return which words of given translations were made from which of the lines.

        Raises: ValueError if a line is too long, or if there is not one translation
        for each.
        """
        whole, lines = (
            replace(config, long_input="error"),
            as_list_of_str("lines", lines),
        )
        translations = as_list_of_str("translations", translations, len(lines))
        sources = self.encode(lines, whole, first_line)
        targets = self.encode(translations, whole, first_line, True)
        sides = (
            self.sources_in_parts(lines, sources),
            map(TextInParts, translations, targets),
        )
        return self._align(list(zip(*sides, strict=True)), config)

    def sources_in_parts(
        self, lines: Sequence[str], encoded: Sequence[list[list[int]]]
    ) -> list[TextInParts]:
        """Return lines with the parts that `encode` cut them into, to align words."""
        pairs = zip(lines, encoded, strict=True)
        return [TextInParts(line, parts, len(self.tag)) for line, parts in pairs]

    def _align(
        self, pairs: Sequence[tuple[TextInParts, TextInParts]], config: DecodingConfig
    ) -> list[Links]:
        tokens, threads = config.decode_tokens // config.beam, self.num_threads
        return align_words(self.model, self.tokenizer, pairs, tokens, threads)


def json_objects(found: list[Hypothesis], alignment: bool) -> list[dict[str, Any]]:
    """Return a line's translations as what is written in JSON for each of them."""
    names = ("text", "score", "log_prob", "alignment")[: 3 + alignment]
    return [{name: getattr(h, name) for name in names} for h in found]


def as_list_of_str(
    name: str, given: Iterable[str], count: int | None = None
) -> list[str]:
    """Return strings as a list.

    Raises: ValueError if they are none, or not one for each of `count` lines.
    """
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise ValueError(f"expected a list of {name}, got {given!r}")
    found = list(given)
    if others := [thing for thing in found if not isinstance(thing, str)]:
        raise ValueError(f"expected a list of {name}, got {others[0]!r} in it")
    if count is not None and len(found) != count:
        raise ValueError(f"expected {name} for {count} lines, got {len(found)}")
    return found


def _prefix_of_each(prefixes: Iterable[str] | None, lines: Sequence[str]) -> list[str]:
    """Return the prefix of each line, empty ones if there are none."""
    if prefixes is None:
        return [""] * len(lines)
    return as_list_of_str("prefixes", prefixes, len(lines))


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
