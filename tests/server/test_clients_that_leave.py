"""N01 to N03, N05, N07: clients that leave, stall or send no more. On real sockets.

The engine is held in a step where a test needs it to be: "in the queue", "in prefill", "after 3 tokens" are exact.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.planting import PlantedBug, plant
from tests.server import wire
from tests.server.network import (
    CHUNK,
    GRACE_S,
    HALF_A_BODY,
    HALF_A_HEAD,
    LEAVING,
    SHORT_S,
    STREAM,
    ask,
    errors_in,
    make_server,
    server_on,
    strict_server,
    text_of,
)
from tests.server.serving import WAIT_S, Running, raw_request
from tests.server.wire import (
    LONG,
    Wire,
    assert_no_leak,
    cancel_all,
    chat_request,
    diary_of,
    held,
    until,
    wait_for_inbox,
)
from tokenmill.engine.events import Phase
from tokenmill.outputs import FinishReason
from tokenmill.server import protocol, sse, streaming


@pytest.fixture(scope="module", params=["asyncio", "uvloop"])
def server(request: pytest.FixtureRequest) -> Iterator[Running]:
    with server_on(request.param) as one:
        yield one


@pytest.fixture(scope="module")
def strict() -> Iterator[Running]:
    with strict_server() as one:
        yield one


# -- N01, N02: clients that leave within the answer -------------------------------------------------------------------


def leave_after_3_tokens(server: Running, how: str, stream: bool, **more: Any) -> None:
    """The request ends with the step that runs; after a FIN in a stream, once its next tokens have found nobody."""
    with diary_of(server) as diary, held(server, after=3) as hold:
        client = Wire(server.port)
        client.send(chat_request(stream=stream, max_tokens=LONG, **more))
        hold.wait()
        if stream:
            client.read_text(3)
        client.leave(how)
        is_heard_at_once = how == "RST" or not stream  # before the answer begins the server asks if anybody is there
        if is_heard_at_once:
            until(lambda: server.served.gate.num_inside == 0)
        released_at = time.monotonic()
        hold.release()
        assert_no_leak(server)
        assert time.monotonic() - released_at < GRACE_S
        (name,) = diary.names
        assert diary.phases[name] == [Phase.QUEUED, Phase.PREFILL, Phase.DECODE, Phase.ENDED]
        assert diary.reasons[name] is FinishReason.CANCELLED
        if is_heard_at_once:
            assert diary.num_steps == 4, "it went on after the step in which it was cancelled"


@pytest.mark.req("R35")
@pytest.mark.parametrize("how", LEAVING)
def test_n01_a_streaming_client_leaves_after_3_tokens(server: Running, how: str) -> None:
    leave_after_3_tokens(server, how, stream=True)


@pytest.mark.parametrize("how", LEAVING)
def test_n02_a_client_leaves_before_its_whole_answer(server: Running, how: str) -> None:
    leave_after_3_tokens(server, how, stream=False)


@pytest.mark.parametrize("stream", STREAM)
def test_n02_a_client_with_a_long_body_leaves(stream: bool) -> None:
    """While such a body comes in, uvicorn stops reading now and then: it must go on, or the end is never seen."""
    with make_server(max_body_bytes=2_000_000) as server:
        leave_after_3_tokens(server, "RST", stream=stream, user="x" * 1_000_000)


# -- N03: clients that leave before the first token -------------------------------------------------------------------


def leave_the_queue(server: Running, how: str, stream: bool) -> None:
    with diary_of(server) as diary, held(server, after=2) as hold, Wire(server.port) as first:
        first.send(chat_request(max_tokens=6))
        hold.wait()
        second = Wire(server.port)
        second.send(chat_request(f"queued {how} {stream}", stream=stream, max_tokens=LONG))
        wait_for_inbox(server)
        hold.step()
        name = diary.names[1]
        assert diary.phases[name] == [Phase.QUEUED]
        second.leave(how)
        until(lambda: server.served.gate.num_inside == 1)
        hold.release()
        assert len(text_of(first.read_reply())) == 6
        server.wait_until_idle()
        assert diary.phases[name] == [Phase.QUEUED, Phase.ENDED], "it ran"
        assert diary.reasons[name] is FinishReason.CANCELLED


def leave_the_tokenizer(server: Running, how: str, stream: bool) -> None:
    encode, lose = server.llm.chat_ids, protocol.GuardedProtocol.connection_lost
    has_begun, is_noticed, may_end = threading.Event(), threading.Event(), threading.Event()

    def slowly(*args: Any, **options: Any) -> list[int]:
        has_begun.set()
        assert may_end.wait(WAIT_S)
        return encode(*args, **options)

    def notice(self: protocol.GuardedProtocol, error: Exception | None) -> None:
        lose(self, error)
        if self.client is not None and self.client[1] == client.own_port:
            is_noticed.set()

    with diary_of(server) as diary, pytest.MonkeyPatch.context() as patch:
        patch.setattr(server.llm, "chat_ids", slowly)
        patch.setattr(protocol.GuardedProtocol, "connection_lost", notice)
        client = Wire(server.port)
        client.send(chat_request("x" * 20_000, stream=stream))
        assert has_begun.wait(WAIT_S)
        client.leave(how)
        try:
            assert is_noticed.wait(WAIT_S)
            until(lambda: server.served.gate.num_inside == 0)
        finally:
            may_end.set()
        server.wait_until_idle()
        assert diary.names == [], "it was queued"


def leave_in_prefill(server: Running, how: str, stream: bool) -> None:
    """Of 5 chunks the second one is computed when the client leaves."""
    with diary_of(server) as diary, held(server, after=1) as hold:
        client = Wire(server.port)
        content = f"{how} {stream} {time.monotonic_ns()} ".ljust(5 * CHUNK - len("user: \nassistant: "), "x")
        client.send(chat_request(content, stream=stream))
        hold.wait()
        client.leave(how)
        until(lambda: server.served.gate.num_inside == 0)
        hold.release()
        assert_no_leak(server)
        (name,) = diary.names
        assert diary.num_tokens[name] == 5 * CHUNK
        assert diary.reasons[name] is FinishReason.CANCELLED
        assert diary.num_computed == 2 * CHUNK, "it went on after the step in which it was cancelled"


MOMENTS = {"queued": leave_the_queue, "tokenizing": leave_the_tokenizer, "prefill": leave_in_prefill}


@pytest.mark.req("R35")
@pytest.mark.parametrize("stream", STREAM)
@pytest.mark.parametrize("how", LEAVING)
@pytest.mark.parametrize("moment", MOMENTS)
def test_n03_a_client_leaves_before_the_first_token(server: Running, moment: str, how: str, stream: bool) -> None:
    MOMENTS[moment](server, how, stream)


@pytest.mark.parametrize("how", LEAVING)
def test_n03_a_client_leaves_before_its_embedding(server: Running, how: str) -> None:
    with diary_of(server) as diary, held(server, after=1) as hold:
        client = Wire(server.port)
        text = f"{how} {time.monotonic_ns()} ".ljust(5 * CHUNK, "x")
        client.send(raw_request("/v1/embeddings", {"model": "fake", "input": text}))
        hold.wait()
        client.leave(how)
        until(lambda: server.served.gate.num_inside == 0)
        hold.release()
        assert_no_leak(server)
        assert list(diary.reasons.values()) == [FinishReason.CANCELLED]
        assert diary.num_computed == 2 * CHUNK


# -- N05: clients that do not read ------------------------------------------------------------------------------------


@pytest.fixture
def _small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel takes little of what the server sends: else a stall begins after megabytes only."""
    connect = protocol.GuardedProtocol.connection_made

    def with_small_buffer(self: protocol.GuardedProtocol, transport: asyncio.Transport) -> None:
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        connect(self, transport)

    monkeypatch.setattr(protocol.GuardedProtocol, "connection_made", with_small_buffer)


