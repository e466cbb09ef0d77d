"""A page to translate on, for one's own browser: translate.py --serve."""

from __future__ import annotations

import hmac
import json
import secrets
import sys
import threading
import time
from dataclasses import replace
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from minitransformer.settings.config import DecodingConfig
from minitransformer.translation.attention_maps import attention_maps, filled_page, page
from minitransformer.translation.translator import Translator

MAX_BODY = 16_384  # bytes
MAX_LINES = 50
MAX_BEAM = 16
MAX_WAITING = 4  # requests, beside the one that is being answered
SECONDS_TO_SEND = 10  # for a browser to send what it has to say
LOOPBACK = ("127.0.0.1", "::1", "localhost")


class RefusedError(Exception):
    """A request that gets an error: its status, and a line for the person."""

    def __init__(self, status: HTTPStatus, message: str) -> None:
        super().__init__(message)
        self.status = status


class Server(ThreadingHTTPServer):
    """Answers one request at a time; a few wait, more are sent away."""

    daemon_threads = True

    def __init__(
        self, host: str, port: int, translator: Translator, config: DecodingConfig
    ) -> None:
        super().__init__((host, port), Handler)
        self.translator, self.config = translator, config
        self.token = None if host in LOOPBACK else secrets.token_urlsafe(16)
        self._turn = threading.Lock()
        self._places = threading.Semaphore(1 + MAX_WAITING)

    @property
    def address(self) -> str:
        """Where the page is, token included."""
        host, port = self.server_address[:2]
        query = f"?token={self.token}" if self.token else ""
        return f"http://{host!s}:{port}/{query}"

    def answer(self, path: str, request: dict[str, Any]) -> str:
        """The JSON that answers a request. Raises: RefusedError, ValueError."""
        if not self._places.acquire(blocking=False):
            raise RefusedError(
                HTTPStatus.SERVICE_UNAVAILABLE, "busy: try again in a moment"
            )
        try:
            with self._turn:
                if path == "/translate":
                    return self._translate(request)
                text = _field(request, "text", str)
                return attention_maps(self.translator, text).to_json()
        finally:
            self._places.release()

    def _translate(self, request: dict[str, Any]) -> str:
        lines = _field(request, "text", str).split("\n")
        if len(lines) > MAX_LINES:
            raise ValueError(f"expected at most {MAX_LINES} lines, got {len(lines)}")
        wanted: dict[str, Any] = {
            name: _field(request, name, int)
            for name in ("beam", "nbest")
            if name in request
        }
        if max(wanted.values(), default=1) > MAX_BEAM:
            raise ValueError(f"expected a beam of at most {MAX_BEAM}")
        config = replace(self.config, **wanted)
        started = time.perf_counter()
        found = [
            [
                {"text": text, "score": hypothesis.score}
                for text, hypothesis in zip(
                    self.translator.text(line), line, strict=True
                )
            ]
            for line in self.translator.hypotheses(lines, config)
        ]
        seconds = time.perf_counter() - started
        return json.dumps({"lines": found, "seconds": seconds})


class Handler(BaseHTTPRequestHandler):
    """GET / is the page; POST /translate and /attention answer its script in JSON."""

    server: Server
    timeout = SECONDS_TO_SEND
    server_version = "minitransformer"
    sys_version = ""

    def do_GET(self) -> None:
        def body() -> str:
            if self.path.partition("?")[0] != "/":
                raise RefusedError(HTTPStatus.NOT_FOUND, "nothing here")
            return filled_page("translate.html", PAGE=page("translate.js"))

        self._respond(body, "text/html")

    def do_POST(self) -> None:
        def body() -> str:
            if self.path not in ("/translate", "/attention"):
                raise RefusedError(HTTPStatus.NOT_FOUND, "nothing here")
            self._admit()
            length = self.headers.get("Content-Length", "")
            if not length.isdigit():
                raise RefusedError(
                    HTTPStatus.LENGTH_REQUIRED, "expected a Content-Length"
                )
            if int(length) > MAX_BODY:
                raise RefusedError(
                    HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                    f"expected at most {MAX_BODY:,} bytes, got {int(length):,}",
                )
            request = json.loads(self.rfile.read(int(length)))
            if not isinstance(request, dict):
                raise ValueError("expected a JSON object")
            return self.server.answer(self.path, request)

        self._respond(body, "application/json")

    def _admit(self) -> None:
        """Raises: RefusedError if the request is not the page's, or has no token."""
        host = self.headers.get("Host", "").rsplit(":", 1)[0].strip("[]")
        if self.server.token is None:
            # Another site's page must not use this one, under whatever name.
            if host not in LOOPBACK:
                raise RefusedError(HTTPStatus.FORBIDDEN, f"unknown host {host!r}")
        else:
            given = self.headers.get("Authorization", "").removeprefix("Bearer ")
            if not hmac.compare_digest(given.encode(), self.server.token.encode()):
                raise RefusedError(HTTPStatus.UNAUTHORIZED, "expected the page's token")
        if self.headers.get_content_type() != "application/json":
            raise RefusedError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "expected JSON")

    def _respond(self, body: Any, kind: str) -> None:
        status = HTTPStatus.OK
        try:
            text = body()
        except RefusedError as error:
            status, kind = error.status, "application/json"
            text = json.dumps({"error": str(error)})
        except (ValueError, RecursionError) as error:
            status, kind = HTTPStatus.BAD_REQUEST, "application/json"
            text = json.dumps({"error": str(error)})
        if status != HTTPStatus.OK:
            self.close_connection = True  # its body may not have been read
        data = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header(
            "Content-Security-Policy",
            "default-src 'none'; connect-src 'self'; frame-ancestors 'none'; "
            "script-src 'unsafe-inline'; style-src 'unsafe-inline'; base-uri 'none'",
        )
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: what is translated is nobody's business."""


def _field(request: dict[str, Any], name: str, kind: type) -> Any:
    value = request.get(name)
    if type(value) is not kind:
        raise ValueError(f"{name}: expected {kind.__name__}, got {value!r:.40}")
    return value


def serve(translator: Translator, config: DecodingConfig, host: str, port: int) -> None:
    """Serve the page until Ctrl-C. Raises: OSError if the port is taken."""
    with Server(host, port, translator, config) as server:
        print(f"translate.py: open {server.address} (Ctrl-C ends)", file=sys.stderr)
        server.serve_forever()
