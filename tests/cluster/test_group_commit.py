"""Writes of many sessions as one statement: what is refused or fails does so alone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace

import pytest

from tests.cluster.database import Database
from tests.cluster.test_interleavings import SCOPE, record
from tokenmill.errors import NotDurable, SessionMoved
from tokenmill.session import postgres
from tokenmill.session.postgres import PostgresStore

NAMES = ("one", "two", "three")


@pytest.fixture
def stores(db: Database, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[PostgresStore]]:
    monkeypatch.setattr(postgres, "NUM_WRITERS", 1)
    made = [PostgresStore(db.url, lease_s=600) for _ in range(2)]
    for name in NAMES:
        made[0].save(record(name, [1]), SCOPE.fingerprint, 1, is_new=True).result()
    yield made
    for one in made:
        one.close()


@contextmanager
def held(store: PostgresStore) -> Iterator[None]:
    """What is written meanwhile waits, and is committed together."""
    may_go_on, is_there = threading.Event(), threading.Event()

    def wait(_: object) -> None:
        is_there.set()
        may_go_on.wait()

    store._post(wait)
    is_there.wait()
    yield
    may_go_on.set()


def logs(store: PostgresStore) -> list[list[int]]:
    return [one.record.tokens.tolist() for name in NAMES for one in store.read(SCOPE, [name])]


@pytest.mark.req("B3")
def test_a_session_that_has_moved_is_refused_alone(stores: list[PostgresStore], db: Database) -> None:
    mine, theirs = stores
    assert theirs.claim(SCOPE, "two") is not None
    with held(mine):
        commits = db.query("SELECT txid_current()")
        writes = [mine.save(record(name, [1, 2]), SCOPE.fingerprint, 1) for name in NAMES]
    writes[0].result()
    writes[2].result()
    with pytest.raises(SessionMoved):
        writes[1].result()
    ((first,), (last,)) = commits[0], db.query("SELECT txid_current()")[0]
    assert last - first == 2, "one transaction for all of them"  # type: ignore[operator]
    assert logs(theirs) == [[1, 2], [1], [1, 2]]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda store: store.save(record("two", [1, 2]), "no\x00text", 1),
        lambda store: store.save(replace(record("two", [1, 2]), num_bytes=1 << 70), SCOPE.fingerprint, 1),
    ],
    ids=["before it is sent", "in the database"],
)
def test_a_write_that_fails_does_so_alone(
    stores: list[PostgresStore], spoil: Callable[[PostgresStore], Future[None]]
) -> None:
    mine, theirs = stores
    with held(mine):
        writes = [mine.save(record("one", [1, 2]), SCOPE.fingerprint, 1)]
        spoiled = spoil(mine)
        writes.append(mine.save(record("three", [1, 2]), SCOPE.fingerprint, 1))
    for write in writes:
        write.result()
    with pytest.raises(NotDurable):
        spoiled.result()
    assert logs(theirs) == [[1, 2], [1], [1, 2]], "nothing by half"
    mine.save(record("two", [1, 3]), SCOPE.fingerprint, 1).result()
    assert logs(theirs)[1] == [1, 3]


def test_writes_of_a_session_keep_their_order(stores: list[PostgresStore], db: Database) -> None:
    mine, _ = stores
    with held(mine):
        mine.begin_answer("one", 1, {"id": "first"})
        mine.save(record("one", [1, 2]), SCOPE.fingerprint, 1)
        last = mine.begin_answer("one", 1, {"id": "second"})
        mine.let_go("two", 1)
    last.result()
    assert "two" not in mine._writers[0].known, "nothing is kept of sessions that are elsewhere"
    assert db.query("SELECT answer_id, answering, owner FROM sessions WHERE id = 'one'") == [
        ("second", True, mine.server_id)
    ]
    assert db.query("SELECT owner FROM sessions WHERE id = 'two'") == [(None,)]
    assert logs(mine)[0] == [1, 2]
