"""Random workloads for the engine, and the rules that must hold in every tick of every one of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.conformance.operations import Chooser, one_in
from tests.engine.helpers import (
    VOCAB,
    MakeBackend,
    SimulatedClock,
    Transcript,
    alone,
    assert_clean,
    backend_of,
    make_engine,
    request,
)
from tests.engine.ledger import Ledger
from tests.engine.shelf import Shelf
from tokenmill.backends.fake import FakeBackend, Fault, FaultKind
from tokenmill.engine.core import EngineCore
from tokenmill.engine.events import Event, Phase, RequestEvent
from tokenmill.engine.request import Limits
from tokenmill.outputs import FinishReason

POOL = [[7] * 3, list(range(20)), [5, 9] * 12, [1]]
"""Prefixes that requests have in common."""


@dataclass
class Workload:
    depth: int
    engine: dict[str, Any]
    fake: dict[str, Any]
    requests: list[tuple[int, dict[str, Any]]]
    """(tick of arrival, request)."""
    cancels: dict[int, str] = field(default_factory=dict)
    forks: dict[int, str] = field(default_factory=dict)
    """Tick -> request to fork."""
    fault: Fault | None = None
    """A step that fails once, or a token with which requests fail from some step on."""
    pauses: tuple[float, ...] = (0.0,)
    """Seconds before each tick, over and over."""
    is_roomy: bool = False
    """Whatever comes, KV memory has room for it."""


def workload(choose: Chooser, depth: int) -> Workload:
    room = choose.one_of(["some", "much", "little"])
    block = choose.one_of([1, 4, 16])
    max_num_seqs = choose.between(3 if room == "little" else 1, 6)
    max_context, spare = (48, [0, 8, 16]) if room == "little" else (64, [0, 40, 200])
    requests = []
    for i in range(choose.between(5 if room == "little" else 1, 10)):
        prefix = choose.one_of(POOL)
        tail = [choose.between(0, VOCAB - 1) for _ in range(choose.between(0, 12))]
        new: dict[str, Any] = {
            "name": f"r{i}",
            "prompt": (*prefix, *tail),
            "max_new_tokens": choose.between(12, 24) if room == "little" else choose.between(1, 12),
            "priority": choose.between(0, 2),
            "key": choose.one_of(["", "a", "b"]),
        }
        if one_in(3, choose):
            new["stop_ids"] = tuple(range(choose.between(1, 12)))
            new["min_new_tokens"] = choose.between(0, 2)
        if one_in(4, choose):
            new["max_tokens_per_step"] = choose.between(1, 5)
        if one_in(4, choose):
            new["owner"] = f"session {i % 2}"
        if one_in(4, choose):
            new["namespace"] = "salt"
        if one_in(6, choose):
            new["timeout_s"] = choose.one_of([8.0, 2.0])
        requests.append((choose.between(0, 3 if room == "little" else 12), new))
    forks = {choose.between(1, 25): choose.one_of(requests)[1]["name"] for _ in range(choose.between(0, 2))}
    cancels = {choose.between(1, 25): choose.one_of(requests)[1]["name"] for _ in range(choose.between(0, 3))}
    fault = None
    if one_in(3, choose):
        kind = choose.one_of([FaultKind.FAIL, FaultKind.LATE_FAIL, FaultKind.OUT_OF_KV, FaultKind.NAN])
        poison = choose.one_of(requests)[1]["prompt"][-1] if kind is FaultKind.NAN else None
        fault = Fault(kind, token=poison, times=1 if poison is None else None, after=choose.between(0, 15))
        cancels |= {tick: choose.one_of(requests)[1]["name"] for tick in range(fault.after, fault.after + 6)}
    return Workload(
        depth=depth,
        engine={
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_num_seqs + choose.one_of([3, 1] if room == "little" else [64, 0, 1, 3, 20]),
            "prefill_chunk": choose.one_of([16, 1, 5]),
            "max_wait_ticks": choose.one_of([64, 4]),
            "admission_margin": choose.between(0, 1),
            "min_shared_prefix": choose.one_of([4, 0]),
            "prefix_caching": not one_in(6, choose),
            "max_queue": choose.one_of([256, 3]),
            "max_queue_tokens": choose.one_of([None, None, None, 60]),
            "queue_timeout_s": choose.one_of([None, None, 3.0]),
            "target_tick_ms": 1e9,  # chunks are bounded by what was measured, not by time
        },
        fake={
            "block_size": block,
            "num_cells": 1024 if room == "much" else max_context + 2 * block + choose.one_of(spare),
            "max_seqs": 32 if room == "much" else max_num_seqs + choose.one_of([8, 0, 1]),
            "max_context": max_context,
            "partial_rm": not one_in(6, choose),
            "partial_cp": not one_in(6, choose),
        },
        requests=requests,
        cancels=cancels,
        forks=forks,
        fault=fault,
        pauses=tuple(choose.one_of([0.0, 0.125, 1.0]) for _ in range(3)),
        is_roomy=room == "much",
    )


class Waits:
    """When each request entered each phase, and so how long anybody waits."""

    def __init__(self, engine: EngineCore) -> None:
        self.engine = engine
        self.phases: dict[str, dict[Phase, int]] = {}
        """Request -> phase -> the tick in which it was first entered."""
        engine.events.subscribe(self.note)

    def note(self, event: Event) -> None:
        if isinstance(event, RequestEvent):
            self.phases.setdefault(event.request_id, {}).setdefault(event.phase, event.tick)

    def check(self, prompts: dict[str, dict[str, Any]]) -> None:
        """The bound of docs/scheduling.md: k * (max_wait_ticks + c * s) for the k-th of c classes' requests."""
        longest = max(ticks[Phase.ENDED] - ticks.get(Phase.PREFILL, 0) for ticks in self.phases.values())
        classes = Counter((new.get("key", ""), new.get("priority", 0)) for new in prompts.values())
        for name, ticks in self.phases.items():
            waited = ticks.get(Phase.PREFILL, ticks[Phase.ENDED]) - ticks[Phase.QUEUED]
            k = classes[prompts[name].get("key", ""), prompts[name].get("priority", 0)]
            bound = k * (self.engine.config.max_wait_ticks + len(classes) * longest)
            assert waited <= bound, f"{name} waited {waited} ticks, more than {bound}"


