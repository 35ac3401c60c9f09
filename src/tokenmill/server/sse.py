"""Server-sent events: LF framing, escaped Unicode line separators, keep-alive comments."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator
from typing import Any, Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tokenmill.server.config import ServerConfig
from tokenmill.server.middleware import caller_of
from tokenmill.server.telemetry.figures import Outcome

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
LINE_ENDS = re.compile("[\x85\u2028\u2029]")
"""Characters that some clients take for the end of a line."""
_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def to_json(data: Any) -> str:
    """JSON for a `data:` line, with escapes for what some clients take for the end of one."""
    text = _encode(data)
    return text if text.isascii() else LINE_ENDS.sub(lambda found: f"\\u{ord(found.group()):04x}", text)


def event(data: Any, name: str | None = None, event_id: str | None = None) -> bytes:
    """One event with JSON in it. A client that was cut off tells the id of the last one that it has seen."""
    head = "" if name is None else f"event: {name}\n"
    head += "" if event_id is None else f"id: {event_id}\n"
    return f"{head}data: {to_json(data)}\n\n".encode()


class Events(Protocol):
    """What an `EventStream` sends."""

    async def take(self) -> bytes:
        """The next events, as one piece; nothing when there are no more."""
        ...

    async def close(self) -> None:
        """It is over, however that came about."""
        ...


class PieceEvents:
    """The pieces of a generator as events."""

    def __init__(self, pieces: AsyncGenerator[bytes]) -> None:
        self._pieces = pieces

    async def take(self) -> bytes:
        return await anext(self._pieces, b"")

    async def close(self) -> None:
        await self._pieces.aclose()


class EventStream(Response):
    """A response that sends events as they come.

    It ends when the client goes away or stops taking what it is sent. Comments keep a silent line open.
    """

    media_type = "text/event-stream"

    def __init__(self, events: Events, config: ServerConfig) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._keep_alive_s = config.keep_alive_s
        self._send_timeout_s = config.send_timeout_s
        self._sent_at = 0.0
        self._is_sending = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        parts = (self._send_all(send), disconnected(receive), self._watch(send))
        tasks = [asyncio.ensure_future(part) for part in parts]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            sent, _, watched = await asyncio.gather(*tasks, return_exceptions=True)
            if sent is not None:  # not all of it was
                caller_of(scope).outcome = Outcome.CANCELLED
            await self._events.close()
        if isinstance(watched, TimeoutError):
            caller_of(scope).abort()
        if isinstance(sent, Exception) and not isinstance(sent, OSError):
            raise sent

    async def _send_all(self, send: Send) -> None:
        clock = asyncio.get_running_loop().time
        self._sent_at = clock()
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        while piece := await self._events.take():
            self._is_sending, self._sent_at = True, clock()
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            self._is_sending, self._sent_at = False, clock()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _watch(self, send: Send) -> None:
        """Send a comment whenever nothing was sent for a while; `TimeoutError` for a client that takes nothing."""
        clock = asyncio.get_running_loop().time
        while True:
            silent_s = clock() - self._sent_at
            limit_s = self._send_timeout_s if self._is_sending else self._keep_alive_s
            if silent_s < limit_s:
                await asyncio.sleep(min(limit_s - silent_s, self._send_timeout_s / 4))
            elif self._is_sending:
                raise TimeoutError
            else:
                async with asyncio.timeout(self._send_timeout_s):
                    await send({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})
                self._sent_at = clock()


async def disconnected(receive: Receive) -> None:
    """Until the client is gone. Its body has been read, so nothing else can come."""
    while (await receive())["type"] != "http.disconnect":
        pass
