"""Several servers on one database, and what happens when one of them, or the database, dies: real processes, killed."""

from __future__ import annotations

import http.client
import random
import signal
import threading
import time
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.cluster.database import Database
from tests.cluster.serving import LEASE_S, LONG, Heard, Node, Stream, begin, nodes, resume
from tokenmill.session.postgres import PostgresStore
from tokenmill.session.store import Scope

ANSWER = 6
"""Tokens of an answer."""
MOST_TURNS = 50
"""Of a conversation: about 60 fit into its context, and an answer that ends there is shorter."""
PACE_S = 0.02
"""Between two questions of a client."""


# -- judged by what the database has ----------------------------------------------------------------------------------


@dataclass
class Talk:
    """A conversation and what its client was told of it."""

    session: str
    said: dict[str, list[int]] = field(default_factory=dict)
    """What was asked and acknowledged -> the ids of the answer."""
    unsure: set[str] = field(default_factory=set)
    """Asked, but the client was told nothing, or that it is not durable."""


def judge(db: Database, talks: list[Talk]) -> None:
    """Every acknowledged turn is there once, nothing is there by half.

    A server that is killed disconnects from the one that it has forwarded a question to, which cancels the answer.
    """
    ((fingerprint,),) = db.query("SELECT DISTINCT fingerprint FROM sessions")
    with closing(PostgresStore(db.url)) as store:
        judge_turns(store, str(fingerprint), talks)


def judge_turns(store: PostgresStore, fingerprint: str, talks: list[Talk]) -> None:
    for talk in talks:
        (found,) = store.read(Scope(fingerprint, 1 << 20), [talk.session])
        turns, asked = found.record.turns, []
        for question, answer, begins in zip(turns[::2], turns[1::2], turns[0::2], strict=True):
            text = str(question.messages[-1]["content"])
            asked.append(text)
            assert begins.end is not None
            ids = found.record.tokens.array[begins.end : answer.end].tolist()
            is_cancelled = answer.finish_reason == "cancelled" and text in talk.unsure
            assert len(ids) == ANSWER or is_cancelled, f"half an answer: {answer}"
            assert talk.said.get(text, ids) == ids, "another answer than what was acknowledged"
        assert len(asked) == len(set(asked)), "a turn is there twice"
        assert set(talk.said) <= set(asked), "an acknowledged turn is lost"
        assert set(asked) <= set(talk.said) | talk.unsure
        assert [text for text in asked if text in talk.said] == list(talk.said), "in another order"


def converse(talks: list[Talk], servers: list[Node], chance: random.Random, until: threading.Event) -> None:
    """Ask on any server; what fails is not asked again."""
    number = 0
    while not until.is_set():
        number += 1
        talk = chance.choice([one for one in talks if len(one.said) + len(one.unsure) < MOST_TURNS])
        text = f"question {number} of {talks[0].session}"
        try:
            reply = chance.choice(servers).ask(talk.session, text)
        except (OSError, http.client.HTTPException):
            talk.unsure.add(text)
            until.wait(0.02)
            continue
        if reply.status == 200 and reply.json()["durable"]:
            talk.said[text] = reply.json()["token_ids"]
        else:
            talk.unsure.add(text)
        until.wait(PACE_S)


class Load:
    """Clients at work, each with sessions of its own."""

    def __init__(self, servers: list[Node], num_clients: int = 6, num_sessions: int = 60, seed: int = 1) -> None:
        self.until = threading.Event()
        self.talks = [[Talk(servers[0].create()) for _ in range(num_sessions)] for _ in range(num_clients)]
        self.threads = [
            threading.Thread(target=converse, args=(talks, servers, random.Random(seed + i), self.until))
            for i, talks in enumerate(self.talks)
        ]
        for thread in self.threads:
            thread.start()

    def __enter__(self) -> Load:
        return self

    def __exit__(self, *_: object) -> None:
        self.until.set()
        for thread in self.threads:
            thread.join(60)

    @property
    def all(self) -> list[Talk]:
        return [talk for talks in self.talks for talk in talks]

    @property
    def num_acked(self) -> int:
        return sum(len(talk.said) for talk in self.all)


# -- any server takes any conversation --------------------------------------------------------------------------------


