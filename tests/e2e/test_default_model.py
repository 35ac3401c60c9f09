"""The default model as a newcomer meets it: real words, from every entry point."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tokenmill import LLM, AsyncLLM, SamplingParams
from tokenmill.cli.chat import Conversation

TOKENMILL = str(Path(sys.executable).with_name("tokenmill"))
GREEDY = SamplingParams(temperature=0, max_tokens=24)
CAPITAL = [{"role": "user", "content": "What is the capital of Japan?"}]


@pytest.fixture(scope="module")
def llm(default_model: Path, backend: dict[str, Any]) -> Iterator[LLM]:
    with LLM(str(default_model), **backend) as opened:
        yield opened


@pytest.mark.req("R21", "R28")
def test_it_answers_sensibly(llm: LLM) -> None:
    (out,) = llm.chat(CAPITAL, GREEDY)
    assert "Tokyo" in out.outputs[0].text
    assert out.outputs[0].finish_reason == "stop"
    assert "<|im_end|>" not in out.outputs[0].text
    (text,) = llm.generate("The opposite of hot is", SamplingParams(temperature=0, max_tokens=3))
    assert "cold" in text.outputs[0].text


@pytest.mark.req("R30", "B10")
def test_streams_of_many_at_once_equal_the_whole(llm: LLM, default_model: Path, backend: dict[str, Any]) -> None:
    prompts = [f"Write one sentence about the number {i}, with an emoji 😀." for i in range(6)]
    wanted = [out.outputs[0] for out in llm.chat([[{"role": "user", "content": one}] for one in prompts], GREEDY)]

    async def one(llm: AsyncLLM, prompt: str) -> tuple[str, str, list[int]]:
        pieces, shown = [], 0
        async for output in llm.chat([{"role": "user", "content": prompt}], GREEDY):
            pieces.append(output.outputs[0].text[shown:])
            shown = len(output.outputs[0].text)
        return "".join(pieces), output.outputs[0].text, output.outputs[0].token_ids

    async def all_of_them() -> list[tuple[str, str, list[int]]]:
        async with AsyncLLM(str(default_model), **backend) as online:
            return list(await asyncio.gather(*(one(online, prompt) for prompt in prompts)))

    for (joined, text, ids), out in zip(asyncio.run(all_of_them()), wanted, strict=True):
        assert joined == text
        if backend["backend"] == "torch":  # llama.cpp's numbers depend on who else is in a step
            assert (text, ids) == (out.text, out.token_ids)


def test_a_conversation_computes_only_what_is_new(llm: LLM) -> None:
    talk = Conversation(llm, SamplingParams(temperature=0, max_tokens=16))
    for turn, question in enumerate(["What is the capital of Japan?", "And of Italy?", "And what is 2 + 2?"]):
        before = len(talk.session.log)
        *_, out = talk.ask(question)
        if turn:
            assert out.usage.cached_tokens >= before - 1
        assert talk.session.log.tokens.tolist()[: out.usage.prompt_tokens] == out.prompt_token_ids
    assert "Tokyo" in talk.session.log.messages[1]["content"]
    assert "Rome" in talk.session.log.messages[3]["content"]
    answer = talk.ask("Count to one hundred.")
    next(answer)
    answer.close()  # type: ignore[attr-defined]
    *_, out = talk.ask("Go on.")
    assert out.outputs[0].finish_reason in ("stop", "length")


def test_near_texts_have_near_embeddings(llm: LLM) -> None:
    texts = ["The cat sat on the mat.", "A cat is sitting on a mat.", "Interest rates rose by half a percent."]
    cat, same, other = (out.outputs.embedding for out in llm.embed(texts, pooling="mean"))
    assert len(cat) == 576
    product = [sum(a * b for a, b in zip(cat, one, strict=True)) for one in (same, other)]
    assert product[0] > product[1]


def test_from_the_command_line(default_model: Path) -> None:
    def call(*arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
        command = [TOKENMILL, *arguments]
        return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=240)

    done = call("generate", "What is the capital of Japan?", "--temperature", "0", "--max-tokens", "16")
    assert done.returncode == 0, done.stderr
    assert "Tokyo" in done.stdout
    assert "tok/s" in done.stderr
    done = call("generate", "--temperature", "0", "--max-tokens", "8", stdin="What is 1+1?\n\nName a colour.\n")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["prompt"] for line in lines] == ["What is 1+1?", "Name a colour."]
    assert all(line["completion_tokens"] <= 8 for line in lines)
    questions = "What is the capital of Japan?\n/help\nAnd of Italy?\n/new\n/exit\n"
    done = call("chat", "--temperature", "0", "--max-tokens", "12", stdin=questions)
    assert done.returncode == 0, done.stderr
    assert "Tokyo" in done.stdout
    assert "Rome" in done.stdout
    assert "prompt tokens cached" in done.stderr
    assert call("pull").stdout.strip() == str(default_model)
