"""Translation of text with a trained model, or with several."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from operator import add
from typing import Any, NamedTuple

import numpy as np

from minitransformer.engine.backend import backend_of
from minitransformer.model.transformer import Transformer
from minitransformer.settings.decoding_config import DecodingConfig, TranslationConfig
from minitransformer.settings.options import UsageError
from minitransformer.text.clean import clean
from minitransformer.text.glossary import Glossary
from minitransformer.text.lines import as_list_of_str
from minitransformer.text.masking import (
    SYMBOLS,
    Mask,
    Slot,
    hide,
    hide_in_prefix,
    named,
)
from minitransformer.text.sentences import (
    Sentence,
    as_one_sentence,
    halved,
    space_after,
    split_sentences,
    without_capitals,
)
from minitransformer.text.tokenizer import Tokenizer
from minitransformer.translation.alignment import Encoded, align_words
from minitransformer.translation.batch_translation import score_targets, translate_ids
from minitransformer.translation.beam_search import Hypothesis, Links
from minitransformer.translation.confidence import SHARES, sure_words, with_copies
from minitransformer.translation.constraints import Constraints, Prefix, PrefixFinder
from minitransformer.translation.incremental_decoding import Ensemble
from minitransformer.translation.repair import (
    NUMBER,
    copy_names,
    missing_numbers,
    near_misses,
    rare_names,
    with_numbers,
)
from minitransformer.translation.sampling import sample_ids
from minitransformer.translation.slots import NAME, are_in_order, place, restore


class Segment(NamedTuple):
    """Text that is translated at once: a line, a sentence, or half of a long one.

    Errors call its line by `number`; its translation begins with `prefix`. The model
    reads its text around the `slots`.
    """

    text: str
    number: int = 1
    prefix: str = ""
    slots: Sequence[Slot] = ()


class Translator:
    """A model or an ensemble with its tokenizer.

    It translates on `num_threads` workers; `decoding` has its default settings. `tag`
    is a symbol of the vocabulary that is put before every source line.
    `median_sentences` is the median of the sentences in a line of the training text,
    `glossary` has the translations of terms, and `quantiles` are the state's
    `log_prob_quantiles`. Errors count lines from `first_line`.

    Raises: UsageError if the tag is no symbol of the vocabulary.
    """

    def __init__(
        self,
        model: Transformer | Ensemble,
        tokenizer: Tokenizer,
        *,
        num_threads: int = 1,
        decoding: DecodingConfig | None = None,
        tag: str | None = None,
        median_sentences: int = 1,
        glossary: Mapping[str, str] | None = None,
        quantiles: Sequence[float] = (),
    ) -> None:
        if tag is not None and not tokenizer.keeps_whole(tag):
            raise UsageError(f"--tag: expected a symbol of the vocabulary, got {tag!r}")
        self.model = model
        self.tokenizer = tokenizer
        self.tag = tokenizer.encode([tag])[0] if tag else []
        self.num_threads = num_threads
        self.decoding = TranslationConfig(**vars(decoding or DecodingConfig()))
        self.median_sentences = median_sentences
        self.quantiles = quantiles
        self._mask = Mask(tokenizer, Glossary(glossary).find if glossary else None)

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
            Segment(sentence.text, number, prefix if i == 0 else "")
            for number, (prefix, sentences) in enumerate(
                zip(prefixes, divided, strict=True), start=first_line
            )
            for i, sentence in enumerate(sentences)
        ]
        translated = self._translate_prose(segments, config)

        # Align again where the model did not read all words.
        for (text, number, *_), best in zip(segments, translated, strict=True):
            if config.alignment and self._mask.slots(text):
                texts = [h.text for h in best]
                links = self.align([text] * len(best), texts, config, number)
                aligned = zip(best, links, strict=True)
                best[:] = [replace(h, alignment=own) for h, own in aligned]

        # Join the translations of each line's sentences.
        remaining = iter(translated)
        return [
            _join_sentences(
                sentences,
                [next(remaining) for _ in sentences],
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
        it is too long. A sentence that is too long is halved until its parts fit.
        Sentences in capitals are read by themselves.
        """
        # How many sentences, and how many word pieces, the model translates at once.
        at_once = {"always": 1, "never": math.inf}.get(
            config.split, self.median_sentences
        )
        limit = max(self._limit(config) - len(self.tag), 1)

        def fits(text: str) -> bool:
            return len(self.tokenizer.encode([text])[0]) <= limit

        encoded = self.tokenizer.encode(lines)
        for line, prefix, ids in zip(lines, prefixes, encoded, strict=True):
            if prefix:
                line = line.lstrip()
            # A tab divides cells.
            cells = re.split(r"(?<=\S)(?=\s*\t)", line.rstrip())
            sentences = [x for cell in cells for x in split_sentences(cell)]
            # Capitals are read as small letters: they are not mixed with other text.
            mixed = len({x.text.isupper() for x in sentences}) == 2
            if len(ids) > limit and config.split != "never":
                yield [part for x in sentences for part in halved(x, fits)]
            elif prefix or (math.inf if mixed else len(sentences)) <= at_once:
                yield [as_one_sentence(cell) for cell in cells]
            else:
                yield sentences

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

    # Prose, which the model translates around the slots of a line

    def _translate_prose(
        self, segments: Sequence[Segment], config: TranslationConfig
    ) -> list[list[Hypothesis]]:
        """Mask segments, translate their prose, repair it, and put the slots back.

        The model reads symbols in place of slots. Where it loses one, it reads the
        prose alone; where it changes a number, it reads a symbol instead. What is
        missing after these two attempts is left out, and named.
        """
        # Slots are found in the text as the tokenizer reads it.
        segments = [x._replace(text=clean(x.text)) for x in segments]
        slots = [self._mask.slots(x.text) for x in segments]
        symbols = SYMBOLS if self._mask.has_symbols else ()
        first = [
            _masked(segment, own, symbols)
            for segment, own in zip(segments, slots, strict=True)
        ]
        translated = self._translate_around(first, config)
        # Once more, where something was lost and the model reads something else now.
        again = dict[int, Segment]()
        for n, best in enumerate(translated):
            missing = {*best[0].missing} if best else set()
            own = [
                x._replace(kind="word", read="")
                if x.kind == "number" and missing & {*NUMBER.findall(x.output)}
                else x
                for x in slots[n]
            ]
            segment = _masked(segments[n], own, symbols if best else ())
            if segment != first[n] or not best:
                again[n] = segment
        results = self._translate_around([*again.values()], config, is_last=True)
        for n, best in zip(again, results, strict=True):
            before = translated[n]
            if not before or len(best[0].missing) < len(before[0].missing):
                translated[n] = best
        return translated

    def _translate_around(
        self,
        segments: Sequence[Segment],
        config: TranslationConfig,
        *,
        is_last: bool = False,
    ) -> list[list[Hypothesis]]:
        """Translate segments with names for slots, and put the slots in their places.

        A segment whose best translation lost a slot has none, unless this `is_last`.
        """
        hidden = [
            Segment(
                self._mask.as_read(hide(text, slots)),
                number,
                hide_in_prefix(prefix, slots),
            )
            for text, number, prefix, slots in segments
        ]
        # Where the model does not read a name, the word alignment places its slot.
        aligns = is_last or not all(x.is_named for own in segments for x in own.slots)
        asked = replace(config, alignment=True) if aligns else config
        translated = self.translate_as_read(hidden, asked)
        # Put the slots back; the best translation decides for the others, too.
        result = []
        for segment, best in zip(segments, translated, strict=True):
            whole = [_with_slots(segment, h, is_last) for h in best]
            result.append([x for x in whole if x] if whole[0] else [])
        return result

    # Text as the model reads it: word pieces, the search, and the translations' text

    def translate_as_read(
        self, segments: Sequence[Segment], config: TranslationConfig
    ) -> list[list[Hypothesis]]:
        """Return the best translations of segments as they are, with nothing hidden.

        Raises: as `hypotheses`.
        """
        if not segments:
            return []
        # The model has seldom seen text in capitals: it reads small letters.
        encode = self.tokenizer.encode
        small = [
            without_capitals(text, encode)
            if config.split != "never" and not prefix
            else None
            for text, _, prefix, _ in segments
        ]
        read = [new or x.text for new, x in zip(small, segments, strict=True)]
        sources = self.encode(read, config, [x.number for x in segments])
        translated = self._search(segments, sources, config)
        for best in itertools.compress(translated, small):
            best[:] = [replace(h, text=h.text.upper()) for h in best]

        # Align the words of each translation with those of its segment.
        if config.alignment:
            pairs = [
                ((segment.text, ids), (h.text, h.tokens))
                for segment, ids, best in zip(
                    segments, sources, translated, strict=True
                )
                for h in best
            ]
            links = iter(self._align(pairs, config))
            for best in translated:
                best[:] = [replace(h, alignment=next(links)) for h in best]
        texts = ["" if x.prefix else x.text for x in segments]
        self._copy_names(texts, sources, translated, config)
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
        # The tokens that each prefix needs.
        prefixes = [x.prefix for x in segments]
        starts: list[Prefix | None] = [None] * len(segments)
        if any(prefixes):
            numbers = [x.number for x in segments]
            starts = self._prefix_finder.find_each(
                prefixes, sources, config.max_input, numbers
            )
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
        return list(map(self._written, ranked, prefixes, starts))

    def _copy_names(
        self,
        texts: Sequence[str],
        sources: Sequence[list[int]],
        translated: Sequence[list[Hypothesis]],
        config: TranslationConfig,
    ) -> None:
        """Copy the names of texts that the model respelled, and add `words` if asked.

        `sources` are the ids of the texts and `translated` their translations.
        """
        # Choose the translations with a word like a rare name of the text.
        rare = rare_names(self.tokenizer, texts)
        chosen = [
            (ids, best, n, names)
            for text, ids, best in zip(texts, sources, translated, strict=True)
            for n, h in enumerate(best)
            if (names := near_misses(rare, text, h.text)) or config.words
        ]
        # Replace such a word if the model is unsure of it.
        scores = score_targets(
            self.model,
            [ids for ids, *_ in chosen],
            [best[n].tokens for _, best, n, _ in chosen],
            max_tokens=config.decode_tokens // config.beam,
            num_threads=self.num_threads,
        )
        for (_, best, n, names), log_probs in zip(chosen, scores, strict=True):
            words = sure_words(self.tokenizer, best[n], log_probs)
            text = copy_names(best[n].text, names, words)
            best[n] = replace(best[n], text=text, words=words if config.words else ())

    @cached_property
    def _prefix_finder(self) -> PrefixFinder:
        return PrefixFinder(self.tokenizer)

    def _written(
        self,
        hypotheses: Sequence[Hypothesis],
        prefix: str = "",
        start: Prefix | None = None,
    ) -> list[Hypothesis]:
        """Add the text and how sure the model is. Line feeds become spaces.

        The model sees the prefix normalised, as the `start`; the text starts with it
        exactly as given.

        Raises: ValueError if there was too little room for the prefix.
        """
        # Detokenise, and put the prefix back as it was given.
        decoded = self.tokenizer.decode([h.tokens for h in hypotheses])
        # Bytes that do not complete a character are no text.
        lines = [re.sub("[\n\r]", " ", x).replace("\ufffd", "") for x in decoded]
        texts = [start.restore(x, prefix) if start else prefix + x for x in lines]
        # The confidence: the share of validation sentences with a lower mean.
        result = []
        for h, text in zip(hypotheses, texts, strict=True):
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
        config: DecodingConfig,
        first_line: int = 1,
    ) -> list[tuple[float, int]]:
        """Return the log-probability in nats and the length of given translations.

        Raises: ValueError if a line is too long, or if there is not one translation for
        each.
        """
        lines = as_list_of_str("lines", lines)
        translations = as_list_of_str("translations", translations, len(lines))
        numbers = range(first_line, first_line + len(lines))
        log_probs = score_targets(
            self.model,
            self.encode(lines, config, numbers),
            self.encode(translations, config, numbers, targets=True),
            max_tokens=config.decode_tokens // config.beam,
            num_threads=self.num_threads,
        )
        return [(float(each.sum()), len(each)) for each in log_probs]

    def align(
        self,
        lines: Sequence[str],
        translations: Sequence[str],
        config: DecodingConfig,
        first_line: int = 1,
    ) -> list[Links]:
        """Return the word alignments of lines and given translations.

        Raises: as `score`.
        """
        lines = as_list_of_str("lines", lines)
        translations = as_list_of_str("translations", translations, len(lines))
        numbers = range(first_line, first_line + len(lines))
        sources = zip(lines, self.encode(lines, config, numbers), strict=True)
        encoded = self.encode(translations, config, numbers, targets=True)
        targets = zip(translations, encoded, strict=True)
        return self._align(list(zip(sources, targets, strict=True)), config)

    def _align(
        self, pairs: Sequence[tuple[Encoded, Encoded]], config: DecodingConfig
    ) -> list[Links]:
        return align_words(
            self.model,
            self.tokenizer,
            pairs,
            tag_length=len(self.tag),
            max_tokens=config.decode_tokens // config.beam,
            num_threads=self.num_threads,
        )


