"""A backend that fails, dies, stalls, gives NaN or runs out of KV: exactly those are hurt who must be."""

from __future__ import annotations

import threading

import pytest

from tests.engine.helpers import VOCAB, Transcript, alone, assert_clean, backend_of, make_engine, request, run
from tokenmill.backends.fake import Fault, FaultKind
from tokenmill.engine.core import EngineCore
from tokenmill.engine.events import TickEvent
from tokenmill.errors import EngineDead, InvalidRequest, RequestFailed
from tokenmill.outputs import FinishReason

HEALTHY = {"a": (1, 2, 3), "b": tuple(range(20, 45)), "c": (9,)}
SAID = {token for prompt in HEALTHY.values() for token in alone(prompt, 8)}
POISON = next(token for token in range(VOCAB) if token not in SAID.union(*HEALTHY.values()))
"""A token that no healthy request ever meets."""


def engine_with(depth: int, *faults: Fault, prompts: dict[str, tuple[int, ...]] = HEALTHY) -> EngineCore:
    engine = make_engine(depth=depth, prefill_chunk=8, max_num_batched_tokens=8)
    for fault in faults:
        backend_of(engine).faults.add(fault)
    for name, prompt in prompts.items():
        engine.add(request(name, prompt, max_new_tokens=8))
    return engine


def assert_healthy(transcript: Transcript, names: dict[str, tuple[int, ...]] = HEALTHY) -> None:
    for name, prompt in names.items():
        assert transcript.reasons[name] is FinishReason.LENGTH, transcript.errors
        assert transcript.tokens[name] == alone(prompt, 8)


@pytest.mark.req("G5", "R24")
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("kind", [FaultKind.FAIL, FaultKind.LATE_FAIL, FaultKind.OUT_OF_KV])
@pytest.mark.parametrize("after", range(8))
def test_a_step_that_fails_once_hurts_nobody(depth: int, kind: FaultKind, after: int) -> None:
    engine = engine_with(depth, Fault(kind, after=after))
    assert_healthy(run(engine))
    assert_clean(engine)


@pytest.mark.req("G5")
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize(
    ("kind", "where"),
    [
        *(
            (kind, where)
            for kind in (FaultKind.FAIL, FaultKind.LATE_FAIL, FaultKind.OUT_OF_KV)
            for where in (0, 12, 24)
        ),
        (FaultKind.NAN, 24),
    ],
)
def test_a_request_that_always_fails_fails_alone(depth: int, kind: FaultKind, where: int) -> None:
    """The poison is in the first, a middle or the last chunk of its prompt (NaN shows only where a token is drawn)."""
    prompt = [40] * 25
    prompt[where] = POISON
    engine = engine_with(depth, Fault(kind, token=POISON, times=None), prompts=HEALTHY | {"poisoned": tuple(prompt)})
    transcript = run(engine)
    assert transcript.reasons["poisoned"] is FinishReason.ERROR
    assert transcript.errors["poisoned"]
    assert transcript.tokens["poisoned"] == []
    assert_healthy(transcript)
    assert_clean(engine)


@pytest.mark.req("G5", "R24")
def test_a_prefix_shared_while_in_flight_is_lost_with_its_step() -> None:
    """The second request shares cells of a step that is found to have failed only after it started."""
    engine = make_engine(depth=1, min_shared_prefix=1)
    backend_of(engine).faults.add(Fault(FaultKind.LATE_FAIL))
    prompt = tuple(range(20))
    engine.add(request("first", prompt, max_new_tokens=4))
    engine.step()
    second = request("second", (*prompt, 50), max_new_tokens=4)
    engine.add(second)
    transcript = run(engine)
    assert second.num_cached == 20
    assert transcript.tokens == {"first": alone(prompt, 4), "second": alone((*prompt, 50), 4)}
    assert_clean(engine)


