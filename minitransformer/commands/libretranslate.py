"""LibreTranslate's interface to models of one or several directions.

`serve.py` reads the requests, and `TranslationQueue` translates.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from http import HTTPStatus
from pathlib import Path
from typing import Any

from babel import Locale
from py3langid.langid import MODEL_FILE, LanguageIdentifier
from starlette.exceptions import HTTPException

from minitransformer.commands.file import KINDS, file_lines, with_lines
from minitransformer.commands.translation_queue import Job, Line, TranslationQueue
from minitransformer.runs.models import card_title, figures, language_codes
from minitransformer.settings.decoding_config import TranslationConfig
from minitransformer.text.lines import as_list_of_str, join_paragraphs
from minitransformer.text.markup import HtmlLine, PlainLine, html_lines
from minitransformer.translation.beam_search import Hypothesis
from minitransformer.translation.translator import Translator, json_objects

MAX_BEAM = 16  # unless the default is larger
MAX_TOKENS = 16_384  # of text, prefixes and ends of lines, times the beam
MAX_WAITING = 5 * MAX_TOKENS  # in all requests that wait
MAX_DETECTED = 2_000  # characters, of which the language is detected
MAX_FILES = 16  # that are kept until somebody takes them

Fields = dict[str, Any]  # of a request or an answer, by their names


@dataclass(frozen=True)
class Direction:
    """The languages that a model translates from and to, and how it decodes.

    Visitors read what it is `good_at`, and in the `figures` how it was trained.
    """

    source: str
    target: str
    translator: Translator
    config: TranslationConfig
    good_at: str
    figures: str

    @classmethod
    def of(cls, translator: Translator, checkpoint: Path) -> Direction:
        """Return the direction of a model, of which nobody learns where it is."""
        source, target = language_codes(checkpoint)
        config = TranslationConfig.changed(translator.decoding, {"nbest": 1})
        is_shipped = card_title(checkpoint)
        return cls(
            source,
            target,
            translator,
            config,
            "everyday sentences" if is_shipped else "text like that of its training",
            figures(checkpoint),
        )


class LibreTranslate:
    """The answer to each kind of request, as JSON or what becomes JSON.

    Requests that wait are translated together.
    """

    def __init__(self, directions: Sequence[Direction], needs_key: bool) -> None:
        self.directions = directions
        self.needs_key = needs_key
        self.queue = TranslationQueue()
        self.files: dict[str, bytes] = {}
        # Names as people read them; a code that is none is its own name.
        known = Locale("en").languages
        codes = [code for x in directions for code in (x.source, x.target)]
        self.names = {code: known.get(code, code) for code in codes}
        # The detector chooses among the served languages, if it knows all of them.
        self._detector = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
        self._detects = self.names.keys() <= {*self._detector.labels}
        if self._detects:
            self._detector.set_languages([*self.names])

    @property
    def limit(self) -> int:
        """How many characters every model translates at once."""
        return MAX_TOKENS // max(x.config.beam for x in self.directions)

    def name_of(self, direction: Direction) -> str:
        return f"{self.names[direction.source]} to {self.names[direction.target]}"

    def languages(self) -> list[Fields]:
        return [
            {
                "code": code,
                "name": name,
                "targets": [x.target for x in self.directions if x.source == code],
            }
            for code, name in self.names.items()
        ]

    def settings(self) -> Fields:
        """Return what LibreTranslate's own page and other programs ask for first."""
        first = self.directions[0]
        return {
            "apiKeys": self.needs_key,
            "charLimit": self.limit,
            "filesTranslation": True,
            "keyRequired": self.needs_key,
            "language": {
                name: {"code": code, "name": self.names[code]}
                for name, code in (("source", first.source), ("target", first.target))
            },
            "suggestions": False,
            "supportedFilesFormat": [*KINDS],
        }

    async def detect(self, request: Fields) -> list[Fields]:
        return [self._detected(_texts(request))]

    def _detected(self, texts: Sequence[str]) -> Fields:
        """Return the likeliest language that is served, and its probability in percent.

        The first is taken of those that are equally likely, or not known.
        """
        text = "\n".join(texts)[:MAX_DETECTED]
        probabilities = dict(self._detector.rank(text)) if self._detects else {}
        code = max(self.names, key=lambda code: probabilities.get(code, 0))
        return {
            "confidence": round(100 * probabilities.get(code, 0)),
            "language": code,
        }

    async def attention(self, request: Fields) -> str:
        """Return how the heads look at a line, which the page shows."""
        line = _texts(request)[0]
        direction, _ = self._direction(request, [line])
        if direction is None:
            raise ValueError("expected two languages, got the same twice")
        [maps] = await self._results(
            direction, [line], direction.config, shows_attention=True
        )
        return maps

    async def translate(self, request: Fields) -> str:
        """Translate text. Others do not know `details`, `prefix` and `paragraphs`.

        Raises: ValueError with a message, mostly in LibreTranslate's words.
        """
        texts = _texts(request)
        direction, detected = self._direction(request, texts)
        answers: list[Fields]
        if direction is None:  # the text is in the target language
            answers = [{"translatedText": x, "alternatives": []} for x in texts]
        else:
            answers = await self._answers(direction, texts, request)
        if detected:
            answers = [{**answer, "detectedLanguage": detected} for answer in answers]
        # A list of texts gets lists of translations, alternatives and so on.
        answer = answers[0]
        if not isinstance(request["q"], str):
            answer = {name: [each[name] for each in answers] for name in answer}
        return await asyncio.to_thread(json.dumps, answer)

    async def translate_file(self, request: Fields) -> str:
        """Translate a file, and return the name under which it is kept for a while.

        Its lines are translated in parts, between which others have their turn.
        """
        file = _required(request, "file")
        if not isinstance(file, tuple):
            raise ValueError("Invalid request: file parameter is no file")
        name, data = file
        in_thread = asyncio.to_thread
        lines = await in_thread(file_lines, data, name, ("", ""))
        direction, _ = self._direction(request, lines)
        if direction:
            languages = direction.source, direction.target
            lines = await in_thread(file_lines, data, name, languages)
            new = list[str]()
            for part in _parts(lines, self.limit):
                ranked = await self._results(direction, part, direction.config)
                new += [best.text for best, *_ in ranked]
            data = await in_thread(with_lines, data, name, languages, new)
        # Nobody guesses the name, and only the newest files are kept.
        kept = secrets.token_urlsafe() + Path(name).suffix
        self.files[kept] = data
        for oldest in [*self.files][:-MAX_FILES]:
            del self.files[oldest]
        return kept

    def _direction(
        self, request: Fields, texts: Sequence[str]
    ) -> tuple[Direction | None, Fields | None]:
        """Return the model that a request asks for, and the language if detected.

        There is no model if the text is in the target language. The target "auto" is
        the first target of the source.
        """
        source = self._code(request, "source")
        target = self._code(request, "target")
        detected = None
        if source == "auto" or request.get("details"):
            detected = self._detected(texts)
            source = detected["language"] if source == "auto" else source
        if source == target:
            return None, detected
        for direction in self.directions:
            if source == direction.source and target in (direction.target, "auto"):
                return direction, detected
        expected = ", ".join(f"{x.source} to {x.target}" for x in self.directions)
        raise ValueError(f"{source} to {target} is not supported: expected {expected}")

    def _code(self, request: Fields, field: str) -> str:
        """Return a language code that a request names, such as en for EN or en-US."""
        asked = str(_required(request, field))
        for code in (asked, asked.lower().partition("-")[0]):
            if code in self.names or code == "auto":
                return code
        expected = f"expected auto, {', '.join(self.names)}"
        raise ValueError(f"{asked:.40} is not supported as {field}: {expected}")

    async def _answers(
        self, direction: Direction, texts: Sequence[str], request: Fields
    ) -> list[Fields]:
        """Translate all lines of some texts together, and answer each text."""
        config = _decoding(direction.config, request)
        kind = str(request.get("format") or "text")
        # In threads: the server answers others while it reads and writes long text.
        divided = await asyncio.to_thread(lambda: [_lines(x, kind) for x in texts])
        lines = [line.text for parts in divided for line in parts]
        given = str(request.get("prefix") or "\n" * (len(lines) - 1))
        prefixes = as_list_of_str("prefixes", given.split("\n"), len(lines))
        results = iter(await self._results(direction, lines, config, prefixes=prefixes))
        return await asyncio.to_thread(
            lambda: [
                _answer(parts, [next(results) for _ in parts], config)
                for parts in divided
            ]
        )

    async def _results(
        self,
        direction: Direction,
        lines: Sequence[str],
        config: TranslationConfig,
        *,
        prefixes: Sequence[str] | None = None,
        shows_attention: bool = False,
    ) -> list[Any]:
        """Wait for the translations of lines, or their attention.

        Raises: ValueError if the lines are too large, HTTPException if too many wait.
        """
        # A line counts its end, too: as many tokens as the model reads.
        encode = direction.translator.tokenizer.encode
        prefixes = prefixes or [""] * len(lines)
        ids = await asyncio.to_thread(lambda: [*map(encode, (lines, prefixes))])
        sizes = [
            (len(line) + 1 + len(prefix)) * config.beam
            for line, prefix in zip(*ids, strict=True)
        ]
        waiting = deque(map(Line, lines, prefixes, sizes))
        job = Job(direction.translator, config, waiting, shows_attention)
        if job.size > MAX_TOKENS:
            tokens = job.size // config.beam
            limit = MAX_TOKENS // config.beam
            exceeds = f"request ({tokens:,}) exceeds text limit ({limit:,} tokens)"
            raise ValueError(f"Invalid request: {exceeds}")
        if job.size + self.queue.size() > MAX_WAITING:
            busy = "Slowdown: too much text is waiting, try again soon"
            raise HTTPException(HTTPStatus.TOO_MANY_REQUESTS, busy)
        return await asyncio.wrap_future(self.queue.submit(job))


