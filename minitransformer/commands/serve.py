"""A page to translate on, and LibreTranslate's interface for other programs.

`translate.py --serve` serves both; the page's script uses the interface. A `Handler`
reads a request, `LibreTranslate` answers it, and `TranslationQueue` translates.
"""

from __future__ import annotations

import hmac
import html
import json
import os
import re
import secrets
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote, urlsplit

from minitransformer.cli import say
from minitransformer.commands.pages import page
from minitransformer.commands.translation_queue import Job, TranslationQueue
from minitransformer.runs.models import described, language_codes
from minitransformer.settings import VERSION
from minitransformer.settings.decoding_config import TranslationConfig
from minitransformer.settings.options import UsageError
from minitransformer.system.workers import limit_threads
from minitransformer.text.lines import as_list_of_str
from minitransformer.translation.beam_search import Hypothesis
from minitransformer.translation.confidence import UNSURE
from minitransformer.translation.translator import Translator, json_objects

MAX_BODY = 65_536  # bytes: room for the longest text in any notation
MAX_BEAM = 16  # unless the default is larger
MAX_TOKENS = 16_384  # of text, prefixes and ends of lines, times the beam
MAX_WAITING = 5 * MAX_TOKENS  # in all requests that wait
REQUEST_TIMEOUT = 10  # seconds that a client may send nothing
LOOPBACK = ("127.0.0.1", "localhost", "::1")

# The separators of lines that are translated, by format. Markup within a sentence is
# part of its line.
BETWEEN = {
    "text": re.compile(r"(\r?\n)"),
    "html": re.compile(
        r"(\s*(?:(?:<script\b.*?</script\s*>|<style\b.*?</style\s*>|<!--.*?-->|"
        r"<(?!/?(?:a|abbr|b|cite|code|em|font|i|mark|q|s|small|span|strong|su[bp]|u)\b)"
        r"[^<>]*>)\s*)+)",
        re.DOTALL | re.IGNORECASE,
    ),
}

ENTITY = re.compile(r"&#?\w+;")

HEADERS = {
    "Access-Control-Allow-Origin": "*",
    "Access-Control-Allow-Headers": "Authorization, Content-Type",
    "Access-Control-Allow-Methods": "GET, POST",
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Content-Security-Policy": "default-src 'none'; connect-src 'self'; "
    "frame-ancestors 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "base-uri 'none'",
}

Request = dict[str, Any]


class RequestError(ValueError):
    """A request that is refused: its HTTP status, and a line that says why."""

    def __init__(self, status: HTTPStatus, message: str) -> None:
        super().__init__(message)
        self.status = status


