"""What real clients rely on in streams: framing, deltas, ends, errors. Each test is named by its rule."""

from __future__ import annotations

import http.client
import itertools
import json
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat import ChatCompletionChunk
from openai.types.completion import Completion

from tests.server.rules import (
    CHAT,
    COMPLETION,
    GENERATING,
    NAMES,
    accumulated,
    begin,
    bench_events,
    broken_stream,
    fake_server,
    http_chunks,
    line_events,
    strict,
    texts_of,
)
from tests.server.serving import HI, WAIT_S, Reply, Running
from tokenmill.backends.fake import FaultKind
from tokenmill.server import sse

LINE_ENDS = ("\u2028", "\u2029", "\x85")
FINISH_REASONS = {"stop", "length", "tool_calls", "content_filter", "function_call"}
WITH_USAGE = {"include_usage": True}
EOS = "256"


def stream(server: Running, what: tuple[str, dict[str, Any]], **changes: Any) -> Reply:
    path, body = what
    return server.post(path, {**body, "stream": True, **changes})


# -- framing ----------------------------------------------------------------------------------------------------------


@pytest.mark.req("R34")
@pytest.mark.parametrize("what", GENERATING, ids=NAMES)
def test_c01_lines_end_with_lf_and_events_with_an_empty_line(server: Running, what: tuple[str, Any]) -> None:
    body = stream(server, what).body
    assert b"\r" not in body
    *events, end = [one for one in body.decode("utf-8", errors="strict").split("\n\n") if not one.startswith(":")]
    assert end == ""
    assert events.pop() == "data: [DONE]"
    for event in events:
        *head, data = event.split("\n")
        assert data.startswith("data: {")
        assert isinstance(json.loads(data.removeprefix("data: ")), dict)
        assert all(line.startswith("event: ") for line in head)
        assert len(head) == (1 if what[0] == "/v1/responses" else 0)


@pytest.mark.fault("F04")
@pytest.mark.parametrize("what", [CHAT, COMPLETION], ids=NAMES[:2])
def test_c01_clients_that_split_differently_read_the_same(server: Running, what: tuple[str, Any]) -> None:
    path, asked = what
    chunks = http_chunks(server, path, {**asked, "max_tokens": 100})  # a busy server sends several tokens in an event
    body = b"".join(chunks)
    by_bench = bench_events(chunks)
    assert by_bench == line_events(body.decode().split("\n")) == line_events(body.decode().splitlines())
    assert by_bench == Reply(200, {"content-type": "text/event-stream"}, body).events()
    assert len(by_bench) > 2


@pytest.mark.parametrize("end", LINE_ENDS, ids=["U+2028", "U+2029", "U+0085"])
def test_c01_line_ends_of_unicode_stay_inside_a_line(server: Running, end: str) -> None:
    said = {"allowed_token_ids": list(end.encode()), "ignore_eos": True, "seed": 0, "max_tokens": 24}
    for reply in (stream(server, CHAT, **said), stream(server, COMPLETION, prompt=f"a{end}b", echo=True)):
        text = reply.body.decode()
        assert text.splitlines() == text.removesuffix("\n").split("\n")
        assert end in texts_of(line_events(text.splitlines()))[0]


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_c01_a_text_is_encoded_alone_as_it_is_with_all_around_it(text: str) -> None:
    def shape(said: str) -> dict[str, Any]:
        return {"model": sse.MARK, "choices": [{"delta": {"content": said}, "finish_reason": None}]}

    assert sse.TextEvent(shape).encode(text) == sse.event(shape(text))


def test_c02_only_a_stream_is_an_event_stream(server: Running) -> None:
    for what in GENERATING:
        assert stream(server, what).headers["content-type"].split(";")[0] == "text/event-stream"
        assert server.post(*what).headers["content-type"] == "application/json"


@pytest.mark.parametrize("what", GENERATING, ids=NAMES)
def test_c02_what_fails_before_the_first_token_is_json_with_a_status(what: tuple[str, Any]) -> None:
    with fake_server() as server:
        server.inject(FaultKind.NAN)
        replies = [
            (500, stream(server, what)),
            (400, stream(server, what, temperature=-1)),
            (404, stream(server, what, model="other")),
            (401, server.post(what[0], {**what[1], "stream": True}, key="wrong")),
        ]
    for status, reply in replies:
        assert reply.status == status
        assert reply.headers["content-type"] == "application/json"
        assert reply.error["message"]


@pytest.mark.parametrize("what", [CHAT, COMPLETION], ids=NAMES[:2])
def test_c03_an_error_in_a_stream_is_its_last_event(server: Running, what: tuple[str, Any]) -> None:
    *chunks, last = bench_events([broken_stream(server, what, max_tokens=200, ignore_eos=True)])
    assert set(last) == {"error"}
    assert set(last["error"]) == {"message", "type", "param", "code"}
    assert all(isinstance(last["error"][name], str) for name in ("message", "type", "code"))
    assert chunks
    assert all(choice["finish_reason"] is None for chunk in chunks for choice in chunk["choices"])


