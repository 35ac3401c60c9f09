"""Stores on disks that are full, can only be read or hold something else: sessions go on, and say what is not kept."""

from __future__ import annotations

import asyncio
import os
import shutil
import sqlite3
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.session.full_disk import Disk
from tests.session.helpers import GREEDY, continuation, make_service, read, tokens_of
from tests.session.storing import converse, play, stored
from tokenmill import SessionService
from tokenmill.errors import ConfigError, NotDurable
from tokenmill.session.store import DATABASE, INCREMENTAL, SessionStore

pytestmark = pytest.mark.slow

NOBODY = 65534


@pytest.mark.fault("L10")
@pytest.mark.req("B3")
def test_a_full_disk_costs_durability_and_nothing_else(tmp_path: Path) -> None:
    store = SessionStore(tmp_path)

    def limit(num_pages: int) -> None:
        store._post(lambda connection: connection.execute(f"PRAGMA max_page_count={num_pages}")).result()

    async def scene(service: SessionService) -> str:
        await converse(service, "fits")
        limit(1)  # what is there, and no more
        for _ in range(10):
            name = await service.create_session(sampling_params=GREEDY, seed=1)
            await service.append_input(name, "long " * 150)
            _, ids, last = await read(await service.generate_stream(name))
            assert ids
            if not last.durable:
                break
        assert last.durable is False
        info = service.get(name)
        assert (info.durable, info.problem) == (False, "database or disk is full")
        log = tokens_of(service, name)
        assert ids == continuation(log[: -len(ids)], GREEDY, seed=1)
        limit(1 << 20)
        other = await converse(service, "there is room again")
        while not service.get(name).durable:  # what could not be written is written with the next that could
            await asyncio.sleep(0)
        assert stored(tmp_path, name) == log
        assert store.check_integrity() == "ok"
        return other

    play(store, scene)
    store.close()


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler here")
    return Disk(tmp_path)


def left(disk: Disk) -> set[str]:
    """The sessions that are there after a restart."""

    async def names(service: SessionService) -> set[str]:
        return {info.session_id for info in service.list()}

    store = SessionStore(disk.directory)
    try:
        assert store.check_integrity() == "ok"
        return set(play(store, names)[0])
    finally:
        store.close()


@pytest.mark.req("B3")
def test_21_4_deleting_on_a_full_disk_is_durable_and_frees_space(disk: Disk) -> None:
    told = disk.play("delete_with_a_reserve", capacity=1_500_000)
    assert [one["durable"] for one in told["ended"]] == [True] * 4
    assert told["after"] < told["before"] - 200_000, "the space is the file system's again"
    assert told["num_free_pages"] == 0
    assert told["durable"] is True, "there is room for others"
    names = left(disk)
    assert not names & {one["session_id"] for one in told["ended"]}
    assert names >= set(told["kept"])


@pytest.mark.req("B3")
def test_21_4_a_deletion_that_fails_says_so_and_is_tried_again(disk: Disk) -> None:
    told = disk.play("delete_without_a_reserve", capacity=800_000)
    assert [one["durable"] for one in told["ended"]] == [False] * 2
    assert [one["problem"] for one in told["ended"]] == ["database or disk is full"] * 2
    names = left(disk)
    assert not names & {one["session_id"] for one in told["ended"]}, "it was deleted with the next write"
    assert names >= set(told["kept"])


@pytest.mark.req("B3")
def test_21_4_a_store_on_a_full_disk_can_be_opened_and_deleted_from(disk: Disk) -> None:
    disk.play("delete_with_a_reserve", capacity=1_500_000)
    before = left(disk)  # closed properly: what SQLite needs while it is open is gone
    taken = disk.num_bytes + (disk.directory / "reserve").stat().st_size
    told = disk.play("open_on_a_full_disk", capacity=taken)
    assert {*told["kept"], told["ended"][0]["session_id"]} == before
    assert [one["durable"] for one in told["ended"]] == [True]
    assert left(disk) == set(told["kept"])


def test_21_4_a_store_shrinks_when_sessions_are_deleted(tmp_path: Path) -> None:
    store, long = SessionStore(tmp_path), {"role": "user", "content": "x" * 900, "more": "y" * 400_000}

    def num_bytes() -> int:
        return sum(path.stat().st_size for path in tmp_path.glob(f"{DATABASE}*"))

    async def scene(service: SessionService) -> None:
        names = [await service.create_session() for _ in range(12)]
        for name in names:
            await service.append_input(name, [long])
        before = num_bytes()
        for name in names[1:]:
            await service.end_session(name)
        while num_bytes() > before / 2:  # it is done while there is nothing else to do
            await asyncio.sleep(0.01)

    play(store, scene)
    assert store.check_integrity() == "ok"
    store.close()


