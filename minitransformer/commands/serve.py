"""A page to translate on, and LibreTranslate's interface for other programs.

`translate.py --serve` serves both; the page's script uses the interface.
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
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote, urlsplit

from minitransformer.cli import say
from minitransformer.commands.attention_maps import attention_maps
from minitransformer.commands.pages import page
from minitransformer.runs.models import described, language_codes
from minitransformer.settings import VERSION
from minitransformer.settings.decoding_config import TranslationConfig
from minitransformer.settings.options import UsageError
from minitransformer.system.workers import limit_threads
from minitransformer.text.lines import as_list_of_str
from minitransformer.translation.confidence import UNSURE
from minitransformer.translation.translator import Translator, json_objects

MAX_BODY = 65_536  # bytes: room for the longest text in any notation
MAX_BEAM = 16  # unless the default is larger
MAX_TOKENS = 16_384  # of text, prefixes and ends of lines, times the beam
MAX_WAITING = 5 * MAX_TOKENS  # in all requests that are not being answered yet
REQUEST_TIMEOUT = 10  # seconds that a client may send nothing
LOOPBACK = ("127.0.0.1", "localhost", "::1")

# What stands between the texts that are translated, by format. Markup within a sentence
# is part of its text.
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


@dataclass
class Job:
    """Lines that wait for their translations, or, without `config`, for attention."""

    lines: Sequence[str]
    prefixes: Sequence[str] = ()
    config: TranslationConfig | None = None
    size: int = 0  # tokens times the beam
    result: Future[Any] = field(default_factory=Future)


class Server(ThreadingHTTPServer):
    """A server of one model, in which one thread translates for all requests.

    Requests that wait are translated together. Unless only this computer reaches the
    server, they need a key: `api_key` or else a new one, which the address contains.
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
        self.source, self.target = language_codes(checkpoint)
        self.model, self.checkpoint = described(checkpoint), checkpoint
        super().__init__((host, port), Handler)
        self.translator = translator
        self.config = TranslationConfig.changed(translator.decoding, {"nbest": 1})
        self.max_beam = max(MAX_BEAM, self.config.beam)
        self.api_key = api_key
        if not api_key and host not in LOOPBACK:
            self.api_key = secrets.token_urlsafe(16)
        self._waiting = deque[Job]()
        self.worker = ThreadPoolExecutor(1)  # whose GPU, if any, is the model's

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

    # What requests ask for (ROUTES): answers are JSON, or what becomes JSON

    def page(self, request: Request) -> str:
        limit = MAX_TOKENS // self.config.beam
        values = {"SOURCE": self.source, "TARGET": self.target, "MODEL": self.model}
        escaped = {key: html.escape(text) for key, text in values.items()}
        return page("translate.html", LIMIT=limit, UNSURE=UNSURE, **escaped)

    def languages(self, request: Request) -> list[Request]:
        targets = {self.source: [self.target], self.target: []}
        return [{"code": x, "name": x, "targets": targets[x]} for x in targets]

    def detect(self, request: Request) -> list[Request]:
        _texts(request)
        return [{"confidence": 100.0, "language": self.source}]

    def attention(self, request: Request) -> str:
        """Return how the heads look at a line, which the page shows."""
        return self._wait(Job(_texts(request)[:1]))

    def translate(self, request: Request) -> Request:
        """Translate text: `details` and `prefix` are fields that only the page needs.

        Raises: ValueError saying, mostly in LibreTranslate's words, what is wrong.
        """
        texts = _texts(request)
        for name, code in (("source", self.source), ("target", self.target)):
            if (asked := _required(request, name)) not in (code, "auto"):
                raise ValueError(f"{asked} is not supported")
        kind = str(request.get("format") or "text")
        if (between := BETWEEN.get(kind)) is None:
            raise ValueError(f"{kind} format is not supported")
        given, most = str(request.get("alternatives") or 0), self.max_beam - 1
        if not given.isdecimal() or int(given) > most:
            expected = f"alternatives parameter must be 0 to {most}, got {given:.40}"
            raise ValueError(f"Invalid request: {expected}")
        nbest, alignment = 1 + int(given), bool(request.get("details"))
        beam = max(self.config.beam, nbest)
        config = replace(self.config, beam=beam, nbest=nbest, alignment=alignment)
        split = [between.split(text) for text in texts]
        lines = [line for parts in split for line in parts[::2]]
        if kind == "html":
            lines = [ENTITY.sub(_plain, line) for line in lines]
        given = str(request.get("prefix") or "\n" * (len(lines) - 1))
        prefixes = as_list_of_str("prefixes", given.split("\n"), len(lines))
        found = iter(self._wait(Job(lines, prefixes, config)))
        answers = []
        for parts in split:
            best = [next(found) for _ in parts[::2]]
            ranked = []
            for n in range(nbest):
                parts[::2] = [x[min(n, len(x) - 1)].text for x in best]
                ranked.append("".join(parts))
            text, *others = dict.fromkeys(ranked)
            answer: Request = {"translatedText": text}
            if nbest > 1:
                answer["alternatives"] = others
            if request["source"] == "auto":
                [answer["detectedLanguage"]] = self.detect(request)
            if alignment:
                answer["lines"] = [json_objects(x, config) for x in best]
            answers.append(answer)
        if isinstance(request["q"], str):
            return answers[0]
        return {name: [answer[name] for answer in answers] for name in answers[0]}

    # What waits, and the thread that computes

    def _wait(self, job: Job) -> Any:
        """Return what a job results in. Raises: ValueError if it is too large."""
        texts = [*job.lines, *filter(None, job.prefixes)]
        beam = (job.config or self.config).beam
        tokens = sum(map(len, self.translator.tokenizer.encode(texts)))
        tokens += len(texts)
        if tokens * beam > MAX_TOKENS:
            limit = f"text limit ({MAX_TOKENS // beam:,} tokens)"
            raise ValueError(f"Invalid request: request ({tokens:,}) exceeds {limit}")
        job.size = tokens * beam
        if job.size + sum(x.size for x in self._waiting.copy()) > MAX_WAITING:
            busy = "Slowdown: too much text is waiting, try again soon"
            raise RequestError(HTTPStatus.TOO_MANY_REQUESTS, busy)
        self._waiting.append(job)
        self.worker.submit(self._next)
        return job.result.result()

    def _next(self) -> None:
        """Do the first job that waits, and with it all that are to decode alike."""
        waiting = [self._waiting.popleft() for _ in range(len(self._waiting))]
        if waiting:  # else an earlier call did them
            config = waiting[0].config
            self._waiting.extend(job for job in waiting if job.config != config)
            self._do([job for job in waiting if job.config == config])

    def _do(self, jobs: Sequence[Job]) -> None:
        try:
            results = self._results(jobs)
        except Exception as error:
            if len(jobs) == 1:
                jobs[0].result.set_exception(error)
            else:  # it is of one of them
                for job in jobs:
                    self._do([job])
            return
        for job, result in zip(jobs, results, strict=True):
            job.result.set_result(result)

    def _results(self, jobs: Sequence[Job]) -> list[Any]:
        self.translator.use_device()
        lines = [line for job in jobs for line in job.lines]
        if (config := jobs[0].config) is None:
            found = [attention_maps(self.translator, x, self.config) for x in lines]
            return [maps.to_json() for maps in found]
        prefixes = [prefix for job in jobs for prefix in job.prefixes]
        best = iter(self.translator.hypotheses(lines, config, 1, prefixes))
        return [[next(best) for _ in job.lines] for job in jobs]


