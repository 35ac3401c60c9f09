"""`/v1/sessions`: every verb, and that they give what the Python API gives. Row P03."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import openai
import pytest

from tests.server.conversing import SESSIONS, Conversation, converse, events_in, joined, service_of
from tests.server.rules import assert_error
from tests.server.serving import WAIT_S, Running
from tests.server.wire import assert_no_leak, diary_of
from tests.session.helpers import make_service
from tests.session.helpers import read as read_chunks
from tokenmill.params import SamplingParams


@pytest.mark.req("R36")
def test_a_session_from_its_beginning_to_its_end(server: Running) -> None:
    talk = converse(server, system="be brief")
    info = talk.info()
    assert 0 <= time.time() - info.pop("created_at") < WAIT_S
    assert 0 <= time.time() - info.pop("last_used_at") < WAIT_S
    assert info == {
        "id": talk.id, "object": "session", "model": "fake", "title": None, "metadata": {}, "state": "idle",
        "num_tokens": 0, "num_turns": 0, "pending": [], "durable": None, "problem": None,
    }  # fmt: skip
    appended = talk.post("append", input="hi")
    assert appended.status == 200
    assert appended.json()["state"] == "appending"
    assert [message["content"] for message in appended.json()["pending"]] == ["be brief", "hi"]
    answer = talk.ask()
    assert answer["object"] == "session.answer"
    assert (answer["session_id"], answer["model"], answer["offset"]) == (talk.id, "fake", 0)
    assert (answer["finish_reason"], len(answer["token_ids"]), len(answer["text"])) == ("length", 8, 8)
    prompt = b"system: be brief\nuser: hi\nassistant: "
    assert answer["usage"]["prompt_tokens"] == len(prompt)
    turns = talk.turns()
    assert [turn["kind"] for turn in turns] == ["input", "answer"]
    assert [turn["index"] for turn in turns] == [0, 1]
    assert [turn["num_tokens"] for turn in turns] == [len(prompt), 8]
    assert [turn["finish_reason"] for turn in turns] == [None, "length"]
    assert turns[1]["messages"] == [{"role": "assistant", "content": answer["text"]}]
    info = talk.info()
    assert (info["state"], info["num_turns"], info["num_tokens"]) == ("idle", 2, len(prompt) + 8)
    assert talk.id in [one["id"] for one in server.get(SESSIONS).json()["data"]]
    assert (talk.delete().status, talk.delete().status) == (204, 404)
    assert_error(talk.get(), 404, "session_id")
    assert talk.id not in [one["id"] for one in server.get(SESSIONS).json()["data"]]


@pytest.mark.req("R36")
def test_an_answer_as_events_is_the_answer(server: Running) -> None:
    whole = converse(server).ask("hi", max_tokens=40)
    talk = converse(server)
    reply = talk.post("generate", input="hi", max_tokens=40)
    assert reply.headers["content-type"].startswith("text/event-stream")
    events = events_in(reply.body)
    assert joined(events) == (whole["text"], whole["token_ids"])
    assert {event.data["object"] for event in events} == {"session.chunk"}
    assert {event.id.rpartition(":")[0] for event in events} == {event.data["id"] for event in events}
    assert len({event.id for event in events}) == len(events)
    assert events[-1].data["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"] == 40
    assert joined(events_in(talk.get("stream").body)) == (whole["text"], whole["token_ids"])


def test_a_past_that_is_brought_along(server: Running) -> None:
    past = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": [{"type": "text", "text": "three"}]},
    ]
    brought = converse(server, messages=past).ask()
    said = server.chat(messages=past, temperature=0, ignore_eos=True, allowed_token_ids=list(range(97, 123)))
    assert brought["text"] == said.json()["choices"][0]["message"]["content"]
    text = converse(server, messages="hi")
    assert [message["content"] for message in text.info()["pending"]] == ["hi"]
    ids = converse(server, messages=[*b"user: hi\nassistant: "])
    assert ids.ask()["text"] == text.ask()["text"]


def test_parameters_of_a_session_hold_for_its_answers_unless_one_asks_for_others(server: Running) -> None:
    talk = converse(server, max_tokens=5, stop=["never"], logprobs=True, top_logprobs=2)
    first = talk.ask("hi")
    assert len(first["token_ids"]) == 5
    assert [len(score["top_logprobs"]) for score in first["logprobs"]] == [2] * 5
    streamed = events_in(talk.post("regenerate").body)
    assert [score for event in streamed for score in event.data["logprobs"]] == first["logprobs"]
    second = talk.ask("hi", max_completion_tokens=3, logprobs=False)
    assert (len(second["token_ids"]), second["logprobs"]) == (3, None)
    assert len(talk.ask("hi")["token_ids"]) == 5


def test_a_seed_makes_a_session_the_same_again(server: Running) -> None:
    free: dict[str, Any] = {"temperature": 1.0, "allowed_token_ids": None, "max_tokens": 12}
    texts = [
        [talk.ask(one)["text"] for one in ("a", "b")]
        for talk in (converse(server, **free, seed=seed) for seed in (7, 7, 8))
    ]
    assert texts[0] == texts[1] != texts[2]


def test_raw_text_and_ids(server: Running) -> None:
    talk = converse(server)
    assert talk.post("append", input="user: hi\nassistant: ", raw=True).json()["num_tokens"] == 20
    raw = talk.ask()
    assert raw["text"] == converse(server).ask("hi")["text"]
    assert talk.post("append", input=[65, 66]).json()["num_tokens"] == 30


@pytest.mark.req("R36")
def test_twenty_turns_compute_only_what_is_new(server: Running) -> None:
    talk = converse(server, system="be brief")
    known = 0
    with diary_of(server) as diary:
        for turn in range(20):
            server.wait_until_idle()
            before = diary.num_computed
            usage = talk.ask(f"question {turn}", stream=False)["usage"]
            server.wait_until_idle()
            new = usage["prompt_tokens"] - known
            if turn:
                assert usage["prompt_tokens_details"]["cached_tokens"] >= known - 1
            # What is new, the last token of before, and an answer's tokens; at depth 1 one more step is under way.
            assert diary.num_computed - before <= new + 1 + usage["completion_tokens"] + 1
            known = usage["prompt_tokens"] + usage["completion_tokens"]
            assert talk.info()["num_tokens"] == known
    assert talk.info()["num_turns"] == 40


def test_the_official_client_can_talk_to_a_session(server: Running) -> None:
    made = server.client.post(SESSIONS.removeprefix("/v1"), cast_to=dict[str, Any], body={"model": "fake"})
    chat = server.client.chat.completions.create(
        model="fake", messages=[{"role": "user", "content": "hi"}], max_tokens=3, extra_body={"session_id": made["id"]}
    )
    assert chat.choices[0].message.content == Conversation(server, made["id"]).turns()[1]["messages"][0]["content"]
    with pytest.raises(openai.NotFoundError, match="session not found"):
        server.client.get("/sessions/nobody", cast_to=dict[str, Any])


@pytest.mark.req("R36")
def test_p03_a_fork_is_right_without_its_parent(server: Running) -> None:
    talk = converse(server)
    talk.ask("one" * 40)
    wanted = talk.fork()[0].ask("two")
    kept, dropped = talk.fork(n=2)
    assert talk.delete().status == 204
    answer = kept.ask("two")
    assert answer["text"] == wanted["text"]
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= 120
    assert dropped.delete().status == 204
    assert kept.ask("three")["finish_reason"] == "length"
    assert kept.delete().status == 204
    assert_no_leak(server)


@pytest.mark.req("R36")
def test_a_session_that_nobody_uses_ends(server: Running) -> None:
    """Its time is over: `end_idle` is what the service's own clock calls."""
    talk = converse(server)

    async def end_idle() -> int:
        return service_of(server).end_idle(0.0)

    assert server.do(end_idle()) >= 1
    assert_error(talk.get(), 404, "session_id")


