"""Sessions of a server with a store: what clients are told after a restart, and when the disk can't be written."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.conversing import SESSIONS, Conversation, converse, joined, listening, resumed, service_of
from tests.server.rules import assert_error, fake_server
from tests.server.serving import Reply, Running
from tests.server.wire import held, until
from tokenmill.session import store as store_module
from tokenmill.session.store import SessionStore

LENGTH = 24


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """One without a store."""
    with fake_server() as one:
        yield one


def store_of(server: Running) -> SessionStore:
    store = service_of(server).store
    assert store is not None
    return store


def may_write(server: Running, allowed: bool) -> None:
    store_of(server)._post(lambda connection: connection.execute(f"PRAGMA query_only={not allowed}")).result(30)


def lost(reply: Reply) -> int:
    """The durable offset of an answer that can't be resumed."""
    assert reply.status == 409, reply.body
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code", "durable_offset"}
    assert error["code"] == "answer_lost"
    return int(error["durable_offset"])


def resume(talk: Conversation, last: str | None) -> Reply:
    return talk.get("stream", **({} if last is None else {"Last-Event-ID": last}))


# -- 21.6: streams that are resumed after a restart -------------------------------------------------------------------


@pytest.mark.req("R36", "B3")
def test_21_6_a_stream_of_a_process_that_was_killed_is_lost_and_can_be_gone_on_with(tmp_path: Path) -> None:
    with fake_server(store=tmp_path / "store") as server:
        talk = converse(server, max_tokens=LENGTH)
        talk.ask("before")
        whole = talk.fork()[0].ask("hi")
        with held(server, after=8), listening(talk, input="hi") as listener:
            listener.read_tokens(3)
            text, ids = joined(listener.seen)
            last = listener.seen[-1].id
            shutil.copytree(tmp_path / "store", tmp_path / "killed")  # what a power cut leaves
    with fake_server(store=tmp_path / "killed") as server:
        talk = Conversation(server, talk.id)
        assert lost(resume(talk, last)) == 0
        assert lost(resume(talk, None)) == LENGTH, "the answer before is there"
        assert len(talk.turns()) == 2
        said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": text}]
        reply = talk.post("append", input=said, continue_final_message=True)
        assert reply.status == 200, reply.body
        assert [turn["kind"] for turn in talk.turns()] == ["input", "answer"] * 2
        rest = talk.ask(max_tokens=LENGTH - len(ids))
        assert text + rest["text"] == whole["text"], "the same answer, as if nothing had happened"
        assert talk.said()[-1] == whole["text"]
        assert len(talk.turns()) == 4
        assert joined(resumed(talk, f"{rest['id']}:0"))[0] == rest["text"], "this one can be resumed"


@pytest.mark.req("R36", "B3")
def test_21_6_an_answer_that_was_complete_says_how_much_of_it_is_in_the_turns(tmp_path: Path) -> None:
    with fake_server(store=tmp_path) as server:
        talk = converse(server, max_tokens=LENGTH)
        first, second = talk.ask("one"), talk.ask("two", max_tokens=5)
    with fake_server(store=tmp_path) as server:
        talk = Conversation(server, talk.id)
        for place in (0, 3, 5, "end"):
            assert lost(resume(talk, f"{second['id']}:{place}")) == 5
        assert lost(resume(talk, None)) == 5
        assert lost(resume(talk, f"{first['id']}:3")) == 0, "it is not the last one"
        assert talk.said()[-1] == second["text"]
        third = talk.ask("three")
        reply = resume(talk, f"{second['id']}:3")
        assert (reply.status, reply.error["code"]) == (409, "answer_replaced")
        assert joined(resumed(talk, f"{third['id']}:0"))[0] == third["text"]


def test_21_6_an_answer_that_went_on_counts_only_what_was_new(tmp_path: Path) -> None:
    with fake_server(store=tmp_path) as server:
        talk = converse(server, max_tokens=7)
        talk.ask("one")
        more = talk.ask(max_tokens=4)
        assert talk.turns()[-1]["num_tokens"] == 11
    with fake_server(store=tmp_path) as server:
        assert lost(resume(Conversation(server, talk.id), f"{more['id']}:2")) == 4


def test_21_6_what_never_was_is_not_lost(tmp_path: Path) -> None:
    with fake_server(store=tmp_path) as server:
        empty, answered = converse(server), converse(server)
        answered.ask("one")
    with fake_server(store=tmp_path) as server:
        empty, answered = Conversation(server, empty.id), Conversation(server, answered.id)
        assert_error(resume(empty, None), 400)
        for header in ("x", "name:", ":3", "name:x"):
            assert_error(resume(answered, header), 400, "Last-Event-ID")
        (fork,) = answered.fork()
        assert_error(resume(fork, None), 400)
        saved = answered.post("save").body
        reply = server.post(f"{SESSIONS}/restore", saved, headers={"Content-Type": "application/vnd.tokenmill.session"})
        assert_error(resume(Conversation(server, reply.json()["id"]), None), 400)


@pytest.mark.parametrize(
    "body",
    [
        {"input": "text"},
        {"input": "text", "raw": True},
        {"input": [1, 2]},
        {"input": [{"role": "user", "content": "x"}]},
        {"input": [{"role": "user", "content": "x"}, {"role": "assistant", "content": ""}]},
        {"input": [{"role": "assistant", "content": "nothing was asked"}]},
    ],
)
def test_21_6_only_the_beginning_of_an_answer_can_be_continued(server: Running, body: dict[str, Any]) -> None:
    talk = converse(server)
    talk.ask("hi")
    before = (talk.turns(), talk.info()["pending"])
    assert_error(talk.post("append", **body, continue_final_message=True), 400, "continue_final_message")
    assert (talk.turns(), talk.info()["pending"]) == before


def test_21_6_a_beginning_that_does_not_fit_is_refused(server: Running) -> None:
    talk = converse(server)
    said = [{"role": "user", "content": "x" * 2000}, {"role": "assistant", "content": "y" * 2100}]
    assert_error(talk.post("append", input=said, continue_final_message=True), 400)
    assert talk.turns() == []
    said[1]["content"] = "y" * 1000
    assert talk.post("append", input=said, continue_final_message=True).status == 200
    assert talk.info()["num_tokens"] == len("user: \nassistant: ") + 3000


# -- 21.4: sessions that can't be removed from the disk ---------------------------------------------------------------


@pytest.mark.req("R36", "B3")
def test_21_4_a_deletion_that_is_not_durable_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_server(store=tmp_path) as server:
        talks = [converse(server) for _ in range(3)]
        for talk in talks:
            talk.ask("hi")
        assert talks[0].delete().status == 204
        may_write(server, False)
        reply = talks[1].delete()
        assert reply.status == 202
        problem = "attempt to write a readonly database"
        assert reply.json() == {"id": talks[1].id, "object": "session.deleted", "durable": False, "problem": problem}
        assert_error(talks[1].get(), 404, "session_id")
        shutil.copytree(tmp_path, tmp_path / "killed")
        may_write(server, True)
        monkeypatch.setattr(store_module, "RETRY_S", 0.01)
        store_of(server).check_integrity()  # the store's thread looks at the time anew
        until(lambda: not store_of(server)._undeleted)
    for store, left in ((tmp_path / "killed", talks[1:]), (tmp_path, talks[2:])):
        with fake_server(store=store) as server:
            assert {one["id"] for one in server.get(SESSIONS).json()["data"]} == {talk.id for talk in left}
