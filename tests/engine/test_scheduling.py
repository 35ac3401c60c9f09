"""Who runs when: order, chunks and tick time, fairness, quotas, queue limits and deadlines."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from tests.engine.helpers import (
    VOCAB,
    SimulatedClock,
    Transcript,
    alone,
    assert_clean,
    jain,
    make_engine,
    request,
    run,
    ticks_of,
    timed_engine,
)
from tokenmill.backends.fake import FakeBackend, FakeConfig, FakeModel
from tokenmill.config import EngineConfig
from tokenmill.engine.core import EngineCore
from tokenmill.engine.events import Event, Phase, RequestEvent, TickEvent
from tokenmill.engine.plan import Draft
from tokenmill.engine.policies import SHARE_ROWS_TICKS, Deadlines
from tokenmill.engine.request import Quota, Request, RequestState
from tokenmill.errors import ConfigError, InvalidRequest
from tokenmill.outputs import FinishReason

# -- chunks and tick time ---------------------------------------------------------------------------------------------


@pytest.mark.fault("O06")
@pytest.mark.req("R13", "R12", "G9")
@pytest.mark.parametrize(("depth", "at_once"), [(0, False), (1, False), (0, True)])
def test_a_long_prompt_never_stalls_the_others(depth: int, at_once: bool) -> None:
    """20,000 tokens beside eight that decode: every tick within the target, give or take the model's own error."""
    fake = {"num_cells": 40_000, "max_context": 32_768, "max_seqs": 32}
    engine, _ = timed_engine(depth, (0.004, 0.0004, 2e-8), fake, at_once=at_once, max_num_seqs=16, target_tick_ms=100)
    ticks = ticks_of(engine)
    for i in range(8):
        engine.add(request(f"d{i}", (i + 50, 1, 1), max_new_tokens=400))
    for _ in range(6):
        engine.step()
    long = request("long", tuple(i % VOCAB for i in range(20_000)), max_new_tokens=2)
    engine.add(long)
    begin = len(ticks)
    transcript = Transcript()
    while "long" not in transcript.reasons:
        transcript.add(engine.step())
    beside = [tick for tick in ticks[begin:] if tick.plan.num_decode >= 8]
    error = max(0.02, engine.scheduler.cost.error)
    assert error < 0.1, "the cost model does not know this machine"
    assert max(tick.step_s for tick in beside) <= 0.1 * (1 + error)
    assert max(tick.plan.num_prefill for tick in beside) <= 512
    assert sum(tick.plan.num_prefill for tick in ticks[begin:]) >= 20_000
    steady = [tick.step_s for tick in beside[len(beside) // 4 : -2] if tick.plan.num_prefill]
    assert min(steady) > 0.08, "chunks are smaller than the target allows"
    assert transcript.reasons["long"] is FinishReason.LENGTH
    assert not engine.scheduler.requests.keys() - {f"d{i}" for i in range(8)}


@pytest.mark.req("R13")
def test_where_decoding_alone_takes_the_target_prompts_get_a_share_of_the_time() -> None:
    """A large model on a slow machine: 8 that decode take 164 ms, and a prompt may take half as long again."""
    engine, _ = timed_engine(
        0, (0.1, 0.008, 0), {"num_cells": 8192, "max_context": 4096}, at_once=True, max_num_seqs=16, target_tick_ms=100
    )
    ticks = ticks_of(engine)
    for i in range(8):
        engine.add(request(f"d{i}", (i + 50, 1, 1), max_new_tokens=200))
    for _ in range(6):
        engine.step()
    for name in ("one", "two"):
        engine.add(request(name, tuple(i % VOCAB for i in range(100)), max_new_tokens=1))
    begin = len(ticks)
    transcript = Transcript()
    while not {"one", "two"} <= transcript.reasons.keys():
        transcript.add(engine.step())
    beside = [tick for tick in ticks[begin:] if tick.plan.num_decode == 8 and tick.plan.num_prefill]
    assert max(tick.step_s for tick in beside) <= 1.5 * 0.164 * 1.01, "both prompts together"
    assert len(beside) <= 200 / 10 + 2, "some ten tokens a step"


@pytest.mark.req("R13", "R14", "G9")
def test_chunks_grow_to_the_budget_when_nobody_decodes() -> None:
    engine = make_engine(fake={"num_cells": 4096, "max_context": 2048}, max_num_batched_tokens=700, prefill_chunk=100)
    ticks = ticks_of(engine)
    engine.add(request("long", tuple(i % VOCAB for i in range(1500)), max_new_tokens=1))
    run(engine)
    assert [tick.plan.num_tokens for tick in ticks] == [700, 700, 100]


DEVICES = {
    "slow CPU": (0.01, 0.005, 5e-8),
    "fast CPU": (0.002, 0.0003, 2e-9),
    "launch-bound": (0.15, 0.0005, 0.0),
}


def prefill_s(device: str, prompts: Sequence[int], **config: Any) -> tuple[float, list[TickEvent], EngineCore]:
    """How long a simulated device takes for prompts of these lengths, of which no two begin alike; and its steps."""
    fake = {"num_cells": 40_000, "max_context": 16_384, "max_seqs": 32}
    engine, clock = timed_engine(0, DEVICES[device], fake, at_once=True, max_num_seqs=16, **config)
    ticks = ticks_of(engine)
    for i, count in enumerate(prompts):
        engine.add(request(f"p{i}", tuple((i + j) % VOCAB for j in range(count)), max_new_tokens=1))
    began = clock.now
    run(engine)
    return clock.now - began, ticks, engine


@pytest.mark.req("R13", "G9")
@pytest.mark.parametrize("device", DEVICES)
def test_prompt_steps_are_bounded_in_time_when_nobody_decodes(device: str) -> None:
    """8,000 tokens, of which an unbounded step takes 2,048: 10 s on a slow CPU."""
    unbounded_s, free, _ = prefill_s(device, [8000])
    bounded_s, ticks, _ = prefill_s(device, [8000], max_step_ms=500)
    assert max(tick.plan.num_tokens for tick in free) == 2048
    assert max(tick.step_s for tick in ticks) <= 0.5 * 1.02
    if device != "launch-bound":  # there, each of the more numerous steps costs as much again
        assert bounded_s <= unbounded_s / 0.95


@pytest.mark.req("R13", "G9")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(4))
def test_many_prompts_together_stay_within_the_bound(device: str, seed: int) -> None:
    choose = random.Random(seed)
    prompts = [choose.choice([5, 60, 400, 3000]) for _ in range(12)]
    _, ticks, _ = prefill_s(device, prompts, max_step_ms=500)
    assert max(tick.step_s for tick in ticks if not tick.plan.num_decode) <= 0.5 * 1.1
    assert sum(tick.plan.num_tokens for tick in ticks) == sum(prompts)


@pytest.mark.req("R13", "G2")
def test_a_cancel_in_a_long_prompt_waits_for_one_bounded_step() -> None:
    engine, clock = timed_engine(
        0, DEVICES["slow CPU"], {"num_cells": 40_000, "max_context": 16_384}, at_once=True, max_step_ms=500
    )
    for after in (1, 5, 20):  # steps
        engine.add(request("long", tuple((after + i) % VOCAB for i in range(8000)), max_new_tokens=1))
        for _ in range(after):
            engine.step()
        asked_at = clock.now
        engine.step()  # the cancel comes while this one is computed
        engine.cancel("long")
        assert engine.step().ends
        assert clock.now - asked_at <= 0.6


@pytest.mark.req("R13", "R14")
def test_a_second_chunk_in_one_step_adds_to_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody decodes: each of two prompts gets its chunk, and the first one the rest of the budget."""
    engine = make_engine(fake={"num_cells": 4096, "max_context": 2048}, max_num_batched_tokens=700, prefill_chunk=100)
    drafts: list[Draft] = []
    seal = engine.scheduler._seal
    monkeypatch.setattr(engine.scheduler, "_seal", lambda draft: (drafts.append(draft), seal(draft))[1])
    ticks = ticks_of(engine)
    for name, token in (("long", 1), ("other", 2)):
        engine.add(request(name, tuple([token] * 1000), max_new_tokens=1))
    engine.step()
    engine.step()
    assert [tick.plan.counts.tolist() for tick in ticks] == [[600, 100], [400, 300]]
    pieces = [[(0, 600), (0, 100)], [(600, 400), (100, 300)]]
    for tick, draft, given in zip(ticks, drafts, pieces, strict=True):
        assert draft.budget == 0
        assert draft.num_tokens == 700
        assert draft.cells == sum(engine.kv.cells_for(count) for _, count in given)
        assert tick.plan.attention == sum(count * (begin + count / 2) for begin, count in given)
        for row, (begin, count) in enumerate(given):
            positions = tick.plan.batch.pos[tick.plan.batch.seq_ids[:, 0] == engine.scheduler.rows.seq[row]]
            assert positions.tolist() == list(range(begin, begin + count))
    run(engine)


@pytest.mark.req("R18")
def test_a_request_has_a_quota_of_tokens_a_step_and_of_context() -> None:
    engine = make_engine()
    ticks = ticks_of(engine)
    engine.add(request("a", tuple(range(10)), max_new_tokens=50, max_tokens_per_step=4, max_context=13))
    transcript = run(engine)
    assert [tick.plan.num_tokens for tick in ticks][:3] == [4, 4, 2]
    assert transcript.tokens["a"] == alone(tuple(range(10)), 3)
    assert transcript.reasons["a"] is FinishReason.LENGTH
    with pytest.raises(InvalidRequest, match="is 13 tokens, but 14 are needed: 13 of the prompt"):
        engine.add(request("b", tuple(range(13)), max_context=13))


# -- rows and order ---------------------------------------------------------------------------------------------------


@pytest.mark.req("R11", "R17")
def test_several_start_in_one_tick_and_a_freed_place_is_filled_in_the_next() -> None:
    engine = make_engine(max_num_seqs=3)
    for i in range(5):
        engine.add(request(f"r{i}", (i, 1), max_new_tokens=2 + (i > 0)))
    engine.step()
    assert [slot.request_id for slot in engine.slots()] == ["r0", "r1", "r2"]
    outputs = engine.step()
    assert [output.request_id for output in outputs if output.is_finished] == ["r0"]
    engine.step()
    assert {slot.request_id for slot in engine.slots()} - {None} >= {"r3"}
    run(engine)


@pytest.mark.req("R50")
def test_slots_say_who_is_idle_prefilling_or_generating() -> None:
    engine = make_engine(max_num_seqs=3, max_num_batched_tokens=8)
    engine.add(request("short", (1, 2), max_new_tokens=5))
    engine.add(request("long", tuple(range(20)), max_new_tokens=2))
    engine.step()
    states = {slot.request_id: (slot.state, slot.num_computed) for slot in engine.slots()}
    assert states == {"short": ("generating", 2), "long": ("prefilling", 6), None: ("idle", 0)}
    run(engine)
    assert {slot.state for slot in engine.slots()} == {"idle"}


@pytest.mark.req("R16")
def test_everybody_who_decodes_gets_one_token_a_tick() -> None:
    engine = make_engine(max_num_seqs=6, max_num_batched_tokens=6)
    for i in range(6):
        engine.add(request(f"r{i}", (i,), max_new_tokens=10))
    engine.add(request("long", tuple(range(50)), max_new_tokens=1))
    transcript = Transcript()
    for tick in range(1, 10):
        transcript.add(engine.step())
        assert [len(transcript.tokens[f"r{i}"]) for i in range(6)] == [tick] * 6
    run(engine, transcript)
    assert transcript.tokens["long"] == alone(tuple(range(50)), 1)


@pytest.mark.req("R15")
def test_the_queue_is_first_in_first_out_and_priority_goes_before() -> None:
    engine = make_engine(max_num_seqs=1)
    started: list[str] = []

    def note(event: Event) -> None:
        if isinstance(event, RequestEvent) and event.phase.value == "prefill":
            started.append(event.request_id)

    engine.events.subscribe(note)
    for i in range(4):
        engine.add(request(f"r{i}", (i,), max_new_tokens=2))
    engine.add(request("urgent", (9,), max_new_tokens=2, priority=-1))
    run(engine)
    assert started == ["urgent", "r0", "r1", "r2", "r3"]


@pytest.mark.fault("O07")
@pytest.mark.req("R16")
def test_priority_never_starves_anyone_past_the_bound() -> None:
    """One row, urgent requests without end: the humble one starts max_wait_ticks plus one service time later."""
    max_wait, service = 20, 3
    engine = make_engine(max_num_seqs=1, max_wait_ticks=max_wait)
    engine.add(request("humble", (1, 2), max_new_tokens=1, priority=5))
    transcript = Transcript()
    for tick in range(200):
        engine.add(request(f"urgent{tick}", (3, tick % VOCAB), max_new_tokens=service))
        transcript.add(engine.step())
        if "humble" in transcript.reasons:
            break
    assert transcript.reasons["humble"] is FinishReason.LENGTH
    assert max_wait < engine.scheduler.tick <= max_wait + service + 2


@pytest.mark.req("R16")
def test_a_class_that_had_its_turn_is_not_aged_any_more() -> None:
    """One row: the second humble request waits for its own turn, however long both have been there."""
    engine = make_engine(max_num_seqs=1, max_wait_ticks=20)
    for name in ("humble0", "humble1"):
        engine.add(request(name, (1, 2), max_new_tokens=1, priority=5))
    transcript = Transcript()
    ended: list[int] = []
    for tick in range(100):
        engine.add(request(f"urgent{tick}", (3, tick % VOCAB), max_new_tokens=3))
        transcript.add(engine.step())
        ended += [tick] * (len(ended) < sum(f"humble{i}" in transcript.reasons for i in range(2)))
    assert len(ended) == 2
    assert ended[1] - ended[0] > 20


@pytest.mark.slow
@pytest.mark.req("R16")
def test_one_hostile_key_does_not_hurt_the_others() -> None:
    """Five keys, one with ten times the load: the others get equal shares of the tokens, and it no more than they."""
    fake = {"num_cells": 8192, "max_context": 512, "max_seqs": 64}
    engine, clock = timed_engine(0, (0.002, 0.0002, 0.0), fake, max_num_seqs=8, max_queue=1000)
    served: Counter[str] = Counter()
    keys = ["hostile", "a", "b", "c", "d"]
    sent: Counter[str] = Counter()
    live: dict[str, Request] = {}
    while clock.now < 20:
        for key in keys:
            waiting = sum(name.startswith(key) for name in live)
            while waiting < (40 if key == "hostile" else 4):
                name = f"{key}-{sent[key]}"
                prompt = tuple((sent[key] * 7 + i) % VOCAB for i in range(40 if key == "hostile" else 20))
                live[name] = request(name, prompt, max_new_tokens=16, key=key, namespace=name)
                engine.add(live[name])
                sent[key] += 1
                waiting += 1
        for output in engine.step():
            if output.is_finished:
                done = live.pop(output.request_id)
                served[done.hints.key] += len(done.tokens)
    others = [served[key] for key in keys[1:]]
    assert jain(others) >= 0.95, served
    assert served["hostile"] <= 1.1 * max(others), served


@pytest.mark.req("R16")
def test_what_a_key_had_while_it_was_alone_is_not_held_against_it() -> None:
    """Nobody is there for a moment. The key that comes then goes no further before the old one than if it had been."""
    engine = make_engine(max_num_seqs=1, prefix_caching=False)
    for i in range(20):
        engine.add(request(f"old {i}", (1, i), max_new_tokens=8, key="old"))
    run(engine)
    started: list[str] = []

    def note(event: Event) -> None:
        if isinstance(event, RequestEvent) and event.phase is Phase.PREFILL:
            started.append(event.key)

    engine.events.subscribe(note)
    for i in range(6):
        for key in ("new", "old"):
            engine.add(request(f"{key} later {i}", (2, i), max_new_tokens=8, key=key))
    run(engine)
    assert started == ["new", "old"] * 6


@pytest.mark.req("R19")
def test_a_preempted_request_keeps_its_place() -> None:
    """KV for about two: the last one in order gives way, waits at its old place, and says the same in the end."""
    fake = {"num_cells": 72, "block_size": 4, "max_context": 64, "max_seqs": 8}
    engine = make_engine(fake=fake, max_num_seqs=4, admission_margin=0)
    requests = [request(f"r{i}", tuple([10 * i + 1] * 12), max_new_tokens=24) for i in range(3)]
    for one in requests:
        engine.add(one)
    transcript = run(engine)
    assert sum(one.num_preemptions for one in requests) > 0
    assert requests[0].num_preemptions == 0
    for one in requests:
        assert transcript.tokens[one.request_id] == alone(tuple(one.tokens[:12]), 24)
    assert_clean(engine)


@pytest.mark.req("R15", "R19")
def test_a_preempted_request_of_low_priority_does_not_overtake_a_high_one() -> None:
    """What ages is waiting: the time for which it ran does not count."""
    engine = make_engine(max_num_seqs=1, max_wait_ticks=10)
    low = request("low", (5,), max_new_tokens=40, priority=5)
    high = request("high", (6,), max_new_tokens=40, priority=0)
    engine.add(low)
    for _ in range(30):
        engine.step()
    engine.add(high)
    engine.scheduler._preempt(low)
    transcript = Transcript()
    transcript.add(engine.step())
    assert (high.state, low.state) == (RequestState.RUNNING, RequestState.PREEMPTED)
    assert run(engine, transcript).reasons == dict.fromkeys(["high", "low"], FinishReason.LENGTH)
    assert low.output == alone((5,), 40)


@pytest.mark.req("R16")
def test_a_key_that_was_idle_earns_no_credit() -> None:
    engine = make_engine()
    fair = engine.scheduler.order.fair
    engine.add(request("stays", (1,), max_new_tokens=200, key="busy"))
    engine.add(request("leaves", (2,), max_new_tokens=5, key="idle"))
    for _ in range(60):
        engine.step()
    engine.add(request("comes back", (3,), max_new_tokens=5, key="idle"))
    assert fair.served("idle") == fair.served("busy") == 60


@pytest.mark.req("R16")
def test_a_key_keeps_what_it_was_served_beyond_the_others_while_it_is_away() -> None:
    """Also while many other keys come and go, and those that are not ahead are forgotten."""
    engine = make_engine(max_num_seqs=4)
    fair = engine.scheduler.order.fair
    engine.add(request("stays", (1,), max_new_tokens=200, key="behind"))
    engine.add(request("takes much", tuple([2] * 150), max_new_tokens=2, key="ahead"))
    engine.step()
    engine.step()
    for number in range(40):
        engine.add(request(f"guest {number}", (number,), max_new_tokens=1, key=f"guest {number}"))
        engine.step()
    engine.add(request("comes back", (3,), max_new_tokens=2, key="ahead"))
    assert fair.served("ahead") == 151 > fair.served("behind")


@pytest.mark.req("R19")
def test_a_prompt_that_needs_room_takes_it_from_the_last_prompt_in_order() -> None:
    """Decodes use up the cells while three prompts are on their way; in ten sizes of memory, so that any runs short."""
    for num_cells in range(86, 96):
        fake = {"num_cells": num_cells, "block_size": 1, "max_context": 64, "max_seqs": 8}
        engine = make_engine(fake=fake, max_num_seqs=6, admission_margin=0, prefix_caching=False)
        preempted: list[str] = []

        def note(event: Event, preempted: list[str] = preempted) -> None:
            if isinstance(event, RequestEvent) and event.phase is Phase.PREEMPTED:
                preempted.append(event.request_id)

        engine.events.subscribe(note)
        for i in range(3):
            engine.add(request(f"decodes {i}", (1, 2), max_new_tokens=30))
        engine.add(request("first", range(40), max_new_tokens=2, max_tokens_per_step=3, priority=1))
        engine.add(request("second", range(20), max_new_tokens=2, max_tokens_per_step=1, priority=2))
        engine.add(request("third", range(20), max_new_tokens=2, max_tokens_per_step=1, priority=3))
        run(engine)
        assert preempted[:2] == ["third", "second"], num_cells


# -- limits -----------------------------------------------------------------------------------------------------------


@pytest.mark.req("R15", "G8")
def test_a_full_queue_refuses_with_a_reason() -> None:
    engine = make_engine(max_num_seqs=1, max_queue=2, max_queue_tokens=30)
    engine.add(request("runs", (1,), max_new_tokens=5))
    engine.step()
    engine.add(request("w1", (2,), max_new_tokens=1))
    engine.add(request("too many tokens", tuple([3] * 40), max_new_tokens=1))
    engine.add(request("w2", (4,), max_new_tokens=1))
    engine.add(request("one too many", (5,), max_new_tokens=1))
    transcript = run(engine)
    assert transcript.reasons["too many tokens"] is transcript.reasons["one too many"] is FinishReason.OVERLOAD
    assert transcript.errors["too many tokens"] == "41 prompt tokens would be queued, the limit is 30"
    assert transcript.errors["one too many"] == "2 requests are queued, the limit is 2"
    assert transcript.reasons["w2"] is FinishReason.LENGTH
    assert_clean(engine)


@pytest.mark.req("R15", "G8")
def test_a_key_that_fills_the_queue_gives_way_to_others() -> None:
    """Its newest requests are refused, until all keys have equal shares, rows included; each pays for its own."""
    engine = make_engine(max_num_seqs=1, max_queue=4)
    engine.add(request("runs", (1,), max_new_tokens=3, key="a"))
    engine.step()
    for i in range(6):
        engine.add(request(f"a{i}", (i + 1,), max_new_tokens=1, key="a"))
    for i in range(3):
        engine.add(request(f"b{i}", (i + 10,), max_new_tokens=1, key="b"))
    engine.add(request("c0", (20,), max_new_tokens=1, key="c"))
    transcript = run(engine)
    refused = [name for name, reason in transcript.reasons.items() if reason is FinishReason.OVERLOAD]
    assert refused == ["a4", "a5", "a3", "a2", "b2", "a1"]
    assert transcript.errors["a3"] == "4 requests are queued, the limit is 4, shared between API keys"
    assert_clean(engine)


@pytest.mark.req("R15", "G8")
def test_no_request_gives_way_where_that_would_not_make_room() -> None:
    engine = make_engine(max_num_seqs=1, max_queue=4, max_queue_tokens=30)
    engine.add(request("runs", (1,), max_new_tokens=3, key="a"))
    engine.step()
    for i in range(4):
        engine.add(request(f"a{i}", (i + 1,), max_new_tokens=1, key="a"))
    engine.add(request("long", tuple([3] * 29), max_new_tokens=1, key="b"))
    transcript = run(engine)
    assert [name for name, reason in transcript.reasons.items() if reason is FinishReason.OVERLOAD] == ["long"]


# -- quotas of a key --------------------------------------------------------------------------------------------------


@pytest.mark.req("R18", "G8")
def test_a_key_runs_no_more_requests_than_its_quota() -> None:
    """Free rows stay free for others, and each request runs as soon as one of its own key's has ended."""
    engine = make_engine(max_num_seqs=4)
    for i in range(5):
        engine.add(request(f"a{i}", (i + 1,), max_new_tokens=4, key="a", quota=Quota(max_rows=2)))
    engine.add(request("b", (9,), max_new_tokens=4, key="b"))
    transcript, most = Transcript(), 0
    while engine.has_work:
        transcript.add(engine.step())
        most = max(most, engine.scheduler.order.rows_by_key()["a"])
    assert most == 2
    assert transcript.reasons == dict.fromkeys(["b", *(f"a{i}" for i in range(5))], FinishReason.LENGTH)
    assert_clean(engine)


@pytest.mark.req("R15", "G8")
def test_a_key_queues_no_more_requests_than_its_quota() -> None:
    """Its own requests are refused, and those of others are not; a row that it may take counts as a place."""
    engine = make_engine(max_num_seqs=2, max_queue=100)
    quota = Quota(max_rows=1, max_queued=2)
    for i in range(5):
        engine.add(request(f"a{i}", (i + 1,), max_new_tokens=2, key="a", quota=quota))
    engine.add(request("b", (9,), max_new_tokens=2, key="b"))
    transcript = run(engine)
    refused = [name for name, reason in transcript.reasons.items() if reason is FinishReason.OVERLOAD]
    assert refused == ["a3", "a4"]
    assert transcript.errors["a3"] == "3 requests of this API key are queued, its limit is 2"
    assert_clean(engine)


@pytest.mark.req("R16", "G8")
def test_rows_are_divided_between_keys_while_all_are_taken() -> None:
    """One key has taken all rows: others get theirs within ticks, up to equal shares, and it loses no token."""
    engine = make_engine(max_num_seqs=4)
    quota = Quota(yields_rows=True)
    for i in range(6):
        engine.add(request(f"a{i}", (i + 1,), max_new_tokens=120, key="a", quota=quota))
    transcript = Transcript()
    for _ in range(4):
        transcript.add(engine.step())
    assert engine.scheduler.order.rows_by_key() == {"a": 4}
    for i in range(6):
        engine.add(request(f"b{i}", (i + 11,), max_new_tokens=120, key="b", quota=quota))
    for _ in range(3 * SHARE_ROWS_TICKS):
        transcript.add(engine.step())
    assert engine.scheduler.order.rows_by_key() == {"a": 2, "b": 2}
    for _ in range(3 * SHARE_ROWS_TICKS):
        transcript.add(engine.step())
        assert engine.scheduler.order.rows_by_key() == {"a": 2, "b": 2}  # and nobody's changes hands any more
    run(engine, transcript)
    assert {len(tokens) for tokens in transcript.tokens.values()} == {120}
    assert_clean(engine)


@pytest.mark.req("R15", "G8")
def test_requests_that_have_yielded_their_row_count_as_their_keys_in_a_full_queue() -> None:
    """And they leave the places of new requests to others: the queue has four of these."""
    engine = make_engine(max_num_seqs=4, max_queue=4)
    quota = Quota(yields_rows=True)
    for i in range(5):
        engine.add(request(f"a{i}", (i + 1,), max_new_tokens=200, key="a", quota=quota))
    transcript = Transcript()
    for key in "bcd":
        engine.add(request(key, (9,), max_new_tokens=200, key=key, quota=quota))
        for _ in range(2 * SHARE_ROWS_TICKS):
            transcript.add(engine.step())
    assert engine.scheduler.order.rows_by_key() == dict.fromkeys("abcd", 1)
    for i in range(5):
        engine.add(request(f"e{i}", (10 + i,), max_new_tokens=2, key="e", quota=quota))
    run(engine, transcript)
    refused = [name for name, reason in transcript.reasons.items() if reason is FinishReason.OVERLOAD]
    assert refused == ["a4", "e4"], "a4 is the last of five of its key's, three of which have yielded their row"
    assert_clean(engine)


@pytest.mark.req("R15", "G8")
def test_a_key_with_all_the_rows_takes_no_queue_slot_from_others() -> None:
    """Whatever it sends: its running requests count, too."""
    engine = make_engine(max_num_seqs=4, max_queue=4)
    for i in range(4):
        engine.add(request(f"a{i}", (i + 1,), max_new_tokens=50, key="a"))
    transcript = Transcript()
    transcript.add(engine.step())
    for key in "bc":
        for i in range(2):
            engine.add(request(f"{key}{i}", (i + 5,), max_new_tokens=2, key=key))
    for i in range(4, 8):
        engine.add(request(f"a{i}", (i + 1,), max_new_tokens=2, key="a"))
    run(engine, transcript)
    refused = [name for name, reason in transcript.reasons.items() if reason is FinishReason.OVERLOAD]
    assert refused == ["a4", "a5", "a6", "a7"]
    assert_clean(engine)


@pytest.mark.req("R16", "G8")
def test_no_stream_is_interrupted_for_a_request_that_soon_gets_a_row() -> None:
    engine = make_engine(max_num_seqs=2)
    quota, transcript = Quota(yields_rows=True), Transcript()
    for i in range(20):
        engine.add(request(f"a{i}", (i + 1,), max_new_tokens=SHARE_ROWS_TICKS // 2, key="a", quota=quota))
    for i in range(8):
        for _ in range(5):
            transcript.add(engine.step())
            assert not any(one.num_preemptions for one in engine.scheduler.requests.values())
        engine.add(request(f"b{i}", (9,), max_new_tokens=2, key="b", quota=quota))
    run(engine, transcript)
    assert set(transcript.reasons.values()) == {FinishReason.LENGTH}


@pytest.mark.req("R16", "G8")
@pytest.mark.parametrize(("yields_rows", "priority"), [(False, 0), (True, 1)], ids=["not shared", "lower priority"])
def test_a_row_is_not_yielded(yields_rows: bool, priority: int) -> None:
    engine = make_engine(max_num_seqs=2)
    for i in range(2):
        engine.add(request(f"a{i}", (i + 1,), max_new_tokens=60, key="a", quota=Quota(yields_rows=yields_rows)))
    engine.step()
    engine.add(request("b", (9,), max_new_tokens=2, key="b", priority=priority))
    for _ in range(3 * SHARE_ROWS_TICKS):
        engine.step()
        assert engine.scheduler.order.rows_by_key() == {"a": 2}


@pytest.mark.req("R15")
def test_without_a_queue_a_free_row_can_still_be_had() -> None:
    engine = make_engine(max_num_seqs=1, max_queue=0)
    engine.add(request("a", (1,), max_new_tokens=3))
    engine.add(request("b", (2,), max_new_tokens=3))
    assert run(engine).reasons == {"a": FinishReason.LENGTH, "b": FinishReason.OVERLOAD}


@pytest.mark.req("R15")
def test_time_limits_end_waiting_and_running_requests() -> None:
    clock = SimulatedClock()
    engine = make_engine(max_num_seqs=1, queue_timeout_s=5, clock=clock)
    engine.add(request("slow", (1,), max_new_tokens=100, timeout_s=8))
    engine.add(request("waits", (2,), max_new_tokens=1))
    engine.add(request("hurries", (3,), max_new_tokens=1, timeout_s=2))
    transcript = Transcript()
    ended: dict[str, float] = {}
    while engine.has_work:
        clock.now += 0.5
        transcript.add(engine.step())
        for name in transcript.reasons:
            ended.setdefault(name, clock.now)
    assert set(transcript.reasons.values()) == {FinishReason.TIMEOUT}
    assert ended == {"hurries": 2.0, "waits": 5.0, "slow": 8.0}
    assert transcript.errors["waits"] == "not started after 5 s"
    assert_clean(engine)


@pytest.mark.req("R15", "R19")
def test_the_queue_timeout_does_not_end_a_preempted_request() -> None:
    clock = SimulatedClock()
    engine = make_engine(max_num_seqs=1, queue_timeout_s=5, clock=clock)
    one = request("one", (1, 2), max_new_tokens=20)
    engine.add(one)
    for _ in range(4):
        engine.step()
    engine.scheduler._preempt(one)
    clock.now = 6.0
    run(engine)
    assert one.finish_reason is FinishReason.LENGTH
    assert one.output == alone((1, 2), 20)


@pytest.mark.req("R15")
def test_deadlines_ring_in_order_after_those_of_ended_requests_were_pruned() -> None:
    """The earliest ones belong to requests that have ended; those behind them in the heap must come up."""
    deadlines = Deadlines()
    requests = [request(f"r{number}", (1,)) for number in range(80)]
    for arrival, one in enumerate(requests):
        one.arrival = arrival

    def due(arrival: int) -> float:
        return float((arrival * 37) % 101)

    for arrival, one in enumerate(requests[:64]):
        deadlines.set(due(arrival), one, until_started=False)
    for arrival, one in enumerate(requests[:64]):
        if due(arrival) < 20 or arrival % 3 == 0:
            one.finish(FinishReason.CANCELLED)
    for arrival, one in enumerate(requests[64:], 64):
        deadlines.set(due(arrival), one, until_started=False)
    assert len(deadlines) < 64
    left = sorted((due(one.arrival), one.arrival) for one in requests if not one.is_finished)
    for now in (10.0, 30.0, 60.0, 200.0):
        rang = [one.arrival for one, _ in deadlines.ringing(now)]
        assert rang == [arrival for at, arrival in left if at <= now]
        left = [(at, arrival) for at, arrival in left if at > now]
    assert not left


@pytest.mark.parametrize(
    ("settings", "saying"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs must be at least 1, not 0"),
        ({"max_queue": -1}, "max_queue must be non-negative"),
        ({"queue_timeout_s": 0}, "queue_timeout_s must be positive"),
        ({"target_tick_ms": 0}, "target_tick_ms must be positive"),
        ({"max_num_batched_tokens": 7}, "max_num_batched_tokens 7 < max_num_seqs 8"),
        ({"max_num_seqs": 17}, "max_num_seqs 17 > the backend's 16 sequences"),
        ({"max_model_len": 257}, "max_model_len 257 > 256: the model's context is 256"),
    ],
)
def test_wrong_settings_are_named(settings: dict[str, Any], saying: str) -> None:
    with pytest.raises(ConfigError, match=saying):
        make_engine(**settings)


def test_depth_must_be_one_the_backend_has() -> None:
    with pytest.raises(ConfigError, match="depth must be 0, 1 or None"):
        EngineConfig(depth=2)
    with pytest.raises(ConfigError, match="depth 1 > the backend's 0"):
        EngineCore(FakeBackend(), FakeModel().info, EngineConfig(depth=1))
    engine = EngineCore(FakeBackend(FakeConfig(depth=1)), FakeModel().info, EngineConfig(depth=0))
    assert engine.depth == 0


@pytest.mark.parametrize(
    ("options", "saying"),
    [
        ({"prompt": ()}, "the prompt is empty"),
        ({"prompt": (1,), "max_new_tokens": 0}, "max_new_tokens must be at least 1"),
        ({"prompt": (1,), "min_new_tokens": -1}, "min_new_tokens must be non-negative"),
        ({"prompt": (1,), "timeout_s": 0.0}, "timeout_s must be positive"),
        ({"prompt": tuple([1] * 256)}, "length is 256 tokens, but 257 are needed"),
    ],
)
def test_impossible_requests_are_named(options: dict[str, Any], saying: str) -> None:
    engine = make_engine()
    with pytest.raises(InvalidRequest, match=saying):
        engine.add(request("r", **options))
    engine.add(request("twice", (1,)))
    with pytest.raises(InvalidRequest, match="twice is already running"):
        engine.add(request("twice", (1,)))
    run(engine)
    assert_clean(engine)


def test_sequences_come_back_in_the_order_they_were_added() -> None:
    engine = make_engine()
    prompts = [(5, 6), (1,), (2, 3, 4)]
    names = [engine.add_sequence(prompt, max_new_tokens=4) for prompt in prompts]
    assert len(set(names)) == 3
    assert engine.run_until_complete() == [alone(prompt, 4) for prompt in prompts]
    assert engine.run_until_complete() == []
    first = alone((5, 6), 4)
    engine.add_sequence((5, 6), max_new_tokens=4, eos_token_id=first[1])
    assert engine.run_until_complete() == [first[:2]]


@pytest.mark.slow
@pytest.mark.req("G11")
def test_nothing_is_kept_of_ended_requests() -> None:
    """Ten thousand requests with far deadlines and many keys: the books are as small as after the first hundred."""
    engine = make_engine(max_num_seqs=8, queue_timeout_s=3600)
    for i in range(10_000):
        engine.add(request(f"r{i}", (i % 50, i % 7), max_new_tokens=1, key=f"key{i}", timeout_s=3600))
        engine.step()
    run(engine)
    scheduler = engine.scheduler
    assert not scheduler.requests
    assert len(scheduler.deadlines) <= 128
    assert len(scheduler.order.fair._served) <= 32
    assert len(scheduler.order._live) == len(scheduler.order._last_start) == 0
    assert engine.kv.num_parked <= 16
    assert_clean(engine)
