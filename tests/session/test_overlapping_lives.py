"""Sessions, services and cores whose lives overlap: queues, bytes, loads, cores that are gone, expiry."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import Any

import pytest

from tests.session.helpers import GREEDY, continuation, make_service, read, scene, tokens_of
from tokenmill import SessionService
from tokenmill.backends.fake import Fault, FaultKind
from tokenmill.errors import EngineDead, InvalidRequest, Overloaded
from tokenmill.session.manager import MOST_RENDERERS, SessionLimits
from tokenmill.session.routing import LeastLoaded


def test_callers_that_have_left_do_not_fill_the_queue() -> None:
    async def play(service: SessionService) -> None:
        name = await service.create_session(sampling_params=GREEDY, seed=1)
        await service.append_input(name, "a")
        stream = await service.generate_stream(name, 400, ignore_eos=True)
        await anext(stream)
        left = [asyncio.create_task(service.append_input(name, f"m{i}")) for i in range(8)]
        await asyncio.sleep(0)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        stays = asyncio.create_task(service.append_input(name, "real"))
        await service.cancel_generate(name)
        await stays
        await read(await service.generate_stream(name))
        assert service.get(name).turns[2].messages[0]["content"] == "real"

    scene(play)


def test_what_sessions_are_created_with_is_bounded_too() -> None:
    async def play(service: SessionService) -> None:
        for i in range(100):
            name = await service.create_session(template_options={"style": "s" * 3000 + str(i)})
            assert service._model().budget.total > 3000
            await service.end_session(name)
        assert len(service._model()._renderers) <= MOST_RENDERERS
        biased = replace(GREEDY, logit_bias=dict.fromkeys(range(200), 1.0))
        await service.create_session(sampling_params=biased)
        with pytest.raises(Overloaded):
            await service.create_session()

    scene(play, limits=SessionLimits(max_log_bytes=9000, stall_timeout_s=None))


def test_bytes_bound_forks_and_system_prompts_too() -> None:
    async def play(service: SessionService) -> None:
        name = await service.create_session(sampling_params=GREEDY, system="s" * 100)
        assert service._model().budget.total >= 100
        await service.append_input(name, "x" * 800)
        await read(await service.generate_stream(name, 1))
        before = service._model().budget.total
        with pytest.raises(Overloaded):
            await service.fork(name, n=500)
        assert (service._model().budget.total, len(service)) == (before, 1), "all or none"
        for info in service.list():
            await service.end_session(info.session_id)
        assert service._model().budget.total == 0

    scene(play, limits=SessionLimits(max_log_bytes=9000, stall_timeout_s=None))


def test_a_service_belongs_to_one_loop() -> None:
    service = make_service()

    async def use() -> None:
        name = await service.create_session(sampling_params=GREEDY)
        await service.append_input(name, "x")

    asyncio.run(use())
    with pytest.raises(InvalidRequest, match="must be used on the event loop"):
        asyncio.run(use())


def test_loads_that_overlap_leave_one_engine_and_a_close_none() -> None:
    def engines() -> int:
        return sum(thread.name.startswith("tokenmill-core") for thread in threading.enumerate())

    async def play() -> None:
        before = engines()
        service = SessionService()
        await asyncio.gather(*(service.load_model_with_workers("fake") for _ in range(4)))
        assert engines() == before + 1
        loading = asyncio.create_task(service.load_model_with_workers("fake"))
        await asyncio.sleep(0)
        closing = asyncio.create_task(service.close())
        await asyncio.gather(loading, closing, return_exceptions=True)
        await service.close()
        assert engines() == before
        with pytest.raises(EngineDead):
            await service.load_model_with_workers("fake")
        assert engines() == before

    asyncio.run(asyncio.wait_for(play(), 30))


@pytest.mark.req("R3", "R9")
def test_sessions_of_a_core_that_is_gone_for_good_go_on_elsewhere() -> None:
    async def play(service: SessionService) -> None:
        client: Any = service._model().client
        core = client.pool.cores[0]
        names = [await service.create_session(sampling_params=GREEDY, seed=1) for _ in range(2)]
        assert [service.get(name).core for name in names] == [0, 1]
        for name in names:
            await service.append_input(name, "hello")
            await read(await service.generate_stream(name))
        while core.is_alive:
            core.core._executor.backend.faults.add(Fault(FaultKind.FATAL))
            await service.append_input(names[0], "again")
            await read(await service.generate_stream(names[0], 3))
        total = await service.append_input(names[0], "go on")
        _, ids, last = await read(await service.generate_stream(names[0]))
        assert last.error is None
        assert ids == continuation(tokens_of(service, names[0])[:total], GREEDY, seed=1)
        assert service.get(names[0]).core == 1
        new = await service.create_session(sampling_params=GREEDY)
        assert service.get(new).core == 1

    scene(play, num_workers=2)


@pytest.mark.req("R3", "R9")
@pytest.mark.parametrize("routing", ["round_robin", "least_loaded"])
def test_forks_stay_with_their_parent_and_find_its_kv(routing: str) -> None:
    async def play(service: SessionService) -> None:
        names = [await service.create_session(sampling_params=GREEDY, seed=1) for _ in range(2)]
        for name in names:
            await service.append_input(name, f"a long question of {name}, which nobody computes twice")
            await read(await service.generate_stream(name))
            log = len(tokens_of(service, name))
            children = await service.fork(name, n=3)
            assert {service.get(child).core for child in children} == {service.get(name).core}
            for child in children:
                await service.append_input(child, "and?")
                _, _, last = await read(await service.generate_stream(child))
                assert last.usage is not None
                assert last.usage.cached_tokens >= log - 1
        assert {service.get(name).core for name in names} == {0, 1}

    scene(play, num_workers=2, routing=routing)


def test_the_least_loaded_core_counts_forks_and_forgets_openings() -> None:
    routing = LeastLoaded(2)
    first = routing.choose("sys", [0, 1])
    for _ in range(10):
        routing.stay(first, "sys")
    for _ in range(10):
        routing.leave(first, "sys")
    assert routing._loads == [1, 0]
    assert routing.choose("sys", [0, 1]) == first
    assert routing.choose(None, [0, 1]) == 1 - first
    routing.leave(first, "sys")
    routing.leave(first, "sys")
    assert not routing._knows
    assert routing.choose("x", [1]) == 1


def test_a_session_that_ends_leaves_the_load_of_its_core() -> None:
    async def play(service: SessionService) -> None:
        names = [await service.create_session() for _ in range(6)]
        assert [service.get(name).core for name in names] == [0, 1] * 3
        for name in names[::2]:
            await service.end_session(name)
        assert [service.get(await service.create_session()).core for _ in range(4)] == [0, 0, 0, 0]

    scene(play, num_workers=2, routing="least_loaded")


def test_expiry_lives_as_long_as_the_service() -> None:
    async def play(service: SessionService) -> None:
        for _ in range(2):
            await service.create_session()
            while service.list():
                await asyncio.sleep(0.01)

    scene(play, limits=SessionLimits(ttl_s=0.05))
