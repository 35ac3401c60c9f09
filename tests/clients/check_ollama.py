"""The official Ollama client: chat, generate, embeddings, tools, structured output, models; sync, async, streamed."""

from __future__ import annotations

import json
import os
from typing import Any, Literal

import ollama
from pydantic import BaseModel

from tests.clients.checking import PROMPT, TOO_LONG, Target, raises, run_checks

MESSAGES: Any = [{"role": "user", "content": PROMPT}]
SHORT: Any = {"num_predict": 16, "temperature": 0}


class City(BaseModel):
    name: Literal["Rome", "Oslo"]
    is_capital: bool


def get_weather(city: str) -> str:
    """The weather of a city.

    Args:
      city: Its name.
    """
    return f"sunny in {city}"


def connect(target: Target) -> ollama.Client:
    os.environ["OLLAMA_API_KEY"] = target.api_key
    return ollama.Client(target.base_url.removesuffix("/v1"))


def check_chat(target: Target) -> None:
    answer = connect(target).chat(target.model, MESSAGES, options=SHORT)
    assert answer.message.role == "assistant"
    assert answer.message.content
    assert answer.done
    assert answer.done_reason in ("stop", "length")
    assert answer.eval_count
    assert answer.total_duration >= answer.eval_duration > 0


def check_a_streamed_chat(target: Target) -> None:
    client = connect(target)
    whole = client.chat(target.model, MESSAGES, options=SHORT).message.content
    pieces = list(client.chat(target.model, MESSAGES, options=SHORT, stream=True))
    assert "".join(piece.message.content for piece in pieces) == whole
    assert [piece.done for piece in pieces] == [False] * (len(pieces) - 1) + [True]


def check_generate(target: Target) -> None:
    client = connect(target)
    whole = client.generate(target.model, PROMPT, system="Be brief.", options=SHORT)
    assert whole.response
    pieces = client.generate(target.model, PROMPT, system="Be brief.", options=SHORT, stream=True)
    assert "".join(piece.response for piece in pieces) == whole.response
    assert client.generate(target.model, "Once upon a", raw=True, options=SHORT).response
    assert client.generate(target.model).done_reason == "load"


def check_embed(target: Target) -> None:
    client = connect(target)
    told = client.embed(target.model, ["a text", "another"])
    assert len(told.embeddings) == 2
    one = client.embed(target.model, "a text").embeddings[0]
    assert all(abs(a - b) < 1e-4 for a, b in zip(one, told.embeddings[0], strict=True))
    assert len(client.embeddings(target.model, "a text").embedding) == len(one)


def check_tools(target: Target) -> None:
    client = connect(target)
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    regex = call.replace("{", r"\{").replace("}", r"\}")
    told = client.chat(target.model, MESSAGES, tools=[get_weather], options={"num_predict": 100, "regex": regex})
    (asked,) = told.message.tool_calls
    assert (asked.function.name, asked.function.arguments) == ("get_weather", {"city": "Rome"})
    result = {"role": "tool", "tool_name": "get_weather", "content": get_weather(**asked.function.arguments)}
    answer = client.chat(target.model, [*MESSAGES, told.message, result], tools=[get_weather], options=SHORT)
    assert answer.prompt_eval_count > told.prompt_eval_count


def check_structured_output(target: Target) -> None:
    client = connect(target)
    options = {"num_predict": 200}
    told = client.chat(target.model, MESSAGES, format=City.model_json_schema(), options=options)
    assert City.model_validate_json(told.message.content)
    pieces = client.generate(target.model, PROMPT, format=City.model_json_schema(), options=options, stream=True)
    assert City.model_validate_json("".join(piece.response for piece in pieces))


def check_any_json(target: Target) -> None:
    said = connect(target).chat(target.model, MESSAGES, format="json", options={"num_predict": 300}).message.content
    assert said.lstrip().startswith("{")
    if said.rstrip().endswith("}"):
        json.loads(said)


def check_models(target: Target) -> None:
    client = connect(target)
    (model,) = client.list().models
    assert model.model == target.model
    assert (model.size or 0) > 0 or target.model == "fake"
    (running,) = client.ps().models
    assert running.model == target.model
    assert running.context_length
    shown = client.show(target.model)
    assert "completion" in shown.capabilities
    architecture = shown.modelinfo["general.architecture"]
    assert shown.modelinfo[f"{architecture}.context_length"] == running.context_length


def check_think(target: Target) -> None:
    told = connect(target).chat(target.model, MESSAGES, think=False, options=SHORT)
    assert told.message.content
    assert told.message.thinking is None


def check_log_probabilities(target: Target) -> None:
    told = connect(target).chat(target.model, MESSAGES, logprobs=True, top_logprobs=3, options=SHORT)
    assert told.logprobs
    assert len(told.logprobs[0].top_logprobs) == 3


async def check_async(target: Target) -> None:
    os.environ["OLLAMA_API_KEY"] = target.api_key
    client = ollama.AsyncClient(target.base_url.removesuffix("/v1"))
    whole = await client.chat(target.model, MESSAGES, options=SHORT)
    pieces = [piece async for piece in await client.chat(target.model, MESSAGES, options=SHORT, stream=True)]
    assert "".join(piece.message.content for piece in pieces) == whole.message.content
    assert (await client.list()).models
    await client.close()


def check_errors(target: Target) -> None:
    client = connect(target)
    error = raises(ollama.ResponseError, lambda: client.chat("nothing", MESSAGES))
    assert error.status_code == 404
    assert "nothing" in error.error
    long: Any = [{"role": "user", "content": TOO_LONG}]
    error = raises(ollama.ResponseError, lambda: list(client.chat(target.model, long, stream=True)))
    assert error.status_code == 400
    assert "context" in error.error
    assert raises(ollama.ResponseError, lambda: client.pull("anything")).status_code == 403


def check_leaving_a_stream_ends_it(target: Target) -> None:
    client = connect(target)
    for _ in range(6):  # more than the server has places for
        next(client.chat(target.model, MESSAGES, options={"num_predict": 2000}, stream=True))
    assert client.chat(target.model, MESSAGES, options={"num_predict": 1}).eval_count == 1


if __name__ == "__main__":
    run_checks(globals())
