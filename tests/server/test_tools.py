"""Tool calls and reasoning over HTTP: chat completions, responses and sessions."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai import omit
from openai.lib.streaming.chat._completions import ChatCompletionStreamState
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.chat import ChatCompletionChunk
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from tests.server.conftest import THINKS, serving_template
from tests.server.conversing import Conversation, events_in
from tests.server.rules import assert_error
from tests.server.serving import HI, Reply, Running, request
from tests.server.splitting import PIECES, whole_and_split
from tests.server.wire import diary_of
from tokenmill.outputs import CompletionOutput, OutputDelta, RequestOutput, TurnPart, Usage
from tokenmill.params import SamplingParams
from tokenmill.pipeline.output import Generation
from tokenmill.server.api.chat_completions import ChatWriter
from tokenmill.server.api.items import as_items, as_messages
from tokenmill.server.api.responses import ResponseWriter
from tokenmill.server.requests import ChatRequest, ResponsesRequest
from tokenmill.server.streaming import folded
from tokenmill.session.records import MEDIA_TYPE

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["city", "days"],
}
WEATHER = {"name": "get_weather", "description": "The weather of a city.", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": WEATHER}, {"type": "function", "function": {"name": "ping"}}]
FLAT = [{"type": "function", **WEATHER}]
NAMED = {"type": "function", "function": {"name": "get_weather"}}
ONE: dict[str, Any] = {"tools": TOOLS, "tool_choice": NAMED, "parallel_tool_calls": False, "max_tokens": 300, "seed": 1}


def check_arguments(arguments: str) -> None:
    given = json.loads(arguments)
    assert set(given) == {"city", "days"}
    assert given["city"] in ("Rome", "Oslo")
    assert 0 <= given["days"] <= 99


def test_a_named_function_is_called(server: Running) -> None:
    choice = server.chat(**ONE).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert message["content"] is None
    (call,) = message["tool_calls"]
    assert (call["type"], call["function"]["name"]) == ("function", "get_weather")
    check_arguments(call["function"]["arguments"])


def test_a_named_function_is_called_once_by_default(server: Running) -> None:
    for seed in range(3):
        choice = server.chat(tools=TOOLS, tool_choice=NAMED, max_tokens=300, seed=seed).json()["choices"][0]
        assert (choice["finish_reason"], len(choice["message"]["tool_calls"])) == ("tool_calls", 1)


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_stream_tells_the_same_in_openai_s_order(server: Running, choice: Any) -> None:
    asked = {**ONE, "tool_choice": choice}
    whole = server.chat(**asked).json()["choices"][0]["message"]["tool_calls"]
    events = server.chat(**asked, stream=True).events()
    deltas = [event["choices"][0]["delta"] for event in events if event["choices"]]
    assert deltas[0] == {"role": "assistant", "content": ""}
    first, *rest = [one for delta in deltas for one in delta.get("tool_calls", ())]
    assert first["function"] == {"name": whole[0]["function"]["name"], "arguments": ""}
    assert (first["index"], first["type"]) == (0, "function")
    assert first["id"]
    assert all(set(one) == {"index", "function"} and set(one["function"]) == {"arguments"} for one in rest)
    assert "".join(one["function"]["arguments"] for one in rest) == whole[0]["function"]["arguments"]
    assert [event["choices"][0]["finish_reason"] for event in events][-1] == "tool_calls"
    assert not any(delta.get("content") for delta in deltas)


def test_each_choice_has_its_own_calls(server: Running) -> None:
    choices = server.chat(**{**ONE, "n": 3}).json()["choices"]
    ids = [choice["message"]["tool_calls"][0]["id"] for choice in choices]
    assert len(set(ids)) == 3
    for choice in choices:
        check_arguments(choice["message"]["tool_calls"][0]["function"]["arguments"])


def test_log_probabilities_cover_every_token(server: Running) -> None:
    asked = {**ONE, "logprobs": True, "return_token_ids": True}
    whole = server.chat(**asked).json()["choices"][0]
    events = server.chat(**asked, stream=True).events()
    streamed = [event["choices"][0] for event in events if event["choices"]]
    ids = [token for choice in streamed for token in choice.get("token_ids") or ()]
    scores = [one for choice in streamed if choice["logprobs"] for one in choice["logprobs"]["content"]]
    assert ids == whole["token_ids"]
    assert len(scores) == len(whole["logprobs"]["content"]) == len(ids)


def test_tools_that_may_be_called_leave_text_as_it_is(server: Running) -> None:
    message = server.chat(tools=TOOLS, seed=1).json()["choices"][0]["message"]
    assert set(message) == {"role", "content", "refusal"}
    assert message["content"]


def test_tools_that_must_not_be_called_are_not_shown_to_the_model(server: Running) -> None:
    told = server.chat(tools=TOOLS, tool_choice="none", seed=1).json()
    plain = server.chat(seed=1).json()
    assert told["choices"] == plain["choices"]
    assert told["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]


def test_results_go_back_to_the_model(server: Running) -> None:
    message = server.chat(**ONE).json()["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "sunny"}
    again = server.chat(**{**ONE, "messages": [*HI, message, result]})
    assert again.json()["choices"][0]["finish_reason"] == "tool_calls"


def _past(**function: Any) -> dict[str, Any]:
    call = {"id": "a", "type": "function", "function": function}
    return {"messages": [*HI, {"role": "assistant", "content": None, "tool_calls": [call]}], "tools": TOOLS}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": NAMED}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": [*TOOLS, TOOLS[0]]}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}]}, "tools"),
        ({"tools": [5]}, "tools"),
        ({"tools": "all"}, "tools"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"not": {"type": "null"}}}}]},
            "tools",
        ),
        (_past(name="f", arguments="{"), "messages"),
        (_past(name="f", arguments="[1]"), "messages"),
        (_past(name=5, arguments="{}"), "messages"),
        ({"messages": [*HI, {"role": "assistant", "tool_calls": "x"}]}, "messages"),
        ({"messages": [*HI, {"role": "tool", "content": "x"}]}, "messages"),
    ],
)
def test_what_can_t_be_is_rejected(server: Running, body: dict[str, Any], param: str) -> None:
    assert_error(server.chat(**body), 400, param)


def test_a_call_that_is_cut_leaves_no_markup_in_the_content(server: Running) -> None:
    for max_tokens in range(1, 60, 7):
        choice = server.chat(**{**ONE, "max_tokens": max_tokens}).json()["choices"][0]
        assert (choice["finish_reason"], choice["message"]["content"] or "") == ("length", "")


def test_structured_output_applies_to_the_answer_after_the_thinking(thinking: Running) -> None:
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": True}}
    asked = {"response_format": form, "thinking_token_budget": 4, "max_tokens": 100, "seed": 1}
    message = thinking.chat(**asked).json()["choices"][0]["message"]
    assert message["reasoning_content"]
    assert set(json.loads(message["content"])) == {"ok"}


def test_an_answer_with_tools_is_a_call_or_what_the_format_says(server: Running) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": ["yes", "no"]}}}
    found = set()
    for seed in range(8):
        asked = {"tools": TOOLS, "response_format": form, "max_tokens": 300, "seed": seed}
        choice = server.chat(**asked).json()["choices"][0]
        found.add(choice["finish_reason"])
        if choice["finish_reason"] == "stop":
            assert json.loads(choice["message"]["content"]) in ("yes", "no")
    assert found == {"stop", "tool_calls"}


# -- responses --------------------------------------------------------------------------------------------------------


def test_responses_have_function_call_items(server: Running) -> None:
    asked: dict[str, Any] = {"input": "hi", "tools": FLAT, "tool_choice": "required", "max_output_tokens": 300}
    asked |= {"parallel_tool_calls": False, "seed": 1}
    (item,) = server.post(RESPONSES, asked).json()["output"]
    assert (item["type"], item["name"], item["status"]) == ("function_call", "get_weather", "completed")
    check_arguments(item["arguments"])
    events = [event for event in server.post(RESPONSES, {**asked, "stream": True}).events() if "type" in event]
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[:3] == ["created", "in_progress", "output_item.added"]
    assert set(kinds[3:-3]) == {"function_call_arguments.delta"}
    assert kinds[-3:] == ["function_call_arguments.done", "output_item.done", "completed"]
    assert "".join(event["delta"] for event in events if "delta" in event) == item["arguments"]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))


@pytest.mark.parametrize("kind", ["custom", "web_search", "mcp"])
@pytest.mark.parametrize("path", [CHAT, RESPONSES, f"{RESPONSES}/input_tokens"])
def test_tools_that_are_no_functions_are_refused_by_their_type(server: Running, path: str, kind: str) -> None:
    """A custom tool has a name as a function has, but it is called with a text of its own."""
    tools = [{"type": kind, "name": "apply_patch"}]
    said = {"messages": HI} if path == CHAT else {"input": "hi"}
    reply = server.post(path, {**said, "tools": tools})
    assert_error(reply, 400, "tools")
    assert f"tools of type {kind!r} are not supported; supported: function" in reply.error["message"]


def test_a_response_goes_on_after_the_result_of_a_call(server: Running) -> None:
    asked: dict[str, Any] = {"tools": FLAT, "tool_choice": "required", "parallel_tool_calls": False, "seed": 1}
    first = server.post(RESPONSES, {**asked, "input": "hi"}).json()
    call = first["output"][0]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"}
    second = server.post(RESPONSES, {**asked, "input": [result], "previous_response_id": first["id"]}).json()
    assert second["output"][0]["type"] == "function_call"
    usage = second["usage"]
    known = first["usage"]["total_tokens"]
    assert usage["input_tokens"] > known - 1
    assert usage["input_tokens_details"]["cached_tokens"] >= known - 1
    alone = [{"role": "user", "content": "hi"}, {**call, "type": "function_call"}, result]
    third = server.post(RESPONSES, {**asked, "input": alone, "store": False}).json()
    assert third["usage"]["input_tokens"] == usage["input_tokens"] - 1, "this template writes no end of turn"


def test_a_result_needs_its_call_in_what_was_said_before(server: Running) -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "ping", "arguments": "{}"}
    said = [{"role": "user", "content": "hi"}, call]
    other = {"type": "function_call_output", "call_id": "c2", "output": "sunny"}
    talk = server.post("/v1/conversations", {"items": said}).json()["id"]
    first = server.post(RESPONSES, {"input": [*said, {**other, "call_id": "c1"}], "max_output_tokens": 4}).json()["id"]
    for before in ({}, {"previous_response_id": first}, {"conversation": talk}):
        reply = server.post(RESPONSES, {**before, "input": [other], "max_output_tokens": 4})
        assert_error(reply, 400, "input")
        assert reply.error["message"] == "no function call found for the output with call_id 'c2'"
    found = {"input": [{**other, "call_id": "c1"}], "max_output_tokens": 4}
    assert server.post(RESPONSES, {**found, "conversation": talk}).status == 200
    assert server.post(RESPONSES, {**found, "previous_response_id": first}).status == 200


# -- sessions ---------------------------------------------------------------------------------------------------------


def _session(server: Running) -> Conversation:
    reply = server.post("/v1/sessions", {"tools": TOOLS, "temperature": 0})
    assert reply.status == 201, reply.body
    return Conversation(server, reply.json()["id"])


def _round(talk: Conversation, given: Any) -> dict[str, Any]:
    asked = {"tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 200, "stream": False}
    reply = talk.post("generate", input=given, **asked)
    assert reply.status == 200, reply.body
    return dict(reply.json())


def test_20_rounds_of_a_session_compute_only_what_is_new(server: Running) -> None:
    talk = _session(server)
    given: Any = "hi"
    known = 0
    messages: list[Any] = [*HI]
    with diary_of(server) as diary:
        for number in range(20):
            server.wait_until_idle()
            before = diary.num_computed
            answer = _round(talk, given)
            server.wait_until_idle()
            (call,) = answer["message"]["tool_calls"]
            used = answer["usage"]
            new = used["prompt_tokens"] - known
            assert new > 0
            assert used["prompt_tokens_details"]["cached_tokens"] >= known - 1
            # What is new and the end of the last answer; the answer without its own end, and at depth 1 a step ahead.
            assert diary.num_computed - before <= new + 1 + used["completion_tokens"]
            known = used["total_tokens"]
            result = {"role": "tool", "tool_call_id": call["id"], "content": f"result {number}"}
            messages += [answer["message"], result]
            given = [result]
    # The same conversation, rendered from the beginning. This template writes no end of turn, which the log has.
    asked = {"tools": TOOLS, "tool_choice": "required", "max_tokens": 1, "return_token_ids": True}
    again = server.chat(messages=messages[:-2], **asked).json()
    log = talk.behind.log.tokens.tolist()[: known - used["completion_tokens"]]
    ends = server.llm.opened.text.tokenizer.eos_ids
    assert [token for token in log if token not in ends] == again["prompt_token_ids"]
    assert sum(token in ends for token in log) == 19
    causes = [turn["cause"] for turn in talk.get("explain").json()["turns"]]
    assert set(causes[1:]) == {"new_input"}
    shown = [message for turn in talk.turns() for message in turn["messages"]]
    assert [message.get("tool_call_id") for message in shown if message["role"] == "tool"]
    assert all(message["tool_calls"] for message in shown if message["role"] == "assistant")


def test_a_session_with_calls_survives_being_saved_and_restored(server: Running) -> None:
    talk = _session(server)
    call = _round(talk, "hi")["message"]["tool_calls"][0]
    result = [{"role": "tool", "tool_call_id": call["id"], "content": "sunny"}]
    saved = talk.post("save")
    assert saved.status == 200
    restored = request(server.port, "POST", "/v1/sessions/restore", saved.body, headers={"Content-Type": MEDIA_TYPE})
    assert restored.status == 201, restored.body
    twin = Conversation(server, restored.json()["id"])
    assert twin.turns() == talk.turns()
    assert _round(twin, result)["text"] == _round(talk, result)["text"]


def test_a_call_can_be_regenerated_and_rewound(server: Running) -> None:
    talk = _session(server)
    asked = {"tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 200, "stream": False}
    first = _round(talk, "hi")
    again = talk.post("regenerate", **asked, temperature=1, seed=5).json()
    assert again["finish_reason"] == "tool_calls"
    result = [{"role": "tool", "tool_call_id": again["message"]["tool_calls"][0]["id"], "content": "sunny"}]
    _round(talk, result)
    assert talk.post("rewind", at_turn=1).status == 200
    assert talk.post("generate", **asked).json()["text"] == first["text"]


def test_the_stream_of_a_session_tells_its_calls(server: Running) -> None:
    talk = _session(server)
    reply = talk.post("generate", input="hi", tool_choice=NAMED, parallel_tool_calls=False, max_tokens=200)
    events = [event.data for event in events_in(reply.body)]
    deltas = [one for event in events for delta in event["deltas"] for one in delta.get("tool_calls", ())]
    assert deltas[0]["function"]["name"] == "get_weather"
    check_arguments("".join(one["function"]["arguments"] for one in deltas))
    assert events[-1]["finish_reason"] == "tool_calls"


def test_chats_with_a_session_use_the_session_s_tools(server: Running) -> None:
    talk = _session(server)
    asked = {"session_id": talk.id, "tool_choice": NAMED, "parallel_tool_calls": False, "max_tokens": 200}
    message = server.chat(**asked).json()["choices"][0]["message"]
    assert message["tool_calls"][0]["function"]["name"] == "get_weather"
    assert_error(server.chat(**asked, tools=TOOLS), 400, "tools")


@pytest.mark.parametrize("name", ["tool_choice", "parallel_tool_calls", "thinking_token_budget"])
def test_what_belongs_to_an_answer_is_no_setting_of_a_session(server: Running, name: str) -> None:
    values = {"tool_choice": "auto", "parallel_tool_calls": True, "thinking_token_budget": 5}
    assert_error(server.post("/v1/sessions", {"tools": TOOLS, name: values[name]}), 400, name)


def test_what_belongs_to_a_session_is_no_setting_of_an_answer(server: Running) -> None:
    talk = _session(server)
    assert_error(talk.post("generate", input="hi", reasoning_effort="low"), 400, "reasoning_effort")
    assert_error(talk.post("generate", input="hi", tools=TOOLS), 400, "tools")
    assert_error(server.chat(session_id=talk.id, reasoning_effort="low"), 400, "reasoning_effort")


# -- reasoning --------------------------------------------------------------------------------------------------------


def test_reasoning_is_told_apart_and_ends_with_its_budget(thinking: Running) -> None:
    asked: dict[str, Any] = {"thinking_token_budget": 5, "max_tokens": 120, "seed": 3}
    told = thinking.chat(**asked).json()
    message = told["choices"][0]["message"]
    assert 0 < len(message["reasoning_content"]) <= 20
    assert message["reasoning"] == message["reasoning_content"]
    assert message["content"]
    assert "think>" not in message["content"] + message["reasoning"]
    used = told["usage"]
    num_reasoning = used["completion_tokens_details"]["reasoning_tokens"]
    assert len("</think>") < num_reasoning < used["completion_tokens"]
    events = thinking.chat(**asked, stream=True).events()
    deltas = [event["choices"][0]["delta"] for event in events if event["choices"]]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == message["reasoning_content"]
    assert "".join(delta.get("content", "") for delta in deltas) == message["content"]


def test_thinking_without_an_end_is_no_answer(thinking: Running) -> None:
    choice = thinking.chat(max_tokens=10, seed=3).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("", "length")
    assert choice["message"]["reasoning_content"]


@pytest.mark.parametrize("off", [{"reasoning_effort": "none"}, {"chat_template_kwargs": {"enable_thinking": False}}])
def test_thinking_can_be_turned_off(thinking: Running, off: dict[str, Any]) -> None:
    message = thinking.chat(max_tokens=10, seed=3, **off).json()["choices"][0]["message"]
    assert message["content"]
    assert "reasoning_content" not in message


def test_a_required_call_comes_after_the_thinking(thinking: Running) -> None:
    message = thinking.chat(**ONE, thinking_token_budget=3).json()["choices"][0]["message"]
    assert message["reasoning_content"]
    check_arguments(message["tool_calls"][0]["function"]["arguments"])


def test_responses_have_reasoning_items(thinking: Running) -> None:
    asked = {"input": "hi", "thinking_token_budget": 3, "max_output_tokens": 100, "seed": 3}
    told = thinking.post(RESPONSES, asked).json()
    assert [item["type"] for item in told["output"]] == ["reasoning", "message"]
    assert told["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    events = thinking.post(RESPONSES, {**asked, "stream": True}).events()
    kinds = [event["type"] for event in events if "type" in event]
    assert "response.reasoning_text.delta" in kinds
    assert kinds[-1] in ("response.completed", "response.incomplete")


def test_reasoning_items_go_back_with_the_answer_they_led_to(thinking: Running) -> None:
    """In the clear or opaque; it is the template's to show them to the model."""
    asked = {"input": "hi", "thinking_token_budget": 3, "max_output_tokens": 100, "seed": 3}
    told = thinking.post(RESPONSES, {**asked, "include": ["reasoning.encrypted_content"]}).json()
    thought, message = told["output"]
    for reasoning in (thought, {"type": "reasoning", "summary": [], "encrypted_content": thought["encrypted_content"]}):
        said = as_messages(as_items([reasoning, message]), 8)
        assert [one["role"] for one in said] == ["assistant"]
        assert said[0]["reasoning_content"] == thought["content"][0]["text"]
        assert said[0]["content"] == message["content"][0]["text"]
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    again = {**thought, "id": "rs_again"}
    (both,) = as_messages(as_items([thought, message, again, call]), 8)
    assert (both["reasoning_content"], len(both["tool_calls"])) == (thought["content"][0]["text"], 1)
    stored = thinking.get(f"{RESPONSES}/{told['id']}").json()
    assert stored == told
    more = [{"role": "user", "content": "hi"}, thought, message, {"role": "user", "content": "more"}]
    assert thinking.post(RESPONSES, {**asked, "input": more}).status == 200
    foreign = {"type": "reasoning", "summary": [], "encrypted_content": "not ours"}
    assert thinking.post(RESPONSES, {**asked, "input": [foreign, *more]}).status == 200


