"""Long input is prepared off the event loop, on a copy: others go on, and a session changes at once or not at all."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from tests.session.helpers import GREEDY, make_service, read, scene, tokens_of
from tests.session.storing import Held
from tokenmill import SessionService
from tokenmill.errors import ContextOverflow, EngineDead, Overloaded, SessionEnded
from tokenmill.session.session import Session
from tokenmill.text.workers import SHORT_BYTES, TextWorkers


@pytest.fixture(autouse=True)
def _all_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TextWorkers, "inline_bytes", 0)


async def new(service: SessionService) -> str:
    return await service.create_session(sampling_params=GREEDY, seed=1)


def hold(monkeypatch: pytest.MonkeyPatch, method: str = "append") -> Held:
    """What prepares input waits on its thread until it may go on."""
    held = Held(getattr(Session, method))
    monkeypatch.setattr(Session, method, lambda *args, **options: held(*args, **options))
    return held


def test_21_1_other_sessions_go_on_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    async def play(service: SessionService) -> None:
        first, other = await new(service), await new(service)
        await service.append_input(other, "hi")
        held = hold(monkeypatch)
        appending = asyncio.create_task(service.append_input(first, "x"))
        await held.called.wait()
        _, ids, _ = await read(await service.generate_stream(other))
        assert len(ids) == 8
        assert service.get(first).state == "idle"  # as it was, until it is all there
        assert service.get(first).pending == ()
        held.let_go()
        assert await appending == len("user: x\nassistant: ")
        assert service.get(first).state == "appending"

    scene(play)


def test_21_1_operations_of_a_session_keep_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    async def play(service: SessionService) -> None:
        name = await new(service)
        held = hold(monkeypatch)
        tasks = [asyncio.create_task(service.append_input(name, text)) for text in "abc"]
        await held.called.wait()
        assert len(service._model().queue.find(name).waiting or ()) == 2
        held.let_go()
        await asyncio.gather(*tasks)
        assert [message["content"] for message in service.get(name).pending] == ["a", "b", "c"]

    scene(play)


@pytest.mark.parametrize("leaving", ["before", "while"])
def test_21_1_whoever_leaves_changes_nothing(leaving: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def play(service: SessionService) -> None:
        name = await new(service)
        await service.append_input(name, "kept")
        before = service.get(name)
        held = hold(monkeypatch)
        appending = asyncio.create_task(service.append_input(name, "not kept"))
        if leaving == "while":
            await held.called.wait()
        else:
            while not service._model().queue.find(name).is_preparing:
                await asyncio.sleep(0)
        appending.cancel()
        await asyncio.gather(appending, return_exceptions=True)
        held.let_go()
        assert service.get(name).pending == before.pending
        assert await service.append_input(name, "more")  # the session is free again
        assert [message["content"] for message in service.get(name).pending] == ["kept", "more"]

    scene(play)


def test_21_1_a_session_that_ends_meanwhile_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    async def play(service: SessionService) -> None:
        name = await new(service)
        held = hold(monkeypatch)
        answering = asyncio.create_task(service.answer(name, given="x"))
        await held.called.wait()
        await service.end_session(name)
        held.let_go()
        with pytest.raises(SessionEnded):
            await answering
        assert len(service) == 0

    scene(play)


def test_21_1_a_service_that_closes_does_not_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with asyncio.timeout(60):
            service = make_service()
            name = await new(service)
            held = hold(monkeypatch)
            appending = asyncio.create_task(service.append_input(name, "x"))
            await held.called.wait()
            await service.close()
            with pytest.raises((EngineDead, SessionEnded)):
                await appending
            held.let_go()

    asyncio.run(run())


def test_21_1_what_fails_leaves_the_session_as_it_was() -> None:
    async def play(service: SessionService) -> None:
        name = await new(service)
        await read((await service.answer(name, given="hi")).read())
        log, turns = tokens_of(service, name), service.get(name).turns
        for given in ("x" * 2000, [65] * 2000):
            with pytest.raises(ContextOverflow, match="maximum context length is 1024 tokens"):
                await service.append_input(name, given)
            with pytest.raises(ContextOverflow):
                await service.answer(name, given=given)
        with pytest.raises(ContextOverflow, match="at least"):
            await service.append_input(name, "x" * 2000, raw=True)
        with pytest.raises(ContextOverflow):  # it would begin, but not end in the context
            await service.answer(name, given="x" * 900, max_new_tokens=200, must_fit=True)
        assert tokens_of(service, name) == log
        assert service.get(name).turns == turns
        assert service.get(name).state == "idle"

    scene(play)


def test_21_1_threads_are_shared_and_their_bound_holds() -> None:
    """The threads of a server tokenize for all of its sessions: too much at once is refused."""
    may_end = threading.Event()

    async def run() -> None:
        texts = TextWorkers(max_bytes=2 * SHORT_BYTES)
        async with asyncio.timeout(60), make_service(texts=texts) as service:
            name = await new(service)
            blocking = asyncio.create_task(texts.run(SHORT_BYTES + 1, may_end.wait))
            await asyncio.sleep(0)
            with pytest.raises(Overloaded):
                await service.append_input(name, "x" * (SHORT_BYTES + 1))
            may_end.set()
            await blocking
            with pytest.raises(ContextOverflow):
                await service.append_input(name, "x" * (SHORT_BYTES + 1))
        assert await texts.run(SHORT_BYTES, lambda: "open") == "open"  # it was not the service's to close
        texts.close()

    asyncio.run(run())


def test_21_1_prepared_on_a_thread_or_at_once_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    async def talk(service: SessionService, found: list[Any]) -> None:
        name = await service.create_session(system="be brief", sampling_params=GREEDY, seed=1)
        await service.append_input(name, "hi")
        await service.append_input(name, [{"role": "user", "content": "there"}])
        await read(await service.generate_stream(name))
        await read((await service.answer(name, given="and then?")).read())
        await read(await service.regenerate(name))
        await service.edit(name, 0, "hello")
        await read(await service.generate_stream(name))
        await service.rewind(name, at_turn=1)
        await service.append_input(name, "raw", raw=True)
        found += [tokens_of(service, name), service.get(name).turns, service.get(name).state]

    results: list[list[Any]] = [[], []]
    for result, inline_bytes in zip(results, (0, 1 << 30), strict=True):
        monkeypatch.setattr(TextWorkers, "inline_bytes", inline_bytes)

        async def play(service: SessionService, result: list[Any] = result) -> None:
            await talk(service, result)

        scene(play)
    assert results[0] == results[1]