@pytest.mark.fault("L02")
@pytest.mark.req("G5")
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("kind", [FaultKind.FATAL, FaultKind.LATE_FATAL])
def test_a_fatal_failure_ends_everybody_once(depth: int, kind: FaultKind) -> None:
    engine = engine_with(depth, Fault(kind, after=3))
    transcript = run(engine)
    assert set(transcript.reasons.values()) == {FinishReason.ERROR}
    assert set(transcript.reasons) == set(HEALTHY)
    for name, prompt in HEALTHY.items():
        assert transcript.tokens[name] == alone(prompt, 8)[: len(transcript.tokens[name])]
    with pytest.raises(EngineDead, match="told to fail"):
        engine.add(request("more", [1]))
    with pytest.raises(EngineDead):
        engine.step()


@pytest.mark.req("G5")
@pytest.mark.parametrize("depth", [0, 1])
def test_two_that_fail_alone_in_a_row_are_the_engines_failure(depth: int) -> None:
    prompts = {"a": (1, 2, 3), "x": (POISON, 1), "y": (POISON, 2)}
    engine = engine_with(depth, Fault(FaultKind.FAIL, token=POISON, times=None), prompts=prompts)
    transcript = run(engine)
    assert set(transcript.reasons.values()) == {FinishReason.ERROR}
    assert engine.failure is not None


@pytest.mark.req("G5")
@pytest.mark.parametrize("depth", [0, 1])
def test_two_bad_requests_with_a_good_one_between_them_are_their_own_failure(depth: int) -> None:
    prompts = {"x": (POISON, 1), "a": (1, 2, 3), "y": (POISON, 2)}
    engine = engine_with(depth, Fault(FaultKind.FAIL, token=POISON, times=None), prompts=prompts)
    transcript = run(engine)
    assert [transcript.reasons[name] for name in "xy"] == [FinishReason.ERROR] * 2
    assert_healthy(transcript, {"a": (1, 2, 3)})
    assert_clean(engine)


@pytest.mark.req("G5")
@pytest.mark.parametrize("depth", [0, 1])
def test_a_stalled_step_hurts_nobody(depth: int) -> None:
    fault = Fault(FaultKind.STALL, after=2)
    engine = engine_with(depth, fault)
    transcript = Transcript()
    owner = threading.Thread(target=run, args=(engine, transcript))
    owner.start()
    assert fault.stalled.wait(timeout=30)
    assert engine.has_work
    fault.release.set()
    owner.join(timeout=30)
    assert not owner.is_alive()
    assert_healthy(transcript)
    assert_clean(engine)


def test_a_closed_engine_has_told_everybody() -> None:
    engine = engine_with(1)
    engine.step()
    endings = engine.close()
    assert {ending.finish_reason for ending in endings} == {FinishReason.SHUTDOWN}
    assert len(endings) == len(HEALTHY)
    assert len(engine.close()) == 0
    with pytest.raises(EngineDead, match="closed"):
        engine.add(request("more", [1]))


