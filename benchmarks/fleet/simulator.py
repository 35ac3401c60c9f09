"""A fleet of replicas as a discrete-event simulation: one heap of events, sessions as numpy arrays.

A replica computes steps as the engine plans them: a token for each request that decodes, then chunks of prompts in
order of arrival, within the step's time, budget and rows. Step times are a `CostModel`'s. Steps that only decode are
taken together up to the next change, so that a turn costs a few events, however long its answer is; times are those of
single steps nevertheless. KV of sessions and of system prompts stays in a replica until it is evicted, least recently
used first.

Sessions are in a store: a turn makes two commits, a change of the owner one more. A turn whose replica dies is run
again from its beginning by the next owner, once the lease has ended.
"""

from __future__ import annotations

import heapq
import itertools
import math
from array import array
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from typing import Protocol

import numpy as np

from tokenmill.cluster.placement import LOAD_FACTOR, MIN_LOAD_BOUND, HashRing
from tokenmill.engine.cost_model import CostModel

NOBODY = -1
RENEWALS = 3
"""Of a lease, while it lasts."""

# -- what a step takes -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepLine:
    """Seconds of one kind of step."""

    fixed: float
    per_token: float
    per_cell: float

    def seconds(self, num_tokens: int, cells: float) -> float:
        return self.fixed + self.per_token * num_tokens + self.per_cell * cells


@dataclass(frozen=True)
class StepCosts:
    """What a replica's steps take, and how its engine bounds them."""

    decode: StepLine
    prefill: StepLine
    max_seqs: int = 32
    budget: int = 2048
    """Tokens of a step."""
    chunk: int = 512
    """Prompt tokens of one request, beside others that decode."""
    least: int = 8
    """Prompt tokens of a step with prompts, whatever they take."""
    target_s: float = 0.1
    """Of a step with prompts while others decode..."""
    alone_s: float = math.inf
    """...and while none do."""

    @classmethod
    def of(cls, cost: CostModel, **limits: float) -> StepCosts:
        """As a cost model predicts them."""

        def line(num_prefill: int) -> StepLine:
            fixed, token, cell = (cost.predict(*one, num_prefill=num_prefill) for one in ((0, 0.0), (1, 0.0), (0, 1.0)))
            if fixed is None or token is None or cell is None:
                raise ValueError("the cost model has seen too few steps")
            return StepLine(max(0.0, fixed), token - fixed, cell - fixed)

        return cls(line(0), line(1), **limits)  # type: ignore[arg-type]

    def chunk_tokens(self, decode_s: float, base_s: float, num_computed: int, most: int, *, alone: bool) -> int:
        """Prompt tokens at this position that fit a step which takes `base_s` already (`CostModel.largest_chunk`)."""
        target = self.alone_s if alone else max(self.target_s, 1.5 * decode_s)
        seconds = max(target - base_s, 0.0 if alone else self.prefill.fixed - self.decode.fixed)
        if seconds == math.inf:
            return most
        linear, square = self.prefill.per_token + self.prefill.per_cell * num_computed, self.prefill.per_cell / 2
        if linear * most + square * most * most <= seconds:
            return most
        return min(most, max(self.least, int(2 * seconds / (linear + math.sqrt(linear**2 + 4 * square * seconds)))))


# -- turns -------------------------------------------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class Turn:
    """A turn of a session, until it is acknowledged."""

    number: int
    session: int
    arrival: float
    num_input: int
    num_output: int
    left: int = 0
    """Turns of the conversation that follow it."""
    continues: bool = False
    """Is it one of them, so that the KV of the turn before it may still be there?"""
    log: int = 0
    """Tokens of the session before it."""
    to_compute: int = 0
    num_computed: int = 0
    first_at: float = NOBODY
    """When its first token was there; kept when the turn has to be run again."""
    broken_at: float = NOBODY
    """When its replica died."""
    end_count: int = 0
    """The replica's count of decode steps when it is done."""

    @property
    def cells(self) -> int:
        return self.log + self.num_input


