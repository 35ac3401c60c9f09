"""O09, deadlines and cancelling, wherever a request is.

The engine is held in a step where a test needs it to be, and time passes only when told.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.server.queueing import (
    CHAT,
    CHUNK,
    CONTEXT,
    MAX_REQUEST_S,
    OTHER_KEY,
    QUEUE_TIMEOUT_S,
    STREAM,
    Clock,
    make_server,
    read,
)
from tests.server.serving import KEY, Reply, Running, raw_request
from tests.server.wire import (
    LONG,
    Hold,
    Wire,
    assert_no_leak,
    chat_body,
    chat_request,
    diary_of,
    held,
    until,
    wait_for_inbox,
)
from tokenmill.engine.events import Phase
from tokenmill.outputs import FinishReason
from tokenmill.session.session import SessionState
from tokenmill.text import workers


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with make_server(kv_cache_tokens=2 * CONTEXT) as one:
        yield one


@pytest.fixture(scope="module")
def talkative() -> Iterator[Running]:
    """Its streams begin before there is anything to say."""
    with make_server(kv_cache_tokens=2 * CONTEXT, keep_alive_s=0.02) as one:
        yield one
        one.wait_until_idle()


@pytest.fixture(scope="module")
def clock(server: Running) -> Clock:
    return Clock(server)


# -- where a request can be when it ends before its time --------------------------------------------------------------

NUMBERS = itertools.count()
"""So that no prompt is in the cache."""


def in_queue(server: Running, hold: Hold, client: Wire, send: Callable[..., None]) -> None:
    """Behind another one, which runs; that one's client leaves when the engine has been told."""
    first = Wire(server.port)
    first.send(chat_request(max_tokens=LONG))
    hold.wait()
    send("queued")
    wait_for_inbox(server)
    hold.step()
    first.leave("RST")
    until(lambda: server.served.gate.num_inside == 1)


def in_prefill(server: Running, hold: Hold, client: Wire, send: Callable[..., None]) -> None:
    """In the first of five chunks."""
    send(f"{next(NUMBERS)} ".ljust(5 * CHUNK - len("user: \nassistant: "), "x"))
    hold.wait()


def in_decode(server: Running, hold: Hold, client: Wire, send: Callable[..., None]) -> None:
    """Two tokens have come, the third is computed."""
    send("decoding")
    for _ in range(2):
        hold.step()


MOMENTS = {"in the queue": in_queue, "in prefill": in_prefill, "in decode": in_decode}
PHASES = {
    "in the queue": [Phase.QUEUED, Phase.ENDED],
    "in prefill": [Phase.QUEUED, Phase.PREFILL, Phase.ENDED],
    "in decode": [Phase.QUEUED, Phase.PREFILL, Phase.DECODE, Phase.ENDED],
}


def end_early(
    server: Running, moment: str, end: Callable[[Wire], None], stream: bool, headers: str = "", **fields: Any
) -> Reply:
    """Bring a request to that moment, end it, let the engine go on: what its client is told, and nothing is left."""
    with diary_of(server) as diary, held(server) as hold, Wire(server.port) as client:

        def send(content: str) -> None:
            client.send(chat_request(content, headers=headers, stream=stream, max_tokens=LONG, **fields))

        MOMENTS[moment](server, hold, client, send)
        name = diary.names[-1]
        end(client)
        hold.release()
        reply = read(client)
        assert_no_leak(server)
        assert diary.phases[name] == PHASES[moment]
        assert diary.num_steps <= 3, "it went on after the step in which it was ended"
    return reply


def assert_told(reply: Reply, code: str, status: int, *, stream: bool) -> None:
    """Once: as a status, or as the last event of a stream that has begun."""
    if reply.status == 200:
        assert stream
        *chunks, last = reply.events()
        assert last["error"]["code"] == code
        assert not any("error" in chunk or chunk["choices"][0]["finish_reason"] for chunk in chunks)
    else:
        assert (reply.status, reply.error["code"]) == (status, code)


# -- O09 and deadlines ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", STREAM)
def test_o09_who_waits_too_long_is_sent_away_and_never_runs(server: Running, clock: Clock, stream: bool) -> None:
    reply = end_early(server, "in the queue", lambda _: clock.wind(QUEUE_TIMEOUT_S + 1), stream)
    assert_told(reply, "timeout", 503, stream=stream)
    assert int(reply.headers["retry-after"]) >= 1
    assert "not started" in reply.error["message"]


def test_o09_who_runs_is_not_sent_away(server: Running, clock: Clock) -> None:
    with held(server, after=2) as hold, Wire(server.port) as client:
        client.send(chat_request())
        hold.wait()
        clock.wind(QUEUE_TIMEOUT_S + 1)
        hold.release()
        assert read(client).status == 200


DEADLINES: dict[str, dict[str, Any]] = {
    "header": {"headers": "X-Request-Timeout: 5\r\n"},
    "field": {"timeout_s": 5},
    "the shorter one": {"headers": "x-request-timeout: 500\r\n", "timeout_s": 5.0},
}


