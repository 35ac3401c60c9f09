"""Anthropic's Messages API, over real sockets; the official client's own checks are in tests/clients."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.server.serving import HI, KEY, Reply, Running, raw_request, request
from tests.server.splitting import PIECES, whole_and_split
from tests.server.wire import LETTERS, LONG, Wire, until
from tokenmill.server.api.anthropic import Blocks
from tokenmill.server.fields import FIELDS, Endpoint, Treatment

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["city", "days"],
}
TOOLS = [{"name": "get_weather", "description": "The weather of a city.", "input_schema": SCHEMA}]
ONE: dict[str, Any] = {
    "tools": TOOLS,
    "tool_choice": {"type": "tool", "name": "get_weather", "disable_parallel_tool_use": True},
    "max_tokens": 300,
    "seed": 1,
}
PLAIN: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "allowed_token_ids": LETTERS}


def ask(server: Running, path: str = MESSAGES, **changes: Any) -> Reply:
    return server.post(path, {"model": "fake", "messages": HI, "max_tokens": 8, **changes})


def events_of(reply: Reply) -> list[dict[str, Any]]:
    """The events of a stream: each is named by its type, and nothing comes after the last."""
    assert reply.headers["content-type"].startswith("text/event-stream")
    found = []
    *pieces, rest = reply.body.decode().split("\n\n")
    assert rest == ""
    for piece in pieces:
        name, data = piece.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def folded(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The content that the events tell, as Anthropic's client adds it up."""
    content: list[dict[str, Any]] = []
    texts: list[str] = []
    is_open = False
    for event in events:
        if event["type"] == "content_block_start":
            assert not is_open
            assert event["index"] == len(content)
            content.append(dict(event["content_block"]))
            texts.append("")
            is_open = True
        elif event["type"] == "content_block_delta":
            assert is_open
            assert event["index"] == len(content) - 1
            delta, block = event["delta"], content[-1]
            if delta["type"] == "input_json_delta":
                texts[-1] += delta["partial_json"]
            else:
                name = delta["type"].removesuffix("_delta")
                block[name] += delta[name]
        elif event["type"] == "content_block_stop":
            assert is_open
            is_open = False
            if content[-1]["type"] == "tool_use":
                content[-1]["input"] = json.loads(texts[-1] or "{}")
    assert not is_open
    return content


def error_of(reply: Reply, status: int, kind: str) -> str:
    assert reply.status == status, reply.body
    told = reply.json()
    assert set(told) == {"type", "error", "request_id"}
    assert (told["type"], told["error"]["type"]) == ("error", kind)
    assert told["request_id"] == reply.headers["request-id"] == reply.headers["x-request-id"]
    return str(told["error"]["message"])


# -- answers ----------------------------------------------------------------------------------------------------------


def test_a_message_has_anthropic_s_shape(server: Running) -> None:
    told = ask(server, **PLAIN).json()
    (block,) = told["content"]
    assert len(block["text"]) == 8
    assert told["id"].startswith("msg_")
    assert (told["type"], told["role"], told["model"]) == ("message", "assistant", "fake")
    assert (told["stop_reason"], told["stop_sequence"]) == ("max_tokens", None)
    assert told["usage"]["output_tokens"] == 8


def test_the_same_conversation_has_the_same_prompt_in_both_apis(server: Running) -> None:
    conversation: Any = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, *HI]
    asked = {**PLAIN, "cache_salt": "same prompt"}
    theirs = ask(server, system="be brief", messages=conversation, **asked).json()
    ours = server.chat(messages=[{"role": "system", "content": "be brief"}, *conversation], **asked).json()
    assert theirs["content"][0]["text"] == ours["choices"][0]["message"]["content"]
    used = ours["usage"]
    assert theirs["usage"]["input_tokens"] == used["prompt_tokens"]
    assert used["prompt_tokens_details"]["cached_tokens"] >= used["prompt_tokens"] - 1


