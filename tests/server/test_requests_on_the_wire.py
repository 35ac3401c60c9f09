"""N06, N08, N09, N10: requests that drip, are too much or too many, come in a row, or mean two things. Byte by byte."""

from __future__ import annotations

import json
import logging
import select
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.server.network import (
    CLOSE,
    GRACE_S,
    HALF_A_BODY,
    HALF_A_HEAD,
    SHORT_S,
    STREAM,
    ask,
    errors_in,
    server_on,
    strict_server,
    text_of,
)
from tests.server.serving import KEY, MOST_IDLE_S, Running, child, raw_request, request
from tests.server.wire import (
    LONG,
    Wire,
    assert_no_leak,
    chat_body,
    chat_request,
    diary_of,
    held,
    until,
)
from tokenmill.server.config import MIB
from tokenmill.server.protocol import RESERVED_FILES


@pytest.fixture(scope="module", params=["asyncio", "uvloop"])
def server(request: pytest.FixtureRequest) -> Iterator[Running]:
    with server_on(request.param) as one:
        yield one


@pytest.fixture(scope="module")
def strict() -> Iterator[Running]:
    with strict_server() as one:
        yield one


@pytest.fixture(scope="module")
def strict_and_soon_idle() -> Iterator[Running]:
    with strict_server(MOST_IDLE_S) as one:
        yield one


# -- N06: what comes too slowly, or is too much -----------------------------------------------------------------------


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
            assert time.monotonic() - began < GRACE_S
        for client in slow:
            assert [reply.status for reply in client.replies()] == [408]
    finally:
        for client in slow:
            client.socket.close()
    strict.wait_until_idle()


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
    until(lambda: paths(strict) == ["/tokenize"])  # the line is written after the answer


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


# -- what a body may never become -------------------------------------------------------------------------------------

SMUGGLED = b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"
UPGRADED = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n"
    b"Content-Length: %d\r\n\r\n" % len(SMUGGLED)
)


@pytest.mark.parametrize("how", ["in two pieces", "behind line ends", "behind another request"])
def test_n09_an_upgrade_does_not_make_a_body_a_request(strict_and_soon_idle: Running, how: str) -> None:
    """The parser skips the body of such a request; however it is hidden, it must not be taken for another one."""
    with Wire(strict_and_soon_idle.port) as client:
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


# -- N10: more connections than open files ----------------------------------------------------------------------------


def test_n10_connections_beyond_the_limit_on_open_files_are_refused(tmp_path: Path) -> None:
    """They are told so, with one line in the log; a stream goes on, and the server recovers."""
    sizes = ["--extra", "vocab_size=258", "--extra", "max_context=65536", "--kv-cache-tokens", "65536"]
    most = 64
    with (
        child(tmp_path / "log", "fake", *sizes, max_files=RESERVED_FILES + most) as server,
        Wire(server.port) as stream,
        ExitStack() as stack,
    ):
        stream.send(chat_request(stream=True, max_tokens=60_000))
        stream.read_text(1)
        clients = [stack.enter_context(Wire(server.port)) for _ in range(3 * most)]
        for client in clients[most - 1 :]:
            refused = client.read_reply()
            assert refused is not None
            assert (refused.status, refused.error["code"]) == (503, "too_many_connections")
        stream.read_text(len(stream.read_text(1)) + 1000)
        for client in clients:
            client.socket.close()
        until(lambda: request(server.port, "POST", "/v1/chat/completions", chat_body()).status == 200)
        stream.read_text(len(stream.read_text(1)) + 1000)
        assert server.said().count("further ones are refused") == 1
