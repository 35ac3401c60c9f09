"""N01 to N09: clients that leave, stall, drip, half-close, pipeline and lie. On real sockets, byte by byte.

The engine is held in a step where a test needs it to be: "in the queue", "in prefill", "after 3 tokens" are exact.
"""

from __future__ import annotations

import asyncio
import json
import logging
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import pytest

from tests.planting import PlantedBug, plant
from tests.server import wire
from tests.server.serving import KEY, WAIT_S, Reply, Running, raw_request, running
from tests.server.wire import (
    LONG,
    Wire,
    assert_no_leak,
    cancel_all,
    chat_body,
    chat_request,
    diary_of,
    held,
    production_loop,
    until,
    wait_for_inbox,
)
from tokenmill import AsyncLLM
from tokenmill.config import EngineConfig
from tokenmill.core import FakeConfig, FakeModel
from tokenmill.engine.events import Phase
from tokenmill.outputs import FinishReason
from tokenmill.server import calls, protocol, sse
from tokenmill.server.config import MIB, ServerConfig, hash_key

CHUNK = 64
"""Prompt tokens a step."""
SHORT_S = 0.4
"""The deadlines of the server that has short ones."""
GRACE_S = 2.0
"""Beyond a deadline, for a busy machine."""
LEAVING = ["FIN", "RST"]
STREAM = [True, False]
CLOSE = "Connection: close\r\n"


def make_server(**settings: Any) -> AbstractContextManager[Running]:
    """One request runs at a time, a chunk a step, and no comments fill a silence."""
    model = FakeModel(FakeConfig(vocab_size=258, max_context=32_768))
    engine = EngineConfig(max_num_seqs=1, max_queue=8, max_num_batched_tokens=CHUNK)
    llm = AsyncLLM(model, config=engine, kv_cache_tokens=65_536)
    return running(llm, ServerConfig(model_name="fake", key_hashes=(hash_key(KEY),), keep_alive_s=20.0, **settings))


@pytest.fixture(scope="module", params=["asyncio", "uvloop"])
def server(request: pytest.FixtureRequest) -> Iterator[Running]:
    """On both event loops: each tells of a client's end in its own way, and `tokenmill serve` takes uvloop."""
    with ExitStack() as stack:
        with production_loop() if request.param == "uvloop" else nullcontext():
            one = stack.enter_context(make_server(max_body_bytes=65_536))
        yield one


@pytest.fixture(scope="module")
def strict() -> Iterator[Running]:
    """Short deadlines for what comes in and for what goes out."""
    deadlines = {"header_timeout_s": SHORT_S, "body_timeout_s": SHORT_S, "send_timeout_s": SHORT_S}
    with make_server(**deadlines, max_body_bytes=2 * MIB) as one:
        yield one
        one.wait_until_idle()


def ask(server: Running, **changes: Any) -> str:
    """What a client that does nothing wrong is told."""
    answer = server.post("/v1/chat/completions", chat_body(**changes))
    assert answer.status == 200, answer.body
    return text_of(answer)


def text_of(reply: Reply | None) -> str:
    """The answer in it, whole or streamed to its end."""
    assert reply is not None
    assert reply.status == 200, reply.body
    if not reply.headers["content-type"].startswith("text/event-stream"):
        return str(reply.json()["choices"][0]["message"]["content"])
    choices = [event["choices"][0] for event in reply.events()]
    assert choices[-1]["finish_reason"] == "length"
    return "".join(choice["delta"].get("content", "") for choice in choices)


def errors_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


# -- N01, N02: clients that leave within the answer -------------------------------------------------------------------


def leave_after_3_tokens(server: Running, how: str, stream: bool) -> None:
    """The request ends with the step that runs; after a FIN in a stream, once its next tokens have found nobody."""
    with diary_of(server) as diary, held(server, after=3) as hold:
        client = Wire(server.port)
        client.send(chat_request(stream=stream, max_tokens=LONG))
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
        assert time.monotonic() - released_at < 1
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
        assert is_noticed.wait(WAIT_S)
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


