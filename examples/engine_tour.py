"""The engine at work on the fake backend, tick by tick: continuous batching, chunked prefill, shared prefixes."""

from __future__ import annotations

from tokenmill.backends.fake import FakeConfig, FakeModel
from tokenmill.config import EngineConfig
from tokenmill.contract import BackendLimits
from tokenmill.engine.core import EngineCore
from tokenmill.engine.events import Event, TickEvent
from tokenmill.engine.request import Limits, Request

SYSTEM = list(range(40))


def show_tick(engine: EngineCore, tick: TickEvent) -> None:
    plan = tick.plan
    strip = "#" * plan.num_decode + "." * plan.num_prefill
    slots = " ".join(f"{slot.request_id}:{slot.state[0]}" for slot in engine.slots() if slot.request_id)
    print(f"  {plan.tick:3} |{strip:<48}| {tick.num_waiting:2} waiting, {tick.free_cells:4} cells free  {slots}")


def main() -> None:
    model = FakeModel(FakeConfig(vocab_size=100, max_context=256, block_size=8))
    backend = model.new_backend(BackendLimits(num_cells=512, max_seqs=16))
    config = EngineConfig(max_num_seqs=4, max_num_batched_tokens=48, prefill_chunk=24)
    engine = EngineCore(backend, model.info, config)

    def listen(event: Event) -> None:
        if isinstance(event, TickEvent):
            show_tick(engine, event)

    engine.events.subscribe(listen)
    print("Six requests, four rows, one system prompt of 40 tokens. # decode, . prefill; p prefilling, g generating.")
    requests = [Request(f"r{i}", [*SYSTEM, 50 + i], Limits(max_new_tokens=5 + 2 * i)) for i in range(6)]
    for request in requests:
        engine.add(request)
    while engine.has_work:
        engine.step()
    print()
    for request in requests:
        print(f"  {request.request_id}: {request.num_cached:2} prompt tokens reused, says {request.output}")

    print("\nThe next turn of r0 computes only what is new:")
    turn = Request("turn", [*requests[0].tokens, 77, 78], Limits(max_new_tokens=4))
    engine.add(turn)
    while engine.has_work:
        engine.step()
    print(f"  turn: {turn.num_cached} of {turn.num_prompt} prompt tokens reused, says {turn.output}")
    engine.check_integrity()
    engine.close()


if __name__ == "__main__":
    main()