def test_explain_tells_what_dropped_thinking_costs() -> None:
    """Where a template writes thinking only into the latest turn, a session computes the answer without it again."""
    forgets = THINKS.replace("{{ think(m) }}", "{% if loop.last %}{{ think(m) }}{% endif %}")
    with serving_template(forgets) as server:
        talk = Conversation(server, server.post("/v1/sessions", {"temperature": 0}).json()["id"])
        asked = {"thinking_token_budget": 5, "max_tokens": 60, "guided_choice": ["a long answer"]}
        first = talk.ask("hi", **asked)
        assert first["message"]["reasoning_content"]
        talk.ask("and then?", **asked)
        _, second = talk.get("explain").json()["turns"]
        assert second["cause"] == "changed"
        assert second["difference"]["before"].startswith("<think>")
        assert second["difference"]["now"].startswith("a long answer")
        assert second["prefilled_tokens"] == second["prompt_tokens"] - second["difference"]["token"]


# -- the stages by themselves -----------------------------------------------------------------------------------------


class Told:
    """What a writer knows of a generation: its deltas, folded."""

    plan, choices, first_index = object(), (None,), 0
    usage, cache, prompt_logprobs, prompt_token_ids = Usage(3, 2), None, None, ()
    params = SamplingParams()
    fold, note_usage = Generation.fold, Generation.note_usage

    def new_output(self) -> RequestOutput:
        return RequestOutput("r", None, [], [CompletionOutput(0, parts=[])], self.usage)