# -- N06: what comes too slowly, or is too much ------------------------------------------------------------------------

HALF_A_HEAD = b"GET /health HTTP/1.1\r\nHost: te"
HALF_A_BODY = chat_request()[:-100]


@pytest.mark.parametrize("drips", [False, True])
@pytest.mark.parametrize("begun", [b"", HALF_A_HEAD, HALF_A_BODY], ids=["nothing", "head", "body"])
def test_n06_a_request_must_arrive_in_time(
    strict: Running, begun: bytes, drips: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Every byte of it, not only the next one."""
    with Wire(strict.port) as client:
        began = time.monotonic()
        client.send(begun)
        rest = iter(b" " * 1000 if begun is HALF_A_BODY else b"GET /" + b"a" * 1000)
        while drips and not select.select([client.socket], [], [], 0.05)[0]:  # a byte every 50 ms, until it is answered
            client.send_if_open(bytes([next(rest)]))
        replies = client.replies()
        assert SHORT_S * 0.9 < time.monotonic() - began < SHORT_S + GRACE_S
        assert len(replies) == (1 if begun or drips else 0)  # who has asked nothing is told nothing
        for reply in replies:
            assert (reply.status, reply.error["code"]) == (408, "request_timeout")
            assert reply.headers["connection"] == "close"
    strict.wait_until_idle()
    assert errors_in(caplog) == []


def test_n06_line_ends_do_not_keep_a_connection(strict: Running) -> None:
    """Before a request they are allowed; they are no request, and stop no clock."""
    with Wire(strict.port) as client:
        client.send(b"GET /health HTTP/1.1\r\nHost: test\r\n\r\n")
        reply = client.read_reply()
        assert reply is not None
        assert reply.status == 200
        client.send(b"\r\n")
        until(client.is_closed, within_s=SHORT_S + GRACE_S)


def test_n06_a_body_behind_its_answer_does_not_keep_a_connection(strict: Running) -> None:
    """A path that is not known is answered before the body is there."""
    request = raw_request("/v1/nothing", b"x" * 100)
    with Wire(strict.port) as client:
        client.send(request[:-100])
        reply = client.read_reply()
        assert reply is not None
        assert reply.status == 404
        client.send(request[-100:])
        until(client.is_closed, within_s=SHORT_S + GRACE_S)


TOO_MUCH = {
    "1 MB header": b"GET /health HTTP/1.1\r\nHost: test\r\nX: " + b"x" * MIB + b"\r\n\r\n",
    "1 MB header name": b"GET /health HTTP/1.1\r\nHost: test\r\n" + b"x" * MIB + b": x\r\n\r\n",
    "10k headers": b"GET /health HTTP/1.1\r\nHost: test\r\n" + b"X: y\r\n" * 10_000 + b"\r\n",
    "101 headers": b"GET /health HTTP/1.1\r\n" + b"X: y\r\n" * 101 + b"\r\n",
    "1 MB URL": b"GET /health?" + b"x" * MIB + b" HTTP/1.1\r\nHost: test\r\n\r\n",
    "1 MB of line ends": b"\r\n" * (MIB // 2) + b"GET /health HTTP/1.1\r\nHost: test\r\n\r\n",
    "10k trailers": b"POST /tokenize HTTP/1.1\r\nHost: test\r\nTransfer-Encoding: chunked\r\n"
    + f"Authorization: Bearer {KEY}\r\nContent-Type: application/json\r\n\r\n0\r\n".encode()
    + b"X: y\r\n" * 10_000
    + b"\r\n",
}


@pytest.mark.parametrize("what", TOO_MUCH)
def test_n06_a_head_that_is_too_large_is_refused(strict: Running, what: str) -> None:
    """With 431, unless what is still on its way makes the connection break before it is read."""
    with Wire(strict.port) as client:
        client.send_if_open(TOO_MUCH[what])
        assert [reply.status for reply in client.replies()] in ([431], [])
    assert strict.get("/health").status == 200


def test_n06_as_much_as_is_allowed_is_read(strict: Running) -> None:
    head = b"GET /health HTTP/1.1\r\nHost: test\r\n" + b"X: y\r\n" * 90 + b"Y: " + b"y" * 60_000 + b"\r\n"
    with Wire(strict.port) as client:
        client.send(head + CLOSE.encode() + b"\r\n")
        assert [reply.status for reply in client.replies()] == [200]


def test_n06_200_slow_clients_do_not_stop_health(strict: Running) -> None:
    slow = [Wire(strict.port) for _ in range(200)]
    try:
        for i, client in enumerate(slow):
            client.send((HALF_A_HEAD, HALF_A_BODY)[i % 2])
        for _ in range(5):
            began = time.monotonic()
            assert strict.get("/health").status == 200
            assert time.monotonic() - began < 1
        for client in slow:
            assert [reply.status for reply in client.replies()] == [408]
    finally:
        for client in slow:
            client.socket.close()
    strict.wait_until_idle()


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


# -- N08: several requests on one connection --------------------------------------------------------------------------


@pytest.mark.parametrize("then", ["keeps open", "half-closes"])
def test_n08_pipelined_requests_are_answered_in_order(server: Running, then: str) -> None:
    texts = ["one", "two", "three"]
    expected = [ask(server, content=text) for text in texts]
    assert len(set(expected)) == 3
    with Wire(server.port) as client:
        client.send(
            b"".join(
                chat_request(text, headers=f"x-request-id: {text}\r\n", stream=place == 1)
                for place, text in enumerate(texts)
            )
        )
        if then == "half-closes":
            client.half_close()
        for text, answer in zip(texts, expected, strict=True):
            reply = client.read_reply()
            assert text_of(reply) == answer
            assert reply is not None
            assert reply.headers["x-request-id"] == text
        if then == "half-closes":
            assert client.read_reply() is None


def test_n08_a_pipelining_client_that_leaves_takes_all_its_requests_along(server: Running) -> None:
    with diary_of(server) as diary, held(server, after=3) as hold:
        client = Wire(server.port)
        client.send(chat_request("one", max_tokens=LONG) + chat_request("two") + chat_request("three"))
        hold.wait()
        client.leave("RST")
        until(lambda: server.served.gate.num_inside == 0)
        hold.release()
        assert_no_leak(server)
        assert len(diary.names) <= 1, "requests ran for which nobody waits"


def test_n08_a_connection_is_used_again_after_refusals(server: Running) -> None:
    expected = ask(server)
    refused = {
        400: [chat_request(n=0), raw_request("/v1/chat/completions", b"{"), raw_request("/v1/chat/completions", b"")],
        401: [raw_request("/v1/chat/completions", chat_body(), key=None)],
        404: [raw_request("/v1/nothing", {"a": "b"}), chat_request(model="other")],
        405: [raw_request("/v1/chat/completions", {"a": "b"}, method="PUT")],
    }
    with Wire(server.port) as client:
        for status, requests in refused.items():
            for one in requests:
                client.send(one)
                reply = client.read_reply()
                assert reply is not None
                assert reply.status == status
                assert reply.error["message"]
                client.send(chat_request())
                assert text_of(client.read_reply()) == expected


@pytest.mark.parametrize("stream", STREAM)
def test_n08_a_connection_is_used_again_after_a_cancelled_request(server: Running, stream: bool) -> None:
    expected = ask(server)
    with Wire(server.port) as client:
        with held(server, after=3) as hold:
            client.send(chat_request(headers="x-request-id: gone\r\n", stream=stream, max_tokens=LONG))
            hold.wait()
            if stream:
                client.read_text(3)
            assert server.post("/v1/requests/gone/cancel", {}).status == 200
        reply = client.read_reply()
        assert reply is not None
        error = reply.events()[-1]["error"] if stream else reply.error
        assert (reply.status, error["code"]) == (200 if stream else 499, "cancelled")
        client.send(chat_request())
        assert text_of(client.read_reply()) == expected


NEXT = b"GET /v1/smuggled HTTP/1.1\r\nHost: test\r\n\r\n"
"""What must never be seen."""


def large(framing: str) -> bytes:
    """A body that is larger than it may be, and another request behind it."""
    body = json.dumps(chat_body("x" * 70_000)).encode()
    if framing == "length":
        return raw_request("/v1/chat/completions", body) + NEXT
    head = raw_request("/v1/chat/completions", b"").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
    return head + b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body) + NEXT


@pytest.mark.parametrize("framing", ["length", "chunked"])
def test_n08_the_connection_is_closed_after_413(
    server: Running, framing: str, paths: Callable[[Running], list[str]]
) -> None:
    with Wire(server.port) as client:
        client.send_if_open(large(framing))
        (reply,) = client.replies()
        assert reply.status == 413
        assert reply.headers["connection"] == "close"
        assert "65536 bytes" in reply.error["message"]
    assert paths(server) == ["/v1/chat/completions"]


def test_n08_an_upgrade_that_is_not_done_is_ignored(server: Running) -> None:
    """Java's client asks for HTTP/2 in this way with every request, and goes on without."""
    expected = ask(server)
    upgrade = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n"
    with Wire(server.port) as client:
        for _ in range(2):
            client.send(chat_request(headers=upgrade))
            assert text_of(client.read_reply()) == expected


# -- N09: requests that mean two things -------------------------------------------------------------------------------


@pytest.fixture
def paths(caplog: pytest.LogCaptureFixture) -> Callable[[Running], list[str]]:
    """The paths of the requests that came through to the application."""
    caplog.set_level(logging.DEBUG, "tokenmill.access")

    def seen(server: Running) -> list[str]:
        server.wait_until_idle()
        records = [record.args for record in caplog.records if record.name == "tokenmill.access"]
        return [str(args[1]) for args in records if isinstance(args, tuple)]

    return seen


def framed(headers: str, body: bytes, version: str = "1.1") -> bytes:
    head = f"POST /tokenize HTTP/{version}\r\nHost: test\r\nAuthorization: Bearer {KEY}\r\n"
    return (head + "Content-Type: application/json\r\n" + headers + "\r\n").encode("latin-1") + body


def chunked(body: bytes, header: str = "Transfer-Encoding: chunked\r\n") -> bytes:
    return framed(header, body + NEXT)


def sized(*lengths: str, body: bytes = b"hello") -> bytes:
    return framed("".join(f"Content-Length: {length}\r\n" for length in lengths), body + NEXT)


def plain(line: str, headers: bytes = b"Host: test\r\n") -> bytes:
    return line.encode("latin-1") + b"\r\n" + headers + b"\r\n" + NEXT


GOOD = b"3\r\nabc\r\n0\r\n\r\n"
SMUGGLING = {
    "length and chunked": framed("Content-Length: 6\r\nTransfer-Encoding: chunked\r\n", b"0\r\n\r\n" + NEXT),
    "chunked and length": framed("Transfer-Encoding: chunked\r\nContent-Length: 6\r\n", b"0\r\n\r\n" + NEXT),
    "chunked, identity": chunked(GOOD, "Transfer-Encoding: chunked, identity\r\n"),
    "identity": chunked(GOOD, "Transfer-Encoding: identity\r\n"),
    "xchunked": chunked(GOOD, "Transfer-Encoding: xchunked\r\n"),
    "vertical tab before chunked": chunked(GOOD, "Transfer-Encoding: \x0bchunked\r\n"),
    "space before the colon": chunked(GOOD, "Transfer-Encoding : chunked\r\n"),
    "chunked on a folded line": chunked(GOOD, "Transfer-Encoding:\r\n chunked\r\n"),
    "chunked and then identity": chunked(GOOD, "Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n"),
    "chunked twice": chunked(GOOD, "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n"),
    "lengths that differ": sized("5", "6"),
    "the same length twice": sized("5", "5"),
    "a list of lengths": sized("5, 5"),
    "length +5": sized("+5"),
    "length -1": sized("-1"),
    "length 0x5": sized("0x5"),
    "length 5 5": sized("5 5"),
    "length of nothing": sized(""),
    "length over 64 bits": sized("99999999999999999999"),
    "length on a folded line": framed("Content-Length: 5\r\n 0\r\n", b"hello" + NEXT),
    "chunk shorter than its size": chunked(b"5\r\nabc\r\n0\r\n\r\n"),
    "chunk longer than its size": chunked(b"2\r\nabc\r\n0\r\n\r\n"),
    "chunk size zz": chunked(b"zz\r\nabc\r\n0\r\n\r\n"),
    "chunk size -1": chunked(b"-1\r\nabc\r\n0\r\n\r\n"),
    "chunk size 0x3": chunked(b"0x3\r\nabc\r\n0\r\n\r\n"),
    "chunk size over 64 bits": chunked(b"FFFFFFFFFFFFFFFFF\r\nabc\r\n0\r\n\r\n"),
    "LF after a chunk's size": chunked(b"3\nabc\r\n0\r\n\r\n"),
    "LF after a chunk's extension": chunked(b"3;x\nabc\r\n0\r\n\r\n"),
    "LF after a chunk": chunked(b"3\r\nabc\n0\r\n\r\n"),
    "LF after the last chunk": chunked(b"3\r\nabc\r\n0\n\n"),
    "LF everywhere": b"GET /health HTTP/1.1\nHost: test\n\n" + NEXT,
    "LF after a header": plain("GET /health HTTP/1.1", b"Host: test\nX: y\r\n"),
    "a folded header": plain("GET /health HTTP/1.1", b"Host: test\r\nX: a\r\n b\r\n"),
    "a folded first header": plain("GET /health HTTP/1.1", b" Host: test\r\n"),
    "CR in a header": plain("GET /health HTTP/1.1", b"Host: test\r\nX: a\rY: b\r\n"),
    "NUL in a header": plain("GET /health HTTP/1.1", b"Host: test\r\nX: a\0b\r\n"),
    "no colon": plain("GET /health HTTP/1.1", b"Host: test\r\nX\r\n"),
    "no name": plain("GET /health HTTP/1.1", b"Host: test\r\n: y\r\n"),
    "space in a name": plain("GET /health HTTP/1.1", b"Host: test\r\nX Y: z\r\n"),
    "method in small letters": plain("get /health HTTP/1.1"),
    "unknown method": plain("FOO /health HTTP/1.1"),
    "method beyond ASCII": plain("GÉT /health HTTP/1.1"),
    "CONNECT": plain("CONNECT test:443 HTTP/1.1"),
    "version 1.2": plain("GET /health HTTP/1.2"),
    "version 1.1x": plain("GET /health HTTP/1.1x"),
    "version 2.0": plain("GET /health HTTP/2.0"),
    "version 9.9": plain("GET /health HTTP/9.9"),
    "no version": plain("GET /health", b""),
    "no HTTP": plain("GET /health HTTX/1.1"),
    "tabs": plain("GET\t/health\tHTTP/1.1"),
    "control character in the path": plain("GET /hea\x01lth HTTP/1.1"),
    "path beyond ASCII": plain("GET /h\xe9 HTTP/1.1"),
    "space in the path": plain("GET /hea lth HTTP/1.1"),
    "preface of HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(100)),
    "noise": b"\xff\xfe\x00hello\r\n\r\n",
}


@pytest.mark.parametrize("case", SMUGGLING)
def test_n09_what_is_no_valid_request_is_refused(
    strict: Running, case: str, paths: Callable[[Running], list[str]]
) -> None:
    """One refusal in OpenAI's words, and the connection is closed; nothing behind it is taken for a request."""
    with Wire(strict.port) as client:
        client.send(SMUGGLING[case])
        (reply,) = client.replies()
        assert (reply.status, reply.error["code"]) == (400, "invalid_http")
        assert reply.headers["connection"] == "close"
    assert set(paths(strict)) <= {"/tokenize"}


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (sized("500"), 408),
        (framed("Transfer-Encoding: chunked\r\n", b"3\r\nabc\r\n"), 408),
        (sized("2", body=b"{}{}"), 400),
    ],
    ids=["length too large", "last chunk missing", "length too small"],
)
def test_n09_a_length_is_taken_at_its_word(
    strict: Running, raw: bytes, status: int, paths: Callable[[Running], list[str]]
) -> None:
    """What is missing is waited for, and what is too much is no request."""
    with Wire(strict.port) as client:
        client.send(raw)
        assert [reply.status for reply in client.replies()] == [status]
    assert paths(strict) == ["/tokenize"]


