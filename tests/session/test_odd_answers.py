"""Answers and forks where it is easy to be wrong: seeds, failures, askers that leave, readers that come late."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

import pytest

from tests.session.helpers import GREEDY, read, scene, tokens_of
from tokenmill import SessionService
from tokenmill.backends.fake import Fault, FaultKind
from tokenmill.errors import InvalidRequest, RequestFailed
from tokenmill.params import SamplingParams
from tokenmill.session.manager import SessionLimits


@pytest.mark.req("R6", "G20")
def test_seeds_are_honoured_and_forks_differ() -> None:
    async def play(service: SessionService) -> None:
        params = SamplingParams(seed=7, max_tokens=10)

        async def answer(name: str) -> tuple[int, ...]:
            return tuple((await read(await service.generate_stream(name)))[1])

        answers = set()
        for _ in range(3):
            name = await service.create_session(sampling_params=params)
            await service.append_input(name, "x")
            forks = await service.fork(name, n=3)
            answers.add(await answer(name))
        assert len(answers) == 1
        said = [await answer(fork) for fork in forks]
        assert len({*said, *answers}) == 4
        _, again, _ = await read(await service.regenerate(name))
        child = await service.fork(name)
        _, other, _ = await read(await service.regenerate(child))
        assert tuple(other) not in {tuple(again), *answers}

    scene(play)


@pytest.mark.parametrize("change", [{"temperature": -1}, {"stop_token_ids": (9999,)}, {"colour": 1}])
def test_a_regeneration_that_fails_keeps_the_answer(change: dict[str, Any]) -> None:
    async def play(service: SessionService) -> None:
        name = await service.create_session(sampling_params=GREEDY, seed=1)
        await service.append_input(name, "x")
        await read(await service.generate_stream(name))
        log, turns = tokens_of(service, name), service.get(name).turns
        with pytest.raises(InvalidRequest):
            await service.regenerate(name, **change)
        assert tokens_of(service, name) == log
        assert service.get(name).turns == turns
        assert service.get(name).state == "idle"

    scene(play)


@pytest.mark.parametrize("again", [True, False])
def test_an_answer_without_a_word_changes_nothing(again: bool) -> None:
    async def play(service: SessionService) -> None:
        client: Any = service._model().client
        name = await service.create_session(sampling_params=GREEDY, seed=1)
        await service.append_input(name, "x")
        await read(await service.generate_stream(name))
        log, turns = tokens_of(service, name), service.get(name).turns
        client.pool.cores[0].core._executor.backend.faults.add(Fault(FaultKind.NAN))
        live = await service.answer(name, given=None if again else "y", again=again)
        _, ids, last = await read(live.read())
        assert (ids, last.finish_reason) == ([], "error")
        assert (tokens_of(service, name), service.get(name).turns) == (log, turns)
        assert (service.get(name).state, service.get(name).pending) == ("idle", ())
        live = await service.answer(name, given=None if again else "y", again=again)
        assert (await read(live.read()))[1] != []

    scene(play)


def test_an_answer_whose_asker_leaves_in_the_very_moment_is_not_left_running() -> None:
    async def play(service: SessionService) -> None:
        name = await service.create_session(sampling_params=GREEDY, seed=1)
        session = service._model().queue.find(name)
        asking = asyncio.create_task(service.answer(name, 900, given="x", ignore_eos=True))
        while session.live is None:
            await asyncio.sleep(0)
        assert not asking.done()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        while session.live is not None:
            await asyncio.sleep(0.001)
        assert session.answer is not None
        assert session.answer.end.finish_reason == "cancelled"

    scene(play)


def test_the_time_of_an_answer_begins_when_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async def play(service: SessionService) -> None:
        loop = asyncio.get_running_loop()
        real = loop.time
        name = await service.create_session(sampling_params=GREEDY, seed=1)
        first = await service.answer(name, 400, given="x", ignore_eos=True)
        late, later = (asyncio.create_task(service.answer(name, given="y", timeout_s=t)) for t in (20.0, 40.0))
        session = service._model().queue.find(name)
        while len(session.waiting or ()) < 2 or not first.token_ids:  # an answer without a word would take "x" along
            await asyncio.sleep(0)
        monkeypatch.setattr(loop, "time", lambda: real() + 30)
        first.cancel()
        await read(first.read())
        with pytest.raises(RequestFailed, match="timed out waiting for the session") as caught:
            await late
        assert caught.value.finish_reason == "timeout"
        live = await later
        left = live.generation.choices[0].request.limits.timeout_s
        assert left is not None
        assert 0 < left <= 10
        await read(live.read())
        assert [message["content"] for message in session.log.messages[::2]] == ["x", "y"]

    scene(play)


def test_forks_whose_asker_leaves_in_the_very_moment_are_not_left_behind() -> None:
    async def play(service: SessionService) -> None:
        name = await service.create_session(sampling_params=GREEDY, seed=1)
        asking = asyncio.create_task(service.fork(name, n=3))
        while len(service) == 1:
            await asyncio.sleep(0)
        assert not asking.done()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert [info.session_id for info in service.list()] == [name]

    scene(play)


def test_a_fork_that_fails_is_none() -> None:
    """It leaves no session behind, and the next one draws what the first would have drawn."""

    async def play(service: SessionService) -> None:
        said = []
        for fails in (False, True):
            name = await service.create_session(sampling_params=SamplingParams(max_tokens=10), seed=7)
            await service.append_input(name, "x")
            if fails:
                with pytest.raises(InvalidRequest):
                    await service.fork(name, at_turn=9, n=3)
            (child,) = await service.fork(name, n=1)
            said.append((await read(await service.generate_stream(child)))[1])
        assert said[0] == said[1]
        assert len(service) == 4

    scene(play)


def test_going_on_where_a_chunk_ends_repeats_nothing() -> None:
    async def play(service: SessionService) -> None:
        name = await service.create_session(sampling_params=replace(GREEDY, stop=("zz", "qq")), seed=1)
        await service.append_input(name, "x")
        stream = await service.generate_stream(name, 60, ignore_eos=True)
        whole = asyncio.create_task(read(await service.attach(name)))
        async for chunk in stream:
            rest, ids, _ = await read(await service.attach(name, chunk.offset + len(chunk.token_ids)))
            text, all_ids, _ = await whole
            shown = "" if chunk.offset else chunk.text
            assert text.endswith(rest)
            assert all_ids[chunk.offset + len(chunk.token_ids) :] == ids
            if not chunk.offset:
                assert shown + rest == text
            break

    scene(play)


def test_a_loop_that_was_busy_does_not_cost_an_attentive_reader_its_answer() -> None:
    async def play(service: SessionService) -> None:
        name = await service.create_session(sampling_params=GREEDY, seed=1)
        await service.append_input(name, "x")
        stream = await service.generate_stream(name, 300, ignore_eos=True)
        reader = asyncio.create_task(read(stream))
        await asyncio.sleep(0)
        time.sleep(0.2)
        assert (await reader)[2].finish_reason == "length"

    scene(play, limits=SessionLimits(stall_timeout_s=0.1))
