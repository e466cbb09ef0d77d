"""Translation of text with a trained model, or with several."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from minitransformer.engine.backend import backend_of
from minitransformer.model.transformer import Transformer
from minitransformer.settings.decoding_config import DecodingConfig, TranslationConfig
from minitransformer.settings.options import UsageError
from minitransformer.text.clean import clean
from minitransformer.text.lines import as_list_of_str
from minitransformer.text.placeholders import (
    NUMBERS,
    SYMBOLS,
    Finder,
    Item,
    copy_names,
    hide,
    hide_in_prefix,
    lacking,
    named,
    near_misses,
    place,
    rare_names,
    restore,
)
from minitransformer.text.sentences import (
    as_one_sentence,
    halved,
    space_after,
    split_sentences,
    without_capitals,
)
from minitransformer.text.tokenizer import Tokenizer
from minitransformer.translation.alignment import Encoded, Links, align_words
from minitransformer.translation.batch_translation import score_targets, translate_ids
from minitransformer.translation.beam_search import Hypothesis
from minitransformer.translation.confidence import SHARES, sure_words, with_copies
from minitransformer.translation.constraints import Constraints, Prefix, PrefixFinder
from minitransformer.translation.incremental_decoding import Ensemble
from minitransformer.translation.sampling import sample_ids


class Translator:
    """A model or an ensemble with its tokenizer.

    It translates on `num_threads` workers; `decoding` is how it decodes by default.
    `tag` is a symbol of the vocabulary that is put before every source line,
    `usual_sentences` is how many sentences the model learned to translate at once, and
    `glossary` has the translations of terms, and `quantiles` are the state's
    `log_prob_quantiles`. Where a method takes `first_line`, that is the number by which
    errors call the first of its lines.

    Raises: UsageError if the tag is no symbol of the vocabulary.
    """

    def __init__(
        self,
        model: Transformer | Ensemble,
        tokenizer: Tokenizer,
        num_threads: int = 1,
        decoding: DecodingConfig | None = None,
        tag: str | None = None,
        usual_sentences: int = 1,
        glossary: Mapping[str, str] | None = None,
        quantiles: Sequence[float] = (),
    ) -> None:
        if tag is not None and not tokenizer.keeps_whole(tag):
            raise UsageError(f"--tag: expected a symbol of the vocabulary, got {tag!r}")
        self.model, self.tokenizer = model, tokenizer
        self.tag = tokenizer.encode([tag])[0] if tag else []
        self.num_threads = num_threads
        self.decoding = TranslationConfig(**vars(decoding or DecodingConfig()))
        self.usual_sentences, self.quantiles = usual_sentences, quantiles
        self._items = Finder(tokenizer, glossary or {})

    def use_device(self) -> None:
        """Select the model's GPU in this thread, which CUDA begins with the first."""
        table = self.model.embedding.table.data
        backend_of(table).select_device(table)

    @property
    def single_model(self) -> Transformer:
        """The model. Raises: UsageError if there are several."""
        if isinstance(self.model, Ensemble):
            raise UsageError(f"expected one --model, got {len(self.model.members)}")
        return self.model

    # From lines to their sentences, to word pieces, to translations, and back to lines

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

        The n-th best translation of a line in several parts (`divide`) consists of the
        n-th best of each, whose scores are added. `prefixes` has what the translation
        of each line begins with; an empty one asks for nothing. A `TranslationConfig`
        may ask for samples or word alignments.

        Raises: ValueError naming a line that has no translation with its prefix.
        """
        if not isinstance(config, TranslationConfig):
            config = TranslationConfig(**vars(config))
        # Layout is kept, but not what other programs may take for the end of a line.
        lines = [" ".join(x.splitlines()) for x in as_list_of_str("lines", lines)]
        given = [""] * len(lines) if prefixes is None else prefixes
        prefixes = as_list_of_str("prefixes", given, len(lines))
        divided = [*self.divide(lines, config, prefixes)]
        parts = [part for split in divided for part in split[1::2]]
        numbers = [n for n, x in enumerate(divided, first_line) for _ in x[1::2]]
        begun = [
            beginning
            for prefix, split in zip(prefixes, divided, strict=True)
            for beginning in [prefix, *[""] * (len(split) // 2 - 1)]
        ]
        translated = self._translate_around_items(parts, config, numbers, begun)
        for part, number, best in zip(parts, numbers, translated, strict=True):
            if config.alignment and self._items.find(part):  # all words were not read
                texts = [h.text for h in best]
                links = self.align([part] * len(best), texts, config, number)
                each = zip(best, links, strict=True)
                best[:] = [replace(h, alignment=x) for h, x in each]
        found = iter(translated)
        return [_joined(split, [next(found) for _ in split[1::2]]) for split in divided]

    def divide(
        self,
        lines: Sequence[str],
        config: TranslationConfig,
        prefixes: Sequence[str],
    ) -> Iterator[list[str]]:
        """Yield white space and what is translated at once by turns, for each line.

        `config.split` says whether that is a line or a sentence. A line whose
        translation has a prefix is divided only if it is too long, and a sentence that
        is too long by itself in halves. Sentences in capitals are read by themselves.
        """
        usual = {"always": 1, "never": math.inf}.get(config.split, self.usual_sentences)
        limit = max(self._limit(config) - len(self.tag), 1)

        def fits(part: str) -> bool:
            return len(self.tokenizer.encode([part])[0]) <= limit

        each = zip(lines, prefixes, strict=True)
        found = [split_sentences(x.lstrip() if prefix else x) for x, prefix in each]
        encoded = self.tokenizer.encode(lines)
        for split, prefix, ids in zip(found, prefixes, encoded, strict=True):
            if len(ids) > limit and config.split != "never":
                cut = (halved(part, fits) for part in split)
                split = [*itertools.chain.from_iterable(cut)]
            else:
                alike = len({part.isupper() for part in split[1::2]}) < 2
                if prefix or (len(split) // 2 if alike else math.inf) <= usual:
                    split = as_one_sentence("".join(split))
            yield split

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
        """Return the ids of each line, after those of the tag unless it is blank.

        `numbers` are those of the lines in errors. `targets` have no tag.

        Raises: ValueError that names a line that is too long or begins with the tag.
        """
        limit, what = self._limit(config), "translation of line" if targets else "line"
        tag, encoded = [] if targets else self.tag, []
        for number, ids in zip(numbers, self.tokenizer.encode(lines), strict=False):
            if tag and ids[: len(tag)] == tag:
                raise ValueError(f"line {number}: expected no tag, --tag puts it there")
            if (length := len(tag) + len(ids)) > limit:
                raise ValueError(
                    f"{what} {number}: expected at most {limit} word pieces "
                    f"(--max-input, or the model's positions), got {length}"
                )
            encoded.append([*tag, *ids] if ids else [])
        return encoded

    def _translate_around_items(
        self,
        parts: Sequence[str],
        config: TranslationConfig,
        numbers: Sequence[int],
        prefixes: Sequence[str],
    ) -> list[list[Hypothesis]]:
        """Translate parts around their items, and put these into the translations.

        The model reads names of words at first, then also of the numbers that it
        changed, then a part without these items. The first attempt that lacks fewest
        items counts; if a name gets lost in all of them, a part is read as it is.
        """
        parts = list(map(clean, parts))
        items = list(map(self._items.find, parts))
        found: list[list[Hypothesis]] = [[] for _ in parts]
        lost: list[list[Item]] = [[] for _ in parts]

        def attempt(tried: dict[int, list[Item]]) -> None:
            read = [hide(parts[n], own) for n, own in tried.items()]
            begun = [hide_in_prefix(prefixes[n], own) for n, own in tried.items()]
            aligns = any(x.read.strip() != x.name for y in tried.values() for x in y)
            asked = replace(config, alignment=True) if aligns else config
            given = read, asked, [numbers[n] for n in tried], begun
            results = zip(tried.items(), self.translate_as_read(*given), strict=True)
            for (n, own), hypotheses in results:
                whole = list[Hypothesis]()
                for h in hypotheses:
                    placed = place(parts[n], own, h.text, h.alignment)
                    text = restore(own, placed) if own else h.text
                    if text is not None and text.startswith(prefixes[n]):
                        h = replace(h, text=text)
                        whole.append(with_copies(h) if h.words else h)
                # The best one decides for the others, too.
                lacks = lacking(whole[0].text, items[n]) if whole else items[n]
                if not found[n] or len(lacks) < len(lost[n]):
                    found[n], lost[n] = whole, lacks

        symbols = SYMBOLS if self._items.has_symbols else NUMBERS
        last: list[list[Item] | None] = [None for _ in parts]
        alone = dict[str, str]()
        for names in (symbols, symbols, ()):
            changed = {x.output for own in lost for x in own if x.kind == "number"}
            alone |= self._written_alone(sorted(changed - alone.keys()), config)
            tried = dict[int, list[Item]]()
            for n in range(len(parts)):
                own = [
                    replace(x, output=alone.get(x.output, x.output))
                    for x in items[n]
                    if x.kind != "number" or x in lost[n]
                ]
                own = named(parts[n], own, names)
                blank = prefixes[n] and not hide(parts[n], own).strip()
                if (lost[n] or not found[n]) and own != last[n] and not blank:
                    tried[n] = last[n] = own
            attempt(tried)
        attempt({n: [] for n, best in enumerate(found) if not best})
        return found

    def _written_alone(
        self, numbers: Sequence[str], config: TranslationConfig
    ) -> dict[str, str]:
        """Return numbers with the marks that the model puts in each of them alone.

        In German, 1,234.5 is 1.234,5. Those of which it changes a digit stay.
        """
        asked = [x for x in numbers if not x.isdigit()]
        given = asked, config, range(len(asked)), [""] * len(asked)
        written = [x[0].text.rstrip(".") for x in self.translate_as_read(*given)]
        return {
            x: y if re.split("[.,:]", x) == re.split("[.,:]", y) else x
            for x, y in zip(asked, written, strict=True)
        }

    def translate_as_read(
        self,
        parts: Sequence[str],
        config: TranslationConfig,
        numbers: Sequence[int],
        prefixes: Sequence[str],
    ) -> list[list[Hypothesis]]:
        """Return the best translations of texts as they are, with nothing kept out.

        `numbers` are those of their lines in errors.
        """
        if not parts:
            return []
        encode, as_given = self.tokenizer.encode, config.split == "never"
        small = [
            None if as_given or prefix else without_capitals(part, encode)
            for part, prefix in zip(parts, prefixes, strict=True)
        ]
        read = [new or part for new, part in zip(small, parts, strict=True)]
        sources = self.encode(read, config, numbers)
        starts: list[Prefix | None] = [None] * len(parts)
        if any(prefixes):
            given = prefixes, sources, config.max_input, numbers
            starts = self._finder.find_each(*given)
        search = self.model, sources, config, self.num_threads
        if config.sample:
            found = sample_ids(*search, starts)
        else:
            constraints = Constraints(starts) if any(starts) else None
            found = translate_ids(*search, constraints)
        for number, best in zip(numbers, found, strict=True):
            if not best:
                expected = "expected a translation with this prefix, found none"
                raise ValueError(f"line {number}: {expected}")
        written = list(map(self._written, found, prefixes))
        for best in itertools.compress(written, small):
            best[:] = [replace(h, text=h.text.upper()) for h in best]
        if config.alignment:
            each = zip(parts, sources, written, strict=True)
            pairs = [((x, ids), (h.text, h.tokens)) for x, ids, y in each for h in y]
            links = iter(self._align(pairs, config))
            for best in written:
                best[:] = [replace(h, alignment=next(links)) for h in best]
        texts = ["" if prefix else x for x, prefix in zip(parts, prefixes, strict=True)]
        self._copy_names(texts, sources, written, config)
        return written

    def _copy_names(
        self,
        texts: Sequence[str],
        sources: Sequence[list[int]],
        written: Sequence[list[Hypothesis]],
        config: TranslationConfig,
    ) -> None:
        """Copy the names of texts that the model respelled, and add `words` if asked.

        `sources` are the ids of the texts and `written` their translations.
        """
        rare = rare_names(self.tokenizer, texts)
        chosen = list[tuple[list[int], list[Hypothesis], int, dict[str, str]]]()
        for text, ids, best in zip(texts, sources, written, strict=True):
            for n, h in enumerate(best):
                names = near_misses(rare, text, h.text)
                if names or config.words:
                    chosen.append((ids, best, n, names))
        pairs = (
            [ids for ids, *_ in chosen],
            [best[n].tokens for _, best, n, _ in chosen],
        )
        max_tokens = config.decode_tokens // config.beam
        scores = score_targets(self.model, *pairs, max_tokens, self.num_threads)
        for (_, best, n, names), log_probs in zip(chosen, scores, strict=True):
            words = sure_words(self.tokenizer, best[n], log_probs)
            text = copy_names(best[n].text, names, words)
            best[n] = replace(best[n], text=text, words=words if config.words else ())

    @cached_property
    def _finder(self) -> PrefixFinder:
        return PrefixFinder(self.tokenizer)

    def _written(self, found: Sequence[Hypothesis], prefix: str) -> list[Hypothesis]:
        """Detokenise. A line feed within a translation becomes a space.

        The model sees the prefix normalised; the text starts with it exactly as given.

        Raises: ValueError if there was too little room for the prefix.
        """
        decoded = self.tokenizer.decode([h.tokens for h in found])
        lines = [line.replace("\n", " ").replace("\r", " ") for line in decoded]
        start = self._finder.find(prefix) if prefix else None
        texts = [start.restore(x, prefix) if start else prefix + x for x in lines]
        result = []
        for h, text in zip(found, texts, strict=True):
            mean, share = h.log_prob / (len(h.tokens) + 1), None  # EOS counted
            if self.quantiles and h.tokens:  # else all was copied
                share = float(np.interp(mean, self.quantiles, SHARES))
            h = replace(h, text=text, mean_log_prob=mean, confidence=share)
            result.append(h)
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

        Raises: ValueError if a line is too long, or if there is not one translation for
        each.
        """
        numbers = itertools.count(first_line)
        lines = as_list_of_str("lines", lines)
        translations = as_list_of_str("translations", translations, len(lines))
        sources = self.encode(lines, config, numbers)
        targets = self.encode(translations, config, itertools.count(first_line), True)
        max_tokens = config.decode_tokens // config.beam
        given = self.model, sources, targets, max_tokens, self.num_threads
        return [(float(scores.sum()), len(scores)) for scores in score_targets(*given)]

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
        lines = as_list_of_str("lines", lines)
        translations = as_list_of_str("translations", translations, len(lines))
        numbers = range(first_line, first_line + len(lines))
        sources = zip(lines, self.encode(lines, config, numbers), strict=True)
        encoded = self.encode(translations, config, numbers, True)
        targets = zip(translations, encoded, strict=True)
        return self._align(list(zip(sources, targets, strict=True)), config)

    def _align(
        self, pairs: Sequence[tuple[Encoded, Encoded]], config: DecodingConfig
    ) -> list[Links]:
        tag, tokens = len(self.tag), config.decode_tokens // config.beam
        given = self.model, self.tokenizer, pairs, tag, tokens
        return align_words(*given, self.num_threads)


