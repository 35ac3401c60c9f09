"""A name for every request, in its answer and in every line of the log: the one place that sees them come and go."""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tokenmill.outputs import RequestOutput, Usage
from tokenmill.server.bodies import discard
from tokenmill.server.errors import ApiError
from tokenmill.server.telemetry.figures import CLIENT_GONE, Outcome, Traffic, outcome_of
from tokenmill.server.telemetry.timeline import Delivery

access = logging.getLogger("tokenmill.access")

REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="-")
KEY_DIGITS = 8
"""Of a key's hash, in the log."""
ENDLESS = frozenset({"/v1/scheduler/events", "/scheduler/events"})
"""Paths whose answers end when the server stops, and not before: nobody waits for them."""
BLOCKED_S = 0.002
"""Sending that takes longer waits for the client."""
MOST_BLOCKED = 1024
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
    model: str = "-"
    """The model that it uses, by the name that it is served under."""
    body_bytes: int = 0
    """Of its body, once that was read: about how much there is to tokenize."""
    outcome: Outcome | None = None
    """How it ended, where its status does not say: that of a stream was sent before."""
    usage: Usage | None = None
    """What it has cost so far, if anything was run for it."""
    began: float = field(default_factory=time.monotonic)
    first_token_at: float | None = None
    blocked: list[tuple[float, float]] = field(default_factory=list)
    """When it could not send, because its client did not take what there was."""
    differs_in: tuple[int, str] | None = None
    """The message in which its prompt leaves what was known, if it is a chat's: its number and its role."""

    def note(self, output: RequestOutput) -> None:
        """Something that runs for it has grown."""
        if self.first_token_at is None and any(choice.token_ids for choice in output.outputs):
            self.first_token_at = time.monotonic()

    def charge(self, usage: Usage) -> None:
        """Something that ran for it has cost this."""
        so_far = self.usage or Usage(0, 0)
        self.usage = Usage(
            so_far.prompt_tokens + usage.prompt_tokens,
            so_far.completion_tokens + usage.completion_tokens,
            so_far.cached_tokens + usage.cached_tokens,
        )


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

    def __init__(
        self, app: ASGIApp, gate: Gate, traffic: Traffic, on_done: Callable[[str, Delivery], None] | None = None
    ) -> None:
        self._app = app
        self._gate = gate
        self._traffic = traffic
        self._on_done = on_done
        """Told of each request that ran something in an engine, when it is over."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = CLIENT_GONE
        caller = Caller(_request_id(scope))
        scope.setdefault("state", {})["caller"] = caller
        REQUEST_ID.set(caller.request_id)

        async def with_name(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", caller.request_id.encode())]
            begin = time.monotonic()
            await send(message)
            end = time.monotonic()
            if end - begin > BLOCKED_S and len(caller.blocked) < MOST_BLOCKED:
                caller.blocked.append((begin, end))

        is_probe = scope["path"] in self._gate.stays_open
        is_waited_for = not is_probe and scope["path"] not in ENDLESS
        endpoint = self._traffic.enter(scope["path"])
        self._gate.num_inside += is_waited_for
        try:
            await self._app(scope, receive, with_name)
        except Exception:
            caller.outcome = Outcome.FAILED
            raise
        finally:
            self._gate.num_inside -= is_waited_for
            ended = time.monotonic()
            outcome, seconds = caller.outcome or outcome_of(status), ended - caller.began
            if self._on_done is not None and caller.call_id != "-":
                delivery = Delivery(caller.began, ended, tuple(caller.blocked), caller.differs_in)
                self._on_done(caller.call_id, delivery)
            self._traffic.leave(endpoint, outcome, seconds)
            _log(logging.DEBUG if is_probe else logging.INFO, scope, caller, status, outcome, seconds)


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


def _log(level: int, scope: Scope, caller: Caller, status: int, outcome: Outcome, seconds: float) -> None:
    """One line for each request; as JSON it says more (`logs.py`)."""
    if not access.isEnabledFor(level):
        return
    path = ascii(scope["path"])[1:-1][:200]  # nothing in it may look like a line of the log
    key, usage, first = caller.key[:KEY_DIGITS] or "-", caller.usage, caller.first_token_at
    request = {
        "id": caller.request_id,
        "call_id": caller.call_id,
        "method": scope["method"],
        "path": path,
        "status": status,
        "outcome": outcome.value,
        "ms": round(1000 * seconds, 1),
        "key": key,
        "model": caller.model,
        "prompt_tokens": usage and usage.prompt_tokens,
        "cached_tokens": usage and usage.cached_tokens,
        "completion_tokens": usage and usage.completion_tokens,
        "ttft_ms": None if first is None else round(1000 * (first - caller.began), 1),
    }
    what = (scope["method"], path, status, 1000 * seconds, caller.call_id, key)
    access.log(level, "%s %s %d %.0f ms %s key=%s", *what, extra={"request": request})


def _request_id(scope: Scope) -> str:
    """The client's own, if it has a sane one; else a new one."""
    given: list[str] = [value.decode("latin-1") for name, value in scope["headers"] if name == b"x-request-id"]
    if len(given) == 1 and SANE_ID.fullmatch(given[0]):
        return given[0]
    return f"req-{secrets.token_hex(16)}"
