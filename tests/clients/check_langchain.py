"""`langchain-openai`: a chat model as LangChain applications hold one."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from operator import add
from typing import Any, Literal

import openai
from langchain.agents import create_agent
from langchain.agents.middleware import ModelRequest, wrap_model_call
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings

from examples.agents import langchain_agent
from tests.clients.checking import PROMPT, TOO_LONG, Target, raises, run_checks


def connect(target: Target, **more: Any) -> ChatOpenAI:
    """A model; short and greedy if nothing else is asked for."""
    where = {"model": target.model, "base_url": target.base_url, "api_key": target.api_key}
    settings: Any = {"temperature": 0, "max_tokens": 12, "max_retries": 0, "timeout": 45}
    return ChatOpenAI(**{**where, **settings, **more})


def check_invoke(target: Target) -> None:
    answer = connect(target).invoke([SystemMessage("Be brief."), HumanMessage(PROMPT)])
    assert answer.content, answer
    assert answer.response_metadata["finish_reason"] in ("stop", "length"), answer.response_metadata
    usage = answer.usage_metadata
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"], usage


def check_stream_with_usage(target: Target) -> None:
    model = connect(target, stream_usage=True)
    whole, streamed = model.invoke(PROMPT), reduce(add, model.stream(PROMPT))
    assert streamed.content == whole.content, streamed
    assert streamed.usage_metadata["output_tokens"] == whole.usage_metadata["output_tokens"], streamed.usage_metadata
    assert streamed.response_metadata["finish_reason"] == whole.response_metadata["finish_reason"], streamed


def check_stream_without_usage(target: Target) -> None:
    streamed = reduce(add, connect(target, stream_usage=False).stream(PROMPT))
    assert streamed.content, streamed
    assert streamed.usage_metadata is None, streamed.usage_metadata


def check_batch(target: Target) -> None:
    answers = connect(target).batch([f"Say the number {i}." for i in range(4)])
    assert [bool(answer.content) for answer in answers] == [True] * 4, answers


def check_logprobs(target: Target) -> None:
    answer = connect(target, logprobs=True, top_logprobs=2).invoke(PROMPT)
    scores = answer.response_metadata["logprobs"]["content"]
    assert len(scores) == answer.usage_metadata["output_tokens"], answer.response_metadata


def check_the_responses_api(target: Target) -> None:
    model = connect(target, use_responses_api=True, max_tokens=16)
    whole, streamed = model.invoke(PROMPT), reduce(add, model.stream(PROMPT))
    assert whole.text, whole
    assert streamed.text == whole.text, streamed


def check_embeddings(target: Target) -> None:
    where: Any = {"base_url": target.base_url, "api_key": target.api_key}
    model = OpenAIEmbeddings(model=target.model, check_embedding_ctx_length=False, max_retries=0, **where)
    assert len(model.embed_documents(["the sea", "a train"])) == 2
    assert isinstance(model.embed_query("the sea")[0], float)


def check_too_long_a_prompt_overflows_the_context(target: Target) -> None:
    raises(ContextOverflowError, lambda: connect(target).invoke(TOO_LONG))


def check_errors(target: Target) -> None:
    raises(openai.AuthenticationError, lambda: connect(target, api_key="sk-wrong").invoke(PROMPT))
    raises(openai.BadRequestError, lambda: connect(target, temperature=-1).invoke(PROMPT))
    raises(openai.NotFoundError, lambda: connect(target, extra_body={"model": "nobody"}).invoke(PROMPT))


async def check_ainvoke_and_astream(target: Target) -> None:
    model = connect(target)
    whole = await model.ainvoke(PROMPT)
    text = "".join([chunk.content async for chunk in model.astream(PROMPT)])
    assert text == whole.content, (text, whole)


@tool
def get_weather(city: Literal["Rome", "Oslo"]) -> str:
    """The weather of a city."""
    return f"sunny in {city}"


@tool
def get_time(city: Literal["Rome", "Oslo"]) -> str:
    """The time in a city."""
    return f"noon in {city}"


ROUNDS = ["get_weather", "get_time"]


@wrap_model_call
def in_turn(request: ModelRequest, handler: Callable[[ModelRequest], Any]) -> Any:
    """The model is too small to choose: each round names its tool, and then it answers."""
    used = sum(isinstance(message, ToolMessage) for message in request.messages)
    if used < len(ROUNDS):
        one = {**request.model_settings, "parallel_tool_calls": False}
        return handler(request.override(tool_choice=ROUNDS[used], model_settings=one))
    return handler(request.override(tools=[]))


def check_an_agent_calls_two_tools_in_turn(target: Target) -> None:
    model = connect(target, max_tokens=100)
    agent = create_agent(model, tools=[get_weather, get_time], middleware=[in_turn])
    said = agent.invoke({"messages": [HumanMessage("What is the weather in Rome, and the time?")]})["messages"]
    results = [message for message in said if isinstance(message, ToolMessage)]
    assert [message.name for message in results] == ROUNDS, said
    assert all(message.content.endswith(("in Rome", "in Oslo")) for message in results), results
    assert said[-1].type == "ai", said[-1]


def check_streamed_tool_calls_joined_are_the_calls(target: Target) -> None:
    model = connect(target, max_tokens=100).bind_tools([get_weather], tool_choice="get_weather")
    whole, streamed = model.invoke(PROMPT), reduce(add, model.stream(PROMPT))
    assert [call["args"] for call in streamed.tool_calls] == [call["args"] for call in whole.tool_calls], streamed
    assert whole.tool_calls, whole


def check_the_example_agent(target: Target) -> None:
    advice, results = langchain_agent.run(target.base_url, target.api_key, target.model)
    assert advice, advice
    assert sorted(one.split(": ")[1] for one in results) == ["rain until noon, then sun", "sunset at 20:14"], results


if __name__ == "__main__":
    run_checks(vars())
