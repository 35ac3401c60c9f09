"""What bounds sessions, and the life of their service: bytes, time, reload, dead cores, close."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.session.helpers import GREEDY, SteppedClock, continuation, make_service, read, scene, tokens_of
from tests.session.storing import ask
from tokenmill import SessionService
from tokenmill.backends.fake import Fault, FaultKind
from tokenmill.errors import EngineDead, ModelNotLoaded, Overloaded, SessionEnded, SessionNotFound
from tokenmill.session.manager import SessionLimits


@pytest.mark.req("R4")
def test_bytes_and_time_bound_the_logs() -> None:
    async def play(service: SessionService) -> None:
        names = []

        async def fill() -> None:
            while True:
                names.append(await service.create_session(sampling_params=GREEDY))
                await service.append_input(names[-1], "x" * 100, raw=True)

        with pytest.raises(Overloaded, match="end some sessions first"):
            await fill()
        assert len(names) > 5
        with pytest.raises(Overloaded, match="end some sessions first"):
            await service.create_session()
        with pytest.raises(Overloaded):
            await service.append_input(names[0], "y")
        await service.end_session(names[0])
        await service.create_session()
        assert service.end_idle(0.0) == len(names)
        assert service._model().budget.total == 0

    scene(play, limits=SessionLimits(max_log_bytes=12_000, stall_timeout_s=None))


@pytest.mark.req("R4")
def test_sessions_expire() -> None:
    async def play(service: SessionService) -> None:
        name = await service.create_session()
        while service.list():
            await asyncio.sleep(0.01)
        with pytest.raises(SessionEnded):
            service.get(name)

    scene(play, limits=SessionLimits(ttl_s=0.05))


@pytest.mark.req("R4")
def test_reading_an_answer_again_counts_as_use(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SteppedClock(monkeypatch)

    async def play(service: SessionService) -> None:
        names = [await service.create_session(sampling_params=GREEDY, seed=1) for _ in range(3)]
        for name in names:
            await ask(service, name)
        clock.ahead += 20
        await read(await service.attach(names[1]))
        clock.ahead += 20
        assert service.end_idle(30) == 2
        assert [info.session_id for info in service.list()] == [names[1]]

    scene(play)


@pytest.mark.req("R1")
def test_the_services_life() -> None:
    async def play() -> None:
        with pytest.raises(ModelNotLoaded, match=r"call SessionService\.init first"):
            SessionService.current()
        service = await SessionService.init()
        assert SessionService.current() is service
        with pytest.raises(ModelNotLoaded, match="load_model_with_workers"):
            await service.create_session()
        await service.load_model_with_workers("fake", {"max_num_seqs": 4}, num_workers=2)
        name = await service.create_session(sampling_params=GREEDY)
        await service.append_input(name, "hi")
        await read(await service.generate_stream(name))
        await service.reload()
        assert service._model().client.num_cores == 2
        assert service._model().opened.config.max_num_seqs == 2, "each worker has its share"
        with pytest.raises(SessionNotFound):
            service.get(name)
        other = await SessionService.init("fake")
        assert SessionService.current() is other
        await other.close()
        with pytest.raises(ModelNotLoaded):
            SessionService.current()
        with pytest.raises(EngineDead, match="was closed"):
            await other.create_session()
        await service.close()

    asyncio.run(play())


@pytest.mark.req("R9")
def test_a_core_that_dies_costs_its_answers_and_no_session() -> None:
    async def play(service: SessionService) -> None:
        client: Any = service._model().client
        names = [await service.create_session(sampling_params=GREEDY, seed=1) for _ in range(4)]
        for name in names:
            await service.append_input(name, f"hello {name}")
            await read(await service.generate_stream(name))
        client.pool.cores[0].core._executor.backend.faults.add(Fault(FaultKind.FATAL, after=3))
        for name in names:
            await service.append_input(name, "more")
        results = await asyncio.gather(*[read(await service.generate_stream(name)) for name in names])
        assert "error" in {last.finish_reason for _, _, last in results}
        for name in names:
            total = await service.append_input(name, "and more")
            _, ids, last = await read(await service.generate_stream(name))
            assert last.error is None
            assert ids == continuation(tokens_of(service, name)[:total], GREEDY, seed=1)

    scene(play)


def test_after_close() -> None:
    async def play() -> None:
        service = make_service()
        name = await service.create_session(sampling_params=GREEDY)
        await service.append_input(name, "a")
        stream = await service.generate_stream(name, max_new_tokens=400, ignore_eos=True)
        await anext(stream)
        await service.close()
        _, _, last = await read(stream)
        assert last.finish_reason in ("cancelled", "shutdown")
        with pytest.raises((ModelNotLoaded, EngineDead)):
            await service.append_input(name, "b")

    asyncio.run(play())
