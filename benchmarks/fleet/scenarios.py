"""What happens to a fleet of H200 replicas, and the report of it: `python -m benchmarks.fleet`.

Sessions sleep, wake up for a conversation of some turns, and sleep again; their KV is gone by then. Step times are the
engine's `CostModel`, fitted to the table of one H200 in docs/benchmarks.md. What is reported leaves out a warm-up.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.fleet import validation
from benchmarks.fleet.simulator import POLICIES, RENEWALS, Fleet, FleetConfig, StepCosts, Turn
from tokenmill.bench import bench_parser
from tokenmill.bench.sessions import line_chart
from tokenmill.engine.cost_model import CostModel

DECODE_MS = ((1, 640, 4.0), (16, 640, 4.6), (64, 640, 5.2), (256, 640, 9.4), (256, 0, 7.0))
"""Sequences, cells of each, p50 of the ITL over HTTP; without cells, less the 2.38 ms of attention."""
PROMPT_MS = ((512, 256, 15.0), (2048, 1024, 47.5), (8192, 1024, 174.3), (8192, 15_000, 254.4))
"""Tokens, cells that each reads on average, time of the step: 47,003 tok/s, of 30,000 tokens 32,202 tok/s."""
KV_CELLS = 1_900_000
"""110 GB at 57,344 bytes a token (Qwen2.5-7B in bfloat16)."""
SESSIONS = 10_000
"""Of a replica."""
SYSTEM_PROMPTS, SYSTEM_TOKENS = 1000, 500
LOAD = 16.0
"""Turns a second and replica, by default; about 25 are the most."""
MEAN_TURNS, THINK_S, LOG_TOKENS, INPUT_TOKENS, OUTPUT_TOKENS = 4, 15.0, 2000, 60, 200
WARM_UP_S = 30.0


def h200() -> StepCosts:
    """A replica with the 7B shape on one card."""
    cost = CostModel(min_chunk=256)
    for _ in range(16):
        for rows, cells, ms in DECODE_MS:
            cost.observe(rows, rows * cells, ms / 1000, 0)
        for tokens, cells, ms in PROMPT_MS:
            cost.observe(tokens, tokens * cells, ms / 1000, tokens)
    return StepCosts.of(cost, max_seqs=256, budget=8192, chunk=2048, least=256, target_s=0.1)


# -- workload ----------------------------------------------------------------------------------------------------------


class Draws:
    """Random numbers of one kind, drawn many at a time."""

    def __init__(self, draw: Callable[[int], Any]) -> None:
        self._draw = draw
        self._drawn: list[Any] = []

    def __call__(self) -> Any:
        if not self._drawn:
            self._drawn = self._draw(4096).tolist()
        return self._drawn.pop()


class Conversations:
    """Sessions that wake up at random, with a number of turns between which their users think."""

    def __init__(self, fleet: Fleet, turns_per_s: float, until: float) -> None:
        numbers, sessions = fleet.random, fleet.config.sessions

        def lengths(median: float, sigma: float, most: int, count: int) -> Any:
            return np.clip(numbers.lognormal(np.log(median), sigma, count), 1, most).astype(int)

        fleet.log[:] = SYSTEM_TOKENS + lengths(LOG_TOKENS - SYSTEM_TOKENS, 0.8, 16_000, sessions)
        fleet.system[:] = np.minimum(numbers.zipf(1.3, sessions), SYSTEM_PROMPTS) - 1
        fleet.system_tokens = SYSTEM_TOKENS
        self._fleet, self._until = fleet, until
        self._is_awake = np.zeros(sessions, dtype=bool)
        self._next_s = Draws(partial(numbers.exponential, MEAN_TURNS / turns_per_s))
        self._session = Draws(partial(numbers.integers, 0, sessions))
        self._turns = Draws(partial(numbers.geometric, 1 / MEAN_TURNS))
        self._think_s = Draws(partial(numbers.exponential, THINK_S))
        self._input = Draws(partial(lengths, INPUT_TOKENS, 0.8, 4000))
        self._output = Draws(partial(lengths, OUTPUT_TOKENS, 0.7, 2000))
        fleet.acknowledged = self._acknowledged
        fleet.at(0.0, self._wake)
        for _ in range(round(turns_per_s * (1 - 1 / MEAN_TURNS) * THINK_S)):  # whose users are thinking already
            session = self._session()
            if not self._is_awake[session]:
                self._is_awake[session] = True
                fleet.at(self._think_s(), self._continue, session, self._turns() - 1)

    def _wake(self) -> None:
        fleet = self._fleet
        if fleet.now < self._until:
            fleet.at(fleet.now + self._next_s(), self._wake)
        session = self._session()
        if not self._is_awake[session]:
            self._is_awake[session] = True
            fleet.turn(session, self._input(), self._output(), self._turns() - 1)

    def _acknowledged(self, turn: Turn, durable: float) -> None:
        if turn.left and durable < self._until:
            self._fleet.at(durable + self._think_s(), self._continue, turn.session, turn.left - 1)
        else:
            self._is_awake[turn.session] = False

    def _continue(self, session: int, left: int) -> None:
        self._fleet.turn(session, self._input(), self._output(), left, continues=True)


# -- scenarios ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scale:
    """Of the scenarios; `large` alone goes to 1,000 replicas."""

    replicas: int = 100
    seconds: float = 90.0
    """After the warm-up."""


@dataclass
class Ran:
    """A simulated fleet and what it took to simulate it."""

    fleet: Fleet
    seconds: float
    cpu_s: float

    def summary(self) -> dict[str, Any]:
        found, arrays = self.fleet.metrics, self.arrays()
        hits = arrays["computed"][arrays["continues"]] <= arrays["needed"][arrays["continues"]]
        stalls = found.stalls or [0.0]
        replicas, busiest = self.fleet.config.replicas, max(one.load for one in self.fleet.replicas)
        return {
            "turns": len(arrays["ttft"]),
            **{f"ttft_p{one}_ms": round(1000 * float(np.percentile(arrays["ttft"], one)), 1) for one in (50, 95, 99)},
            "tpot_p50_ms": round(1000 * float(np.median(arrays["tpot"])), 2),
            "hit_rate": round(float(hits.mean()), 4),
            "prompt_tokens_per_turn": round(float(arrays["computed"].mean()), 1),
            "moved": round(found.num_moved / max(1, len(found.ttft)), 4),
            "ack_p95_ms": round(1000 * float(np.percentile(arrays["acknowledged_s"], 95)), 1),
            "commits_per_s": round(self.fleet.store.num_commits / self.fleet.now),
            "busiest_to_mean": round(busiest * replicas / max(1, self.fleet.total_load), 2),
            "broken": len(found.stalls),
            "stall_p50_s": round(float(np.median(stalls)), 2),
            "stall_p95_s": round(float(np.percentile(stalls, 95)), 2),
            "turns_per_cpu_s": round(len(found.ttft) / self.cpu_s),
        }

    def arrays(self) -> dict[str, Any]:
        found = self.fleet.metrics
        arrival = np.array(found.arrival)
        chosen = arrival >= WARM_UP_S
        names = ("ttft", "tpot", "computed", "needed", "acknowledged_s")
        arrays = {name: np.array(getattr(found, name))[chosen] for name in names}
        return {**arrays, "arrival": arrival[chosen], "continues": np.array(found.continues, dtype=bool)[chosen]}

    def by_time(self, bin_s: float) -> dict[str, list[float]]:
        """The p95 of the TTFT, and prompt tokens computed for each turn, of the turns that arrive in each bin."""
        arrays = self.arrays()
        bins = ((arrays["arrival"] - WARM_UP_S) / bin_s).astype(int)
        last = int(self.seconds / bin_s)
        shown = [one for one in range(last) if (bins == one).any()]
        return {
            "at_s": [one * bin_s for one in shown],
            "ttft_p95_ms": [1000 * float(np.percentile(arrays["ttft"][bins == one], 95)) for one in shown],
            "prompt_tokens": [float(arrays["computed"][bins == one].mean()) for one in shown],
        }


Event = tuple[float, str, tuple[Any, ...]]
"""Seconds after the warm-up, a method of `Fleet`, its arguments."""


def simulate(config: FleetConfig, load: float, seconds: float, events: Sequence[Event] = ()) -> Ran:
    began = time.process_time()
    fleet = Fleet(config, h200())
    Conversations(fleet, load * config.replicas, WARM_UP_S + seconds)
    for when, what, arguments in events:
        fleet.at(WARM_UP_S + when, getattr(fleet, what), *arguments)
    fleet.run(WARM_UP_S + seconds)
    return Ran(fleet, seconds, time.process_time() - began)


def base(scale: Scale, **changes: Any) -> FleetConfig:
    shards = max(1, round(scale.replicas / 10))
    config = FleetConfig(scale.replicas, SESSIONS * scale.replicas, shards=shards, kv_cells=KV_CELLS, overhead_s=0.005)
    return replace(config, **changes)


Rows = list[dict[str, Any]]


def policies(scale: Scale) -> Rows:
    return [
        {"policy": policy, "load": load, **simulate(base(scale, policy=policy), load, scale.seconds).summary()}
        for load in (16.0, 24.0, 30.0)
        for policy in POLICIES
    ]


def failures(scale: Scale) -> Rows:
    """Deaths at even intervals; one more row without any."""
    rows = []
    for lease_s, count in ((6.0, 0), (6.0, 1), (6.0, 10), (2.0, 10), (20.0, 10)):
        events = [(scale.seconds * 0.6 * (i + 0.5) / count, "fail", (i * 7 % scale.replicas,)) for i in range(count)]
        ran = simulate(base(scale, lease_s=lease_s), LOAD, scale.seconds, events)
        heartbeats = round(RENEWALS * scale.replicas / lease_s, 1)
        rows.append({"lease_s": lease_s, "failures": count, "heartbeats_per_s": heartbeats, **ran.summary()})
    return rows


def rolling(scale: Scale) -> Rows:
    """All replicas are replaced, each after 30 s of restart."""
    rows = []
    for share, policy, load in ((0.1, "hash", 10.0), (0.1, "hash", LOAD), (0.2, "hash", LOAD), (0.1, "bounded", LOAD)):
        seconds = 90 + 45 / share
        ran = simulate(base(scale, policy=policy), load, seconds, [(30.0, "roll", (share,))])
        still = sum(one.is_draining or not one.is_up for one in ran.fleet.replicas)
        what = {"share": share, "policy": policy, "load": load, "not_done": still}
        rows.append({**what, **ran.summary(), "by_time": ran.by_time(10.0)})
    return rows


def scale_out(scale: Scale) -> Rows:
    """Replicas join a fleet under high load, all at once."""
    rows = []
    for share in (0.0, 0.1, 0.5):
        events = [(30.0, "add", (round(share * scale.replicas),))]
        ran = simulate(base(scale), 22.0, scale.seconds, events)
        rows.append({"share": share, **ran.summary(), "by_time": ran.by_time(5.0)})
    return rows


def shards(scale: Scale) -> Rows:
    rows = []
    for count in dict.fromkeys(max(1, round(one * scale.replicas / 100)) for one in (3, 4, 5, 6, 10, 20)):
        ran = simulate(base(scale, shards=count), LOAD, scale.seconds)
        usage = round(ran.fleet.store.utilization(ran.fleet.now), 3)
        rows.append({"shards": count, "utilization": usage, **ran.summary()})
    return rows


def large(scale: Scale) -> Rows:
    """The same workload by size, for a third of the time."""
    rows = []
    for replicas in (10, 100, 1000):
        config = base(replace(scale, replicas=replicas))
        ran = simulate(config, LOAD, scale.seconds / 3)
        rows.append({"replicas": replicas, "sessions": config.sessions, **ran.summary()})
    return rows


SCENARIOS: Mapping[str, Callable[[Scale], Rows]] = {
    "policies": policies,
    "failures": failures,
    "rolling": rolling,
    "scale-out": scale_out,
    "shards": shards,
    "large": large,
}

# -- the report --------------------------------------------------------------------------------------------------------

COLUMNS: Mapping[str, Mapping[str, str]] = {
    "policies": {
        "policy": "policy", "load": "turns/s each", "ttft_p50_ms": "TTFT p50, ms", "ttft_p95_ms": "p95",
        "ttft_p99_ms": "p99", "hit_rate": "KV hits", "prompt_tokens_per_turn": "prompt tokens a turn", "moved": "moved",
        "busiest_to_mean": "busiest / mean",
    },
    "failures": {
        "lease_s": "lease, s", "failures": "deaths", "broken": "broken turns", "stall_p50_s": "stall p50, s",
        "stall_p95_s": "p95", "ttft_p95_ms": "TTFT p95, ms", "hit_rate": "KV hits", "heartbeats_per_s": "heartbeats/s",
    },
    "rolling": {
        "share": "at a time", "policy": "policy", "load": "turns/s each", "ttft_p50_ms": "TTFT p50, ms",
        "ttft_p95_ms": "p95", "ttft_p99_ms": "p99", "hit_rate": "KV hits", "broken": "broken turns",
        "not_done": "replicas left at the end",
    },
    "scale-out": {
        "share": "replicas added", "ttft_p50_ms": "TTFT p50, ms", "ttft_p95_ms": "p95", "ttft_p99_ms": "p99",
        "hit_rate": "KV hits", "moved": "moved",
    },
    "shards": {
        "shards": "shards", "utilization": "utilization", "commits_per_s": "commits/s", "ack_p95_ms": "commit p95, ms",
        "ttft_p95_ms": "TTFT p95, ms",
    },
    "large": {
        "replicas": "replicas", "sessions": "sessions", "turns": "turns", "ttft_p50_ms": "TTFT p50, ms",
        "ttft_p95_ms": "p95", "hit_rate": "KV hits", "commits_per_s": "commits/s", "turns_per_cpu_s": "turns/CPU s",
    },
}  # fmt: skip


def table(rows: Rows, columns: Mapping[str, str]) -> str:
    """As markdown."""

    def cell(value: Any) -> str:
        return value if isinstance(value, str) else f"{value:,}"

    lines = [f"| {' | '.join(columns.values())} |", f"|{' ---: |' * len(columns)}"]
    return "\n".join([*lines, *(f"| {' | '.join(cell(row[name]) for name in columns)} |" for row in rows)])


def validation_table(runs: Rows) -> str:
    head = ["model", "load", "turns", "measured p50, ms", "simulated", "error", "measured p95", "simulated", "error"]
    lines = [f"| {' | '.join(head)} |", f"| --- |{' ---: |' * (len(head) - 1)}"]
    for run in runs:
        cells = [run["model"], f"{run['load']}", f"{run['turns']:,}"]
        for name in run["measured"]:
            error = f"{100 * run['errors'][name]:+.0f} %"
            cells += [f"{run['measured'][name]:,}", f"{run['simulated'][name]:,}", error]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def shown(name: str, rows: Rows) -> str:
    """A scenario's table."""
    return validation_table(rows) if name == "validation" else table(rows, COLUMNS[name])


