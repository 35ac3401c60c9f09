"""Two real servers, and the simulation's prediction of their time to first token.

A calibration run on the two servers gives the step times: streams that all decode, by their number, and lone prompts,
by their length; the engine's `CostModel` is fitted to them. Then conversations arrive at random, at two rates, and the
simulation is given the same ones. What a turn takes beside its steps is fitted to the median of the other rate's run.
Servers, stores and clients are real; the router is the ring, in the client. The fake backend waits as long as a device
would take, so that two shared cores do not decide about the result; with the default model they do.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.fleet.simulator import Fleet, FleetConfig, StepCosts, Turn
from tokenmill.bench.load_clients import Target, call, events, exchange, server_process
from tokenmill.cluster.placement import HashRing
from tokenmill.engine.cost_model import CostModel

VOCABULARY = range(10, 250)
MODELS: Mapping[str, tuple[str, ...]] = {
    "fake, 20 ms a step and 0.5 ms a token": ("fake", "--extra", "step_us=20000", "--extra", "token_us=500"),
    "smollm2-135m, one thread": ("smollm2-135m", "--threads", "1", "--speculation", "off"),
}
STREAMS = (1, 2, 4, 8)
"""On each server, of the calibration."""
PROMPTS = (16, 64, 128, 256)
LOADS = (0.35, 0.6)
"""Of a replica's time."""
ROUNDS = 3
MAX_TURNS, THINK_S = 4, 1.5


@dataclass(frozen=True)
class PlannedTurn:
    think_s: float
    """After the answer before it."""
    num_input: int
    num_output: int


@dataclass(frozen=True)
class PlannedConversation:
    number: int
    arrival: float
    turns: tuple[PlannedTurn, ...]


def conversations(rate: float, seconds: float, seed: int) -> list[PlannedConversation]:
    """Poisson arrivals of so many turns a second."""
    numbers, found, now = random.Random(seed), list[PlannedConversation](), 0.0

    def length(median: float, sigma: float, most: int) -> int:
        return max(8, min(most, round(numbers.lognormvariate(np.log(median), sigma))))

    while True:
        now += numbers.expovariate(rate / ((1 + MAX_TURNS) / 2))
        if now > seconds:
            return found
        turns = tuple(
            PlannedTurn(numbers.expovariate(1 / THINK_S), length(60, 0.6, 300), length(40, 0.5, 120))
            for _ in range(numbers.randint(1, MAX_TURNS))
        )
        found.append(PlannedConversation(len(found), now, turns))


# -- real servers ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Timed:
    """An answer: seconds from the request to each token."""

    tokens: tuple[float, ...]


async def create(target: Target) -> str:
    return str((await call(target, "POST", "/v1/sessions", {"temperature": 1.0}))["id"])


async def answer(target: Target, session: str, numbers: random.Random, num_input: int, num_output: int) -> Timed:
    given = numbers.choices(VOCABULARY, k=num_input)
    body = {"input": given, "max_tokens": num_output, "ignore_eos": True}
    began, times = time.perf_counter(), list[float]()
    async with exchange(target, "POST", f"/v1/sessions/{session}/generate", body) as reply:
        if reply.status != 200:
            raise await reply.failure()
        async for data in events(reply.pieces()):
            if data == b"[DONE]":
                break
            times += [time.perf_counter() - began] * len(json.loads(data)["token_ids"])
    if len(times) != num_output:
        raise RuntimeError(f"{len(times)} tokens of {num_output}")
    return Timed(tuple(times))


async def calibrate(targets: Sequence[Target], seed: int) -> tuple[CostModel, float, dict[str, Any]]:
    """Step times of a server while the other one does the same, and what a turn takes beside its steps."""
    numbers = random.Random(seed)
    gaps_s: dict[int, list[float]] = {streams: [] for streams in STREAMS}
    firsts_s: dict[int, list[float]] = {length: [] for length in PROMPTS}

    async def lone(target: Target, length: int) -> float:
        session = await create(target)
        await asyncio.sleep(numbers.uniform(0.05, 0.15))  # as in conversations, whose servers are idle before
        return (await answer(target, session, numbers, length, 1)).tokens[0]

    for _ in range(ROUNDS):
        for streams in STREAMS:
            sessions = [(target, await create(target)) for target in targets for _ in range(streams)]
            timed = await asyncio.gather(*(answer(target, one, numbers, 32, 80) for target, one in sessions))
            gaps_s[streams] += [float(np.diff(one.tokens[16:-4]).mean()) for one in timed]
        for length in (*PROMPTS, *PROMPTS):
            firsts_s[length] += await asyncio.gather(*(lone(target, length) for target in targets))
    gaps = {streams: statistics.median(taken) for streams, taken in gaps_s.items()}
    firsts = {length: statistics.median(taken) for length, taken in firsts_s.items()}
    per_token, intercept = np.polyfit(list(firsts), list(firsts.values()), 1)
    step_fixed = float(np.polyfit(list(gaps), list(gaps.values()), 1)[1])
    overhead_s = max(0.0, float(intercept) - max(0.0, step_fixed))
    cost = CostModel()
    for _ in range(8):
        for streams, seconds in gaps.items():
            cost.observe(streams, 0.0, seconds, 0)
        for length, seconds in firsts.items():
            cost.observe(length + 1, 0.0, seconds - overhead_s, length + 1)
    measured = {"gap_ms": gaps, "first_token_ms": firsts}
    found = {name: {str(size): 1000 * one for size, one in some.items()} for name, some in measured.items()}
    return cost, overhead_s, {**found, "overhead_ms": 1000 * overhead_s, "per_prompt_token_ms": 1000 * float(per_token)}


