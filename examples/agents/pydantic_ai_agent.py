"""An agent on pydantic-ai, with a typed result.

pip install 'pydantic-ai-slim[openai]'
tokenmill serve                              # the default model; a larger one gives better advice
python examples/agents/pydantic_ai_agent.py
"""

from __future__ import annotations

import sys
from typing import Literal

from pydantic import BaseModel
from pydantic_ai import Agent, RunContext
from pydantic_ai.capabilities import PrepareOutputTools, PrepareTools
from pydantic_ai.messages import ModelMessage, ToolReturnPart
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.tools import ToolDefinition

URL, MODEL = "http://127.0.0.1:8000/v1", "smollm2-135m"
QUESTION = "I am going for a walk in Oslo today. When should I leave, and do I need an umbrella?"
City = Literal["Oslo", "Rome"]


class Advice(BaseModel):
    """The final answer."""

    umbrella: bool
    leave: Literal["in the morning", "at noon", "in the evening"]


def get_forecast(city: City) -> str:
    """The weather forecast of a city for today."""
    return f"{city}: rain until noon, then sun"


def get_sunset(city: City) -> str:
    """The time of sunset in a city."""
    return f"{city}: sunset at 20:14"


TOOLS = (get_forecast, get_sunset)


def returned(messages: list[ModelMessage]) -> dict[str, str]:
    """What the tools have returned, by name."""
    names = {tool.__name__ for tool in TOOLS}
    parts = [part for message in messages for part in message.parts if isinstance(part, ToolReturnPart)]
    return {part.tool_name: str(part.content) for part in parts if part.tool_name in names}


# Small models repeat a call that has been answered: each tool is offered once, and then an answer is due.
async def unused(context: RunContext[None], tools: list[ToolDefinition]) -> list[ToolDefinition]:
    return [tool for tool in tools if tool.name not in returned(context.messages)]


async def at_last(context: RunContext[None], outputs: list[ToolDefinition]) -> list[ToolDefinition]:
    return outputs if len(returned(context.messages)) == len(TOOLS) else []


def run(base_url: str = URL, api_key: str = "none", model: str = MODEL) -> tuple[Advice, list[str]]:
    """The advice, and what the tools have returned on the way to it."""
    agent = Agent(
        OpenAIChatModel(model, provider=OpenAIProvider(base_url=base_url, api_key=api_key)),
        output_type=Advice,
        tools=TOOLS,
        capabilities=[PrepareTools(unused), PrepareOutputTools(at_last)],
        model_settings={"temperature": 0.0, "parallel_tool_calls": False},
    )
    done = agent.run_sync(QUESTION)
    return done.output, list(returned(done.all_messages()).values())


if __name__ == "__main__":
    advice, results = run(*sys.argv[1:])
    print(*results, advice, sep="\n")
