"""HTTP/1.1 on one connection: uvicorn's protocol with limits on size and time, and detection of dead clients.

Uvicorn has one timeout, between requests. Here a request's head and body have a deadline each, and its head a size
limit. Refusals are OpenAI-style errors, as everywhere.

A client may half-close its connection and still wait for the answer. Only a write tells it from one that has gone:
until the answer starts it gets interim responses now and then, which reset the connection of a dead client.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import secrets
import sys
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from tokenmill.errors import IntegrityError
from tokenmill.server.config import ServerConfig
from tokenmill.server.errors import RETRY_SOON, ApiError, unavailable

if sys.platform != "win32":
    import resource

log = logging.getLogger(__name__)

UPGRADE = re.compile(rb"(?i)(^|\r\n)upgrade ?:")
PROBE = b"HTTP/1.1 100 Continue\r\n\r\n"
PROBE_AFTER_S = (0.0, 0.05, 0.5, 5.0)
"""Two in a row: the first makes a dead peer reset the connection, the second notices the reset."""
MAX_CONNECTIONS, RESERVED_FILES = 4096, 64
"""Open connections; and descriptors that are left for everything else: files, the store, an engine process."""
MAX_FILES = 1 << 16
"""Descriptors that are asked for, if the system allows more by default than this."""
MAX_PIPELINED = 16
"""Pipelined requests that may wait on one connection."""
TOO_SLOW = ApiError(408, "timed out receiving the request", code="request_timeout")
TOO_LARGE = ApiError(431, "request headers too large", code="headers_too_large")
TOO_MANY = unavailable("too many connections", "too_many_connections", RETRY_SOON)
INVALID = ApiError(400, "invalid HTTP request", code="invalid_http")


class Reading(Enum):
    """What the next byte belongs to."""

    NOTHING = "between requests"
    HEAD = "a request's head"
    BODY = "its body"


@dataclass(frozen=True)
class Connection:
    """What a request may ask of its connection, beyond ASGI."""

    abort: Callable[[], None]
    """Drops it at once: unsent data is discarded."""
    lost: asyncio.Future[None]
    """Done when the client has disconnected."""
    write: Callable[[Any], Awaitable[None]]
    """The connection's own `send`. The layers between look at the first message of a response only, so the events of a
    stream need not pass them."""
    flow: FlowControl
    """While its `write_paused` is set, `write` waits for the client."""

    @classmethod
    def detached(cls) -> Connection:
        """Of work that no client waits for: it is never lost, and nothing can be sent."""

        async def write(_: Any) -> None:
            raise IntegrityError("nobody is there to be sent anything")

        lost = asyncio.get_running_loop().create_future()
        return cls(abort=lambda: None, lost=lost, write=write, flow=FlowControl(asyncio.Transport()))


class _HeadRefused(Exception):
    """Stops the parser."""


class GuardedProtocol(HttpToolsProtocol):
    """One connection. `with_limits` makes the class with a server's limits."""

    limits: ClassVar[ServerConfig]
    max_connections: ClassVar[int]
    is_full: ClassVar[bool] = False
    """Was the last connection one too many?"""

    @classmethod
    def with_limits(cls, limits: ServerConfig) -> type[GuardedProtocol]:
        most = max(1, min(MAX_CONNECTIONS, num_files() - RESERVED_FILES))
        return type(cls.__name__, (cls,), {"limits": limits, "max_connections": most})

    # -- the connection -----------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._lost: asyncio.Future[None] = self.loop.create_future()
        self._deadline: asyncio.TimerHandle | None = None
        self._probe: asyncio.TimerHandle | None = None
        self._flush: asyncio.TimerHandle | None = None
        self._reading = Reading.NOTHING
        self._num_parsed = 0
        """Bytes of this head that the parser has given us..."""
        self._num_raw = 0
        """...and those of whole packets that it has not."""
        self._refusal = INVALID
        self._unanswered: deque[RequestResponseCycle] = deque()
        """Requests in the order they came: in which they are answered, too."""
        self._expect_within(self.limits.header_timeout_s)
        was_full, type(self).is_full = self.is_full, len(self.connections) > self.max_connections
        if self.is_full:
            if not was_full:
                log.warning("more than %d connections: further ones are refused", self.max_connections)
            self.transport.write(_raw(TOO_MANY, _new_id()))
            self._expect_within(None)
            self.transport.close()

    def data_received(self, data: bytes) -> None:
        was = self._reading
        has_upgrade = was is not Reading.BODY and UPGRADE.search(data) is not None
        super().data_received(_without_upgrade(data) if has_upgrade else data)
        if self.transport.is_closing():
            return
        if was is self._reading is not Reading.BODY:  # part of a head, or line ends before one
            self._num_raw += len(data)
            if self._num_raw > self.limits.max_header_bytes:
                self._refuse(TOO_LARGE)
        if self._reading is Reading.NOTHING and self._deadline is None and not self._unanswered:
            self._expect_within(self.limits.header_timeout_s)  # uvicorn's own timer ends with any byte

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client half-closed: it may still want its answers. TLS has no such state: there it has left."""
        is_tls = self.transport.get_extra_info("ssl_object") is not None
        if is_tls or not self._unanswered or self._unanswered[-1].more_body:
            return False
        self._unanswered[-1].keep_alive = False
        self._look_for_client(0)
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._deadline, self._probe, self._flush):
            if timer is not None:
                timer.cancel()
        for cycle in self._unanswered:  # uvicorn only notifies the last one
            cycle.disconnected = True
            cycle.message_event.set()
        self._lost.set_result(None)
        super().connection_lost(exc)

    # -- the parser ---------------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._reading, self._num_parsed, self._num_raw = Reading.HEAD, 0, 0
        self._expect_within(self.limits.header_timeout_s)
        if self._flush is not None:  # a client that sends another request is there
            self._flush.cancel()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_parsed += len(name) + len(value) + 4
        super().on_header(name, value)
        if self._num_parsed > self.limits.max_header_bytes or len(self.headers) > self.limits.max_headers:
            self._stop(TOO_LARGE)

    def on_headers_complete(self) -> None:
        if self._num_parsed + len(self.url) > self.limits.max_header_bytes:
            self._stop(TOO_LARGE)
        version = self.parser.get_http_version()
        num_hosts = sum(name == b"host" for name, _ in self.headers)
        if version not in ("1.0", "1.1") or num_hosts > 1 or (version == "1.1" and not num_hosts):
            self._stop(INVALID)
        if self.parser.should_upgrade():  # the parser would take its body for the next request
            self._stop(INVALID)
        if len(self._unanswered) > MAX_PIPELINED:
            self._stop(TOO_MANY)
        self._reading = Reading.BODY
        self._expect_within(self.limits.body_timeout_s)
        super().on_headers_complete()
        self._unanswered.append(self.cycle)
        # Its task has not started yet.
        self.scope["state"]["connection"] = Connection(self._abort, self._lost, self.cycle.send, self.flow)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._reading, self._num_raw = Reading.NOTHING, 0
        self._expect_within(None)
        if not self.pipeline:  # a long body pauses it; from now on there is only the client's end to read
            self.flow.resume_reading()

    def on_response_complete(self) -> None:
        while self._unanswered and self._unanswered[0].response_complete:
            self._unanswered.popleft()
        super().on_response_complete()
        if self._flush is not None:
            self._flush.cancel()
        if unsent := self.transport.get_write_buffer_size():
            self._watch_flush(unsent)

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 (the words are ours)
        """What the parser refuses."""
        self._refuse(self._refusal, is_told=True)

    # -- limits -------------------------------------------------------------------------------------------------------

    def _stop(self, refusal: ApiError) -> None:
        self._refusal = refusal
        raise _HeadRefused

    def _expect_within(self, seconds: float | None) -> None:
        """Set the deadline for the part that is being read."""
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None if seconds is None else self.loop.call_later(seconds, self._refuse, TOO_SLOW)

    def _refuse(self, error: ApiError, *, is_told: bool = False) -> None:
        """Nothing more is read. Answers to earlier requests are still given.

        Else the client is told why, if it has begun a request that has no answer yet, or if `is_told`.
        """
        self._expect_within(None)
        if self.transport.is_closing():
            return
        waiting = self._unanswered
        earlier = [cycle for cycle in waiting if not cycle.more_body]
        if earlier:
            earlier[-1].keep_alive = False
            self.flow.pause_reading()
            return
        is_answered = self._reading is Reading.BODY and not waiting
        has_begun = self._reading is not Reading.NOTHING and not is_answered
        if (has_begun or (is_told and not is_answered)) and not any(cycle.response_started for cycle in waiting):
            name = _new_id()
            log.warning("%s refused with %d: %s", name, error.status, error.message)
            self.transport.write(_raw(error, name))
        self.transport.close()

    def _watch_flush(self, before: int) -> None:
        """An answer is complete, but not all of it was sent: the client must go on reading."""
        self._flush = self.loop.call_later(self.limits.send_timeout_s, self._look_at_flush, before)

    def _look_at_flush(self, before: int) -> None:
        now = self.transport.get_write_buffer_size()
        if now >= before:
            self._abort()
        elif now:
            self._watch_flush(now)

    def _abort(self) -> None:
        """Drop a client: unsent data is discarded."""
        for cycle in self._unanswered:
            cycle.disconnected = True
        self.transport.abort()

    # -- dead clients -------------------------------------------------------------------------------------------------

    def _look_for_client(self, count: int) -> None:
        """The client half-closed: probe it until the answer starts."""
        waiting = self._unanswered
        if self.transport.is_closing() or not waiting or waiting[0].response_started:
            return
        if waiting[0].scope["http_version"] != "1.0":
            self.transport.write(PROBE)
        pause = PROBE_AFTER_S[min(count + 1, len(PROBE_AFTER_S) - 1)]
        self._probe = self.loop.call_later(pause, self._look_for_client, count + 1)


def num_files() -> int:
    """How many files this process may have open: each connection is one."""
    if sys.platform == "win32":
        return MAX_FILES
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_FILES if soft == resource.RLIM_INFINITY else soft


def raise_file_limit() -> None:
    """Allow as many open files as the system lets this process have."""
    if sys.platform == "win32":
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        with suppress(OSError, ValueError):  # a sandbox may refuse; then it has what it has
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _new_id() -> str:
    """Of an answer to something that is no request, which could have a name."""
    return f"req-{secrets.token_hex(16)}"


def _without_upgrade(data: bytes) -> bytes:
    """Upgrade requests may be ignored, but the parser would lose their bodies."""
    head, end, rest = data.partition(b"\r\n\r\n")  # one that is cut in two is refused instead
    return UPGRADE.sub(b"\\1X-Was-U:", head) + end + rest if UPGRADE.search(head) else data


def _raw(error: ApiError, name: str) -> bytes:
    """The response on the wire."""
    body = json.dumps(error.body()).encode()
    head = (
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n"
        f"x-request-id: {name}\r\n\r\n"
    )
    return STATUS_LINE[error.status] + head.encode() + body