@pytest.mark.req("G5")
def test_a_bug_in_the_engine_still_ends_every_request(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_with(0)
    engine.step()
    monkeypatch.setattr(engine.scheduler.results, "update", lambda *_: 1 / 0)
    monkeypatch.setattr(engine.kv, "release", lambda *_: 1 / 0)
    transcript = run(engine)
    assert set(transcript.reasons) == set(HEALTHY)
    assert "ZeroDivisionError" in (transcript.errors["a"] or "")


@pytest.mark.req("G5")
@pytest.mark.parametrize("depth", [0, 1])
def test_failures_far_apart_are_not_in_a_row(depth: int) -> None:
    engine = engine_with(depth, Fault(FaultKind.FAIL, token=POISON, times=None), prompts={"x": (POISON,)})
    assert run(engine).reasons["x"] is FinishReason.ERROR
    engine.add(request("a", (1, 2, 3), max_new_tokens=8))
    assert_healthy(run(engine), {"a": (1, 2, 3)})
    engine.add(request("b", HEALTHY["b"], max_new_tokens=8))
    engine.add(request("y", (POISON, 1), max_new_tokens=8))
    transcript = run(engine)
    assert transcript.reasons["y"] is FinishReason.ERROR
    assert_healthy(transcript, {"b": HEALTHY["b"]})
    assert_clean(engine)


@pytest.mark.req("G5")
def test_a_suspect_runs_alone_also_when_memory_is_full() -> None:
    engine = make_engine(fake={"num_cells": 96, "block_size": 16, "max_context": 64}, admission_margin=0)
    for name in ("a", "b"):
        engine.add(request(name, tuple([ord(name) - 60] * 20), max_new_tokens=24))
    transcript = Transcript()
    while "b" not in transcript.tokens:
        transcript.add(engine.step())
    row = engine.scheduler.requests["b"].row
    seq = int(engine.scheduler.rows.seq[row])
    backend_of(engine).faults.add(Fault(FaultKind.FAIL, seq=seq, times=None))
    run(engine, transcript, max_ticks=300)
    assert transcript.reasons == {"a": FinishReason.LENGTH, "b": FinishReason.ERROR}
    assert_clean(engine)


@pytest.mark.req("G5")
@pytest.mark.parametrize("depth", [0, 1])
def test_a_sampler_that_fails_ends_everybody_once(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_with(depth)
    engine.step()
    monkeypatch.setattr(backend_of(engine), "sample", lambda *_: 1 / 0)
    transcript = run(engine)
    assert set(transcript.reasons) == set(HEALTHY)
    assert "sampling failed" in (transcript.errors["a"] or "")
    assert engine.stats().num_running == 0
    assert {slot.state for slot in engine.slots()} == {"idle"}


def test_a_subscriber_that_fails_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    engine = engine_with(0)
    engine.events.subscribe(lambda _: 1 / 0)
    heard: list[object] = []
    engine.events.subscribe(heard.append)
    assert_healthy(run(engine))
    assert "a subscriber failed and is dropped" in caplog.text
    assert len(heard) > 10


def test_a_request_runs_once() -> None:
    engine = make_engine()
    one = request("a", (1,), max_new_tokens=2)
    engine.add(one)
    run(engine)
    with pytest.raises(InvalidRequest, match="has already run"):
        engine.add(one)
    engine.add(request("b", (1,), max_new_tokens=9))
    engine.step()
    engine.cancel("b")
    with pytest.raises(InvalidRequest, match="already running"):
        engine.add(request("b", (2,)))
    with pytest.raises(InvalidRequest, match="cancelled with reason stop"):
        engine.cancel("b", FinishReason.STOP)
    run(engine)
    assert_clean(engine)


def test_isolated_steps_are_told_like_all_others() -> None:
    engine = engine_with(0, Fault(FaultKind.FAIL, after=2))
    ticks: list[TickEvent] = []
    engine.events.subscribe(lambda event: ticks.append(event) if isinstance(event, TickEvent) else None)
    assert_healthy(run(engine))
    computed = sum(tick.plan.num_tokens for tick in ticks)
    assert computed == sum(len(prompt) + 7 for prompt in HEALTHY.values())


def test_run_until_complete_does_not_hide_a_failure() -> None:
    engine = make_engine(max_num_seqs=1, max_queue=1)
    for _ in range(3):
        engine.add_sequence((1, 2), max_new_tokens=2)
    with pytest.raises(RequestFailed, match="seq-2 ended with overload: 2 requests are queued"):
        engine.run_until_complete()
    backend_of(engine).faults.add(Fault(FaultKind.FATAL))
    engine.add_sequence((1, 2), max_new_tokens=2)
    with pytest.raises(RequestFailed, match="ended with error: the engine failed"):
        engine.run_until_complete()


@pytest.mark.req("G5")
@pytest.mark.parametrize("depth", [0, 1])
def test_kv_of_a_failed_request_is_dropped(depth: int) -> None:
    """What made it fail may be in its KV: nothing of it is parked, for its session or for others."""
    engine = make_engine(depth=depth)
    backend_of(engine).faults.add(Fault(FaultKind.NAN, token=POISON, times=None))
    for name, owner in (("plain", None), ("of a session", "s")):
        engine.add(request(name, (40, 41, 42, POISON), max_new_tokens=3, owner=owner))
    engine.add(request("cancelled with an error", (50, 51, 52), max_new_tokens=30))
    transcript = Transcript()
    for _ in range(3):
        transcript.add(engine.step())
    engine.cancel("cancelled with an error", FinishReason.ERROR)
    run(engine, transcript)
    assert set(transcript.reasons.values()) == {FinishReason.ERROR}
    assert (engine.kv.num_parked, engine.stats().kv.held_cells) == (0, 0)
