"""A view that events keep up to date is what the core itself would say, whatever happens to it."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import pytest

from tests.conformance.operations import Chooser, RandomChooser, one_in
from tests.engine.helpers import backend_of, make_engine, request
from tests.engine.workload import Workload, fork_and_note, workload
from tests.planting import PlantedBug, plant
from tokenmill.backends.fake import FakeConfig, FakeModel, Fault, FaultKind
from tokenmill.config import EngineConfig
from tokenmill.contract import BackendLimits
from tokenmill.engine import events, view
from tokenmill.engine.client import EngineClient, InlineClient, ThreadClient
from tokenmill.engine.core import EngineCore
from tokenmill.engine.events import (
    CellsEvent,
    Event,
    FailedStepEvent,
    ParkedChange,
    ParkedEvent,
    RequestEvent,
    StartEvent,
    TickEvent,
)
from tokenmill.engine.rows import RunningRows
from tokenmill.engine.view import CoreView
from tokenmill.entrypoints.process import ProcessClient
from tokenmill.outputs import GeneratedToken, StepResult

WAIT_S = 30.0
LONG = 300
"""Ticks."""
FAULTS = [FaultKind.FAIL, FaultKind.LATE_FAIL, FaultKind.OUT_OF_KV]


def watched(engine: EngineCore) -> CoreView:
    made = CoreView(engine.snapshot())
    engine.events.subscribe(made)
    return made


def act(engine: EngineCore, choose: Chooser, tick: int, prompts: dict[str, dict[str, Any]]) -> None:
    """What callers may do between two steps."""
    running = sorted(engine.scheduler.requests)
    if running and one_in(12, choose):
        engine.cancel(choose.one_of(running))
    elif running and one_in(20, choose):
        one = engine.scheduler.requests[choose.one_of(running)]
        if one.output:
            engine.finish(one.request_id, choose.between(0, len(one.output)))
    elif running and one_in(20, choose):
        fork_and_note(engine, choose.one_of(running), f"fork{tick}", prompts)
    elif one_in(15, choose):
        engine.release(f"session {choose.between(0, 1)}")
    elif one_in(40, choose):
        backend_of(engine).faults.add(Fault(choose.one_of(FAULTS)))


def follow(load: Workload, choose: Chooser, num_ticks: int, every: int) -> Counter[type[Event]]:
    """Run a workload over and over, beside a view from the start and one that joins later; how much was told."""
    engine = make_engine(depth=load.depth, fake=load.fake, **load.engine)
    views: list[CoreView] = [watched(engine)]
    told: Counter[type[Event]] = Counter()
    engine.events.subscribe(lambda event: told.update([type(event)]))
    prompts: dict[str, dict[str, Any]] = {}
    for tick in range(num_ticks):
        for arrival, new in load.requests:
            if arrival == tick % 16:
                engine.add(request(**{**new, "name": f"{new['name']} at {tick}"}))
        act(engine, choose, tick, prompts)
        engine.step()
        if tick == num_ticks // 3:
            views.append(watched(engine))
        if tick % every == 0 or engine.failure is not None:
            assert_same(engine, views)
        if engine.failure is not None:  # too many steps failed one after the other
            return told
    while engine.has_work:
        engine.step()
    assert_same(engine, views)
    engine.kv.evict_all()
    engine.release("nobody's")  # whoever changed the memory by themselves must say so
    assert_same(engine, views)
    return told


def assert_same(engine: EngineCore, views: list[CoreView]) -> None:
    for one in views:
        assert one.snapshot() == engine.snapshot()
        assert one.num_parked_tokens == engine.kv.num_parked_tokens
        assert (one.num_running, one.num_waiting) == (engine.scheduler.rows.num_running, len(engine.scheduler.queue))
        assert one.free_cells == engine.kv.free()
        assert sum(waiting.num_tokens for waiting in one.snapshot().waiting) == engine.scheduler.queue.num_tokens
        prefilling = [slot for slot in one.snapshot().slots if slot.state == "prefilling"]
        left = sum(slot.num_tokens - slot.num_computed for slot in prefilling)
        assert one.num_queued_tokens == left + engine.scheduler.queue.num_tokens


def follow_short_runs(*depths: int) -> None:
    for seed in range(40):
        for depth in depths:
            choose = RandomChooser(seed)
            try:
                follow(workload(choose, depth), choose, num_ticks=32, every=1 + seed % 4)
            except Exception as error:
                raise AssertionError(f"seed {seed}, depth {depth}: {error!r}") from error


@pytest.mark.slow
@pytest.mark.req("R42", "R50", "B6")
@pytest.mark.parametrize("depth", [0, 1])
def test_a_view_is_what_the_core_would_say(depth: int) -> None:
    """Preemption, prefixes, sessions, cancels, stop strings, forks and steps that fail: at every few ticks."""
    follow_short_runs(depth)


@pytest.mark.slow
@pytest.mark.req("R42", "B6")
@pytest.mark.parametrize("depth", [0, 1])
def test_a_view_does_not_drift(depth: int) -> None:
    """Long runs: once wrong, it would stay wrong."""
    told: Counter[type[Event]] = Counter()
    for seed in range(3):
        choose = RandomChooser(1000 + seed)
        told += follow(workload(choose, depth), choose, num_ticks=LONG, every=50)
    assert set(told) == {RequestEvent, TickEvent, ParkedEvent, CellsEvent, FailedStepEvent}
    assert min(told.values()) > 10


BUGS = [
    PlantedBug("drawn tokens are forgotten", view.CoreView, "_add_up", "np.add.at(self._num_tokens, drawn, 1)", "pass"),
    PlantedBug("a row's next tenant gets its steps", view.CoreView, "_take_row", "self._add_up()", "pass"),
    PlantedBug("rows that changed hands are counted", view.CoreView, "_tick", "event.is_whole", "True"),
    PlantedBug("shortened KV keeps its length", view.CoreView, "_change_parked",
               "(ParkedChange.PARKED, ParkedChange.SHORTENED)", "(ParkedChange.PARKED,)"),
    PlantedBug("preempted requests are lost", view.CoreView, "_change", "event.phase is Phase.PREEMPTED", "False"),
    PlantedBug("nobody is ever generating", view.CoreView, "_change", "'generating'", "'prefilling'"),
    PlantedBug("steps in flight are counted", RunningRows, "views",
               "self.num_collected(in_flight)", "self.num_computed"),
    PlantedBug("cells are told only with steps", EngineCore, "_tell_cells", "free != self._told_cells", "False"),
    PlantedBug("what is released is not told", events.EventBus, "emit", "list(self._subscribers)",
               "([] if getattr(event, 'change', None) is ParkedChange.RELEASED else list(self._subscribers))"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_caught(bug: PlantedBug, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(bug, monkeypatch)
    with pytest.raises(AssertionError):
        follow_short_runs(0, 1)


# -- what events carry ------------------------------------------------------------------------------------------------


@pytest.mark.req("R42")
@pytest.mark.parametrize("depth", [0, 1])
def test_a_step_tells_whose_tokens_it_computed(depth: int) -> None:
    engine = make_engine(depth=depth, max_num_seqs=4, max_num_batched_tokens=8)
    heard: list[Event] = []
    engine.events.subscribe(heard.append)
    engine.add(request("short", (1, 2), max_new_tokens=6, key="a", owner="s"))
    engine.add(request("long", tuple(range(20)), max_new_tokens=2, key="b"))
    while engine.has_work:
        engine.step()
    computed: dict[str, int] = {}
    drawn: dict[str, int] = {}
    for event in heard:
        if isinstance(event, TickEvent):
            assert sum(share.num_tokens for share in event.shares) <= event.plan.num_tokens
            assert event.num_generated == sum(share.is_drawn for share in event.shares)
            for share in event.shares:
                computed[share.request_id] = computed.get(share.request_id, 0) + share.num_tokens
                drawn[share.request_id] = drawn.get(share.request_id, 0) + share.is_drawn
                assert not share.is_decode or share.num_tokens == 1
    assert computed == {"short": 2 + 5, "long": 20 + 1}
    assert drawn == {"short": 6, "long": 2}
    owners = {event.request_id: (event.key, event.owner) for event in heard if isinstance(event, RequestEvent)}
    assert owners == {"short": ("a", "s"), "long": ("b", None)}


@pytest.mark.req("R42")
def test_parked_kv_is_told_by_session() -> None:
    engine = make_engine(max_num_seqs=1, fake={"num_cells": 72, "max_context": 64, "block_size": 4})
    heard: list[ParkedEvent] = []
    engine.events.subscribe(lambda event: heard.append(event) if isinstance(event, ParkedEvent) else None)

    def generate(name: str, prompt: tuple[int, ...], owner: str | None) -> None:
        engine.add(request(name, prompt, max_new_tokens=4, owner=owner, key="k"))
        while engine.has_work:
            engine.step()

    generate("turn 1", tuple(range(20)), "s")
    (parked,) = heard
    assert (parked.change, parked.owner, parked.key, parked.num_tokens) == (ParkedChange.PARKED, "s", "k", 23)
    generate("turn 2", (*range(20), 1, 2, 3, 4, 5), "s")
    generate("other", tuple(range(30, 50)), None)
    generate("large", tuple(range(50, 60)) * 4, None)
    engine.release("s")
    changes = [event.change for event in heard]
    assert ParkedChange.TAKEN in changes or ParkedChange.SHORTENED in changes or ParkedChange.EVICTED in changes
    assert [event for event in heard if event.owner == "s"][-1].change in (ParkedChange.RELEASED, ParkedChange.EVICTED)
    assert engine.snapshot().parked == tuple(one for one in engine.snapshot().parked if one.owner is None)


# -- through clients --------------------------------------------------------------------------------------------------


def make_client(kind: str) -> EngineClient:
    model = FakeModel(FakeConfig(vocab_size=64, max_context=256, depth=1))
    config, limits = EngineConfig(max_num_seqs=4), BackendLimits(num_cells=512, max_seqs=8)
    if kind == "inline":
        return InlineClient(model, config, limits)
    if kind == "process":
        options = {"extra": {"vocab_size": 64, "max_context": 256, "depth": 1}, "config": config}
        return ProcessClient("fake", {**options, "kv_cache_tokens": 2 * limits.num_cells, "workers": 2})
    return ThreadClient(model, config, limits, num_cores=2)


def run(client: EngineClient, name: str, core: int | None = None) -> GeneratedToken:
    """One request, to its end."""
    ended, ends = threading.Event(), []

    def hear(result: StepResult) -> None:
        for token in result:
            if token.is_finished:
                ends.append(token)
                ended.set()

    client.submit(request(name, (1, 2, 3), max_new_tokens=5), hear, core)
    if isinstance(client, InlineClient):
        client.run(ended.is_set)
    assert ended.wait(WAIT_S)
    return ends[0]


@pytest.mark.req("R42")
@pytest.mark.parametrize("kind", ["inline", "threads", "process"])
def test_a_client_lets_cores_be_followed(kind: str) -> None:
    client = make_client(kind)
    views: dict[int, CoreView] = {}

    def make(core: int) -> Any:
        def follow_from(snapshot: events.CoreSnapshot) -> CoreView:
            views[core] = CoreView(snapshot)
            return views[core]

        return follow_from

    try:
        ends = [client.subscribe(core, make(core)) for core in range(client.num_cores)]
        for core in range(client.num_cores):
            run(client, f"r{core}", core)
        assert [views[core].snapshot() for core in range(client.num_cores)] == client.snapshots()
        assert all(one.num_parked for one in views.values())
        for end in ends:
            end()
        before = views[0].snapshot()
        run(client, "unheard", 0)
        assert views[0].snapshot() == before != client.snapshots()[0]
    finally:
        client.close()


@pytest.mark.req("R42")
def test_a_view_survives_the_death_of_its_core() -> None:
    client = make_client("threads")
    assert isinstance(client, ThreadClient)
    heard: list[Event] = []
    views: list[CoreView] = []

    def make(snapshot: events.CoreSnapshot) -> CoreView:
        views.append(CoreView(snapshot))
        return views[0]

    try:
        client.subscribe(0, make)
        client.subscribe(0, lambda _: heard.append)
        run(client, "parks", 0)
        client.pool.cores[0].core._executor.backend.faults.add(Fault(FaultKind.FATAL))  # type: ignore[attr-defined]
        assert run(client, "dies", 0).error is not None
        run(client, "lives", 0)
        assert sum(isinstance(event, StartEvent) for event in heard) == 1
        assert views[0].snapshot() == client.snapshots()[0]
    finally:
        client.close()
