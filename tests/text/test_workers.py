"""Long texts on a few threads: which go first, how many there may be, and what becomes of those nobody waits for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import pytest

from tokenmill.errors import ConfigError, EngineDead, Overloaded
from tokenmill.text import workers as workers_module
from tokenmill.text.workers import INLINE_BYTES, MIB, SHORT_BYTES, TextWorkers

LONG = SHORT_BYTES + 1


class Held:
    """Work that waits on its thread until it may go on."""

    def __init__(self, name: str, order: list[str]) -> None:
        self.has_begun = threading.Event()
        self.may_end = threading.Event()
        self._name, self._order = name, order

    def __call__(self) -> str:
        self._order.append(self._name)
        self.has_begun.set()
        assert self.may_end.wait(60)
        return self._name

    async def begun(self) -> None:
        assert await asyncio.to_thread(self.has_begun.wait, 60)


def play(scene: Callable[[TextWorkers], Awaitable[None]], **options: Any) -> None:
    async def run() -> None:
        workers = TextWorkers(**options)
        try:
            async with asyncio.timeout(60):
                await scene(workers)
        finally:
            workers.close()

    asyncio.run(run())


@pytest.fixture(autouse=True)
def _no_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers_module, "REST", 0.0)


def test_21_1_short_texts_are_worked_on_at_once() -> None:
    async def scene(workers: TextWorkers) -> None:
        here = threading.get_ident()
        assert await workers.run(INLINE_BYTES - 1, threading.get_ident) == here
        assert await workers.run(INLINE_BYTES, threading.get_ident) != here

    play(scene)


def test_21_1_short_texts_do_not_wait_for_long_ones() -> None:
    async def scene(workers: TextWorkers) -> None:
        order: list[str] = []
        held = [Held(f"long {i}", order) for i in range(8)]
        long = [asyncio.create_task(workers.run(7 * MIB, one)) for one in held]
        await held[0].begun()
        for _ in range(50):
            assert await workers.run(SHORT_BYTES, lambda: "short") == "short"
        assert order == ["long 0"]  # one thread is never theirs
        for one in held:
            one.may_end.set()
        assert await asyncio.gather(*long) == [f"long {i}" for i in range(8)]

    play(scene)


@pytest.mark.parametrize("num_threads", [2, 3, 5])
def test_21_1_no_more_threads_than_there_may_be(num_threads: int) -> None:
    async def scene(workers: TextWorkers) -> None:
        order: list[str] = []
        held = [Held(f"{size}", order) for size in [LONG] * 6 + [SHORT_BYTES] * 6]
        jobs = [asyncio.create_task(workers.run(LONG if i < 6 else SHORT_BYTES, one)) for i, one in enumerate(held)]
        for one in held[: num_threads - 1]:
            await one.begun()
        await held[6].begun()
        assert len(order) == num_threads
        assert order.count(str(LONG)) == num_threads - 1
        for one in held:
            one.may_end.set()
        await asyncio.gather(*jobs)
        assert len(order) == 12

    play(scene, num_threads=num_threads)
    with pytest.raises(ConfigError, match="at least 2"):
        TextWorkers(num_threads=1)


def test_21_1_the_shorter_goes_first_unless_the_longer_has_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(workers: TextWorkers) -> None:
        loop = asyncio.get_running_loop()
        real, ahead = loop.time, [0.0]
        monkeypatch.setattr(loop, "time", lambda: real() + ahead[0])
        order: list[str] = []
        first = Held("first", order)
        jobs = [asyncio.create_task(workers.run(LONG, first))]
        await first.begun()
        for name, size, ahead[0] in (("8 MiB", 8 * MIB, 1.0), ("1 MiB", MIB, 2.0), ("1 MiB, late", MIB, 20.0)):
            jobs.append(asyncio.create_task(workers.run(size, partial(order.append, name))))  # type: ignore[arg-type]
            await asyncio.sleep(0)
        first.may_end.set()
        await asyncio.gather(*jobs)
        assert order == ["first", "1 MiB", "8 MiB", "1 MiB, late"]

    play(scene)


def test_21_1_a_flood_of_long_texts_takes_half_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a long text no other one is begun for as long again; short ones are."""
    monkeypatch.setattr(workers_module, "REST", 1e9)

    async def scene(workers: TextWorkers) -> None:
        order: list[str] = []
        await workers.run(LONG, partial(order.append, "long"))
        waiting = asyncio.create_task(workers.run(LONG, partial(order.append, "another")))
        for _ in range(20):
            await workers.run(SHORT_BYTES, lambda: None)
        assert order == ["long"]
        assert workers._num_long == 1
        workers._end_rest()
        await waiting
        assert order == ["long", "another"]

    play(scene)


def test_21_1_the_bytes_that_wait_have_a_bound() -> None:
    async def scene(workers: TextWorkers) -> None:
        order: list[str] = []
        held = Held("running", order)
        running = asyncio.create_task(workers.run(2 * MIB, held))  # alone it may be larger than the bound
        await held.begun()
        with pytest.raises(Overloaded, match="are queued for tokenization"):
            await workers.run(LONG, lambda: None)
        assert await workers.run(SHORT_BYTES, lambda: "short") == "short"
        held.may_end.set()
        await running
        first = Held("first", order)
        jobs = [asyncio.create_task(workers.run(MIB // 2, work)) for work in (first, order.clear)]
        await first.begun()
        with pytest.raises(Overloaded):
            await workers.run(LONG, lambda: None)
        jobs[1].cancel()
        await asyncio.gather(jobs[1], return_exceptions=True)
        jobs[1] = asyncio.create_task(workers.run(LONG, lambda: None))  # its bytes are free
        await asyncio.sleep(0)
        first.may_end.set()
        await asyncio.gather(*jobs)
        assert order == ["running", "first"]  # what was cancelled never ran

    play(scene, max_bytes=MIB)


def test_21_1_work_that_nobody_waits_for_keeps_its_thread_until_it_ends() -> None:
    async def scene(workers: TextWorkers) -> None:
        order: list[str] = []
        held = Held("left", order)
        job = asyncio.create_task(workers.run(LONG, held))
        await held.begun()
        job.cancel()
        await asyncio.gather(job, return_exceptions=True)
        other = asyncio.create_task(workers.run(LONG, partial(order.append, "other")))
        await workers.run(SHORT_BYTES, lambda: None)
        assert order == ["left"]
        held.may_end.set()
        await other
        assert order == ["left", "other"]
        assert workers._num_running == workers._num_long == workers._long_bytes == 0

    play(scene)


def test_21_1_errors_are_those_of_the_work() -> None:
    async def scene(workers: TextWorkers) -> None:
        def fail() -> None:
            raise ValueError("not like this")

        for size in (0, SHORT_BYTES, LONG):
            with pytest.raises(ValueError, match="not like this"):
                await workers.run(size, fail)
        assert await workers.run(LONG, lambda: "still there") == "still there"

    play(scene)


def test_21_1_closing_ends_what_waits() -> None:
    async def scene(workers: TextWorkers) -> None:
        held = Held("running", [])
        running = asyncio.create_task(workers.run(LONG, held))
        await held.begun()
        waiting = asyncio.create_task(workers.run(LONG, lambda: None))
        await asyncio.sleep(0)
        workers.close()
        with pytest.raises(EngineDead):
            await waiting
        with pytest.raises(EngineDead):
            await workers.run(LONG, lambda: None)
        held.may_end.set()
        assert await running == "running"

    play(scene)
