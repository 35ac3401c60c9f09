"""Very many sessions: nobody is left behind, nobody reads another's words, and idle ones cost little."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from typing import Any

import pytest

from tests.session.helpers import GREEDY, continuation, make_service, read
from tokenmill.backends.fake import Fault, FaultKind
from tokenmill.config import EngineConfig
from tokenmill.engine.events import Event, Phase, RequestEvent, TickEvent

pytestmark = pytest.mark.slow

NUM_SESSIONS = 1000


@pytest.mark.fault("O08")
@pytest.mark.req("R9", "R3", "R8")
def test_a_thousand_sessions_on_two_cores_with_room_for_eight() -> None:
    async def play() -> None:
        config = EngineConfig(max_num_seqs=8, max_queue=NUM_SESSIONS)
        room = 8 * 64  # cells a core: eight conversations of that length
        async with make_service(num_workers=2, cells=room // 2, max_seqs=16, config=config) as service:
            names = [await service.create_session(sampling_params=GREEDY, seed=1) for _ in range(NUM_SESSIONS)]
            for turn in range(2):
                for i, name in enumerate(names):
                    await service.append_input(name, f"<{i}> {turn}")
                await asyncio.gather(*[read(await service.generate_stream(name, 4)) for name in names])
            sessions = service._model().queue.sessions
            for i, name in enumerate(names):
                log = sessions[name].log.tokens.tolist()
                words = bytes(token for token in log if token < 256)
                assert words.startswith(f"user: <{i}> 0\nassistant: ".encode())
                assert words.count(b"<") >= 2
                if i % 10 == 0:
                    total = sessions[name].log.turns[-2].end or 0
                    wanted = continuation(log[:total], GREEDY, seed=1)[:4]
                    assert log[total:] == wanted[: len(log) - total]
            for core in service._model().client.pool.cores:  # type: ignore[attr-defined]
                stats = core.call(lambda one: (one.check_integrity(), one.stats())[1]).result(30)
                assert stats.kv.num_cells == room // 2
            for name in names:
                await service.end_session(name)
            for core in service._model().client.pool.cores:  # type: ignore[attr-defined]
                stats = core.call(lambda one: (one.check_integrity(), one.stats())[1]).result(30)
                assert (stats.num_parked, stats.kv.referenced_cells) == (0, 0)

    asyncio.run(asyncio.wait_for(play(), 240))


@pytest.mark.req("R4", "R9")
@pytest.mark.parametrize("depth", [0, 1])
def test_21_2_sessions_with_identical_histories_leave_the_kv_of_others(depth: int) -> None:
    """More turns than there are sequence ids, in a memory that stays almost empty."""

    async def play() -> None:
        async with make_service(depth, cells=8192, max_seqs=32) as service:
            core = service._model().client.pool.cores[0]  # type: ignore[attr-defined]
            names: list[str] = []

            async def converse(said: list[str]) -> None:
                names.append(await service.create_session(sampling_params=GREEDY, seed=1))
                for text in said:
                    await service.append_input(names[-1], text)
                    await read(await service.generate_stream(names[-1], 2))
                stats, views = core.call(lambda one: (one.stats(), one.kv.parked_views())).result(30)
                assert sorted(view.owner for view in views) == sorted(names), "each has one"
                assert stats.num_parked_tokens <= stats.kv.held_cells < stats.kv.num_cells / 2

            for number in range(5):
                await converse([f"session {number}"])
            for _ in range(4):
                await converse([f"turn {turn}" for turn in range(12)])
            await service.append_input(names[0], "again")
            log = len(service._model().queue.find(names[0]).log)
            *_, last = await read(await service.generate_stream(names[0], 2))
            assert last.usage is not None
            assert last.usage.cached_tokens >= log - 1

    asyncio.run(asyncio.wait_for(play(), 60))


@pytest.mark.req("R9")
def test_ten_thousand_idle_sessions_cost_little() -> None:
    tokens, measured = 50, 2_000

    async def play() -> float:
        async with make_service() as service:
            asked: list[str] = []
            for i in range(10_000):
                if i == 10_000 - measured:  # tracing is slow, and all cost the same
                    gc.collect()
                    tracemalloc.start()
                name = await service.create_session(sampling_params=GREEDY)
                await service.append_input(name, [1] * (tokens - 2))
                if i % 4 == 0:  # some have been answered
                    asked.append(name)
                if len(asked) == 10:  # in few steps
                    streams = [await service.generate_stream(one, 2, ignore_eos=True) for one in asked]
                    await asyncio.gather(*map(read, streams))
                    asked.clear()
            gc.collect()
            used, _ = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            return used / measured

    assert asyncio.run(play()) < 4096 + 8 * tokens


@pytest.mark.req("G1", "R43", "B8")
@pytest.mark.parametrize("depth", [0, 1])
def test_one_reader_of_many_stops_and_the_tick_schedule_is_the_same(depth: int) -> None:
    async def schedule(*, one_stops: bool) -> list[tuple[Any, ...]]:
        ticks: list[tuple[Any, ...]] = []
        place: dict[str, int] = {}

        def listen(event: Event) -> None:
            if isinstance(event, TickEvent):
                plan = event.plan
                ticks.append((plan.tick, plan.rows.tolist(), plan.counts.tolist(), plan.num_decode, event.num_running))
            elif isinstance(event, RequestEvent) and event.phase is Phase.ENDED:
                ticks.append((place.get(event.request_id.partition("~")[0]), event.tick, event.num_tokens))

        config = EngineConfig(max_num_seqs=33)
        async with asyncio.timeout(60), make_service(depth, cells=8192, max_seqs=64, config=config) as service:
            pool: Any = service._model().client.pool  # type: ignore[attr-defined]
            hold = Fault(FaultKind.STALL)
            pool.cores[0].core._executor.backend.faults.add(hold)
            holder = await service.create_session(sampling_params=GREEDY, seed=1)
            await service.append_input(holder, "hold")
            held = asyncio.create_task(read(await service.generate_stream(holder, 1)))
            await asyncio.to_thread(hold.stalled.wait, 30)
            pool.subscribe(listen)
            streams = []
            for i in range(32):
                name = await service.create_session(sampling_params=GREEDY, seed=1)
                place[name] = i
                await service.append_input(name, f"session {i}")
                streams.append(await service.generate_stream(name, 30 + i, ignore_eos=True))
            hold.release.set()
            await held
            readers = streams[1:] if one_stops else streams
            await asyncio.gather(*(read(stream) for stream in readers))
            if one_stops:
                assert (await read(streams[0]))[2].finish_reason == "length"
        return ticks

    control = asyncio.run(schedule(one_stops=False))
    assert asyncio.run(schedule(one_stops=True)) == control
    assert len(control) > 60
