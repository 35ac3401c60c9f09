"""A reader that stops reading: every other request is scheduled in the very same ticks as without it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from tokenmill import AsyncLLM, SamplingParams
from tokenmill.backends.fake import FakeConfig, FakeModel, Fault, FaultKind
from tokenmill.engine.client import ThreadClient
from tokenmill.engine.events import Event, Phase, RequestEvent, TickEvent
from tokenmill.entrypoints.options import EngineOptions
from tokenmill.outputs import RequestOutput
from tokenmill.pipeline.prompts import callers_name

NUM_READERS = 16
WAIT_S = 30.0


async def schedule(depth: int, *, one_stops_reading: bool) -> tuple[list[tuple[object, ...]], list[RequestOutput]]:
    """What the engine did, tick by tick, for sixteen streams that began together; and what the readers got."""
    ticks: list[tuple[object, ...]] = []

    def listen(event: Event) -> None:
        if isinstance(event, TickEvent):
            plan = event.plan
            ticks.append((plan.tick, plan.rows.tolist(), plan.counts.tolist(), plan.num_decode, event.num_running))
        elif isinstance(event, RequestEvent) and event.phase is Phase.ENDED:
            ticks.append((callers_name(event.request_id), event.tick, event.num_tokens))

    model = FakeModel(FakeConfig(vocab_size=256, depth=depth))
    options = EngineOptions(max_num_seqs=NUM_READERS + 1, kv_cache_tokens=8192)
    async with asyncio.timeout(WAIT_S), AsyncLLM(model, **options) as llm:
        client = llm._client
        assert isinstance(client, ThreadClient)
        start = Fault(FaultKind.STALL)
        client.pool.cores[0].core._executor.backend.faults.add(start)  # type: ignore[attr-defined]
        holder = asyncio.create_task(read(llm.generate("hold", SamplingParams(max_tokens=1), "hold")))
        await asyncio.to_thread(start.stalled.wait, WAIT_S)
        client.pool.subscribe(listen)
        streams = [
            llm.generate(f"stream {i}", SamplingParams(temperature=0, max_tokens=40 + i, ignore_eos=True), f"s{i}")
            for i in range(NUM_READERS)
        ]
        # All sixteen are in the inbox before the engine moves on: each generator submits when it is first awaited.
        first = [asyncio.ensure_future(anext(stream)) for stream in streams]
        await asyncio.sleep(0)
        start.release.set()
        await holder
        await asyncio.gather(*first)
        readers = streams[1:] if one_stops_reading else streams
        outputs = list(await asyncio.gather(*(read(stream) for stream in readers)))
        if one_stops_reading:  # it comes back at last, and nothing was lost
            outputs.insert(0, await read(streams[0]))
        return ticks, outputs


async def read(stream: AsyncIterator[RequestOutput]) -> RequestOutput:
    async for output in stream:
        last = output
    return last


@pytest.mark.req("G1", "R43")
@pytest.mark.parametrize("depth", [0, 1])
def test_the_others_tick_schedule_is_identical(depth: int) -> None:
    control, said = asyncio.run(schedule(depth, one_stops_reading=False))
    stuck, said_then = asyncio.run(schedule(depth, one_stops_reading=True))
    assert len(control) > 40
    assert stuck == control
    assert [out.outputs[0].token_ids for out in said] == [out.outputs[0].token_ids for out in said_then]
    assert all(out.finished for out in said_then)