def stall(server: Running, reads: bool) -> None:
    """Four that take nothing, or a byte now and then; a fifth one does not notice."""
    big = chat_request(stream=True, max_tokens=100, logprobs=True, top_logprobs=20)
    slow = [Wire(server.port, receive_buffer=4096) for _ in range(4)]
    try:
        for client in slow:
            client.send(big)
        until(lambda: server.served.gate.num_inside == len(slow))
        assert len(ask(server)) == 8
        for client in slow:
            while reads and not client.is_closed():
                client.socket.recv(1)
            until(client.is_closed)
    finally:
        for client in slow:
            client.leave("RST")
    assert_no_leak(server)


@pytest.mark.usefixtures("_small_buffers")
@pytest.mark.parametrize("reads", [False, True])
def test_n05_a_client_that_takes_nothing_is_given_up(strict: Running, reads: bool) -> None:
    began = time.monotonic()
    stall(strict, reads)
    assert time.monotonic() - began < SHORT_S + 2 * GRACE_S


@pytest.mark.usefixtures("_small_buffers")
def test_n05_a_client_that_is_given_up_is_no_error_of_the_server(
    strict: Running, caplog: pytest.LogCaptureFixture
) -> None:
    stall(strict, reads=False)
    assert errors_in(caplog) == []


