"""A web page to translate on, served by `translate.py --serve`."""

from __future__ import annotations

import hmac
import json
import os
import secrets
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from minitransformer.cli import say
from minitransformer.commands.attention_maps import attention_maps
from minitransformer.commands.pages import page
from minitransformer.settings import VERSION
from minitransformer.settings.decoding_config import DecodingConfig, TranslationConfig
from minitransformer.settings.options import UsageError, suggestion
from minitransformer.translation.translator import Translator, json_objects

MAX_BODY = 16_384  # bytes
MAX_LINES = 50
MAX_BEAM = 16  # and translations of a line, unless the default is larger
MAX_MIN_LEN = 200  # tokens, unless the default is larger
MAX_TOKENS = 16_384  # of text and prefixes, times the beam or the number of samples
MAX_WAITING = 4  # requests, beside the one that is being answered
REQUEST_TIMEOUT = 10  # seconds that a browser may send nothing
LOOPBACK = ("127.0.0.1", "localhost", "::1")

# What a request may have: its text, and flags of translate.py by the names of fields.
ATTENTION_FIELDS = (
    "text beam alpha min_len no_repeat_ngram sample temperature top_k top_p seed"
).split()
FIELDS = [*ATTENTION_FIELDS, "nbest", "prefix", "alignment"]

HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Content-Security-Policy": "default-src 'none'; connect-src 'self'; "
    "frame-ancestors 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "base-uri 'none'",
}


class RequestError(ValueError):
    """A request that is refused: its HTTP status, and a line that the page shows."""

    def __init__(self, status: HTTPStatus, message: str) -> None:
        super().__init__(message)
        self.status = status


class Server(ThreadingHTTPServer):
    """A server that translates for one request at a time.

    A few requests wait for their turn; further ones are told that the server is busy.
    Unless it serves this computer alone, it translates only with `address`'s token.
    """

    daemon_threads = True
    request_queue_size = 2048  # connections, which the system keeps until their turn
    allow_reuse_address = os.name != "nt"  # there two servers would share the port

    def __init__(
        self, host: str, port: int, translator: Translator, config: DecodingConfig
    ) -> None:
        if ":" in host:
            self.address_family = socket.AF_INET6
        super().__init__((host, port), Handler)
        self.translator = translator
        self.config = TranslationConfig.changed(config, {})
        self.max_beam = max(MAX_BEAM, config.beam)
        min_len = max(MAX_MIN_LEN, self.config.min_len or 0)
        most = self.max_beam
        self._limits = {"beam": most, "nbest": most, "min_len": min_len}
        self.token = None if host in LOOPBACK else secrets.token_urlsafe(16)
        self._admitted = threading.Semaphore(1 + MAX_WAITING)
        self.worker = ThreadPoolExecutor(1)  # whose GPU, if any, is the model's

    @property
    def address(self) -> str:
        """The address of the page, with the token if there is one."""
        host, port = str(self.server_address[0]), self.server_address[1]
        query = f"?token={self.token}" if self.token else ""
        return f"http://{f'[{host}]' if ':' in host else host}:{port}/{query}"

    def page(self) -> str:
        """Return the page, which begins with the default beam size."""
        beam, nbest = self.config.beam, self.config.nbest
        return page("translate.html", MAX=self.max_beam, BEAM=beam, NBEST=nbest)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing about a browser that has gone away."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)

    def answer(self, path: str, request: dict[str, Any]) -> str:
        """Return the JSON that answers a request. Raises: ValueError."""
        if not self._admitted.acquire(blocking=False):
            raise RequestError(HTTPStatus.SERVICE_UNAVAILABLE, "busy: try again soon")
        try:
            return self.worker.submit(self._compute, path, request).result()
        finally:
            self._admitted.release()

    def _compute(self, path: str, request: dict[str, Any]) -> str:
        self.translator.use_device()
        return (self._translate if path == "/translate" else self._attention)(request)

    def _attention(self, request: dict[str, Any]) -> str:
        config = self._decoding(request, ATTENTION_FIELDS, nbest=1)
        return attention_maps(self.translator, _text(request), config).to_json()

    def _translate(self, request: dict[str, Any]) -> str:
        config, lines = self._decoding(request, FIELDS), _lines(_text(request))
        if len(lines) > MAX_LINES:
            raise ValueError(f"expected at most {MAX_LINES} lines, got {len(lines)}")
        prefixes = [""] * len(lines)
        if "prefix" in request:
            prefixes = _lines(_text(request, "prefix"))
        tokens = sum(map(len, self.translator.tokenizer.encode([*lines, *prefixes])))
        tokens += len(lines) * (config.min_len or 0)
        rows = config.nbest if config.sample else config.beam
        if tokens * rows > MAX_TOKENS:
            raise ValueError(
                f"expected at most {MAX_TOKENS // rows:,} tokens of text, prefixes and "
                f"min_len for {rows} beams or samples, got {tokens:,}"
            )
        started = time.perf_counter()
        found = self.translator.hypotheses(lines, config, 1, prefixes)
        answers = [json_objects(h, config.alignment) for h in found]
        seconds = time.perf_counter() - started
        return json.dumps({"lines": answers, "seconds": seconds})

    def _decoding(
        self, request: dict[str, Any], known: list[str], **fixed: int
    ) -> TranslationConfig:
        """Return how a request asks to decode. Raises: ValueError."""
        if unknown := sorted(request.keys() - known):
            hint = suggestion(unknown[0], known)
            raise ValueError(f"unknown field {unknown[0]!r:.40}{hint}")
        asked = {k: v for k, v in request.items() if k not in ("text", "prefix")}
        config = TranslationConfig.changed(self.config, asked | fixed)
        for name, limit in self._limits.items():
            got = getattr(config, name) or 0
            if got > limit:
                raise ValueError(f"{name}: expected at most {limit}, got {got}")
        return config