def written(writer_of: Callable[[Any], Any], parts: list[TurnPart], reason: str) -> tuple[dict[str, Any], list[Any]]:
    """An answer of these parts, whole, and as its events, each part by itself."""
    deltas = [OutputDelta(parts=[part]) for part in parts] + [OutputDelta(parts=[], finish_reason=reason)]
    call = SimpleNamespace(id=f"resp_{'0' * 32}", created=1, generations=[Told()])
    whole = writer_of(call).whole(folded(call.generations, deltas))
    writer = writer_of(call)
    told = writer.opening() + b"".join(map(writer.delta, deltas)) + writer.closing()
    return whole, Reply(200, {"content-type": "text/event-stream"}, told).events()


EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent, config={"defer_build": True})
MODEL: Any = SimpleNamespace(forms=None, name="fake", system_fingerprint="f")


@settings(deadline=None, max_examples=60)
@given(PIECES, st.data(), st.sampled_from(["stop", "length"]))
def test_a_stream_of_responses_says_the_same_at_every_split(
    pieces: list[tuple[str, str]], data: st.DataObject, reason: str
) -> None:
    """Read by the parser of OpenAI's client, which checks the order of the events, too."""
    body = ResponsesRequest.model_validate({"input": "hi"})
    in_one, in_many = whole_and_split(pieces, data)
    wholes = []
    for parts in (in_one, in_many):
        whole, events = written(lambda call: ResponseWriter(call, body, 0.0, 1.0, MODEL), parts, reason)
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        state: Any = ResponseStreamState(input_tools=omit, text_format=omit)
        for event in events:
            state.handle_event(EVENT.validate_python(event))
        last = events[-1]
        assert last["type"] == ("response.incomplete" if reason == "length" else "response.completed")
        done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        for response in (whole, last["response"]):
            assert response["output"] == done
        wholes.append(done)
        for kind, item_kind in (("content", "message"), ("reasoning", "reasoning")):
            said = "".join(item["content"][0]["text"] for item in done if item["type"] == item_kind)
            assert said == "".join(text for one, text in pieces if one == kind)
        calls = [item["arguments"] for item in done if item["type"] == "function_call"]
        assert calls == [text for kind, text in pieces if kind == "call"]
        ends = ["completed"] * (len(done) - 1) + ["incomplete" if reason == "length" else "completed"]
        assert [item["status"] for item in done] == ends[: len(done)]
    assert wholes[0] == wholes[1]


