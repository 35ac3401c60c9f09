"""Lists of sessions: pages, titles, times and metadata, also after a restart."""

from __future__ import annotations

import json
import sqlite3
import time
from pathlib import Path
from typing import Any

import pytest

from tests.server.conversing import SESSIONS, converse
from tests.server.loading import two_models
from tests.server.refusals import check_refusal
from tests.server.rules import fake_server
from tests.server.serving import HI, Running
from tokenmill.server.config import hash_key
from tokenmill.session.records import MEDIA_TYPE

METADATA = {"topic": "travel", "ünï": "🙂"}


def create(server: Running, key: str | None = None, **options: Any) -> Any:
    reply = server.post(SESSIONS, options, **({} if key is None else {"key": key}))
    assert reply.status == 201, reply.body
    return reply.json()


def page(server: Running, query: str = "", **options: Any) -> Any:
    reply = server.get(f"{SESSIONS}{query}", **options)
    assert reply.status == 200, reply.body
    return reply.json()


def names(found: Any) -> list[str]:
    return [one["id"] for one in found["data"]]


def all_pages(server: Running, limit: int, order: str = "asc") -> list[list[str]]:
    """The names on each page, until there are no more."""
    pages, after = [], ""
    while True:
        found = page(server, f"?limit={limit}&order={order}{after}")
        pages.append(names(found))
        assert (found["first_id"], found["last_id"]) == (pages[-1][0], pages[-1][-1])
        if not found["has_more"]:
            return pages
        after = f"&after={found['last_id']}"


# -- pages ------------------------------------------------------------------------------------------------------------


def test_21_7_sessions_are_listed_page_by_page() -> None:
    with fake_server(key_hashes=(hash_key("sk-test"), hash_key("other"))) as server:
        assert page(server) == {"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False}
        made = [create(server)["id"] for _ in range(7)]
        create(server, key="other")
        assert names(page(server)) == made, "oldest first, and none of another key's"
        for order, wanted in (("asc", made), ("desc", made[::-1])):
            assert all_pages(server, 3, order) == [wanted[:3], wanted[3:6], wanted[6:]]
            assert all_pages(server, 7, order) == [wanted]
            assert all_pages(server, 1, order) == [[one] for one in wanted]
        half = page(server, f"?limit=2&after={made[1]}")
        create(server)
        server.do(server.served.models.loaded[0].sessions.end_session(made[0]))
        assert names(page(server, f"?limit=2&after={made[1]}")) == names(half) == made[2:4], "what comes and goes"


def test_21_7_pages_go_over_all_models() -> None:
    with two_models(spec={"at_start": True}) as pair:
        made = [create(pair, model=name)["id"] for name in ("fake", "second", "fake", "second", "second")]
        assert all_pages(pair, 2) == [made[:2], made[2:4], made[4:]]


@pytest.mark.parametrize("query", ["limit=0", "limit=-1", "limit=1001", "limit=x", "limit=1.5", "limit="])
def test_21_7_a_page_has_1_to_1000_sessions(server: Running, query: str) -> None:
    check_refusal(server.get(f"{SESSIONS}?{query}"), 400, "limit")


def test_21_7_a_page_begins_after_a_session_of_the_key(server: Running) -> None:
    theirs = create(server, key="other")["id"]
    for name in ("nobody", theirs):
        reply = server.get(f"{SESSIONS}?after={name}")
        assert (reply.status, reply.error["code"]) == (404, "session_not_found")
    check_refusal(server.get(f"{SESSIONS}?after={'x' * 300}"), 400, "after")
    check_refusal(server.get(f"{SESSIONS}?order=up"), 400, "order")


# -- titles, times, metadata ------------------------------------------------------------------------------------------


def test_21_7_a_session_has_a_title_and_metadata(server: Running) -> None:
    made = create(server, title="Capitals", metadata=METADATA)
    assert (made["title"], made["metadata"]) == ("Capitals", METADATA)
    one = f"{SESSIONS}/{made['id']}"
    assert server.get(one).json() == made == page(server, "?limit=1&order=desc")["data"][0]
    changes: list[tuple[dict[str, Any], str | None, dict[str, str]]] = [
        ({}, "Capitals", METADATA),
        ({"title": "Towns"}, "Towns", METADATA),
        ({"metadata": {"a": "b"}}, "Towns", {"a": "b"}),
        ({"metadata": None}, "Towns", {}),
        ({"title": None, "metadata": METADATA}, None, METADATA),
        ({"title": "", "metadata": {}}, "", {}),
    ]
    for body, title, metadata in changes:
        reply = server.post(one, body)
        assert reply.status == 200
        assert reply.json() == server.get(one).json()
        assert (reply.json()["title"], reply.json()["metadata"]) == (title, metadata)
    assert (create(server)["title"], create(server)["metadata"]) == (None, {})


def test_21_7_a_fork_and_a_file_keep_the_title(server: Running) -> None:
    talk = converse(server, title="Capitals", metadata=METADATA)
    talk.ask("hi")
    (fork,) = server.post(f"{SESSIONS}/{talk.id}/fork", {}).json()["data"]
    assert (fork["title"], fork["metadata"]) == ("Capitals", METADATA)
    file = server.post(f"{SESSIONS}/{talk.id}/save", {}).body
    restored = server.post(f"{SESSIONS}/restore", file, headers={"Content-Type": MEDIA_TYPE}).json()
    assert (restored["title"], restored["metadata"]) == ("Capitals", METADATA)
    assert restored["created_at"] >= fork["created_at"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("title", 5),
        ("title", "x" * 257),
        ("metadata", "a"),
        ("metadata", {"a": 5}),
        ("metadata", {"a": None}),
        ("metadata", {"a": "x" * 513}),
        ("metadata", {"k" * 65: "a"}),
        ("metadata", {str(i): "a" for i in range(17)}),
    ],
)
def test_21_7_titles_and_metadata_have_limits(server: Running, name: str, value: Any) -> None:
    made = create(server, title="Capitals", metadata=METADATA)
    check_refusal(server.post(SESSIONS, {name: value}), 400, name)
    check_refusal(server.post(f"{SESSIONS}/{made['id']}", {name: value}), 400, name)
    assert server.get(f"{SESSIONS}/{made['id']}").json() == made