def test_21_4_a_store_of_before_is_made_to_shrink(tmp_path: Path) -> None:
    async def first(service: SessionService) -> list[int]:
        return tokens_of(service, await converse(service, "x"))

    async def second(service: SessionService) -> list[int]:
        (info,) = service.list()
        return tokens_of(service, info.session_id)

    def auto_vacuum() -> int:
        with sqlite3.connect(tmp_path / DATABASE) as connection:
            return int(connection.execute("PRAGMA auto_vacuum").fetchone()[0])

    (log,) = play(tmp_path, first)
    with sqlite3.connect(tmp_path / DATABASE) as connection:
        connection.execute("PRAGMA auto_vacuum=NONE")
        connection.execute("VACUUM")
    assert auto_vacuum() == 0
    assert play(tmp_path, second) == [log]
    assert auto_vacuum() == INCREMENTAL


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """A store with a session that this process may read and not write."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))

    async def first(service: SessionService) -> None:
        await converse(service, "before")

    play(folder, first)
    is_root = os.geteuid() == 0
    for path in (folder, *folder.iterdir()):
        path.chmod(0o555 if path.is_dir() else 0o444)
    if is_root:
        os.seteuid(NOBODY)
    try:
        yield folder
    finally:
        if is_root:
            os.seteuid(0)
        folder.chmod(0o755)
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()


@pytest.mark.fault("L10")
@pytest.mark.req("B3")
def test_a_store_that_can_only_be_read_shows_its_sessions_and_they_go_on(read_only: Path) -> None:
    async def scene(service: SessionService) -> None:
        (info,) = service.list()
        await service.append_input(info.session_id, "more")
        _, ids, last = await read(await service.generate_stream(info.session_id))
        assert ids
        assert last.durable is False
        assert service.get(info.session_id).durable is False
        assert "readonly" in (service.get(info.session_id).problem or "")
        name = await service.create_session()
        assert service.get(name).durable is False

    play(read_only, scene)


def test_stores_that_can_not_be_used_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="cannot use the store"):
        SessionStore(tmp_path / "file")
    store = SessionStore(tmp_path / "store")
    with pytest.raises(ConfigError, match="in use by another process"):
        SessionStore(tmp_path / "store")
    store.close()
    with sqlite3.connect(tmp_path / "store" / DATABASE) as connection:
        connection.execute("PRAGMA user_version=9")
    with pytest.raises(ConfigError, match="newer than the supported version"):
        SessionStore(tmp_path / "store")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / DATABASE).write_bytes(b"no database at all" * 100)
    with pytest.raises(ConfigError, match="is not a session store, or is corrupt"):
        SessionStore(tmp_path / "bad")
    (tmp_path / "foreign").mkdir()
    with sqlite3.connect(tmp_path / "foreign" / DATABASE) as connection:
        connection.execute("CREATE TABLE t (a)")
    with pytest.raises(ConfigError, match="not a session store"):
        SessionStore(tmp_path / "foreign")


def test_a_damaged_session_does_not_keep_the_others_away(tmp_path: Path) -> None:
    async def first(service: SessionService) -> list[str]:
        return [await converse(service, "x") for _ in range(2)]

    async def second(service: SessionService) -> list[str]:
        return [info.session_id for info in service.list()]

    (names,) = play(tmp_path, first)
    with sqlite3.connect(tmp_path / DATABASE) as connection:
        connection.execute("""UPDATE sessions SET head = '{"system": 5}' WHERE id = ?""", (names[0],))
    assert play(tmp_path, second) == [[names[1]]]


def test_the_end_of_a_session_that_could_not_be_written_is_written_later(tmp_path: Path) -> None:
    store = SessionStore(tmp_path)

    def may_write(allowed: bool) -> None:
        store._post(lambda connection: connection.execute(f"PRAGMA query_only={not allowed}")).result()

    async def first(service: SessionService) -> None:
        name = await converse(service, "x")
        may_write(False)
        ended = await service.end_session(name)
        assert (ended.durable, ended.problem) == (False, "attempt to write a readonly database")
        assert stored(tmp_path, name) is not None
        async with make_service(store=store) as other:
            assert other.list() == [], "it has ended, whatever the disk says"
        may_write(True)
        await converse(service, "y")
        assert stored(tmp_path, name) is None

    async def second(service: SessionService) -> int:
        return len(service.list())

    assert play(store, first, second) == [None, 1]
    store.close()


def test_a_write_that_can_not_even_be_taken_back_fails_alone(tmp_path: Path) -> None:
    store, is_refused = SessionStore(tmp_path), [True]

    def authorize(action: int, what: str | None, *_: object) -> int:
        is_rollback = action == sqlite3.SQLITE_TRANSACTION and what == "ROLLBACK"
        return sqlite3.SQLITE_DENY if is_rollback and is_refused[0] else sqlite3.SQLITE_OK

    store._post(lambda connection: connection.set_authorizer(authorize)).result(60)
    with pytest.raises(NotDurable, match="no such table"):
        store._post(lambda connection: connection.execute("SELECT * FROM nowhere")).result(60)
    with pytest.raises(NotDurable):
        store._post(lambda connection: connection.execute("SELECT 1")).result(60)
    is_refused[0] = False
    assert store.check_integrity() == "ok"
    store.close()


def test_a_service_whose_store_can_not_be_read_leaves_nothing_behind(tmp_path: Path) -> None:
    SessionStore(tmp_path).close()
    with sqlite3.connect(tmp_path / DATABASE) as connection:
        connection.execute("DROP TABLE sessions")
    before = set(threading.enumerate())
    with pytest.raises(NotDurable, match="no such table"):
        make_service(store=tmp_path)
    assert set(threading.enumerate()) <= before
    SessionStore(tmp_path).close()  # nobody holds it
