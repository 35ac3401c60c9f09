"""Claims, writes, leases that run out and crashes in any order, against a simple model, on both stores.

What was acknowledged is there, once; a server that has lost its claim changes nothing.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.cluster.database import Database
from tokenmill.errors import NotDurable, SessionElsewhere, SessionMoved
from tokenmill.params import SamplingParams
from tokenmill.session import postgres
from tokenmill.session.log import SharedList, Tokens, Turn
from tokenmill.session.postgres import PostgresStore
from tokenmill.session.records import SessionRecord
from tokenmill.session.store import Scope, SessionStore, Store, Stored

SCOPE = Scope("model", 1000)
SESSIONS = ("one", "two")
NUM_SERVERS = 3
STEPS = 25
HEAD: dict[str, Any] = {
    "system": None,
    "sampling": SamplingParams(),
    "overflow": "error",
    "overflow_keep": 0.5,
    "template_options": {},
    "key": "",
    "namespace": None,
    "priority": 0,
    "inbox": (),
    "attempt": 0,
    "num_forks": 0,
    "last_answer": None,
    "title": None,
    "metadata": {},
}


def record(name: str, tokens: list[int]) -> SessionRecord:
    now = time.time()
    turns = [Turn("input", (), end + 1) for end in range(len(tokens))]
    head = {**HEAD, "created_at": now, "used_at": now}
    return SessionRecord(name, head, Tokens(tokens), SharedList(turns), 1024)


# -- the model --------------------------------------------------------------------------------------------------------


@dataclass
class Truth:
    """What must be in the store of one session."""

    log: list[int] = field(default_factory=list)
    """As it was acknowledged."""
    exists: bool = False
    epoch: int = 0
    owner: int | None = None
    """The server whose claim is the last one."""
    answer: str | None = None
    """The answer that its owner has begun."""


@dataclass
class Copy:
    """A session as a server has it in memory."""

    epoch: int
    log: list[int]


class Cluster:
    """Servers on a shared store, which crash and come back; and what must be true of it."""

    def __init__(self, open_store: Callable[[], Store], expire: Callable[[Store], None], *, is_shared: bool) -> None:
        self.open_store, self._expire, self.is_shared = open_store, expire, is_shared
        self.stores: list[Store] = [open_store() for _ in range(NUM_SERVERS if is_shared else 1)]
        self.alive = [True] * len(self.stores)
        """Has it a lease?"""
        self.copies: list[dict[str, Copy]] = [{} for _ in self.stores]
        self.old: list[dict[str, Copy]] = [{} for _ in self.stores]
        """What a server still has in memory of a session that it has claimed once more since."""
        self.truth = {name: Truth() for name in SESSIONS}
        self.next_token = 0
        self.num_stale = 0

    def step(self, choose: Callable[[int], int]) -> None:
        server, name = choose(len(self.stores)), SESSIONS[choose(len(SESSIONS))]
        actions = [
            self.claim,
            self.write,
            self.write,
            self.cut,
            self.begin,
            self.delete,
            self.lapse,
            self.crash,
            self.look,
            self.release,
            self.ask,
            self.write_old,
        ]
        actions[choose(len(actions))](server, name)

    def claim(self, server: int, name: str) -> None:
        truth, store = self.truth[name], self.stores[server]
        if not truth.exists:
            assert store.claim(SCOPE, name) is None
            if truth.epoch == 0 and name not in self.copies[server]:  # it is made, once
                truth.exists, truth.owner, truth.epoch, truth.log = True, server, 1, []
                self.copies[server][name] = Copy(1, [])
                store.save(record(name, []), SCOPE.fingerprint, 1, is_new=True).result()
            return
        if not self.is_shared and name in self.copies[server]:
            assert store.claim(SCOPE, name) is None, "it is in use"
            return
        is_busy = truth.answer is not None and truth.owner not in (None, server) and self.alive[truth.owner]
        resumes = truth.answer if truth.epoch % 2 else None
        try:
            found = store.claim(SCOPE, name, resumes=resumes)
        except SessionElsewhere:
            assert is_busy, "it could have been claimed"
            return
        assert not is_busy, "taken from a server that is answering"
        assert found is not None
        self.check_read(name, found)
        unfinished = None if found.unfinished is None else found.unfinished["id"]
        assert unfinished == (truth.answer if resumes is not None else None)
        truth.owner, truth.answer = server, unfinished
        truth.epoch = truth.epoch + 1
        if name in self.copies[server]:
            self.old[server][name] = self.copies[server][name]
        assert not self.is_shared or found.epoch == truth.epoch
        self.copies[server][name] = Copy(truth.epoch, found.record.tokens.tolist())

    def write(self, server: int, name: str) -> None:
        copy = self.copies[server].get(name)
        if copy is not None:  # several at once, so that a cut goes through what was written together
            self.next_token += 3
            self.save(server, name, copy, [*copy.log, *range(self.next_token, self.next_token + 3)])

    def cut(self, server: int, name: str) -> None:
        copy = self.copies[server].get(name)
        if copy is not None:
            self.next_token += 1
            self.save(server, name, copy, [*copy.log[: len(copy.log) // 2], self.next_token])

    def save(self, server: int, name: str, copy: Copy, log: list[int]) -> None:
        saving = self.stores[server].save(record(name, log), SCOPE.fingerprint, copy.epoch)
        if self.happens(server, name, copy, saving):
            copy.log = self.truth[name].log = log
            self.truth[name].answer = None

    def begin(self, server: int, name: str) -> None:
        copy = self.copies[server].get(name)
        if copy is None or not self.is_shared:
            return
        self.next_token += 1
        answer = f"answer-{self.next_token}"
        if self.happens(server, name, copy, self.stores[server].begin_answer(name, copy.epoch, {"id": answer})):
            self.truth[name].answer = answer

    def write_old(self, server: int, name: str) -> None:
        copy = self.old[server].get(name)
        if copy is None or not self.is_shared:
            return
        self.next_token += 3
        late, store = record(name, [*copy.log[: len(copy.log) // 2], self.next_token]), self.stores[server]
        try:
            if self.next_token % 2:
                store.save(late, SCOPE.fingerprint, copy.epoch).result()
            else:
                store.begin_answer(name, copy.epoch, {"id": "late"}).result()
        except SessionMoved:
            self.num_stale += 1
        except NotDurable as error:
            raise AssertionError("neither done nor refused") from error
        else:
            raise AssertionError("a write of an old claim was accepted")

    def ask(self, server: int, name: str) -> None:
        copy = self.copies[server].get(name)
        if copy is not None and self.is_shared:
            assert self.stores[server].holds(name, copy.epoch).result() == self.is_ours(server, name, copy)

    def release(self, server: int, name: str) -> None:
        copy = self.copies[server].pop(name, None)
        if copy is None:
            return
        if self.is_ours(server, name, copy):
            self.truth[name].owner = None
        self.stores[server].let_go(name, copy.epoch)
        if self.is_shared:
            assert not self.stores[server].holds(name, copy.epoch).result(), "after it, in order"

    def is_ours(self, server: int, name: str, copy: Copy) -> bool:
        truth = self.truth[name]
        return truth.exists and truth.owner == server and (truth.epoch == copy.epoch or not self.is_shared)

    def delete(self, server: int, name: str) -> None:
        copy = self.copies[server].get(name)
        if copy is None or self.next_token % 4:  # seldom
            return
        is_gone = not self.truth[name].exists
        deleting = self.stores[server].delete(name, copy.epoch)
        if is_gone:
            deleting.result()
            self.copies[server].pop(name)
        elif self.happens(server, name, copy, deleting):
            self.truth[name].exists, self.truth[name].answer = False, None
            self.copies[server].pop(name)

    def happens(self, server: int, name: str, copy: Copy, write: Future[Any]) -> bool:
        """A write of the last claim must succeed, any other one must not."""
        is_ours = self.is_ours(server, name, copy)
        try:
            write.result()
        except SessionMoved:
            assert not is_ours, "a write that was ours was refused"
            self.num_stale += 1
            self.copies[server].pop(name)
            return False
        except NotDurable as error:
            raise AssertionError("neither done nor refused") from error
        assert is_ours, "a stale write was accepted"
        return True

    def lapse(self, server: int, _: str) -> None:
        """Its lease runs out, or is renewed; what it has in memory stays."""
        if not self.is_shared:
            return
        if self.alive[server]:
            self._expire(self.stores[server])
        else:
            store = self.stores[server]
            assert isinstance(store, PostgresStore)
            store._next(store._writers).post(store._renew).result()
        self.alive[server] = not self.alive[server]

    def crash(self, server: int, _: str) -> None:
        """It is gone at once, with all that it had not acknowledged, and another one takes its place."""
        old = self.stores[server]
        if self.is_shared:
            self._expire(old)
        self.copies[server].clear()
        self.old[server].clear()
        for truth in self.truth.values():
            if truth.owner == server:
                truth.owner = None
        old.close()
        self.stores[server], self.alive[server] = self.open_store(), True

    def look(self, server: int, name: str) -> None:
        found = self.stores[server].read(SCOPE, [name])
        assert bool(found) == self.truth[name].exists
        if found:
            self.check_read(name, found[0])

    def check_read(self, name: str, found: Stored) -> None:
        assert found.record.tokens.tolist() == self.truth[name].log, "lost or doubled"
        assert [turn.end for turn in found.record.turns] == list(range(1, len(self.truth[name].log) + 1))

    def close(self) -> None:
        for name in SESSIONS:
            self.look(0, name)
        for store in self.stores:
            store.close()


def play(cluster: Cluster, choose: Callable[[int], int], steps: int = STEPS) -> Cluster:
    try:
        for _ in range(steps):
            cluster.step(choose)
    finally:
        cluster.close()
    return cluster


class Quick(PostgresStore):
    """Its lease runs out when the test says so, and nothing waits for the disk."""

    def __init__(self, url: str) -> None:
        super().__init__(f"{url}?options=-csynchronous_commit%3Doff", lease_s=600.0)
        self._readers[0].close()
        self._readers = self._writers


def postgres_cluster(db: Database) -> Cluster:
    def expire(store: Store) -> None:
        assert isinstance(store, PostgresStore)
        db.query("UPDATE servers SET lease_until = now() - interval '1 s' WHERE id = %s", store.server_id)

    return Cluster(lambda: Quick(db.url), expire, is_shared=True)


def wipe(db: Database) -> None:
    if db.query("SELECT to_regclass('sessions')") == [(None,)]:
        PostgresStore(db.url).close()
    db.query("TRUNCATE sessions, tokens, turns, servers, documents")


def from_data(data: st.DataObject) -> Callable[[int], int]:
    return lambda count: data.draw(st.integers(0, count - 1))


EXAMPLES = settings(
    deadline=None,
    database=None,
    derandomize=True,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture
def few_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres, "NUM_WRITERS", 1)
    monkeypatch.setattr(postgres, "NUM_READERS", 1)


@pytest.mark.req("B3")
@pytest.mark.usefixtures("few_connections")
def test_a_thousand_interleavings_on_postgresql(db: Database) -> None:
    num_stale = 0

    @settings(EXAMPLES, max_examples=1000)
    @given(st.data())
    def interleave(data: st.DataObject) -> None:
        nonlocal num_stale
        wipe(db)
        num_stale += play(postgres_cluster(db), from_data(data)).num_stale

    interleave()
    assert num_stale > 100, "stale writes were tried"


@pytest.mark.req("B3")
def test_a_thousand_interleavings_on_sqlite(tmp_path: Path) -> None:
    number = 0

    @settings(EXAMPLES, max_examples=1000)
    @given(st.data())
    def interleave(data: st.DataObject) -> None:
        nonlocal number
        number += 1
        folder = tmp_path / str(number)
        cluster = Cluster(lambda: SessionStore(folder, reserve_bytes=0), lambda _: None, is_shared=False)
        play(cluster, from_data(data))

    interleave()


# -- the suite can fail -----------------------------------------------------------------------------------------------

NO_FENCE = "sessions.id = mine.id"
NO_EPOCH = "sessions.id = mine.id AND sessions.owner = %(me)s"
BUGS: dict[str, tuple[str, Callable[[str], str]]] = {
    **{
        f"no fence in {name}": (name, lambda text: text.replace(postgres.OURS, NO_FENCE))
        for name in (
            "APPEND",
            "BEGIN_ANSWER",
            "DELETE_OURS",
            "RELEASE",
            "HOLDS",
            "CUT_TOKENS",
            "CUT_PIECE",
            "CUT_TURNS",
        )
    },
    **{
        f"no epoch in {name}": (name, lambda text: text.replace(postgres.OURS, NO_EPOCH))
        for name in ("APPEND", "BEGIN_ANSWER")
    },
    "a lease by the client's clock": (  # which is an hour late
        "CLAIM",
        lambda text: text.replace("lease_until > now()", "lease_until > now() - interval '1 hour'"),
    ),
    "busy sessions are taken": ("CLAIM", lambda text: text.replace("NOT answering OR", "true OR")),
    "an old answer is kept": ("CLAIM", lambda text: text.replace("IS TRUE", "IS NOT FALSE")),
}
"""Statements of `postgres.py`, and what is wrong with them."""


@pytest.mark.parametrize("bug", BUGS)
@pytest.mark.usefixtures("few_connections")
def test_a_planted_bug_is_caught(db: Database, monkeypatch: pytest.MonkeyPatch, bug: str) -> None:
    name, planted = BUGS[bug]
    faulty = planted(getattr(postgres, name))
    assert faulty != getattr(postgres, name)
    monkeypatch.setattr(postgres, name, faulty)
    chance = random.Random(1)
    for _ in range(150):
        wipe(db)
        try:
            play(postgres_cluster(db), chance.randrange, 40)
        except AssertionError:
            return
    pytest.fail("nothing noticed it")
