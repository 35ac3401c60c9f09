"""What real clients rely on in whole answers. Each test is named by its rule."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
from openai.types import CreateEmbeddingResponse
from openai.types.chat import ChatCompletion
from openai.types.completion import Completion

from tests.server.rules import (
    CHAT,
    COMPLETION,
    EMBEDDING,
    GENERATING,
    NAMES,
    RESPONSE,
    assert_error,
    strict,
    strict_json,
)
from tests.server.serving import HI, Running


def answers(server: Running, what: tuple[str, dict[str, Any]], **changes: Any) -> Any:
    path, body = what
    reply = server.post(path, {**body, **changes})
    assert reply.status == 200, reply.body
    return reply.json()


# -- whole answers ----------------------------------------------------------------------------------------------------


@pytest.mark.fault("E11")
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("what", [CHAT, COMPLETION], ids=NAMES[:2])
def test_c11_usage_is_three_whole_numbers_and_a_sum(server: Running, what: tuple[str, Any], n: int) -> None:
    usage = answers(server, what, n=n, ignore_eos=True)["usage"]
    counts = [usage.pop(name) for name in ("prompt_tokens", "completion_tokens", "total_tokens")]
    assert all(type(count) is int for count in counts)
    assert counts[0] + counts[1] == counts[2]
    assert counts[1] == 12 * n
    details = [count for one in usage.values() for count in one.values()]
    assert all(type(count) is int for count in details)


def test_c11_usage_of_embeddings(server: Running) -> None:
    assert answers(server, EMBEDDING)["usage"] == {"prompt_tokens": 3, "total_tokens": 3}


@pytest.mark.parametrize("changes", [{}, {"n": 3}, {"logprobs": True, "top_logprobs": 3}, {"stop": ["a", "e"]}])
def test_c12_a_chat_has_the_form_of_its_type(server: Running, changes: dict[str, Any]) -> None:
    data = answers(server, CHAT, **changes)
    assert data["choices"]
    assert all({"role", "content"} <= set(choice["message"]) for choice in data["choices"])
    answer = strict(ChatCompletion, data)
    assert [choice.index for choice in answer.choices] == list(range(changes.get("n", 1)))
    assert {choice.message.role for choice in answer.choices} == {"assistant"}
    assert answer.model == "fake"


@pytest.mark.parametrize("encoding", ["float", "base64"])
def test_c12_embeddings_have_the_form_of_their_type(server: Running, encoding: str) -> None:
    data = answers(server, EMBEDDING, encoding_format=encoding)
    assert all(isinstance(one["embedding"], list if encoding == "float" else str) for one in data["data"])
    for one in data["data"]:
        one["embedding"] = one["embedding"] if encoding == "float" else []  # the type is that of decoded ones
    read = strict(CreateEmbeddingResponse, data)
    assert [one.index for one in read.data] == [0, 1]


# -- parameters that mean nothing here --------------------------------------------------------------------------------

IGNORED: dict[str, Any] = {
    "user": "somebody",
    "metadata": {"a": "b"},
    "store": True,
    "service_tier": "auto",
    "parallel_tool_calls": False,
    "prediction": {"type": "content", "content": "hi"},
    "reasoning_effort": "low",
    "verbosity": "low",
    "modalities": ["text"],
    "response_format": {"type": "text"},
    "tools": [],
    "tool_choice": "none",
    "logit_bias": {},
    "stop": [],
    "safety_identifier": "s",
    "prompt_cache_key": "k",
    "web_search_options": {},
    "best_of": 1,
    "suffix": "",
    "truncation": "auto",
    "reasoning": {"effort": "low"},
    "include": [],
    "text": {"format": {"type": "text"}},
    "background": False,
    "never_heard_of": {"deep": [1]},
}
EMPTY = (
    *("n", "stop", "stream", "stream_options", "temperature", "top_p", "logprobs", "top_logprobs", "logit_bias"),
    *("presence_penalty", "frequency_penalty", "tools", "tool_choice", "response_format", "user", "metadata"),
)


@pytest.mark.parametrize("name", IGNORED)
def test_c20_what_is_not_supported_changes_nothing(server: Running, name: str) -> None:
    for what in GENERATING:
        assert text_of(answers(server, what, **{name: IGNORED[name]})) == text_of(answers(server, what))


@pytest.mark.parametrize("what", GENERATING, ids=NAMES)
def test_c20_null_is_not_given(server: Running, what: tuple[str, Any]) -> None:
    assert text_of(answers(server, what, **dict.fromkeys(EMPTY))) == text_of(answers(server, what))


def test_c20_both_names_of_the_limit(server: Running) -> None:
    for changes in ({"max_tokens": 3}, {"max_completion_tokens": 3, "max_tokens": None}, {"max_completion_tokens": 3}):
        assert answers(server, CHAT, **changes, ignore_eos=True)["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        [{"role": "user", "content": "hi", "name": "somebody"}],
        [{"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]}],
    ],
    ids=["parts", "name", "parts with more"],
)
def test_c20_other_forms_of_a_message(server: Running, messages: list[Any]) -> None:
    assert text_of(answers(server, CHAT, messages=messages)) == text_of(answers(server, CHAT))


def test_c20_roles_and_messages_that_come_back(server: Running) -> None:
    """Clients send an answer's message back as they have it: with fields that are null."""
    said = server.client.chat.completions.create(model="fake", messages=HI, max_tokens=4, seed=1).choices[0].message
    messages = [
        {"role": "developer", "content": "be brief"},
        *HI,
        said.model_dump(),
        {"role": "assistant", "content": "so", "refusal": None, "tool_calls": None, "function_call": None},
        *HI,
    ]
    assert answers(server, CHAT, messages=messages)["choices"]