@settings(deadline=None, max_examples=60)
@given(PIECES, st.data())
def test_a_stream_of_chunks_says_the_same_at_every_split(pieces: list[tuple[str, str]], data: st.DataObject) -> None:
    """Read by the parser of OpenAI's client."""
    body = ChatRequest.model_validate({"messages": HI})
    in_one, in_many = whole_and_split(pieces, data)
    expected = {
        "content": "".join(text for kind, text in pieces if kind == "content"),
        "reasoning_content": "".join(text for kind, text in pieces if kind == "reasoning"),
        "calls": [text for kind, text in pieces if kind == "call"],
    }
    for parts in (in_one, in_many):
        numbered = numbered_calls(parts)
        whole, events = written(lambda call: ChatWriter(call, body, MODEL), numbered, "stop")
        state: Any = ChatCompletionStreamState()
        for event in events:
            state.handle_chunk(ChatCompletionChunk.model_validate(event))
        read = state.get_final_completion().choices[0].message
        for message in (whole["choices"][0]["message"], read.model_dump()):
            assert (message["content"] or "") == expected["content"]
            assert (message.get("reasoning_content") or "") == expected["reasoning_content"]
            calls = message.get("tool_calls") or []
            assert [call["function"]["arguments"] for call in calls] == expected["calls"]


def numbered_calls(parts: list[TurnPart]) -> list[TurnPart]:
    """Calls are numbered among themselves, as a parser does."""
    numbers = list(dict.fromkeys(part.call for part in parts if part.kind == "call"))
    return [
        part._replace(call=numbers.index(part.call)) if part.kind in ("call", "arguments") else part for part in parts
    ]
