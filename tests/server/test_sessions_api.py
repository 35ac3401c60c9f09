"""`/v1/sessions`: every verb, order, and what is refused. Rows P01, P03, P05 and P06."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import openai
import pytest

from tests.planting import PlantedBug, plant
from tests.server.conversing import OTHER_KEY, SESSIONS, Conversation, converse, events_in, joined, service_of
from tests.server.refusals import check_words
from tests.server.rules import assert_error, fake_server
from tests.server.serving import KEY, WAIT_S, Reply, Running, raw_request, running
from tests.server.wire import Wire, assert_no_leak, diary_of, held, until
from tests.session.helpers import make_service
from tests.session.helpers import read as read_chunks
from tokenmill import AsyncLLM
from tokenmill.config import EngineConfig
from tokenmill.core import FakeConfig, FakeModel
from tokenmill.params import SamplingParams
from tokenmill.server.config import ServerConfig, hash_key
from tokenmill.session import master
from tokenmill.session.service import SessionService

CONTEXT = 256


@pytest.fixture(scope="module")
def small() -> Iterator[Running]:
    """A server whose model has a short context."""
    model = FakeModel(FakeConfig(vocab_size=258, max_context=CONTEXT, depth=1))
    llm = AsyncLLM(model, config=EngineConfig(max_num_seqs=4), kv_cache_tokens=2048)
    with running(llm, ServerConfig(key_hashes=(hash_key(KEY),))) as one:
        yield one


# -- the verbs --------------------------------------------------------------------------------------------------------


@pytest.mark.req("R36")
def test_a_session_from_its_beginning_to_its_end(server: Running) -> None:
    talk = converse(server, system="be brief")
    assert talk.info() == {
        "id": talk.id, "object": "session", "model": "fake", "state": "idle",
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
    with pytest.raises(openai.NotFoundError, match="no such session"):
        server.client.get("/sessions/nobody", cast_to=dict[str, Any])


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


# -- P01: one thing at a time -----------------------------------------------------------------------------------------


def queue_up(talk: Conversation, asks: list[Callable[[], Any]]) -> list[threading.Thread]:
    """Each of them waits for the session behind those before it."""
    threads = []
    for ask in asks:
        before = talk.num_waiting
        threads.append(threading.Thread(target=ask))
        threads[-1].start()
        until(lambda before=before: talk.num_waiting > before)
    return threads


def requests_at_once(server: Running) -> None:
    """P01: they are answered in order, never mixed; eight wait, and one more is told to come again."""
    talk = converse(server, max_tokens=12)
    replies: dict[int, Reply] = {}

    def ask(number: int) -> None:
        is_chat = number % 2
        asked = talk.chat if is_chat else lambda content: talk.post("generate", input=content, stream=False)
        replies[number] = asked(f"q{number}")

    with held(server, after=3) as hold:
        first = threading.Thread(target=ask, args=(0,))
        first.start()
        hold.wait()
        threads = queue_up(talk, [lambda number=number: ask(number) for number in range(1, 9)])
        for reply in (talk.post("append", input="one too many"), talk.post("generate"), talk.chat("one too many")):
            assert_error(reply, 409)
            assert reply.error["code"] == "session_busy"
            assert int(reply.headers["retry-after"]) >= 1
    for thread in [first, *threads]:
        thread.join(WAIT_S)
    assert [replies[number].status for number in range(9)] == [200] * 9
    turns = talk.turns()
    assert [turn["kind"] for turn in turns] == ["input", "answer"] * 9
    assert [turn["messages"][0]["content"] for turn in turns[::2]] == [f"q{number}" for number in range(9)]
    for number in range(9):
        answer = replies[number].json()
        text = answer["text"] if "text" in answer else answer["choices"][0]["message"]["content"]
        assert turns[2 * number + 1]["messages"][0]["content"] == text


@pytest.mark.req("R36")
def test_p01_requests_at_once_are_answered_in_order_and_never_mixed(server: Running) -> None:
    requests_at_once(server)


def test_p01_a_client_that_leaves_while_it_waits_has_asked_for_nothing(server: Running) -> None:
    talk = converse(server, max_tokens=12)
    with ExitStack() as stack:
        hold = stack.enter_context(held(server, after=3))
        first = threading.Thread(target=talk.ask, args=("first",))
        first.start()
        hold.wait()
        for verb, body in (
            ("generate", {"input": "gone"}),
            ("regenerate", {"stream": False}),
            ("append", {"input": "gone"}),
            ("rewind", {"at_turn": 0}),
            ("edit", {"turn": 0, "content": "gone"}),
            ("fork", {}),
        ):
            with Wire(server.port) as client:
                client.send(raw_request(f"{talk.path}/{verb}", body))
                until(lambda: talk.num_waiting == 1)
                client.leave("RST")
            until(lambda: talk.num_waiting == 0)
        sessions = len(service_of(server))
    first.join(WAIT_S)
    assert talk.said()[0] == "first"
    assert (talk.info()["num_turns"], len(service_of(server))) == (2, sessions)


def test_sessions_at_once_do_not_mix(server: Running) -> None:
    talks = [converse(server, max_tokens=30) for _ in range(8)]
    wanted = [converse(server, max_tokens=30).ask(f"question {i}")["text"] for i in range(8)]
    found: dict[int, Any] = {}

    def ask(number: int) -> None:
        found[number] = joined(events_in(talks[number].post("generate", input=f"question {number}").body))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert [found[number][0] for number in range(8)] == wanted


# -- P03, P05, P06 ----------------------------------------------------------------------------------------------------


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
def test_p05_what_outgrows_the_context_is_refused_and_changes_nothing(small: Running) -> None:
    talk = converse(small)
    talk.ask("hi")
    before = (talk.info(), talk.turns())
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
        assert (talk.info(), talk.turns()) == before
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


def test_p06_a_session_deleted_during_a_stream_ends_it(server: Running) -> None:
    talk = converse(server, max_tokens=400)
    replies: list[Reply] = []
    with held(server, after=5) as hold:
        asking = threading.Thread(target=lambda: replies.append(talk.post("generate", input="hi")))
        asking.start()
        hold.wait()
        waiting = queue_up(talk, [lambda: replies.append(talk.post("append", input="later"))])
        other = Conversation(server, talk.id, OTHER_KEY)
        assert_error(other.delete(), 404, "session_id")
        assert talk.delete().status == 204
        assert_error(talk.delete(), 404, "session_id")
        waiting[0].join(WAIT_S)
        assert_error(replies[0], 404, "session_id")
    asking.join(WAIT_S)
    events = events_in(replies[1].body)
    assert events[-1].data["finish_reason"] == "cancelled"
    assert 0 < len(joined(events)[1]) < 400
    assert_no_leak(server)


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
    before, count = (talk.info(), talk.turns()), len(service_of(server))
    reply = talk.post(verb, **body)
    assert_error(reply, 400, param)
    check_words(reply.error["message"])
    assert (talk.info(), talk.turns(), len(service_of(server))) == (*before, count)


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


@pytest.mark.req("R36")
def test_a_session_that_nobody_uses_ends(server: Running) -> None:
    """Its time is over: `end_idle` is what the service's own clock calls."""
    talk = converse(server)

    async def end_idle() -> int:
        return service_of(server).end_idle(0.0)

    assert server.do(end_idle()) >= 1
    assert_error(talk.get(), 404, "session_id")


# -- the suite can fail -----------------------------------------------------------------------------------------------

BUGS = [
    PlantedBug("the last comes first", master.Master, "_go_on", "waiting.popleft()", "waiting.pop()"),
    PlantedBug(
        "input and answer are two operations", SessionService, "answer",
        "return await loaded.master.ask(session_id, operation, undo=LiveTurn.cancel)",
        "given = given and await self.append_input(session_id, given) and None\n"
        "    return await loaded.master.ask(session_id, operation)",
    ),
]  # fmt: skip


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_caught(bug: PlantedBug, monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_server() as server:
        requests_at_once(server)
    with fake_server() as server:
        plant(bug, monkeypatch)
        with pytest.raises(AssertionError):
            requests_at_once(server)
