"""`openai-agents`: an agent over chat completions and over responses."""

from __future__ import annotations

from typing import Any, Literal

import openai
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIConversationsSession,
    OpenAIResponsesModel,
    Runner,
    ToolsToFinalOutputResult,
    function_tool,
    set_tracing_disabled,
)

from tests.clients.checking import Target, run_checks

ASK = "What is the weather in Rome, and the time?"
NUM_ROUNDS = 2
set_tracing_disabled(True)


@function_tool
def get_weather(city: Literal["Rome", "Oslo"]) -> str:
    """The weather of a city."""
    return f"sunny in {city}"


def agent_on(kind: Any, target: Target) -> Agent:
    """One that must call a tool each time; after two rounds, the result is the answer."""
    client = openai.AsyncOpenAI(base_url=target.base_url, api_key=target.api_key, max_retries=0, timeout=45)
    seen = []

    def after(_: Any, results: Any) -> ToolsToFinalOutputResult:
        seen.append(results)
        is_last = len(seen) == NUM_ROUNDS
        return ToolsToFinalOutputResult(is_last, results[0].output if is_last else None)

    settings = ModelSettings(temperature=0, max_tokens=100, tool_choice="required", parallel_tool_calls=False)
    return Agent(
        name="weather",
        instructions="Use the tools.",
        model=kind(model=target.model, openai_client=client),
        model_settings=settings,
        tools=[get_weather],
        tool_use_behavior=after,
        reset_tool_choice=False,
    )


async def check_an_agent_calls_tools_in_two_rounds(target: Target) -> None:
    done = await Runner.run(agent_on(OpenAIChatCompletionsModel, target), ASK)
    assert str(done.final_output).startswith("sunny in "), done
    assert len(done.raw_responses) == NUM_ROUNDS, done.raw_responses


async def check_the_same_as_a_stream(target: Target) -> None:
    done = Runner.run_streamed(agent_on(OpenAIChatCompletionsModel, target), ASK)
    kinds = {event.type async for event in done.stream_events()}
    assert "run_item_stream_event" in kinds, kinds
    assert str(done.final_output).startswith("sunny in "), done


async def check_the_same_over_responses(target: Target) -> None:
    done = await Runner.run(agent_on(OpenAIResponsesModel, target), ASK)
    assert str(done.final_output).startswith("sunny in "), done
    streamed = Runner.run_streamed(agent_on(OpenAIResponsesModel, target), ASK)
    async for _ in streamed.stream_events():
        pass
    assert str(streamed.final_output) == str(done.final_output), streamed


async def check_a_session_over_conversations(target: Target) -> None:
    client = openai.AsyncOpenAI(base_url=target.base_url, api_key=target.api_key, max_retries=0, timeout=45)
    session = OpenAIConversationsSession(openai_client=client)
    for _ in range(2):
        done = await Runner.run(agent_on(OpenAIResponsesModel, target), ASK, session=session)
        assert str(done.final_output).startswith("sunny in "), done
    kinds = [item.get("type", "message") for item in await session.get_items()]
    one_run = ["message", *["function_call", "function_call_output"] * NUM_ROUNDS]
    assert kinds == [*one_run, *one_run], kinds
    await session.clear_session()


if __name__ == "__main__":
    run_checks(vars())
