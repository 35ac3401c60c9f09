"""Sessions of a store that end, expire or are closed: gone for good, or kept as they were; never put back."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from pathlib import Path
from typing import Any

import pytest

from tests.session.helpers import GREEDY, make_service, read, tokens_of
from tests.session.storing import converse, play, stored
from tokenmill import SessionService
from tokenmill.errors import EngineDead, SessionNotFound
from tokenmill.session import store as store_module
from tokenmill.session.manager import SessionLimits
from tokenmill.session.routing import LeastLoaded
from tokenmill.session.store import DATABASE, SessionStore


def test_ended_and_expired_sessions_are_gone(tmp_path: Path) -> None:
    async def first(service: SessionService) -> list[str]:
        names = [await converse(service, "x") for _ in range(3)]
        await service.end_session(names[0])
        return names

    async def second(service: SessionService) -> set[str]:
        return {info.session_id for info in service.list()}

    names, left = play(tmp_path, first, second)
    assert left == set(names[1:])
    with sqlite3.connect(tmp_path / DATABASE) as connection:
        connection.execute("UPDATE sessions SET used_at = used_at - 1000 WHERE id = ?", (names[1],))
    limits = SessionLimits(ttl_s=500, stall_timeout_s=None)
    assert play(tmp_path, second, second, limits=limits) == [{names[2]}, {names[2]}]


def test_an_answer_that_a_close_cuts_off_is_kept(tmp_path: Path) -> None:
    async def first(service: SessionService) -> list[int]:
        name = await service.create_session(sampling_params=GREEDY, seed=1)
        live = await service.answer(name, 900, given="x", ignore_eos=True)
        reading = live.read()
        seen = (await anext(reading)).token_ids
        await service.close()
        async for chunk in reading:
            seen += chunk.token_ids
        assert (chunk.finish_reason, chunk.durable) == ("shutdown", True)
        return seen

    async def second(service: SessionService) -> list[int]:
        (info,) = service.list()
        assert info.turns[-1].finish_reason == "shutdown"
        return tokens_of(service, info.session_id)

    seen, log = play(tmp_path, first, second)
    assert log[-len(seen) :] == seen


def test_a_session_that_ends_while_another_service_loads_is_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        store = SessionStore(tmp_path)
        async with make_service(store=store) as one:
            name = await converse(one, "x")
            store.let_go(name)
            read_session = store_module._read_session

            def reading(*given: Any) -> Any:
                found = read_session(*given)
                assert found is None or found.record.session_id == name  # it may be looked for once more
                store.delete(name)  # after it was read
                return found

            monkeypatch.setattr(store_module, "_read_session", reading)
            async with make_service(store=store) as two:
                with pytest.raises(SessionNotFound):
                    await two.append_input(name, "y")
                assert two.list() == []
        store.close()

    asyncio.run(run())


def test_sessions_of_a_store_expire_though_nobody_uses_one(tmp_path: Path) -> None:
    async def first(service: SessionService) -> None:
        await converse(service, "x")

    async def second(service: SessionService) -> None:
        assert len(service) == 1
        while len(service):
            await asyncio.sleep(0)

    play(tmp_path, first)
    with sqlite3.connect(tmp_path / DATABASE) as connection:
        connection.execute("UPDATE sessions SET used_at = ?", (time.time() + 2,))  # it was used just now
    play(tmp_path, second, limits=SessionLimits(ttl_s=0.1, stall_timeout_s=None))


def test_an_answer_that_waits_when_the_service_closes_is_refused(tmp_path: Path) -> None:
    """It would begin when the one before it has been cut off, and be cut off without being kept."""

    async def scene(service: SessionService) -> None:
        name = await service.create_session(sampling_params=GREEDY, seed=1)
        session = service._model().queue.find(name)
        await service.answer(name, 900, given="x", ignore_eos=True)
        waiting = asyncio.ensure_future(service.answer(name, 900, given="y", ignore_eos=True))
        while not session.waiting:
            await asyncio.sleep(0)
        await service.close()
        with pytest.raises(EngineDead):
            await waiting

    play(tmp_path, scene)


def test_an_answer_whose_session_ends_is_not_durable(tmp_path: Path) -> None:
    async def scene(service: SessionService) -> None:
        name = await service.create_session(sampling_params=GREEDY, seed=1)
        live = await service.answer(name, 900, given="x", ignore_eos=True)
        await service.end_session(name)
        _, _, last = await read(live.read())
        assert (last.finish_reason, last.durable) == ("cancelled", False)

    play(tmp_path, scene)


def test_a_session_that_ends_before_it_is_durable_ends_once(tmp_path: Path) -> None:
    async def scene(service: SessionService) -> None:
        other = sqlite3.connect(tmp_path / DATABASE, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")  # nobody else can write now
        creating = asyncio.ensure_future(service.create_session(system="SYS"))
        while not len(service):
            await asyncio.sleep(0)
        assert service.end_idle(0.0) == 1
        creating.cancel()
        with pytest.raises(asyncio.CancelledError):
            await creating
        other.execute("ROLLBACK")
        other.close()
        routing = service._model().routing
        assert isinstance(routing, LeastLoaded)
        assert routing._loads == [0]

    play(tmp_path, scene, routing="least_loaded")


def test_a_fork_that_ends_before_it_is_kept_is_not_put_back(tmp_path: Path) -> None:
    async def scene(service: SessionService) -> list[str]:
        name = await converse(service, "x")
        forking = asyncio.ensure_future(service.fork(name))
        while len(service) < 2:
            await asyncio.sleep(0)
        (child,) = (info.session_id for info in service.list() if info.session_id != name)
        session, loaded = service._model().queue.find(child), service._model()
        ending = loaded.end(session)  # at once: before whoever has asked for it is told
        assert ending is not None
        assert await forking == child
        await asyncio.wrap_future(ending)
        await service.append_input(name, "y")
        assert stored(tmp_path, child) is None
        return [name]

    async def again(service: SessionService) -> list[str]:
        return [info.session_id for info in service.list()]

    before, after = play(tmp_path, scene, again)
    assert after == before
