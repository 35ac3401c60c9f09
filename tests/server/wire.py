"""Clients that speak HTTP by themselves, byte by byte; and what the engine says meanwhile about their requests."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import uvloop

from tests.server.serving import HI, WAIT_S, Reply, Running, raw_request
from tokenmill.backends.fake import Fault, FaultKind
from tokenmill.engine.events import Event, Phase, RequestEvent, TickEvent
from tokenmill.outputs import FinishReason

LETTERS = list(range(ord("a"), ord("z") + 1))
"""Tokens of which each is a character, so that each is an event of its own."""
LONG = 4000
"""Tokens: more than a test waits for."""
PATIENCE_S = WAIT_S
"""How long states are waited for. Those who plant bugs have less."""


def until(condition: Callable[[], Any], within_s: float | None = None) -> None:
    """Until the state is what it should be; it comes about by itself."""
    deadline = time.monotonic() + (PATIENCE_S if within_s is None else within_s)
    while not condition():
        assert time.monotonic() < deadline, "it never came to that"
        time.sleep(0.001)


def chat_body(content: str = "hi", **changes: Any) -> dict[str, Any]:
    """A chat that says the same each time, one letter a token."""
    messages: Any = [{"role": "user", "content": content}] if content != "hi" else HI
    same = {"temperature": 0, "ignore_eos": True, "allowed_token_ids": LETTERS}
    return {"model": "fake", "messages": messages, "max_tokens": 8, **same, **changes}


def chat_request(content: str = "hi", headers: str = "", **changes: Any) -> bytes:
    return raw_request("/v1/chat/completions", chat_body(content, **changes), headers=headers)


class Wire:
    """A connection of our own."""

    def __init__(self, port: int, *, receive_buffer: int | None = None) -> None:
        self.socket = socket.socket()
        self.socket.settimeout(WAIT_S)
        if receive_buffer is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.connect(("127.0.0.1", port))
        self.server_port, self.own_port = port, self.socket.getsockname()[1]
        self.interim: list[int] = []
        """Statuses of the interim answers so far."""
        self._read = bytearray()

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def send_if_open(self, data: bytes) -> None:
        """For more than the server may want to take."""
        with suppress(BrokenPipeError, ConnectionResetError):
            self.socket.sendall(data)

    def half_close(self) -> None:
        """Send no more, but go on listening."""
        self.socket.shutdown(socket.SHUT_WR)

    def leave(self, how: str) -> None:
        """With a FIN, as programs do that end; or with a RST, as after a crash."""
        if how == "RST":
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()

    # -- reading ------------------------------------------------------------------------------------------------------

    def read_reply(self) -> Reply | None:
        """The next answer, interim ones left out; None if the server has closed the connection instead."""
        while True:
            head = self._up_to(b"\r\n\r\n")
            if head is None:
                return None
            lines = head.decode("latin-1").split("\r\n")
            status = int(lines[0].split(" ")[1])
            if status >= 200:
                break
            self.interim.append(status)
        headers = dict(line.lower().split(": ", 1) for line in lines[1:] if line)
        if headers.get("transfer-encoding") == "chunked":
            return Reply(status, headers, b"".join(self._chunks()))
        return Reply(status, headers, self._exactly(int(headers["content-length"])))

    def replies(self) -> list[Reply]:
        """All answers until the server closes the connection."""
        found = []
        while (reply := self.read_reply()) is not None:
            found.append(reply)
        return found

    def read_text(self, num_chars: int) -> str:
        """A chat stream's text, until there is so much of it; whatever has come is read, so that leaving is a FIN."""
        while len(text := stream_text(bytes(self._read))) < num_chars:
            assert self._more(), "the stream ended"
        return text

    def read_head(self) -> None:
        """Until an answer has begun; `read_reply` still reads all of it."""
        while b"\r\n\r\n" not in self._read:
            assert self._more(), "the connection ended"

    def read_bytes(self, count: int) -> None:
        """So many of them, or all of a stream."""
        while len(self._read) < count and b"[DONE]" not in self._read:
            assert self._more(), "the stream ended"

    def first_id(self) -> str:
        """The id of a stream's first chunk."""
        while b'"id":"' not in self._read or b'",' not in self._read.partition(b'"id":"')[2]:
            assert self._more(), "the stream ended"
        return self._read.partition(b'"id":"')[2].partition(b'"')[0].decode()

    def is_closed(self) -> bool:
        """Has the server's process given the connection up? What the kernel still has to say is not asked."""
        ours = (f":{self.server_port:04X}", f":{self.own_port:04X}")
        for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
            fields = line.split()
            if (fields[1][-5:], fields[2][-5:]) == ours:
                return fields[9] == "0"
        return True

    def _chunks(self) -> Iterator[bytes]:
        while True:
            size = self._up_to(b"\r\n")
            assert size is not None, "the answer was cut off"
            chunk = self._exactly(int(size, 16) + 2)
            if int(size, 16) == 0:
                return
            yield chunk[:-2]

    def _up_to(self, mark: bytes) -> bytes | None:
        while mark not in self._read:
            if not self._more():
                assert not self._read, f"the connection ended within {bytes(self._read[:200])!r}"
                return None
        found, _, rest = self._read.partition(mark)
        self._read = bytearray(rest)
        return bytes(found)

    def _exactly(self, count: int) -> bytes:
        while len(self._read) < count:
            assert self._more(), "the answer was cut off"
        found, self._read = bytes(self._read[:count]), self._read[count:]
        return found

    def _more(self) -> bool:
        try:
            data = self.socket.recv(1 << 16)
        except ConnectionResetError:
            return False
        self._read += data
        return bool(data)

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()


