"""Which bodies are read at all: JSON and session files, not packed, not larger than they may be."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tokenmill.server.errors import ApiError
from tokenmill.session.portable import MEDIA_TYPE

RESTORE = "/sessions/restore"
CLOSE = {"Connection": "close"}
"""What is left of the body is not read."""
LINGER_BYTES, LINGER_S = 16 << 20, 5.0


class BodyLimit:
    """Refuses a body that says it is too large, and stops reading one that turns out to be.

    Nothing is unpacked, so nothing unpacks to gigabytes. Only JSON is taken, and session files where they are restored:
    a form on some web page can send neither.
    """

    def __init__(self, app: ASGIApp, max_body_bytes: int) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        refusal = self._refusal(scope)
        if refusal is not None:
            await discard(receive)
            await JSONResponse(refusal.body(), refusal.status, headers=CLOSE)(scope, receive, send)
            return
        num_read = 0

        async def counted() -> Message:
            nonlocal num_read
            message = await receive()
            if message["type"] == "http.request":
                num_read += len(message.get("body", b""))
                if num_read > self._max_body_bytes:
                    raise HTTPException(413, self._too_large, headers=CLOSE)
            return message

        await self._app(scope, counted, send)

    @property
    def _too_large(self) -> str:
        return f"a body may have {self._max_body_bytes} bytes"

    def _refusal(self, scope: Scope) -> ApiError | None:
        headers = dict(scope["headers"])
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length[:20]) > self._max_body_bytes:
            return ApiError(413, self._too_large)
        if headers.get(b"content-encoding", b"identity").lower() != b"identity":
            return ApiError(415, "a body must not be compressed")
        has_body = b"transfer-encoding" in headers or length.strip(b"0")
        kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if has_body and scope["path"].endswith(RESTORE):
            return (
                None if kind == MEDIA_TYPE.encode() else ApiError(415, f"send a file, with Content-Type: {MEDIA_TYPE}")
            )
        if has_body and not _is_json(kind):
            return ApiError(415, "send JSON, with Content-Type: application/json")
        return None


async def discard(receive: Receive) -> None:
    """Read a body that nobody wants, up to a point: many clients look for an answer only when they have sent all."""
    num_read = 0
    with suppress(TimeoutError):
        async with asyncio.timeout(LINGER_S):
            while num_read < LINGER_BYTES:
                message = await receive()
                num_read += len(message.get("body", b""))
                if message["type"] != "http.request" or not message.get("more_body", False):
                    return


def _is_json(kind: bytes) -> bool:
    return kind == b"application/json" or (kind.startswith(b"application/") and kind.endswith(b"+json"))
