"""What clients of the Responses API rely on: rule C28. Everything that is sent has the form of the client's types."""

from __future__ import annotations

import http.client
import json
from typing import Any, get_args

import pytest
from openai.types.responses import Response, ResponseStreamEvent

from tests.server.rules import RESPONSE, begin, broken_stream, strict, strict_json
from tests.server.serving import WAIT_S, Reply, Running
from tokenmill.backends.fake import FaultKind

PATH, BODY = RESPONSE
MORE = frozenset({"presence_penalty", "frequency_penalty", "store", "bytes"})
"""Fields that the Open Responses specification has and the client's types have not, or not everywhere."""
EVENTS = {
    get_args(kind.model_fields["type"].annotation)[0]: kind for kind in get_args(get_args(ResponseStreamEvent)[0])
}
ORDER = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
]


def ask(server: Running, **changes: Any) -> Any:
    reply = server.post(PATH, {**BODY, **changes})
    assert reply.status == 200, reply.body
    return Response.construct(**reply.json())


def stream(server: Running, **changes: Any) -> Reply:
    return server.post(PATH, {**BODY, "stream": True, **changes})


def stream_data(body: bytes) -> list[Any]:
    """The events of a stream, each with its name in a line of its own; [DONE] ends them."""
    *pieces, done, rest = [one for one in body.decode().split("\n\n") if not one.startswith(":")]
    assert (done, rest) == ("data: [DONE]", "")
    found = []
    for piece in pieces:
        name, data = piece.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def events_of(body: bytes) -> list[Any]:
    """The events as the client has them: it checks nothing."""
    return [EVENTS[event["type"]].construct(**event) for event in stream_data(body)]


def kinds_of(events: list[Any]) -> list[str]:
    """Their types in order, several in a row counted once."""
    kinds = [event.type for event in events]
    return [kind for kind, before in zip(kinds, [None, *kinds], strict=False) if kind != before]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"instructions": "be brief", "metadata": {"a": "b"}, "temperature": 0.5, "top_p": 0.9},
        {"top_logprobs": 2, "include": ["message.output_text.logprobs"]},
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}]},
        {"input": [{"type": "message", "role": "developer", "content": "be brief"}, {"role": "user", "content": "hi"}]},
        {"store": True, "truncation": "auto", "service_tier": "auto", "reasoning": {"effort": "low"}},
        {"store": False, "instructions": "be brief"},
    ],
)
def test_c28_a_response_has_the_form_of_its_type(server: Running, changes: dict[str, Any]) -> None:
    before = len(server.served.responses)
    reply = server.post(PATH, {**BODY, **changes})
    answer = strict(Response, strict_json(reply.body), MORE)
    (item,) = answer.output
    (part,) = item.content
    assert (item.type, item.role, part.type) == ("message", "assistant", "output_text")
    assert part.text == answer.output_text
    assert len(part.logprobs or []) == (answer.usage.output_tokens if "top_logprobs" in changes else 0)
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    for name in ("instructions", "metadata", "temperature", "top_p"):
        assert name not in changes or getattr(answer, name) == changes[name]
    assert answer.store is changes.get("store", True), "what is stored can be gone on from, and the answer says so"
    assert len(server.served.responses) == before + answer.store


@pytest.mark.parametrize("seed", [0, 15])
def test_c28_a_response_is_complete_or_says_why_not(server: Running, seed: int) -> None:
    answer = ask(server, seed=seed)
    if answer.usage.output_tokens == 12:
        assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert answer.completed_at is None
    else:
        assert (answer.status, answer.incomplete_details) == ("completed", None)
        assert answer.completed_at >= answer.created_at
    assert answer.output[0].status == answer.status
    assert answer.status == ("incomplete" if seed == 0 else "completed")


@pytest.mark.parametrize("changes", [{"seed": 0}, {"seed": 15}, {"top_logprobs": 2}])
def test_c28_events_have_the_form_of_their_types(server: Running, changes: dict[str, Any]) -> None:
    for event in stream_data(stream(server, **changes).body):
        strict(EVENTS[event["type"]], event, MORE)


