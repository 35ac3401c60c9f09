"""`pydantic-ai`: an agent with tools and a typed result."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel
from pydantic_ai import Agent, RunContext
from pydantic_ai.capabilities import PrepareOutputTools, PrepareTools
from pydantic_ai.messages import ToolCallPart
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.tools import ToolDefinition

from examples.agents import pydantic_ai_agent
from tests.clients.checking import Target, run_checks

ASK = "What is the weather in Rome, and the time?"
ROUNDS = ("get_weather", "get_time")


class Report(BaseModel):
    """The final answer."""

    city: Literal["Rome", "Oslo"]
    sunny: bool


async def in_turn(context: RunContext[None], tools: list[ToolDefinition]) -> list[ToolDefinition]:
    """The model is too small to choose: each step offers one tool, and the last one none."""
    wanted = ROUNDS[context.run_step - 1] if context.run_step <= len(ROUNDS) else None
    return [tool for tool in tools if tool.name == wanted]


async def at_last(context: RunContext[None], tools: list[ToolDefinition]) -> list[ToolDefinition]:
    return tools if context.run_step > len(ROUNDS) else []


def connect(target: Target) -> Agent[None, Report]:
    provider = OpenAIProvider(base_url=target.base_url, api_key=target.api_key)
    model = OpenAIChatModel(target.model, provider=provider)
    settings = {"temperature": 0.0, "max_tokens": 100, "timeout": 45, "parallel_tool_calls": False}
    steps = [PrepareTools(in_turn), PrepareOutputTools(at_last)]
    agent = Agent(model, output_type=Report, model_settings=settings, capabilities=steps)

    @agent.tool_plain
    def get_weather(city: Literal["Rome", "Oslo"]) -> str:
        """The weather of a city."""
        return f"sunny in {city}"

    @agent.tool_plain
    def get_time(city: Literal["Rome", "Oslo"]) -> str:
        """The time in a city."""
        return f"noon in {city}"

    return agent


def called(messages: list) -> list[str]:
    return [part.tool_name for message in messages for part in message.parts if isinstance(part, ToolCallPart)]


def check_an_agent_calls_two_tools_and_gives_a_typed_result(target: Target) -> None:
    done = connect(target).run_sync(ASK)
    assert called(done.all_messages())[:2] == list(ROUNDS), done.all_messages()
    assert isinstance(done.output, Report), done.output


async def check_the_same_as_a_stream(target: Target) -> None:
    async with connect(target).run_stream(ASK) as stream:
        output = await stream.get_output()
        assert called(stream.all_messages())[:2] == list(ROUNDS), stream.all_messages()
    assert isinstance(output, Report), output


def check_the_example_agent(target: Target) -> None:
    advice, results = pydantic_ai_agent.run(target.base_url, target.api_key, target.model)
    assert advice, advice
    assert sorted(one.split(": ")[1] for one in results) == ["rain until noon, then sun", "sunset at 20:14"], results


if __name__ == "__main__":
    run_checks(vars())
