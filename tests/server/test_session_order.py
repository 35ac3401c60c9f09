"""Requests to one session at once, and its end while some run or wait. Rows P01 and P06."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest

from tests.planting import PlantedBug, plant
from tests.server.conversing import OTHER_KEY, Conversation, converse, events_in, joined, service_of
from tests.server.rules import assert_error, fake_server
from tests.server.serving import WAIT_S, Reply, Running, raw_request
from tests.server.wire import Wire, assert_no_leak, held, until
from tokenmill.session.routing import CommandQueue
from tokenmill.session.service import SessionService

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


# -- P06: deleted meanwhile -------------------------------------------------------------------------------------------


def test_p06_a_session_deleted_during_a_stream_ends_it(server: Running) -> None:
    talk = converse(server, max_tokens=400)
    answers: list[Reply] = []
    refusals: list[Reply] = []
    with held(server, after=5) as hold:
        asking = threading.Thread(target=lambda: answers.append(talk.post("generate", input="hi")))
        asking.start()
        hold.wait()
        waiting = queue_up(talk, [lambda: refusals.append(talk.post("append", input="later"))])
        other = Conversation(server, talk.id, OTHER_KEY)
        assert_error(other.delete(), 404, "session_id")
        assert talk.delete().status == 204
        assert_error(talk.delete(), 404, "session_id")
        waiting[0].join(WAIT_S)
        assert_error(refusals[0], 404, "session_id")
        asking.join(WAIT_S)  # the step is held: the stream's end does not wait for it
    events = events_in(answers[0].body)
    assert events[-1].data["finish_reason"] == "cancelled"
    assert 0 < len(joined(events)[1]) < 400
    assert_no_leak(server)


# -- the suite can fail -----------------------------------------------------------------------------------------------


BUGS = [
    PlantedBug("the last comes first", CommandQueue, "_go_on", "session.waiting.popleft()", "session.waiting.pop()"),
    PlantedBug(
        "input and answer are two operations", SessionService, "answer",
        "live = await loaded.queue.ask(session_id, operation, undo=Answer.cancel, prepare=work, is_fenced=True)",
        "given = given and await self.append_input(session_id, given) and None\n"
        "live = await loaded.queue.ask(session_id, operation, prepare=work, is_fenced=True)",
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
