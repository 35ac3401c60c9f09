"""HTTP/1.1 on one connection: uvicorn's, with limits on what a client may send and for how long.

Uvicorn has one timeout, between requests. Here a request's head and body each have a deadline, and its head a size.
What is refused here is refused in OpenAI's words, as everywhere.

A client may close its sending side and go on listening. Nothing tells this from one that has gone, but for writing to
it: so until the answer begins it gets an interim response (102) now and then, which ends the connection of one that is
not there.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import secrets
from typing import Any, ClassVar

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from tokenmill.server.config import ServerConfig
from tokenmill.server.errors import ApiError

log = logging.getLogger(__name__)

UPGRADE = re.compile(rb"(?i)(^|\r\n)upgrade ?:")
PROBE = b"HTTP/1.1 102 Processing\r\n\r\n"
PROBE_AFTER_S = (0.0, 0.05, 0.5, 5.0)
"""Two in a row: the first one makes a peer that has gone say so, the second one hears it."""
TOO_SLOW = ApiError(408, "the request did not arrive in time", code="request_timeout")
TOO_LARGE = ApiError(431, "the request's headers are too large", code="headers_too_large")
INVALID = ApiError(400, "this is no valid HTTP request", code="invalid_http")


class _HeadRefused(Exception):
    """Stops the parser."""


class GuardedProtocol(HttpToolsProtocol):
    """One connection. `with_limits` makes the class that has a server's own limits."""

    limits: ClassVar[ServerConfig]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._deadline: asyncio.TimerHandle | None = None
        self._probe: asyncio.TimerHandle | None = None
        self._flush: asyncio.TimerHandle | None = None
        self._num_head_bytes = 0
        self._is_in_head = True
        self._refusal = INVALID
        self._cycles: list[RequestResponseCycle] = []
        """Requests that have no complete answer yet, in the order they came."""

    @classmethod
    def with_limits(cls, limits: ServerConfig) -> type[GuardedProtocol]:
        return type(cls.__name__, (cls,), {"limits": limits})

    # -- the connection -----------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_within(self.limits.header_timeout_s)

    def data_received(self, data: bytes) -> None:
        super().data_received(_without_upgrade(data) if self._is_in_head else data)
        if not self._is_in_head or self.transport.is_closing():
            return
        self._num_head_bytes += len(data)
        if self._num_head_bytes > self.limits.max_header_bytes:
            self._refuse(TOO_LARGE)
        elif self._deadline is None and not self._unanswered():  # uvicorn's own timer ends with any byte
            self._expect_within(self.limits.header_timeout_s)

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client sends no more: it may still want its answers."""
        waiting = self._unanswered()
        if not waiting or waiting[-1].more_body:
            return False
        waiting[-1].keep_alive = False
        self._look_for_client(0)
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._deadline, self._probe, self._flush):
            if timer is not None:
                timer.cancel()
        for cycle in self._unanswered():  # uvicorn tells the last one only
            cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)

    # -- the parser ---------------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["state"]["abort"] = self._abort
        self._is_in_head, self._num_head_bytes = True, 0
        self._expect_within(self.limits.header_timeout_s)

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + 4)
        super().on_header(name, value)
        if len(self.headers) > self.limits.max_headers:
            self._stop(TOO_LARGE)

    def on_headers_complete(self) -> None:
        self._is_in_head, self._num_head_bytes = False, 0
        self._expect_within(self.limits.body_timeout_s)
        version = self.parser.get_http_version()
        num_hosts = sum(name == b"host" for name, _ in self.headers)
        if version not in ("1.0", "1.1") or num_hosts > 1 or (version == "1.1" and not num_hosts):
            self._stop(INVALID)
        super().on_headers_complete()
        self._cycles = [*self._unanswered(), self.cycle]

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._is_in_head, self._num_head_bytes = True, 0
        self._expect_within(None)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch_flush(self.transport.get_write_buffer_size())

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 (the words are ours)
        """What the parser refuses."""
        self._refuse(self._refusal)

    # -- limits -------------------------------------------------------------------------------------------------------

    def _count(self, num_bytes: int) -> None:
        self._num_head_bytes += num_bytes
        if self._num_head_bytes > self.limits.max_header_bytes:
            self._stop(TOO_LARGE)

    def _stop(self, refusal: ApiError) -> None:
        self._refusal = refusal
        raise _HeadRefused

    def _expect_within(self, seconds: float | None) -> None:
        """What comes next must be complete by then."""
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None if seconds is None else self.loop.call_later(seconds, self._refuse, TOO_SLOW)

    def _refuse(self, error: ApiError) -> None:
        """Nothing more is read. Answers to earlier requests are still given; else the client is told why."""
        self._expect_within(None)
        if self.transport.is_closing():
            return
        if self.cycle is not None and self.cycle.response_complete and not self._is_in_head:
            self.transport.close()  # it has had its answer, and the rest of its body is not wanted
            return
        waiting = self._unanswered()
        earlier = [cycle for cycle in waiting if not cycle.more_body]
        if earlier:
            earlier[-1].keep_alive = False
            self.flow.pause_reading()
            return
        if not any(cycle.response_started for cycle in waiting):
            name = f"req-{secrets.token_hex(16)}"  # there is no request that could be named
            log.warning("%s refused with %d: %s", name, error.status, error.message)
            self.transport.write(_raw(error, name))
        self.transport.close()

    def _watch_flush(self, before: int) -> None:
        """An answer is complete, but not all of it has been taken: somebody must be taking it."""
        if before and not (self._flush and not self._flush.cancelled()):
            self._flush = self.loop.call_later(self.limits.send_timeout_s, self._look_at_flush, before)

    def _look_at_flush(self, before: int) -> None:
        self._flush = None
        now = self.transport.get_write_buffer_size()
        if now >= before:
            self._abort()
        else:
            self._watch_flush(now)

    def _abort(self) -> None:
        """Give a client up: what is on its way to it is not waited for."""
        for cycle in self._unanswered():
            cycle.disconnected = True
        self.transport.abort()

    # -- is anybody there? --------------------------------------------------------------------------------------------

    def _unanswered(self) -> list[RequestResponseCycle]:
        return [cycle for cycle in self._cycles if not cycle.response_complete]

    def _look_for_client(self, count: int) -> None:
        """The client sends no more: see if it listens, until the answer begins."""
        waiting = self._unanswered()
        if self.transport.is_closing() or not waiting or waiting[0].response_started:
            return
        if waiting[0].scope["http_version"] != "1.0":
            self.transport.write(PROBE)
        pause = PROBE_AFTER_S[min(count + 1, len(PROBE_AFTER_S) - 1)]
        self._probe = self.loop.call_later(pause, self._look_for_client, count + 1)


def _without_upgrade(data: bytes) -> bytes:
    """A request to go on in another protocol may be ignored, but the parser would lose its body then."""
    head, end, rest = data.partition(b"\r\n\r\n")
    return UPGRADE.sub(b"\\1X-Was-U:", head) + end + rest if UPGRADE.search(head) else data


def _raw(error: ApiError, name: str) -> bytes:
    """An answer as it goes over the wire."""
    body = json.dumps(error.body()).encode()
    head = (
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n"
        f"x-request-id: {name}\r\n\r\n"
    )
    return STATUS_LINE[error.status] + head.encode() + body
