"""Translation of text as a model reads it: word pieces, the search, and text again."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from minitransformer.engine.backend import backend_of
from minitransformer.model.transformer import Transformer
from minitransformer.settings.decoding_config import DecodingConfig, TranslationConfig
from minitransformer.settings.options import UsageError
from minitransformer.text.lines import as_list_of_str
from minitransformer.text.masking import Slot
from minitransformer.text.sentences import in_usual_case
from minitransformer.text.tokenizer import Tokenizer
from minitransformer.translation.alignment import align_words
from minitransformer.translation.batch_translation import score_targets, translate_ids
from minitransformer.translation.beam_search import Hypothesis, Links
from minitransformer.translation.confidence import SHARES, sure_words
from minitransformer.translation.constraints import Constraints, Prefix, PrefixFinder
from minitransformer.translation.incremental_decoding import Ensemble
from minitransformer.translation.repair import copy_names, respelled_names
from minitransformer.translation.sampling import sample_ids

# A symbol that stands for a slot, and the space before it.
NAME = re.compile(r" ?(⟦\d+⟧)")


class Segment(NamedTuple):
    """Text that is translated at once: a line, a sentence, or half of a long one.

    Errors call its line by `number`; its translation begins with `prefix`. The model
    reads its text around the `slots`.
    """

    text: str
    number: int = 1
    prefix: str = ""
    slots: Sequence[Slot] = ()

    @property
    def prefix_as_read(self) -> str:
        """The prefix, with names for the slots in it."""
        prefix = self.prefix
        for slot in self.slots:
            if slot.kind != "term":
                prefix = prefix.replace(slot.output, slot.name, 1)
        return prefix


class PlainTranslator:
    """A model or an ensemble with its tokenizer, which reads text as it is.

    It translates on `num_threads` workers. `tag` is a symbol of the vocabulary that is
    put before every source line. `quantiles` are the state's `log_prob_quantiles`.

    Raises: UsageError if the tag is no symbol of the vocabulary.
    """

    def __init__(
        self,
        model: Transformer | Ensemble,
        tokenizer: Tokenizer,
        *,
        num_threads: int = 1,
        tag: str | None = None,
        quantiles: Sequence[float] = (),
    ) -> None:
        if tag is not None and not tokenizer.keeps_whole(tag):
            raise UsageError(f"--tag: expected a symbol of the vocabulary, got {tag!r}")
        self.model = model
        self.tokenizer = tokenizer
        self.tag = tokenizer.encode([tag])[0] if tag else []
        self.num_threads = num_threads
        self.quantiles = quantiles

    def use_device(self) -> None:
        """Select the model's GPU in this thread: CUDA begins with the first GPU."""
        table = self.model.embedding.table.data
        backend_of(table).select_device(table)

    @property
    def single_model(self) -> Transformer:
        """The model. Raises: UsageError if there are several."""
        if isinstance(self.model, Ensemble):
            raise UsageError(f"expected one --model, got {len(self.model.members)}")
        return self.model

    def _limit(self, config: DecodingConfig) -> int:
        """Return how many word pieces are translated at once, the tag counted."""
        positions = (self.model.position_limit or math.inf) - 1  # one is EOS's
        return int(min(config.max_input, positions))

    def encode(
        self,
        lines: Sequence[str],
        config: DecodingConfig,
        numbers: Iterable[int],
        targets: bool = False,
    ) -> list[list[int]]:
        """Return the ids of each line, after the tag's; a blank line has none.

        Errors call the lines by `numbers`. `targets` have no tag.

        Raises: ValueError that names a line that is too long or begins with the tag.
        """
        # A tag and its line must fit together.
        tag = [] if targets else self.tag
        limit = self._limit(config)
        encoded = []
        for number, ids in zip(numbers, self.tokenizer.encode(lines), strict=False):
            if tag and ids[: len(tag)] == tag:
                raise ValueError(f"line {number}: expected no tag, --tag puts it there")
            if (length := len(tag) + len(ids)) > limit:
                what = "translation of line" if targets else "line"
                raise ValueError(
                    f"{what} {number}: expected at most {limit} word pieces "
                    f"(--max-input, or the model's positions), got {length}"
                )
            encoded.append([*tag, *ids] if ids else [])
        return encoded

    # Text as the model reads it: word pieces, the search, and the translations' text

    def translate_as_read(
        self, segments: Sequence[Segment], config: TranslationConfig
    ) -> list[list[Hypothesis]]:
        """Return the best translations of segments as they are, with nothing hidden.

        Raises: as `hypotheses`.
        """
        if not segments:
            return []
        # The model has seldom seen words in capitals: it reads small letters.
        read = [
            x.text
            if config.split == "never" or x.prefix
            else in_usual_case(x.text, self.tokenizer.encode)
            for x in segments
        ]
        sources = self.encode(read, config, [x.number for x in segments])
        translated = self._search(segments, sources, config)
        for text, segment, best in zip(read, segments, translated, strict=True):
            if text != segment.text and segment.text.isupper():
                best[:] = [replace(h, text=h.text.upper()) for h in best]
        self._copy_names(segments, sources, translated, config)
        return translated

    def _search(
        self,
        segments: Sequence[Segment],
        sources: Sequence[list[int]],
        config: TranslationConfig,
    ) -> list[list[Hypothesis]]:
        """Search for translations of the segments' ids, or draw samples.

        Raises: as `hypotheses`.
        """
        starts = [
            self._start(segment, ids, config)
            for segment, ids in zip(segments, sources, strict=True)
        ]
        if config.sample:
            ranked = sample_ids(self.model, sources, config, self.num_threads, starts)
        else:
            ranked = translate_ids(
                self.model,
                sources,
                config,
                self.num_threads,
                Constraints(starts) if any(starts) else None,
            )
        for segment, best in zip(segments, ranked, strict=True):
            if not best:
                expected = "expected a translation with this prefix, found none"
                raise ValueError(f"line {segment.number}: {expected}")
        return list(map(self._written, segments, ranked, starts))

    def _copy_names(
        self,
        segments: Sequence[Segment],
        sources: Sequence[list[int]],
        translated: Sequence[list[Hypothesis]],
        config: TranslationConfig,
    ) -> None:
        """Copy the names of segments that the model respelled; add `words` if asked.

        `sources` are the ids of the segments and `translated` their translations.
        """
        # Choose the translations with a word like a rare name of the segment.
        chosen = [
            (ids, best, n, names)
            for segment, ids, best in zip(segments, sources, translated, strict=True)
            for n, h in enumerate(best)
            if (
                names := {}
                if segment.prefix
                else respelled_names(self.tokenizer, segment.text, h.text)
            )
            or config.words
        ]
        # Replace such a word if the model is unsure of it.
        scores = score_targets(
            self.model,
            [ids for ids, *_ in chosen],
            [best[n].tokens for _, best, n, _ in chosen],
            **self._batching(config),
        )
        for (_, best, n, names), log_probs in zip(chosen, scores, strict=True):
            words = sure_words(self.tokenizer, best[n], log_probs)
            text = copy_names(best[n].text, names, words)
            best[n] = replace(best[n], text=text, words=words if config.words else ())

    def _start(
        self, segment: Segment, source: list[int], config: TranslationConfig
    ) -> Prefix | None:
        """Return the prefix of a segment's translation, or None if it is blank.

        Raises: ValueError naming a line that is blank, or whose prefix is impossible.
        """
        text = segment.prefix
        if not text:
            return None
        try:
            prefix = self._prefix_finder.find(text, config.max_input)
            if prefix and not source:
                raise ValueError(f"expected none for a blank line, got {text!r}")
            return prefix
        except ValueError as error:
            raise ValueError(f"prefix of line {segment.number}: {error}") from error

    @cached_property
    def _prefix_finder(self) -> PrefixFinder:
        return PrefixFinder(self.tokenizer)

    def _written(
        self, segment: Segment, hypotheses: Sequence[Hypothesis], start: Prefix | None
    ) -> list[Hypothesis]:
        """Add the text and how sure the model is. Line feeds become spaces.

        The model sees the prefix normalised, as the `start`; the text starts with it
        exactly as given.

        Raises: ValueError if there was too little room for the prefix.
        """
        decoded = self.tokenizer.decode([h.tokens for h in hypotheses])
        known = segment.text + segment.prefix
        result = []
        for h, text in zip(hypotheses, decoded, strict=True):
            # Put the prefix back as it was given.
            prefix = segment.prefix
            text = start.restore(text, prefix) if start else prefix + text
            # Bytes that complete no character are no text, nor are names of nothing.
            text = re.sub("[\n\r]", " ", text).replace("\ufffd", "")
            text = NAME.sub(lambda x: x[0] * (x[1] in known), text)
            # The confidence: the share of validation sentences with a lower mean.
            mean = h.log_prob / (len(h.tokens) + 1)  # EOS counted
            share = None
            if self.quantiles and h.tokens:  # else all was copied
                share = float(np.interp(mean, self.quantiles, SHARES))
            added = replace(h, text=text, mean_log_prob=mean, confidence=share)
            result.append(added)
        return result

    # Given translations: their scores and word alignments

    def score(
        self,
        lines: Sequence[str],
        translations: Sequence[str],
        config: TranslationConfig,
        first_line: int = 1,
    ) -> list[tuple[float, int, Links]]:
        """Return the log-probability in nats and the length of given translations.

        With `config.alignment`, the third of each is its word alignment, else it is
        empty.

        Raises: ValueError if a line is too long, or if there is not one translation for
        each.
        """
        lines = as_list_of_str("lines", lines)
        translations = as_list_of_str("translations", translations, len(lines))
        numbers = range(first_line, first_line + len(lines))
        sources = self.encode(lines, config, numbers)
        targets = self.encode(translations, config, numbers, targets=True)
        log_probs = score_targets(
            self.model, sources, targets, **self._batching(config)
        )
        links: list[Links] = [()] * len(lines)
        if config.alignment:
            links = self._align(lines, translations, config)
        return [
            (float(each.sum()), len(each), own)
            for each, own in zip(log_probs, links, strict=True)
        ]

    def _batching(self, config: DecodingConfig) -> dict[str, int]:
        """Return how given translations are read, as keyword arguments."""
        return {
            "max_tokens": config.decode_tokens // config.beam,
            "num_threads": self.num_threads,
        }

    def _align(
        self, sources: Sequence[str], targets: Sequence[str], config: DecodingConfig
    ) -> list[Links]:
        how = self._batching(config)
        return align_words(
            self.model, self.tokenizer, sources, targets, tag=self.tag, **how
        )