def play(
    load: Workload, backend: MakeBackend = FakeBackend, prepare: Callable[[EngineCore], None] = lambda _: None
) -> Transcript:
    """Run a workload and check that nobody noticed anybody else, and in each tick that it went by the rules."""
    clock = SimulatedClock()
    engine = make_engine(depth=load.depth, fake=load.fake, backend=backend, clock=clock, **load.engine)
    prepare(engine)
    Ledger(engine, load.is_roomy)
    shelf = Shelf(engine)
    waits = Waits(engine)
    if load.fault is not None:
        backend_of(engine).faults.add(load.fault)
    transcript = Transcript()
    prompts: dict[str, dict[str, Any]] = {}
    arrivals = sorted(load.requests, key=lambda arrival: arrival[0])
    cancelled: set[str] = set()
    for tick in range(1500):
        while arrivals and arrivals[0][0] <= tick:
            new = arrivals.pop(0)[1]
            prompts[new["name"]] = new
            engine.add(request(**new))
        if tick in load.forks and load.forks[tick] in engine.scheduler.requests:
            fork_and_note(engine, load.forks[tick], f"fork{tick}", prompts)
        if tick in load.cancels and engine.cancel(load.cancels[tick]):
            cancelled.add(load.cancels[tick])
        if not engine.has_work and not arrivals:
            break
        clock.now += load.pauses[tick % len(load.pauses)]
        transcript.add(engine.step())
        if engine.failure is not None:
            raise engine.failure
        engine.kv.check_integrity()
        shelf.check_accounts()
    else:
        raise AssertionError(f"requests starve: {engine.scheduler.requests}")
    for name, new in prompts.items():
        expected = alone(
            new["prompt"],
            min(new["max_new_tokens"], engine.max_model_len - len(new["prompt"])),
            frozenset(new.get("stop_ids", ())),
            new.get("min_new_tokens", 0),
            backend,
            load.fake["max_context"],
        )
        got, reason = transcript.tokens[name], transcript.reasons[name]
        assert (reason is FinishReason.CANCELLED) == (name in cancelled)
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            assert got == expected, f"{name} says {got}, alone {expected}"
        else:
            is_poisoned = load.fault is not None and load.fault.token is not None
            assert is_poisoned or reason is not FinishReason.ERROR, transcript.errors[name]
            assert got == expected[: len(got)], f"{name} was not itself before it ended with {reason}"
    waits.check(prompts)
    assert engine.stats().num_failed_steps <= (load.fault is not None), "a step failed that nobody told to"
    assert_clean(engine)
    return transcript


def fork_and_note(engine: EngineCore, source: str, name: str, prompts: dict[str, dict[str, Any]]) -> None:
    if len(engine.scheduler.requests[source].tokens) >= engine.max_model_len:
        return
    child = engine.fork(source, name, Limits(max_new_tokens=3))
    prompts[name] = {"prompt": tuple(child.tokens), "max_new_tokens": 3}