class LibreTranslate:
    """LibreTranslate's interface to one model: the answer to each kind of request.

    Answers are JSON, or become JSON. Requests that wait are translated together.
    """

    def __init__(self, translator: Translator, checkpoint: Path) -> None:
        self.source, self.target = language_codes(checkpoint)
        self.model = described(checkpoint)
        self.translator = translator
        self.config = TranslationConfig.changed(translator.decoding, {"nbest": 1})
        self.queue = TranslationQueue(translator)

    def page(self, request: Request) -> str:
        return page(
            "translate.html",
            LIMIT=MAX_TOKENS // self.config.beam,
            UNSURE=UNSURE,
            SOURCE=html.escape(self.source),
            TARGET=html.escape(self.target),
            MODEL=html.escape(self.model),
        )

    def languages(self, request: Request) -> list[Request]:
        targets = {self.source: [self.target], self.target: []}
        return [{"code": x, "name": x, "targets": targets[x]} for x in targets]

    def detect(self, request: Request) -> list[Request]:
        _texts(request)
        return [{"confidence": 100.0, "language": self.source}]

    def attention(self, request: Request) -> str:
        """Return how the heads look at a line, which the page shows."""
        job = Job(_texts(request)[:1], self.config, shows_attention=True)
        return self._result(job)

    def translate(self, request: Request) -> Request:
        """Translate text: only the page needs the fields `details` and `prefix`.

        Raises: ValueError with a message, mostly in LibreTranslate's words.
        """
        # The languages are those of the model; "auto" is the source, or the target.
        texts = _texts(request)
        for name, code in (("source", self.source), ("target", self.target)):
            if (asked := _required(request, name)) not in (code, "auto"):
                raise ValueError(f"{asked} is not supported")
        config = self._decoding(request)
        # Divide each text into lines, each with the separator that follows it.
        divided = [_lines(text, str(request.get("format") or "text")) for text in texts]
        lines = [line for parts in divided for line, _ in parts]
        given = str(request.get("prefix") or "\n" * (len(lines) - 1))
        prefixes = as_list_of_str("prefixes", given.split("\n"), len(lines))
        # Translate all lines together, and answer each text.
        translations = iter(self._result(Job(lines, config, prefixes)))
        answers = []
        for parts in divided:
            answer = _answer(parts, [next(translations) for _ in parts], config)
            if request["source"] == "auto":
                [answer["detectedLanguage"]] = self.detect(request)
            answers.append(answer)
        # A list of texts gets lists of translations, alternatives and so on.
        if isinstance(request["q"], str):
            return answers[0]
        return {name: [answer[name] for answer in answers] for name in answers[0]}

    def _decoding(self, request: Request) -> TranslationConfig:
        """Return how to decode: with alternatives, or an alignment for `details`."""
        given = str(request.get("alternatives") or 0)
        most = max(MAX_BEAM, self.config.beam) - 1
        if not given.isdecimal() or int(given) > most:
            expected = f"alternatives parameter must be 0 to {most}, got {given:.40}"
            raise ValueError(f"Invalid request: {expected}")
        nbest = 1 + int(given)
        return replace(
            self.config,
            beam=max(self.config.beam, nbest),
            nbest=nbest,
            alignment=bool(request.get("details")),
        )

    def _result(self, job: Job) -> Any:
        """Return the result of a job. Raises: ValueError if it is too large."""
        # A line counts its end, too: as many tokens as the model reads.
        texts = [*job.lines, *filter(None, job.prefixes)]
        beam = job.config.beam
        tokens = sum(map(len, self.translator.tokenizer.encode(texts))) + len(texts)
        job.size = tokens * beam
        if job.size > MAX_TOKENS:
            limit = f"text limit ({MAX_TOKENS // beam:,} tokens)"
            raise ValueError(f"Invalid request: request ({tokens:,}) exceeds {limit}")
        if job.size + self.queue.size() > MAX_WAITING:
            busy = "Slowdown: too much text is waiting, try again soon"
            raise RequestError(HTTPStatus.TOO_MANY_REQUESTS, busy)
        return self.queue.submit(job).result()


ROUTES: dict[tuple[str, str], Callable[[LibreTranslate, Request], Any]] = {
    ("GET", "/"): LibreTranslate.page,
    ("GET", "/health"): lambda interface, request: {"status": "ok"},
    ("GET", "/languages"): LibreTranslate.languages,
    ("POST", "/attention"): LibreTranslate.attention,
    ("POST", "/detect"): LibreTranslate.detect,
    ("POST", "/translate"): LibreTranslate.translate,
}


