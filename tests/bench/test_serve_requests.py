"""What `vllm bench serve` sends and reads, byte for byte as it does: our server answers it unchanged."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.serving import Child, Reply, request

IDS = list(range(97, 121))
USAGE = {"include_usage": True}


def post(server: Child, path: str, body: Any) -> Reply:
    """With the headers of that tool: no key, and for completions no more of a content type than the JSON's."""
    return request(server.port, "POST", path, body, key=None, headers={"x-request-id": "bench-5f3a9c21-0"})


def completion(server: Child, **changes: Any) -> Reply:
    body = {
        "model": "fake",
        "prompt": IDS,
        "repetition_penalty": 1.0,
        "max_tokens": 7,
        "logprobs": None,
        "stream": True,
        "stream_options": USAGE,
        "ignore_eos": True,
    }
    return post(server, "/v1/completions", {**body, **changes})


def chat(server: Child, **changes: Any) -> Reply:
    body = {
        "model": "fake",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "tell me more"}]}],
        "max_completion_tokens": 7,
        "stream": True,
        "stream_options": USAGE,
        "ignore_eos": True,
    }
    return post(server, "/v1/chat/completions", {**body, **changes})


def read(reply: Reply) -> tuple[int, dict[str, Any]]:
    """As the tool reads a stream: chunks with choices are tokens, and the one without them has the usage."""
    assert reply.status == 200, reply.body
    assert b"\r" not in reply.body  # it splits at "\n\n"
    num_chunks, usage = 0, {}
    for data in reply.events():
        if choices := data.get("choices"):
            num_chunks += 1
            assert "text" in choices[0] or "delta" in choices[0]
        elif found := data.get("usage"):
            usage = found
    return num_chunks, usage


def test_it_finds_the_first_model_and_its_root(server: Child) -> None:
    (model,) = request(server.port, "GET", "/v1/models", key=None).json()["data"]
    assert (model["id"], model["root"]) == ("fake", "fake")


def test_completions_of_token_ids(server: Child) -> None:
    num_chunks, usage = read(completion(server))
    assert num_chunks >= 1
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(IDS), 7)


@pytest.mark.parametrize("prompt", ["a text", ["a text in a list"], [IDS]])
def test_completions_of_other_prompts(server: Child, prompt: Any) -> None:
    assert read(completion(server, prompt=prompt))[1]["completion_tokens"] == 7


def test_chats_of_content_parts(server: Child) -> None:
    num_chunks, usage = read(chat(server))
    assert num_chunks >= 1
    assert usage["completion_tokens"] == 7


def test_the_first_chunk_of_a_chat_counts_no_token(server: Child) -> None:
    allowed = [ord("a")]
    first, second = chat(server, allowed_token_ids=allowed, stream_options={**USAGE, "continuous_usage_stats": True}
    ).events()[:2]  # fmt: skip
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert first["usage"]["completion_tokens"] == 0
    assert second["choices"][0]["delta"]["content"].startswith("a")
    assert second["usage"]["completion_tokens"] >= 1


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.0},
        {"top_p": 0.9, "top_k": 20, "min_p": 0.01, "temperature": 0.7},
        {"frequency_penalty": 0.1, "presence_penalty": 0.1, "repetition_penalty": 1.1},
        {"min_tokens": 7},
    ],
)
def test_sampling_options(server: Child, sampling: dict[str, Any]) -> None:
    assert read(completion(server, **sampling))[1]["completion_tokens"] == 7
    assert read(chat(server, **sampling))[1]["completion_tokens"] == 7


def test_random_prompts_can_be_aligned_with_the_servers_tokenizer(server: Child) -> None:
    text = {"model": "fake", "prompt": "some words", "add_special_tokens": False}
    tokens = post(server, "/tokenize", text).json()["tokens"]
    short = post(server, "/detokenize", {"model": "fake", "tokens": tokens[:4]}).json()["prompt"]
    assert post(server, "/tokenize", {**text, "prompt": short}).json()["tokens"] == tokens[:4]


def test_it_may_look_for_metrics_and_health(server: Child) -> None:
    assert request(server.port, "GET", "/health", key=None).status == 200
    assert request(server.port, "GET", "/metrics", key=None).status in (200, 404)  # it goes on without them