def test_a_stream_has_anthropic_s_events_and_says_the_same(server: Running) -> None:
    whole = ask(server, **PLAIN).json()
    events = events_of(ask(server, **PLAIN, stream=True))
    kinds = [event["type"] for event in events]
    assert kinds[:3] == ["message_start", "content_block_start", "ping"]
    assert set(kinds[3:-3]) == {"content_block_delta"}
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert folded(events) == whole["content"]
    begun, ended = events[0]["message"], events[-2]
    assert (begun["content"], begun["stop_reason"], begun["usage"]["output_tokens"]) == ([], None, 0)
    assert ended["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert ended["usage"]["output_tokens"] == 8


def test_stop_sequences_end_it_and_are_named(server: Running) -> None:
    text = ask(server, **PLAIN).json()["content"][0]["text"]
    asked = {**PLAIN, "stop_sequences": ["0", "1", "2", "3", "4", text[4]]}
    told = ask(server, **asked).json()
    assert (told["stop_reason"], told["stop_sequence"]) == ("stop_sequence", text[4])
    assert told["content"][0]["text"] == text[: text.index(text[4])]
    events = events_of(ask(server, **asked, stream=True))
    assert events[-2]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": text[4]}
    assert folded(events) == told["content"]


def test_an_answer_that_fills_the_context_says_so(server: Running) -> None:
    prompt = [{"role": "user", "content": "a" * 4000}]
    count = ask(server, COUNT, messages=prompt).json()["input_tokens"]
    told = ask(server, messages=prompt, **{**PLAIN, "max_tokens": 4096 - count}).json()
    assert told["stop_reason"] == "model_context_window_exceeded"


def test_the_assistant_s_last_words_are_continued(server: Running) -> None:
    said = ask(server, **PLAIN).json()["content"][0]["text"]
    prefilled = [*HI, {"role": "assistant", "content": said[:3]}]
    assert ask(server, messages=prefilled, **{**PLAIN, "max_tokens": 5}).json()["content"][0]["text"] == said[3:]


def test_usage_counts_what_was_cached(server: Running) -> None:
    long = [{"role": "user", "content": [{"type": "text", "text": "x" * 600, "cache_control": {"type": "ephemeral"}}]}]
    asked = {**PLAIN, "messages": long, "cache_salt": "usage"}
    first = ask(server, **asked).json()["usage"]
    assert first["cache_read_input_tokens"] == first["input_tokens"] == 0
    assert first["cache_creation_input_tokens"] > 600
    events = events_of(ask(server, **asked, stream=True))
    for used in (events[0]["message"]["usage"], events[-2]["usage"]):
        assert used["cache_read_input_tokens"] >= first["cache_creation_input_tokens"] - 1
        counts = [used[name] for name in ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")]
        assert sum(counts) == first["cache_creation_input_tokens"]


def test_tokens_are_counted_without_an_answer(server: Running) -> None:
    asked: dict[str, Any] = {"system": [{"type": "text", "text": "be brief"}], "tools": TOOLS}
    before = server.tick()
    counted = server.post(COUNT, {"model": "fake", "messages": HI, **asked}).json()
    assert server.tick() == before
    used = ask(server, **asked, cache_salt="counted").json()["usage"]
    assert counted == {"input_tokens": used["input_tokens"]}
    assert server.post(COUNT, {"messages": [{"role": "user", "content": "a" * 9000}]}).json()["input_tokens"] > 9000


def test_what_differs_in_each_request_of_claude_code_stays_out_of_the_prompt(server: Running) -> None:
    header = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=abc12;"}
    text = {"type": "text", "text": "be brief"}
    with_header = server.post(COUNT, {"messages": HI, "system": [header, text]}).json()
    assert with_header == server.post(COUNT, {"messages": HI, "system": "be brief"}).json()


# -- tools ------------------------------------------------------------------------------------------------------------


def test_a_tool_is_called_and_its_result_goes_back(server: Running) -> None:
    told = ask(server, **ONE).json()
    (block,) = told["content"]
    assert told["stop_reason"] == "tool_use"
    assert (block["type"], block["name"]) == ("tool_use", "get_weather")
    assert set(block["input"]) == {"city", "days"}
    result = {"type": "tool_result", "tool_use_id": block["id"], "content": [{"type": "text", "text": "sunny"}]}
    answer = {"role": "user", "content": [result, {"type": "text", "text": "and tomorrow?"}]}
    again = ask(server, **{**ONE, "messages": [*HI, {"role": "assistant", "content": told["content"]}, answer]})
    assert again.json()["stop_reason"] == "tool_use"
    call = {"id": block["id"], "type": "function"}
    call["function"] = {"name": "get_weather", "arguments": json.dumps(block["input"])}
    same = [
        *HI,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": block["id"], "content": "sunny"},
        {"role": "user", "content": "and tomorrow?"},
    ]
    tools = [{"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}]
    tools[0]["function"] |= {"description": TOOLS[0]["description"]}  # type: ignore[operator]
    used = server.chat(messages=same, tools=tools, max_tokens=1).json()["usage"]
    count = again.json()["usage"]
    assert used["prompt_tokens"] == count["input_tokens"] + count["cache_read_input_tokens"]


def test_the_stream_of_a_call_says_the_same(server: Running) -> None:
    whole = ask(server, **ONE).json()["content"]
    events = events_of(ask(server, **ONE, stream=True))
    begun = next(event for event in events if event["type"] == "content_block_start")["content_block"]
    assert begun["input"] == {}
    (block,) = folded(events)
    assert {**block, "id": ""} == {**whole[0], "id": ""}
    assert events[-2]["delta"]["stop_reason"] == "tool_use"


@pytest.mark.parametrize(("choice", "is_called"), [("any", True), ("none", False)])
def test_whether_a_tool_is_called_is_the_client_s_choice(server: Running, choice: str, is_called: bool) -> None:
    told = ask(server, **{**ONE, "tool_choice": {"type": choice}, "max_tokens": 60}).json()
    assert any(block["type"] == "tool_use" for block in told["content"]) == is_called


def test_a_call_that_was_cut_off_has_the_input_that_is_complete(server: Running) -> None:
    told = ask(server, **{**ONE, "max_tokens": 60}).json()
    assert told["stop_reason"] == "max_tokens"
    assert isinstance(told["content"][0]["input"], dict)


# -- thinking and structured output -----------------------------------------------------------------------------------


def test_thinking_is_a_block_of_its_own_within_its_budget(thinking: Running) -> None:
    asked: dict[str, Any] = {"thinking": {"type": "enabled", "budget_tokens": 5}, "max_tokens": 120, "seed": 3}
    told = ask(thinking, **asked).json()
    thought, text = told["content"]
    assert (thought["type"], text["type"]) == ("thinking", "text")
    assert 0 < len(thought["thinking"]) <= 20
    assert thought["signature"]
    assert told["usage"]["output_tokens_details"]["thinking_tokens"] > 0
    events = events_of(ask(thinking, **asked, stream=True))
    same = folded(events)
    assert [{**block, "signature": ""} for block in same] == [{**block, "signature": ""} for block in told["content"]]
    conversation = [*HI, {"role": "assistant", "content": told["content"]}, *HI]
    assert ask(thinking, **asked, messages=conversation).status == 200


def test_thinking_is_off_unless_it_is_asked_for(thinking: Running) -> None:
    for asked in ({}, {"thinking": {"type": "disabled"}}):
        assert [block["type"] for block in ask(thinking, **asked, seed=3).json()["content"]] == ["text"]
    told = ask(thinking, thinking={"type": "adaptive"}, seed=3).json()
    assert [block["type"] for block in told["content"]] == ["thinking"]


def test_thinking_may_be_left_out_of_the_answer(thinking: Running) -> None:
    asked: dict[str, Any] = {"thinking": {"type": "enabled", "budget_tokens": 5, "display": "omitted"}}
    asked |= {"max_tokens": 120, "seed": 3}
    for content in (ask(thinking, **asked).json()["content"], folded(events_of(ask(thinking, **asked, stream=True)))):
        assert content[0]["thinking"] == ""
        assert content[0]["signature"]
        assert content[1]["text"]


@pytest.mark.parametrize("name", ["output_config", "output_format"])
def test_output_has_the_shape_of_its_schema(server: Running, name: str) -> None:
    form = {"type": "json_schema", "schema": {**SCHEMA, "additionalProperties": False}}
    asked = {name: {"format": form, "effort": "low"} if name == "output_config" else form}
    told = ask(server, **asked, max_tokens=200, seed=1).json()
    assert set(json.loads(told["content"][0]["text"])) == {"city", "days"}


# -- the stage by itself ----------------------------------------------------------------------------------------------


@given(PIECES, st.data())
def test_a_stream_says_the_same_at_every_split(pieces: list[tuple[str, str]], data: st.DataObject) -> None:
    whole, split = Blocks("s", shows_thinking=True), Blocks("s", shows_thinking=True)
    in_one, in_many = whole_and_split(pieces, data)
    for part in in_one:
        whole.add(part)
    whole.end()
    events = [event for part in in_many for event in split.add(part)] + split.end()
    assert split.content == whole.content
    assert folded(events) == whole.content


# -- errors and clients that leave ------------------------------------------------------------------------------------


def _said(role: str, **block: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": [block]}]}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "role"),
        ({"messages": [{"role": "user", "content": 5}]}, "content"),
        (_said("user", type="image", source={}), "image"),
        (_said("user", type="tool_use", id="a", name="f", input={}), "tool_use"),
        (_said("assistant", type="tool_result", tool_use_id="a"), "tool_result"),
        (_said("user", type="tool_result"), "tool_use_id"),
        (_said("user", type="redacted_thinking", data=""), "redacted_thinking"),
        (_said("user", type=["text"]), "content blocks"),
        ({"messages": [{"role": "user", "content": []}]}, "empty"),
        ({"messages": [{"role": "system", "content": []}, {"role": "user", "content": []}]}, "empty"),
        (_said("assistant", type="tool_use", id="a", name="f"), "input"),
        ({"system": 5}, "system"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search_20250305"),
        ({"tools": [{"name": "f", "input_schema": {"type": "string"}}]}, "tools"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "some"}}, "tool_choice"),
        ({"thinking": {"type": "enabled"}}, "budget_tokens"),
        ({"thinking": {"type": "much"}}, "thinking.type"),
        ({"output_config": {"effort": "huge"}}, "effort"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config"),
        ({"temperature": -1}, "temperature"),
        ({"stop_sequences": [""]}, "stop"),
    ],
)
def test_what_is_wrong_is_said_in_anthropic_s_shape(server: Running, changes: dict[str, Any], words: str) -> None:
    for stream in (False, True):
        assert words in error_of(ask(server, **changes, stream=stream), 400, "invalid_request_error")


def test_fields_that_would_change_the_answer_are_rejected_by_name(server: Running) -> None:
    for field in FIELDS:
        is_known = Endpoint.MESSAGES in field.where and field.treatment is Treatment.REJECTED
        if is_known and field.name in ("container", "mcp_servers", "n", "response_format", "echo", "functions"):
            message = error_of(ask(server, **{field.name: 7}), 400, "invalid_request_error")
            assert field.name in message
    ignored = {name: {"a": 1} for name in ("metadata", "service_tier", "cache_control", "context_management", "betas")}
    assert ask(server, **ignored).status == 200


def test_errors_of_the_gate_and_the_routes_have_the_same_shape(server: Running) -> None:
    body = {"messages": HI, "max_tokens": 2}
    error_of(server.post(MESSAGES, body, key="wrong"), 401, "authentication_error")
    error_of(server.post(MESSAGES, {**body, "model": "other"}), 404, "not_found_error")
    error_of(server.post(MESSAGES, "{"), 400, "invalid_request_error")
    error_of(server.post(MESSAGES, body, headers={"Content-Type": "text/plain"}), 415, "invalid_request_error")
    error_of(server.get("/v1/nothing", headers={"anthropic-version": "2023-06-01"}), 404, "not_found_error")
    long = [{"role": "user", "content": "a" * 5000}]
    assert "context" in error_of(ask(server, messages=long), 400, "invalid_request_error")


def test_the_key_may_be_in_anthropic_s_header(server: Running) -> None:
    headers = {"x-api-key": KEY, "anthropic-version": "2023-06-01", "anthropic-beta": "tools-2024-04-04"}
    body = {"messages": HI, "max_tokens": 2}
    assert request(server.port, "POST", MESSAGES, body, key=None, headers=headers).status == 200


def test_models_are_listed_in_anthropic_s_shape(server: Running) -> None:
    headers = {"anthropic-version": "2023-06-01"}
    told = server.get("/v1/models", headers=headers).json()
    assert (told["first_id"], told["last_id"], told["has_more"]) == ("fake", "fake", False)
    (model,) = told["data"]
    assert (model["type"], model["id"], model["max_input_tokens"]) == ("model", "fake", 4096)
    assert server.get("/v1/models/fake", headers=headers).json() == model


def test_a_failure_within_a_stream_is_an_event(server: Running) -> None:
    wire = Wire(server.port)
    asked = {"model": "fake", "messages": HI, "stream": True, **PLAIN, "max_tokens": LONG}
    wire.send(raw_request(MESSAGES, asked, headers="x-request-id: to-cancel\r\n"))
    until(lambda: len(server.served.calls) == 1)
    wire.read_head()
    assert server.post("/v1/requests/to-cancel/cancel", {}).status == 200
    reply = wire.read_reply()
    assert reply is not None
    last = events_of(reply)[-1]
    assert (last["type"], last["error"]["type"]) == ("error", "invalid_request_error")
    wire.leave("FIN")


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_cancels(server: Running, stream: bool) -> None:
    wire = Wire(server.port)
    wire.send(raw_request(MESSAGES, {"messages": HI, "stream": stream, **PLAIN, "max_tokens": LONG}))
    until(lambda: len(server.served.calls) == 1)
    wire.leave("RST")
    server.wait_until_idle()
