"""What tests of stores share: scenes on one store after the other, and what the database has."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from tests.session.helpers import GREEDY, make_service, read
from tokenmill import SessionService
from tokenmill.session.store import DATABASE, SessionStore

Scene = Callable[[SessionService], Awaitable[Any]]


def play(directory: Path | SessionStore, *scenes: Scene, **options: Any) -> list[Any]:
    """Each scene on a service of its own, one after the other, on the same store."""

    async def run() -> list[Any]:
        results = []
        for scene in scenes:
            async with asyncio.timeout(60), make_service(store=directory, **options) as service:
                results.append(await scene(service))
        return results

    return asyncio.run(run())


async def converse(service: SessionService, *said: str, **options: Any) -> str:
    name = await service.create_session(**{"sampling_params": GREEDY, "seed": 1, **options})
    for one in said:
        await service.append_input(name, one)
        _, _, last = await read(await service.generate_stream(name))
        assert last.durable is True
    return name


async def ask(service: SessionService, name: str, what: str = "more") -> list[int]:
    await service.append_input(name, what)
    return (await read(await service.generate_stream(name)))[1]


def stored(directory: Path, name: str) -> list[int] | None:
    """The ids of a session, read from the database without any of our code."""
    with sqlite3.connect(directory / DATABASE) as connection:
        if connection.execute("SELECT 1 FROM sessions WHERE id = ?", (name,)).fetchone() is None:
            return None
        rows = connection.execute("SELECT begin, ids FROM tokens WHERE session = ? ORDER BY begin", (name,)).fetchall()
    ids: list[int] = []
    for begin, piece in rows:
        assert begin == len(ids), "pieces follow each other"
        ids += memoryview(piece).cast("i").tolist()
    return ids


class Held:
    """A function that some thread calls, and that waits there until it may go on."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._loop = asyncio.get_running_loop()
        self._is_free = threading.Event()
        self.called = asyncio.Event()

    def __call__(self, *given: Any, **options: Any) -> Any:
        self._loop.call_soon_threadsafe(self.called.set)
        assert self._is_free.wait(60)
        return self._function(*given, **options)

    def let_go(self) -> None:
        self._is_free.set()