def _masked(segment: Segment, slots: Sequence[Slot], symbols: Sequence[str]) -> Segment:
    """Add slots with their names; none if a prefix would begin what is blank."""
    own = named(segment.text, [x for x in slots if x.kind != "number"], symbols)
    is_blank = not hide(segment.text, own).strip()
    return segment._replace(slots=[] if is_blank and segment.prefix else own)


def _with_slots(segment: Segment, h: Hypothesis, is_last: bool) -> Hypothesis | None:
    """Repair the numbers of a translation, and put the slots of its segment into it.

    None if it lost a slot; the last attempt leaves that out, and says what is missing.
    """
    slots = segment.slots
    read = hide(segment.text, slots)
    repaired = with_numbers(read, h.text)
    heeds_names = NAME.findall(h.text) == [x.name for x in slots if x.is_named]
    placed = place(segment.text, slots, repaired, h.alignment, heeds_names=heeds_names)
    if not (heeds_names and are_in_order(slots, placed)):
        if not is_last:
            return None
        placed = place(segment.text, slots, repaired, h.alignment, heeds_names=False)
    numbers = missing_numbers(read, placed)
    text = restore(slots, placed)
    if not text.startswith(segment.prefix):
        begun = hide_in_prefix(segment.prefix, slots)
        text = segment.prefix + NAME.sub("", h.text.removeprefix(begun))
    elif not text.strip():  # of which the model says nothing
        text = segment.text
    missing = (*(x.output for x in slots if x.output not in text), *numbers)
    h = replace(h, text=text, missing=missing)
    if missing and h.confidence:
        h = replace(h, confidence=0.0)
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
