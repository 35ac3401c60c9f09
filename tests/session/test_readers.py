"""Readers of an answer: those who come back, and those who stop."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.session.helpers import GREEDY, SteppedClock, read, scene, tokens_of
from tokenmill import SessionService
from tokenmill.backends.fake import Fault, FaultKind
from tokenmill.engine.request import Hints
from tokenmill.errors import InvalidRequest
from tokenmill.outputs import FinishReason
from tokenmill.params import SamplingParams
from tokenmill.pipeline.output import Generation
from tokenmill.session.answer import Answer
from tokenmill.session.manager import SessionLimits
from tokenmill.text.tokenizer import ByteTokenizer


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
        with pytest.raises(InvalidRequest, match="offset 999 is beyond"):
            await anext(await service.attach(name, 999))
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
        with pytest.raises(InvalidRequest, match="offset 999 is beyond"):
            await anext(await service.attach(name, 999))

    scene(play)


@pytest.mark.req("R43", "B8")
def test_logprobs_go_along_with_the_tokens_of_a_reader_that_comes_back() -> None:
    async def play(service: SessionService) -> None:
        client: Any = service._model().client
        hold = Fault(FaultKind.STALL, after=10)
        client.pool.cores[0].core._executor.backend.faults.add(hold)
        name = await service.create_session(sampling_params=GREEDY, seed=1)
        live = await service.answer(name, 30, given="a", ignore_eos=True, logprobs=2)
        reader, seen = live.read(), 0
        while seen < 6:
            seen += len((await anext(reader)).token_ids)
        scores: Any = live._logprobs
        resumed = live.read(4)
        first = await anext(resumed)
        hold.release.set()
        assert first.offset == 4
        assert first.logprobs == scores[4 : 4 + len(first.token_ids)]
        async for chunk in resumed:
            assert chunk.logprobs == scores[chunk.offset : chunk.offset + len(chunk.token_ids)]
        assert len(scores) == 30
        for offset in range(31):  # it is over
            (chunk,) = [chunk async for chunk in await service.attach(name, offset)]
            assert chunk.logprobs == scores[offset:]

    scene(play)


@pytest.mark.req("R43", "G1", "G18")
def test_an_answer_that_nobody_reads_ends_and_the_session_keeps_it() -> None:
    async def play(service: SessionService) -> None:
        name = await service.create_session(sampling_params=GREEDY, seed=1)
        await service.append_input(name, "a")
        stream = await service.generate_stream(name, max_new_tokens=480, ignore_eos=True)
        live: Any = service._model().queue.find(name).live
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
        live: Any = service._model().queue.find(name).live
        cancelled = asyncio.Event()
        live.cancel = lambda reason: (type(live).cancel(live, reason), cancelled.set())
        await cancelled.wait()  # the alarm rings while the engine stands still
        hold.release.set()
        assert (await read(stream))[2].finish_reason == "timeout"

    scene(play, limits=SessionLimits(stall_timeout_s=0.05))


class TwoCharacters(ByteTokenizer):
    """Every token says "xa"."""

    def decode(self, ids: Any, *, skip_special: bool = True) -> str:  # noqa: ARG002
        return "xa" * len(ids)


class Cancelled:
    """In place of an engine: what was cancelled, and why."""

    def __init__(self) -> None:
        self.reasons: list[FinishReason] = []

    def submit(self, *_: object) -> None:
        pass

    def cancel(self, _: str, reason: FinishReason) -> None:
        self.reasons.append(reason)

    def finish(self, *_: object) -> None:
        raise AssertionError("no stop string is complete")


@pytest.mark.req("R43")
def test_each_read_restarts_the_stall_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """An "a" may begin the stop string, so the last token is held back: no reader can be late for it."""
    clock = SteppedClock(monkeypatch)

    async def play() -> None:
        engine: Any = Cancelled()
        params = SamplingParams(stop=("ab",), max_tokens=100)
        generation = Generation(
            "r", None, [1], params, TwoCharacters(),
            engine_id="r", vocab_size=256, max_model_len=200, seed=1, hints=Hints(), timeout_s=None,
        )  # fmt: skip
        live = Answer(generation, lambda _: None, stall_timeout_s=10, max_unread_bytes=1 << 20)
        live.start(engine)
        (choice,) = generation.choices

        async def pass_time(seconds: float) -> None:
            clock.ahead += seconds
            for _ in range(3):
                await asyncio.sleep(0)

        choice.push(1, None, None)
        await pass_time(20)
        assert engine.reasons == [], "there was nothing to read"
        reader = live.read()
        for _ in range(4):
            choice.push(1, None, None)
            await pass_time(6)
            assert engine.reasons == []
            assert (await anext(reader)).text == "xa"
        choice.push(1, None, None)
        await pass_time(6)
        assert engine.reasons == []
        await pass_time(6)
        assert engine.reasons == [FinishReason.TIMEOUT]

    asyncio.run(asyncio.wait_for(play(), 60))