def charts(found: Mapping[str, Any], folder: Path) -> None:
    found = {name: one["rows"] for name, one in found.items()}
    if rows := found.get("policies"):
        loads = sorted({row["load"] for row in rows})
        lines = {one: [row["ttft_p95_ms"] for row in rows if row["policy"] == one] for one in POLICIES}
        drawn = line_chart("TTFT p95 by policy", loads, lines, x_label="turns/s of a replica", y_label="ms")
        (folder / "fleet-policies.svg").write_text(drawn)
    for name, title in (("scale-out", "TTFT p95 while replicas join"), ("rolling", "TTFT p95 during a rolling update")):
        if rows := found.get(name):
            times = min((row["by_time"]["at_s"] for row in rows), key=len)
            lines = {_label(row): row["by_time"]["ttft_p95_ms"][: len(times)] for row in rows}
            (folder / f"fleet-{name}.svg").write_text(line_chart(title, times, lines, x_label="s", y_label="ms"))
    if rows := found.get("shards"):
        lines = {"commit p95": [row["ack_p95_ms"] for row in rows]}
        x = [row["shards"] for row in rows]
        (folder / "fleet-shards.svg").write_text(
            line_chart("Commit latency by shards", x, lines, x_label="shards", y_label="ms", is_log=True)
        )