# -- a replica ---------------------------------------------------------------------------------------------------------


class Replica:
    """One engine. `begin_step` says how long the next one takes, `end_step` what it gave."""

    def __init__(self, costs: StepCosts, kv_cells: int) -> None:
        self.costs, self.kv_cells = costs, kv_cells
        self.is_up = True
        self.is_draining = False
        self.version = 0
        """Grows with each change of plan: an event of an older plan is void."""
        self.waiting: deque[Turn] = deque()
        self.prefilling: list[Turn] = []
        self.decoding: list[tuple[int, int, Turn]] = []
        """A heap by `end_count`."""
        self.parked: OrderedDict[int, int] = OrderedDict()
        """Session -> cells; a system prompt by ~number. The least recently used one is the first."""
        self.parked_cells = 0
        self.running_cells = 0.0
        """Of all requests that run: what they will have at the most."""
        self.attention = 0.0
        """Cells that a decode step reads."""
        self.count = 0
        """Decode steps so far."""
        self.began, self.step_s, self.num_steps = 0.0, 0.0, 0
        self._chunks: list[tuple[Turn, int]] = []

    @property
    def load(self) -> int:
        return len(self.waiting) + len(self.prefilling) + len(self.decoding)

    @property
    def is_idle(self) -> bool:
        return self.num_steps == 0

    def turns(self) -> Iterator[Turn]:
        yield from itertools.chain(self.waiting, self.prefilling, (one for _, _, one in self.decoding))

    # -- KV ------------------------------------------------------------------------------------------------------------

    def cached(self, key: int) -> int:
        """Cells of a session or a system prompt."""
        return self.parked.get(key, 0)

    def park(self, key: int, cells: int) -> None:
        self.drop(key)
        self.parked[key] = cells
        self.parked_cells += cells
        self._evict()

    def drop(self, key: int) -> int:
        cells = self.parked.pop(key, 0)
        self.parked_cells -= cells
        return cells

    def _evict(self) -> None:
        while self.parked and self.parked_cells + self.running_cells > self.kv_cells:
            _, cells = self.parked.popitem(last=False)
            self.parked_cells -= cells

    def lose_all(self) -> list[Turn]:
        """The process ends: the turns that it was working on."""
        turns = list(self.turns())
        self.waiting.clear()
        self.prefilling, self.decoding, self._chunks = [], [], []
        self.parked.clear()
        self.parked_cells, self.running_cells, self.attention, self.num_steps = 0, 0.0, 0.0, 0
        self.version += 1
        return turns

    # -- steps ---------------------------------------------------------------------------------------------------------

    def begin_step(self, now: float) -> float | None:
        """Plan from `now` on; when it is over. None: there is nothing to do."""
        self._admit()
        self.version += 1
        self.began = now
        costs, num_decodes = self.costs, len(self.decoding)
        if self.prefilling:
            self._plan_chunks(num_decodes)
            self.num_steps = 1
            return now + self.step_s
        if not num_decodes:
            self.num_steps = 0
            return None
        self.num_steps = self.decoding[0][0] - self.count
        growth = num_decodes * (self.num_steps - 1) / 2
        self.step_s = costs.decode.seconds(num_decodes, self.attention + growth)
        return now + self.num_steps * self.step_s

    def cut(self, now: float) -> float | None:
        """Somebody has arrived: a run of decode steps ends with the current one. When; None if it does anyway."""
        if self.num_steps < 2:
            return None
        steps = max(1, math.ceil((now - self.began) / self.step_s - 1e-9))
        if steps >= self.num_steps:
            return None
        self.num_steps = steps
        self.version += 1
        return self.began + steps * self.step_s

    def end_step(self) -> tuple[list[Turn], list[Turn]]:
        """Turns with their first token, and turns that are complete."""
        firsts = []
        self.count += self.num_steps
        self.attention += self.num_steps * len(self.decoding)
        for turn, count in self._chunks:
            turn.num_computed += count
            if turn.num_computed == turn.to_compute:
                firsts.append(turn)
        if firsts:
            done_now = {id(one) for one in firsts}
            self.prefilling = [one for one in self.prefilling if id(one) not in done_now]
        self._chunks = []
        done = []
        while self.decoding and self.decoding[0][0] <= self.count:
            turn = heapq.heappop(self.decoding)[2]
            done.append(turn)
            self.attention -= turn.cells + turn.num_output
        for turn in firsts:
            if turn.num_output == 1:
                done.append(turn)
                continue
            turn.end_count = self.count + turn.num_output - 1
            heapq.heappush(self.decoding, (turn.end_count, turn.number, turn))
            self.attention += turn.cells + 1
        for turn in done:
            self.running_cells -= turn.cells + turn.num_output
            self.park(turn.session, turn.cells + turn.num_output - 1)
        return firsts, done

    def _admit(self) -> None:
        while self.waiting and len(self.prefilling) + len(self.decoding) < self.costs.max_seqs:
            turn = self.waiting[0]
            cells = turn.cells + turn.num_output
            if self.running_cells + cells > self.kv_cells and (self.prefilling or self.decoding):
                return
            self.waiting.popleft()
            self.drop(turn.session)
            self.running_cells += cells
            self._evict()
            self.prefilling.append(turn)

    def _plan_chunks(self, num_decodes: int) -> None:
        costs = self.costs
        decode_s = costs.decode.seconds(num_decodes, self.attention) if num_decodes else 0.0
        seconds = costs.prefill.seconds(num_decodes, self.attention)
        left = costs.budget - num_decodes
        for turn in self.prefilling:
            most = min(turn.to_compute - turn.num_computed, left)
            position = turn.cells - turn.to_compute + turn.num_computed
            if num_decodes:
                most = min(most, costs.chunk)
            if most <= 0:
                break
            count = costs.chunk_tokens(decode_s, seconds, position, most, alone=not num_decodes)
            if self._chunks and count <= costs.least < most:
                break  # no time is left
            self._chunks.append((turn, count))
            seconds += costs.prefill.per_token * count + costs.prefill.per_cell * count * (position + count / 2)
            left -= count
        self.step_s = seconds


