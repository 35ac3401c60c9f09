"""Files and batches of several servers: any of them lists and reads them, and goes on with those of one that died."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.cluster.database import Database
from tests.cluster.serving import Node, nodes
from tests.server.serving import WAIT_S
from tests.server.test_batches import begin, line, results, until_over, upload
from tokenmill.errors import SessionMoved
from tokenmill.session import blobs
from tokenmill.session.postgres import PostgresStore

LINES = 300


def client(node: Node) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://127.0.0.1:{node.port}/v1", api_key="none", max_retries=0)


def long_lines(count: int = LINES) -> list[dict[str, Any]]:
    return [line(f"line {i}", max_tokens=100, ignore_eos=True) for i in range(count)]


def until_some_are_done(db: Database, batch: Any, count: int = 20) -> None:
    deadline = time.monotonic() + WAIT_S
    name = f"file-{batch.id.removeprefix('batch_')}o"
    while (
        sum(bytes(piece).count(b"\n") for (piece,) in db.query("SELECT bytes FROM blobs WHERE name = %s", name)) < count
    ):  # type: ignore[call-overload]
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.req("B3")
def test_files_and_batches_are_there_on_every_server(db: Database, tmp_path: Path) -> None:
    with nodes(db, tmp_path) as servers:
        one, two = map(client, servers)
        lines = [line(f"line {i}") for i in range(5)]
        file = upload(one, lines)
        assert [one.id for one in two.files.list().data] == [file.id]
        batch = two.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
        over = until_over(one, batch)
        assert (over.status, over.request_counts.completed) == ("completed", 5)
        assert set(results(one, over.output_file_id)) == {one["custom_id"] for one in lines}
        servers[0].kill()
        servers[1].kill()
        servers[0].start()  # contents do not go with the server that took them
        assert set(results(one, over.output_file_id)) == {one["custom_id"] for one in lines}
        assert one.files.content(file.id).text.count("line 3") == 1
        one.files.delete(file.id)
        assert file.id not in {row for (row,) in db.query("SELECT name FROM blobs")}
        with pytest.raises(openai.NotFoundError):
            one.files.content(file.id)


@pytest.mark.req("B3")
def test_a_batch_whose_server_dies_is_gone_on_with(db: Database, tmp_path: Path) -> None:
    with nodes(db, tmp_path) as servers:
        one, two = map(client, servers)
        batch = begin(one, long_lines())
        until_some_are_done(db, batch)
        servers[0].kill()
        assert two.batches.retrieve(batch.id).status == "in_progress"
        over = until_over(two, batch)
        assert (over.status, over.request_counts.completed, over.request_counts.failed) == ("completed", LINES, 0)
        found = results(two, over.output_file_id)  # each of them once
        assert len(found) == LINES
        texts = {one["response"]["body"]["choices"][0]["message"]["content"] for one in found.values()}
        assert len(texts) == 1, "the same question"
        assert over.usage is not None
        assert over.usage.output_tokens == 100 * LINES
        assert db.query("SELECT count(*) FROM jobs") == [(0,)]


@pytest.mark.req("B3")
def test_a_server_that_was_taken_for_dead_adds_nothing_to_its_batch(db: Database, tmp_path: Path) -> None:
    with nodes(db, tmp_path) as servers:
        one, two = map(client, servers)
        batch = begin(one, long_lines())
        until_some_are_done(db, batch)
        servers[0].signal(signal.SIGSTOP)
        over = until_over(two, batch)
        assert over.request_counts.completed == LINES
        before = db.query("SELECT name, begin, bytes FROM blobs ORDER BY name, begin")
        servers[0].signal(signal.SIGCONT)
        deadline = time.monotonic() + WAIT_S
        while "is given up" not in servers[0].log.read_text():
            assert time.monotonic() < deadline, servers[0].log.read_text()
            time.sleep(0.05)
        assert db.query("SELECT name, begin, bytes FROM blobs ORDER BY name, begin") == before
        assert one.batches.retrieve(batch.id) == two.batches.retrieve(batch.id)
        assert len(results(one, over.output_file_id)) == LINES


def test_a_batch_is_cancelled_from_any_server(db: Database, tmp_path: Path) -> None:
    with nodes(db, tmp_path) as servers:
        one, two = map(client, servers)
        batch = begin(one, long_lines(2000))
        until_some_are_done(db, batch)
        assert two.batches.cancel(batch.id).status in ("cancelling", "cancelled")
        over = until_over(two, batch)
        assert over.status == "cancelled"
        assert 0 < len(results(two, over.output_file_id)) < 2000


def test_a_server_that_stops_hands_its_batches_over(db: Database, tmp_path: Path) -> None:
    with nodes(db, tmp_path, 2, "--drain", "0") as servers:
        one, two = map(client, servers)
        batch = begin(one, long_lines())
        until_some_are_done(db, batch)
        servers[0].signal(signal.SIGTERM)
        assert servers[0].process is not None
        assert servers[0].process.wait(30) == 0
        over = until_over(two, batch)
        assert over.request_counts.completed == LINES
        assert len(results(two, over.output_file_id)) == LINES


# -- claims of jobs ---------------------------------------------------------------------------------------------------


@pytest.fixture
def stores(db: Database) -> Iterator[list[PostgresStore]]:
    made = [PostgresStore(db.url, lease_s=600) for _ in range(2)]
    yield made
    for one in made:
        one.close()


def play(db: Database, stores: list[PostgresStore]) -> None:
    one, two = (store.blobs for store in stores)
    first = one.claim("batch_a").result()
    assert first is not None
    assert two.claim("batch_a").result() is None, "its server is alive"
    one.append("results", 0, b"one", first).result()
    db.query("UPDATE servers SET lease_until = now() - interval '1 s' WHERE id = %s", stores[0].server_id)
    second = two.claim("batch_a").result()
    assert second is not None, "its server is gone"
    two.append("results", 3, b"two", second).result()
    for begin_at in (0, 3, 6):
        try:
            one.append("results", begin_at, b"late", first).result()
        except SessionMoved:
            continue
        raise AssertionError("a stale write was accepted")
    one.release(first, is_over=True).result()
    two.append("results", 6, b"three", second).result()
    assert b"".join(bytes(piece) for (piece,) in db.query("SELECT bytes FROM blobs ORDER BY begin")) == b"onetwothree"  # type: ignore[call-overload]


def test_a_job_is_one_servers_at_a_time(db: Database, stores: list[PostgresStore]) -> None:
    play(db, stores)


BUGS = {
    "no fence around results": ("HOLD", blobs.HOLD.replace(blobs.OURS, "id = %(id)s")),
    "no fence around the end": ("FINISH", blobs.FINISH.replace(blobs.OURS, "id = %(id)s")),
    "a dead server keeps its jobs": ("CLAIM", blobs.CLAIM.replace("lease_until > now()", "true")),
    "a job is taken from a server that is alive": ("CLAIM", blobs.CLAIM.replace("jobs.owner IS NULL OR", "true OR")),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_caught(
    db: Database, stores: list[PostgresStore], monkeypatch: pytest.MonkeyPatch, bug: str
) -> None:
    name, faulty = BUGS[bug]
    assert faulty != getattr(blobs, name)
    monkeypatch.setattr(blobs, name, faulty)
    with pytest.raises((AssertionError, SessionMoved)):
        play(db, stores)