@pytest.mark.req("R35")
@pytest.mark.parametrize("stream", STREAM)
@pytest.mark.parametrize("deadline", DEADLINES)
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_request_ends_at_its_clients_deadline(
    server: Running, clock: Clock, moment: str, deadline: str, stream: bool
) -> None:
    """Without a token: come again (503). Else 504, or an event at the end of what was said."""
    reply = end_early(server, moment, lambda _: clock.wind(6), stream, **DEADLINES[deadline])
    assert_told(reply, "timeout", 504 if moment == "in decode" else 503, stream=stream)
    assert (reply.status == 200) == (stream and moment == "in decode")
    assert ("retry-after" in reply.headers) == (reply.status == 503)


@pytest.mark.req("G13", "R35")
@pytest.mark.parametrize("stream", STREAM)
def test_a_deadline_does_not_wait_for_the_engine(server: Running, stream: bool) -> None:
    """Its client is told while the engine stands still in a step; a turn that waits for its session, too."""
    session = server.post("/v1/sessions", {}).json()["id"]
    with held(server) as hold, Wire(server.port) as client, Wire(server.port) as first, Wire(server.port) as second:
        client.send(chat_request(stream=stream, max_tokens=LONG, timeout_s=0.3))
        assert_told(read(client), "timeout", 503, stream=stream)
        turn = {"input": "hi", "max_tokens": 3, "stream": stream}
        first.send(raw_request(f"/v1/sessions/{session}/generate", turn))
        until(lambda: server.served.models.loaded[0].sessions.get(session).state == SessionState.GENERATING.value)
        second.send(raw_request(f"/v1/sessions/{session}/generate", {**turn, "timeout_s": 0.3}))
        assert_told(read(second), "timeout", 503, stream=stream)
        hold.release()
        assert read(first).status == 200
    assert_no_leak(server)


@pytest.mark.parametrize("stream", STREAM)
def test_no_client_has_more_time_than_the_server_gives(server: Running, clock: Clock, stream: bool) -> None:
    long: dict[str, Any] = {"headers": "X-Request-Timeout: 100000\r\n", "timeout_s": 100_000}
    reply = end_early(server, "in decode", lambda _: clock.wind(MAX_REQUEST_S + 1), stream, **long)
    assert_told(reply, "timeout", 504, stream=stream)


@pytest.mark.req("R35")
def test_a_deadline_that_is_far_away_changes_nothing(server: Running, clock: Clock) -> None:
    with held(server, after=2) as hold, Wire(server.port) as client:
        client.send(chat_request(headers="X-Request-Timeout: 30\r\n", timeout_s=30))
        hold.wait()
        clock.wind(20)
        hold.release()
        assert read(client).status == 200


def test_an_embedding_has_a_deadline_too(server: Running, clock: Clock) -> None:
    with diary_of(server) as diary, held(server) as hold, Wire(server.port) as client:
        body = {"model": "fake", "input": f"{next(NUMBERS)} ".ljust(5 * CHUNK, "x")}
        client.send(raw_request("/v1/embeddings", body, headers="X-Request-Timeout: 5\r\n"))
        hold.wait()
        clock.wind(6)
        hold.release()
        assert_told(read(client), "timeout", 503, stream=False)
        assert_no_leak(server)
        assert diary.num_steps == 1


@pytest.mark.parametrize("given", ["", "soon", "0", "-1", "nan", "inf", "1e400", "5 s", "0x5"])
def test_a_deadline_that_is_none_is_refused(server: Running, given: str) -> None:
    before = server.tick()
    reply = server.post(CHAT, chat_body(), headers={"X-Request-Timeout": given})
    assert (reply.status, reply.error["param"]) == (400, "x-request-timeout")
    for field in (0, -1, "5", True, 1e400):
        reply = server.post(CHAT, chat_body(timeout_s=field) if field != 1e400 else b'{"timeout_s": 1e400}')
        assert reply.status == 400
    assert server.tick() == before


@pytest.mark.parametrize("by", ["deadline", "cancel"])
def test_a_stream_that_began_before_its_first_token_ends_with_an_event(talkative: Running, by: str) -> None:
    """The status has been sent: a comment came instead of a token."""
    clock = Clock(talkative)

    def end(client: Wire) -> None:
        client.read_head()
        if by == "deadline":
            clock.wind(6)
        else:
            assert talkative.post("/v1/requests/mine/cancel", {}).status == 200

    headers = "X-Request-Timeout: 5\r\nx-request-id: mine\r\n"
    for moment in ("in the queue", "in prefill"):
        reply = end_early(talkative, moment, end, stream=True, headers=headers)
        assert reply.status == 200
        assert len(reply.events()) == 1
        assert reply.events()[0]["error"]["code"] == ("timeout" if by == "deadline" else "cancelled")


# -- cancelling by id -------------------------------------------------------------------------------------------------

MINE = "x-request-id: mine\r\n"


