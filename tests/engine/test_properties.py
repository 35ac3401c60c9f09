"""Whatever runs together: every request says what it says alone, every tick goes by the rules, nothing is left."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.conformance import cpu_subject
from tests.conformance.operations import RandomChooser, one_in
from tests.conformance.test_state_machine import HypothesisChooser
from tests.engine.helpers import request
from tests.engine.workload import play, workload
from tokenmill.backends.cpu.bindings import library
from tokenmill.engine.policies import Deadlines, FairShare
from tokenmill.engine.request import Request, RequestState
from tokenmill.outputs import FinishReason

pytestmark = pytest.mark.slow

REQUIREMENTS = ("R5", "R8", "R11", "R12", "R14", "R16", "R17", "R18", "G7", "G9", "G11")


@pytest.mark.fault("O04", "O05", "E06")
@pytest.mark.req(*REQUIREMENTS)
@pytest.mark.parametrize("depth", [0, 1])
@given(data=st.data())
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_nobody_notices_anybody_else(depth: int, data: st.DataObject) -> None:
    play(workload(HypothesisChooser(data), depth))


@pytest.mark.fault("O05", "E06")
@pytest.mark.req(*REQUIREMENTS)
@pytest.mark.parametrize("depth", [0, 1])
def test_nobody_notices_anybody_else_in_seeded_runs(depth: int) -> None:
    for seed in range(150):
        try:
            play(workload(RandomChooser(seed), depth))
        except Exception as error:
            raise AssertionError(f"seed {seed}, depth {depth}: {error}") from error


@pytest.mark.fault("E01", "E02")
@pytest.mark.req(*REQUIREMENTS)
@pytest.mark.parametrize("depth", [0, 1])
def test_nobody_notices_anybody_else_on_the_kernels(depth: int) -> None:
    """Results never depend on the batch; the model is small, its KV and its arithmetic are real."""
    if library() is None:
        pytest.skip("the kernels are not built: there is no C compiler")
    for seed in range(3000, 3025):
        try:
            play(workload(RandomChooser(seed), depth), cpu_subject.make)
        except Exception as error:
            raise AssertionError(f"seed {seed}, depth {depth}: {error}") from error


@pytest.mark.fault("E01", "E02")
@pytest.mark.req(*REQUIREMENTS)
@pytest.mark.parametrize("depth", [0, 1])
def test_nobody_notices_anybody_else_on_torch(depth: int) -> None:
    """In deterministic mode ids can be compared; the model is small, its KV and its arithmetic are real."""
    from tests.conformance.torch_subject import make_deterministic

    for seed in range(1000, 1025):
        try:
            play(workload(RandomChooser(seed), depth), make_deterministic)
        except Exception as error:
            raise AssertionError(f"seed {seed}, depth {depth}: {error}") from error


@pytest.mark.req(*REQUIREMENTS)
@pytest.mark.parametrize("depth", [0, 1])
def test_nobody_notices_anybody_else_through_transformers(depth: int) -> None:
    """Results may depend on the batch in the last bits, which no id of these seeds does."""
    from tests.conformance.adapter_subject import make_adapted

    for seed in range(2000, 2010):
        try:
            play(workload(RandomChooser(seed), depth), make_adapted)
        except Exception as error:
            raise AssertionError(f"seed {seed}, depth {depth}: {error}") from error


@pytest.mark.req("R15")
@pytest.mark.parametrize("seed", range(20))
def test_deadlines_ring_as_those_of_a_sorted_list(seed: int) -> None:
    """Hundreds of alarms, so that those of ended requests are pruned again and again."""
    choose, deadlines, now = RandomChooser(seed), Deadlines(), 0
    requests = [request(f"r{i}", (1,)) for i in range(300)]
    alarms: list[tuple[int, int, bool]] = []
    most = 0
    for number, one in enumerate(requests):
        one.arrival = number
        one.become(RequestState.RUNNING)
        for _ in range(choose.between(0, 2)):
            alarms.append((now + choose.between(0, 600), number, choose.one_of([True, False])))
            at, _, until_started = alarms[-1]
            deadlines.set(at, one, until_started=until_started)
        for _ in range(2):
            end(choose.one_of(requests[max(0, number - 60) : number + 1]))
        now += choose.one_of([0, 1, 2])
        due = sorted(alarm for alarm in alarms if alarm[0] <= now)
        alarms = [alarm for alarm in alarms if alarm[0] > now]
        for rung, until_started in deadlines.ringing(now):
            while requests[due[0][1]].is_finished:
                del due[0]
            assert (rung.arrival, until_started) == due.pop(0)[1:]
            if one_in(2, choose):
                end(rung)
        assert all(requests[number].is_finished for _, number, _ in due)
        most = max(most, sum(not requests[number].is_finished for _, number, _ in alarms))
        assert len(deadlines) <= max(64, 2 * most) + 2, "alarms of ended requests pile up"


def end(one: Request) -> None:
    if not one.is_finished:
        one.finish(FinishReason.STOP)


@pytest.mark.req("R16")
@pytest.mark.parametrize("seed", range(20))
def test_keys_are_served_as_in_books_that_forget_nothing(seed: int) -> None:
    choose, fair = RandomChooser(seed), FairShare()
    served: dict[str, int] = {}
    live: list[str] = []
    level = 0
    for _ in range(600):
        key = f"key {choose.between(0, 59)}"
        if one_in(2, choose) and len(live) < 8:
            fair.enter(key)
            if key not in live:
                floor = min((served[one] for one in live), default=level)
                served[key] = max(served.get(key, 0), floor)
            live.append(key)
        elif live:
            key = choose.one_of(live)
            fair.charge(key, count := choose.between(0, 20))
            served[key] += count
            if one_in(2, choose):
                fair.leave(key)
                live.remove(key)
                level = served[key]
        assert {key: fair.served(key) for key in live} == {key: served[key] for key in live}
        assert fair.num_keys == len(set(live))
