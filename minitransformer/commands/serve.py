"""A page to translate on, and LibreTranslate's interface for other programs.

`translate.py --serve` serves both; the page's script uses the interface. `Door` reads
the requests that may come in, and `LibreTranslate` answers them.
"""

from __future__ import annotations

import gc
import hmac
import html
import ipaddress
import json
import secrets
import socket
import sys
from asyncio import TimerHandle, Transport
from collections.abc import Awaitable, Callable, Sequence
from contextlib import closing, suppress
from functools import partial
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qsl, quote

import h11
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route
from starlette.types import Message
from uvicorn.protocols.http.h11_impl import H11Protocol

from minitransformer.cli import printable, say
from minitransformer.commands.libretranslate import Direction, Fields, LibreTranslate
from minitransformer.commands.pages import page
from minitransformer.settings import VERSION
from minitransformer.system.workers import limit_threads
from minitransformer.translation.confidence import UNSURE

MAX_BODY = 65_536  # bytes: room for the longest text in any notation
MAX_FILE = 1 << 20  # bytes of a body with a file
REQUEST_TIMEOUT = 10  # seconds until a request must be complete
MAX_INCOMPLETE = 100  # connections whose request is not complete
BACKLOG = 2048  # connections that the system keeps until their turn

HEADERS = {
    "Server": f"minitransformer/{VERSION}",
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Content-Security-Policy": "default-src 'none'; connect-src 'self'; "
    "frame-ancestors 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "base-uri 'none'",
}

Endpoint = Callable[[Request], Awaitable[Response]]

parse_form = partial(parse_qsl, keep_blank_values=True, errors="strict")

# What is wrong with a request; any other error is one of the server.
REFUSED = (ClientDisconnect, HTTPException, RecursionError, ValueError)


