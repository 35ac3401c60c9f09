"""A LiteLLM proxy in front of the server: OpenAI's and Anthropic's clients, through it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from functools import cache
from pathlib import Path
from typing import Any

import anthropic
import openai

from tests.clients.checking import PROMPT, TOO_LONG, Target, raises, run_checks

ASK: Any = [{"role": "user", "content": PROMPT}]
ALIAS, MASTER_KEY = "through-the-proxy", "sk-proxy"
START_S = 240.0
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]},
    },
}


@cache
def proxy(target: Target) -> str:
    """Start it, once; gives its address."""
    folder = Path(tempfile.mkdtemp(prefix="litellm-"))
    where = {"api_base": target.base_url, "api_key": target.api_key}
    models = [
        {"model_name": ALIAS, "litellm_params": {"model": f"hosted_vllm/{target.model}", **where}},
        {"model_name": "unknown", "litellm_params": {"model": "hosted_vllm/nothing", **where}},
    ]
    settings = {"num_retries": 0, "telemetry": False}
    config = {"model_list": models, "litellm_settings": settings, "general_settings": {"master_key": MASTER_KEY}}
    (folder / "config.yaml").write_text(json.dumps(config))  # JSON is YAML
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    command = [str(Path(sys.executable).with_name("litellm")), "--config", str(folder / "config.yaml")]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    environment = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR"}
    log = folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment, cwd=folder)
    RUNNING.append(process)
    url, ends = f"http://127.0.0.1:{port}", time.monotonic() + START_S
    while time.monotonic() < ends and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health/liveliness", timeout=5):
                return url
        except OSError:
            time.sleep(0.2)
    raise AssertionError(f"the proxy did not start: {log.read_text(errors='replace')[-500:]}")


RUNNING: list[subprocess.Popen[bytes]] = []


def connect(target: Target) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{proxy(target)}/v1", api_key=MASTER_KEY, max_retries=0, timeout=60)


def chat(target: Target, **more: Any) -> Any:
    asked = {"model": ALIAS, "messages": ASK, "max_tokens": 12, "temperature": 0, **more}
    return connect(target).chat.completions.create(**asked)


def check_a_chat_whole_and_streamed(target: Target) -> None:
    direct = openai.OpenAI(base_url=target.base_url, api_key=target.api_key).chat.completions.create(
        model=target.model, messages=ASK, max_tokens=12, temperature=0
    )
    whole = chat(target)
    assert whole.choices[0].message.content == direct.choices[0].message.content
    assert whole.usage.total_tokens == direct.usage.total_tokens
    chunks = list(chat(target, stream=True))
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content


def check_a_tool(target: Target) -> None:
    told = chat(target, tools=[WEATHER], tool_choice="required", max_tokens=300)
    call = told.choices[0].message.tool_calls[0]
    assert json.loads(call.function.arguments)["city"] in ("Rome", "Oslo")


def check_structured_output(target: Target) -> None:
    parameters = {**WEATHER["function"]["parameters"], "additionalProperties": False}
    schema = {"name": "city", "schema": parameters}
    form = {"type": "json_schema", "json_schema": schema}
    told = chat(target, response_format=form, max_tokens=200)
    assert json.loads(told.choices[0].message.content)["city"] in ("Rome", "Oslo")


def check_embeddings(target: Target) -> None:
    told = connect(target).embeddings.create(model=ALIAS, input=["the sea", "a train"], encoding_format="float")
    assert [one.index for one in told.data] == [0, 1]


def check_anthropics_client_through_the_proxy(target: Target) -> None:
    client = anthropic.Anthropic(base_url=proxy(target), api_key=MASTER_KEY, max_retries=0)
    message = client.messages.create(model=ALIAS, max_tokens=12, messages=ASK)
    assert message.content[0].text
    with client.messages.stream(model=ALIAS, max_tokens=12, messages=ASK) as stream:
        assert stream.get_final_message().content


def check_errors(target: Target) -> None:
    raises(openai.NotFoundError, lambda: chat(target, model="unknown"))
    long: Any = [{"role": "user", "content": TOO_LONG}]
    error = raises(openai.BadRequestError, lambda: chat(target, messages=long))
    assert "context" in str(error)


if __name__ == "__main__":
    try:
        run_checks(vars())
    finally:
        for process in RUNNING:
            process.terminate()
            process.wait(30)
