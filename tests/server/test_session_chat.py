"""Chat completions with `session_id`: the messages are what is new, and come with their answer or not at all."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import openai
import pytest

from tests.planting import PlantedBug, plant
from tests.server.conversing import OTHER_KEY, SAME, Conversation, converse, service_of
from tests.server.queueing import Clock
from tests.server.rules import assert_error, fake_server
from tests.server.serving import WAIT_S, Reply, Running, raw_request
from tests.server.wire import Hold, Wire, assert_no_leak, held, until, wait_for_inbox
from tokenmill import AsyncLLM
from tokenmill.backends.fake import FakeConfig, FakeModel, FaultKind
from tokenmill.config import EngineConfig
from tokenmill.server.models import ModelSpec
from tokenmill.server.streaming import SessionSource
from tokenmill.session.service import SessionService

CHAT = "/v1/chat/completions"
STREAM = [True, False]


def text_of(reply: Reply) -> str:
    """Of an answer, whole or as a stream."""
    assert reply.status == 200, reply.body
    if not reply.headers["content-type"].startswith("text/event-stream"):
        return str(reply.json()["choices"][0]["message"]["content"])
    return "".join(event["choices"][0]["delta"].get("content", "") for event in reply.events())


@pytest.mark.req("R36")
@pytest.mark.parametrize("stream", STREAM)
def test_a_chat_goes_on_with_its_session(server: Running, stream: bool) -> None:
    talk = converse(server, system="be brief")
    said: list[Any] = [{"role": "system", "content": "be brief"}]
    for turn in range(5):
        question = f"question {turn}"
        reply = talk.chat(question, stream=stream)
        said.append({"role": "user", "content": question})
        alone = server.chat(messages=said, **SAME)
        said.append({"role": "assistant", "content": text_of(reply)})
        assert text_of(alone) == text_of(reply)
        first = reply.events()[0] if stream else reply.json()
        assert (first["session_id"], first["model"]) == (talk.id, "fake")
        assert first["id"].startswith("chatcmpl-")
    assert [message for turn in talk.turns() for message in turn["messages"]] == said
    assert [turn["kind"] for turn in talk.turns()] == ["input", "answer"] * 5


@pytest.mark.req("R36")
def test_the_official_client_sends_only_what_is_new(server: Running) -> None:
    talk = converse(server, system="be brief", max_tokens=20)
    known = 0
    for turn in range(6):
        options: dict[str, Any] = {
            "model": "fake",
            "messages": [{"role": "user", "content": f"question {turn}"}],
            "extra_body": {"session_id": talk.id},
        }
        if turn % 2:
            done = server.client.chat.completions.create(**options)
            text, usage = done.choices[0].message.content, done.usage
        else:
            text = ""
            more: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
            for chunk in server.client.chat.completions.create(**options, **more):
                text += "".join(choice.delta.content or "" for choice in chunk.choices)
                usage = chunk.usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        assert (usage.prompt_tokens_details.cached_tokens or 0) >= known - 1
        known = usage.prompt_tokens + usage.completion_tokens
        assert talk.said()[-1] == text
        assert talk.info()["num_tokens"] == known


def test_parameters_are_the_sessions_unless_told(server: Running) -> None:
    talk = converse(server, max_tokens=5)
    assert len(text_of(talk.chat("hi"))) == 5
    assert len(text_of(talk.chat("hi", max_completion_tokens=3))) == 3
    scored = talk.chat("hi", logprobs=True, top_logprobs=2, return_token_ids=True).json()
    assert len(scored["choices"][0]["logprobs"]["content"]) == len(scored["choices"][0]["token_ids"]) == 5
    assert len(scored["prompt_token_ids"]) == scored["usage"]["prompt_tokens"]
    stopped = talk.chat("hi", stop=[text_of(talk.chat("hi"))[2]])
    assert stopped.json()["choices"][0]["finish_reason"] in ("stop", "length")


def test_chats_and_the_verbs_of_sessions_can_be_mixed(server: Running) -> None:
    talk = converse(server)
    first = text_of(talk.chat("one"))
    (fork,) = talk.fork()
    assert talk.post("append", input="two").status == 200
    both = text_of(talk.chat("three"))
    assert talk.said() == ["one", first, "two", "three", both]
    assert text_of(fork.chat("other", stream=True)) == fork.said()[-1]
    again = talk.post("regenerate", stream=False, temperature=1, seed=3).json()["text"]
    assert again != both
    assert talk.post("rewind", at_turn=2).status == 200
    assert talk.post("edit", turn=0, content="ONE").status == 200
    answer = talk.ask()["text"]
    last = talk.chat("five")
    assert talk.said() == ["ONE", answer, "five", text_of(last)]
    assert talk.get("stream").status == 200


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", STREAM)
@pytest.mark.parametrize(
    ("change", "status", "param"),
    [
        ({"n": 2}, 400, "n"),
        ({"temperature": -1}, 400, "temperature"),
        ({"stop_token_ids": [9999]}, 400, "stop_token_ids"),
        ({"logit_bias": {"9999": 1}}, 400, "logit_bias"),
        ({"max_tokens": 5000}, 400, None),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"top_logprobs": 2}, 400, "top_logprobs"),
        ({"messages": []}, 400, "messages"),
        ({"messages": [{"role": "user", "content": None}]}, 400, "messages"),
        ({"tools": [{"type": "function"}]}, 400, "tools"),
        ({"add_generation_prompt": False}, 400, "add_generation_prompt"),
        ({"continue_final_message": True}, 400, "continue_final_message"),
        ({"chat_template_kwargs": {"thinking": True}}, 400, "chat_template_kwargs"),
        ({"cache_salt": "a"}, 400, "cache_salt"),
        ({"session_id": 5}, 400, "session_id"),
        ({"session_id": ""}, 404, "session_id"),
        ({"session_id": "x" * 300}, 400, "session_id"),
        ({"model": "nobody"}, 404, "model"),
    ],
)
def test_what_is_wrong_is_refused_and_takes_nothing_in(
    server: Running, talk: Conversation, stream: bool, change: dict[str, Any], status: int, param: str | None
) -> None:
    before = (*talk.contents(), server.tick())
    reply = (
        talk.chat("not this", stream=stream, **change)
        if "messages" not in change
        else server.post(CHAT, {"model": "fake", "session_id": talk.id, "stream": stream, **change})
    )
    assert_error(reply, status, param)
    assert (*talk.contents(), server.tick()) == before


@pytest.fixture(scope="module")
def talk(server: Running) -> Conversation:
    made = converse(server)
    made.ask("hi")
    return made


def test_another_model(server: Running) -> None:
    model = FakeModel(FakeConfig(vocab_size=258, max_context=512, depth=1))
    other = ModelSpec(name="second", load=lambda: AsyncLLM(model, kv_cache_tokens=1024))
    with fake_server(others=[other]) as two:
        talk = converse(two)
        assert_error(talk.chat("hi", model="second"), 400, "model")
        assert talk.info()["num_turns"] == 0
        assert text_of(talk.chat("hi")) == text_of(converse(server).chat("hi"))


def test_another_key_has_no_such_session(server: Running) -> None:
    talk = converse(server)
    for stream in STREAM:
        reply = Conversation(server, talk.id, OTHER_KEY).chat("hi", stream=stream)
        assert (reply.status, reply.error["code"]) == (404, "session_not_found")
    with pytest.raises(openai.NotFoundError) as caught:
        server.client.with_options(api_key=OTHER_KEY).chat.completions.create(
            model="fake", messages=[{"role": "user", "content": "hi"}], extra_body={"session_id": talk.id}
        )
    assert caught.value.code == "session_not_found"
    assert talk.info()["num_turns"] == 0


# -- all or nothing ---------------------------------------------------------------------------------------------------


@contextmanager
def crowded() -> Iterator[Running]:
    """One answer runs at a time, and one may wait."""
    with fake_server(EngineConfig(max_num_seqs=1, max_queue=1, queue_timeout_s=50.0)) as server:
        yield server


def ask(replies: dict[str, Reply], name: str, talk: Conversation, **changes: Any) -> threading.Thread:
    thread = threading.Thread(target=lambda: replies.__setitem__(name, talk.chat(f"from {name}", **changes)))
    thread.start()
    return thread


def refuse_before_the_first_token(server: Running, stream: bool) -> None:
    """A queue that is full, a time that is up, an engine that fails: each time the session is as it was."""
    clock = Clock(server)
    runs, waits, refused = (converse(server, max_tokens=100) for _ in range(3))
    for talk in (waits, refused):
        talk.ask("before", max_tokens=2)
        assert talk.post("append", input="pending").status == 200
    before = {talk.id: talk.contents() for talk in (waits, refused)}
    replies: dict[str, Reply] = {}
    with held(server, after=3) as hold:
        threads = [ask(replies, "runs", runs, stream=stream)]
        hold.wait()
        threads.append(ask(replies, "waits", waits, stream=stream))
        wait_for_inbox(server)
        hold.step()
        threads.append(ask(replies, "refused", refused, stream=stream))
        wait_for_inbox(server)
        hold.step()
        until(lambda: "refused" in replies)
        assert (replies["refused"].status, replies["refused"].error["code"]) == (429, "rate_limit_exceeded")
        clock.wind(51.0)
        hold.step()
        until(lambda: "waits" in replies)
        assert (replies["waits"].status, replies["waits"].error["code"]) == (503, "timeout")
    for thread in threads:
        thread.join(WAIT_S)
    assert len(text_of(replies["runs"])) == 100
    for talk in (waits, refused):
        assert talk.contents() == before[talk.id]
        server.inject(FaultKind.NAN)
        assert talk.chat("fails", stream=stream).status == 500
        assert talk.contents() == before[talk.id]
        text = text_of(talk.chat("again", stream=stream, max_tokens=4))
        assert talk.said()[-3:] == ["pending", "again", text]


@pytest.mark.req("R36", "R37")
@pytest.mark.parametrize("stream", STREAM)
def test_without_a_token_the_session_is_as_it_was(stream: bool) -> None:
    with crowded() as server:
        refuse_before_the_first_token(server, stream)


@pytest.mark.parametrize("stream", STREAM)
def test_a_time_of_its_own(server: Running, stream: bool) -> None:
    talk = converse(server, max_tokens=4000)
    clock = Clock(server)
    replies: dict[str, Reply] = {}
    with held(server, after=5) as hold:
        asking = ask(replies, "late", talk, stream=stream, timeout_s=7.5)
        hold.wait()
        clock.wind(8.0)
    asking.join(WAIT_S)
    if stream:
        assert replies["late"].events()[-1]["error"]["code"] == "timeout"
    else:
        assert (replies["late"].status, replies["late"].error["code"]) == (504, "timeout")
    assert talk.turns()[1]["finish_reason"] == "timeout", "what was said stays"
    assert len(text_of(talk.chat("go on", max_tokens=3))) == 3


# -- clients that leave -----------------------------------------------------------------------------------------------


def leave(talk: Conversation, hold: Hold, how: str, stream: bool) -> None:
    """In the middle of an answer."""
    body = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "session_id": talk.id, "stream": stream}
    with Wire(talk.server.port) as client:
        client.send(raw_request(CHAT, body))
        hold.wait()
        if stream:
            client.read_text(3)
        client.leave(how)


def leave_in_the_middle(server: Running, how: str, stream: bool) -> None:
    talk = converse(server, max_tokens=4000)
    with held(server, after=6) as hold:
        leave(talk, hold, how, stream)
        if how == "RST":
            wait_for_inbox(server)  # it has been noticed, and the engine is told
    until(lambda: talk.info()["state"] != "generating")
    question, answer = talk.turns()
    assert answer["finish_reason"] == "cancelled"
    assert 3 <= answer["num_tokens"] < 2000
    assert len(text_of(talk.chat("go on", max_tokens=5))) == 5
    assert talk.said()[:2] == [question["messages"][0]["content"], answer["messages"][0]["content"]]
    assert_no_leak(server)


@pytest.mark.req("R35", "R36")
@pytest.mark.parametrize("stream", STREAM)
@pytest.mark.parametrize("how", ["FIN", "RST"])
def test_a_client_that_leaves_ends_the_answer_and_the_session_goes_on(server: Running, how: str, stream: bool) -> None:
    leave_in_the_middle(server, how, stream)


@pytest.mark.req("R35", "R36")
@pytest.mark.parametrize("stream", STREAM)
def test_a_client_that_leaves_while_it_waits_for_the_session(server: Running, stream: bool) -> None:
    talk = converse(server, max_tokens=20)
    body = {"model": "fake", "messages": [{"role": "user", "content": "gone"}], "session_id": talk.id, "stream": stream}
    replies: dict[str, Reply] = {}
    with held(server, after=3) as hold:
        asking = ask(replies, "first", talk)
        hold.wait()
        with Wire(server.port) as client:
            client.send(raw_request(CHAT, body))
            until(lambda: talk.num_waiting == 1)
            client.leave("RST")
        until(lambda: talk.num_waiting == 0)
    asking.join(WAIT_S)
    assert talk.said() == ["from first", text_of(replies["first"])]


def cancel_while_it_waits(server: Running, stream: bool) -> None:
    talk = converse(server, max_tokens=20)
    replies: list[Reply] = []
    body = {"model": "fake", "messages": [{"role": "user", "content": "gone"}], "session_id": talk.id, "stream": stream}
    options: dict[str, Any] = {"headers": {"X-Request-Id": "waits"}}
    with held(server, after=3) as hold:
        first = threading.Thread(target=talk.ask, args=("first",))
        first.start()
        hold.wait()
        waiting = threading.Thread(target=lambda: replies.append(server.post(CHAT, body, **options)))
        waiting.start()
        until(lambda: talk.num_waiting == 1)
        assert server.post("/v1/requests/waits/cancel", {}).json()["cancelled"] == 1
        waiting.join(WAIT_S)
    first.join(WAIT_S)
    if replies[0].status == 200:  # its status was sent to keep the connection alive
        assert replies[0].events()[-1]["error"]["code"] == "cancelled"
    else:
        assert replies[0].status == 499
        assert replies[0].error["code"] == "cancelled"
    assert talk.info()["num_turns"] == 2


@pytest.mark.req("R35", "R36")
@pytest.mark.parametrize("stream", STREAM)
def test_a_cancel_by_its_name_while_it_waits_for_the_session(
    server: Running, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    cancel_while_it_waits(server, stream)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.req("R35", "R36")
def test_a_cancel_by_its_name_in_the_middle(server: Running) -> None:
    talk = converse(server, max_tokens=4000)
    body = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "session_id": talk.id, "stream": True}
    with held(server, after=5) as hold, Wire(server.port) as client:
        client.send(raw_request(CHAT, body))
        hold.wait()
        name = client.first_id()
        assert server.post(f"/v1/requests/{name}/cancel", {}).status == 200
        hold.release()
        reply = client.read_reply()
    assert reply is not None
    assert reply.events()[-1]["error"]["code"] == "cancelled"
    assert talk.turns()[1]["finish_reason"] == "cancelled"


@pytest.mark.req("R36")
def test_a_session_that_is_deleted_meanwhile(server: Running) -> None:
    talk = converse(server, max_tokens=4000)
    replies: dict[str, Reply] = {}
    with held(server, after=5) as hold:
        threads = [ask(replies, "runs", talk)]
        hold.wait()
        threads.append(ask(replies, "waits", talk))
        until(lambda: talk.num_waiting == 1)
        count = len(service_of(server))
        assert talk.delete().status == 204
    for thread in threads:
        thread.join(WAIT_S)
    assert (replies["runs"].status, replies["runs"].error["code"]) == (499, "cancelled")
    assert (replies["waits"].status, replies["waits"].error["code"]) == (404, "session_not_found")
    assert len(service_of(server)) == count - 1
    assert_no_leak(server)


# -- the suite can fail -----------------------------------------------------------------------------------------------

BUGS: list[tuple[PlantedBug, Callable[[Running], None]]] = [
    (
        PlantedBug("no way back", SessionService, "answer", "live.undo = partial(session.restore, before)", "pass"),
        lambda server: refuse_before_the_first_token(server, stream=False),
    ),
    (
        PlantedBug("leaving ends nothing", SessionSource, "close", "self._answer.cancel()", "pass"),
        lambda server: leave_in_the_middle(server, "RST", stream=True),
    ),
    (
        PlantedBug("a cancel is nobody's", SessionSource, "_begun", "raise cancelled() from None", "raise"),
        lambda server: cancel_while_it_waits(server, stream=False),
    ),
]


@pytest.mark.parametrize(("bug", "check"), BUGS, ids=[bug.name for bug, _ in BUGS])
def test_a_planted_bug_is_caught(
    bug: PlantedBug, check: Callable[[Running], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    with crowded() as server:
        check(server)
    with crowded() as server:
        monkeypatch.setattr("tests.server.wire.PATIENCE_S", 0.5)
        plant(bug, monkeypatch)
        with pytest.raises(AssertionError):
            check(server)