ROUTES: dict[tuple[str, str], Callable[[Server, Request], Any]] = {
    ("GET", "/"): Server.page,
    ("GET", "/health"): lambda server, request: {"status": "ok"},
    ("GET", "/languages"): Server.languages,
    ("POST", "/attention"): Server.attention,
    ("POST", "/detect"): Server.detect,
    ("POST", "/translate"): Server.translate,
}


class Handler(BaseHTTPRequestHandler):
    """Reads a request, and sends what the server answers or why it does not."""

    server: Server
    timeout = REQUEST_TIMEOUT
    server_version = f"minitransformer/{VERSION}"
    sys_version = ""

    def do_OPTIONS(self) -> None:  # a browser's question whether other sites may ask
        self._send(HTTPStatus.OK, "")

    def do_POST(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path, status = urlsplit(self.path).path, HTTPStatus.OK
        try:
            if (route := ROUTES.get((self.command, path))) is None:
                raise RequestError(HTTPStatus.NOT_FOUND, "nothing here")
            request = self._request() if self.command == "POST" else {}
            answer = route(self.server, request)
        except (ConnectionError, TimeoutError):
            raise
        except Exception as error:
            refused = isinstance(error, (ValueError, RecursionError))
            failed = HTTPStatus.INTERNAL_SERVER_ERROR
            other = HTTPStatus.BAD_REQUEST if refused else failed
            status = getattr(error, "status", other)
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
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal():
            raise RequestError(HTTPStatus.LENGTH_REQUIRED, "expected a Content-Length")
        if int(length) > MAX_BODY:
            message = f"expected at most {MAX_BODY:,} bytes, got {int(length):,}"
            raise RequestError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, message)
        body = self.rfile.read(int(length))
        is_json = self.headers.get_content_type() == "application/json"
        request = json.loads(body) if is_json else dict(parse_qsl(body.decode()))
        if not isinstance(request, dict):
            raise ValueError("Invalid JSON format")
        expected, key = self.server.api_key, str(request.get("api_key") or "")
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


def _plain(entity: re.Match[str]) -> str:
    """Return the character that is meant, if HTML has no use of its own for it."""
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
    # Small products wait longer for threads than they take. OpenBLAS obeys this thread
    # and not the worker.
    with server, limit_threads(1), suppress(KeyboardInterrupt):
        say(f"translate.py: open {server.address} (Ctrl-C ends)")
        server.serve_forever()
    # A thread in C++ code cannot be ended safely: its answer is waited for.
    server.worker.shutdown(cancel_futures=True)
