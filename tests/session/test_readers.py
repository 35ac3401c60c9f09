"""Readers of an answer: those who come back, and those who stop."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.session.helpers import GREEDY, read, scene, tokens_of
from tokenmill import SessionService
from tokenmill.core import Fault, FaultKind
from tokenmill.errors import InvalidRequest
from tokenmill.session.info import SessionLimits


@pytest.mark.req("R43", "B8")
def test_reading_again_from_an_offset() -> None:
    async def play(service: SessionService) -> None:
        name = await service.create_session(sampling_params=GREEDY, seed=1)
        with pytest.raises(InvalidRequest, match="no answer to read"):
            await service.attach(name)
        await service.append_input(name, "a")
        stream = await service.generate_stream(name, max_new_tokens=60, ignore_eos=True)
        first = await anext(stream)
        again = asyncio.create_task(read(await service.attach(name, len(first.token_ids))))
        whole = asyncio.create_task(read(await service.attach(name)))
        text, ids, _ = await read(stream)
        assert (await again)[1] == ids
        assert (await whole)[0] == first.text + text
        assert (await read(await service.attach(name)))[1] == [*first.token_ids, *ids]
        await service.rewind(name, at_turn=1)
        stop = (first.token_ids + ids)[4]
        _, stopped, _ = await read(await service.generate_stream(name, stop_token_ids=(stop,)))
        for offset in range(len(stopped) + 1):
            text, ids, last = await read(await service.attach(name, offset))
            assert ids == stopped[offset:]
            assert last.finish_reason == "stop"
        with pytest.raises(InvalidRequest, match="nothing at 999"):
            await anext(await service.attach(name, 999))

    scene(play)


@pytest.mark.req("R43", "G1", "G18")
def test_an_answer_that_nobody_reads_ends_and_the_session_keeps_it() -> None:
    async def play(service: SessionService) -> None:
        name = await service.create_session(sampling_params=GREEDY, seed=1)
        await service.append_input(name, "a")
        stream = await service.generate_stream(name, max_new_tokens=480, ignore_eos=True)
        live: Any = service._model().master.find(name).live
        while not live.is_over:
            await asyncio.sleep(0.01)
        _, ids, last = await read(stream)
        assert last.finish_reason == "timeout"
        assert tokens_of(service, name)[-len(ids) :] == ids
        await service.append_input(name, "go on")
        await read(await service.generate_stream(name))

    scene(play, limits=SessionLimits(stall_timeout_s=None, max_unread_bytes=64))


def test_a_reader_that_stalls_for_too_long() -> None:
    async def play(service: SessionService) -> None:
        client: Any = service._model().client
        hold = Fault(FaultKind.STALL, after=5)
        client.pool.cores[0].core._executor.backend.faults.add(hold)
        name = await service.create_session(sampling_params=GREEDY, seed=1)
        await service.append_input(name, "a")
        stream = await service.generate_stream(name, max_new_tokens=480, ignore_eos=True)
        live: Any = service._model().master.find(name).live
        cancelled = asyncio.Event()
        live.cancel = lambda reason: (type(live).cancel(live, reason), cancelled.set())
        await cancelled.wait()  # the alarm rings while the engine stands still
        hold.release.set()
        assert (await read(stream))[2].finish_reason == "timeout"

    scene(play, limits=SessionLimits(stall_timeout_s=0.05))
