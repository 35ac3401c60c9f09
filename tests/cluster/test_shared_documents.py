"""Documents in a database: as in a directory, and changed by several servers at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest

from tests.cluster.database import Database
from tests.cluster.serving import Node, nodes
from tests.cluster.test_interleavings import SCOPE, record
from tests.cluster.test_shared_batches import client
from tests.session import test_documents as in_a_directory
from tests.session.test_documents import note
from tokenmill.errors import StoreUnavailable
from tokenmill.session.documents import Documents
from tokenmill.session.postgres import LOCK_S, PostgresStore

STORIES: list[Callable[[Documents], None]] = [
    in_a_directory.belong_to_their_owner,
    in_a_directory.replacement_needs_a_document,
    in_a_directory.evict_the_oldest,
    in_a_directory.test_lists_are_by_creation_time_and_in_pages,
    in_a_directory.test_lists_of_what_a_body_has,
    in_a_directory.test_a_replacement_of_what_has_changed_is_refused,
    in_a_directory.test_bytes_of_an_owner_are_bounded,
    in_a_directory.test_expired_documents_are_gone,
]


@pytest.fixture
def store(db: Database) -> Iterator[PostgresStore]:
    made = PostgresStore(db.url, lease_s=600)
    yield made
    made.close()


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
def test_documents_are_as_in_a_directory(store: PostgresStore, story: Callable[[Documents], None]) -> None:
    story(store.documents)


def test_one_of_many_changes_at_once_is_stored(store: PostgresStore) -> None:
    store.documents.put(note("a")).result()
    changes = [note("a", text=str(i)) for i in range(16)]
    puts = [store.documents.put(one, replaces=True, expected={"text": "x"}) for one in changes]
    stored = [one.body for one, put in zip(changes, puts, strict=True) if put.result().is_stored]
    found = store.documents.get("note", "a", "alice").result()
    assert found is not None
    assert stored == [found.body]


@pytest.mark.req("B3")
def test_items_that_are_added_on_two_servers_are_all_there_or_refused(db: Database, tmp_path: Path) -> None:
    with nodes(db, tmp_path) as servers:
        one, two = map(client, servers)
        talk = one.conversations.create()
        added, refused, lock = list[str](), list[str | None](), threading.Lock()

        def add(caller: openai.OpenAI, text: str) -> None:
            item = {"type": "message", "role": "user", "content": text}
            try:
                caller.conversations.items.create(talk.id, items=[item])  # type: ignore[list-item]
            except openai.ConflictError as error:
                with lock:
                    refused.append(error.code)
            else:
                with lock:
                    added.append(text)

        with ThreadPoolExecutor(8) as threads:
            for number in range(40):
                threads.submit(add, (one, two)[number % 2], f"item {number}")
        assert len(added) + len(refused) == 40
        assert set(refused) <= {"conversation_locked"}
        found = [item.content[0].text for item in two.conversations.items.list(talk.id, limit=100)]  # type: ignore[union-attr]
        assert sorted(found) == sorted(added)


def test_completions_are_listed_by_model_and_metadata(db: Database, tmp_path: Path) -> None:
    with nodes(db, tmp_path, 1) as (server,):
        asked = client(server).chat.completions
        for topic in ("a", "b"):
            asked.create(
                model="fake", messages=[{"role": "user", "content": "hi"}], max_tokens=2, store=True,
                metadata={"topic": topic},
            )  # fmt: skip
        assert len(asked.list(model="fake").data) == 2
        assert asked.list(model="other").data == []
        assert [one.metadata for one in asked.list(metadata={"topic": "b"}).data] == [{"topic": "b"}]


def test_one_file_is_fetched_by_several_at_once(db: Database, store: PostgresStore, tmp_path: Path) -> None:
    content = bytes(range(256)) * (5 << 12)
    (tmp_path / "content").write_bytes(content)
    store.blobs.put("file-a", tmp_path / "content")
    with ThreadPoolExecutor(8) as threads:
        fetched = [threads.submit(store.blobs.fetch, "file-a", tmp_path / "copy") for _ in range(16)]
        assert all(one.result() for one in fetched)
    assert (tmp_path / "copy").read_bytes() == content
    assert sorted(path.name for path in tmp_path.iterdir()) == ["content", "copy"]
    assert not store.blobs.fetch("file-b", tmp_path / "copy")


def test_a_row_that_a_stopped_server_holds_delays_nobody_else(db: Database, store: PostgresStore) -> None:
    import psycopg

    for name in ("one", "two", "three", "four"):
        store.save(record(name, [1]), SCOPE.fingerprint, 1, is_new=True).result()
    with psycopg.connect(db.url) as stopped, stopped.cursor() as cursor:
        cursor.execute("SELECT 1 FROM sessions WHERE id = 'two' FOR UPDATE")
        writes = {name: store.save(record(name, [1, 2]), SCOPE.fingerprint, 1) for name in ("one", "two", "three")}
        for name in ("one", "three"):
            writes[name].result(4 * LOCK_S)
        with pytest.raises(StoreUnavailable):
            writes["two"].result(4 * LOCK_S)
    store.save(record("two", [1, 2]), SCOPE.fingerprint, 1).result()
    store.documents.put(note("a")).result()
    with psycopg.connect(db.url) as stopped:
        stopped.execute("SELECT 1 FROM documents FOR UPDATE")
        with pytest.raises(StoreUnavailable):
            store.documents.put(note("a", text="changed"), replaces=True).result(4 * LOCK_S)


def test_a_session_that_is_created_while_the_database_is_away_is_kept(db: Database, tmp_path: Path) -> None:
    with nodes(db, tmp_path, 1) as (server,):
        db.kill()
        sessions = [created_without(server) for _ in range(2)]
        db.start()
        appended = server.request("POST", f"/v1/sessions/{sessions[0]}/append", {"input": "kept"})
        assert appended.status == 200, appended.body
        for session, asked in zip(sessions, (["kept", "and then?"], ["and then?"]), strict=True):
            server.tokens(session, "and then?")
            assert [message["content"] for message in server.turns(session)[0]["messages"]] == asked
        assert db.query("SELECT count(*) FROM sessions") == [(2,)]


def created_without(server: Node) -> str:
    """A session that is acknowledged as not durable."""
    reply = server.request("POST", "/v1/sessions", {"temperature": 0})
    assert reply.status == 201, reply.body
    assert reply.json()["durable"] is not True
    return str(reply.json()["id"])