# -- the store ---------------------------------------------------------------------------------------------------------


class Store:
    """Shards that commit in order: each commit takes `latency_s`, and a shard no more than `per_s` a second."""

    def __init__(self, shards: int, latency_s: float = 0.004, per_s: float = 1647.0, load_s: float = 0.0008) -> None:
        self.latency_s, self.load_s = latency_s, load_s
        self._interval = 1 / per_s
        self._free_at = [0.0] * shards
        self.num_commits = 0
        self.busy_s = 0.0

    def commit(self, session: int, now: float) -> float:
        """When it is durable."""
        shard = session % len(self._free_at)
        begins = max(now, self._free_at[shard])
        self._free_at[shard] = begins + self._interval
        self.num_commits += 1
        self.busy_s += self._interval
        return begins + self.latency_s

    def utilization(self, seconds: float) -> float:
        return self.busy_s / (seconds * len(self._free_at))


# -- routing -----------------------------------------------------------------------------------------------------------


class Ring(Protocol):
    """Members in the order in which they inherit a key."""

    def update(self, members: Iterable[str]) -> None: ...

    def walk(self, key: str) -> Iterator[str]: ...


class RayRing:
    """The ring of `ray.serve.experimental.consistent_hash_router`: same points, same order."""

    SEED = 0xF9B4CA77
    VIRTUAL_NODES, FALLBACKS = 100, 2

    def __init__(self, members: Iterable[str] = ()) -> None:
        self._hash64: Callable[..., tuple[int, int]] = import_module("mmh3").hash64  # comes with ray
        self.update(members)

    def _hash(self, text: str) -> int:
        return self._hash64(text.encode(), seed=self.SEED, signed=False)[0]

    def update(self, members: Iterable[str]) -> None:
        self._num_members = len(now := list(members))
        points = ((self._hash(f"{name}:{i}"), name) for name in now for i in range(self.VIRTUAL_NODES))
        ordered = sorted(points, key=lambda one: one[0])
        self._places, self._names = [one[0] for one in ordered], [one[1] for one in ordered]

    def walk(self, key: str) -> Iterator[str]:
        """The owner, then its fallbacks."""
        start, seen = bisect_right(self._places, self._hash(key)), set[str]()
        for i in range(len(self._names)):
            name = self._names[(start + i) % len(self._names)]
            if name not in seen:
                seen.add(name)
                yield name
                if len(seen) == min(1 + self.FALLBACKS, self._num_members):
                    return