def stream_text(read: bytes) -> str:
    """The text of a chat stream's events; one that is not complete yet is left out."""
    text = ""
    for line in read.decode(errors="replace").split("\n"):
        if line.startswith("data: {") and line.endswith("}"):
            for choice in json.loads(line.removeprefix("data: ")).get("choices", []):
                text += choice["delta"].get("content", "")
    return text


@contextmanager
def production_loop() -> Iterator[None]:
    """Servers that are started in here run on uvloop, as those of `tokenmill serve` do where it is installed."""
    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    try:
        yield
    finally:
        asyncio.set_event_loop_policy(None)


# -- behind the server ------------------------------------------------------------------------------------------------


class Diary:
    """What becomes of each request in the engine, in the order they came."""

    def __init__(self) -> None:
        self.phases: defaultdict[str, list[Phase]] = defaultdict(list)
        self.reasons: dict[str, FinishReason | None] = {}
        self.num_tokens: dict[str, int] = {}
        """Prompt and output, when it ended."""
        self.num_computed = 0
        """Tokens of all steps."""
        self.num_steps = 0

    def note(self, event: Event) -> None:
        """On the engine's thread."""
        if isinstance(event, TickEvent):
            self.num_computed += event.plan.num_tokens
            self.num_steps += 1
        elif isinstance(event, RequestEvent):
            self.phases[event.request_id].append(event.phase)
            if event.phase is Phase.ENDED:
                self.reasons[event.request_id] = event.finish_reason
                self.num_tokens[event.request_id] = event.num_tokens

    @property
    def names(self) -> list[str]:
        return list(self.phases)


@contextmanager
def diary_of(server: Running) -> Iterator[Diary]:
    diary = Diary()
    end = server.core.events.subscribe(diary.note)
    try:
        yield diary
    finally:
        end()


class LoopLag:
    """How long a server's event loop has been kept from its callbacks, in processor time.

    A probe is due every 2 ms. It counts as late by what this process has computed since the last one, on any thread:
    the loop's own work, and what others did while they held the interpreter lock. Time in which the machine ran other
    processes is not counted; where other threads compute without the lock and the loop waits for a core, too much is.
    """

    PERIOD_S = 0.002

    def __init__(self) -> None:
        self.worst_s = 0.0
        self._last = 0.0, 0.0
        self._next: asyncio.TimerHandle | None = None

    async def start(self) -> None:
        self._last = time.monotonic(), time.process_time()
        self._tick()

    async def stop(self) -> None:
        assert self._next is not None
        self._next.cancel()
        self._tick()
        self._next.cancel()

    def _tick(self) -> None:
        now = time.monotonic(), time.process_time()
        late_s, computed_s = (one - before for one, before in zip(now, self._last, strict=True))
        self.worst_s = max(self.worst_s, min(late_s - self.PERIOD_S, computed_s))
        self._last = now
        self._next = asyncio.get_running_loop().call_later(self.PERIOD_S, self._tick)


@contextmanager
def lag_of(server: Running) -> Iterator[LoopLag]:
    lag = LoopLag()
    server.do(lag.start())
    try:
        yield lag
    finally:
        server.do(lag.stop())


class Hold:
    """The engine stands still in a step."""

    def __init__(self, server: Running, fault: Fault) -> None:
        self._server = server
        self._fault = fault

    def wait(self) -> None:
        """Until it does."""
        assert self._fault.stalled.wait(WAIT_S)

    def step(self) -> None:
        """Let it go on to the next step: it does what it was told meanwhile, and stands still again."""
        self.wait()
        held, self._fault = self._fault, Fault(FaultKind.STALL)
        self._server.core.core._executor.backend.faults.add(self._fault)  # its thread waits: nobody else looks at them
        held.release.set()
        self.wait()

    def release(self) -> None:
        """Let it go."""
        self._fault.release.set()


@contextmanager
def held(server: Running, after: int = 0) -> Iterator[Hold]:
    """The engine is to stand still in a step, after so many others; when this ends it is let go."""
    hold = Hold(server, server.inject(FaultKind.STALL, after=after))
    try:
        yield hold
    finally:
        hold.release()


def wait_for_inbox(server: Running, count: int = 1) -> None:
    """So many commands wait for an engine that stands still."""
    until(lambda: server.core._inbox.qsize() >= count)


def cancel_all(server: Running) -> None:
    """After a bug: whatever it has left running."""

    def cancel(core: Any) -> None:
        for name in list(core.scheduler.requests):
            core.cancel(name)

    server.core.call(cancel).result(WAIT_S)


def assert_no_leak(server: Running) -> None:
    """Nothing runs, and nothing but parked KV is held."""
    server.wait_until_idle()
    server.core.call(lambda core: core.check_integrity()).result(WAIT_S)
    stats = server.core.call(lambda core: core.stats()).result(WAIT_S)
    assert stats.kv.num_seqs == stats.num_parked