# -- beside the Python API --------------------------------------------------------------------------------------------


FREE: dict[str, Any] = {"temperature": 1.0, "max_tokens": 6, "seed": 5}
QUESTIONS = ("one", "two", "three")


@pytest.mark.req("R36")
def test_verbs_give_what_the_python_api_gives(server: Running) -> None:
    talk = converse(server, **FREE, allowed_token_ids=None, ignore_eos=False)
    found: list[Any] = [talk.ask(one)["token_ids"] for one in QUESTIONS]
    found.append(regenerate(talk))
    forks = [*talk.fork(n=2), *talk.fork(at_turn=2), *talk.fork(at_token=talk.info()["num_tokens"] - 3)]
    found += [(contents(one.turns()), one.ask("four")["token_ids"]) for one in forks]
    assert talk.post("rewind", at_turn=4).json()["num_turns"] == 4
    assert talk.post("edit", turn=2, content="TWO").json()["num_turns"] == 2
    found += [talk.ask()["token_ids"], regenerate(talk), regenerate(talk)]
    assert talk.post("rewind", at_token=talk.info()["num_tokens"] - 2).status == 200
    found += [talk.ask()["token_ids"], contents(talk.turns())]
    assert found == asyncio.run(by_python())


def regenerate(talk: Conversation) -> Any:
    reply = talk.post("regenerate", stream=False)
    assert reply.status == 200, reply.body
    return reply.json()["token_ids"]


def contents(turns: list[dict[str, Any]]) -> list[list[str]]:
    return [[message["content"] for message in turn["messages"]] for turn in turns]


async def by_python() -> list[Any]:
    async with make_service(depth=1) as service:

        async def ask(name: str, given: str | None = None, *, again: bool = False) -> list[int]:
            live = await service.answer(name, given=given, again=again)
            return (await read_chunks(live.read()))[1]

        def said(name: str) -> list[list[str]]:
            return [[str(message["content"]) for message in turn.messages] for turn in service.get(name).turns]

        name = await service.create_session(sampling_params=SamplingParams(**FREE))
        found: list[Any] = [await ask(name, one) for one in QUESTIONS]
        found.append(await ask(name, again=True))
        forks = [*await service.fork(name, n=2), *await service.fork(name, at_turn=2, n=1)]
        forks += await service.fork(name, at_token=service.get(name).num_tokens - 3, n=1)
        found += [(said(one), await ask(one, "four")) for one in forks]
        await service.rewind(name, at_turn=4)
        await service.edit(name, 2, "TWO")
        found += [await ask(name), await ask(name, again=True), await ask(name, again=True)]
        await service.rewind(name, at_token=service.get(name).num_tokens - 2)
        found += [await ask(name), said(name)]
        return found
