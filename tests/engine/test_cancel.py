"""Cancel at every tick of a mixed run: one terminal event, at once; no leak; the others never notice."""

from __future__ import annotations

import pytest

from tests.engine.helpers import Transcript, alone, assert_clean, make_engine, request, run
from tokenmill.engine.core import EngineCore
from tokenmill.outputs import FinishReason

PROMPTS = {
    "short": ((3,), 9),
    "long": (tuple(range(40)), 6),
    "shares": ((*range(30), 60, 61), 5),
    "queued": ((9, 9, 9, 9), 7),
    "late": (tuple(range(20, 50)), 4),
}


def mixed_engine(depth: int) -> EngineCore:
    """Four rows for five requests, small chunks: at any time some are queued, some prefill, some decode."""
    engine = make_engine(depth=depth, max_num_seqs=4, prefill_chunk=7, max_num_batched_tokens=16, min_shared_prefix=4)
    for name, (prompt, max_new_tokens) in PROMPTS.items():
        engine.add(request(name, prompt, max_new_tokens=max_new_tokens))
    return engine


def num_ticks(depth: int) -> int:
    engine = mixed_engine(depth)
    run(engine)
    return engine.scheduler.tick


@pytest.mark.req("G2", "G11", "R19", "B8")
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("victim", PROMPTS)
def test_cancel_at_every_tick(depth: int, victim: str) -> None:
    for when in range(num_ticks(depth) + 1):
        engine, transcript = mixed_engine(depth), Transcript()
        for _ in range(when):
            transcript.add(engine.step())
        was_alive = victim not in transcript.reasons
        assert engine.cancel(victim) == was_alive
        assert not engine.cancel(victim)
        if was_alive:
            transcript.add(engine.step())
            assert transcript.reasons[victim] is FinishReason.CANCELLED, "the end did not come with the next step"
        run(engine, transcript)
        for name, (prompt, max_new_tokens) in PROMPTS.items():
            expected = alone(prompt, max_new_tokens)
            if name == victim and was_alive:
                assert transcript.tokens[name] == expected[: len(transcript.tokens[name])]
            else:
                assert transcript.tokens[name] == expected
                assert transcript.reasons[name] is FinishReason.LENGTH
        assert_clean(engine)


@pytest.mark.req("G2")
@pytest.mark.parametrize("depth", [0, 1])
def test_cancelling_the_only_request_still_tells_its_caller(depth: int) -> None:
    engine = make_engine(depth=depth)
    engine.add(request("only", [1, 2, 3], max_new_tokens=50))
    for _ in range(4):
        engine.step()
    engine.cancel("only")
    assert engine.has_work
    (ending,) = engine.step()
    assert (ending.finish_reason, ending.token_id) == (FinishReason.CANCELLED, None)
    run(engine)
    assert not engine.has_work
    assert_clean(engine)


@pytest.mark.req("B8")
@pytest.mark.parametrize("depth", [0, 1])
def test_one_tick_after_the_end_of_a_cancelled_request_its_kv_can_be_evicted(depth: int) -> None:
    def started(ticks: int) -> EngineCore:
        engine = make_engine(depth=depth, prefill_chunk=7, max_num_batched_tokens=16)
        engine.add(request("only", range(40), max_new_tokens=6))
        for _ in range(ticks):
            engine.step()
        return engine

    when = 0
    while (engine := started(when)).cancel("only"):
        (ending,) = engine.step()
        assert ending.finish_reason is FinishReason.CANCELLED
        engine.step()
        assert not engine.has_work
        assert_clean(engine)
        when += 1
    assert when == 3 + 5 + depth, "not cancelled in every tick: three of prefill, five of decode, those in flight"


@pytest.mark.req("G3")
@pytest.mark.parametrize("depth", [0, 1])
def test_a_cancelled_requests_kv_stays_and_is_used_again(depth: int) -> None:
    prompt = tuple(range(33))
    engine = make_engine(depth=depth)
    engine.add(request("first", prompt, max_new_tokens=50))
    transcript = Transcript()
    for _ in range(6):
        transcript.add(engine.step())
    engine.cancel("first")
    run(engine, transcript)
    log = (*prompt, *transcript.tokens["first"])
    again = request("again", (*log, 7), max_new_tokens=4)
    engine.add(again)
    assert run(engine).tokens["again"] == alone((*log, 7), 4)
    assert again.num_cached >= len(log) - 1, "the cancelled request's KV was computed again"
    assert_clean(engine)


@pytest.mark.req("R5")
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("ending", ["length", "stop", "stop string", "cancel"])
def test_after_any_end_the_kv_is_that_of_the_log(depth: int, ending: str) -> None:
    """The next token after the log is the one that a fresh prefill of the log gives."""
    prompt, expected = (4, 5, 6, 7, 8), alone((4, 5, 6, 7, 8), 12)
    engine, transcript = make_engine(depth=depth), Transcript()
    stop_ids = {expected[5]} if ending == "stop" else ()
    engine.add(request("first", prompt, max_new_tokens=8 if ending == "length" else 30, stop_ids=stop_ids))
    for _ in range(7):
        transcript.add(engine.step())
    if ending == "cancel":
        engine.cancel("first")
    if ending == "stop string":
        assert engine.finish("first", keep_tokens=3)
        del transcript.tokens["first"][3:]
    run(engine, transcript)
    log = (*prompt, *transcript.tokens["first"])
    assert log[5:] == tuple(expected[: len(log) - 5])
    follow = request("next", (*log, 33), max_new_tokens=5)
    engine.add(follow)
    assert run(engine).tokens["next"] == alone((*log, 33), 5)
    assert follow.num_cached >= len(log) - 1


def test_a_stop_string_found_in_a_preempted_request_leaves_no_tokens_in_the_queue() -> None:
    engine = make_engine(max_num_seqs=2, fake={"num_cells": 72, "max_context": 64, "block_size": 4}, admission_margin=0)
    for i in range(2):
        engine.add(request(f"r{i}", (10 * i + 1,) * 12, max_new_tokens=40))
    while not any(one.is_preempted for one in engine.snapshot().waiting):
        engine.step()
    (waiting,) = engine.snapshot().waiting
    assert engine.finish(waiting.request_id, keep_tokens=3)
    assert engine.stats().num_waiting_tokens == 0
    run(engine)
    assert_clean(engine)