# Fields of requests


def _required(request: Fields, name: str) -> Any:
    if not (value := request.get(name)):
        raise ValueError(f"Invalid request: missing {name} parameter")
    return value


def _texts(request: Fields) -> list[str]:
    """Return the texts of a request, of which `q` is one or several."""
    q = _required(request, "q")
    texts = [q] if isinstance(q, str) else q
    if not isinstance(texts, list) or not all(isinstance(x, str) for x in texts):
        raise ValueError(f"Invalid request: q parameter is no text: {q!r:.40}")
    if request.get("paragraphs"):
        texts = ["\n".join(join_paragraphs(x.split("\n"))) for x in texts]
    return texts


def _decoding(config: TranslationConfig, request: Fields) -> TranslationConfig:
    """Return how to decode: with alternatives, or an alignment for `details`."""
    given = str(request.get("alternatives") or 0)
    most = max(MAX_BEAM, config.beam) - 1
    if not given.isdecimal() or int(given) > most:
        expected = f"alternatives parameter must be 0 to {most}, got {given:.40}"
        raise ValueError(f"Invalid request: {expected}")
    nbest = 1 + int(given)
    return replace(
        config,
        beam=max(config.beam, nbest),
        nbest=nbest,
        alignment=bool(request.get("details")),
    )