def test_21_7_only_its_owner_changes_a_session(server: Running) -> None:
    made = create(server, title="Capitals")
    reply = server.post(f"{SESSIONS}/{made['id']}", {"title": "mine"}, key="other")
    assert (reply.status, reply.error["code"]) == (404, "session_not_found")
    assert server.get(f"{SESSIONS}/{made['id']}").json()["title"] == "Capitals"


def test_21_7_a_session_tells_when_it_was_created_and_used(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1_800_000_000.5
    monkeypatch.setattr(time, "time", lambda: now)
    with fake_server() as server:
        talk = converse(server)
        path = f"{SESSIONS}/{talk.id}"
        assert times(server.get(path).json()) == (1_800_000_000, 1_800_000_000)
        now += 60
        assert times(server.get(path).json()) == (1_800_000_000, 1_800_000_000), "to look at it is no use of it"
        talk.ask("hi")
        assert times(server.get(path).json()) == (1_800_000_000, 1_800_000_060)
        now += 60
        assert times(server.post(path, {"title": "a"}).json()) == (1_800_000_000, 1_800_000_120)
        (fork,) = server.post(f"{path}/fork", {}).json()["data"]
        assert times(fork) == (1_800_000_120, 1_800_000_120)


def times(session: Any) -> tuple[int, int]:
    return session["created_at"], session["last_used_at"]


# -- in a store -------------------------------------------------------------------------------------------------------


def test_21_7_a_restart_keeps_titles_times_and_metadata(tmp_path: Path) -> None:
    with fake_server(store=tmp_path) as server:
        talk = converse(server, title="Capitals", metadata=METADATA)
        talk.ask("hi")
        create(server)
        server.post(f"{SESSIONS}/{talk.id}", {"title": "Towns"})
        before = page(server)
        assert all(one["durable"] for one in before["data"])
    with fake_server(store=tmp_path) as server:
        assert page(server) == before
        assert server.get(f"{SESSIONS}/{talk.id}").json()["title"] == "Towns"
        assert server.chat(session_id=talk.id, messages=HI).status == 200


def test_21_7_a_store_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    with fake_server(store=tmp_path) as server:
        names_before = [create(server, title="new", metadata=METADATA)["id"] for _ in range(3)]
    with sqlite3.connect(tmp_path / "sessions.sqlite") as database:
        for name, head in database.execute("SELECT id, head FROM sessions").fetchall():
            kept = {key: value for key, value in json.loads(head).items() if key not in NEW}
            used_at = time.time() - 1000 * (3 - names_before.index(name))
            row = (json.dumps(kept), used_at, name)
            database.execute("UPDATE sessions SET head = ?, used_at = ? WHERE id = ?", row)
    database.close()
    with fake_server(store=tmp_path) as server:
        found = page(server)["data"]
        assert [one["id"] for one in found] == names_before
        for place, one in enumerate(found):
            assert (one["title"], one["metadata"]) == (None, {})
            assert one["created_at"] == one["last_used_at"]
            assert 0 <= time.time() - 1000 * (3 - place) - one["created_at"] < 100
        assert server.post(f"{SESSIONS}/{names_before[0]}", {"title": "old"}).json()["durable"]
    with fake_server(store=tmp_path) as server:
        assert server.get(f"{SESSIONS}/{names_before[0]}").json()["title"] == "old"


NEW = {"title", "metadata", "created_at", "used_at"}
"""What heads had not in the first version."""
