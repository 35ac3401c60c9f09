"""Sessions of a store are read when they are asked for: at the start they cost neither time nor memory."""

from __future__ import annotations

import asyncio
import sqlite3
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from tests.session.helpers import GREEDY, make_service, tokens_of
from tests.session.storing import ask, converse, play
from tokenmill import SessionService
from tokenmill.errors import SessionNotFound, StoreUnavailable
from tokenmill.session import manager
from tokenmill.session.store import DATABASE

MANY = 20_000


def copy_many(directory: Path, name: str, count: int) -> None:
    """So many sessions like one that is there, written without any of our code."""
    with sqlite3.connect(directory / DATABASE) as connection:
        connection.execute("CREATE TEMP TABLE numbers (n INTEGER)")
        connection.executemany("INSERT INTO numbers VALUES (?)", [(n,) for n in range(count)])
        connection.execute(
            "INSERT INTO sessions SELECT 'copy-' || n, fingerprint, head, used_at, key, created_at + 1 + n, num_bytes "
            "FROM sessions, numbers WHERE id = ?",
            (name,),
        )
        for table in ("tokens", "turns"):
            columns = "begin, ids" if table == "tokens" else "number, turn"
            connection.execute(
                f"INSERT INTO {table} SELECT 'copy-' || n, {columns} FROM {table}, numbers WHERE session = ?", (name,)
            )


@pytest.mark.req("B3", "G18")
def test_a_store_that_fails_costs_the_command_that_needed_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A session is looked for when a command comes and again when its turn comes; the second look fails."""

    async def scene(service: SessionService) -> None:
        assert service.store is not None
        name, claim, num_claims = await converse(service, "hello"), service.store.claim, 0

        def failing(*given: Any, **options: Any) -> Any:
            nonlocal num_claims
            num_claims += 1
            if num_claims == 2:
                raise StoreUnavailable("the database is restarting")
            return claim(*given, **options)

        monkeypatch.setattr(service.store, "claim", failing)
        with pytest.raises(StoreUnavailable):
            await service.cancel_generate("unknown")
        with pytest.raises(SessionNotFound):
            await service.cancel_generate("unknown")
        assert await ask(service, name)

    play(tmp_path, scene)


@pytest.mark.req("B3")
def test_a_service_starts_without_reading_its_sessions(tmp_path: Path) -> None:
    async def first(service: SessionService) -> tuple[str, list[int]]:
        name = await converse(service, "hello", "more")
        return name, tokens_of(service, name)

    ((name, log),) = play(tmp_path, first)
    copy_many(tmp_path, name, MANY)

    async def second(service: SessionService) -> None:
        assert len(service) == MANY + 1
        assert service.usage_of("")[0] == MANY + 1
        assert not service._model().queue.sessions, "none is in memory"
        await ask(service, f"copy-{MANY // 2}", "and")
        assert list(service._model().queue.sessions) == [f"copy-{MANY // 2}"]
        assert tokens_of(service, f"copy-{MANY // 2}")[: len(log)] == log
        page = await service.places("", 3, (service.get(name).created_at + 500, ""))
        assert [one for _, one in page] == ["copy-499", "copy-500", "copy-501"]
        assert len(service) == MANY + 1

    tracemalloc.start()
    try:
        play(tmp_path, second)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 200 * MANY, "not even 200 bytes for each"


def test_sessions_used_least_recently_leave_memory_and_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manager, "MAX_LOADED", 10)

    async def first(service: SessionService) -> list[str]:
        return [await converse(service, f"hello {i}") for i in range(12)]

    async def second(service: SessionService) -> None:
        sessions, logs = service._model().queue.sessions, {}
        for name in names:
            await service.append_input(name, "x")
            logs[name] = tokens_of(service, name)
        assert len(sessions) <= 10
        assert len(service) == 12
        assert names[0] not in sessions
        assert service.get(names[0]).pending[0]["content"] == "x", "it is as it was left"
        assert {name: tokens_of(service, name) for name in names} == logs

    (names,) = play(tmp_path, first)
    play(tmp_path, second)


def test_what_is_asked_of_a_session_that_is_being_read_keeps_its_order(tmp_path: Path) -> None:
    async def scene(service: SessionService) -> None:
        await asyncio.gather(*(service.append_input(name, str(i)) for i in range(8)))
        assert [message["content"] for message in service.get(name).pending] == [str(i) for i in range(8)]

    async def first(service: SessionService) -> str:
        return await service.create_session(sampling_params=GREEDY)

    (name,) = play(tmp_path, first)
    play(tmp_path, scene)


def test_two_services_do_not_have_the_same_session(tmp_path: Path) -> None:
    async def first(service: SessionService) -> str:
        return await converse(service, "x")

    async def both(one: SessionService) -> None:
        async with make_service(store=one.store) as two:
            assert len(one.list()) == len(two.list()) == 1
            await one.append_input(name, "mine")
            assert two.list() == []

    (name,) = play(tmp_path, first)
    play(tmp_path, both)
