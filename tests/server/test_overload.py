"""O01, O02, O03: more than there is room for.

The engine is held in a step where a test needs it to be.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.server.queueing import (
    CHAT,
    CONTEXT,
    MAX_QUEUE,
    OTHER_KEY,
    STREAM,
    assert_overloaded,
    make_server,
    read,
)
from tests.server.serving import Running, raw_request
from tests.server.wire import (
    Wire,
    assert_no_leak,
    chat_body,
    chat_request,
    diary_of,
    held,
    wait_for_inbox,
)
from tokenmill.engine.events import Phase
from tokenmill.outputs import FinishReason


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with make_server(kv_cache_tokens=2 * CONTEXT) as one:
        yield one


# -- O01: too many at once --------------------------------------------------------------------------------------------


@pytest.mark.req("R37")
def test_o01_a_burst_beyond_the_queue_is_refused_and_the_rest_is_served(server: Running) -> None:
    """One runs and eight wait, exactly: the others are told at once, streams as well, before they begin."""
    with diary_of(server) as diary, held(server) as hold:
        clients = [Wire(server.port) for _ in range(60)]
        for i, client in enumerate(clients):
            client.send(chat_request(f"client {i}", stream=i % 2 == 0))
            if i == 0:
                hold.wait()
        wait_for_inbox(server, len(clients) - 1)
        hold.release()
        replies = [read(client) for client in clients]
        for client in clients:
            client.socket.close()
    served = [reply for reply in replies if reply.status == 200]
    assert len(served) == 1 + MAX_QUEUE
    for reply in served:
        is_stream = reply.headers["content-type"].startswith("text/event-stream")
        choice = (reply.events()[-1] if is_stream else reply.json())["choices"][0]
        assert choice["finish_reason"] == "length"
    for reply in replies:
        if reply.status != 200:
            assert_overloaded(reply)
    assert_no_leak(server)
    ends = list(diary.reasons.values())
    assert (ends.count(FinishReason.LENGTH), ends.count(FinishReason.OVERLOAD)) == (len(served), 60 - len(served))


@pytest.mark.req("R37", "G8")
def test_o01_a_key_that_floods_the_queue_is_refused_alone(server: Running) -> None:
    """One key has filled the queue: half of it is another key's, as soon as that one asks."""
    with held(server) as hold, ExitStack() as stack:
        flood = [stack.enter_context(Wire(server.port)) for _ in range(20)]
        others = [stack.enter_context(Wire(server.port)) for _ in range(MAX_QUEUE // 2)]
        for i, client in enumerate(flood):
            client.send(chat_request(f"flood {i}", stream=i % 2 == 0))
            if i == 0:
                hold.wait()
        wait_for_inbox(server, len(flood) - 1)
        for i, client in enumerate(others):
            client.send(raw_request(CHAT, chat_body(f"other {i}"), key=OTHER_KEY))
        wait_for_inbox(server, len(flood) - 1 + len(others))
        hold.release()
        assert [read(client).status for client in others] == [200] * len(others)
        replies = [read(client) for client in flood]
    refused = [reply for reply in replies if reply.status != 200]
    assert len(replies) - len(refused) == 1 + MAX_QUEUE // 2
    for reply in refused:
        assert_overloaded(reply)
    assert_no_leak(server)


def test_o01_a_burst_while_the_engine_runs(server: Running) -> None:
    clients = [Wire(server.port) for _ in range(200)]
    for i, client in enumerate(clients):
        client.send(chat_request(f"client {i}", stream=i % 2 == 0))
    replies = [read(client) for client in clients]
    for client in clients:
        client.socket.close()
    assert {reply.status for reply in replies} <= {200, 429}
    assert sum(reply.status == 200 for reply in replies) > MAX_QUEUE
    for reply in replies:
        if reply.status == 429:
            assert_overloaded(reply)


@pytest.mark.parametrize("stream", STREAM)
def test_o01_a_request_that_fits_in_part_is_refused_as_a_whole(server: Running, stream: bool) -> None:
    """Twelve prompts and eight places."""
    with diary_of(server) as diary, held(server) as hold, Wire(server.port) as first, Wire(server.port) as many:
        first.send(chat_request())
        hold.wait()
        prompts = [f"prompt {i}" for i in range(12)]
        many.send(raw_request("/v1/completions", {"model": "fake", "prompt": prompts, "stream": stream}))
        wait_for_inbox(server, len(prompts))
        hold.step()  # it looks into its inbox
        hold.step()  # it tells what it found there
        assert_overloaded(read(many))
        hold.release()
        assert read(first).status == 200
        assert_no_leak(server)
        assert [diary.phases[name] for name in diary.names[1:]] == [[Phase.QUEUED, Phase.ENDED]] * 12


# -- O02, O03: what can never run -------------------------------------------------------------------------------------


def assert_too_long(server: Running, path: str, body: dict[str, Any], longest: int) -> None:
    before = server.tick()
    for stream in STREAM if path != "/v1/embeddings" else [None]:
        reply = server.post(path, body if stream is None else {**body, "stream": stream})
        assert reply.status == 400
        assert reply.error["code"] == "context_length_exceeded"
        assert reply.error["message"].startswith(f"This model's maximum context length is {longest} tokens")
    assert server.tick() == before, f"{path} ran {str(body)[:60]}"


def test_o02_what_is_longer_than_the_context_is_refused(server: Running) -> None:
    long, fits = "x" * (CONTEXT + 1), "x" * (CONTEXT - 100)
    too_long: list[tuple[str, dict[str, Any]]] = [
        (CHAT, chat_body(long)),
        (CHAT, chat_body(long, max_tokens=None)),
        (CHAT, chat_body(fits, max_tokens=101)),
        (CHAT, chat_body(fits, max_tokens=None, max_completion_tokens=101)),
        (CHAT, chat_body(max_tokens=CONTEXT)),
        ("/v1/completions", {"model": "fake", "prompt": long}),
        ("/v1/completions", {"model": "fake", "prompt": "x" * CONTEXT}),
        ("/v1/completions", {"model": "fake", "prompt": ["x", long]}),
        ("/v1/completions", {"model": "fake", "prompt": fits, "max_tokens": 101}),
        ("/v1/completions", {"model": "fake", "prompt": [97] * CONTEXT, "max_tokens": 1}),
        ("/v1/responses", {"model": "fake", "input": long}),
        ("/v1/responses", {"model": "fake", "input": fits, "max_output_tokens": 101}),
        ("/v1/embeddings", {"model": "fake", "input": long}),
    ]
    for path, body in too_long:
        assert_too_long(server, path, body, CONTEXT)


@pytest.mark.parametrize("stream", STREAM)
def test_o02_a_length_that_is_not_given_is_what_is_left(server: Running, stream: bool) -> None:
    overhead = len("user: \nassistant: ")
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    same = {"model": "fake", "ignore_eos": True, "temperature": 0, **options}
    for path, body in (
        (CHAT, chat_body("x" * (CONTEXT - overhead - 5), **{**options, "max_tokens": None})),
        ("/v1/completions", {"prompt": "x" * (CONTEXT - 5), **same}),
        ("/v1/completions", {"prompt": "x" * (CONTEXT - 5), "max_tokens": 5, **same}),
    ):
        reply = server.post(path, body)
        assert reply.status == 200, reply.body
        usage = (reply.events()[-1] if stream else reply.json())["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (CONTEXT - 5, 5)


def test_o03_what_needs_more_kv_than_there_is_is_refused() -> None:
    """The model could, the memory can't; what just fits runs, several of it as well."""
    with make_server(kv_cache_tokens=256) as server:
        longest = server.llm.max_model_len
        assert 128 <= longest <= 256
        for path, body in (
            (CHAT, chat_body("x" * 256)),
            (CHAT, chat_body(max_tokens=longest)),
            ("/v1/completions", {"model": "fake", "prompt": "x" * longest}),
            ("/v1/embeddings", {"model": "fake", "input": "x" * (longest + 1)}),
        ):
            assert_too_long(server, path, body, longest)
        whole = server.post(CHAT, chat_body(max_tokens=None, n=4)).json()
        assert [choice["finish_reason"] for choice in whole["choices"]] == ["length"] * 4
        usage = whole["usage"]
        assert usage["completion_tokens"] == 4 * (longest - usage["prompt_tokens"])
        assert_no_leak(server)
