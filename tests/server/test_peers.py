"""Where OpenAI and other servers agree with each other, this one agrees with them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.server.loading import two_models
from tests.server.refusals import BODIES, CHAT, COMPLETIONS, EMBEDDINGS, RESPONSES, check_refusal
from tests.server.rules import fake_server, http_chunks
from tests.server.serving import HI, Running, child, request

GENERATED = {CHAT: {"max_tokens": 6}, COMPLETIONS: {"max_tokens": 6}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
GREEDY = {"temperature": 0, "ignore_eos": True}
USAGE = {"include_usage": True, "continuous_usage_stats": True}


def answer(server: Running, path: str, **changes: Any) -> Any:
    reply = server.post(path, {**BODIES[path], **changes})
    assert reply.status == 200, reply.body
    return reply.json()


def chunks(server: Running, path: str, **changes: Any) -> list[Any]:
    return server.post(path, {**BODIES[path], "stream": True, **changes}).events()


# -- tools ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_21_7_a_required_tool_call_without_tools_is_rejected(server: Running, path: str, choice: Any) -> None:
    check_refusal(server.post(path, {**BODIES[path], "tool_choice": choice}), 400, "tool_choice")


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_21_7_tools_that_must_not_be_called_are_no_obstacle(server: Running, path: str) -> None:
    told = answer(server, path, temperature=0, tools=[TOOL], tool_choice="none")
    assert content(told) == content(answer(server, path, temperature=0))


def content(told: Any) -> Any:
    return [item["content"] for item in told["output"]] if "output" in told else told["choices"][0]["message"]


# -- fingerprints -----------------------------------------------------------------------------------------------------


def test_21_7_answers_and_chunks_tell_the_fingerprint_of_the_model() -> None:
    with two_models(spec={"at_start": True}) as pair:
        found = {}
        for name in ("fake", "second"):
            for path in (CHAT, COMPLETIONS):
                told = [answer(pair, path, model=name), *chunks(pair, path, model=name, stream_options=USAGE)]
                prints = {one["system_fingerprint"] for one in told}
                found.setdefault(name, prints)
                assert prints == found[name], "chats and completions, answers and chunks, are of the same model"
            assert len(found[name]) == 1
            assert re.fullmatch(r"fp_[0-9a-f]{12}(_1)?", *found[name])
        assert found["fake"] != found["second"]


def test_21_7_other_weights_have_another_fingerprint() -> None:
    with fake_server() as server:
        before = answer(server, CHAT)["system_fingerprint"]
        assert answer(server, CHAT)["system_fingerprint"] == before
        server.llm.opened.model.replace_weight("salt", None)
        after = answer(server, CHAT)["system_fingerprint"]
        assert after != before
        assert answer(server, COMPLETIONS)["system_fingerprint"] == after


# -- streams ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("more", [{}, {"logprobs": True, "top_logprobs": 1, "return_token_ids": True}])
def test_21_7_the_finish_reason_comes_after_the_last_text(server: Running, n: int, more: dict[str, Any]) -> None:
    letters = list(range(ord("a"), ord("z") + 1))
    options = {**GREEDY, **more, "n": n, "max_tokens": 6, "allowed_token_ids": letters}
    whole = answer(server, CHAT, **options)["choices"]
    told = [choice for chunk in chunks(server, CHAT, **options) for choice in chunk["choices"]]
    for index in range(n):
        role, *texts, end = [choice for choice in told if choice["index"] == index]
        assert role["delta"] == {"role": "assistant", "content": ""}
        assert (end["delta"], end["finish_reason"], end["logprobs"]) == ({}, "length", None)
        assert all(one["delta"]["content"] and one["finish_reason"] is None for one in texts)
        assert "".join(one["delta"]["content"] for one in texts) == whole[index]["message"]["content"]
        if more:
            assert [token for one in (*texts, end) for token in one["token_ids"]] == whole[index]["token_ids"]
            scores = [score for one in texts for score in one["logprobs"]["content"]]
            assert scores == whole[index]["logprobs"]["content"]


def test_21_7_the_chunk_with_the_role_counts_no_token(server: Running) -> None:
    role, *others = chunks(server, CHAT, max_tokens=6, n=1, **GREEDY, stream_options=USAGE)
    prompt = role["usage"]["prompt_tokens"]
    assert role["choices"][0]["delta"]["role"] == "assistant"
    assert (role["usage"]["completion_tokens"], role["usage"]["total_tokens"]) == (0, prompt)
    counts = [one["usage"]["completion_tokens"] for one in others]
    assert counts == sorted(counts)
    assert counts[0] >= 1
    assert counts[-1] == 6


def test_21_7_the_chunk_with_the_role_is_sent_with_the_first_text(server: Running) -> None:
    """Benchmarks take the first chunk with choices for the first token: sent earlier, it would be a lie."""
    first = http_chunks(server, CHAT, {**BODIES[CHAT], **GREEDY, "allowed_token_ids": [ord("a")]})[0]
    role, text, *_ = [json.loads(one.removeprefix(b"data: ")) for one in first.split(b"\n\n") if one]
    assert role["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert text["choices"][0]["delta"]["content"].startswith("a")


# -- log-probabilities ------------------------------------------------------------------------------------------------


def test_21_7_logprobs_of_a_chat_have_a_refusal(server: Running) -> None:
    assert answer(server, CHAT, logprobs=True)["choices"][0]["logprobs"]["refusal"] is None
    told = [one["choices"][0]["logprobs"] for one in chunks(server, CHAT, logprobs=True, **GREEDY)]
    scored = [one for one in told if one is not None]
    assert scored
    assert all(set(one) == {"content", "refusal"} and one["refusal"] is None for one in scored)


@pytest.mark.parametrize("count", [0, 1, 5])
def test_21_7_the_chosen_token_is_among_the_top_logprobs(server: Running, count: int) -> None:
    options = {"logprobs": count, "max_tokens": 20, "seed": 3, "ignore_eos": True}
    told = answer(server, COMPLETIONS, **options)["choices"][0]["logprobs"]
    for token, score, top in zip(told["tokens"], told["token_logprobs"], told["top_logprobs"], strict=True):
        assert top[token] == score
        assert len(top) <= count + 1
    parts = [one["choices"][0]["logprobs"]["top_logprobs"] for one in chunks(server, COMPLETIONS, **options)]
    assert [top for part in parts for top in part] == told["top_logprobs"]


# -- responses --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_21_7_an_unknown_previous_response_is_a_bad_request(server: Running, stream: bool) -> None:
    body = {**BODIES[RESPONSES], "previous_response_id": "resp_nobody", "stream": stream}
    error = check_refusal(server.post(RESPONSES, body), 400, "previous_response_id")
    assert error["code"] == "previous_response_not_found"


def test_21_7_responses_have_the_sampling_fields_of_vllms(server: Running) -> None:
    letters = {"allowed_token_ids": [ord("a")], "max_output_tokens": 9, "temperature": 0}
    assert text(answer(server, RESPONSES, **letters)) == "a" * 9
    assert text(answer(server, RESPONSES, **letters, stop="aaa")) == ""
    assert text(answer(server, RESPONSES, **letters, stop=["aaa"], include_stop_str_in_output=True)) == "aaa"
    assert text(answer(server, RESPONSES, **letters, stop_token_ids=[ord("a")], min_tokens=0)) == ""
    ends = {"max_output_tokens": 9, "temperature": 0, "logit_bias": {"256": 100}}
    assert answer(server, RESPONSES, **ends)["usage"]["output_tokens"] == 1
    told = answer(server, RESPONSES, **ends, ignore_eos=True)
    assert (told["status"], told["usage"]["output_tokens"]) == ("incomplete", 9)
    for name, value in {"stop": ["a"] * 5, "logit_bias": {"1": 101}, "min_tokens": -1, "stop_token_ids": [999]}.items():
        check_refusal(server.post(RESPONSES, {**BODIES[RESPONSES], name: value}), 400, name)


def text(response: Any) -> Any:
    return response["output"][0]["content"][0]["text"]


# -- names of models --------------------------------------------------------------------------------------------------

NAMED = (CHAT, COMPLETIONS, RESPONSES, EMBEDDINGS)


@pytest.mark.parametrize("path", NAMED)
def test_21_7_the_only_model_need_not_be_named(server: Running, path: str) -> None:
    body = {name: value for name, value in BODIES[path].items() if name != "model"}
    for one in (body, {**body, "model": None}):
        reply = server.post(path, one)
        assert reply.status == 200
        assert reply.json()["model"] == "fake"
        if path != EMBEDDINGS:
            assert server.post(path, {**one, "stream": True}).events()
    check_refusal(server.post(path, {**body, "model": "other"}), 404, "model")


def test_21_7_one_of_several_models_must_be_named() -> None:
    with two_models(spec={"at_start": True}) as pair:
        for path in NAMED:
            body = {name: value for name, value in BODIES[path].items() if name != "model"}
            error = check_refusal(pair.post(path, body), 400, "model")
            assert "fake, second" in error["message"]


def test_21_7_a_name_can_be_demanded() -> None:
    with fake_server(default_model=False) as server:
        for path in NAMED:
            body = {name: value for name, value in BODIES[path].items() if name != "model"}
            check_refusal(server.post(path, body), 400, "model")
            assert server.post(path, BODIES[path]).status == 200


def test_21_7_a_star_stands_for_every_name(tmp_path: Path) -> None:
    with child(tmp_path / "log", "fake", "--served-model-name", "*") as served:
        (model,) = request(served.port, "GET", "/v1/models", key=None).json()["data"]
        assert (model["id"], model["aliases"]) == ("fake", ["*"])
        for name in ("gpt-4o", "org/model", "fake", "*"):
            body = {"model": name, "messages": HI, "max_tokens": 2}
            reply = request(served.port, "POST", CHAT, body, key=None)
            assert (reply.status, reply.json()["model"]) == (200, name)
        reply = request(served.port, "POST", CHAT, {"messages": HI, "max_tokens": 2}, key=None)
        assert (reply.status, reply.json()["model"]) == (200, "fake")


# -- lengths ----------------------------------------------------------------------------------------------------------


def test_21_7_a_length_that_does_not_fit_is_rejected_or_clamped(server: Running) -> None:
    too_long = {CHAT: "max_tokens", COMPLETIONS: "max_tokens", RESPONSES: "max_output_tokens"}
    for path, name in too_long.items():
        reply = server.post(path, {**BODIES[path], name: 4096})
        assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded")
    with fake_server(clamp_max_tokens=True) as clamping:
        session = clamping.post("/v1/sessions", {"model": "fake", **GREEDY}).json()["id"]
        prompt = "x" * 4000
        long: dict[str, dict[str, Any]] = {
            CHAT: {"messages": [{"role": "user", "content": prompt}], **GREEDY},
            COMPLETIONS: {"prompt": prompt, **GREEDY},
            RESPONSES: {"input": prompt, "temperature": 0, "store": False},
        }
        for path, change in (*long.items(), (RESPONSES, {**long[RESPONSES], "store": True})):
            told = answer(clamping, path, **change, **{too_long[path]: 100_000})
            used = told["usage"]
            if path != RESPONSES:
                assert told["choices"][0]["finish_reason"] == "length"
                assert used["total_tokens"] == 4096
            assert used["total_tokens"] <= 4096
        told = answer(clamping, CHAT, **long[CHAT], session_id=session, max_tokens=100_000)
        assert told["usage"]["total_tokens"] == 4096
        reply = clamping.post(CHAT, {**BODIES[CHAT], "messages": [{"role": "user", "content": "x" * 5000}]})
        assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded"), "a prompt is never cut"
        with pytest.raises(openai.BadRequestError):
            clamping.client.chat.completions.create(model="fake", messages=HI, max_tokens=0)
