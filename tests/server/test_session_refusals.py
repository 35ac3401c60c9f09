"""What a session is refused, and that nothing changes by it. Row P05."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.conversing import SESSIONS, Conversation, converse, service_of
from tests.server.refusals import check_words
from tests.server.rules import assert_error, fake_server
from tests.server.serving import KEY, Running, running
from tokenmill import AsyncLLM
from tokenmill.backends.fake import FakeConfig, FakeModel
from tokenmill.config import EngineConfig
from tokenmill.server.config import ServerConfig, hash_key

CONTEXT = 256


@pytest.fixture(scope="module")
def small() -> Iterator[Running]:
    """A server whose model has a short context."""
    model = FakeModel(FakeConfig(vocab_size=258, max_context=CONTEXT, depth=1))
    llm = AsyncLLM(model, config=EngineConfig(max_num_seqs=4), kv_cache_tokens=2048)
    with running(llm, ServerConfig(key_hashes=(hash_key(KEY),))) as one:
        yield one


# -- P05: more than the context holds ---------------------------------------------------------------------------------


@pytest.mark.req("R36")
def test_p05_what_outgrows_the_context_is_refused_and_changes_nothing(small: Running) -> None:
    talk = converse(small)
    talk.ask("hi")
    before = talk.contents()
    long = "x" * CONTEXT
    pending = {"input": [{"role": "user", "content": "y" * 200}, {"role": "user", "content": "z" * 40}]}
    for reply in (
        talk.post("append", input=long),
        talk.post("append", input=[65] * CONTEXT),
        talk.post("append", input="x" * 100_000),
        talk.post("append", **pending),
        talk.post("generate", input=long),
        talk.post("generate", input=long, stream=False),
        talk.post("edit", turn=0, content=long),
        talk.chat(long),
        talk.chat("x" * 200, max_tokens=40),
        small.post(SESSIONS, {"messages": long}),
        small.post(SESSIONS, {"system": long}),
    ):
        assert reply.status == 400, reply.body
        assert reply.error["code"] == "context_length_exceeded"
        assert f"maximum context length is {CONTEXT} tokens" in reply.error["message"]
        assert talk.contents() == before
    assert [one["id"] for one in small.get(SESSIONS).json()["data"]] == [talk.id]
    assert talk.ask("go on")["finish_reason"] == "length"


def test_p05_an_answer_ends_where_the_context_does(small: Running) -> None:
    answer = converse(small, max_tokens=None).ask("hi")
    assert answer["finish_reason"] == "length"
    assert answer["usage"]["total_tokens"] == CONTEXT


def test_p05_the_oldest_turns_go_where_that_is_wanted(small: Running) -> None:
    talk = converse(small, overflow="drop_oldest_turns", system="be brief")
    for turn in range(6):
        assert talk.ask(f"{turn}" + "x" * 60)["finish_reason"] == "length"
    said = talk.said()
    assert said[0] == "be brief"
    assert not any(one.startswith("0x") for one in said)
    assert any(one.startswith("5x") for one in said)


@pytest.mark.req("R36")
def test_21_3_turns_that_are_left_stay_turns_and_the_low_water_mark_is_a_field(small: Running) -> None:
    talk = converse(small, overflow="drop_oldest_turns", overflow_keep=0.75, system="be brief")
    cached = []
    for turn in range(12):
        usage = talk.ask(f"{turn}" + "x" * 20)["usage"]
        cached.append(usage["prompt_tokens_details"]["cached_tokens"])
    kinds = [turn["kind"] for turn in talk.turns()]
    assert kinds == ["input", "answer"] * (len(kinds) // 2)
    assert all(turn["num_tokens"] for turn in talk.turns())
    assert [one["cause"] for one in talk.get("explain").json()["turns"]].count("dropped_turns") >= 2
    assert sorted(cached)[len(cached) // 2] > CONTEXT // 3, "most turns compute only what is new"
    for wrong in (-0.1, 1.5, "0.5", True, None):
        body = {"overflow": "drop_oldest_turns", "overflow_keep": wrong}
        assert_error(small.post(SESSIONS, body), 400, "overflow_keep")


def test_21_3_a_chat_that_asks_for_a_length_gets_it_where_turns_may_go(small: Running) -> None:
    talk = converse(small, overflow="drop_oldest_turns")
    for turn in range(8):
        reply = talk.chat(f"{turn}" + "x" * 60, max_tokens=40)
        assert reply.status == 200, reply.body
        assert reply.json()["usage"]["completion_tokens"] == 40


# -- what is wrong ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("verb", "body", "param"),
    [
        ("append", {}, "input"),
        ("append", {"input": None}, "input"),
        ("append", {"input": []}, "input"),
        ("append", {"input": 5}, "input"),
        ("append", {"input": [True]}, "input"),
        ("append", {"input": [1, "a"]}, "input"),
        ("append", {"input": [{"role": "nobody", "content": "x"}]}, "input"),
        ("append", {"input": [{"role": "user", "content": [{"type": "image_url"}]}]}, "input"),
        ("append", {"input": [{"role": "user", "content": "x"}] * 2049}, "input"),
        ("append", {"input": "x", "raw": "yes"}, "raw"),
        ("generate", {"input": {}}, "input"),
        ("generate", {"temperature": -1}, "temperature"),
        ("generate", {"max_tokens": 0}, "max_tokens"),
        ("generate", {"n": 2}, "n"),
        ("generate", {"top_logprobs": 2}, "top_logprobs"),
        ("generate", {"logprobs": True, "top_logprobs": 99}, "top_logprobs"),
        ("generate", {"stop": ["a"] * 5}, "stop"),
        ("generate", {"cache_salt": "a"}, "cache_salt"),
        ("generate", {"prompt_logprobs": 1}, "prompt_logprobs"),
        ("generate", {"timeout_s": 0}, "timeout_s"),
        ("generate", {"priority": -1}, "priority"),
        ("generate", {"stream": False, "stream_options": {}}, "stream_options"),
        ("regenerate", {"seed": 1 << 70}, "seed"),
        ("fork", {"at_turn": 9}, None),
        ("fork", {"at_turn": 1, "at_token": 1}, None),
        ("fork", {"n": 0}, "n"),
        ("fork", {"n": 65}, "n"),
        ("fork", {"at_turn": "1"}, "at_turn"),
        ("rewind", {}, None),
        ("rewind", {"at_turn": -1}, None),
        ("rewind", {"at_token": 1 << 40}, None),
        ("edit", {"turn": 1, "content": "x"}, None),
        ("edit", {"turn": 0}, "content"),
        ("edit", {"turn": 9, "content": "x"}, None),
    ],
)
def test_what_is_wrong_is_refused_and_changes_nothing(
    server: Running, talk: Conversation, verb: str, body: dict[str, Any], param: str | None
) -> None:
    before, count = talk.contents(), len(service_of(server))
    reply = talk.post(verb, **body)
    assert_error(reply, 400, param)
    check_words(reply.error["message"])
    assert (*talk.contents(), len(service_of(server))) == (*before, count)


@pytest.fixture(scope="module")
def talk(server: Running) -> Conversation:
    """A question and its answer, and another question that waits."""
    made = converse(server)
    made.ask("hi")
    assert made.post("append", input="and then?").status == 200
    return made


def test_an_answer_that_is_complete_can_only_be_replaced_or_asked_on(server: Running) -> None:
    talk = converse(server, ignore_eos=False, allowed_token_ids=[256])
    assert_error(talk.post("generate"), 400)
    assert_error(talk.post("regenerate"), 400)
    assert_error(talk.get("stream"), 400)
    assert talk.ask("hi")["finish_reason"] == "stop"
    assert_error(talk.post("generate"), 400)
    assert talk.post("regenerate", stream=False).json()["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("change", "status", "param"),
    [
        ({"model": "nobody"}, 404, "model"),
        ({"model": 5}, 400, "model"),
        ({"system": 5}, 400, "system"),
        ({"messages": []}, 400, "messages"),
        ({"messages": [{"role": "user"}]}, 400, "messages"),
        ({"messages": [{"type": "function_call", "role": "user", "content": "x"}]}, 400, "messages"),
        ({"overflow": "burst"}, 400, "overflow"),
        ({"chat_template_kwargs": {"tokenize": True}}, 400, "chat_template_kwargs"),
        ({"chat_template_kwargs": 5}, 400, "chat_template_kwargs"),
        ({"n": 2}, 400, "n"),
        ({"temperature": -1}, 400, "temperature"),
        ({"cache_salt": ""}, 400, "cache_salt"),
    ],
)
def test_a_session_that_cannot_be_is_refused(
    server: Running, change: dict[str, Any], status: int, param: str | None
) -> None:
    before = len(service_of(server))
    assert_error(server.post(SESSIONS, {"model": "fake", **change}), status, param)
    assert len(service_of(server)) == before


def test_a_server_that_is_full_of_sessions_says_so() -> None:
    with fake_server(max_session_bytes=5000) as server:
        first = converse(server)
        while (reply := server.post(SESSIONS, {})).status == 201:
            pass
        for refused in (reply, first.post("append", input="hi"), first.post("generate", input="hi"), first.chat("hi")):
            assert (refused.status, refused.error["code"]) == (429, "rate_limit_exceeded")
            assert int(refused.headers["retry-after"]) >= 1
        before = len(service_of(server))
        assert_error_of_fork(first, before)
        for one in server.get(SESSIONS).json()["data"][1:]:
            assert Conversation(server, one["id"]).delete().status == 204
        assert first.ask("hi")["finish_reason"] == "length"


def assert_error_of_fork(talk: Conversation, before: int) -> None:
    """Those that were made before there was no more room are given back."""
    assert talk.post("fork", n=64).status == 429
    assert len(service_of(talk.server)) == before