def text_of(data: Any) -> str:
    if "output" in data:
        return str(data["output"][0]["content"][0]["text"])
    choice = data["choices"][0]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


# -- log-probabilities ------------------------------------------------------------------------------------------------


def test_c24_logprobs_of_a_chat(server: Running) -> None:
    said = {"logprobs": True, "top_logprobs": 3, "max_tokens": 40, "ignore_eos": True}
    reply = server.post(CHAT[0], {**CHAT[1], **said})
    choice = strict_json(reply.body)["choices"][0]
    entries = choice["logprobs"]["content"]
    assert len(entries) == 40
    for entry in entries:
        assert set(entry) == {"token", "logprob", "bytes", "top_logprobs"}
        assert len(entry["top_logprobs"]) == 3
        scores = [one["logprob"] for one in entry["top_logprobs"]]
        assert scores == sorted(scores, reverse=True)
        assert all(-9999 <= score <= 0 for score in [entry["logprob"], *scores])
    assert bytes(byte for entry in entries for byte in entry["bytes"]).decode(errors="replace") == text_of(reply.json())
    events = server.post(CHAT[0], {**CHAT[1], **said, "stream": True}).events()
    scored = [one["choices"][0]["logprobs"] for one in events]
    assert [entry for one in scored if one for entry in one["content"]] == entries


LETTERS = {"allowed_token_ids": list(range(ord("a"), ord("z") + 1))}
SCORED: list[dict[str, Any]] = [
    {},
    LETTERS,
    {**LETTERS, "echo": True, "prompt": "naïve 😀"},
    {"echo": True, "prompt": "naïve 😀"},
    {"echo": True, "prompt": ["a", "bc"], "n": 2},
    {"echo": True, "max_tokens": 0, "prompt": "naïve 😀"},
    {**LETTERS, "stop": ["oh", "qu", "x"]},
]


