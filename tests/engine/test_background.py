"""Background requests (lines of batches): they run in the time that others leave, and are not felt by them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from tests.engine.helpers import Transcript, alone, assert_clean, make_engine, request, run, ticks_of, timed_engine
from tests.planting import PlantedBug, plant
from tokenmill.engine import policies
from tokenmill.engine.cost_model import BackgroundCost
from tokenmill.engine.kv_manager import MOST_BACKGROUND, KVManager
from tokenmill.engine.policies import WaitingQueue
from tokenmill.engine.request import BACKGROUND, Quota
from tokenmill.engine.scheduler import Scheduler
from tokenmill.outputs import FinishReason

FAKE = {"max_context": 1024, "num_cells": 16_384, "max_seqs": 64}
DEVICE = (0.004, 0.001, 1e-6)
"""Of a step: fixed, per token, per cell (s). About those of a small model on two cores."""
SETTLE_S = 0.5
LINE_TOKENS = 30 + 16
"""Prompt and answer of a line."""


def prompt(name: int, length: int = 20) -> list[int]:
    """No two begin alike."""
    return [name % 64, name // 64 % 64, *([7] * (length - 2))]


@dataclass(frozen=True)
class Rate:
    """What an engine did on a simulated device."""

    tokens_per_s: float
    lines_per_s: float
    p99_s: float
    """Of its steps."""
    least_decoded: int


def rate(depth: int, num_live: int, num_lines: int, seconds: float) -> Rate:
    """So many live requests and lines at any time; the beginning is not measured."""
    engine, clock = timed_engine(depth, DEVICE, FAKE, max_num_seqs=32, max_step_ms=500)
    ticks, numbers, transcript, done = ticks_of(engine), itertools.count(), Transcript(), 0
    while clock.now < seconds:
        names = list(engine.scheduler.requests)
        for _ in range(num_live - sum(name.startswith("live") for name in names)):
            number = next(numbers)
            engine.add(request(f"live{number}", prompt(number, 12), max_new_tokens=400))
        for _ in range(num_lines - sum(name.startswith("line") for name in names)):
            number = next(numbers)
            engine.add(request(f"line{number}", prompt(number, 30), max_new_tokens=16, priority=BACKGROUND))
        transcript.add(engine.step())
        if clock.now < SETTLE_S:
            done = len(transcript.reasons)
    later = [tick for tick in ticks if tick.at > SETTLE_S]
    span = clock.now - SETTLE_S
    return Rate(
        sum(tick.plan.num_tokens for tick in later) / span,
        (len(transcript.reasons) - done) / span,
        float(np.percentile([tick.step_s for tick in later], 99)),
        min(tick.plan.num_decode for tick in later),
    )


@pytest.mark.slow
@pytest.mark.parametrize("depth", [0, 1])
def test_lines_use_half_of_what_eight_streams_leave_and_are_hardly_felt(depth: int) -> None:
    alone, live, both = rate(depth, 0, 34, 6), rate(depth, 8, 0, 3), rate(depth, 8, 26, 6)
    assert both.p99_s <= 1.5 * live.p99_s
    left = LINE_TOKENS * alone.lines_per_s - live.tokens_per_s
    assert LINE_TOKENS * both.lines_per_s >= 0.5 * left > 100, (alone, live, both)
    assert both.least_decoded >= 7, "nobody who streams is left out, but for one who begins"


def test_alone_they_run_as_all_others_do() -> None:
    engine = make_engine(max_num_seqs=4)
    for number in range(6):
        engine.add(request(f"line{number}", prompt(number), max_new_tokens=8, priority=BACKGROUND))
    transcript = Transcript()
    transcript.add(engine.step())
    assert engine.stats().num_running == 4
    run(engine, transcript)
    for number in range(6):
        assert transcript.tokens[f"line{number}"] == alone(tuple(prompt(number)), 8)
    assert_clean(engine)


def test_lines_that_come_late_lengthen_no_step_beyond_their_share() -> None:
    """Streams have run for long: the lines have not been waiting all that time."""
    engine, _ = timed_engine(0, DEVICE, FAKE, max_num_seqs=32)
    ticks = ticks_of(engine)
    for number in range(8):
        engine.add(request(f"live{number}", prompt(number, 12), max_new_tokens=900))
    for _ in range(300):
        engine.step()
    alone_s = max(tick.step_s for tick in ticks[20:])
    for number in range(24):
        engine.add(request(f"line{number}", prompt(20 + number, 30), max_new_tokens=16, priority=BACKGROUND))
    del ticks[:]
    for _ in range(100):
        engine.step()
    assert sum(tick.plan.num_tokens for tick in ticks) > 900, "lines have run"
    assert max(tick.step_s for tick in ticks) < 1.6 * alone_s


def test_a_request_takes_the_row_of_the_newest_line() -> None:
    engine = make_engine(max_num_seqs=2)
    for name in ("old", "new"):
        engine.add(request(name, prompt(len(name)), max_new_tokens=20, priority=BACKGROUND))
    transcript = Transcript()
    for _ in range(3):
        transcript.add(engine.step())
    engine.add(request("live", prompt(50), max_new_tokens=4))
    transcript.add(engine.step())
    assert engine.scheduler.requests["new"].num_preemptions == 1
    assert engine.scheduler.requests["live"].row >= 0
    run(engine, transcript)
    for name, number, count in (("old", 3, 20), ("new", 3, 20), ("live", 50, 4)):
        assert transcript.tokens[name] == alone(tuple(prompt(number)), count), name
    assert_clean(engine)


def test_a_request_takes_the_kv_of_a_line() -> None:
    engine = make_engine(max_num_seqs=4, fake={"num_cells": 80})
    engine.add(request("line", prompt(1, 40), max_new_tokens=20, priority=BACKGROUND))
    transcript = Transcript()
    for _ in range(4):
        transcript.add(engine.step())
    engine.add(request("live", prompt(2, 40), max_new_tokens=4))
    while "live" not in transcript.reasons:
        assert "line" not in transcript.reasons, "it did not wait for the line to end"
        transcript.add(engine.step())
    run(engine, transcript)
    assert transcript.tokens["line"] == alone(tuple(prompt(1, 40)), 20)
    assert_clean(engine)


def test_no_line_is_preempted_for_requests_whose_key_has_all_its_rows() -> None:
    engine, _ = timed_engine(0, DEVICE, FAKE, max_num_seqs=8)
    for number in range(6):
        engine.add(request(f"line{number}", prompt(20 + number), max_new_tokens=200, priority=BACKGROUND))
    lines = [engine.scheduler.requests[f"line{number}"] for number in range(6)]
    transcript = Transcript()
    while not all(one.output for one in lines):
        transcript.add(engine.step())
    for number in range(10):
        engine.add(request(f"a{number}", prompt(number), max_new_tokens=8, key="a", quota=Quota(max_rows=2)))
    while len(transcript.reasons) < 10:
        transcript.add(engine.step())
        assert {one.num_preemptions for one in lines} == {0}
    run(engine, transcript)
    assert_clean(engine)


def test_lines_start_beside_requests_whose_key_has_all_its_rows() -> None:
    engine, _ = timed_engine(0, DEVICE, FAKE, max_num_seqs=8)
    for number in range(4):
        engine.add(request(f"a{number}", prompt(number), max_new_tokens=60, key="a", quota=Quota(max_rows=2)))
    engine.step()
    line = request("line", prompt(20), max_new_tokens=4, priority=BACKGROUND)
    engine.add(line)
    transcript = Transcript()
    while not line.output:
        transcript.add(engine.step())
        assert not transcript.reasons, "it waits for all of the key's requests"
    run(engine, transcript)
    assert_clean(engine)


def test_no_line_is_preempted_for_a_request_that_waits_for_the_next_step() -> None:
    """The first prompt takes the whole step; the second one does not lack KV."""
    engine = make_engine(max_num_seqs=8, max_num_batched_tokens=16)
    engine.add(request("line", prompt(1, 4), max_new_tokens=40, priority=BACKGROUND))
    transcript = Transcript()
    for _ in range(3):
        transcript.add(engine.step())
    line = engine.scheduler.requests["line"]
    for number in range(3):
        engine.add(request(f"live{number}", prompt(10 + number, 14), max_new_tokens=4))
    run(engine, transcript)
    assert line.num_preemptions == 0
    assert_clean(engine)


def test_no_line_is_preempted_since_another_line_lacks_kv() -> None:
    engine = make_engine(max_num_seqs=4, fake={"num_cells": 80})
    for name, number in (("runs", 1), ("waits", 2)):
        engine.add(request(name, prompt(number, 40), max_new_tokens=8, priority=BACKGROUND))
    transcript = Transcript()
    for _ in range(3):
        transcript.add(engine.step())
    line = engine.scheduler.requests["runs"]
    assert engine.scheduler.requests["waits"].row < 0
    engine.add(request("live", prompt(3, 4), max_new_tokens=2))
    transcript.add(engine.step())
    assert engine.scheduler.requests["live"].row >= 0
    assert line.num_preemptions == 0
    run(engine, transcript)
    assert_clean(engine)


def test_a_line_gives_its_place_in_a_full_queue_to_a_request() -> None:
    engine = make_engine(max_num_seqs=1, max_queue=2)
    engine.add(request("runs", prompt(1), max_new_tokens=8))
    engine.step()
    for number in range(2):
        engine.add(request(f"line{number}", prompt(10 + number), max_new_tokens=2, priority=BACKGROUND))
    engine.add(request("live", prompt(3), max_new_tokens=2))
    engine.add(request("late", prompt(4), max_new_tokens=2, priority=BACKGROUND))
    transcript = run(engine)
    refused = {name for name, reason in transcript.reasons.items() if reason is FinishReason.OVERLOAD}
    assert refused == {"line1", "late"}


@pytest.mark.slow
def test_lines_never_starve() -> None:
    """Requests come without end, and there is no time left; a line is done all the same."""
    engine, _ = timed_engine(0, DEVICE, FAKE, max_num_seqs=2, background_slowdown=1.0)
    engine.add(request("line", prompt(1), max_new_tokens=2, priority=BACKGROUND))
    transcript = Transcript()
    for number in range(1500):
        if len(engine.scheduler.queue) < 3:
            engine.add(request(f"live{number}", prompt(number), max_new_tokens=5))
        transcript.add(engine.step())
        if "line" in transcript.reasons:
            break
    assert transcript.reasons["line"] is FinishReason.LENGTH


def test_what_a_keys_lines_use_is_not_held_against_its_requests() -> None:
    engine, _ = timed_engine(0, (0.004, 0.0001, 1e-6), FAKE, max_num_seqs=2)
    engine.add(request("stream", prompt(1, 4), max_new_tokens=400, key="b"))
    engine.step()
    engine.add(request("line", prompt(2, 200), max_new_tokens=60, priority=BACKGROUND, key="a"))
    while not engine.scheduler.requests["line"].output:
        engine.step()
    assert len(engine.scheduler.requests["stream"].tokens) < 150
    engine.add(request("first", prompt(3), max_new_tokens=2, key="a"))
    engine.add(request("second", prompt(4), max_new_tokens=2, key="b"))
    engine.step()
    assert engine.scheduler.requests["first"].row >= 0, "the line has had many tokens, the key's requests none"
    assert engine.scheduler.requests["second"].row < 0
    run(engine)
    assert_clean(engine)


@pytest.mark.req("R8")
def test_lines_do_not_push_out_what_others_have_left() -> None:
    """Of what they leave, the latest few stay, for others that begin alike, and what another request has used."""
    engine = make_engine(fake={**FAKE, "max_seqs": 256}, max_num_seqs=4)
    live = [request(f"live{number}", prompt(number), max_new_tokens=2) for number in range(20)]
    for one in live:
        engine.add(one)
    run(engine)
    for number in range(100):
        engine.add(request(f"line{number}", prompt(100 + number), max_new_tokens=2, priority=BACKGROUND))
        run(engine)
        if number == 0:
            engine.add(request("like a line", prompt(100), max_new_tokens=2))
            run(engine)
    assert engine.kv.num_parked == 20 + 1 + MOST_BACKGROUND
    for number in [*range(20), 100, 199]:
        engine.add(again := request(f"again{number}", prompt(number), max_new_tokens=2))
        run(engine)
        assert again.num_cached == 19
    assert_clean(engine)


# -- bugs that are caught ---------------------------------------------------------------------------------------------

BUGS: list[tuple[PlantedBug, Callable[[], None]]] = [
    (
        PlantedBug("rows are kept", Scheduler, "_bound_background", "self._preempt(request)", "pass"),
        test_a_request_takes_the_row_of_the_newest_line,
    ),
    (
        PlantedBug(
            "KV is kept", Scheduler, "_admit", "self._lacks_kv = fits and not request.hints.is_background", "pass"
        ),
        test_a_request_takes_the_kv_of_a_line,
    ),
    (
        PlantedBug("places are kept", WaitingQueue, "crowding", "newest = behind[-1]", "return None"),
        test_a_line_gives_its_place_in_a_full_queue_to_a_request,
    ),
    (
        PlantedBug("all is charged to the key", policies, "share_of", "request.hints.is_background", "False"),
        test_what_a_keys_lines_use_is_not_held_against_its_requests,
    ),
    (
        PlantedBug(
            "lines starve",
            Scheduler,
            "_bound_background",
            "self.tick - self._background_tick <= BACKGROUND_TICKS",
            "True",
        ),
        test_lines_never_starve,
    ),
    (
        PlantedBug("lines count as others do", KVManager, "park", "hints.is_background", "False"),
        test_lines_do_not_push_out_what_others_have_left,
    ),
    (
        PlantedBug("what others use goes", KVManager, "_touch", "not by.is_background", "False"),
        test_lines_do_not_push_out_what_others_have_left,
    ),
    (
        PlantedBug("time without bound", BackgroundCost, "budget_s", "slowdown - 1", "9"),
        lambda: test_lines_use_half_of_what_eight_streams_leave_and_are_hardly_felt(0),
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("bug", "check"), BUGS, ids=[bug.name for bug, _ in BUGS])
def test_a_planted_bug_is_caught(bug: PlantedBug, check: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(bug, monkeypatch)
    with pytest.raises((AssertionError, KeyError)):
        check()