# Texts, divided into lines and put together again


def _parts(lines: Sequence[str], most: int) -> Iterator[list[str]]:
    """Divide lines into parts of at most so many bytes, if no line has more.

    A line has no more tokens than bytes and two.
    """
    part = list[str]()
    left = most
    for line in lines:
        size = len(line.encode()) + 2
        if part and size > left:
            yield part
            part = []
            left = most
        part.append(line)
        left -= size
    yield part


def _lines(text: str, kind: str) -> Sequence[PlainLine | HtmlLine]:
    """Divide text into lines."""
    if kind == "html":
        return html_lines(text)
    if kind != "text":
        raise ValueError(f"{kind} format is not supported")
    # Ends and lines by turns, with a line first and last.
    parts = re.split(r"(\r?\n)", text)
    return [*map(PlainLine, parts[::2], [*parts[1::2], ""])]


def _answer(
    parts: Sequence[PlainLine | HtmlLine],
    nbest_lists: Sequence[list[Hypothesis]],
    config: TranslationConfig,
) -> Fields:
    """Return the translation of a text, given the hypotheses of each of its `_lines`.

    An alternative of some rank has the hypothesis of this rank, or the last, of each
    line.
    """
    ranked = [
        "".join(
            line.with_text(hypotheses[min(rank, len(hypotheses) - 1)].text)
            for hypotheses, line in zip(nbest_lists, parts, strict=True)
        )
        for rank in range(config.nbest)
    ]
    # Only different ones, and what the request asks for besides.
    best, *others = dict.fromkeys(ranked)
    answer: Fields = {"translatedText": best}
    if config.nbest > 1:
        answer["alternatives"] = others
    if config.alignment:
        answer["lines"] = [
            [_with_sentences(h, config) for h in ranked] for ranked in nbest_lists
        ]
    return answer


def _with_sentences(h: Hypothesis, config: TranslationConfig) -> Fields:
    """Return what JSON has of the translation of a line, and of each sentence."""
    [line, *parts] = json_objects([h, *(x for _, _, x in h.parts)], config)
    sentences = [
        {**fields, "source": source, "space": space}
        for (source, space, _), fields in zip(h.parts, parts, strict=True)
    ]
    return {**line, "sentences": sentences}
