"""Server-sent events of our own: LF framing, escapes that no client stumbles over, comments that keep a line open.

A client that goes away or stops taking what it is sent ends the stream; what is behind it is cancelled then.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tokenmill.server.middleware import caller_of
from tokenmill.server.telemetry.figures import Outcome

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
LINE_ENDS = re.compile("[\x85\u2028\u2029]")
"""Characters that some clients take for the end of a line."""
_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def event(data: Any, name: str | None = None, event_id: str | None = None) -> bytes:
    """One event with JSON in it. A client that was cut off tells the id of the last one that it has seen."""
    text = _encode(data)
    if not text.isascii():
        text = LINE_ENDS.sub(lambda found: f"\\u{ord(found.group()):04x}", text)
    head = "" if name is None else f"event: {name}\n"
    head += "" if event_id is None else f"id: {event_id}\n"
    return f"{head}data: {text}\n\n".encode()


class EventStream(Response):
    """A response that sends events as they come; `on_end` is called when it is over, however that came about."""

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes],
        on_end: Callable[[], Awaitable[None]],
        *,
        keep_alive_s: float,
        send_timeout_s: float,
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._on_end = on_end
        self._keep_alive_s = keep_alive_s
        self._send_timeout_s = send_timeout_s
        self._sent_at = 0.0
        self._is_sending = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        tasks = [
            asyncio.ensure_future(one) for one in (self._send_all(send), disconnected(receive), self._keep_alive(send))
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            sent, *_ = await asyncio.gather(*tasks, return_exceptions=True)
            if sent is not None:  # not all of it was
                caller_of(scope).outcome = Outcome.CANCELLED
            await self._events.aclose()
            await self._on_end()
        if any(task.done() and not task.cancelled() and isinstance(task.exception(), TimeoutError) for task in tasks):
            scope["state"]["abort"]()  # what is on its way to a client that takes nothing is not waited for
        if isinstance(sent, Exception) and not isinstance(sent, TimeoutError | OSError):
            raise sent

    async def _send_all(self, send: Send) -> None:
        self._sent_at = asyncio.get_running_loop().time()
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for piece in self._events:
            await self._send(send, piece)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, piece: bytes) -> None:
        """Send, and give up on a client that takes nothing."""
        self._is_sending = True
        async with asyncio.timeout(self._send_timeout_s):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        self._is_sending = False
        self._sent_at = asyncio.get_running_loop().time()

    async def _keep_alive(self, send: Send) -> None:
        """A comment whenever nothing was sent for a while. Never ends by itself but for a client that takes nothing."""
        while True:
            silent_s = asyncio.get_running_loop().time() - self._sent_at
            if silent_s < self._keep_alive_s or self._is_sending:
                await asyncio.sleep(max(self._keep_alive_s - silent_s, self._keep_alive_s / 10))
            else:
                await self._send(send, KEEP_ALIVE)


async def disconnected(receive: Receive) -> None:
    """Until the client is gone. Its body has been read, so nothing else can come."""
    while (await receive())["type"] != "http.disconnect":
        pass
