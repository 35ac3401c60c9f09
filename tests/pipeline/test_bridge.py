"""From step results to the readers of many requests: one that fails does not disturb the others of its step."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from tokenmill import AsyncLLM, SamplingParams
from tokenmill.backends.fake import FakeConfig, FakeModel, Fault, FaultKind
from tokenmill.config import EngineConfig
from tokenmill.contract import BackendLimits
from tokenmill.engine.client import ThreadClient
from tokenmill.engine.core import EngineCore
from tokenmill.engine.pool import EnginePool
from tokenmill.engine.request import Limits, Request
from tokenmill.errors import EngineDead, InvalidRequest, RequestFailed
from tokenmill.outputs import End, FinishReason, OutputDelta, RequestOutput, StepResult, TurnPart, joined
from tokenmill.pipeline.bridge import _LoopEnd
from tokenmill.pipeline.output import deliver

PARAMS = SamplingParams(max_tokens=20, ignore_eos=True, seed=1)


MODEL = FakeModel(FakeConfig(vocab_size=258, max_context=256, depth=1))


def make_llm() -> AsyncLLM:
    return AsyncLLM(MODEL, kv_cache_tokens=2048)


def make_client() -> ThreadClient:
    limits = BackendLimits(num_cells=2048, max_seqs=16, max_context=256, num_running=8)
    return ThreadClient(MODEL, EngineConfig(max_num_seqs=8), limits)


async def last(llm: AsyncLLM, prompt: str) -> RequestOutput:
    async for output in llm.generate(prompt, PARAMS):
        found = output
    return found


@pytest.mark.req("G18")
def test_tokens_that_can_not_be_decoded_end_their_own_request_only(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def play() -> None:
        async with make_llm() as llm:
            wanted = await last(llm, "good")
            broken = llm.generation("bad", PARAMS)
            push, num_pushed = broken.choices[0].stage._detokenizer.push, 0

            def fail(token: int) -> str:
                nonlocal num_pushed
                num_pushed += 1
                if num_pushed == 5:
                    raise ValueError("no such token")
                return push(token)

            monkeypatch.setattr(broken.choices[0].stage._detokenizer, "push", fail)
            stream = llm.open_stream([broken])

            async def read() -> list[OutputDelta]:
                deltas = []
                while some := await stream.take():
                    deltas += some
                return deltas

            deltas, good = await asyncio.gather(read(), last(llm, "good"))
            llm.close_stream(stream)
            assert (deltas[-1].finish_reason, deltas[-1].error) == ("error", "ValueError: no such token")
            assert good.outputs[0].token_ids == wanted.outputs[0].token_ids
            assert "could not be detokenized" in caplog.text
            while True:  # the engine has let go of it
                stats = await asyncio.to_thread(llm.client.stats)
                if stats[0] is not None and stats[0].num_running == 0:
                    break

    asyncio.run(play())


class BrokenParser:
    """Fails with the first text, or with the end."""

    in_reasoning, num_calls = False, 0

    def __init__(self, fails_at_end: bool) -> None:
        self._fails_at_end = fails_at_end

    def push(self, text: str) -> list[TurnPart]:
        if not self._fails_at_end:
            raise ValueError("no such call")
        return [TurnPart("content", text)]

    def close(self, *, is_cut: bool) -> list[TurnPart]:
        raise ValueError(f"no such call, cut: {is_cut}")


@pytest.mark.req("G18")
@pytest.mark.parametrize("fails_at_end", [False, True])
def test_an_answer_that_cannot_be_parsed_ends_with_an_error(fails_at_end: bool) -> None:
    async def play() -> None:
        async with asyncio.timeout(60), make_llm() as llm:
            generation = llm.generation("bad", PARAMS)
            broken: Any = BrokenParser(fails_at_end)
            generation.choices[0].parser = broken
            stream, deltas = llm.open_stream([generation]), list[OutputDelta]()
            while some := await stream.take():
                deltas += some
            llm.close_stream(stream)
            assert [delta.finish_reason for delta in deltas if delta.finish_reason] == ["error"]
            assert (deltas[-1].error or "").startswith("ValueError: no such call")
            while not generation.choices[0].is_released:
                await asyncio.sleep(0)

    asyncio.run(play())


def test_a_consumer_that_fails_does_not_keep_others_from_their_tokens(caplog: pytest.LogCaptureFixture) -> None:
    heard: list[Any] = []

    def fail(*_: object) -> None:
        raise RuntimeError("a bug in a consumer")

    consumers = {"bad": fail, "good": lambda *row: heard.append(row)}
    result = StepResult(["bad", "good", "unknown"], [1, 2, 3], None, {1: End(FinishReason.LENGTH)})
    deliver(result, consumers)
    assert heard == [(2, End(FinishReason.LENGTH), None)]
    assert list(consumers) == ["bad"], "one that has ended is forgotten"
    assert "the consumer of request bad failed" in caplog.text


def test_a_step_wakes_the_loop_once_for_all_its_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    wakeups = 0
    run = _LoopEnd._deliver

    def counted(end: _LoopEnd) -> None:
        nonlocal wakeups
        wakeups += 1
        run(end)

    monkeypatch.setattr(_LoopEnd, "_deliver", counted)

    async def play() -> None:
        async with make_llm() as llm:
            await asyncio.gather(*(last(llm, "same prompt") for _ in range(8)))
            client: Any = llm.client
            assert isinstance(client, ThreadClient)
            assert wakeups <= client.pool.cores[0].core.scheduler.tick + 1

    asyncio.run(play())


@pytest.mark.req("R30")
def test_two_event_loops_share_an_engine() -> None:
    llm = make_llm()
    found: dict[int, list[int]] = {}

    def work(number: int) -> None:
        found[number] = asyncio.run(last(llm, "same prompt")).outputs[0].token_ids

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    asyncio.run(llm.close())
    assert found[0] == found[1] == found[2]
    assert len(found[0]) == 20


def test_joined_deltas_are_the_same_as_one() -> None:
    parts = [OutputDelta(1, "a", [1], 4), OutputDelta(1, "", [2], 5), OutputDelta(1, "bc", [3, 4], 6, None, "stop", 9)]
    assert joined(parts) == OutputDelta(1, "abc", [1, 2, 3, 4], 4, None, "stop", 9)
    assert joined(parts[:1]) is parts[0]


@pytest.mark.req("R30")
def test_entry_points_that_share_an_engine_name_their_requests_apart() -> None:
    async def play() -> None:
        client, hold = make_client(), Fault(FaultKind.STALL, after=3)
        backend: Any = client.pool.cores[0].core._executor.backend
        async with AsyncLLM(MODEL, client=client) as one, AsyncLLM(MODEL, client=client) as other:
            backend.faults.add(hold)
            first = one.generate("same prompt", PARAMS)
            await anext(first)  # it runs until the engine goes on
            second = asyncio.create_task(last(other, "same prompt"))
            await asyncio.sleep(0)
            hold.release.set()
            found = await second
            await first.aclose()
            assert found.outputs[0].token_ids == (await last(one, "same prompt")).outputs[0].token_ids

    asyncio.run(play())


@pytest.mark.req("G13", "R35")
def test_deadlines_and_cancels_do_not_wait_for_a_step_that_hangs() -> None:
    """While the engine is inside a step: a deadline, a queue timeout in the inbox, a cancel, and an embedding's."""

    async def end_of(outputs: Any) -> RequestOutput:
        async for output in outputs:
            found = output
        return found

    async def play() -> None:
        client, hold = make_client(), Fault(FaultKind.STALL)
        backend: Any = client.pool.cores[0].core._executor.backend
        backend.faults.add(hold)
        async with AsyncLLM(MODEL, client=client, queue_timeout_s=0.2) as llm:
            started = asyncio.create_task(end_of(llm.generate("started", PARAMS, "started")))
            assert await asyncio.to_thread(hold.stalled.wait, 60)
            try:
                late = end_of(llm.generate("late", PARAMS, timeout_s=0.1))
                queued = end_of(llm.generate("queued", PARAMS))
                embedding = llm.embed("embedded", timeout_s=0.1)
                async with asyncio.timeout(30):
                    late_end, queued_end, failed = await asyncio.gather(late, queued, embedding, return_exceptions=True)
                assert isinstance(late_end, RequestOutput)
                assert late_end.error == "not done after 0.1 s"
                assert isinstance(queued_end, RequestOutput)
                assert queued_end.error == "not started after 0.2 s"
                assert isinstance(failed, RequestFailed)
                assert failed.finish_reason == "timeout"
                assert not started.done(), "it has started, so the queue timeout is not for it"
                assert llm.cancel("started")
                async with asyncio.timeout(30):
                    cancelled = await started
                assert cancelled.outputs[0].finish_reason == "cancelled"
            finally:
                hold.release.set()
            good = await last(llm, "good")
            assert len(good.outputs[0].token_ids) == 20
            stats = await asyncio.to_thread(client.stats)  # the engine has caught up
            assert stats[0] is not None
            assert (stats[0].num_running, stats[0].num_waiting) == (0, 0)

    asyncio.run(play())


