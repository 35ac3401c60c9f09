"""`llm`, the command line: a server of one's own, named in its file of extra models, or given by its address."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from tests.clients.checking import PROMPT, Target, raises, run_checks

LLM = str(Path(sys.executable).with_name("llm"))
TIMEOUT_S = 120
SHORT = ("-o", "max_tokens", "16", "-o", "temperature", "0")
MODELS = """
- model_id: mill
  model_name: {model}
  api_base: {base_url}
  api_key_name: mill
- model_id: mill-text
  model_name: {model}
  api_base: {base_url}
  api_key_name: mill
  completion: true
"""


@cache
def folder(target: Target) -> tempfile.TemporaryDirectory[str]:
    """Where llm keeps its settings; removed when the script ends."""
    made = tempfile.TemporaryDirectory(prefix="llm-")
    place = Path(made.name)
    place.joinpath("keys.json").write_text(json.dumps({"mill": target.api_key}))
    place.joinpath("extra-openai-models.yaml").write_text(MODELS.format(model=target.model, base_url=target.base_url))
    return made


def llm(target: Target, *arguments: str) -> str:
    """What `llm ARGUMENTS` prints."""
    environment = {**os.environ, "LLM_USER_PATH": folder(target).name}
    done = subprocess.run(
        [LLM, *arguments], env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=TIMEOUT_S
    )
    error = done.stderr.decode(errors="replace")
    assert done.returncode == 0, f"llm {' '.join(arguments)}: {error.strip()[-400:]}"
    return done.stdout.decode(errors="replace").removesuffix("\n")


def logs(target: Target, count: int) -> list[dict[str, Any]]:
    """The last entries of the log, oldest first."""
    entries: list[dict[str, Any]] = json.loads(llm(target, "logs", "list", "--json", "-n", str(count)))
    return entries


def check_prompt_with_and_without_streaming(target: Target) -> None:
    streamed = llm(target, "-m", "mill", PROMPT, *SHORT)
    assert streamed.strip(), "an empty answer"
    assert llm(target, "-m", "mill", PROMPT, *SHORT, "--no-stream") == streamed
    first, second = logs(target, 2)
    assert first["input_tokens"] == second["input_tokens"] > 0, (first, second)
    assert first["output_tokens"] == second["output_tokens"] > 0, (first, second)


def check_system_prompt_and_continued_conversation(target: Target) -> None:
    assert llm(target, "-m", "mill", "-s", "Be brief.", PROMPT, *SHORT).strip()
    assert llm(target, "-c", "Say more.", *SHORT).strip()
    first, second = logs(target, 2)
    assert first["conversation_id"] == second["conversation_id"], "the second turn began a new conversation"
    assert first["input_tokens"] < second["input_tokens"], "the second turn does not have the first before it"


def check_a_completion_model(target: Target) -> None:
    streamed = llm(target, "-m", "mill-text", "The sea is", *SHORT)
    assert streamed.strip(), "an empty answer"
    assert llm(target, "-m", "mill-text", "The sea is", *SHORT, "--no-stream") == streamed


def check_an_endpoint_by_its_address(target: Target) -> None:
    where = ("openai", "endpoint", target.base_url, "--key", target.api_key)
    assert target.model in llm(target, *where, "--models").split()
    answer = llm(target, *where, "-m", target.model, *SHORT, PROMPT)
    assert answer.strip(), "an empty answer"


def check_an_endpoint_with_the_responses_api(target: Target) -> None:
    where = ("openai", "endpoint", target.base_url, "--key", target.api_key, "--responses")
    assert llm(target, *where, "-m", target.model, *SHORT, PROMPT).strip(), "an empty answer"


def check_an_error_is_readable(target: Target) -> None:
    where = ("openai", "endpoint", target.base_url, "--key", target.api_key)
    error = raises(AssertionError, lambda: llm(target, *where, "-m", "nobody", PROMPT))
    assert "Error code: 404" in str(error), error
    assert "nobody" in str(error).partition("Error code")[2], error


if __name__ == "__main__":
    run_checks(vars())