RINGS: dict[str, Callable[[], Ring]] = {"tokenmill": HashRing, "ray": RayRing}
POLICIES = ("hash", "bounded", "prefix", "random")

# -- the fleet ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FleetConfig:
    replicas: int
    sessions: int
    shards: int = 32
    policy: str = "hash"
    ring: str = "tokenmill"
    lease_s: float = 6.0
    restart_s: float = 30.0
    """From the death of a replica to the next one in its place, ready."""
    kv_cells: int = 1 << 20
    overhead_s: float = 0.0
    """Of a turn before its replica has it: proxy, HTTP, text."""
    seed: int = 0


@dataclass
class Metrics:
    """One entry for each acknowledged turn."""

    arrival: array[float] = field(default_factory=lambda: array("d"))
    ttft: array[float] = field(default_factory=lambda: array("d"))
    tpot: array[float] = field(default_factory=lambda: array("d"))
    computed: array[int] = field(default_factory=lambda: array("q"))
    needed: array[int] = field(default_factory=lambda: array("q"))
    """Tokens that the turn would have computed with the KV of all earlier ones."""
    number: array[int] = field(default_factory=lambda: array("q"))
    continues: array[int] = field(default_factory=lambda: array("b"))
    acknowledged_s: array[float] = field(default_factory=lambda: array("d"))
    """From its last token to its commit."""
    stalls: list[float] = field(default_factory=list)
    """Of broken turns: from the death of their replica to their last token."""
    num_started: int = 0
    num_moved: int = 0
    """Turns that ran on another replica than the one before."""


