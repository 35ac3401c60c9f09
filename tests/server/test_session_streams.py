"""Streams of sessions: a client that was cut off goes on where it was. Row N13, and P06's ends."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.planting import PlantedBug, plant
from tests.server.conversing import (
    SESSIONS,
    Conversation,
    Event,
    Listener,
    converse,
    events_in,
    joined,
    listening,
    resumed,
    service_of,
)
from tests.server.queueing import Clock
from tests.server.rules import assert_error, fake_server
from tests.server.serving import WAIT_S, Reply, Running, child, raw_request, request
from tests.server.wire import LETTERS, Hold, Wire, assert_no_leak, held, until, wait_for_inbox
from tokenmill.backends.fake import FaultKind
from tokenmill.config import EngineConfig
from tokenmill.server import streaming
from tokenmill.session.answer import Answer
from tokenmill.session.manager import SessionLimits

LENGTH = 40
ALPHABETS: dict[str, list[int]] = {"letters": LETTERS, "é": [0xC3, 0xA9], "😀": [0xF0, 0x9F, 0x98, 0x80, 0xC3]}
"""Of tokens that are bytes: in any order some make characters, some wait for the next one, and some are none."""
MOST_OPEN = 3
"""Bytes of a character that is not complete."""


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """One that sends the status of a stream soon, so that whoever comes back is inside before there is more."""
    with fake_server(keep_alive_s=0.02) as one:
        yield one


def begin(server: Running, alphabet: str) -> Conversation:
    return converse(server, max_tokens=LENGTH, allowed_token_ids=ALPHABETS[alphabet])


def whole(server: Running, alphabet: str = "letters") -> tuple[str, list[int]]:
    """What is said when nobody is cut off."""
    answer = begin(server, alphabet).ask("hi")
    return answer["text"], answer["token_ids"]


def slow_events(talk: Conversation) -> list[Event]:
    """The events of an answer whose engine takes its time: several of them."""
    with held(talk.server) as hold, listening(talk, input="hi") as listener:
        for _ in range(6):
            step_until_told(hold, talk, listener)
        hold.release()
        return listener.read_rest()


def step_until_told(hold: Hold, talk: Conversation, listener: Listener, before: int = 0) -> None:
    """Let the engine go on until there is another event, and read it; the listener began after so many tokens."""
    hold.wait()
    live = talk.behind.live
    assert live is not None
    heard = len(joined(listener.seen, before)[1])
    while len(live.token_ids) <= before + heard:
        count = live.generation.num_generated
        hold.step()  # a token each
        until(lambda count=count: live.generation.num_generated > count)
    listener.read_tokens(heard + 1)


def cut_and_resume(
    server: Running, after: int, how: str, wanted: tuple[str, list[int]], alphabet: str = "letters"
) -> None:
    """A client that is cut off when so many steps have been taken, and comes back while the engine still stands."""
    talk = begin(server, alphabet)
    with held(server, after=after) as hold:
        with listening(talk, input="hi") as listener:
            assert listener.status == 200
            hold.wait()
            listener.read_tokens(max(1, after - MOST_OPEN))
            seen = list(listener.seen)
            listener.leave(how)
        with listening(talk, last=seen[-1].id) as again:
            assert again.status == 200, again.body()
            hold.release()
            seen += again.read_rest()
    assert joined(seen) == wanted
    assert seen[-1].data["finish_reason"] == "length"


@pytest.mark.req("R36", "R43")
@pytest.mark.parametrize(("alphabet", "how"), [("letters", "FIN"), ("letters", "RST"), ("é", "RST"), ("😀", "FIN")])
def test_n13_a_stream_goes_on_where_it_was_cut(server: Running, alphabet: str, how: str) -> None:
    wanted = whole(server, alphabet)
    for after in (4, 5, 6, 7, 11, 17, 30):
        cut_and_resume(server, after, how, wanted, alphabet)


@pytest.mark.req("R36", "R43")
@pytest.mark.parametrize("alphabet", ALPHABETS)
def test_n13_every_event_can_be_gone_on_from_when_the_answer_is_over(server: Running, alphabet: str) -> None:
    talk = begin(server, alphabet)
    events = slow_events(talk)
    text, ids = joined(events)
    assert (text, ids) == whole(server, alphabet)
    assert joined(resumed(talk, None)) == (text, ids)
    for count in range(1, len(events) + 1):
        seen = events[:count]
        rest = resumed(talk, seen[-1].id)
        assert joined([*seen, *rest]) == (text, ids)
        assert (not rest) == (count == len(events)), "after the end there is nothing more"


@pytest.mark.req("R36")
def test_n13_cut_again_and_again_and_read_by_two(server: Running) -> None:
    wanted = whole(server)
    talk = converse(server, max_tokens=LENGTH)
    with held(server, after=3) as hold:
        with listening(talk, input="hi") as first:
            first.read_tokens(1)
            seen = list(first.seen)
        with listening(talk) as other:
            for _ in range(4):
                with listening(talk, last=seen[-1].id) as again:
                    step_until_told(hold, talk, again, before=len(joined(seen)[1]))
                    seen += again.seen
            hold.release()
            seen += resumed(talk, seen[-1].id)
            assert joined(other.read_rest()) == wanted
    assert joined(seen) == wanted


@pytest.mark.req("R36")
def test_n13_a_place_in_an_older_answer_is_a_conflict(server: Running) -> None:
    talk = begin(server, "letters")
    old = slow_events(talk)
    assert [event.data["finish_reason"] for event in resumed(talk, old[0].id)][-1] == "length"
    new = events_in(talk.post("regenerate").body)
    for event in old:
        reply = talk.get("stream", **{"Last-Event-ID": event.id})
        assert_error(reply, 409, "Last-Event-ID")
        assert reply.error["code"] == "answer_replaced"
    assert joined([new[0], *resumed(talk, new[0].id)]) == joined(new)


@pytest.mark.parametrize("header", ["", ":", "x", "answer:", ":-1", "{name}:x", "{name}:1e3", "{name}:9999999999"])
def test_n13_ids_that_are_none(server: Running, header: str) -> None:
    talk = converse(server)
    name = talk.ask("hi")["id"]
    assert_error(talk.get("stream", **{"Last-Event-ID": header.format(name=name)}), 400, "Last-Event-ID")


def test_n13_a_place_that_is_not_there_yet(server: Running) -> None:
    talk = converse(server)
    name = talk.ask("hi")["id"]
    assert_error(talk.get("stream", **{"Last-Event-ID": f"{name}:99"}), 400)
    assert_error(talk.get("stream", **{"Last-Event-ID": "x" * 600}), 400, "last-event-id")


@pytest.mark.req("R36", "R43")
@pytest.mark.parametrize("alphabet", ALPHABETS)
def test_a_client_goes_on_from_its_own_tokens(server: Running, alphabet: str) -> None:
    talk = begin(server, alphabet)
    text, ids = joined(slow_events(talk))
    for count in (0, 1, 7, len(ids) - 1, len(ids)):
        events = events_in(talk.post("resume", token_ids=ids[:count]).body)
        assert events[0].data["offset"] == count
        assert joined(events, count)[1] == ids[count:]
    assert joined(events_in(talk.post("resume", token_ids=[]).body)) == (text, ids)


@pytest.mark.req("R36")
def test_a_client_is_told_which_of_its_tokens_are_not_those_of_the_answer(server: Running) -> None:
    talk = begin(server, "letters")
    with held(server, after=6) as hold:
        with listening(talk, input="hi") as listener:
            hold.wait()
            listener.read_tokens(3)
            seen = joined(listener.seen)[1]
        hold.release()
    answer = listener.seen[0].data["id"]
    ids = joined(resumed(talk, None))[1]
    other = [*seen[:2], ids[2] + 1, ids[3]]
    told, *rest = events_in(talk.post("resume", answer_id=answer, token_ids=other).body)
    assert told.data["object"] == "session.restarted"
    assert told.data["offset"] == 2
    assert joined(rest, 2)[1] == ids[2:]
    talk.post("regenerate")
    reply = talk.post("resume", answer_id=answer, token_ids=seen)
    assert_error(reply, 409, "answer_id")
    assert reply.error["code"] == "answer_replaced"
    assert_error(talk.post("resume", token_ids=["a"]), 400, "token_ids")


def test_n13_answers_of_chats_can_be_read_again(server: Running) -> None:
    talk = converse(server)
    said = talk.chat("hi").json()
    text, ids = joined(events := resumed(talk, None))
    assert text == said["choices"][0]["message"]["content"]
    assert joined(resumed(talk, f"{events[0].data['id']}:3"), begin=3) == (text[3:], ids[3:])


# -- nobody comes back ------------------------------------------------------------------------------------------------


@contextmanager
def with_limits(server: Running, **limits: Any) -> Iterator[None]:
    manager = service_of(server)._model()
    before, manager.limits = manager.limits, replace(manager.limits, **limits)
    try:
        yield
    finally:
        manager.limits = before


@pytest.mark.req("R36")
@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_that_nobody_comes_back_for_ends_by_itself(server: Running, stream: bool) -> None:
    assert SessionLimits().stall_timeout_s == 30.0
    talk = converse(server, max_tokens=4000)
    # Longer than a busy machine takes to hand over the first tokens.
    with with_limits(server, stall_timeout_s=0.5), held(server, after=3) as hold:
        with listening(talk, input="hi") if stream else waiting_for_all(talk):
            hold.wait()
        until(lambda: not server.served.gate.num_inside)
        hold.step()  # something new, which nobody reads
        wait_for_inbox(server)  # the alarm has rung, and the engine is told
        hold.release()
        talk.wait_until_free()
    (event,) = resumed(talk, None)
    assert event.data["finish_reason"] == "timeout"
    assert event.data["error"]["code"] == "timeout"
    assert 0 < len(event.data["token_ids"]) < 100
    assert talk.turns()[1]["finish_reason"] == "timeout"
    assert talk.ask("go on", max_tokens=5)["finish_reason"] == "length"
    assert_no_leak(server)


@contextmanager
def waiting_for_all(talk: Conversation) -> Iterator[None]:
    """Somebody who has asked for the answer as a whole, and leaves."""
    with Wire(talk.server.port) as client:
        client.send(raw_request(f"{talk.path}/generate", {"input": "hi", "stream": False}))
        yield
        client.leave("RST")


# -- other ends -------------------------------------------------------------------------------------------------------


@pytest.mark.req("R35", "R36")
def test_a_cancel_ends_the_stream_and_keeps_what_was_said(server: Running) -> None:
    talk = converse(server, max_tokens=4000)
    cancelled: list[Reply] = []
    with held(server, after=6) as hold, listening(talk, input="hi") as listener:
        hold.wait()
        listener.read_tokens(3)
        cancelling = threading.Thread(target=lambda: cancelled.append(talk.post("cancel")))
        cancelling.start()
        wait_for_inbox(server)
        hold.release()
        events = listener.read_rest()
        cancelling.join(WAIT_S)
    assert events[-1].data["finish_reason"] == "cancelled"
    assert "error" not in events[-1].data
    text, ids = joined(events)
    assert 3 <= len(ids) < 100
    assert (cancelled[0].status, cancelled[0].json()["state"]) == (200, "idle")
    assert talk.said() == ["hi", text]
    assert talk.turns()[1]["finish_reason"] == "cancelled"
    assert talk.post("cancel").status == 200, "there is nothing to cancel any more"
    assert talk.ask("go on", max_tokens=5)["finish_reason"] == "length"


@pytest.mark.parametrize("stream", [True, False])
def test_a_cancel_before_the_first_token(stream: bool) -> None:
    with crowded() as server:
        runs, talk = converse(server, max_tokens=20), converse(server)
        replies: list[Reply] = []
        with held(server, after=3) as hold:
            threads = [threading.Thread(target=runs.ask, args=("hi",))]
            threads[0].start()
            hold.wait()
            body: dict[str, Any] = {"input": "hi", "stream": stream}
            threads.append(threading.Thread(target=lambda: replies.append(talk.post("generate", **body))))
            threads[-1].start()
            wait_for_inbox(server)
            threads.append(threading.Thread(target=lambda: talk.post("cancel")))
            threads[-1].start()
            wait_for_inbox(server, 2)
        for thread in threads:
            thread.join(WAIT_S)
        assert (replies[0].status, replies[0].error["code"]) == (499, "cancelled")
        assert talk.info()["num_turns"] == 0, "the question went with its answer"
        assert talk.ask("hi")["finish_reason"] == "length"


@pytest.mark.parametrize("stream", [True, False])
def test_a_failure_on_the_way_is_told_and_logged(
    server: Running, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    talk = converse(server)
    hold = server.inject(FaultKind.STALL, after=4)
    server.inject(FaultKind.NAN, after=5)
    replies: list[Reply] = []
    asking = threading.Thread(target=lambda: replies.append(talk.post("generate", input="hi", stream=stream)))
    asking.start()
    assert hold.stalled.wait(WAIT_S)
    until(lambda: talk.behind.live is not None and len(talk.behind.live.token_ids) >= 2)
    hold.release.set()
    asking.join(WAIT_S)
    if stream:
        last = events_in(replies[0].body)[-1].data
        assert last["finish_reason"] == "error"
        error = last["error"]
    else:
        assert replies[0].status == 500
        error = replies[0].error
    assert (error["message"], error["code"]) == ("the request failed", "error")
    assert talk.turns()[1]["finish_reason"] == "error"
    (failure,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert failure.startswith("the request failed: ")


@contextmanager
def crowded() -> Iterator[Running]:
    """One answer runs at a time, and one may wait."""
    with fake_server(EngineConfig(max_num_seqs=1, max_queue=1, queue_timeout_s=50.0)) as server:
        yield server


@pytest.mark.req("R36", "R37")
@pytest.mark.parametrize("stream", [True, False])
def test_what_is_refused_before_the_first_byte_has_its_status(stream: bool) -> None:
    with crowded() as server:
        clock = Clock(server)
        runs, waits, refused = (converse(server, max_tokens=200) for _ in range(3))
        refused.ask("before", max_tokens=2)
        before = refused.contents()
        replies: dict[str, Reply] = {}

        def ask(name: str, talk: Conversation) -> threading.Thread:
            thread = threading.Thread(
                target=lambda: replies.__setitem__(name, talk.post("generate", input="hi", stream=stream))
            )
            thread.start()
            return thread

        with held(server, after=3) as hold:
            threads = [ask("runs", runs)]
            hold.wait()
            threads.append(ask("waits", waits))
            wait_for_inbox(server)
            hold.step()
            ask("refused", refused).join(0)
            wait_for_inbox(server)
            hold.step()
            until(lambda: "refused" in replies)
            assert (replies["refused"].status, replies["refused"].error["code"]) == (429, "rate_limit_exceeded")
            assert int(replies["refused"].headers["retry-after"]) >= 1
            assert refused.contents() == before, "the question went with its answer"
            clock.wind(51.0)
            hold.step()
            until(lambda: "waits" in replies)
            assert (replies["waits"].status, replies["waits"].error["code"]) == (503, "timeout")
            assert int(replies["waits"].headers["retry-after"]) >= 1
            assert waits.info()["num_turns"] == 0
        for thread in threads:
            thread.join(WAIT_S)
        assert replies["runs"].status == 200
        assert refused.ask("again", max_tokens=2)["finish_reason"] == "length"
        assert_no_leak(server)


@pytest.mark.req("R36")
def test_a_regeneration_that_is_refused_keeps_the_answer() -> None:
    with crowded() as server:
        talks = [converse(server, max_tokens=200) for _ in range(2)]
        kept = converse(server, max_tokens=8)
        kept.ask("hi")
        before = kept.turns()
        replies: list[Reply] = []
        with held(server, after=3) as hold:
            threads = [threading.Thread(target=talk.ask, args=("hi",)) for talk in talks]
            threads[0].start()
            hold.wait()
            threads[1].start()
            wait_for_inbox(server)
            hold.step()
            asking = threading.Thread(target=lambda: replies.append(kept.post("regenerate")))
            asking.start()
            wait_for_inbox(server)
            hold.step()
            asking.join(WAIT_S)
        assert replies[0].status == 429
        assert kept.turns() == before
        for thread in threads:
            thread.join(WAIT_S)
        assert kept.post("regenerate", stream=False, seed=3, temperature=1).status == 200


@pytest.mark.req("R36")
def test_a_server_that_stops_ends_streams_and_tells_them(tmp_path: Path) -> None:
    with child(tmp_path / "log", "fake", "--drain", "0.1") as served:
        made = request(served.port, "POST", SESSIONS, {"model": "fake"}, key=None).json()
        body: dict[str, Any] = {
            "input": "hi",
            "ignore_eos": True,
            "max_tokens": 4000,
            "logprobs": True,
            "top_logprobs": 20,
        }
        talk = Conversation(Running(served.port, None, None, None), made["id"], None)  # type: ignore[arg-type]
        with listening(talk, **body) as listener:
            listener.read_tokens(1)
            assert served.stop() == 0
            events = listener.read_rest()
    assert events[-1].data["finish_reason"] == "shutdown"
    assert events[-1].data["error"]["code"] == "shutdown"
    assert joined(events)[1]
    assert "Traceback" not in served.said()


# -- the suite can fail -----------------------------------------------------------------------------------------------


def resume_all(server: Running) -> None:
    """The checks above, in short."""
    cut_and_resume(server, 4, "FIN", whole(server))
    talk = begin(server, "letters")
    events = slow_events(talk)
    for count in range(1, len(events) + 1):
        assert joined([*events[:count], *resumed(talk, events[count - 1].id)]) == joined(events)


BUGS = [
    PlantedBug("a resume repeats the last token", streaming, "read_event_id", "int(place)",
               "max(0, int(place) - 1)"),
    PlantedBug("a resume leaves one out", streaming, "read_event_id", "int(place)", "int(place) + 1"),
    PlantedBug("ids are those of the beginning", streaming.AnswerEvents, "_event",
               "delta.offset + len(delta.token_ids)", "delta.offset"),
    PlantedBug("the text of a finished answer from the wrong place", Answer, "_since",
               "self._ends[offset - 1] if offset else 0",
               "self._ends[offset] if 0 < offset < len(self._ends) else 0"),
    PlantedBug("the end comes twice", streaming, "read_event_id", "None if is_end else int(place)",
               "0 if is_end else int(place)"),
]  # fmt: skip


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_caught(server: Running, bug: PlantedBug, monkeypatch: pytest.MonkeyPatch) -> None:
    resume_all(server)
    plant(bug, monkeypatch)
    with pytest.raises(AssertionError):
        resume_all(server)
