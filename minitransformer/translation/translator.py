"""Translation of lines: their sentences, and prose around what is copied."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import add
from typing import Any

from minitransformer.model.transformer import Transformer
from minitransformer.settings.decoding_config import DecodingConfig, TranslationConfig
from minitransformer.text.clean import clean
from minitransformer.text.glossary import Glossary
from minitransformer.text.lines import as_list_of_str
from minitransformer.text.masking import Mask, Slot, hide, named
from minitransformer.text.sentences import Sentence, divide, space_after
from minitransformer.text.tokenizer import Tokenizer
from minitransformer.translation.beam_search import Hypothesis
from minitransformer.translation.confidence import with_copies
from minitransformer.translation.incremental_decoding import Ensemble
from minitransformer.translation.plain_translator import PlainTranslator, Segment
from minitransformer.translation.repair import NUMBER, repair_numbers
from minitransformer.translation.slots import NAME, put_slots


class Translator(PlainTranslator):
    """A model or an ensemble with its tokenizer, which reads the prose of lines.

    `decoding` has its default settings. `median_sentences` is the median of the
    sentences in a line of the training text, and `glossary` has the translations of
    terms. Errors count lines from `first_line`.

    Raises: as `PlainTranslator`, and UsageError naming a wrong term.
    """

    def __init__(
        self,
        model: Transformer | Ensemble,
        tokenizer: Tokenizer,
        *,
        decoding: DecodingConfig | None = None,
        median_sentences: int = 1,
        glossary: Mapping[str, str] | None = None,
        **plain: Any,
    ) -> None:
        super().__init__(model, tokenizer, **plain)
        self.decoding = TranslationConfig(**vars(decoding or DecodingConfig()))
        self.median_sentences = median_sentences
        self._mask = Mask(tokenizer, Glossary(glossary).find if glossary else None)

    # Lines: their sentences, and the translations of these joined to lines

    def translate(
        self,
        lines: Sequence[str],
        config: DecodingConfig,
        first_line: int = 1,
        prefixes: Iterable[str] | None = None,
    ) -> list[str]:
        """Return the best translation of each line."""
        ranked = self.hypotheses(lines, config, first_line, prefixes)
        return [best.text for best, *_ in ranked]

    def hypotheses(
        self,
        lines: Sequence[str],
        config: DecodingConfig,
        first_line: int = 1,
        prefixes: Iterable[str] | None = None,
    ) -> list[list[Hypothesis]]:
        """Return the `config.nbest` best translations of each line, best first.

        If a line is divided (`divide`), its n-th best translation joins the n-th best
        of each sentence, and their scores are added. The translation of each line
        begins with its prefix, which may be empty. A `TranslationConfig` may ask for
        samples or word alignments.

        Raises: ValueError naming a line that has no translation with its prefix.
        """
        if not isinstance(config, TranslationConfig):
            config = TranslationConfig(**vars(config))
        # Layout stays, but nothing that other programs may take for the end of a line.
        lines = [" ".join(x.splitlines()) for x in as_list_of_str("lines", lines)]
        if prefixes is None:
            prefixes = [""] * len(lines)
        prefixes = as_list_of_str("prefixes", prefixes, len(lines))

        # Translate the sentences of all lines at once. The first has the line's prefix.
        divided = list(self.divide(lines, config, prefixes))
        segments = [
            Segment(clean(sentence.text), number, prefix if i == 0 else "")
            for number, (prefix, sentences) in enumerate(
                zip(prefixes, divided, strict=True), start=first_line
            )
            for i, sentence in enumerate(sentences)
        ]
        translated = iter(self._translate_prose(segments, config))
        return [
            _join_sentences(
                sentences,
                [next(translated) for _ in sentences],
                end=line[len(line.rstrip()) :],
            )
            for line, sentences in zip(lines, divided, strict=True)
        ]

    def divide(
        self,
        lines: Sequence[str],
        config: TranslationConfig,
        prefixes: Sequence[str],
    ) -> Iterator[list[Sentence]]:
        """Yield the sentences of each line, or the whole line as one.

        `config.split` decides. A line whose translation has a prefix is divided only if
        it is too long.
        """
        # How many sentences, and how many word pieces, the model translates at once.
        at_once = {"always": 1, "never": math.inf}.get(
            config.split, self.median_sentences
        )
        limit = max(self._limit(config) - len(self.tag), 1)

        def fits(text: str) -> bool:
            text = clean(text)
            read = hide(text, self._mask.slots(text))
            return (
                config.split == "never"
                or len(self.tokenizer.encode([read])[0]) <= limit
            )

        for line, prefix in zip(lines, prefixes, strict=True):
            if prefix:
                yield divide(line.lstrip(), math.inf, fits)
            else:
                yield divide(line, at_once, fits)

    # Prose, which the model translates around the slots of a line

    def _translate_prose(
        self, segments: Sequence[Segment], config: TranslationConfig
    ) -> list[list[Hypothesis]]:
        """Mask segments, translate their prose, repair it, and put the slots back.

        The model reads symbols in place of slots. Where it loses one, it reads the
        prose alone; where it changes a number, or the words made from a term are not
        together, it reads a symbol instead. What is missing after these two attempts
        is left out, and named.
        """
        slots = [self._mask.slots(x.text) for x in segments]
        first = [
            _masked(segment, own, self._mask.symbols)
            for segment, own in zip(segments, slots, strict=True)
        ]
        results = self._attempt(first, config)
        # Once more, where something is missing and the model reads something else then.
        again = dict[int, Segment]()
        for n, best in enumerate(results):
            missing = {*best[0].missing} if best else set()
            own = [
                x._replace(kind="word")
                if missing & {x.output, *NUMBER.findall(x.output)}
                else x
                for x in slots[n]
            ]
            segment = _masked(segments[n], own, self._mask.symbols if best else ())
            if segment != first[n]:
                again[n] = segment
        second = self._attempt([*again.values()], config)
        for n, best in zip(again, second, strict=True):
            before = results[n]
            if best and (not before or len(best[0].missing) < len(before[0].missing)):
                results[n] = best
        if config.alignment:
            texts = (x.text for x in segments)
            self._add_links(zip(texts, results, strict=True), config)
        return results

    def _attempt(
        self, segments: Sequence[Segment], config: TranslationConfig
    ) -> list[list[Hypothesis]]:
        """Translate segments with names for slots, and put the slots in their places.

        A segment whose best translation lost a name has none.
        """
        hidden = [
            Segment(
                self._mask.as_read(hide(x.text, x.slots)), x.number, x.prefix_as_read
            )
            for x in segments
        ]
        translated = self.translate_as_read(hidden, config)
        # Where the model reads no name, the word alignment says where the slot is.
        if unnamed := [
            (read.text, best)
            for segment, read, best in zip(segments, hidden, translated, strict=True)
            if not all(x.name for x in segment.slots)
        ]:
            self._add_links(unnamed, config)
        # The best translation decides for the others, too.
        results = []
        for segment, best in zip(segments, translated, strict=True):
            whole = [_with_slots(segment, h) for h in best]
            results.append([x for x in whole if x] if whole[0] else [])
        return results

    def _add_links(
        self,
        pairs: Iterable[tuple[str, list[Hypothesis]]],
        config: TranslationConfig,
    ) -> None:
        """Align the words of texts with those of their translations."""
        each = [(text, best, n) for text, best in pairs for n in range(len(best))]
        sources = [text for text, _, _ in each]
        targets = [best[n].text for _, best, n in each]
        links = self._align(sources, targets, config)
        for (_, best, n), own in zip(each, links, strict=True):
            best[n] = replace(best[n], alignment=own)


def _masked(segment: Segment, slots: Sequence[Slot], symbols: Sequence[str]) -> Segment:
    """Add slots with their names; none if a prefix would begin what is blank."""
    own = named(segment.text, slots, symbols)
    is_blank = not hide(segment.text, own).strip()
    return segment._replace(slots=[] if is_blank and segment.prefix else own)


def _with_slots(segment: Segment, h: Hypothesis) -> Hypothesis | None:
    """Repair the numbers of a translation, and put the slots of its segment into it.

    None if it lost the name of one. What the text lacks in the end is `missing`; for
    that and for numbers that the source has not, there is no confidence.
    """
    slots = segment.slots
    read = hide(segment.text, slots)
    repaired, numbers, invented = repair_numbers(read, h.text)
    text = put_slots(segment.text, slots, repaired, h.alignment) if slots else repaired
    if text is None:
        return None
    if not text.startswith(segment.prefix):
        rest = h.text.removeprefix(segment.prefix_as_read)
        text = segment.prefix + NAME.sub("", rest)
    elif not text.strip():  # of which the model says nothing
        text = segment.text
    missing = (*(x.output for x in slots if x.output not in text), *numbers)
    is_wrong = missing or invented
    confidence = 0.0 if is_wrong and h.confidence else h.confidence
    h = replace(h, text=text, missing=missing, confidence=confidence, alignment=())
    return with_copies(h) if h.words else h


def json_objects(
    ranked: list[Hypothesis], config: TranslationConfig
) -> list[dict[str, Any]]:
    """Return the fields that JSON has of each translation of a line."""
    names = ["text", "score", "log_prob", "confidence", "missing"]
    names += [name for name in ("alignment", "words") if getattr(config, name)]
    return [{name: getattr(h, name) for name in names} for h in ranked]


def _join_sentences(
    sentences: list[Sentence], translated: list[list[Hypothesis]], end: str
) -> list[Hypothesis]:
    """Join the translations of a line's sentences, the n-th best of each to one.

    `end` is the white space at the end of the line.
    """
    spaces = [x.space for x in sentences]
    # Word alignments count the words of the line, and of its translation.
    source_words = _first_words(map(add, ["", *(x.text for x in sentences)], spaces))
    result = []
    for ranked in zip(*translated, strict=False):
        texts = [h.text for h in ranked]
        gaps = [spaces[0], *map(space_after, texts, spaces[1:])]
        words = zip(
            source_words, _first_words(map(add, ["", *texts], gaps)), strict=True
        )
        links = (
            (i + m, j + n)
            for (m, n), h in zip(words, ranked, strict=True)
            for i, j in h.alignment
        )
        # Scores add up; the confidence of a line is that of its least sure sentence.
        joined = replace(
            min(ranked, key=lambda h: (not h.missing, h.mean_log_prob)),
            tokens=tuple(itertools.chain.from_iterable(h.tokens for h in ranked)),
            score=sum(h.score for h in ranked),
            log_prob=sum(h.log_prob for h in ranked),
            alignment=tuple(links),
            text="".join(map(add, gaps, texts)) + end,
            words=tuple(itertools.chain.from_iterable(h.words for h in ranked)),
            missing=tuple(itertools.chain.from_iterable(h.missing for h in ranked)),
            parts=tuple(zip(map("".join, sentences), gaps, ranked, strict=True)),
        )
        result.append(joined)
    return result


def _first_words(texts: Iterable[str]) -> list[int]:
    """Return the number of the first word after each text, counted through all texts.

    The last word of a text that ends without white space goes on in the next text.
    """
    counts = (max(len(x.split()) - (not x[-1:].isspace()), 0) for x in texts)
    return list(itertools.accumulate(counts))