def cancel(server: Running, name: str, key: str = KEY, prefix: str = "/v1") -> Reply:
    return server.post(f"{prefix}/requests/{name}/cancel", None, key=key)


@pytest.mark.parametrize("stream", STREAM)
@pytest.mark.parametrize("moment", MOMENTS)
def test_cancel_by_the_clients_own_id(server: Running, moment: str, stream: bool) -> None:
    """At once, whatever the engine is doing; with another key it is not even there. Afterwards it is gone."""
    prefix = "/v1" if stream else ""

    def end(client: Wire) -> None:
        assert cancel(server, "mine", key=OTHER_KEY).status == 404
        done = cancel(server, "mine", prefix=prefix)
        assert done.status == 200
        assert done.json() == {"id": "mine", "object": "request.cancelled", "cancelled": 1}
        until(lambda: cancel(server, "mine").status == 404)  # while the engine is held in its step

    reply = end_early(server, moment, end, stream, headers=MINE)
    assert_told(reply, "cancelled", 499, stream=stream)
    assert cancel(server, "mine").status == 404


def test_cancel_by_the_id_of_a_streams_chunks(server: Running) -> None:
    def end(client: Wire) -> None:
        name = client.first_id()
        assert name.startswith("chatcmpl-")
        assert cancel(server, name, key=OTHER_KEY).status == 404
        assert cancel(server, name).json()["cancelled"] == 1

    assert_told(end_early(server, "in decode", end, stream=True), "cancelled", 499, stream=True)


def test_cancel_with_another_key_changes_nothing(server: Running) -> None:
    with held(server, after=2) as hold, Wire(server.port) as client:
        client.send(chat_request(headers=MINE))
        hold.wait()
        refused = cancel(server, "mine", key=OTHER_KEY)
        assert (refused.status, refused.error["code"]) == (404, "request_not_found")
        assert cancel(server, "mine", key="nobody's").status == 401
        hold.release()
        assert read(client).status == 200


@pytest.mark.parametrize("name", ["unknown", "chatcmpl-" + "0" * 32, "x" * 300, "%00", "a%2Fb"])
def test_cancel_of_what_does_not_run_is_not_found(server: Running, name: str) -> None:
    assert cancel(server, name).status == 404


def test_cancel_ends_all_that_have_the_name(server: Running) -> None:
    with held(server) as hold, Wire(server.port) as one, Wire(server.port) as two, Wire(server.port) as other:
        one.send(chat_request(headers=MINE, max_tokens=LONG, n=3))
        hold.wait()
        two.send(chat_request("another", headers=MINE, stream=True, max_tokens=LONG))
        other.send(chat_request("a third", headers="x-request-id: yours\r\n"))
        until(lambda: len(server.served.calls) == 3)
        assert cancel(server, "mine").json()["cancelled"] == 2
        hold.release()
        assert (read(one).status, read(two).status, read(other).status) == (499, 499, 200)


def test_cancel_of_embeddings(server: Running) -> None:
    with diary_of(server) as diary, held(server) as hold, Wire(server.port) as client:
        texts = [f"{next(NUMBERS)} ".ljust(5 * CHUNK, "x") for _ in range(3)]
        client.send(raw_request("/v1/embeddings", {"model": "fake", "input": texts}, headers=MINE))
        hold.wait()
        wait_for_inbox(server, 2)
        assert cancel(server, "mine").status == 200
        assert_told(read(client), "cancelled", 499, stream=False)
        hold.release()
        assert_no_leak(server)
        assert list(diary.reasons.values()) == [FinishReason.CANCELLED] * 3
        assert diary.num_steps == 1


def test_cancel_while_a_text_is_tokenized(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    encode = server.llm.chat_ids

    def cancelled_meanwhile(*args: Any, **options: Any) -> list[int]:
        assert cancel(server, "mine").status == 200
        return encode(*args, **options)

    monkeypatch.setattr(workers.TextWorkers, "inline_bytes", 0)  # off the loop
    monkeypatch.setattr(server.llm, "chat_ids", cancelled_meanwhile)
    with diary_of(server) as diary:
        for stream in STREAM:
            reply = server.post(CHAT, chat_body(stream=stream), headers={"x-request-id": "mine"})
            assert (reply.status, reply.error["code"]) == (499, "cancelled")
        assert diary.names == []


@pytest.mark.parametrize("stream", STREAM)
def test_cancel_just_before_it_starts_is_not_lost(
    server: Running, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The generation is made, but has not been given to the engine: its reader is to run next."""
    open_stream = server.llm.open_stream

    def cancelled_before(generations: Any) -> Any:
        asyncio.get_running_loop().call_soon(lambda: [call.cancel() for call in server.served.calls])
        return open_stream(generations)

    monkeypatch.setattr(server.llm, "open_stream", cancelled_before)
    reply = server.post(CHAT, chat_body(stream=stream))
    assert (reply.status, reply.error["code"] if reply.status != 200 else None) == (499, "cancelled")