def _label(row: Mapping[str, Any]) -> str:
    """What tells a row from the others of its chart."""
    return " ".join([f"{100 * row['share']:g} %", *(f"{row[name]}" for name in ("policy", "load") if name in row)])


def main(arguments: Sequence[str] | None = None) -> int:
    names = ["validation", *SCENARIOS]
    parser = bench_parser("python -m benchmarks.fleet", __doc__)
    parser.add_argument("scenarios", nargs="*", default=names, metavar="SCENARIO", help=f"of {', '.join(names)}")
    parser.add_argument("--replicas", type=int, default=Scale.replicas, help="simulated replicas, except in `large`")
    parser.add_argument("--seconds", type=float, default=Scale.seconds, help="simulated time after the warm-up")
    parser.add_argument("--json", type=Path, help="write or update this JSON file (default: none)")
    parser.add_argument("--plots", type=Path, help="write SVGs to this folder (default: none)")
    options = parser.parse_args(arguments)
    if unknown := set(options.scenarios) - set(names):
        parser.error(f"no scenario {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    found: dict[str, Any] = {}
    if options.json is not None and options.json.exists():
        found = json.loads(options.json.read_text())
    scale = Scale(options.replicas, options.seconds)
    for name in options.scenarios:
        began = time.monotonic()
        rows = validation.run(options.seconds) if name == "validation" else SCENARIOS[name](scale)
        found[name] = {**asdict(scale), "date": datetime.now(UTC).strftime("%Y-%m-%d"), "rows": rows}
        print(f"{name}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        print(f"{shown(name, rows)}\n", flush=True)
        if options.json is not None:
            options.json.write_text(json.dumps(found, indent=1) + "\n")
    if options.plots is not None:
        charts(found, options.plots)
    return 0