class Handler(BaseHTTPRequestHandler):
    """GET / returns the page; its script sends POST /translate and /attention."""

    server: Server
    timeout = REQUEST_TIMEOUT
    server_version = f"minitransformer/{VERSION}"
    sys_version = ""

    def do_POST(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        status, kind = HTTPStatus.OK, "application/json"
        try:
            if self.command == "POST":
                data = self._answer().encode()
            elif self.path.partition("?")[0] == "/":
                data, kind = self.server.page().encode(), "text/html"
            else:
                raise RequestError(HTTPStatus.NOT_FOUND, "nothing here")
        except (ConnectionError, TimeoutError):
            raise
        except Exception as error:
            refused = isinstance(error, (ValueError, RecursionError))
            failed = HTTPStatus.INTERNAL_SERVER_ERROR
            other = HTTPStatus.BAD_REQUEST if refused else failed
            status = getattr(error, "status", other)
            message = str(error) or type(error).__name__
            data = json.dumps({"error": message}).encode()
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(data)))
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def _answer(self) -> str:
        """Answer the page's script. Raises: ValueError if the request is refused."""
        if self.path not in ("/translate", "/attention"):
            raise RequestError(HTTPStatus.NOT_FOUND, "nothing here")
        if self.server.token is None:
            # DNS rebinding: another site's page must not reach this server.
            host = urlsplit("//" + self.headers.get("Host", "")).hostname
            if host not in LOOPBACK:
                known = "expected localhost or 127.0.0.1 (--host serves others)"
                message = f"header Host: {known}, got {host!r}"
                raise RequestError(HTTPStatus.FORBIDDEN, message)
        else:
            given = self.headers.get("Authorization", "").removeprefix("Bearer ")
            if not hmac.compare_digest(given.encode(), self.server.token.encode()):
                raise RequestError(HTTPStatus.UNAUTHORIZED, "expected the page's token")
        if (kind := self.headers.get_content_type()) != "application/json":
            message = f"header Content-Type: expected application/json, got {kind!r}"
            raise RequestError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, message)
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal():
            raise RequestError(HTTPStatus.LENGTH_REQUIRED, "expected a Content-Length")
        if int(length) > MAX_BODY:
            message = f"expected at most {MAX_BODY:,} bytes, got {int(length):,}"
            raise RequestError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, message)
        request = json.loads(self.rfile.read(int(length)))
        if not isinstance(request, dict):
            raise ValueError("expected a JSON object")
        return self.server.answer(self.path, request)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: what people translate is private."""


def _text(request: dict[str, Any], name: str = "text") -> str:
    value = request.get(name)
    if not isinstance(value, str):
        raise ValueError(f"{name}: expected str, got {value!r:.40}")
    return value


def _lines(text: str) -> list[str]:
    return [line.removesuffix("\r") for line in text.split("\n")]


def serve(translator: Translator, host: str, port: int) -> None:
    """Serve the page until Ctrl-C.

    Raises: OSError or ValueError naming a host or port that cannot be used.
    """
    if port > 65_535:
        raise UsageError(f"--serve: expected a port of at most 65535, got {port}")
    try:
        server = Server(host, port, translator, translator.decoding)
    except (OSError, UnicodeError) as error:  # a name may be no possible host
        reason = getattr(error, "strerror", None) or error
        raise OSError(f"cannot serve at {host}, port {port}: {reason}") from error
    with server, suppress(KeyboardInterrupt):
        say(f"translate.py: open {server.address} (Ctrl-C ends)")
        server.serve_forever()
    # A thread in C++ code cannot be ended safely: its answer is waited for.
    server.worker.shutdown(cancel_futures=True)