async def drive(targets: Sequence[Target], planned: Sequence[PlannedConversation], seed: int) -> list[list[float]]:
    """Times to the first token of each conversation's turns, from the servers that the ring gives them."""
    ring, began = HashRing(map(str, range(len(targets)))), time.perf_counter()

    async def converse(one: PlannedConversation) -> list[float]:
        numbers = random.Random(f"{seed} {one.number}")
        target = targets[int(ring.owner(f"s{one.number}") or 0)]
        await asyncio.sleep(max(0.0, began + one.arrival - 0.2 - time.perf_counter()))
        session = await create(target)
        await asyncio.sleep(max(0.0, began + one.arrival - time.perf_counter()))
        found = []
        for number, turn in enumerate(one.turns):
            if number:
                await asyncio.sleep(turn.think_s)
            found.append((await answer(target, session, numbers, turn.num_input, turn.num_output)).tokens[0])
        return found

    return list(await asyncio.gather(*map(converse, planned)))


# -- the prediction ----------------------------------------------------------------------------------------------------


def predict(planned: Sequence[PlannedConversation], costs: StepCosts, overhead_s: float, replicas: int) -> list[float]:
    """Times to the first token, of the same conversations."""
    config = FleetConfig(replicas, len(planned), shards=replicas, kv_cells=1 << 20, overhead_s=overhead_s)
    fleet = Fleet(config, costs)
    fleet.store.latency_s = fleet.store.load_s = 0.0  # a directory of its own: nothing is claimed

    def begin(one: PlannedConversation, number: int) -> None:
        turn = one.turns[number]
        fleet.turn(one.number, turn.num_input, turn.num_output, len(one.turns) - number - 1)

    def acknowledged(turn: Turn, durable: float) -> None:
        if turn.left:
            one = planned[turn.session]
            number = len(one.turns) - turn.left
            fleet.at(durable + one.turns[number].think_s, begin, one, number)

    fleet.acknowledged = acknowledged
    for one in planned:
        fleet.at(one.arrival, begin, one, 0)
    fleet.run()
    return list(fleet.metrics.ttft)


def percentiles(values: Sequence[float]) -> dict[str, float]:
    return {f"p{share}_ms": round(1000 * float(np.percentile(values, share)), 1) for share in (50, 95)}


def turn_rate(costs: StepCosts, overhead_s: float, load: float) -> float:
    """Turns a second that keep a replica busy for this share of its time, with about three requests at once."""
    prompt = overhead_s + costs.prefill.seconds(70, 0.0)
    return load / (prompt + 44 * costs.decode.seconds(3, 0.0) / 3)


@dataclass(frozen=True)
class Driven:
    """A run of conversations at some load, after a calibration of its own."""

    load: float
    seed: int
    rate: float
    planned: Sequence[PlannedConversation]
    measured: Sequence[float]
    costs: StepCosts
    calibration: Mapping[str, Any]

    def overhead_s(self, replicas: int) -> float:
        """With which the median of the prediction is the measured one."""
        low, high, wanted = 0.0, 1.0, statistics.median(self.measured)
        for _ in range(20):
            middle = (low + high) / 2
            is_less = statistics.median(predict(self.planned, self.costs, middle, replicas)) < wanted
            low, high = (middle, high) if is_less else (low, middle)
        return low


def judge(model: str, run: Driven, other: Driven, replicas: int) -> dict[str, Any]:
    """A run beside its prediction, which knows step times from a calibration and the overhead from the other run."""
    overhead_s = other.overhead_s(replicas)
    found = percentiles(run.measured)
    simulated = percentiles(predict(run.planned, run.costs, overhead_s, replicas))
    return {
        "model": model,
        "load": run.load,
        "turns": len(run.measured),
        "turns_per_s": run.rate,
        "seed": run.seed,
        "measured": found,
        "simulated": simulated,
        "errors": {name: round(simulated[name] / found[name] - 1, 3) for name in found},
        "overhead_ms": round(1000 * overhead_s, 1),
        "calibration": run.calibration,
        "costs": asdict(run.costs),
    }


async def validate(model: str, ports: Sequence[int], seconds: float) -> list[dict[str, Any]]:
    """At two loads, each predicted with what the other one has taught."""
    targets = [Target(f"http://127.0.0.1:{port}") for port in ports]
    runs = []
    for number, load in enumerate(LOADS):
        cost, overhead_s, calibration = await calibrate(targets, seed=number)
        costs = StepCosts.of(cost)
        rate = round(len(targets) * turn_rate(costs, overhead_s, load), 2)
        planned = conversations(rate, seconds, seed=100 + number)
        times = await drive(targets, planned, seed=number)
        measured = [one for conversation in times for one in conversation]
        runs.append(Driven(load, 100 + number, rate, planned, measured, costs, calibration))
    return [judge(model, one, other, len(targets)) for one, other in (runs, runs[::-1])]


def command(cpu: int, model: Sequence[str], folder: Path) -> list[str]:
    """A server on one core."""
    serve = [sys.executable, "-m", "tokenmill", "serve", *model, "--port", "0", "--store", str(folder)]
    return ["taskset", "-c", str(cpu), *serve]


def run(seconds: float) -> list[dict[str, Any]]:
    """Two servers of each model, each on a core and with a store of its own."""
    found = []
    for name, model in MODELS.items():
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tokenmill-fleet-")))
            commands = [command(cpu, model, folder / str(cpu)) for cpu in (0, 1)]
            ports = [stack.enter_context(server_process(one)).port for one in commands]
            found += asyncio.run(validate(name, ports, seconds))
    return found
