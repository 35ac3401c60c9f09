"""Server-sent events of our own: LF framing, escapes that no client stumbles over, comments that keep a line open.

A client that goes away or stops taking what it is sent ends the stream; closing the events' generator cancels the
request behind it.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
LINE_ENDS = re.compile("[\x85\u2028\u2029]")
"""Characters that some clients take for the end of a line."""


def event(data: Any) -> bytes:
    """One event with JSON in it."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return b"data: " + LINE_ENDS.sub(lambda found: f"\\u{ord(found.group()):04x}", text).encode() + b"\n\n"


class EventStream(Response):
    """A response that sends events as they come."""

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes],
        *,
        keep_alive_s: float,
        send_timeout_s: float,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **(headers or {})})
        del self.headers["content-length"]
        self._events = events
        self._keep_alive_s = keep_alive_s
        self._send_timeout_s = send_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        sending = asyncio.ensure_future(self._send_all(send))
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait({sending, gone}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            for task in (sending, gone):
                task.cancel()
            await asyncio.gather(sending, gone, return_exceptions=True)
            await self._events.aclose()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        pending: asyncio.Future[bytes] | None = None
        try:
            while True:
                pending = pending or asyncio.ensure_future(anext(self._events))
                await asyncio.wait({pending}, timeout=self._keep_alive_s)
                if not pending.done():
                    await self._send(send, KEEP_ALIVE)
                    continue
                try:
                    piece = pending.result()
                except StopAsyncIteration:
                    break
                pending = None
                await self._send(send, piece)
        finally:
            if pending is not None and not pending.done():
                pending.cancel()
                await asyncio.gather(pending, return_exceptions=True)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, piece: bytes) -> None:
        async with asyncio.timeout(self._send_timeout_s):
            await send({"type": "http.response.body", "body": piece, "more_body": True})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