class Server(ThreadingHTTPServer):
    """An HTTP server of one model.

    Unless only this computer reaches the server, requests need a key: `api_key` or else
    a new one, which the address contains.
    """

    daemon_threads = True
    request_queue_size = 2048  # connections, which the system keeps until their turn
    allow_reuse_address = os.name != "nt"  # there two servers would share the port

    def __init__(
        self,
        host: str,
        port: int,
        translator: Translator,
        checkpoint: Path,
        api_key: str | None = None,
    ) -> None:
        if ":" in host:
            self.address_family = socket.AF_INET6
        self.interface = LibreTranslate(translator, checkpoint)
        super().__init__((host, port), Handler)
        self.api_key = api_key
        if not api_key and host not in LOOPBACK:
            self.api_key = secrets.token_urlsafe(16)

    @property
    def address(self) -> str:
        """The address of the page, with the key if there is one."""
        host, port = str(self.server_address[0]), self.server_address[1]
        query = f"?api_key={quote(self.api_key)}" if self.api_key else ""
        return f"http://{f'[{host}]' if ':' in host else host}:{port}/{query}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing about a client that has gone away."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    """Reads a request, and sends the answer or the reason why there is none."""

    server: Server
    timeout = REQUEST_TIMEOUT
    server_version = f"minitransformer/{VERSION}"
    sys_version = ""

    def do_OPTIONS(self) -> None:  # a browser's question whether other sites may ask
        self._send(HTTPStatus.OK, "")

    def do_POST(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        status = HTTPStatus.OK
        try:
            if (route := ROUTES.get((self.command, path))) is None:
                raise RequestError(HTTPStatus.NOT_FOUND, "nothing here")
            request = self._request() if self.command == "POST" else {}
            answer = route(self.server.interface, request)
        except (ConnectionError, TimeoutError):
            raise
        except Exception as error:
            # The request is wrong, or this server has failed.
            status = HTTPStatus.INTERNAL_SERVER_ERROR
            if isinstance(error, (ValueError, RecursionError)):
                status = getattr(error, "status", HTTPStatus.BAD_REQUEST)
            answer = {"error": str(error) or type(error).__name__}
        self._send(status, answer if isinstance(answer, str) else json.dumps(answer))

    def _send(self, status: HTTPStatus, text: str) -> None:
        data = text.encode()
        kind = "text/html" if text.startswith("<") else "application/json"
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(data)))
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def _request(self) -> Request:
        """Read the fields of JSON or of a form. Raises: ValueError if it is refused."""
        # The body, which must not be too long.
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal():
            raise RequestError(HTTPStatus.LENGTH_REQUIRED, "expected a Content-Length")
        if int(length) > MAX_BODY:
            message = f"expected at most {MAX_BODY:,} bytes, got {int(length):,}"
            raise RequestError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, message)
        body = self.rfile.read(int(length))
        # Its fields.
        is_json = self.headers.get_content_type() == "application/json"
        request = json.loads(body) if is_json else dict(parse_qsl(body.decode()))
        if not isinstance(request, dict):
            raise ValueError("Invalid JSON format")
        # The key, if the server has one, compared in constant time.
        expected = self.server.api_key
        key = str(request.get("api_key") or "")
        if expected and not key:
            raise ValueError("Invalid request: missing api_key parameter")
        if expected and not hmac.compare_digest(key.encode(), expected.encode()):
            raise RequestError(HTTPStatus.FORBIDDEN, "Invalid API key")
        return request

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: what people translate is private."""


def _required(request: Request, name: str) -> Any:
    if not (value := request.get(name)):
        raise ValueError(f"Invalid request: missing {name} parameter")
    return value


def _texts(request: Request) -> list[str]:
    """Return the texts of a request, of which `q` is one or several."""
    q = _required(request, "q")
    texts = [q] if isinstance(q, str) else q
    if not isinstance(texts, list) or not all(isinstance(x, str) for x in texts):
        raise ValueError(f"Invalid request: q parameter is no text: {q!r:.40}")
    return texts


def _lines(text: str, kind: str) -> list[tuple[str, str]]:
    """Divide text into lines, each with the separator that follows it."""
    if (separators := BETWEEN.get(kind)) is None:
        raise ValueError(f"{kind} format is not supported")
    # Separators and lines by turns, with a line first and last.
    parts = separators.split(text)
    lines = parts[::2]
    if kind == "html":
        lines = [ENTITY.sub(_plain, line) for line in lines]
    return list(zip(lines, [*parts[1::2], ""], strict=True))


def _answer(
    parts: Sequence[tuple[str, str]],
    nbest_lists: Sequence[list[Hypothesis]],
    config: TranslationConfig,
) -> Request:
    """Return the translation of a text, given the hypotheses of each of its `_lines`.

    An alternative of some rank has the hypothesis of this rank, or the last, of each
    line.
    """
    ranked = [
        "".join(
            hypotheses[min(rank, len(hypotheses) - 1)].text + separator
            for hypotheses, (_, separator) in zip(nbest_lists, parts, strict=True)
        )
        for rank in range(config.nbest)
    ]
    # Only different ones, and what the request asks for besides.
    best, *others = dict.fromkeys(ranked)
    answer: Request = {"translatedText": best}
    if config.nbest > 1:
        answer["alternatives"] = others
    if config.alignment:
        answer["lines"] = [json_objects(x, config) for x in nbest_lists]
    return answer


def _plain(entity: re.Match[str]) -> str:
    """Return the character of an entity, escaped if it is one of HTML's own."""
    return html.escape(html.unescape(entity[0]), quote=False)


def serve(
    translator: Translator, checkpoint: Path, host: str, port: int, key: str | None
) -> None:
    """Serve the page until Ctrl-C.

    Raises: OSError or ValueError naming a host or port that cannot be used.
    """
    if port > 65_535:
        raise UsageError(f"--serve: expected a port of at most 65535, got {port}")
    try:
        server = Server(host, port, translator, checkpoint, key)
    except (OSError, UnicodeError) as error:  # a name may be no possible host
        reason = getattr(error, "strerror", None) or error
        raise OSError(f"cannot serve at {host}, port {port}: {reason}") from error
    # Small products take less time than starting threads. OpenBLAS takes the limit from
    # this thread, not from the worker.
    with server, limit_threads(1), suppress(KeyboardInterrupt):
        say(f"translate.py: open {server.address} (Ctrl-C ends)")
        server.serve_forever()
    server.interface.queue.close()
