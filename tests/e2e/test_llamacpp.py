"""SmolLM2 on llama.cpp: a crowd says what each says alone, the ids are torch's, and the terminal stays clean."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_deterministic import TEXTS
from tests.llamacpp import needs_llamacpp
from tokenmill import LLM, SamplingParams, open_model
from tokenmill.config import EngineConfig
from tokenmill.engine.scheduler import Scheduler
from tokenmill.outputs import RequestOutput
from tokenmill.text.llamacpp import LlamaTokenizer
from tokenmill.text.model_text import open_text

pytestmark = needs_llamacpp

NEW = 6
BATCH_EFFECT = 1.5
"""The stated agreement of log-probabilities (docs/llamacpp.md)."""
PARAMS = SamplingParams(temperature=0, max_tokens=NEW, logprobs=2, ignore_eos=True)


@pytest.fixture(scope="module")
def model(default_model: Path) -> Iterator[Any]:
    opened = open_model(str(default_model), backend="llamacpp", n_threads=1)
    yield opened
    opened.close()


def prompts(model: Any) -> list[list[int]]:
    """Sixteen, of 3 to 30 tokens."""
    tokenizer = open_text(model).tokenizer
    return [tokenizer.encode(text * (1 + i % 3)) for i, text in enumerate([*TEXTS, *(f"Well: {one}" for one in TEXTS)])]


def run(model: Any, cells: int = 2048, *, alone: bool = False, **settings: Any) -> list[RequestOutput]:
    config = EngineConfig(**{"max_num_seqs": 16, "prefix_caching": False, **settings})
    with LLM(model, config=config, kv_cache_tokens=cells) as llm:
        if alone:
            return [llm.generate([prompt], PARAMS)[0] for prompt in prompts(model)]
        return llm.generate(prompts(model), PARAMS)


def count_calls(monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> list[object]:
    """A list that grows with each call of a method."""
    calls: list[object] = []
    method = getattr(owner, name)

    def counted(self: object, *arguments: object) -> object:
        calls.append(arguments)
        return method(self, *arguments)

    monkeypatch.setattr(owner, name, counted)
    return calls


def check_agreement(found: list[RequestOutput], alone: list[RequestOutput]) -> None:
    """Equal ids; where two begin to differ, the likeliest token is so by less than the stated agreement."""
    for one, other in zip(found, alone, strict=True):
        ids, wanted = one.outputs[0].token_ids, other.outputs[0].token_ids
        assert len(ids) == NEW
        place = next((i for i, (a, b) in enumerate(zip(ids, wanted, strict=True)) if a != b), None)
        if place is not None:
            assert other.outputs[0].logprobs is not None
            (_, best), (_, second) = other.outputs[0].logprobs[place].top[:2]
            assert best - second < 2 * BATCH_EFFECT, f"{ids} is not {wanted} from {place} on"


@pytest.mark.req("R11")
def test_sixteen_together_say_what_each_says_alone(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one batch, in chunks, and preempted and replayed."""
    alone = run(model, alone=True)
    check_agreement(run(model), alone)
    check_agreement(run(model, prefill_chunk=7, max_num_batched_tokens=24), alone)
    preempted = count_calls(monkeypatch, Scheduler, "_preempt")
    check_agreement(run(model, cells=150, admission_margin=0), alone)
    assert preempted
    assert len({tuple(out.outputs[0].token_ids) for out in alone}) > 12


@pytest.mark.fault("E05")
def test_the_ids_are_those_of_torch_and_of_llama_cpp(model: Any, default_model: Path) -> None:
    ours, theirs = open_text(model), LlamaTokenizer(model.vocab)
    torch_text = open_text(open_model(str(default_model), backend="torch", device="cpu"))
    texts = [*TEXTS, "", " ", "naïve 日本 😀\n\n\t1984 don't", "<|im_start|>user", "x" * 300]
    for text in texts:
        ids = ours.tokenizer.encode(text)
        assert ids == torch_text.tokenizer.encode(text) == theirs.encode(text)
        assert ours.tokenizer.decode(ids) == theirs.decode(ids) == text
    chat = [{"role": "user", "content": "Hi <|im_end|> there"}]
    rendered = "<|im_start|>user\nhi<|im_end|>\n"
    assert ours.chat_template().encode(chat) == torch_text.chat_template().encode(chat)
    assert ours.tokenizer.encode_template(rendered) == theirs.encode_template(rendered)
    places = [(0, 12)]
    assert ours.tokenizer.encode_template(rendered, places) == theirs.encode_template(rendered, places)
    assert ours.tokenizer.eos_ids <= theirs.eos_ids  # llama.cpp ends at a name of a repository, too
    assert [ours.tokenizer.token_bytes(i) for i in range(0, 49_152, 97)] == [
        theirs.token_bytes(i) for i in range(0, 49_152, 97)
    ]


def test_from_the_command_line(default_model: Path) -> None:
    command = [sys.executable, "-m", "tokenmill", "generate", "What is the capital of Japan?", "--max-tokens", "12"]
    command += ["--temperature", "0", "--backend", "llamacpp", "--extra", "n_ctx=512", "--threads", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "Tokyo" in done.stdout
    backend, speed = done.stderr.splitlines()
    assert backend == f"tokenmill: {default_model.name}: backend llamacpp (as asked for)"
    assert "tok/s" in speed