class Fleet:
    """Replicas, their router and the store. `turn` begins turns, `run` goes through the events."""

    def __init__(self, config: FleetConfig, costs: StepCosts, draws: np.random.Generator | None = None) -> None:
        self.config, self.costs = config, costs
        self.random = draws if draws is not None else np.random.default_rng(config.seed)
        self.replicas = [Replica(costs, config.kv_cells) for _ in range(config.replicas)]
        self.store = Store(config.shards)
        self.ring = RINGS[config.ring]()
        self.log = np.zeros(config.sessions, dtype=np.int32)
        self.owner = np.full(config.sessions, NOBODY, dtype=np.int32)
        self.system: np.ndarray = np.full(config.sessions, NOBODY, dtype=np.int32)
        """Which system prompt a session begins with..."""
        self.system_tokens = 0
        """...of so many tokens."""
        self.metrics = Metrics()
        self.now = 0.0
        self.total_load = 0
        self.acknowledged: Callable[[Turn, float], None] = lambda *_: None
        """Told of each turn, and when it was durable."""
        self._events: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._order = itertools.count()
        self._numbers = itertools.count()
        self._routes = {"hash": self._by_hash, "bounded": self._by_bound, "prefix": self._by_prefix}
        self._routes["random"] = self._by_chance
        self._coins: list[float] = []
        self._update_ring()

    def at(self, when: float, what: Callable[..., None], *arguments: object) -> None:
        heapq.heappush(self._events, (when, next(self._order), what, arguments))

    def run(self, until: float = math.inf) -> None:
        events = self._events
        while events and events[0][0] <= until:
            self.now, _, what, arguments = heapq.heappop(events)
            what(*arguments)

    # -- turns ---------------------------------------------------------------------------------------------------------

    def turn(self, session: int, num_input: int, num_output: int, left: int = 0, *, continues: bool = False) -> None:
        """A turn arrives at the router now."""
        turn = Turn(next(self._numbers), session, self.now, num_input, num_output, left, continues)
        self.metrics.num_started += 1
        self._send(turn)

    def _send(self, turn: Turn) -> None:
        """To a replica, which claims the session if it is not its own."""
        place = self._routes[self.config.policy](turn.session)
        if place is None:
            self.at(self.now + self.config.restart_s, self._send, turn)  # no replica is up
            return
        session = turn.session
        begins = self.now
        if self.owner[session] != place or turn.broken_at != NOBODY:
            begins = self.store.commit(session, self.now) + self.store.load_s
            self.metrics.num_moved += bool(self.owner[session] != NOBODY)
            self.owner[session] = place
        replica = self.replicas[place]
        self.total_load += 1
        begins += self.config.overhead_s
        if begins > self.now:
            self.at(begins, self._arrive, turn, place, replica)
        else:
            self._arrive(turn, place, replica)

    def _arrive(self, turn: Turn, place: int, replica: Replica) -> None:
        if self.replicas[place] is not replica or not replica.is_up:  # it died meanwhile
            self.total_load -= 1
            self._retry(turn, 0.0)
            return
        self.store.commit(turn.session, self.now)  # the input; the prompt is computed meanwhile
        turn.log = int(self.log[turn.session])
        shared = self.system_tokens if replica.cached(~int(self.system[turn.session])) else 0
        cached = replica.cached(turn.session) or min(shared, turn.log)
        turn.to_compute = max(1, turn.cells - cached)
        turn.num_computed = 0
        if shared:
            replica.parked.move_to_end(~int(self.system[turn.session]))
        replica.waiting.append(turn)
        if replica.is_idle:
            self._begin(replica)
        elif (ends := replica.cut(self.now)) is not None:
            self.at(ends, self._end, replica, replica.version)

    def _begin(self, replica: Replica) -> None:
        ends = replica.begin_step(self.now)
        if ends is not None:
            self.at(ends, self._end, replica, replica.version)

    def _end(self, replica: Replica, version: int) -> None:
        if version != replica.version:
            return
        firsts, done = replica.end_step()
        for turn in firsts:
            if turn.first_at == NOBODY:
                turn.first_at = self.now
            if self.system_tokens and self.system[turn.session] != NOBODY:
                key = ~int(self.system[turn.session])
                if not replica.cached(key):
                    replica.park(key, self.system_tokens)
        for turn in done:
            self._commit(turn)
        self._begin(replica)

    def _commit(self, turn: Turn) -> None:
        self.total_load -= 1
        session = turn.session
        durable = self.store.commit(session, self.now)
        self.log[session] = turn.log + turn.num_input + turn.num_output
        found = self.metrics
        found.number.append(turn.number)
        found.arrival.append(turn.arrival)
        found.ttft.append(turn.first_at - turn.arrival)
        found.tpot.append((self.now - turn.first_at) / max(1, turn.num_output - 1))
        found.computed.append(turn.to_compute)
        found.needed.append(turn.num_input + 1 if turn.log else turn.num_input)
        found.continues.append(turn.continues)
        found.acknowledged_s.append(durable - self.now)
        if turn.broken_at != NOBODY:
            found.stalls.append(self.now - turn.broken_at)
        self.acknowledged(turn, durable)

    # -- routing -------------------------------------------------------------------------------------------------------

    def _update_ring(self) -> None:
        self.routable = [i for i, one in enumerate(self.replicas) if one.is_up and not one.is_draining]
        self.ring.update(map(str, self.routable))

    def _by_hash(self, session: int) -> int | None:
        name = next(self.ring.walk(f"s{session}"), None)
        return None if name is None else int(name)

    def _by_bound(self, session: int) -> int | None:
        return self._within_bound(f"s{session}")

    def _within_bound(self, key: str) -> int | None:
        bound, owner = self.bound, None
        for name in self.ring.walk(key):
            owner = int(name) if owner is None else owner
            if self.replicas[int(name)].load < bound:
                return int(name)
        return owner

    @property
    def bound(self) -> int:
        """`load_bound` of tokenmill.cluster.placement, from the sum."""
        return max(MIN_LOAD_BOUND, math.ceil(LOAD_FACTOR * (self.total_load + 1) / max(1, len(self.routable))))

    def _by_prefix(self, session: int) -> int | None:
        """Where the session's KV is; else where its system prompt is; both within the bound."""
        owner = int(self.owner[session])
        if owner != NOBODY:
            one = self.replicas[owner]
            if one.is_up and not one.is_draining and one.cached(session) and one.load < self.bound:
                return owner
        system = int(self.system[session])
        return self._within_bound(f"s{session}" if system == NOBODY else f"p{system}")

    def _by_chance(self, session: int) -> int | None:
        del session
        if not self._coins:
            self._coins = self.random.random(4096).tolist()
        return self.routable[int(self._coins.pop() * len(self.routable))] if self.routable else None

    # -- what happens to replicas --------------------------------------------------------------------------------------

    def fail(self, place: int) -> None:
        """`kill -9`. Its turns are taken over when its lease ends; a replacement comes up."""
        replica = self.replicas[place]
        if not replica.is_up:
            return
        self._stop(place)
        renewed = float(self.random.random()) * self.config.lease_s / RENEWALS
        for turn in replica.lose_all():
            self.total_load -= 1
            self._retry(turn, self.config.lease_s - renewed)

    def _retry(self, turn: Turn, delay: float) -> None:
        turn.broken_at = self.now if turn.broken_at == NOBODY else turn.broken_at
        self.at(self.now + delay, self._send, turn)

    def _stop(self, place: int) -> None:
        self.replicas[place].is_up = False
        self._update_ring()
        self.at(self.now + self.config.restart_s, self._start, place)

    def _start(self, place: int) -> None:
        self.replicas[place] = Replica(self.costs, self.config.kv_cells)
        self._update_ring()

    def add(self, count: int) -> None:
        """Replicas that join, with empty KV."""
        self.replicas += [Replica(self.costs, self.config.kv_cells) for _ in range(count)]
        self._update_ring()

    def roll(self, share: float, poll_s: float = 1.0) -> None:
        """Replace all replicas, a share of them at a time: they finish their turns, then restart."""
        places = list(range(len(self.replicas)))
        size = max(1, round(share * len(places)))
        self._roll_waves([places[i : i + size] for i in range(0, len(places), size)], poll_s)

    def _roll_waves(self, waves: list[list[int]], poll_s: float) -> None:
        if not waves:
            return
        for place in waves[0]:
            self.replicas[place].is_draining = True
        self._update_ring()
        drained = [self.replicas[place] for place in waves[0]]
        self._watch(waves, drained, poll_s)

    def _watch(self, waves: list[list[int]], old: list[Replica], poll_s: float) -> None:
        for place, one in zip(waves[0], old, strict=True):
            if one.is_up and one.load == 0:
                one.is_up = False
                self.at(self.now + self.config.restart_s, self._start, place)
        if all(self.replicas[place] is not one for place, one in zip(waves[0], old, strict=True)):
            self._roll_waves(waves[1:], poll_s)
        else:
            self.at(self.now + poll_s, self._watch, waves, old, poll_s)
