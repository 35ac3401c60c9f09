"""Documents of a store: whose they are, how many there may be, and that they outlive the process."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.planting import PlantedBug, plant
from tokenmill.errors import NotDurable
from tokenmill.session import documents as module
from tokenmill.session.documents import Bounds, Document, Documents
from tokenmill.session.store import DATABASE, TABLES, VERSION, SessionStore, _open


@pytest.fixture(params=["on disk", "in memory"])
def documents(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Documents]:
    if request.param == "in memory":
        yield Documents.in_memory()
        return
    store = SessionStore(tmp_path / "store")
    yield store.documents
    store.close()


def note(name: str, owner: str = "alice", kind: str = "note", text: str = "x", **more: float) -> Document:
    return Document(kind, name, owner, {"text": text}, **more)


def names(documents: Documents, owner: str | None = "alice", kind: str = "note", **how: object) -> list[str]:
    page = documents.list(kind, owner, **how).result()  # type: ignore[arg-type]
    assert page is not None
    return [one.id for one in page.documents]


def belong_to_their_owner(documents: Documents) -> None:
    documents.put(note("a")).result()
    assert documents.get("note", "a", "bob").result() is None
    assert documents.delete("note", "a", "bob").result() is False
    assert not documents.put(note("a", "bob", text="taken")).result().is_stored, "an id that another owner has"
    found = documents.get("note", "a", "alice").result()
    assert found is not None
    assert found.body == {"text": "x"}
    assert names(documents, "bob") == []
    assert documents.list("note", "bob", after="a").result() is None
    assert names(documents, None) == ["a"]
    assert documents.delete("note", "a", "alice").result() is True
    assert documents.get("note", "a", "alice").result() is None


def test_documents_belong_to_their_owner(documents: Documents) -> None:
    belong_to_their_owner(documents)


def test_lists_are_by_creation_time_and_in_pages(documents: Documents) -> None:
    for number in range(5):
        documents.put(note(f"n{number}", created_at=100.0 + number // 2)).result()
    documents.put(note("other", kind="other")).result()
    assert names(documents) == [f"n{number}" for number in range(5)]
    assert names(documents, newest_first=True) == [f"n{number}" for number in reversed(range(5))]
    page = documents.list("note", "alice", limit=2, after="n1").result()
    assert page is not None
    assert ([one.id for one in page.documents], page.has_more) == (["n2", "n3"], True)
    assert names(documents, after="n3", newest_first=True) == ["n2", "n1", "n0"]
    assert names(documents, after="n4") == []
    documents.put(note("n2", text="changed", created_at=0.0)).result()
    assert names(documents) == [f"n{number}" for number in range(5)], "a new body is no new document"
    assert names(documents, where={("$", "text"): "changed"}) == ["n2"]


def test_lists_of_what_a_body_has(documents: Documents) -> None:
    bodies: dict[str, dict[str, object]] = {
        "a": {"one": {"model": "m", "metadata": {"topic": "x", "of.two": "y"}}},
        "b": {"one": {"model": "m", "metadata": {}}},
        "c": {"one": {"model": "n", "said": "\x00 \\\x00 \\u0000\x00\x00", "metadata": None}},
        "d": {"other": 1},
    }
    for name, body in bodies.items():
        documents.put(Document("note", name, "alice", body)).result()
    assert names(documents, where={("$.one", "model"): "m"}) == ["a", "b"]
    assert names(documents, where={("$.one.metadata", "topic"): "x"}) == ["a"]
    assert names(documents, where={("$.one.metadata", "of.two"): "y", ("$.one", "model"): "m"}) == ["a"]
    assert names(documents, where={("$.one.metadata", "topic"): "z"}) == []


def replacement_needs_a_document(documents: Documents) -> None:
    assert not documents.put(note("a"), replaces=True).result().is_stored, "what was deleted does not come back"
    documents.put(note("a")).result()
    assert documents.put(note("a", text="new"), replaces=True).result().is_stored
    found = documents.get("note", "a", "alice").result()
    assert found is not None
    assert (found.body["text"], found.num_bytes) == ("new", len('{"text":"new"}'))


def test_a_replacement_needs_a_document(documents: Documents) -> None:
    replacement_needs_a_document(documents)


def test_a_replacement_of_what_has_changed_is_refused(documents: Documents) -> None:
    documents.put(note("a")).result()
    now = {"text": "changed", "more": [1, 2.5, "é"]}
    assert documents.put(Document("note", "a", "alice", now), replaces=True, expected={"text": "x"}).result().is_stored
    for before in ({"text": "x"}, {"text": "changed"}):
        assert not documents.put(note("a", text="late"), replaces=True, expected=before).result().is_stored
    found = documents.get("note", "a", "alice").result()
    assert found is not None
    assert found.body == now
    assert documents.put(note("a"), replaces=True, expected=found.body).result().is_stored


def evict_the_oldest(documents: Documents) -> None:
    bounds = Bounds(evicts=frozenset({"note"}), max_documents=2)
    for name in ("a", "b"):
        documents.put(note(name), bounds).result()
    documents.put(note("a", "bob"), bounds).result()
    documents.get("note", "a", "alice", is_used=True).result()
    put = documents.put(note("c"), bounds).result()
    assert (put.is_stored, put.evicted) == (True, (("note", "b"),))
    assert sorted(names(documents)) == ["a", "c"]
    documents.put(note("c", text="longer"), bounds).result()
    assert sorted(names(documents)) == ["a", "c"], "a new body evicts nothing"


def test_the_oldest_of_an_owner_make_room(documents: Documents) -> None:
    evict_the_oldest(documents)


def test_what_is_used_is_read_where_nothing_can_be_written(documents: Documents) -> None:
    """A full disk, or a store that can only be read: to note the use is not worth the document."""
    documents.put(note("a")).result()
    documents._post(lambda connection: connection.execute("PRAGMA query_only = ON").fetchall()).result()
    with pytest.raises((NotDurable, sqlite3.OperationalError)):
        documents.put(note("b")).result()
    found = documents.get("note", "a", "alice", is_used=True).result()
    assert found is not None
    assert documents.get("note", "a", "bob", is_used=True).result() is None


def keep_within_bytes(documents: Documents) -> None:
    size = len('{"text":"x"}')
    bounds = Bounds(evicts=frozenset({"note"}), max_owner_bytes=3 * size)
    documents.put(note("kept", kind="file"), bounds).result()
    for name in ("a", "b", "c"):
        assert documents.put(note(name), bounds).result().is_stored
    assert names(documents) == ["b", "c"]
    documents.put(note("other", "bob"), bounds).result()
    put = documents.put(note("large", text="x" * 2 * size), bounds).result()
    assert not put.is_stored
    assert put.refusal is not None
    assert f"its limit is {3 * size}" in put.refusal
    assert put.evicted == ()
    assert names(documents) == ["b", "c"], "what would not have made room enough stays"
    assert documents.get("file", "kept", "alice").result() is not None
    assert documents.usage("bob").result() == (1, size)


def test_bytes_of_an_owner_are_bounded(documents: Documents) -> None:
    keep_within_bytes(documents)


def share(documents: Documents) -> None:
    size = len('{"text":"x"}')
    for bounds in (
        Bounds(evicts=frozenset({"note"}), max_kind=3),
        Bounds(evicts=frozenset({"note"}), max_bytes=3 * size),
    ):
        for name, owner in (("a", "alice"), ("b", "alice"), ("c", "bob")):
            documents.put(note(name, owner), bounds).result()
        documents.put(note("d", "carol"), bounds).result()
        assert (names(documents), names(documents, "bob"), names(documents, "carol")) == (["b"], ["c"], ["d"])
        for name, owner in (("b", "alice"), ("c", "bob"), ("d", "carol")):
            documents.delete("note", name, owner).result()


@pytest.mark.parametrize("bound", ["max_owner_bytes", "max_bytes"])
def test_a_document_that_can_never_fit_costs_no_other(documents: Documents, bound: str) -> None:
    """Else one large response would end all that its key, or every key, has stored."""
    size = len('{"text":"x"}')
    bounds = Bounds(evicts=frozenset({"note"}), **{bound: 4 * size})  # type: ignore[arg-type]
    for name, owner in (("a", "alice"), ("b", "alice"), ("c", "bob")):
        documents.put(note(name, owner), bounds).result()
    put = documents.put(note("large", text="x" * 4 * size), bounds).result()
    assert (put.is_stored, put.evicted) == (False, ())
    assert put.refusal is not None
    assert (names(documents), names(documents, "bob")) == (["a", "b"], ["c"])
    assert documents.put(note("d"), bounds).result().is_stored


def test_whoever_has_most_bytes_makes_room_for_bytes(documents: Documents) -> None:
    for number in range(3):
        documents.put(note(f"small{number}", "bob")).result()
    documents.put(note("large", "alice", text="x" * 1000)).result()
    put = documents.put(note("new", "carol", text="x" * 100), Bounds(evicts=frozenset({"note"}), max_bytes=1000))
    assert put.result().evicted == (("note", "large"),)


def test_work_is_done_by_a_thread_of_its_own(documents: Documents) -> None:
    assert documents._post(lambda connection: threading.get_ident()).result() != threading.get_ident()  # noqa: ARG005


def test_whoever_has_most_makes_room_for_others(documents: Documents) -> None:
    share(documents)


def test_expired_documents_are_gone(documents: Documents) -> None:
    documents.put(note("old", expires_at=time.time() - 1)).result()
    documents.put(note("new", expires_at=time.time() + 1000)).result()
    assert documents.get("note", "old", "alice").result() is None
    assert names(documents) == ["new"]
    documents.put(note("another")).result()
    assert documents.usage("alice").result()[0] == 2


def test_documents_outlive_their_process(tmp_path: Path) -> None:
    store = SessionStore(tmp_path)
    store.documents.put(note("a", text="Straße")).result()
    store.close()
    store = SessionStore(tmp_path)
    found = store.documents.get("note", "a", "alice").result()
    assert found is not None
    assert found.body == {"text": "Straße"}
    store.close()
    with pytest.raises(NotDurable):
        store.documents.put(note("b")).result()


def test_a_store_of_the_version_before_is_upgraded(tmp_path: Path) -> None:
    SessionStore(tmp_path).close()
    with sqlite3.connect(tmp_path / DATABASE) as connection:
        connection.execute("DROP TABLE documents")
        connection.execute("DROP TABLE sessions")
        connection.execute(TABLES.strip().splitlines()[0])
        connection.execute("""INSERT INTO sessions VALUES ('s', 'f', '{"key": "k", "created_at": 7.5}', 9)""")
        connection.execute("INSERT INTO sessions VALUES ('older', 'f', '{}', 8)")
        connection.execute("INSERT INTO tokens VALUES ('s', 0, '12345678')")
        connection.execute("PRAGMA user_version=1")
    store = SessionStore(tmp_path)
    assert store.documents.put(note("a")).result().is_stored
    store.close()
    connection, _ = _open(tmp_path / DATABASE)
    rows = connection.execute("SELECT id, key, created_at, num_bytes > 1032 FROM sessions ORDER BY id").fetchall()
    assert rows == [("older", "", 8.0, 0), ("s", "k", 7.5, 1)]
    assert connection.execute("PRAGMA user_version").fetchone() == (VERSION,)
    connection.close()


BUGS: list[tuple[PlantedBug, Callable[[Documents], None]]] = [
    (PlantedBug("anybody reads", module, "_get", "(kind, name, owner, time.time())",
                "(kind, name, 'alice', time.time())"), belong_to_their_owner),
    (PlantedBug("taken over", module, "_put", "INSERT", "INSERT.replace('WHERE documents.owner = excluded.owner', '')"),
     belong_to_their_owner),
    (PlantedBug("undead", module, "_put", "refusal is None and replaces", "False"), replacement_needs_a_document),
    (PlantedBug("lost change", module, "_put", "expected is None", "True"),
     test_a_replacement_of_what_has_changed_is_refused),
    (PlantedBug("used is not newer", Documents, "get", "is_used", "False"), evict_the_oldest),
    (PlantedBug("bodies are new documents", module, "_make_room", "size_before is None", "True"), evict_the_oldest),
    (PlantedBug("everything goes", module, "_make_room", "evictable & set(kinds)", '{"note", "file"}'),
     keep_within_bytes),
    (PlantedBug("newcomers pay", module, "_make_room",
                "_oldest(connection, whose, evictable & set(kinds), (kind, document.id), most_of)",
                "_oldest(connection, owner, evictable & set(kinds), (kind, document.id), most_of)"), share),
]  # fmt: skip


@pytest.mark.parametrize(("bug", "check"), BUGS, ids=[bug.name for bug, _ in BUGS])
def test_a_planted_bug_is_caught(
    bug: PlantedBug, check: Callable[[Documents], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(bug, monkeypatch)
    with pytest.raises(AssertionError):
        check(Documents.in_memory())
