"""What the engine tells: one event a tick, one a change; timelines whose phases sum to the wall time."""

from __future__ import annotations

import pytest

from tests.engine.helpers import SimulatedClock, TimedBackend, make_engine, request, run
from tokenmill.backends.fake import FakeConfig, FakeModel
from tokenmill.config import EngineConfig
from tokenmill.engine.core import EngineCore
from tokenmill.engine.events import Event, Phase, RequestEvent, TickEvent
from tokenmill.engine.request import ENDINGS, FINISHED, TRANSITIONS, RequestState
from tokenmill.engine.timeline import Timelines
from tokenmill.errors import IllegalTransition
from tokenmill.outputs import FinishReason


@pytest.mark.req("R42")
@pytest.mark.parametrize("depth", [0, 1])
def test_every_tick_and_every_change_is_told_once(depth: int) -> None:
    engine = make_engine(depth=depth, max_num_seqs=2)
    events: list[Event] = []
    unsubscribe = engine.events.subscribe(events.append)
    for i in range(3):
        engine.add(request(f"r{i}", (i, 1, 2), max_new_tokens=3))
    run(engine)
    phases = {
        f"r{i}": [e.phase for e in events if isinstance(e, RequestEvent) and e.request_id == f"r{i}"] for i in range(3)
    }
    assert all(told == [Phase.QUEUED, Phase.PREFILL, Phase.DECODE, Phase.ENDED] for told in phases.values())
    ticks = [event for event in events if isinstance(event, TickEvent)]
    assert len({tick.plan.tick for tick in ticks}) == len(ticks)
    assert sum(tick.plan.num_tokens for tick in ticks) == sum(len(tick.plan.batch) for tick in ticks)
    assert ticks[0].plan.counts.tolist() == [3, 3]
    assert ticks[0].num_waiting == 1
    unsubscribe()
    engine.add(request("unheard", (1,), max_new_tokens=1))
    before = len(events)
    run(engine)
    assert len(events) == before


@pytest.mark.req("R42")
@pytest.mark.parametrize("depth", [0, 1])
def test_the_phases_of_a_timeline_sum_to_the_wall_time(depth: int) -> None:
    clock = SimulatedClock()
    config = FakeConfig(vocab_size=64, num_cells=72, block_size=4, max_context=64, max_seqs=8, depth=depth)
    backend = TimedBackend(config, clock, (0.01, 0.001, 0.0))
    engine = EngineCore(backend, FakeModel(config).info, EngineConfig(max_num_seqs=4, admission_margin=0), clock)
    timelines = Timelines(keep=3)
    engine.events.subscribe(timelines)
    requests = [request(f"r{i}", tuple([10 * i + 1] * 12), max_new_tokens=24) for i in range(4)]
    for one in requests:
        engine.add(one)
        clock.now += 0.5
    run(engine)
    assert len(timelines) == 3, "ended requests are not kept for ever"
    preempted = 0.0
    for one in requests:
        timeline = timelines.get(one.request_id)
        if timeline is None:
            continue
        assert timeline.spans[0].begin == one.arrived_at
        assert sum(span.seconds for span in timeline.spans) == pytest.approx(timeline.wall_s)
        assert sum(timeline.seconds(phase) for phase in Phase) == pytest.approx(timeline.wall_s)
        assert timeline.finish_reason is FinishReason.LENGTH
        assert timeline.num_tokens == 36
        preempted += timeline.seconds(Phase.PREEMPTED)
    assert preempted > 0


@pytest.mark.req("B4")
@pytest.mark.parametrize("depth", [0, 1])
def test_a_timeline_tells_the_prompts_of_others_from_its_own_steps(depth: int) -> None:
    """A token takes 1 ms and nothing else takes time, so that a timeline can be told to the token."""
    clock = SimulatedClock()
    config = FakeConfig(vocab_size=64, num_cells=512, block_size=4, max_context=256, max_seqs=4, depth=depth)
    backend = TimedBackend(config, clock, (0.0, 0.001, 0.0))
    engine = EngineCore(backend, FakeModel(config).info, EngineConfig(max_num_seqs=2, prefill_chunk=16), clock)
    timelines = Timelines()
    engine.events.subscribe(timelines)
    talks = request("talks", (1, 2, 3, 4), max_new_tokens=40)
    long = request("long", tuple(range(5, 60)) * 2, max_new_tokens=2)
    engine.add(talks)
    while len(talks.tokens) < 8:
        engine.step()
    engine.add(long)
    run(engine)
    one, other = timelines.get("talks"), timelines.get("long")
    assert one is not None
    assert other is not None
    assert one.parts(clock.now)["neighbours_prefill"] == pytest.approx(0.001 * 110, rel=0.05)
    assert one.parts(clock.now)["prefill"] == pytest.approx(0.001 * 4, rel=0.05)
    assert other.parts(clock.now)["neighbours_prefill"] == 0, "its prompt is its own"


@pytest.mark.req("R19")
def test_the_table_of_transitions() -> None:
    assert [state.value for state in RequestState] == [
        "waiting",
        "waiting_for_remote_kvs",
        "running",
        "preempted",
        "finished_stopped",
        "finished_length_capped",
        "finished_aborted",
        "finished_ignored",
    ]
    for old in RequestState:
        for new in RequestState:
            one = request("r", (1,))
            one.state = old
            if new in TRANSITIONS[old]:
                one.become(new)
                assert one.state is new
            else:
                with pytest.raises(IllegalTransition, match=f"from {old.value} to {new.value}"):
                    one.become(new)
    assert all(not TRANSITIONS[state] for state in FINISHED)


@pytest.mark.req("R19")
def test_every_finish_reason_has_an_ending() -> None:
    assert set(ENDINGS) == set(FinishReason)
    assert all(ending.state in FINISHED for ending in ENDINGS.values())
    assert {reason.value for reason in FinishReason} == {
        "stop",
        "length",
        "tool_calls",
        "cancelled",
        "timeout",
        "overload",
        "conflict",
        "error",
        "shutdown",
    }