@pytest.mark.usefixtures("_small_buffers")
def test_n05_a_client_that_does_not_take_its_whole_answer_is_given_up(strict: Running) -> None:
    with Wire(strict.port, receive_buffer=4096) as client:
        client.send(raw_request("/tokenize", {"prompt": "x" * 200_000}))
        until(client.is_closed, within_s=SHORT_S + GRACE_S)


# -- N07: clients that send no more, but listen -----------------------------------------------------------------------


def half_close_and_read(server: Running, stream: bool, after: int | None) -> None:
    """After so many steps, or right behind the request; all of the answer comes."""
    expected = ask(server, max_tokens=12)
    with Wire(server.port) as client:
        if after is None:
            client.send(chat_request(stream=stream, max_tokens=12))
            client.half_close()
        else:
            with held(server, after=after) as hold:
                client.send(chat_request(stream=stream, max_tokens=12))
                hold.wait()
                client.half_close()
                if not stream or not after:
                    wait_for_interim(client)
        assert text_of(client.read_reply()) == expected
        assert set(client.interim) <= {100}
        assert client.read_reply() is None, "nothing more is to come, so the server closes"


def wait_for_interim(client: Wire) -> None:
    """The server has seen that nothing more comes: it asks if anybody is there."""
    read = b""
    while b" 100 " not in read:
        read = client.socket.recv(1 << 16, socket.MSG_PEEK)
        assert read, "the server took it for gone"


@pytest.mark.parametrize("stream", STREAM)
@pytest.mark.parametrize("after", [None, 0, 5], ids=["at once", "in prefill", "in decode"])
def test_n07_a_client_that_sends_no_more_is_answered(server: Running, after: int | None, stream: bool) -> None:
    half_close_and_read(server, stream, after)


def test_n07_old_clients_get_no_interim_answer(server: Running) -> None:
    expected = ask(server, max_tokens=4)
    with Wire(server.port) as client, held(server) as hold:
        client.send(chat_request(max_tokens=4).replace(b"HTTP/1.1", b"HTTP/1.0", 1))
        hold.wait()
        client.half_close()
        hold.release()
        assert text_of(client.read_reply()) == expected
        assert client.interim == []


def test_n07_half_a_request_and_no_more_is_given_up(server: Running) -> None:
    for part in (HALF_A_HEAD, HALF_A_BODY):
        with diary_of(server) as diary, Wire(server.port) as client:
            client.send(part)
            client.half_close()
            assert client.replies() == []
            server.wait_until_idle()
            assert diary.names == []


# -- the suite can fail -----------------------------------------------------------------------------------------------

BUGS: list[tuple[PlantedBug, Callable[[Running], None]]] = [
    (
        PlantedBug("nobody listens while the answer is made", streaming, "while_connected", "{doing, lost}", "{doing}"),
        lambda server: leave_after_3_tokens(server, "FIN", stream=False),
    ),
    (
        PlantedBug("nobody listens in the queue", sse.EventStream, "__call__", "lost.done()", "lost.cancelled()"),
        lambda server: leave_the_queue(server, "RST", stream=True),
    ),
    (
        PlantedBug(
            "not watched while tokenizing",
            streaming.Call,
            "do",
            "await while_connected(self.caller, self._work)",
            "await self._work",
        ),
        lambda server: leave_the_tokenizer(server, "RST", stream=True),
    ),
    (
        PlantedBug("half-closed is gone", protocol.GuardedProtocol, "eof_received", "return True", "return False"),
        lambda server: half_close_and_read(server, stream=True, after=0),
    ),
    (
        PlantedBug("nobody asks", protocol.GuardedProtocol, "eof_received", "self._look_for_client(0)", "pass"),
        lambda server: leave_in_prefill(server, "FIN", stream=False),
    ),
    (
        PlantedBug(
            "sends without end",
            sse.EventStream,
            "__call__",
            "is_stuck = self._is_sending or not await self._keep_alive(send)",
            "await asyncio.wait(waited_for, return_when=asyncio.FIRST_COMPLETED)",
        ),
        lambda server: stall(server, reads=False),
    ),
]


@pytest.mark.usefixtures("_small_buffers")
@pytest.mark.parametrize(("bug", "check"), BUGS, ids=[bug.name for bug, _ in BUGS])
def test_a_planted_bug_is_caught(
    strict: Running, bug: PlantedBug, check: Callable[[Running], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    check(strict)
    monkeypatch.setattr(wire, "PATIENCE_S", 2 * SHORT_S)
    plant(bug, monkeypatch)
    try:
        with pytest.raises(AssertionError):
            check(strict)
    finally:
        cancel_all(strict)
