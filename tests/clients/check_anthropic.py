"""The official Anthropic client: messages, streams, a tools loop, counting, thinking, structured output, errors."""

from __future__ import annotations

from typing import Any, Literal

import anthropic
from pydantic import BaseModel

from tests.clients.checking import PROMPT, TOO_LONG, Target, raises, run_checks

MESSAGES: Any = [{"role": "user", "content": PROMPT}]
GREEDY = {"temperature": 0}
"""Its newest versions have no such argument."""
WEATHER: Any = {
    "name": "get_weather",
    "description": "The weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}},
        "required": ["city"],
    },
}


class City(BaseModel):
    name: Literal["Rome", "Oslo"]
    is_capital: bool


def connect(target: Target) -> anthropic.Anthropic:
    root = target.base_url.removesuffix("/v1")
    return anthropic.Anthropic(base_url=root, api_key=target.api_key, max_retries=0)


def check_a_message(target: Target) -> None:
    message = connect(target).messages.create(model=target.model, max_tokens=16, messages=MESSAGES, system="Be brief.")
    assert message.role == "assistant"
    assert message.content[0].type == "text"
    assert message.content[0].text
    assert message.stop_reason in ("end_turn", "max_tokens")
    assert 0 < message.usage.output_tokens <= 16
    assert message._request_id


def check_the_stream_helper(target: Target) -> None:
    asked: Any = {"model": target.model, "max_tokens": 24, "messages": MESSAGES, "extra_body": GREEDY}
    whole = connect(target).messages.create(**asked)
    with connect(target).messages.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert "text" in kinds
    assert final.content[0].text == whole.content[0].text
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens


def check_raw_events(target: Target) -> None:
    stream = connect(target).messages.create(model=target.model, max_tokens=8, messages=MESSAGES, stream=True)
    events = list(stream)
    assert events[0].type == "message_start"
    assert events[-1].type == "message_stop"
    assert any(event.type == "content_block_delta" and event.delta.type == "text_delta" for event in events)


def check_a_tools_loop(target: Target) -> None:
    client, conversation = connect(target), list(MESSAGES)
    asked: Any = {"model": target.model, "max_tokens": 400, "tools": [WEATHER]}
    must: Any = {"type": "any", "disable_parallel_tool_use": True}
    first = client.messages.create(**asked, messages=conversation, tool_choice=must)
    assert first.stop_reason == "tool_use"
    (call,) = [block for block in first.content if block.type == "tool_use"]
    assert call.input["city"] in ("Rome", "Oslo")
    conversation.append({"role": "assistant", "content": first.content})
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    conversation.append({"role": "user", "content": [result]})
    second = client.messages.create(**{**asked, "max_tokens": 16}, messages=conversation)
    assert second.usage.cache_read_input_tokens > 0
    with client.messages.stream(**asked, messages=MESSAGES, tool_choice=must) as stream:
        streamed = stream.get_final_message()
    assert streamed.content[-1].type == "tool_use"
    assert streamed.content[-1].input["city"] in ("Rome", "Oslo")


def check_count_tokens(target: Target) -> None:
    client = connect(target)
    asked: Any = {"model": target.model, "messages": MESSAGES, "system": "Be brief, please."}
    counted = client.messages.count_tokens(**asked)
    used = client.messages.create(**asked, max_tokens=1).usage
    cached = (used.cache_read_input_tokens or 0) + (used.cache_creation_input_tokens or 0)
    assert counted.input_tokens == used.input_tokens + cached


def check_cache_control(target: Target) -> None:
    block = {"type": "text", "text": "A long preamble. " * 40, "cache_control": {"type": "ephemeral"}}
    asked: Any = {"model": target.model, "max_tokens": 1, "system": [block], "messages": MESSAGES}
    first = connect(target).messages.create(**asked).usage
    second = connect(target).messages.create(**asked).usage
    assert first.cache_creation_input_tokens
    assert second.cache_read_input_tokens
    assert second.cache_read_input_tokens > first.cache_read_input_tokens


def check_thinking(target: Target) -> None:
    thinking: Any = {"type": "enabled", "budget_tokens": 1024}
    asked: Any = {"model": target.model, "max_tokens": 32, "messages": MESSAGES, "thinking": thinking}
    message = connect(target).messages.create(**asked)
    assert {block.type for block in message.content} <= {"text", "thinking"}, "a model may have nothing to think"
    again = [*MESSAGES, {"role": "assistant", "content": message.content}, *MESSAGES]
    assert connect(target).messages.create(**{**asked, "messages": again}).usage.output_tokens
    with connect(target).messages.stream(**asked) as stream:
        assert stream.get_final_message().usage.output_tokens


def check_structured_output(target: Target) -> None:
    client = connect(target)
    asked: Any = {"model": target.model, "max_tokens": 200, "messages": MESSAGES}
    parsed = client.messages.parse(**asked, output_format=City)
    assert isinstance(parsed.parsed_output, City)
    with client.messages.stream(**asked, output_format=City) as stream:
        assert isinstance(stream.get_final_message().parsed_output, City)


def check_stop_sequences(target: Target) -> None:
    asked: Any = {"model": target.model, "max_tokens": 24, "messages": MESSAGES, "extra_body": GREEDY}
    text = connect(target).messages.create(**asked).content[0].text
    stop = text[5:8]
    message = connect(target).messages.create(**asked, stop_sequences=[stop])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)
    assert (message.content[0].text if message.content else "") == text[: text.index(stop)]


async def check_async(target: Target) -> None:
    root = target.base_url.removesuffix("/v1")
    client = anthropic.AsyncAnthropic(base_url=root, api_key=target.api_key, max_retries=0)
    async with client, client.messages.stream(model=target.model, max_tokens=8, messages=MESSAGES) as stream:
        pieces = [text async for text in stream.text_stream]
        assert await stream.get_final_text() == "".join(pieces)


def check_models(target: Target) -> None:
    (model,) = connect(target).models.list().data
    assert connect(target).models.retrieve(model.id).id == model.id


def check_errors(target: Target) -> None:
    client = connect(target)
    asked: Any = {"max_tokens": 8, "messages": MESSAGES}
    missing = raises(anthropic.NotFoundError, lambda: client.messages.create(**asked, model="nothing"))
    assert missing.type == "not_found_error"
    assert missing.request_id
    long: Any = [{"role": "user", "content": TOO_LONG}]
    error = raises(
        anthropic.BadRequestError, lambda: client.messages.create(model=target.model, max_tokens=8, messages=long)
    )
    assert "context" in error.message
    stranger = client.with_options(api_key="sk-wrong")
    raises(anthropic.AuthenticationError, lambda: stranger.messages.create(**asked, model=target.model))


def check_leaving_a_stream_ends_it(target: Target) -> None:
    client = connect(target)
    for _ in range(6):  # more than the server has places for
        with client.messages.stream(model=target.model, max_tokens=2000, messages=MESSAGES) as stream:
            next(iter(stream.text_stream))
    assert client.messages.create(model=target.model, max_tokens=1, messages=MESSAGES).usage.output_tokens == 1


if __name__ == "__main__":
    run_checks(globals())