class Door:
    """Reads requests, refuses those without the key, and sends the answers."""

    def __init__(self, interface: LibreTranslate, api_key: str | None) -> None:
        self.interface = interface
        self.api_key = api_key
        routes: dict[tuple[str, str], Endpoint] = {
            # What anybody may ask who reaches the server.
            ("GET", "/"): self._page,
            ("GET", "/frontend/settings"): _constant(interface.settings()),
            ("GET", "/health"): _constant({"status": "ok"}),
            ("GET", "/languages"): _constant(interface.languages()),
            # What needs the key.
            ("POST", "/attention"): self._endpoint(interface.attention),
            ("POST", "/detect"): self._endpoint(interface.detect),
            ("POST", "/translate"): self._endpoint(interface.translate),
            ("POST", "/translate_file"): self._translate_file,
            # What has a name that nobody guesses.
            ("GET", "/download_file/{name}"): self._download,
        }
        self.routes = ", ".join(map(" ".join, routes))
        # Pages of other sites may ask, too.
        self.app = Starlette(
            routes=[
                Route(path + end, endpoint, methods=[method])
                for (method, path), endpoint in routes.items()
                for end in ("", "/")
            ],
            middleware=[
                Middleware(
                    CORSMiddleware,
                    allow_origins=["*"],
                    allow_methods=["*"],
                    allow_headers=["*"],
                )
            ],
            exception_handlers={
                **dict.fromkeys(REFUSED, self._refused),
                Exception: self._failed,
            },
        )

    # Answers

    async def _page(self, request: Request) -> Response:
        interface = self.interface
        figures = [f"{interface.name_of(x)}: {x.figures}" for x in interface.directions]
        text = page(
            "translate.html",
            GOOD_AT=" and ".join(
                dict.fromkeys(x.good_at for x in interface.directions)
            ),
            LIMIT=interface.limit,
            UNSURE=UNSURE,
            LANGUAGES=html.escape(json.dumps(interface.languages())),
            FIGURES=html.escape("; ".join(figures)),
        )
        return HTMLResponse(text)

    async def _translate_file(self, request: Request) -> Response:
        fields = await self._fields(request, has_file=True)
        name = await self.interface.translate_file(fields)
        return _json({"translatedFileUrl": f"{request.base_url}download_file/{name}"})

    async def _download(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in self.interface.files:
            raise HTTPException(HTTPStatus.NOT_FOUND)
        headers = {"Content-Disposition": f'attachment; filename="{name}"'}
        return Response(
            self.interface.files[name],
            headers=headers,
            media_type="application/octet-stream",
        )

    def _endpoint(self, function: Callable[[Fields], Awaitable[Any]]) -> Endpoint:
        """Return what answers a request by a function of its fields."""

        async def answer(request: Request) -> Response:
            return _json(await function(await self._fields(request)))

        return answer

    async def _refused(self, request: Request, error: Exception) -> Response:
        """Say in a line why a request has no answer."""
        status = getattr(error, "status_code", HTTPStatus.BAD_REQUEST)
        message = getattr(error, "detail", str(error)) or type(error).__name__
        if status in (HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED):
            message = f"nothing here: expected one of {self.routes}"
        return _json({"error": message}, status)

    async def _failed(self, request: Request, error: Exception) -> Response:
        """Tell the details, such as paths, only those who run this server."""
        name = type(error).__name__
        say(f"translate.py: error: {name}: {printable(str(error))}")
        return _json({"error": name}, HTTPStatus.INTERNAL_SERVER_ERROR)

    # Fields of requests

    async def _fields(self, request: Request, has_file: bool = False) -> Fields:
        """Read the fields of a request. Raises: ValueError, HTTPException"""
        # A key in the address or the header is compared before the body is read.
        fields = _fields_of(parse_form(request.url.query))
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            fields["api_key"] = key
        if fields.get("api_key"):
            self._check_key(fields)
        # Programs of LibreTranslate send it in the body.
        fields |= await _body_fields(request, has_file)
        self._check_key(fields)
        return fields

    def _check_key(self, fields: Fields) -> None:
        """Compare the whole key, in constant time. Raises: HTTPException"""
        if self.api_key is None:
            return
        key = str(fields.get("api_key") or "")
        if not key:
            missing = "Invalid request: missing api_key parameter"
            raise HTTPException(HTTPStatus.BAD_REQUEST, missing)
        if not hmac.compare_digest(key.encode(errors="replace"), self.api_key.encode()):
            raise HTTPException(HTTPStatus.FORBIDDEN, "Invalid API key")


async def _body_fields(request: Request, has_file: bool) -> Fields:
    """Read the fields of JSON or of a form. Raises: ValueError, HTTPException"""
    # Read the body, unless it is too long.
    most = MAX_FILE if has_file else MAX_BODY
    body = bytearray()
    size = int(request.headers.get("Content-Length", 0))
    chunks = request.stream()
    while size <= most and (chunk := await anext(chunks, b"")):
        body += chunk
        size = max(size, len(body))
    if size > most:
        expected = f"expected at most {most:,} bytes, got more"
        raise HTTPException(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, expected)
    # JSON may come under the name of a form, or under none.
    kind = request.headers.get("Content-Type", "")
    if "json" in kind or body.lstrip().startswith(b"{"):
        fields = json.loads(body)
        if not isinstance(fields, dict):
            raise ValueError("Invalid JSON format")
        return fields
    text = "" if has_file else body.decode()
    if not kind.startswith("multipart/"):
        return _fields_of(parse_form(text))

    async def receive() -> Message:
        return {"type": "http.request", "body": bytes(body)}

    # A file is its name and its content.
    async with Request(request.scope, receive).form() as form:
        pairs = [
            (name, x if isinstance(x, str) else (x.filename or "", await x.read()))
            for name, x in form.multi_items()
        ]
    return _fields_of(pairs)


def _fields_of(pairs: Sequence[tuple[str, Any]]) -> Fields:
    """Return the fields of a form, of which `q` may come several times."""
    fields = dict(pairs)
    texts = [value for name, value in pairs if name in ("q", "q[]")]
    if len(texts) > 1 or "q[]" in fields:
        fields["q"] = texts
    return fields


def _constant(answer: Any) -> Endpoint:
    """Return what gives the same answer to every request, which needs no key."""

    async def same(request: Request) -> Response:
        return _json(answer)

    return same


def _json(answer: Any, status: int = HTTPStatus.OK) -> Response:
    text = answer if isinstance(answer, str) else json.dumps(answer)
    return Response(text, status, media_type="application/json")


class Connection(H11Protocol):
    """A connection that is closed unless its requests are complete in time.

    If there are too many, the one goes whose request has been incomplete for longest.
    """

    deadline: TimerHandle

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_request()
        # Make room if too many wait for their client.
        waiting = [
            x
            for x in self.connections
            if isinstance(x, Connection) and x.is_incomplete()
        ]
        if len(waiting) > MAX_INCOMPLETE:
            oldest = min(waiting, key=lambda x: x.deadline.when())
            oldest.transport.abort()

    def on_response_complete(self) -> None:
        self.deadline.cancel()
        self._expect_request()
        super().on_response_complete()

    def is_incomplete(self) -> bool:
        """Return whether the client has yet to send a request, or the rest of one."""
        sends = self.conn.their_state in (h11.IDLE, h11.SEND_BODY)
        return sends and not self.transport.is_closing()

    def _expect_request(self) -> None:
        self.deadline = self.loop.call_later(REQUEST_TIMEOUT, self._end_incomplete)

    def _end_incomplete(self) -> None:
        if self.is_incomplete():
            self.transport.abort()


class Server(uvicorn.Server):
    """An HTTP server of models.

    Unless only this computer reaches the server or `is_open`, requests need a key:
    `api_key` or else a new one, which the address contains.

    Raises: OSError naming a host or port that cannot be used.
    """

    def __init__(
        self,
        directions: Sequence[Direction],
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        api_key: str | None = None,
        is_open: bool = False,
    ) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self.socket = socket.create_server(
                (host, port), family=family, backlog=BACKLOG
            )
        except (OSError, UnicodeError) as error:  # a name may be no possible host
            reason = getattr(error, "strerror", None) or error
            raise OSError(f"cannot serve at {host}, port {port}: {reason}") from error
        # Who reaches the address to which the name of the host has led?
        bound = ipaddress.ip_address(self.socket.getsockname()[0])
        if not (api_key or is_open or bound.is_loopback):
            api_key = secrets.token_urlsafe(16)
        self.api_key = api_key
        self.interface = LibreTranslate(directions, needs_key=bool(api_key))
        config = uvicorn.Config(
            Door(self.interface, api_key).app,
            loop="asyncio",
            http=Connection,
            ws="none",
            lifespan="off",
            log_config=None,  # what people translate is private
            log_level="critical",
            server_header=False,
            proxy_headers=False,
            headers=[*HEADERS.items()],
            timeout_graceful_shutdown=1,
        )
        super().__init__(config)

    @property
    def address(self) -> str:
        """The address of the page, with the key if there is one."""
        host, port = self.socket.getsockname()[:2]
        query = f"?api_key={quote(self.api_key)}" if self.api_key else ""
        return f"http://{f'[{host}]' if ':' in host else host}:{port}/{query}"

    def serve_forever(self) -> None:
        """Answer requests until `should_exit`, or Ctrl-C in the main thread."""
        # Small products take less time than starting threads. OpenBLAS takes the limit
        # from this thread, not from the queue's.
        with self.socket, closing(self.interface.queue), limit_threads(1):
            # Neither a search for garbage in models nor the queue holds answers up.
            gc.freeze()
            sys.setswitchinterval(0.001)
            self.run([self.socket])
            gc.unfreeze()


def serve(server: Server) -> None:
    """Serve the page until Ctrl-C."""
    with suppress(KeyboardInterrupt):
        interface = server.interface
        served = ", ".join(map(interface.name_of, interface.directions))
        say(f"translate.py: {served}: open {server.address} (Ctrl-C ends)")
        server.serve_forever()