@pytest.mark.parametrize("said", SCORED)
def test_c24_the_lists_of_a_completion_are_of_equal_length(server: Running, said: dict[str, Any]) -> None:
    body = {**COMPLETION[1], "logprobs": 3, "max_tokens": 40, "ignore_eos": True, **said}
    choices = strict_json(server.post(COMPLETION[0], body).body)["choices"]
    events = server.post(COMPLETION[0], {**body, "stream": True}).events()
    for choice in choices:
        scores = choice["logprobs"]
        assert set(scores) == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
        assert len({len(one) for one in scores.values()}) == 1
        first, *others = scores["token_logprobs"]
        assert (first is None) == ("echo" in said)
        assert all(-9999 <= score <= 0 for score in others)
        chunks = [one for event in events for one in event["choices"] if one["index"] == choice["index"]]
        parts = [one["logprobs"] for one in chunks]
        assert all(len({len(one) for one in part.values()}) == 1 for part in parts)
        for name in ("tokens", "token_logprobs", "top_logprobs"):
            assert [value for part in parts for value in part[name]] == scores[name]


@pytest.mark.parametrize("said", [LETTERS, {**LETTERS, "echo": True, "prompt": "naïve 😀"}])
def test_c24_offsets_are_where_tokens_begin(server: Running, said: dict[str, Any]) -> None:
    choice = answers(server, COMPLETION, **said, logprobs=1)["choices"][0]
    scores, before = choice["logprobs"], b""
    for token, offset in zip(scores["tokens"], scores["text_offset"], strict=True):
        assert offset == len(before.decode(errors="ignore"))
        before += bytes.fromhex(token[6:].replace("\\x", "")) if token.startswith("bytes:") else token.encode()
    assert before.decode() == choice["text"]
    events = server.post(COMPLETION[0], {**COMPLETION[1], **said, "logprobs": 1, "stream": True}).events()
    parts = [event["choices"][0]["logprobs"]["text_offset"] for event in events]
    assert [offset for part in parts for offset in part] == scores["text_offset"]


def test_c24_offsets_behind_bytes_that_are_no_character(server: Running) -> None:
    choice = answers(server, COMPLETION, logprobs=1, max_tokens=40, ignore_eos=True)["choices"][0]
    for token, offset in zip(choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"], strict=True):
        assert token.startswith("bytes:") or choice["text"][offset:].startswith(token)


# -- completions ------------------------------------------------------------------------------------------------------


def test_c27_four_forms_of_a_prompt(server: Running) -> None:
    ids = [97, 98]
    whole = [answers(server, COMPLETION, prompt=prompt)["choices"] for prompt in ("ab", ["ab"], ids, [ids])]
    assert whole == [whole[0]] * 4
    several = answers(server, COMPLETION, prompt=[ids, [99]], n=2)["choices"]
    assert [choice["index"] for choice in several] == [0, 1, 2, 3]
    assert several[0] == whole[0][0]
    assert several == answers(server, COMPLETION, prompt=["ab", "c"], n=2)["choices"]


@pytest.mark.parametrize("changes", [{}, {"n": 2, "logprobs": 2}, {"prompt": ["a", "b"]}, {"echo": True}])
def test_c27_a_completion_has_the_form_of_its_type(server: Running, changes: dict[str, Any]) -> None:
    answer = strict(Completion, answers(server, COMPLETION, **changes))
    assert answer.model == "fake"
    assert all(choice.text.startswith("hi") for choice in answer.choices if changes.get("echo"))


def test_c27_a_suffix_is_refused(server: Running) -> None:
    assert_error(server.post(COMPLETION[0], {**COMPLETION[1], "suffix": "end"}), 400, "suffix")


# -- ids --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "prefix"), [(CHAT, "chatcmpl-"), (COMPLETION, "cmpl-"), (RESPONSE, "resp_")], ids=NAMES
)
def test_c30_ids_are_random_and_times_are_now(server: Running, what: tuple[str, Any], prefix: str) -> None:
    before = int(time.time())
    found = [answers(server, what) for _ in range(3)]
    for one in found:
        assert re.fullmatch(rf"{prefix}[0-9a-f]{{32,}}", one["id"])
        created = one["created_at"] if prefix == "resp_" else one["created"]
        assert type(created) is int
        assert before <= created <= time.time()
    assert len({one["id"] for one in found}) == 3
