"""An agent on the openai package alone: the loop is here.

pip install openai
tokenmill serve                              # the default model; a larger one gives better advice
python examples/agents/openai_agent.py
"""

from __future__ import annotations

import sys
from typing import Any, Literal

import openai
from pydantic import BaseModel

URL, MODEL = "http://127.0.0.1:8000/v1", "smollm2-135m"
QUESTION = "I am going for a walk in Oslo today. When should I leave, and do I need an umbrella?"
City = Literal["Oslo", "Rome"]


class GetForecast(BaseModel):
    """The weather forecast of a city for today."""

    city: City

    def run(self) -> str:
        return f"{self.city}: rain until noon, then sun"


class GetSunset(BaseModel):
    """The time of sunset in a city."""

    city: City

    def run(self) -> str:
        return f"{self.city}: sunset at 20:14"


class Advice(BaseModel):
    """The final answer."""

    umbrella: bool
    leave: Literal["in the morning", "at noon", "in the evening"]


def run(base_url: str = URL, api_key: str = "none", model: str = MODEL) -> tuple[Advice, list[str]]:
    """The advice, and what the tools have returned on the way to it."""
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    results: list[str] = []
    # Small models repeat a call that has been answered: each tool is offered once, and then an answer is due.
    unused: dict[str, type[BaseModel]] = {"GetForecast": GetForecast, "GetSunset": GetSunset}
    with openai.OpenAI(base_url=base_url, api_key=api_key) as client:
        while unused:
            message = (
                client.chat.completions.parse(
                    model=model,
                    messages=messages,
                    tools=[openai.pydantic_function_tool(tool) for tool in unused.values()],
                    tool_choice="required",
                    parallel_tool_calls=False,
                    temperature=0,
                )
                .choices[0]
                .message
            )
            messages.append(message)
            for call in message.tool_calls or ():
                arguments: Any = call.function.parsed_arguments
                results.append(arguments.run())
                messages.append({"role": "tool", "tool_call_id": call.id, "content": results[-1]})
                del unused[call.function.name]
        answer = client.chat.completions.parse(model=model, messages=messages, response_format=Advice, temperature=0)
    advice = answer.choices[0].message.parsed
    assert advice is not None  # constrained decoding: every complete answer matches
    return advice, results


if __name__ == "__main__":
    advice, results = run(*sys.argv[1:])
    print(*results, advice, sep="\n")
