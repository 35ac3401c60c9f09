"""Requests that belong to another server, where their session is being answered: passed on over HTTP, and back.

Bytes go through as they are, so a stream is a stream. A server that dies meanwhile is one that hangs up. Before its
response has begun, a read is repeated; a write is not, since the other server may have carried it out, and the client
gets an error. Afterwards the client's connection breaks, too.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from urllib.parse import urlsplit

import httptools
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from tokenmill.errors import SessionElsewhere
from tokenmill.server.errors import unavailable
from tokenmill.server.streaming import while_connected

FORWARDED = "x-tokenmill-forwarded"
"""On a request that was passed on: it is not passed on again."""
HOP_BY_HOP = frozenset(
    {b"connection", b"keep-alive", b"transfer-encoding", b"te", b"upgrade", b"host", b"content-length"}
)
CONNECT_S = 2.0
RETRY_S = 0.1
"""Between two looks for who has a session."""
MAX_WAIT_S = 30.0
"""For a server that does not answer: longer than any lease that it may have."""
READ_BYTES = 1 << 16
KEEP_ALIVE = {"TCP_KEEPIDLE": 2, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3}
"""Seconds until the first probe of a silent connection, between two, and probes without an answer that end it."""


async def follow(
    http: Request, handle: Callable[[Request], Awaitable[Response]], elsewhere: SessionElsewhere
) -> Response:
    """Handle a request on the server that is answering in its session; here, once that is over or it is gone."""
    caller, deadline = http.state.caller, time.monotonic() + MAX_WAIT_S
    while True:
        if FORWARDED in http.headers or time.monotonic() > deadline:  # whoever has passed it on looks again
            raise unavailable("the session is on another server", "session_elsewhere", {"Retry-After": "1"})
        answer = await while_connected(caller, _forward(http, elsewhere))
        if answer is not None:
            return answer
        await while_connected(caller, asyncio.sleep(RETRY_S))
        try:
            return await handle(http)
        except SessionElsewhere as error:
            elsewhere = error


async def _forward(http: Request, elsewhere: SessionElsewhere) -> Response | None:
    """The other server's response, once its head is there; None if the request was not carried out.

    A server that hangs keeps its connections open, but not its lease.
    """
    where = urlsplit(elsewhere.address)
    if where.hostname is None:
        return None
    context = ssl.create_default_context() if where.scheme == "https" else None
    port = where.port or (443 if context else 80)
    try:
        async with asyncio.timeout(CONNECT_S):
            reader, writer = await asyncio.open_connection(where.hostname, port, ssl=context)
    except (OSError, TimeoutError):
        return None
    _keep_alive(writer.get_extra_info("socket"))
    parsed, is_kept = _Parsed(), False
    try:
        writer.write(_head(http, where.netloc, body := await http.body()) + body)
        await writer.drain()
        while not parsed.has_head:
            try:
                async with asyncio.timeout(elsewhere.retry_s):
                    data = await reader.read(READ_BYTES)
            except TimeoutError:
                if not await asyncio.to_thread(elsewhere.is_there):
                    return _unless_a_write(http)
                continue
            if not data:
                return _unless_a_write(http)
            parsed.feed(data)
        if parsed.status == 503 and not elsewhere.is_named:  # it does not have the session either, or is going down
            return None
        response = StreamingResponse(_body(reader, writer, parsed), parsed.status)
        response.raw_headers = [one for one in parsed.headers if one[0] not in HOP_BY_HOP]
        is_kept = True
        return response
    except OSError:
        return _unless_a_write(http)
    finally:
        if not is_kept:
            writer.close()


def _unless_a_write(http: Request) -> Response | None:
    """None, for a request that can be repeated although the server that it was sent to has failed."""
    if http.method in ("GET", "HEAD"):
        return None
    what = "the server of the session has failed; the request may have been carried out: read the session's turns"
    raise unavailable(what, "session_server_lost", {})


def _keep_alive(wire: socket.socket) -> None:
    """Have the kernel find a machine that was switched off and on again, which closes no connection."""
    wire.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEP_ALIVE.items():
        if hasattr(socket, name):  # not on every system
            wire.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class _Parsed:
    """A response as it comes in."""

    def __init__(self) -> None:
        self.headers: list[tuple[bytes, bytes]] = []
        self.pieces: list[bytes] = []
        self.has_head = self.is_over = False
        self._parser = httptools.HttpResponseParser(self)

    def feed(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            raise ConnectionError(str(error)) from None

    @property
    def status(self) -> int:
        return int(self._parser.get_status_code())

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.has_head = True

    def on_body(self, body: bytes) -> None:
        self.pieces.append(body)

    def on_message_complete(self) -> None:
        self.is_over = True


def _head(http: Request, host: str, body: bytes) -> bytes:
    """The request's head as it goes to the other server: the caller's, with its key and its id."""
    query = http.scope["query_string"]
    target = http.scope["raw_path"] + (b"?" + query if query else b"")
    kept = [(name, value) for name, value in http.scope["headers"] if name not in HOP_BY_HOP | {b"x-request-id"}]
    own = [(b"host", host.encode()), (b"connection", b"close"), (b"content-length", str(len(body)).encode())]
    own += [(FORWARDED.encode(), b"1"), (b"x-request-id", http.state.caller.request_id.encode())]
    lines = [http.method.encode() + b" " + target + b" HTTP/1.1", *(name + b": " + value for name, value in own + kept)]
    return b"\r\n".join(lines) + b"\r\n\r\n"


async def _body(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, parsed: _Parsed) -> AsyncIterator[bytes]:
    """A body as it comes. If it does not come to its end, neither does ours."""
    try:
        while True:
            for piece in parsed.pieces:
                yield piece
            parsed.pieces.clear()
            if parsed.is_over:
                return
            data = await reader.read(READ_BYTES)
            if not data:
                raise ConnectionResetError("the session's server has hung up")
            parsed.feed(data)
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
