"""An agent on LangChain, with middleware that chooses its tools.

pip install langchain langchain-openai
tokenmill serve                              # the default model; a larger one gives better advice
python examples/agents/langchain_agent.py
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Literal

from langchain.agents import create_agent
from langchain.agents.middleware import ModelRequest, wrap_model_call
from langchain.agents.structured_output import ProviderStrategy
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

URL, MODEL = "http://127.0.0.1:8000/v1", "smollm2-135m"
QUESTION = "I am going for a walk in Oslo today. When should I leave, and do I need an umbrella?"
City = Literal["Oslo", "Rome"]


class Advice(BaseModel):
    """The final answer."""

    umbrella: bool
    leave: Literal["in the morning", "at noon", "in the evening"]


@tool
def get_forecast(city: City) -> str:
    """The weather forecast of a city for today."""
    return f"{city}: rain until noon, then sun"


@tool
def get_sunset(city: City) -> str:
    """The time of sunset in a city."""
    return f"{city}: sunset at 20:14"


@wrap_model_call
def offer_each_tool_once(request: ModelRequest, handler: Callable[[ModelRequest], Any]) -> Any:
    """Small models repeat a call that has been answered: each tool is offered once, and then an answer is due."""
    used = {message.name for message in request.messages if isinstance(message, ToolMessage)}
    unused = [one for one in request.tools if one.name not in used]
    if not unused:
        return handler(request.override(tools=[]))
    settings = {**request.model_settings, "parallel_tool_calls": False}
    return handler(
        request.override(tools=unused, tool_choice="required", response_format=None, model_settings=settings)
    )


def run(base_url: str = URL, api_key: str = "none", model: str = MODEL) -> tuple[Advice, list[str]]:
    """The advice, and what the tools have returned on the way to it."""
    chat = ChatOpenAI(model=model, base_url=base_url, api_key=api_key, temperature=0)
    agent = create_agent(
        chat,
        tools=[get_forecast, get_sunset],
        middleware=[offer_each_tool_once],
        response_format=ProviderStrategy(Advice),
    )
    done = agent.invoke({"messages": [HumanMessage(QUESTION)]})
    results = [message.text for message in done["messages"] if isinstance(message, ToolMessage)]
    return done["structured_response"], results


if __name__ == "__main__":
    advice, results = run(*sys.argv[1:])
    print(*results, advice, sep="\n")