def json_objects(
    found: list[Hypothesis], config: TranslationConfig
) -> list[dict[str, Any]]:
    """Return a line's translations as what is written in JSON for each of them."""
    names = ["text", "score", "log_prob", "confidence"]
    names += [name for name in ("alignment", "words") if getattr(config, name)]
    return [{name: getattr(h, name) for name in names} for h in found]


def _joined(split: list[str], parts: list[list[Hypothesis]]) -> list[Hypothesis]:
    """Join the translations of a line's parts, the n-th best of each to one.

    `split` has white space and the parts by turns.
    """
    begin, *between, end = split[::2]
    sources = map("".join, zip(split[1::2], between, strict=False))
    source_words = _first_words([begin, *sources])
    result = []
    for ranked in zip(*parts, strict=False):
        spaced = zip(ranked, between, strict=False)
        texts = [h.text + space_after(h.text, space) for h, space in spaced]
        words = zip(source_words, _first_words([begin, *texts]), strict=True)
        links = (
            (i + m, j + n)
            for (m, n), h in zip(words, ranked, strict=True)
            for i, j in h.alignment
        )
        joined = replace(
            min(ranked, key=lambda h: h.mean_log_prob),
            tokens=tuple(itertools.chain.from_iterable(h.tokens for h in ranked)),
            score=sum(h.score for h in ranked),
            log_prob=sum(h.log_prob for h in ranked),
            alignment=tuple(links),
            text="".join([begin, *texts, ranked[-1].text, end]),
            words=tuple(itertools.chain.from_iterable(h.words for h in ranked)),
        )
        result.append(joined)
    return result


def _first_words(texts: Sequence[str]) -> list[int]:
    """Return the number of the word with which that begins what follows each text.

    A text that ends without white space is continued by the next one's first word.
    """
    counts = (max(len(x.split()) - (not x[-1:].isspace()), 0) for x in texts)
    return list(itertools.accumulate(counts))
