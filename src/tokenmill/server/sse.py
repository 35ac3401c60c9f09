"""Streams: server-sent events (LF framing, escaped Unicode line separators, keep-alive comments), or JSON lines."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Any, Protocol

from msgspec.json import encode as encode_json
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tokenmill.server.config import ServerConfig
from tokenmill.server.errors import error_response
from tokenmill.server.middleware import Caller
from tokenmill.server.telemetry.figures import Outcome

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
MARK = "<text>"
"""Placeholder for a text while everything around it is encoded."""
LINE_ENDS = re.compile("[\x85\u2028\u2029]")
"""Characters that some clients treat as line breaks."""
_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


@dataclass(frozen=True)
class Framing:
    """How the events of a stream are delimited, and its keep-alive."""

    media_type: str = "text/event-stream"
    keep_alive: bytes = KEEP_ALIVE


SERVER_SENT_EVENTS = Framing()


def json_line(data: Any) -> bytes:
    """One line of a stream of JSON objects."""
    return f"{_encode(data)}\n".encode()


def event(data: Any, name: str | None = None, event_id: str | None = None) -> bytes:
    """One event with JSON data. A disconnected client resumes from the id of the last one it has received."""
    head = "" if name is None else f"event: {name}\n"
    head += "" if event_id is None else f"id: {event_id}\n"
    text = _encode(data)
    return f"{head}data: {text if text.isascii() else escaped(text)}\n\n".encode()


def escaped(text: str) -> str:
    """JSON with non-ASCII text, escaping what some clients treat as line breaks."""
    return LINE_ENDS.sub(lambda found: f"\\u{ord(found.group()):04x}", text)


class TextEvent:
    """Events that differ in one text: everything around it is encoded once. `shape` makes the data for a text."""

    def __init__(self, shape: Callable[[str], Any]) -> None:
        self._before, _, self._after = event(shape(MARK)).rpartition(f'"{MARK}"'.encode())

    def encode(self, text: str) -> bytes:
        encoded = encode_json(text)
        return self._before + (encoded if encoded.isascii() else escaped(encoded.decode()).encode()) + self._after


class Events(Protocol):
    """What an `EventStream` sends."""

    async def take(self) -> bytes:
        """The next events, joined; empty at the end."""
        ...

    def failed(self, error: Exception) -> bytes:
        """The last events, if `take` raised this after the status was sent. Raises it if there is no such event."""
        ...

    async def close(self) -> None:
        """The stream is over, for whatever reason."""
        ...


class PieceEvents:
    """A generator's events."""

    def __init__(self, pieces: AsyncGenerator[bytes]) -> None:
        self._pieces = pieces

    async def take(self) -> bytes:
        return await anext(self._pieces, b"")

    def failed(self, error: Exception) -> bytes:
        raise error

    async def close(self) -> None:
        await self._pieces.aclose()


class EventStream(Response):
    """A response that sends events as they arrive.

    The status is sent with the first event, or after a while without one: until then, an error is an ordinary
    response. The stream ends when the client disconnects or stops reading. Comments keep a silent connection open.
    """

    def __init__(
        self, events: Events, caller: Caller, config: ServerConfig, framing: Framing = SERVER_SENT_EVENTS
    ) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(headers=headers, media_type=framing.media_type)
        del self.headers["content-length"]
        self._framing = framing
        self._events = events
        self._caller = caller
        self._keep_alive_s = config.keep_alive_s
        self._send_timeout_s = config.send_timeout_s
        self._has_status = False
        self._is_sending = False
        self._since = time.monotonic()
        """When it last sent something, or started."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        lost, is_stuck = self._caller.connection.lost, False
        sending = asyncio.ensure_future(self._send_all(send))
        waited_for: set[asyncio.Future[Any]] = {sending, lost}
        try:
            while not sending.done() and not lost.done() and not is_stuck:
                limit_s = self._send_timeout_s if self._is_sending else self._keep_alive_s
                left_s = self._since + limit_s - time.monotonic()
                if left_s > 0:
                    pause_s = min(left_s, self._send_timeout_s / 4)
                    await asyncio.wait(waited_for, timeout=pause_s, return_when=asyncio.FIRST_COMPLETED)
                else:
                    is_stuck = self._is_sending or not await self._keep_alive(send)
        finally:
            sending.cancel()
            (sent,) = await asyncio.gather(sending, return_exceptions=True)
            if self._has_status and sent is not None:  # incomplete
                self._caller.outcome = Outcome.CANCELLED
            await self._events.close()
        if is_stuck:
            self._caller.connection.abort()
        if isinstance(sent, Exception) and not self._has_status:
            await error_response(sent, self._caller.error_body)(scope, receive, send)
        elif isinstance(sent, Exception) and not isinstance(sent, OSError):
            raise sent

    async def _send_all(self, send: Send) -> None:
        connection, is_over = self._caller.connection, False
        while not is_over:
            try:
                piece = await self._events.take()
                is_over = not piece
            except Exception as error:
                if not self._has_status:
                    raise
                piece, is_over = self._events.failed(error), True
            if not self._has_status:  # from now on, errors are events
                self._has_status = True
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            sending = connection.write({"type": "http.response.body", "body": piece, "more_body": not is_over})
            if connection.flow.write_paused:
                self._is_sending, self._since = True, time.monotonic()
                await self._caller.note_blocked(sending)
                self._is_sending = False
            else:
                await sending
            self._since = time.monotonic()

    async def _keep_alive(self, send: Send) -> bool:
        """Nothing was sent for a while: send the status, or a keep-alive. False if the client does not read it."""
        try:
            async with asyncio.timeout(self._send_timeout_s):
                if self._has_status:
                    message = {"type": "http.response.body", "body": self._framing.keep_alive, "more_body": True}
                    await self._caller.connection.write(message)
                else:
                    self._has_status = True
                    await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        except TimeoutError:
            return False
        self._since = time.monotonic()
        return True