def test_time_in_the_inbox_counts() -> None:
    now = 100.0
    model = FakeModel(FakeConfig(vocab_size=258, max_context=256))
    with EnginePool(model, EngineConfig(max_num_seqs=8), BackendLimits(num_cells=512), clock=lambda: now) as pool:
        begun, release = threading.Event(), threading.Event()

        def block(_: EngineCore) -> None:
            begun.set()
            release.wait(60)

        pool.cores[0].post(block)
        assert begun.wait(60)
        ends: list[End] = []
        ended = threading.Event()

        def listen(result: StepResult) -> None:
            ends.extend(result.ends.values())
            ended.set()

        pool.submit(Request("r", [1], Limits(timeout_s=5.0)), listen)
        now = 106.0
        release.set()
        assert ended.wait(60)
        assert ends == [End(FinishReason.TIMEOUT, "not done after 5.0 s")]


@pytest.mark.req("G18")
def test_a_request_that_its_core_refuses_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if the core is faster than the thread that submits it."""
    client, ended = make_client(), threading.Event()
    submit = client.pool.submit

    def refuse(_: Request) -> None:
        raise InvalidRequest("a reason")

    def submit_and_wait(*arguments: Any) -> int:
        index = submit(*arguments)
        assert ended.wait(60)
        return index

    monkeypatch.setattr(client.pool.cores[0].core, "add", refuse)
    monkeypatch.setattr(client.pool, "submit", submit_and_wait)
    client.submit(Request("refused", [1], Limits()), lambda _: ended.set())
    assert client._core_of == {}
    client.close()
    with pytest.raises(EngineDead):
        client.submit(Request("late", [1], Limits()), lambda _: None)
    assert client._core_of == {}