def test_n09_an_answer_that_did_not_wait_for_the_body_is_the_only_one(strict: Running) -> None:
    """A path that is not known is answered at once; that the body never comes ends the connection, and is no answer."""
    with Wire(strict.port) as client:
        client.send(raw_request("/v1/nothing", b"x" * 100)[:-50])
        assert [reply.status for reply in client.replies()] == [404]


@pytest.mark.parametrize("path", ["/health", "/v1/nothing", "/v1/models"])
@pytest.mark.parametrize("key", [KEY, None])
def test_n09_a_body_is_never_a_request(
    server: Running, path: str, key: str | None, paths: Callable[[Running], list[str]]
) -> None:
    """Not even one that nobody reads."""
    with Wire(server.port) as client:
        client.send(raw_request(path, NEXT, key=key) + raw_request("/health/live", b"", method="GET", headers=CLOSE))
        first, last = client.replies()
        assert first.status >= 400
        assert last.json() == {"status": "live"}
    assert paths(server) == [path, "/health/live"]


# -- the suite can fail -----------------------------------------------------------------------------------------------

BUGS: list[tuple[PlantedBug, Callable[[Running], None]]] = [
    (
        PlantedBug("nobody listens while the answer is made", calls.Call, "_while_there", "{work, leaving}", "{work}"),
        lambda server: leave_after_3_tokens(server, "FIN", stream=False),
    ),
    (
        PlantedBug("nobody listens in the queue", calls.Call, "_while_there", "{work, leaving}", "{work}"),
        lambda server: leave_the_queue(server, "RST", stream=True),
    ),
    (
        PlantedBug(
            "not asked after tokenizing", calls.Call, "tokens", "await self._http.is_disconnected()", "not self.names"
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
        PlantedBug("sends without end", sse.EventStream, "_send", "self._send_timeout_s", "None"),
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


# -- what a body may never become --------------------------------------------------------------------------------------

SMUGGLED = b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"
UPGRADED = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n"
    b"Content-Length: %d\r\n\r\n" % len(SMUGGLED)
)


@pytest.mark.parametrize("how", ["in two pieces", "behind line ends", "behind another request"])
def test_n09_an_upgrade_does_not_make_a_body_a_request(strict: Running, how: str) -> None:
    """The parser skips the body of such a request; however it is hidden, it must not be taken for another one."""
    with Wire(strict.port) as client:
        if how == "in two pieces":
            cut = UPGRADED.index(b"Upgrade: h2c") + 3
            client.send(UPGRADED[:cut])
            client.send_if_open(UPGRADED[cut:] + SMUGGLED)
        elif how == "behind line ends":
            client.send(b"\r\n\r\n" + UPGRADED + SMUGGLED)
        else:
            client.send(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" + UPGRADED + SMUGGLED)
        bodies = [reply.body for reply in client.replies()]
    assert not any(b"live" in body for body in bodies), bodies


def test_n08_one_request_has_one_answer_though_it_came_before_the_body(strict: Running) -> None:
    """A key that is not known is refused at once; the body that follows is neither a head nor a reason to answer."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with Wire(strict.port) as client:
        client.send_if_open(head + b"Content-Length: 200000\r\n\r\n" + b" " * 200_000)
        assert [reply.status for reply in client.replies()] == [401]