def test_c03_the_client_raises_what_the_stream_says(server: Running) -> None:
    hold = server.inject(FaultKind.STALL, after=4)
    server.inject(FaultKind.NAN, after=8)
    options: Any = {"model": "fake", "messages": HI, "max_tokens": 200, "extra_body": {"ignore_eos": True}}
    said = server.client.chat.completions.create(**options, stream=True)
    assert next(said).choices
    hold.release.set()
    with pytest.raises(openai.APIError, match="the request failed"):
        list(said)


@pytest.mark.parametrize("what", [CHAT, COMPLETION], ids=NAMES[:2])
def test_c03_a_cancelled_stream_ends_with_an_error_not_with_a_reason(server: Running, what: tuple[str, Any]) -> None:
    """A finish reason that clients don't know, or none at all, would look like a complete answer."""
    hold = server.inject(FaultKind.STALL, after=4)
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=WAIT_S)
    answer = begin(connection, what, "one-to-cancel", max_tokens=200, ignore_eos=True)
    assert hold.stalled.wait(WAIT_S)
    assert server.post("/v1/requests/one-to-cancel/cancel", {}).json()["cancelled"] == 1
    hold.release.set()
    *chunks, last = bench_events([answer.read()])
    connection.close()
    assert last["error"]["code"] == "cancelled"
    assert all(choice["finish_reason"] is None for chunk in chunks for choice in chunk["choices"])


# -- chunks of a chat -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{}, {"n": 3}, {"stream_options": WITH_USAGE}, {"logprobs": True}])
def test_c04_every_chunk_has_the_same_name(server: Running, changes: dict[str, Any]) -> None:
    chunks = [strict(ChatCompletionChunk, event) for event in stream(server, CHAT, **changes).events()]
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
    assert chunks[0].model == "fake"
    assert {choice.index for chunk in chunks for choice in chunk.choices} == set(range(changes.get("n", 1)))


@pytest.mark.parametrize("n", [1, 3])
def test_c05_the_role_is_said_once_and_first(server: Running, n: int) -> None:
    choices = [choice for event in stream(server, CHAT, n=n).events() for choice in event["choices"]]
    whole = server.post(CHAT[0], {**CHAT[1], "n": n}).json()["choices"]
    for index in range(n):
        deltas = [choice["delta"] for choice in choices if choice["index"] == index]
        assert deltas[0] == {"role": "assistant", "content": ""}
        assert not any("role" in delta for delta in deltas[1:])
        assert accumulated(deltas) == {"role": "assistant", "content": whole[index]["message"]["content"]}


def test_c06_deltas_are_texts_or_nothing(server: Running) -> None:
    _, *deltas = [choice["delta"] for event in stream(server, CHAT).events() for choice in event["choices"]]
    assert deltas
    for delta in deltas:
        assert set(delta) <= {"content"}
        assert all(isinstance(value, str) for value in delta.values())


@pytest.mark.parametrize("n", [3, 8])
def test_c08_choices_begin_in_their_order(server: Running, n: int) -> None:
    """openai's helper makes a list of the first chunk's choices, and appends those that it has not seen."""
    events = stream(server, CHAT, n=n).events()
    texts: list[tuple[int, str]] = []
    for event in events:
        for choice in event["choices"]:
            index, text = choice["index"], choice["delta"].get("content") or ""
            if index < len(texts):
                texts[index] = (texts[index][0], texts[index][1] + text)
            else:
                texts.append((index, text))
    assert [index for index, _ in texts] == list(range(n))
    assert events[0]["choices"][0]["index"] == 0
    whole = server.post(CHAT[0], {**CHAT[1], "n": n}).json()["choices"]
    assert [text for _, text in texts] == [choice["message"]["content"] for choice in whole]


def test_c08_the_stream_helper_keeps_choices_apart(server: Running) -> None:
    options: Any = {"model": "fake", "messages": HI, "n": 3, "seed": 3, "max_tokens": 200, "stop": list("aeio")}
    whole = server.client.chat.completions.create(**options)
    assert {choice.finish_reason for choice in whole.choices} == {"stop"}
    with server.client.chat.completions.stream(**options) as helper:
        final = helper.get_final_completion()
    assert [(choice.index, choice.message.content) for choice in final.choices] == [
        (choice.index, choice.message.content) for choice in whole.choices
    ]


@pytest.mark.parametrize(("reason", "bias"), [("stop", 6), ("length", -100)])
@pytest.mark.parametrize("what", [CHAT, COMPLETION], ids=NAMES[:2])
def test_c09_a_choice_finishes_once_and_says_nothing_more(
    server: Running, what: tuple[str, Any], reason: str, bias: int
) -> None:
    events = stream(server, what, n=3, min_tokens=4, max_tokens=30, logit_bias={EOS: bias}).events()
    choices = [choice for event in events for choice in event["choices"]]
    assert all(texts_of(events, 3))
    for index in range(3):
        *before, last = [choice["finish_reason"] for choice in choices if choice["index"] == index]
        assert set(before) <= {None}
        assert last == reason
        assert last in FINISH_REASONS