@pytest.mark.req("B3")
def test_a_conversation_goes_on_wherever_it_is_asked(db: Database, tmp_path: Path) -> None:
    with nodes(db, tmp_path) as (one, two):
        here, moved = one.create(), one.create()
        for i in range(6):
            wanted = one.tokens(here, f"question {i}", max_tokens=6)
            assert (one, two)[i % 2].tokens(moved, f"question {i}", max_tokens=6) == wanted
        assert one.turns(moved) == two.turns(moved)
        assert len(one.turns(moved)) == 12
        listed = [one.request("GET", "/v1/sessions").json(), two.request("GET", "/v1/sessions").json()]
        assert listed[0] == listed[1]
        assert {session["id"] for session in listed[0]["data"]} == {here, moved}
        assert two.request("DELETE", f"/v1/sessions/{here}").status == 204
        assert one.ask(here, "gone").status == 404
        for node in (one, two):
            assert node.request("GET", f"/v1/sessions/{here}").status == 404


def test_what_is_asked_while_another_server_answers_is_forwarded(db: Database, tmp_path: Path) -> None:
    with nodes(db, tmp_path) as (one, two):
        session = one.create()
        stream, heard = begin(one, session, "long"), Heard()
        stream.read(heard, 1)
        assert two.request("GET", f"/v1/sessions/{session}").json()["state"] == "generating"
        assert resume(two, session, Heard(heard.token_ids[:], heard.last_id)).token_ids[: len(heard.token_ids)]
        stopped = two.request("POST", f"/v1/sessions/{session}/cancel", {})
        assert (stopped.status, stopped.json()["state"]) == (200, "idle")
        stream.read(heard)
        assert heard.finish_reason in ("cancelled", "length")
        assert two.turns(session)[1]["num_tokens"] == len(heard.token_ids)
        assert two.tokens(session, "and then", max_tokens=3)


def test_the_sessions_of_another_key_stay_hidden(db: Database, tmp_path: Path) -> None:
    with nodes(db, tmp_path, 2, "--api-key", "sk-one", "--api-key", "sk-two") as (one, two):
        mine = {"Authorization": "Bearer sk-one"}
        session = one.request("POST", "/v1/sessions", {}, **mine).json()["id"]
        for node in (one, two):
            assert node.request("GET", f"/v1/sessions/{session}", Authorization="Bearer sk-two").status == 404
            body = {"input": "x", "max_tokens": 2}
            path = f"/v1/sessions/{session}/generate"
            assert node.request("POST", path, body, Authorization="Bearer sk-two").status == 404
        assert db.query("SELECT epoch FROM sessions") == [(1,)], "nor are they taken"
        assert two.request("GET", f"/v1/sessions/{session}", **mine).status == 200


# -- A1 to A4 ---------------------------------------------------------------------------------------------------------


@pytest.mark.req("B3")
def test_a1_servers_killed_at_random_lose_nothing(db: Database, tmp_path: Path) -> None:
    """For a minute, one of three every three seconds."""
    chance = random.Random(7)
    with nodes(db, tmp_path, 3) as servers:
        with Load(servers) as load:
            ends_at = time.monotonic() + 60
            kills = 0
            while time.monotonic() < ends_at:
                time.sleep(2 + 2 * chance.random())
                victim = chance.choice(servers)
                victim.kill()
                kills += 1
                victim.start(wait=False)
        for server in servers:
            server.wait()
        assert kills >= 12
        assert load.num_acked > 200
        judge(db, load.all)
        for talk in random.Random(1).sample(load.all, 5):  # and goes on as the log does, on any of them
            forks = [
                server.request("POST", f"/v1/sessions/{talk.session}/fork", {}).json()["data"][0]["id"]
                for server in servers
            ]
            said = [server.tokens(fork, "and then") for server, fork in zip(servers, forks, strict=True)]
            assert said[0] == said[1] == said[2]


