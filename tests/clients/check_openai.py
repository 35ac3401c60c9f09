"""The official `openai` client, sync and async: what an application does with it, and what it is told when it errs."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from contextlib import suppress
from functools import cache
from typing import Annotated, Any, Literal

import openai
from pydantic import BaseModel, Field

from tests.clients.checking import PROMPT, TOO_LONG, Target, raises, run_checks

ASK: Any = [{"role": "user", "content": PROMPT}]
WITH_USAGE: Any = {"include_usage": True}
LONG: Any = {"max_tokens": 3000, "extra_body": {"ignore_eos": True}}
"""Minutes on a real model: who waits for it in vain runs into TIMEOUT_S."""
TIMEOUT_S = 45.0
FINISHED = ("stop", "length")


@cache
def connect(target: Target) -> openai.OpenAI:
    return openai.OpenAI(base_url=target.base_url, api_key=target.api_key, max_retries=0, timeout=TIMEOUT_S)


def connect_async(target: Target) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=target.base_url, api_key=target.api_key, max_retries=0, timeout=TIMEOUT_S)


def chat(target: Target, **options: Any) -> Any:
    """One call; short and greedy if nothing else is asked for."""
    options = {"messages": ASK, "max_tokens": 12, "temperature": 0, **options}
    return connect(target).chat.completions.create(model=target.model, **options)


def complete(target: Target, **options: Any) -> Any:
    options = {"prompt": "The sea is", "max_tokens": 8, "temperature": 0, **options}
    return connect(target).completions.create(model=target.model, **options)


def check_models(target: Target) -> None:
    assert target.model in [model.id for model in connect(target).models.list()], "the model is not in the list"
    model = connect(target).models.retrieve(target.model)
    assert (model.id, model.object) == (target.model, "model"), model


def check_chat_and_its_usage(target: Target) -> None:
    answer = chat(target)
    assert answer.object == "chat.completion", answer.object
    assert answer.id.startswith("chatcmpl-"), answer.id
    (choice,) = answer.choices
    assert choice.message.role == "assistant", choice
    assert choice.message.content, "an empty answer"
    assert choice.finish_reason in FINISHED, choice.finish_reason
    usage = answer.usage
    assert usage.prompt_tokens > 0, usage
    assert 0 < usage.completion_tokens <= 12, usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens, usage


def check_a_chat_stream_joined_is_the_answer(target: Target) -> None:
    whole = chat(target)
    chunks = list(chat(target, stream=True, stream_options=WITH_USAGE))
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({(chunk.id, chunk.created) for chunk in chunks}) == 1, "chunks of one answer differ in id or created"
    *said, last = chunks
    assert last.choices == [], f"the last chunk is for usage alone: {last}"
    assert all(chunk.usage is None for chunk in said), "usage before the last chunk"
    assert last.usage.completion_tokens == whole.usage.completion_tokens, (last.usage, whole.usage)
    deltas = [choice for chunk in said for choice in chunk.choices]
    roles = [choice.delta.role for choice in deltas]
    assert roles[0] == "assistant", roles
    assert not any(roles[1:]), f"the role is said once: {roles}"
    assert "".join(choice.delta.content or "" for choice in deltas) == whole.choices[0].message.content
    reasons = [choice.finish_reason for choice in deltas if choice.finish_reason]
    assert reasons == [whole.choices[0].finish_reason], reasons


def check_no_usage_unless_asked_for(target: Target) -> None:
    assert all(chunk.choices and chunk.usage is None for chunk in chat(target, stream=True))


def check_logprobs(target: Target) -> None:
    answer = chat(target, max_tokens=4, logprobs=True, top_logprobs=3)
    scores = answer.choices[0].logprobs.content
    assert len(scores) == answer.usage.completion_tokens, (len(scores), answer.usage)
    for score in scores:
        values = [top.logprob for top in score.top_logprobs]
        assert len(values) == 3, values
        assert values == sorted(values, reverse=True), f"the likeliest comes first: {values}"
        assert score.logprob == values[0] <= 0, f"greedy takes the likeliest: {score}"
        assert isinstance(score.bytes, list), score


def check_n_of_two(target: Target) -> None:
    answer = chat(target, n=2, temperature=1, seed=3)
    assert [choice.index for choice in answer.choices] == [0, 1], answer
    assert len({choice.message.content for choice in answer.choices}) == 2, "two samples, one text"
    texts = ["", ""]
    for chunk in chat(target, n=2, temperature=1, seed=3, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in answer.choices], texts


def a_stop(target: Target) -> tuple[str, str]:
    """A letter or two from the middle of the answer to ASK, and what comes before."""
    text = chat(target).choices[0].message.content
    for size, i in itertools.product((2, 1), range(len(text) // 2, len(text) - 1)):
        stop = text[i : i + size]
        if stop.isascii() and text.index(stop) == i:
            return stop, text[:i]
    raise AssertionError(f"nothing to stop at in {text!r}")


def check_stop(target: Target) -> None:
    stop, text = a_stop(target)
    answer = chat(target, stop=[stop, "never said"])
    assert answer.choices[0].finish_reason == "stop", answer.choices[0]
    assert answer.choices[0].message.content == text, (stop, text, answer.choices[0])


def check_same_seed_same_text(target: Target) -> None:
    texts = [chat(target, temperature=1, seed=seed).choices[0].message.content for seed in (7, 7, 8)]
    assert texts[0] == texts[1], texts
    assert texts[0] != texts[2], f"another seed, the same text: {texts[0]!r}"


def check_completions(target: Target) -> None:
    answer = complete(target, prompt=["The sea is", "The sky is"], logprobs=2)
    assert answer.object == "text_completion", answer.object
    assert [choice.index for choice in answer.choices] == [0, 1], answer
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens, answer.usage
    scores = answer.choices[0].logprobs
    lengths = {len(x) for x in (scores.tokens, scores.token_logprobs, scores.top_logprobs, scores.text_offset)}
    assert len(lengths) == 1, f"lists of different length: {lengths}"
    assert max(scores.token_logprobs) <= 0, scores


def check_a_completion_stream_joined_is_the_answer(target: Target) -> None:
    whole = complete(target)
    *chunks, last = complete(target, stream=True, stream_options=WITH_USAGE)
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == whole.choices[0].text
    assert (last.choices, last.usage.total_tokens) == ([], whole.usage.total_tokens), last


def check_echo_with_logprobs_of_the_prompt(target: Target) -> None:
    prompt = "The sea is blue and deep"
    answer = complete(target, prompt=prompt, max_tokens=1, echo=True, logprobs=1)
    (choice,) = answer.choices
    assert choice.text.startswith(prompt), choice.text
    scores = choice.logprobs
    assert len(scores.tokens) == answer.usage.total_tokens, (scores.tokens, answer.usage)
    assert "".join(scores.tokens).startswith(prompt), scores.tokens
    assert scores.token_logprobs[0] is None, "nothing comes before the first token"
    assert all(value <= 0 for value in scores.token_logprobs[1:]), scores.token_logprobs
    assert scores.text_offset[:2] == [0, len(scores.tokens[0])], scores.text_offset


def check_embeddings(target: Target) -> None:
    texts = ["the sea", "a train"]
    answer = connect(target).embeddings.create(model=target.model, input=texts)  # the client asks for base64
    plain = connect(target).embeddings.create(model=target.model, input=texts, encoding_format="float")
    assert [item.index for item in answer.data] == [0, 1], answer
    assert answer.usage.prompt_tokens > 0, answer.usage
    for coded, floats in zip(answer.data, plain.data, strict=True):
        differences = [abs(a - b) for a, b in zip(coded.embedding, floats.embedding, strict=True)]
        assert max(differences) < 1e-4, "base64 and floats differ"


def check_responses(target: Target) -> None:
    answer = connect(target).responses.create(model=target.model, input=PROMPT, max_output_tokens=16, temperature=0)
    assert answer.object == "response", answer.object
    assert_ended(answer)
    assert answer.output_text, "an empty answer"
    (message,) = answer.output
    assert (message.type, message.role) == ("message", "assistant"), message
    usage = answer.usage
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens, usage


def check_responses_to_a_conversation(target: Target) -> None:
    turns: Any = [*ASK, {"role": "assistant", "content": "It is blue."}, {"role": "user", "content": "And the sky?"}]
    answer = connect(target).responses.create(
        model=target.model, instructions="Be brief.", input=turns, max_output_tokens=16, temperature=0
    )
    assert answer.output_text, answer


def check_a_response_stream(target: Target) -> None:
    options: Any = {"model": target.model, "input": PROMPT, "max_output_tokens": 16, "temperature": 0}
    whole = connect(target).responses.create(**options)
    events = list(connect(target).responses.create(**options, stream=True))
    kinds = [event.type for event in events]
    assert kinds[0] == "response.created", kinds
    assert kinds[-1] == f"response.{whole.status}", kinds
    for kind in (
        "output_item.added",
        "content_part.added",
        "output_text.done",
        "content_part.done",
        "output_item.done",
    ):
        assert kinds.count(f"response.{kind}") == 1, (kind, kinds)
    assert [event.sequence_number for event in events] == list(range(len(events))), "events are numbered from 0"
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text == events[-1].response.output_text, text
    assert events[-1].response.usage.output_tokens == whole.usage.output_tokens
    assert_ended(events[-1].response)


def check_the_response_stream_helper(target: Target) -> None:
    options: Any = {"model": target.model, "input": PROMPT, "max_output_tokens": 16, "temperature": 0}
    with connect(target).responses.stream(**options) as stream:
        texts = [event.snapshot for event in stream if event.type == "response.output_text.delta"]
    assert texts, "an empty answer"
    assert all(then.startswith(before) for before, then in itertools.pairwise(texts)), texts


def assert_ended(response: Any) -> None:
    """A response that its limit has cut says so; any other is complete."""
    if response.status == "incomplete":
        assert response.incomplete_details.reason == "max_output_tokens", response.incomplete_details
    else:
        assert response.status == "completed", response.status


def check_an_unknown_model_is_not_found(target: Target) -> None:
    error = raises(openai.NotFoundError, lambda: chat(target, extra_body={"model": "nobody/nothing"}))
    assert error.code == "model_not_found", error.body
    raises(openai.NotFoundError, lambda: connect(target).models.retrieve("nobody/nothing"))


def check_a_wrong_temperature_is_a_bad_request(target: Target) -> None:
    for temperature in (-1, "hot"):
        error = raises(openai.BadRequestError, lambda wrong=temperature: chat(target, temperature=wrong))
        assert error.type == "invalid_request_error", error.body
        assert "temperature" in error.message, error.message


def check_too_long_a_prompt_exceeds_the_context(target: Target) -> None:
    long: Any = [{"role": "user", "content": TOO_LONG}]
    for stream in (False, True):
        error = raises(openai.BadRequestError, lambda stream=stream: chat(target, messages=long, stream=stream))
        assert error.code == "context_length_exceeded", error.body
        assert "This model's maximum context length is" in error.message, error.message
    error = raises(openai.BadRequestError, lambda: complete(target, prompt=TOO_LONG))
    assert error.code == "context_length_exceeded", error.body


def check_a_wrong_key_is_refused(target: Target) -> None:
    stranger = connect(target).with_options(api_key="sk-wrong")
    error = raises(openai.AuthenticationError, lambda: stranger.models.list())
    assert error.status_code == 401, error


def check_the_request_id_of_answers_and_errors(target: Target) -> None:
    raw = connect(target).chat.completions.with_raw_response.create(model=target.model, messages=ASK, max_tokens=1)
    assert raw.headers["x-request-id"], raw.headers
    assert raw.parse()._request_id == raw.headers["x-request-id"] == raw.request_id
    assert raises(openai.BadRequestError, lambda: chat(target, temperature=-1)).request_id


def check_the_chat_stream_helper(target: Target) -> None:
    stop, text = a_stop(target)  # the helper takes an answer that its limit has cut for an error
    options: Any = {"messages": ASK, "temperature": 0, "stop": stop, "stream_options": WITH_USAGE}
    with connect(target).chat.completions.stream(model=target.model, **options) as stream:
        said = "".join(event.delta for event in stream if event.type == "content.delta")
        final = stream.get_final_completion()
    assert said == final.choices[0].message.content == text, (said, final)
    assert final.choices[0].message.role == "assistant", final
    assert final.usage is not None, "no usage"
    assert final.usage.completion_tokens > 0, final.usage


def check_closing_a_stream_frees_its_place(target: Target) -> None:
    """Four at once is all that the server runs: what was not cancelled would keep the next one waiting."""
    stream = chat(target, n=4, stream=True, **LONG)
    for _ in range(8):
        next(stream)
    stream.close()
    assert chat(target, n=4).choices[3].message.content


async def check_async_chat_and_stream(target: Target) -> None:
    stop, text = a_stop(target)
    options: Any = {"model": target.model, "messages": ASK, "temperature": 0, "stop": stop}
    async with connect_async(target) as client:
        whole = await client.chat.completions.create(**options)
        said = ""
        async for chunk in await client.chat.completions.create(**options, stream=True, stream_options=WITH_USAGE):
            said += chunk.choices[0].delta.content or "" if chunk.choices else ""
        async with client.chat.completions.stream(**options) as stream:
            final = await stream.get_final_completion()
    assert said == whole.choices[0].message.content == final.choices[0].message.content == text, said


async def check_async_calls_at_once(target: Target) -> None:
    async with connect_async(target) as client:
        model, prompts = target.model, [f"{i} and" for i in range(8)]
        calls = [client.completions.create(model=model, prompt=prompt, max_tokens=4, seed=1) for prompt in prompts]
        answers = await asyncio.gather(*calls)
        embedding = await client.embeddings.create(model=model, input="the sea")
        models = [item.id async for item in client.models.list()]
    assert all(answer.usage.completion_tokens for answer in answers), answers
    assert embedding.data[0].embedding
    assert model in models, models


async def check_async_responses(target: Target) -> None:
    options: Any = {"model": target.model, "input": PROMPT, "max_output_tokens": 16, "temperature": 0}
    async with connect_async(target) as client:
        whole = await client.responses.create(**options)
        kinds = [event.type async for event in await client.responses.create(**options, stream=True)]
    assert whole.output_text, whole
    assert (kinds[0], kinds[-1]) == ("response.created", f"response.{whole.status}"), kinds


async def check_async_errors(target: Target) -> None:
    async with connect_async(target) as client:
        call = client.completions.create(model="nobody/nothing", prompt="x")
        (error,) = await asyncio.gather(call, return_exceptions=True)
    assert isinstance(error, openai.NotFoundError), error
    assert error.code == "model_not_found", error.body


async def check_async_cancel_frees_its_place(target: Target) -> None:
    """A task that waits for a whole answer is cancelled: its connection closes, and the server stops the work."""
    async with connect_async(target) as client:
        call = client.chat.completions.create(model=target.model, messages=ASK, n=4, **LONG)
        with suppress(TimeoutError):
            await asyncio.wait_for(call, timeout=0.5)
        answer = await client.chat.completions.create(model=target.model, messages=ASK, n=4, max_tokens=2)
    assert len(answer.choices) == 4, answer


# -- tools ------------------------------------------------------------------------------------------------------------


class GetWeather(BaseModel):
    """The weather of a city."""

    city: Literal["Rome", "Oslo"]
    days: Annotated[int, Field(ge=1, le=9)]


class GetTime(BaseModel):
    """The time in a city."""

    city: Literal["Rome", "Oslo"]


TOOL_KINDS = (GetWeather, GetTime)
TOOLS: Any = [openai.pydantic_function_tool(kind) for kind in TOOL_KINDS]


def named(kind: type[BaseModel]) -> Any:
    """The model is too small to choose: each round names its function."""
    return {"type": "function", "function": {"name": kind.__name__}}


def results(message: Any) -> list[Any]:
    return [{"role": "tool", "tool_call_id": call.id, "content": "sunny, noon"} for call in message.tool_calls]


def check_parse_with_a_pydantic_model(target: Target) -> None:
    answer = connect(target).chat.completions.parse(
        model=target.model, messages=ASK, response_format=GetWeather, max_tokens=100, temperature=0
    )
    assert isinstance(answer.choices[0].message.parsed, GetWeather), answer


def check_a_tool_loop_with_parse(target: Target) -> None:
    messages: Any = [{"role": "user", "content": "What is the weather in Rome, and the time?"}]
    options: Any = {"model": target.model, "tools": TOOLS, "parallel_tool_calls": False, "max_tokens": 100}
    for kind in TOOL_KINDS:
        answer = connect(target).chat.completions.parse(messages=messages, tool_choice=named(kind), **options)
        (choice,) = answer.choices
        assert choice.finish_reason == "tool_calls", choice
        (call,) = choice.message.tool_calls
        assert isinstance(call.function.parsed_arguments, kind), call
        messages += [choice.message.model_dump(exclude_none=True), *results(choice.message)]
    last = connect(target).chat.completions.parse(messages=messages, tool_choice="none", **options)
    assert last.choices[0].message.content, last


def check_a_tool_loop_with_the_streaming_helper(target: Target) -> None:
    messages: Any = [{"role": "user", "content": "What is the weather in Rome, and the time?"}]
    options: Any = {"model": target.model, "tools": TOOLS, "parallel_tool_calls": False, "max_tokens": 100}
    for kind in TOOL_KINDS:
        kinds = set()
        with connect(target).chat.completions.stream(messages=messages, tool_choice=named(kind), **options) as stream:
            for event in stream:
                kinds.add(event.type)
            answer = stream.get_final_completion()
        assert {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds, kinds
        (call,) = answer.choices[0].message.tool_calls
        assert isinstance(call.function.parsed_arguments, kind), call
        messages += [answer.choices[0].message.model_dump(exclude_none=True), *results(answer.choices[0].message)]


def check_a_tool_loop_of_responses(target: Target) -> None:
    tools: Any = [{"type": "function", **tool["function"]} for tool in TOOLS]
    given: Any = "What is the weather in Rome, and the time?"
    before = None
    for kind in TOOL_KINDS:
        choice: Any = {"type": "function", "name": kind.__name__}
        answer = connect(target).responses.create(
            model=target.model, input=given, tools=tools, tool_choice=choice, parallel_tool_calls=False,
            max_output_tokens=100, previous_response_id=before,
        )  # fmt: skip
        (call,) = answer.output
        assert (call.type, call.name) == ("function_call", kind.__name__), call
        kind.model_validate_json(call.arguments)
        before = answer.id
        given = [{"type": "function_call_output", "call_id": call.call_id, "output": "sunny, noon"}]


def check_responses_are_parsed(target: Target) -> None:
    options: Any = {"model": target.model, "input": PROMPT, "text_format": GetWeather, "temperature": 0}
    answer = connect(target).responses.parse(**options, max_output_tokens=100)
    assert isinstance(answer.output_parsed, GetWeather), answer.output
    with connect(target).responses.stream(**options, max_output_tokens=100) as stream:
        final = stream.get_final_response()
    assert final.output_parsed == answer.output_parsed, final.output
    with connect(target).responses.stream(**options, max_output_tokens=3) as stream:
        kinds = [event.type for event in stream]
    assert kinds[-1] == "response.incomplete", kinds


def check_tools_of_responses_are_parsed(target: Target) -> None:
    tools: Any = [openai.pydantic_function_tool(kind) for kind in TOOL_KINDS]
    tools = [{"type": "function", **tool["function"]} for tool in tools]
    choice: Any = {"type": "function", "name": "GetWeather"}
    options: Any = {"model": target.model, "input": PROMPT, "tools": tools, "tool_choice": choice, "temperature": 0}
    answer = connect(target).responses.parse(**options, max_output_tokens=100)
    with connect(target).responses.stream(**options, max_output_tokens=100) as stream:
        snapshots = [event.snapshot for event in stream if event.type == "response.function_call_arguments.delta"]
        final = stream.get_final_response()
    for one in (answer, final):
        (call,) = one.output
        assert GetWeather.model_validate(call.parsed_arguments), call
    assert snapshots[-1] == final.output[0].arguments, snapshots


def check_stored_responses(target: Target) -> None:
    client = connect(target)
    answer = client.responses.create(model=target.model, input=PROMPT, max_output_tokens=8, metadata={"a": "b"})
    again = client.responses.retrieve(answer.id)
    assert (again.output_text, again.metadata) == (answer.output_text, {"a": "b"}), again
    (item,) = client.responses.input_items.list(answer.id)
    assert item.content[0].text == PROMPT, item
    more: Any = client.responses.create(
        model=target.model, input="And then?", previous_response_id=answer.id, max_output_tokens=8
    )
    assert more.usage.input_tokens_details.cached_tokens > 0, more.usage
    client.responses.delete(answer.id)
    raises(openai.NotFoundError, lambda: client.responses.retrieve(answer.id))


def check_background_responses(target: Target) -> None:
    client = connect(target)
    options: Any = {"model": target.model, "input": PROMPT, "temperature": 0, "background": True}
    begun = client.responses.create(**options, max_output_tokens=16)
    while begun.status in ("queued", "in_progress"):
        begun = client.responses.retrieve(begun.id)
    assert_ended(begun)
    stream = client.responses.create(**options, max_output_tokens=16, stream=True)
    first = next(iter(stream))
    stream.close()
    assert first.type == "response.created", first
    with client.responses.stream(response_id=first.response.id, starting_after=first.sequence_number) as rest:
        events = list(rest)
    assert [event.sequence_number for event in events] == list(range(1, len(events) + 1)), events
    assert events[-1].response.output_text == begun.output_text, events[-1]
    long = client.responses.create(**options, max_output_tokens=1000, extra_body={"ignore_eos": True})
    assert client.responses.cancel(long.id).status == "cancelled"


def check_conversations(target: Target) -> None:
    client = connect(target)
    talk = client.conversations.create(items=[{"role": "user", "content": "My name is Ada."}], metadata={"a": "b"})
    assert client.conversations.retrieve(talk.id).metadata == {"a": "b"}
    options: Any = {"model": target.model, "max_output_tokens": 8, "temperature": 0, "conversation": talk.id}
    first = client.responses.create(**options, input="Hello.")
    second = client.responses.create(**options, input="What is my name?")
    known = first.usage.total_tokens
    assert second.usage.input_tokens > known, second.usage
    assert second.usage.input_tokens_details.cached_tokens >= known - 1, (first.usage, second.usage)
    items = list(client.conversations.items.list(talk.id, order="asc", limit=2))
    assert [item.role for item in items] == ["user", "user", "assistant", "user", "assistant"], items
    client.conversations.items.create(talk.id, items=[{"role": "user", "content": "Goodbye."}])
    client.conversations.items.delete(items[0].id, conversation_id=talk.id)
    assert client.conversations.items.retrieve(items[1].id, conversation_id=talk.id).id == items[1].id
    assert client.conversations.update(talk.id, metadata={"a": "c"}).metadata == {"a": "c"}
    assert client.conversations.delete(talk.id).deleted
    raises(openai.NotFoundError, lambda: client.conversations.retrieve(talk.id))


def check_stored_completions(target: Target) -> None:
    client = connect(target)
    kept = chat(target, store=True, metadata={"check": "stored"})
    found = list(client.chat.completions.list(model=target.model, metadata={"check": "stored"}))
    assert kept.id in [one.id for one in found], found
    assert client.chat.completions.retrieve(kept.id).choices == kept.choices
    assert [one.content for one in client.chat.completions.messages.list(kept.id)] == [PROMPT]
    assert client.chat.completions.update(kept.id, metadata={"check": "done"}).metadata == {"check": "done"}
    assert client.chat.completions.delete(kept.id).deleted
    raises(openai.NotFoundError, lambda: client.chat.completions.retrieve(kept.id))


# -- batches ----------------------------------------------------------------------------------------------------------


def batch_line(target: Target, custom_id: str, **body: Any) -> bytes:
    body = {"model": target.model, "messages": ASK, "max_tokens": 8, "temperature": 0, **body}
    line = {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}
    return json.dumps(line).encode() + b"\n"


def run_batch(target: Target, content: bytes) -> Any:
    """From the file to the end of the batch."""
    client = connect(target)
    file = client.files.create(file=("lines.jsonl", content), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h", metadata={"for": "a check"}
    )
    ends = time.monotonic() + TIMEOUT_S
    while batch.status not in ("completed", "failed", "expired", "cancelled") and time.monotonic() < ends:
        time.sleep(0.1)
        batch = client.batches.retrieve(batch.id)
    return batch


def check_a_batch_from_the_file_to_the_answers(target: Target) -> None:
    client = connect(target)
    lines = [batch_line(target, f"n{number}") for number in range(6)]
    batch = run_batch(target, b"".join([*lines, batch_line(target, "wrong", temperature=-1)]))
    assert batch.status == "completed", batch
    assert batch.metadata == {"for": "a check"}, batch
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (7, 6, 1), batch
    told = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
    assert sorted(one["custom_id"] for one in told) == [f"n{number}" for number in range(6)], told
    expected = chat(target, max_tokens=8).choices[0].message.content
    assert {one["response"]["body"]["choices"][0]["message"]["content"] for one in told} == {expected}, told
    (error,) = client.files.content(batch.error_file_id).text.splitlines()
    assert json.loads(error)["response"]["status_code"] == 400, error
    assert batch.id in [one.id for one in client.batches.list(limit=5)]
    for name in (batch.input_file_id, batch.output_file_id, batch.error_file_id):
        assert client.files.delete(name).deleted
    raises(openai.NotFoundError, lambda: client.files.retrieve(batch.output_file_id))


def check_a_batch_of_what_is_no_request_fails(target: Target) -> None:
    batch = run_batch(target, b"{}\nnothing\n")
    assert batch.status == "failed", batch
    assert [error.line for error in batch.errors.data] == [1, 2], batch.errors


def check_a_batch_is_cancelled(target: Target) -> None:
    client = connect(target)
    content = b"".join(batch_line(target, f"n{number}", max_tokens=3000, ignore_eos=True) for number in range(8))
    file = client.files.create(file=("lines.jsonl", content), purpose="batch")
    made = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    assert client.batches.cancel(made.id).status in ("cancelling", "cancelled")
    ends = time.monotonic() + TIMEOUT_S
    while client.batches.retrieve(made.id).status != "cancelled":
        assert time.monotonic() < ends, client.batches.retrieve(made.id)
        time.sleep(0.1)


if __name__ == "__main__":
    run_checks(vars())