# -- usage ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", [CHAT, COMPLETION], ids=NAMES[:2])
@pytest.mark.parametrize("n", [1, 3])
def test_c10_usage_comes_last_and_only_if_asked_for(server: Running, what: tuple[str, Any], n: int) -> None:
    *chunks, last = stream(server, what, n=n, stream_options=WITH_USAGE).events()
    assert all("usage" in chunk and chunk["usage"] is None and len(chunk["choices"]) == 1 for chunk in chunks)
    assert last["choices"] == []
    cached = "prompt_tokens_details"  # the second of two equal prompts is found in the cache
    whole = server.post(what[0], {**what[1], "n": n}).json()["usage"]
    assert {**last["usage"], cached: None} == {**whole, cached: None}
    for options in (None, {"include_usage": False}):
        without = stream(server, what, n=n, stream_options=options).events()
        assert all(len(chunk["choices"]) == 1 and chunk.get("usage") is None for chunk in without)


@pytest.mark.parametrize("what", [CHAT, COMPLETION], ids=NAMES[:2])
def test_c10_usage_all_the_time(server: Running, what: tuple[str, Any]) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = stream(server, what, stream_options=options, ignore_eos=True).events()
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == 12
    assert all(event["usage"]["prompt_tokens"] == events[-1]["usage"]["prompt_tokens"] for event in events)


# -- silence ----------------------------------------------------------------------------------------------------------


@pytest.mark.fault("N11")
@pytest.mark.parametrize("after", [0, 4])
def test_c23_a_silent_stream_is_kept_alive_by_comments(server: Running, after: int) -> None:
    """Before the first token too, and then nothing else is sent: a first chunk is where clients stop the clock."""
    hold = server.inject(FaultKind.STALL, after=after)
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=WAIT_S)
    answer = begin(connection, CHAT, ignore_eos=True)
    assert answer.headers["Content-Type"].startswith("text/event-stream")
    read = b""
    while not (hold.stalled.is_set() and read.endswith(b": keep-alive\n\n")):
        read += answer.read1(4096)
    assert after or set(read.split(b"\n\n")) == {b": keep-alive", b""}
    hold.release.set()
    read += answer.read()
    connection.close()
    assert b": ping" not in read
    comments = [line for line in read.split(b"\n") if line.startswith(b":")]
    assert set(comments) == {b": keep-alive"}
    whole = server.post(CHAT[0], {**CHAT[1], "ignore_eos": True}).json()["choices"][0]["message"]["content"]
    assert texts_of(bench_events([read])) == texts_of(line_events(read.decode().splitlines())) == [whole]


# -- characters -------------------------------------------------------------------------------------------------------

FRAGMENTS = {"seed": 0, "max_tokens": 40, "ignore_eos": True}
EMOJI = {"allowed_token_ids": list("😀".encode()), "seed": 25, "max_tokens": 48, "ignore_eos": True}


@pytest.mark.parametrize("what", [CHAT, COMPLETION], ids=NAMES[:2])
@pytest.mark.parametrize("said", [FRAGMENTS, EMOJI], ids=["any bytes", "an emoji"])
def test_c26_a_character_is_never_cut(server: Running, what: tuple[str, Any], said: dict[str, Any]) -> None:
    chunks = http_chunks(server, what[0], {**what[1], **said})
    for one in [*chunks, *b"".join(chunks).split(b"\n\n")]:
        one.decode("utf-8", errors="strict")
    choice = server.post(what[0], {**what[1], **said}).json()["choices"][0]
    whole = choice["text"] if "text" in choice else choice["message"]["content"]
    assert texts_of(bench_events(chunks)) == [whole]
    assert "\ufffd" in whole  # bytes that are no character: each is shown once, and none is shown too early
    assert what is COMPLETION or said is not EMOJI or "😀" in whole


def test_c26_a_character_comes_with_its_last_token(server: Running) -> None:
    events = stream(server, CHAT, **EMOJI, return_token_ids=True).events()
    choices = [choice for event in events for choice in event["choices"]]
    (emoji,) = [choice for choice in choices if "😀" in choice["delta"].get("content", "")]
    tokens = list(itertools.chain.from_iterable(choice["token_ids"] for choice in choices))
    assert bytes(tokens).decode(errors="replace") == texts_of(events)[0]
    assert "😀".encode() in bytes(emoji["token_ids"])


# -- completions ------------------------------------------------------------------------------------------------------


def test_c27_chunks_of_a_completion(server: Running) -> None:
    events = stream(server, COMPLETION, prompt=["a", "b"], n=2, logprobs=2).events()
    for event in events:
        for choice in event["choices"]:
            assert set(choice) == {"index", "text", "logprobs", "finish_reason"}
            assert isinstance(choice["text"], str)
            choice["finish_reason"] = choice["finish_reason"] or "stop"  # the type knows no chunk before the last
        strict(Completion, event)
    assert {event["object"] for event in events} == {"text_completion"}
    assert len({(event["id"], event["created"]) for event in events}) == 1
    whole = server.post(COMPLETION[0], {**COMPLETION[1], "prompt": ["a", "b"], "n": 2}).json()["choices"]
    assert texts_of(events, 4) == [choice["text"] for choice in whole]
