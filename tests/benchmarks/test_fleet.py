"""The simulation of fleets (benchmarks/fleet) beside closed forms, and beside the routers that it stands for."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks.fleet.simulator import (
    POLICIES,
    Fleet,
    FleetConfig,
    RayRing,
    StepCosts,
    StepLine,
    Store,
    Turn,
)
from tokenmill.cluster.placement import HashRing, load_bound
from tokenmill.engine.cost_model import CostModel
from tokenmill.engine.plan import Draft

PER_TOKEN = StepCosts(StepLine(0.01, 0.001, 0.0), StepLine(0.01, 0.001, 0.0), max_seqs=64)
"""A step takes 10 ms and 1 ms a token."""
ONE_AT_A_TIME = StepCosts(StepLine(0.0, 0.0, 0.0), StepLine(0.0, 0.01, 0.0), max_seqs=1)
"""A prompt token takes 10 ms, an answer of one token nothing more: a server with a queue."""


def fleet_of(costs: StepCosts, replicas: int = 1, **options: Any) -> Fleet:
    given = {"sessions": 20_000, "shards": 4, "kv_cells": 1 << 30, **options}
    found = Fleet(FleetConfig(replicas, **given), costs)
    found.store.latency_s = found.store.load_s = 0.0
    return found


# -- queues -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_a_replica_that_takes_one_prompt_at_a_time_is_an_md1_queue(load: float) -> None:
    """Waiting time of Pollaczek and Khinchine: load / (2 (1 - load)) services."""
    fleet, numbers, service = fleet_of(ONE_AT_A_TIME), np.random.default_rng(0), 0.1
    arrivals = np.cumsum(numbers.exponential(service / load, 20_000))
    for session, when in enumerate(arrivals):
        fleet.at(float(when), fleet.turn, session, 10, 1)
    fleet.run()
    waits = np.array(fleet.metrics.ttft) - service
    assert waits.min() > -1e-9
    assert np.mean(waits) == pytest.approx(load / (2 * (1 - load)) * service, rel=0.08)


def test_a_shard_of_the_store_is_an_md1_queue() -> None:
    store, numbers, load = Store(1, latency_s=0.004, per_s=1000.0), np.random.default_rng(0), 0.7
    arrivals = np.cumsum(numbers.exponential(0.001 / load, 50_000))
    waits = [store.commit(0, float(when)) - when - 0.004 for when in arrivals]
    assert np.mean(waits) == pytest.approx(load / (2 * (1 - load)) / 1000, rel=0.08)
    assert store.utilization(float(arrivals[-1])) == pytest.approx(load, rel=0.02)


def test_a_lone_turn_takes_its_prompt_and_its_steps() -> None:
    fleet = fleet_of(PER_TOKEN)
    fleet.turn(0, 100, 21)
    fleet.run()
    assert fleet.metrics.ttft[0] == pytest.approx(0.01 + 0.1)
    assert fleet.metrics.tpot[0] == pytest.approx(0.011)


def test_an_arrival_waits_for_the_step_that_runs_and_no_longer() -> None:
    """Decode steps of 11 ms from 110 ms on: who comes at 250 ms waits to 253, then computes 20 tokens beside one."""
    fleet = fleet_of(PER_TOKEN)
    fleet.turn(0, 100, 200)
    fleet.at(0.25, fleet.turn, 1, 20, 1)
    fleet.run()
    by_number = dict(zip(fleet.metrics.number, fleet.metrics.ttft, strict=True))
    assert by_number[1] == pytest.approx(0.253 - 0.25 + 0.01 + 0.021)
    pace = dict(zip(fleet.metrics.number, fleet.metrics.tpot, strict=True))
    assert 199 * pace[0] == pytest.approx(198 * 0.011 + 0.031)  # each of its steps once, one of them with the prompt


def test_requests_that_decode_together_share_their_steps() -> None:
    fleet = fleet_of(PER_TOKEN)
    for session in range(4):
        fleet.turn(session, 1, 101)
    fleet.run()
    assert fleet.now == pytest.approx(0.011 + 0.013 + 100 * 0.014, rel=0.02)


def test_long_prompts_do_not_stall_who_decodes() -> None:
    """Beside one that decodes, a prompt of 1,000 tokens comes in steps of at most 100 ms."""
    fleet = fleet_of(PER_TOKEN)
    fleet.turn(0, 1, 400)
    fleet.at(0.1, fleet.turn, 1, 1000, 1)
    ends: list[float] = []
    end = fleet._end

    def noted(*arguments: Any) -> None:
        end(*arguments)
        ends.append(fleet.now)

    fleet._end = noted  # type: ignore[method-assign]
    fleet.run()
    assert max(np.diff([one for one in ends if one < 1.2])) <= 0.1 + 1e-9


def test_chunks_are_those_of_the_cost_model() -> None:
    cost, numbers = CostModel(), random.Random(0)
    for _ in range(64):
        rows, prompt, cells = numbers.randint(1, 32), numbers.randint(1, 512), numbers.randint(100, 20_000)
        cost.observe(rows, cells, 0.005 + 0.001 * rows + 1e-7 * cells, 0)
        cost.observe(rows + prompt, cells, 0.008 + 0.0005 * (rows + prompt) + 1e-7 * cells, prompt)
    costs = StepCosts.of(cost)
    assert costs.decode.seconds(8, 5000.0) == pytest.approx(cost.predict(8, 5000.0))
    for rows, computed in ((1, 0), (8, 1000), (32, 4000)):
        cells = 500.0 * rows
        draft = Draft(budget=2048)
        draft.give_decodes(np.arange(rows, dtype=np.int32), rows, cells)
        decode_s, base = costs.decode.seconds(rows, cells), costs.prefill.seconds(rows, cells)
        ours = costs.chunk_tokens(decode_s, base, computed, 512, alone=False)
        assert ours == pytest.approx(min(512, cost.largest_chunk(draft, computed, 0.1)), abs=2)


# -- KV ---------------------------------------------------------------------------------------------------------------


def test_a_turn_computes_what_is_new_while_its_kv_is_there() -> None:
    fleet = fleet_of(PER_TOKEN)
    for when, session in ((0.0, 0), (10.0, 0), (20.0, 1)):
        fleet.at(when, fleet.turn, session, 50, 10)
    fleet.run()
    assert list(fleet.metrics.computed) == [50, 51, 50]  # the last token of an answer is computed with the next input
    assert list(fleet.metrics.needed) == [50, 51, 50]


def test_the_least_recently_used_kv_is_evicted_first_and_replayed() -> None:
    fleet = fleet_of(PER_TOKEN, kv_cells=130)
    for when, session in ((0.0, 0), (1.0, 1), (2.0, 0), (3.0, 2), (4.0, 0), (5.0, 1)):
        fleet.at(when, fleet.turn, session, 20, 10)
    fleet.run()
    assert list(fleet.metrics.computed) == [20, 20, 21, 20, 21, 50]
    assert fleet.replicas[0].parked_cells == sum(fleet.replicas[0].parked.values()) <= 130


def test_a_system_prompt_is_computed_once_a_replica() -> None:
    fleet = fleet_of(PER_TOKEN)
    fleet.log[:], fleet.system[:], fleet.system_tokens = 100, 0, 80
    for session in range(3):
        fleet.at(float(session), fleet.turn, session, 10, 2)
    fleet.run()
    assert list(fleet.metrics.computed) == [110, 30, 30]


# -- rings ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("replicas", [1, 2, 50])
def test_the_ring_is_that_of_ray(replicas: int) -> None:
    pytest.importorskip("mmh3")
    router = pytest.importorskip("ray.serve.experimental.consistent_hash_router").ConsistentHashRouter
    theirs = router.__new__(router)
    theirs._num_virtual_nodes, theirs._num_fallback_replicas, theirs._deployment_id = 100, 2, "test"
    theirs._rebuild_ring(frozenset(_ReplicaId(f"r{i}") for i in range(replicas)))
    ours = RayRing(f"r{i}" for i in range(replicas))
    for number in range(2000):
        found = [one.unique_id for one in theirs._lookup_ranked_replicas(f"session-{number}")]
        assert list(ours.walk(f"session-{number}")) == found


class _ReplicaId(SimpleNamespace):
    def __init__(self, unique_id: str) -> None:
        super().__init__(unique_id=unique_id)

    def __hash__(self) -> int:
        return hash(self.unique_id)


@pytest.mark.parametrize("kind", [HashRing, RayRing])
def test_a_replica_that_joins_takes_its_share_of_the_sessions_and_moves_no_other(kind: Any) -> None:
    if kind is RayRing:
        pytest.importorskip("mmh3")
    before, after = kind(map(str, range(20))), kind(map(str, range(21)))
    owners = [(next(before.walk(f"s{i}")), next(after.walk(f"s{i}"))) for i in range(20_000)]
    moved = [new for old, new in owners if old != new]
    assert set(moved) == {"20"}
    assert len(moved) / len(owners) == pytest.approx(1 / 21, rel=0.35)  # 100 points: a tenth, three times


def test_the_bound_is_that_of_the_router() -> None:
    fleet = fleet_of(PER_TOKEN, replicas=5)
    for loads in ([0, 0, 0, 0, 0], [3, 0, 9, 1, 1], [40, 41, 42, 43, 44]):
        fleet.total_load = sum(loads)
        assert fleet.bound == load_bound(loads)


def test_no_replica_is_loaded_beyond_the_bound_while_another_has_room() -> None:
    """All sessions of one system prompt: by their prefix alone they would be on one replica."""
    fleet = fleet_of(PER_TOKEN, replicas=8, policy="prefix")
    fleet.system[:] = 0
    for session in range(80):
        fleet.turn(session, 10, 500)
    assert max(one.load for one in fleet.replicas) <= math.ceil(1.25 * 80 / 8) + 1


# -- failures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_no_turn_is_lost_or_doubled(policy: str) -> None:
    """Replicas die, join and are rolled while conversations go on: every turn is acknowledged once, in order."""
    fleet = fleet_of(PER_TOKEN, replicas=12, policy=policy, sessions=300, kv_cells=20_000, restart_s=2.0, lease_s=1.0)
    numbers, given, said = random.Random(0), dict.fromkeys(range(300), 0), list[int]()

    def acknowledged(turn: Turn, durable: float) -> None:
        said.append(turn.number)
        given[turn.session] += turn.num_input + turn.num_output
        if turn.left:
            fleet.at(durable + numbers.expovariate(1.0), fleet.turn, turn.session, 20, 30, turn.left - 1)

    fleet.acknowledged = acknowledged
    for session in range(300):
        fleet.at(numbers.uniform(0, 20), fleet.turn, session, numbers.randint(5, 60), numbers.randint(1, 60), 4)
    for _ in range(40):
        fleet.at(numbers.uniform(0, 40), fleet.fail, numbers.randrange(12))
    fleet.at(10.0, fleet.add, 3)
    fleet.at(20.0, fleet.roll, 0.25)
    fleet.run()
    assert sorted(said) == list(range(1500))
    assert fleet.metrics.num_started == 1500
    assert [int(one) for one in fleet.log] == [given[session] for session in range(300)]
    assert len(fleet.metrics.stalls) > 20
    assert fleet.total_load == 0
    for one in fleet.replicas:
        assert one.load == 0
        assert one.attention == pytest.approx(0)
        assert one.running_cells == pytest.approx(0)


def test_a_broken_turn_waits_for_its_lease_and_runs_again_elsewhere() -> None:
    fleet = fleet_of(PER_TOKEN, replicas=2, lease_s=6.0, restart_s=60.0)
    fleet.turn(0, 10, 200)
    home = int(fleet.owner[0])
    fleet.at(1.0, fleet.fail, home)
    fleet.run()
    assert fleet.owner[0] == 1 - home
    (stall,) = fleet.metrics.stalls
    again = 0.02 + 199 * 0.011
    assert 4.0 + again <= stall <= 6.0 + again + 1e-6  # renewed every third of it
    assert fleet.metrics.ttft[0] == pytest.approx(0.02)  # what the client has seen already


def test_a_rolling_update_breaks_no_turn() -> None:
    fleet = fleet_of(PER_TOKEN, replicas=4, restart_s=1.0)
    before = list(fleet.replicas)
    for session in range(200):
        fleet.at(session * 0.1, fleet.turn, session, 20, 50)
    fleet.at(2.0, fleet.roll, 0.25)
    fleet.run()
    assert len(fleet.metrics.ttft) == 200
    assert not fleet.metrics.stalls
    assert not set(map(id, before)) & set(map(id, fleet.replicas))
    assert all(one.is_up and not one.is_draining for one in fleet.replicas)