@pytest.mark.parametrize("seed", [0, 15])
def test_c28_the_events_of_a_stream(server: Running, seed: int) -> None:
    whole = ask(server, seed=seed)
    events = events_of(stream(server, seed=seed).body)
    assert kinds_of(events) == [*ORDER, f"response.{whole.status}"]
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    *_, said, part, item, last = events
    assert text == said.text == part.part.text == item.item.content[0].text == last.response.output_text
    assert text == whole.output_text
    assert last.response.usage.output_tokens == whole.usage.output_tokens
    assert item.item == last.response.output[0]
    assert {event.item_id for event in events if hasattr(event, "item_id")} == {item.item.id}
    assert {event.response.id for event in events if hasattr(event, "response")} == {last.response.id}
    assert events[0].response.status == events[1].response.status == "in_progress"


def test_c28_logprobs_of_a_stream(server: Running) -> None:
    options = {"top_logprobs": 2, "seed": 0}
    events = events_of(stream(server, **options).body)
    deltas = [score for event in events if event.type == "response.output_text.delta" for score in event.logprobs]
    (done,) = [event for event in events if event.type == "response.output_text.done"]
    wanted = [(score.token, score.logprob) for score in ask(server, **options).output[0].content[0].logprobs]
    assert [(score.token, score.logprob) for score in deltas] == wanted
    assert [(score.token, score.logprob) for score in done.logprobs] == wanted


def test_c28_the_clients_helper_follows(server: Running) -> None:
    with server.client.responses.stream(**_options(15)) as helper:
        texts = [event.delta for event in helper if event.type == "response.output_text.delta"]
        final = helper.get_final_response()
    assert "".join(texts) == final.output_text == ask(server, seed=15).output_text


def test_c28_what_fails_in_a_stream_is_a_failed_response(server: Running) -> None:
    body = broken_stream(server, RESPONSE, max_output_tokens=200)
    assert kinds_of(events_of(body)) == [*ORDER[:5], "response.failed"]
    failed = events_of(body)[-1].response
    assert failed.status == "failed"
    assert failed.error.message == "the request failed"
    strict(EVENTS["response.failed"], stream_data(body)[-1], MORE)


def test_c28_a_stream_that_fails_before_its_first_token_is_created_first(server: Running) -> None:
    """Its status was sent to keep the connection alive. The client's helper takes no other event as the first."""
    hold = server.inject(FaultKind.STALL)
    server.inject(FaultKind.NAN)
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=WAIT_S)
    answer = begin(connection, RESPONSE)  # returns with the first comment
    hold.release.set()
    kinds = kinds_of(events_of(answer.read()))
    connection.close()
    assert (kinds[0], kinds[-1]) == ("response.created", "response.failed")


@pytest.mark.parametrize(
    ("change", "status", "param"),
    [
        ({"previous_response_id": "resp_1"}, 400, "previous_response_id"),
        ({"model": "other"}, 404, "model"),
        ({"background": True, "store": False}, 400, "background"),
        ({"conversation": "conv_1"}, 404, "conversation"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, 400, "text"),
        ({"input": []}, 400, "input"),
        ({"input": [{"type": "function_call_output", "call_id": "a", "output": "b"}]}, 400, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, 400, "input"),
        ({"max_output_tokens": 0}, 400, "max_output_tokens"),
        ({"temperature": -1}, 400, "temperature"),
    ],
)
def test_c28_what_is_not_offered_is_refused_before_it_runs(
    server: Running, change: dict[str, Any], status: int, param: str
) -> None:
    before = server.tick()
    for reply in (server.post(PATH, {**BODY, **change}), stream(server, **change)):
        assert reply.status == status, reply.body
        assert reply.error["param"] == param
    assert server.tick() == before


def _options(seed: int) -> Any:
    return {"model": "fake", "input": "hi", "max_output_tokens": 12, "extra_body": {"seed": seed}}