@pytest.mark.req("B3", "B5")
def test_a2_an_answer_whose_server_dies_is_resumed_with_the_same_tokens(db: Database, tmp_path: Path) -> None:
    with nodes(db, tmp_path) as (one, two):
        drawn = {"temperature": 1.0, "seed": 11}
        whole = Heard()
        begin(two, two.create(**drawn), "a question").read(whole)
        assert whole.finish_reason == "length"
        session, heard = one.create(**drawn), Heard()
        stream = begin(one, session, "a question").read(heard, 1)
        assert stream is heard
        one.kill()
        assert heard.finish_reason is None
        seen, began = len(heard.token_ids), time.monotonic()
        resume(two, session, heard)
        assert time.monotonic() - began < LEASE_S + 1 + 5, "the lease, and the answer once more"
        assert heard.restarts == 0
        assert 0 < seen < len(heard.token_ids)
        assert heard.token_ids == whole.token_ids
        assert heard.durable is True
        assert [turn["num_tokens"] for turn in two.turns(session)][1:] == [len(whole.token_ids)]
        again = resume(two, session, Heard(heard.token_ids[:5], heard.last_id.rpartition(":")[0] + ":5"))  # type: ignore[union-attr]
        assert again.token_ids == whole.token_ids


def test_a2_an_answer_whose_server_dies_goes_on_from_the_tokens_of_its_client(db: Database, tmp_path: Path) -> None:
    """Also from tokens that this server would not have drawn."""
    with nodes(db, tmp_path) as (one, two):
        session, heard = one.create(temperature=1.0, seed=11), Heard()
        begin(one, session, "a question").read(heard, 3)
        one.kill()
        asked = {"answer_id": (heard.last_id or "").rpartition(":")[0], "token_ids": [*heard.token_ids[:3], 7, 7, 7]}
        refused = two.request("POST", f"/v1/sessions/{session}/resume", {**asked, "token_ids": [1 << 40]})
        assert refused.status == 400
        went_on = Heard(list(asked["token_ids"]))
        Stream(two, "POST", f"/v1/sessions/{session}/resume", asked).read(went_on)
        assert went_on.restarts == 0
        assert went_on.finish_reason == "length"
        assert len(went_on.token_ids) == LONG
        assert went_on.token_ids[:6] == asked["token_ids"]
        assert [turn["num_tokens"] for turn in two.turns(session)][1:] == [LONG]
        again = Heard()
        Stream(two, "POST", f"/v1/sessions/{session}/resume", {"token_ids": []}).read(again)
        assert again.token_ids == went_on.token_ids


def test_a2_a_new_question_in_place_of_an_answer_that_died(db: Database, tmp_path: Path) -> None:
    """As on one machine: nothing of a turn that was not acknowledged."""
    with nodes(db, tmp_path) as (one, two):
        session, heard = one.create(), Heard()
        one.tokens(session, "first")
        begin(one, session, "lost").read(heard, 1)
        one.kill()
        two.tokens(session, "second")
        said = [turn["messages"][0]["content"] for turn in two.turns(session)]
        assert said[::2] == ["first", "second"]
        reply = two.request("GET", f"/v1/sessions/{session}/stream", **{"Last-Event-ID": heard.last_id or ""})
        assert reply.status == 409


def test_a2_an_answer_is_resumed_although_the_first_attempt_failed(db: Database, tmp_path: Path) -> None:
    import psycopg

    with nodes(db, tmp_path, 2, "--extra", "step_us=3000") as (one, two):  # longer than locks are waited for
        session, heard = one.create(temperature=1.0, seed=11), Heard()
        begin(one, session, "a question").read(heard, 1)
        one.kill()
        path = f"/v1/sessions/{session}"
        assert two.request("POST", f"{path}/resume", {"token_ids": [1 << 40]}).status == 400, "it has the session now"
        with psycopg.connect(db.url) as stopped:
            stopped.execute("SELECT 1 FROM sessions FOR UPDATE")
            failed = two.request("GET", f"{path}/stream", **{"Last-Event-ID": heard.last_id or ""})
            assert failed.status == 503, failed.body
        before = list(heard.token_ids)
        assert resume(two, session, heard).finish_reason == "length"
        assert heard.token_ids[: len(before)] == before
        assert len(two.turns(session)) == 2


def test_a2_an_answer_that_died_is_not_run_again_behind_a_newer_turn(db: Database, tmp_path: Path) -> None:
    """Although it was asked for in between, in vain."""
    with nodes(db, tmp_path) as (one, two):
        session, heard = one.create(), Heard()
        begin(one, session, "lost").read(heard, 1)
        one.kill()
        refused = two.request("POST", f"/v1/sessions/{session}/resume", {"token_ids": [1 << 40]})
        assert refused.status == 400
        two.tokens(session, "second")
        reply = two.request("GET", f"/v1/sessions/{session}/stream", **{"Last-Event-ID": heard.last_id or ""})
        assert reply.status == 409
        assert reply.error["code"] == "answer_replaced"
        two.tokens(session, "third")
        assert [turn["messages"][0]["content"] for turn in two.turns(session)[::2]] == ["second", "third"]


