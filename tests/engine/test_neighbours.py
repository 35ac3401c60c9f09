"""Nobody suffers from a neighbour: prefixes that are awaited, prompts that are long, matches that are short."""

from __future__ import annotations

import pytest

from tests.engine.helpers import (
    VOCAB,
    Transcript,
    alone,
    assert_clean,
    make_engine,
    request,
    run,
    ticks_of,
    timed_engine,
)
from tokenmill.engine.request import Draw, Limits, Request
from tokenmill.errors import InvalidRequest
from tokenmill.outputs import FinishReason
from tokenmill.params import SamplingParams


@pytest.mark.req("R15", "G19")
def test_who_waits_for_a_prefix_keeps_its_place() -> None:
    """The last row is kept for the one that waits; a later, less urgent request does not take it."""
    engine = make_engine(max_num_seqs=2, max_num_batched_tokens=20, prefill_chunk=10, min_shared_prefix=4)
    prompt = tuple(range(50))
    engine.add(request("first", prompt, max_new_tokens=3))
    engine.add(request("waits", (*prompt, 60), max_new_tokens=3))
    engine.add(request("later", (7,), max_new_tokens=100, priority=9))
    transcript = run(engine)
    assert list(transcript.reasons) == ["first", "waits", "later"]


@pytest.mark.req("R16", "G19")
def test_nobody_waits_for_ever_for_a_slow_neighbour() -> None:
    engine = make_engine(max_num_seqs=4, min_shared_prefix=4, max_wait_ticks=10)
    prompt = tuple(i % VOCAB for i in range(200))
    engine.add(request("slow", prompt, max_new_tokens=1, max_tokens_per_step=1))
    engine.step()
    fast = request("fast", (*prompt, 3), max_new_tokens=1)
    engine.add(fast)
    transcript = Transcript()
    while "fast" not in transcript.reasons:
        transcript.add(engine.step())
    assert engine.scheduler.tick <= 16
    run(engine, transcript)


@pytest.mark.req("R16")
def test_a_long_prompt_leaves_budget_for_others_also_while_nobody_decodes() -> None:
    fake = {"num_cells": 8192, "max_context": 8000}
    engine = make_engine(fake=fake, max_num_batched_tokens=128, prefill_chunk=64)
    engine.add(request("long", tuple(i % VOCAB for i in range(6400)), max_new_tokens=1, priority=5))
    engine.step()
    engine.add(request("short", (9,), max_new_tokens=1, key="other"))
    transcript = Transcript()
    for _ in range(2):
        transcript.add(engine.step())
    assert transcript.reasons["short"] is FinishReason.LENGTH
    run(engine, transcript)


def test_parked_kv_is_not_evicted_in_vain() -> None:
    engine = make_engine(fake={"num_cells": 128, "block_size": 4, "max_context": 120}, max_num_seqs=4)
    engine.add(request("session", tuple(range(24)), max_new_tokens=2, owner="s"))
    run(engine)
    engine.add(request("runs", tuple([40] * 60), max_new_tokens=20))
    engine.step()
    engine.add(request("large", tuple([41] * 80), max_new_tokens=2))
    for _ in range(5):
        engine.step()
    assert engine.stats().num_parked == 1
    run(engine)


def test_a_short_match_does_not_keep_its_source_from_being_evicted() -> None:
    engine = make_engine(fake={"num_cells": 128, "block_size": 4, "max_context": 120}, max_num_seqs=4)
    engine.add(request("parked", (1, *range(2, 60)), max_new_tokens=2))
    run(engine)
    engine.add(request("runs", tuple([40] * 30), max_new_tokens=30))
    engine.step()
    one = request("one", (1, *([50] * 50)), max_new_tokens=2)
    engine.add(one)
    engine.step()
    assert one.row != -1, "it waits for cells that a match of one token holds"
    run(engine)
    assert_clean(engine)


@pytest.mark.req("R16")
def test_a_new_key_starts_level_with_the_others() -> None:
    engine = make_engine()
    engine.add(request("a", (1,), max_new_tokens=100, key="a"))
    for _ in range(50):
        engine.step()
    engine.add(request("b", (2,), max_new_tokens=2, key="b"))
    fair = engine.scheduler.order.fair
    assert fair.served("b") == fair.served("a") == 50
    run(engine)


def test_a_fork_stays_in_its_namespace() -> None:
    engine = make_engine(prefix_caching=False)
    engine.add(request("source", tuple(range(20)), max_new_tokens=30, namespace="a"))
    engine.step()
    stranger = request("stranger", (*range(20), 5), max_new_tokens=2, namespace="b", fork_of="source")
    friend = request("friend", (*range(20), 6), max_new_tokens=2, namespace="a", fork_of="source")
    engine.add(stranger)
    engine.add(friend)
    transcript = run(engine)
    assert (stranger.num_cached, friend.num_cached) == (0, 20)
    assert transcript.tokens["stranger"] == alone((*range(20), 5), 2)
    assert transcript.tokens["friend"] == alone((*range(20), 6), 2)


@pytest.mark.req("R13")
@pytest.mark.parametrize("depth", [0, 1])
def test_a_steps_duration_is_its_own_whatever_the_host_does_in_between(depth: int) -> None:
    engine, clock = timed_engine(depth, (0.1, 0.0, 0.0), {"num_cells": 512}, max_num_seqs=4)
    ticks = ticks_of(engine)
    engine.add(request("r", (1,), max_new_tokens=20))
    while engine.has_work:
        engine.step()
        clock.now += 0.01
    # At depth 1 the device works while the host does something else, which the simulated one does not show.
    own = 0.1 if depth == 0 else 0.11
    assert all(tick.step_s == pytest.approx(own) for tick in ticks[1:-1])


@pytest.mark.parametrize("token", [-1, -5, VOCAB, 1 << 31])
def test_a_prompt_is_made_of_token_ids(token: int) -> None:
    """A negative one would stand for another request's last token."""
    engine = make_engine()
    with pytest.raises(InvalidRequest):
        engine.add(request("r", (1, token)))


def test_hints_are_checked() -> None:
    for hints in ({"namespace": []}, {"priority": "high"}, {"key": 7}):
        with pytest.raises(InvalidRequest):
            request("r", (1,), **hints)


@pytest.mark.req("R13")
def test_a_long_prompt_does_not_stall_those_who_wait_for_their_last_token_either() -> None:
    """At depth 1 a request with penalties decodes in every other step; the ones between are short, too."""
    fake = {"num_cells": 8192, "max_context": 8000, "max_seqs": 32}
    engine, _ = timed_engine(1, (0.004, 0.0004, 2e-8), fake, max_num_seqs=8, target_tick_ms=100)
    ticks = ticks_of(engine)
    draw = Draw(params=SamplingParams(temperature=0, repetition_penalty=1.2), seed=1)
    for i in range(4):
        engine.add(Request(f"d{i}", (i + 50, 1, 1), Limits(max_new_tokens=200), draw=draw))
    for _ in range(12):
        engine.step()
    begin = len(ticks)
    engine.add(request("long", tuple(i % VOCAB for i in range(4000)), max_new_tokens=1))
    transcript = Transcript()
    while "long" not in transcript.reasons:
        transcript.add(engine.step())
    assert max(tick.step_s for tick in ticks[begin:]) <= 0.1 * 1.1
    run(engine, transcript)
