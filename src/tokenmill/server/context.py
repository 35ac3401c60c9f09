"""A name for every request, in its answer and in every line of the log: the one place that sees them come and go."""

from __future__ import annotations

import logging
import re
import secrets
import time
from contextvars import ContextVar
from dataclasses import dataclass, field

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tokenmill.server.bodies import discard
from tokenmill.server.errors import ApiError

access = logging.getLogger("tokenmill.access")

REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="-")
KEY_DIGITS = 8
"""Of a key's hash, in the log."""
CLIENT_GONE = 499
"""In the log: nobody was there any more to be answered."""
SANE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
"""A client's own name for a request is taken if it looks like this."""


@dataclass
class Caller:
    """What is known of a request before anybody has looked into it."""

    request_id: str
    key: str = ""
    """The hash of the API key it came with; empty where none is needed."""
    call_id: str = "-"
    """The name of what it runs, as its answer has it: chatcmpl-..."""


def caller_of(scope: Scope) -> Caller:
    caller = scope["state"]["caller"]
    assert isinstance(caller, Caller)
    return caller


@dataclass
class Gate:
    """How many requests are inside, and why no more may come in, if so."""

    closed: ApiError | None = None
    num_inside: int = 0
    stays_open: frozenset[str] = field(default_factory=frozenset)
    """Paths that answer always, and don't count."""


class RequestContext:
    """The outermost layer: names, counts and logs requests."""

    def __init__(self, app: ASGIApp, gate: Gate) -> None:
        self._app = app
        self._gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status = time.monotonic(), CLIENT_GONE
        caller = Caller(_request_id(scope))
        scope.setdefault("state", {})["caller"] = caller
        REQUEST_ID.set(caller.request_id)

        async def with_name(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", caller.request_id.encode())]
            await send(message)

        is_counted = scope["path"] not in self._gate.stays_open
        self._gate.num_inside += is_counted
        try:
            await self._app(scope, receive, with_name)
        finally:
            self._gate.num_inside -= is_counted
            took_ms = 1000 * (time.monotonic() - began)
            level = logging.INFO if is_counted else logging.DEBUG
            path = ascii(scope["path"])[1:-1]  # nothing in it may look like a line of the log
            what = (scope["method"], f"{path:.200}", status, took_ms, caller.call_id, caller.key[:KEY_DIGITS] or "-")
            access.log(level, "%s %s %d %.0f ms %s key=%s", *what)


class Gatekeeper:
    """Turns requests away while the gate is closed."""

    def __init__(self, app: ASGIApp, gate: Gate) -> None:
        self._app = app
        self._gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._gate.closed
        if scope["type"] != "http" or error is None or scope["path"] in self._gate.stays_open:
            await self._app(scope, receive, send)
            return
        await discard(receive)
        response = JSONResponse(error.body(), error.status, headers={**error.headers, "Connection": "close"})
        await response(scope, receive, send)


def _request_id(scope: Scope) -> str:
    """The client's own, if it has a sane one; else a new one."""
    given: list[str] = [value.decode("latin-1") for name, value in scope["headers"] if name == b"x-request-id"]
    if len(given) == 1 and SANE_ID.fullmatch(given[0]):
        return given[0]
    return f"req-{secrets.token_hex(16)}"