def test_what_a_session_cost_is_told_without_taking_it(db: Database, tmp_path: Path) -> None:
    with nodes(db, tmp_path) as (one, two):
        session = one.create()
        one.tokens(session, "first")
        owner = db.query("SELECT owner, epoch FROM sessions")
        for path in (f"/v1/sessions/{session}/explain", f"/v1/sessions/{session}/turns", f"/v1/sessions/{session}"):
            assert two.request("GET", path).status == 200
        assert db.query("SELECT owner, epoch FROM sessions") == owner


@pytest.mark.req("B3")
def test_a3_a_server_that_was_taken_for_dead_changes_nothing(db: Database, tmp_path: Path) -> None:
    with nodes(db, tmp_path) as (one, two):
        session, heard = one.create(), Heard()
        one.tokens(session, "first")
        stream = begin(one, session, "frozen")
        stream.read(heard, 1)
        one.signal(signal.SIGSTOP)
        time.sleep(2 * LEASE_S)
        taken = two.tokens(session, "second")
        one.signal(signal.SIGCONT)
        stream.read(heard)
        assert heard.durable is not True, "what it says after that is not acknowledged"
        turns = two.turns(session)
        assert [turn["messages"][0]["content"] for turn in turns[::2]] == ["first", "second"]
        assert [turn["num_tokens"] for turn in turns[1::2]] == [ANSWER, len(taken)]
        one.tokens(session, "third")  # it takes the session back as any other
        assert [turn["messages"][0]["content"] for turn in two.turns(session)[::2]] == ["first", "second", "third"]


def recovers(load: Load, seconds: float = 30.0) -> None:
    """Turns are acknowledged again."""
    before, deadline = load.num_acked, time.monotonic() + seconds
    while load.num_acked < before + 50:
        assert time.monotonic() < deadline, "it does not recover"
        time.sleep(0.05)


@pytest.mark.req("B3")
def test_a4_a_database_that_is_killed_or_hangs(db: Database, tmp_path: Path) -> None:
    with nodes(db, tmp_path) as servers:
        with Load(servers, num_clients=4) as load:
            recovers(load)
            for _ in range(3):
                db.kill()
                time.sleep(0.5)
                db.start()
                recovers(load)
            db.signal(signal.SIGSTOP)
            time.sleep(10)
            db.signal(signal.SIGCONT)
            recovers(load)
        judge(db, load.all)


# -- going down -------------------------------------------------------------------------------------------------------


@pytest.mark.req("B3")
def test_a_server_that_stops_hands_its_answers_over(db: Database, tmp_path: Path) -> None:
    with nodes(db, tmp_path, 2, "--drain", "0") as (one, two):
        whole, heard = Heard(), Heard()
        begin(two, two.create(seed=5), "a question").read(whole)
        session = one.create(seed=5)
        stream = begin(one, session, "a question")
        stream.read(heard, 1)
        one.signal(signal.SIGTERM)
        stream.read(heard)
        assert one.process is not None
        assert one.process.wait(30) == 0
        if heard.finish_reason != "length":  # it was cut off
            assert (heard.finish_reason, heard.durable) == ("shutdown", False)
            assert db.query("SELECT owner FROM sessions WHERE id = %s", session) == [(None,)], "no lease is waited for"
            resume(two, session, heard)
        assert heard.token_ids == whole.token_ids
        assert db.query("SELECT count(*) FROM servers") == [(1,)]


def test_a_missing_database_is_one_line(tmp_path: Path) -> None:
    node = Node(tmp_path, "node", "postgresql://nobody:secret@127.0.0.1:1/none")
    node.start(wait=False)
    assert node.process is not None
    assert node.process.wait(60) != 0
    said = node.log.read_text()
    assert "cannot use the store postgresql://nobody@127.0.0.1:1/none" in said
    assert "secret" not in said
    assert "Traceback" not in said
