"""`python -m benchmarks.overload`: five API keys, one of them hostile, at several times the capacity of a server.

A server, in a process of its own, with few rows and a short queue. First as many clients as it has rows, of the four
good keys, without overload: the control. Then, for a minute, the good keys go on, each with a client for its share of
rows, and the hostile key brings so many clients that there are five for each row and queue slot. Clients stream, ask
again when they have their answer, and after a 429 come back when `Retry-After` says so, as the SDKs do.

The true value of a `Retry-After` is the time until the key has been given as many places as it had clients waiting for
one, that client included.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import sys
import tempfile
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tokenmill.bench import bench_parser
from tokenmill.bench.load_clients import Target, call, completion_body, events, exchange, first_model, serving
from tokenmill.config import DEFAULT_MODEL
from tokenmill.server.config import hash_key

GOOD = ("a", "b", "c", "d")
HOSTILE = "hostile"
CLIENTS_PER_PLACE = 5
SAMPLE_S = 0.5
KV_TOKENS_PER_ROW = 256
SETTLE = 0.25
"""Of the time, at the beginning, that memory may grow in."""
ADMITTED, REFUSED = "admitted", "refused"
JAIN, ITL_RATIO, RETRY_FACTOR, RETRY_SHARE, RSS_MIB_PER_MIN = 0.95, 1.5, 2.0, 0.9, 8.0
"""The bars."""


@dataclass
class Refusal:
    """A 429: when, what it said, and how many clients of the key waited for a place then, this one included."""

    at: float
    retry_s: float
    num_waiting: int


@dataclass
class KeyRun:
    """What the clients of one key saw. Moments are those of `time.perf_counter`."""

    admitted: list[float] = field(default_factory=list)
    """When each was: its stream began, or the server's other places filled before it."""
    refusals: list[Refusal] = field(default_factory=list)
    statuses: Counter[str] = field(default_factory=Counter)
    gaps_s: list[float] = field(default_factory=list)
    num_tokens: int = 0
    num_waiting: int = 0
    """Clients that were refused and have not been admitted since."""
    num_retries: int = 0
    num_admitted_retries: int = 0
    """Of these, those that found a place at once."""


@dataclass(frozen=True)
class Row:
    """A line of the report: what was measured, its value, its bar, and whether that is met."""

    what: str
    value: str
    bar: str
    is_met: bool


class Load:
    """Clients of several keys at one server."""

    def __init__(self, url: str, model: str, num_tokens: int) -> None:
        self._url = url
        self._model = model
        self._num_tokens = num_tokens
        self._numbers = itertools.count()

    async def run(self, clients: dict[str, int], seconds: float) -> dict[str, KeyRun]:
        """So many clients of each key, for this long; those that are being answered then are cut off."""
        runs = {key: KeyRun() for key in clients}
        tasks = [
            asyncio.ensure_future(self._client(key, runs[key])) for key, count in clients.items() for _ in range(count)
        ]
        await asyncio.sleep(seconds)
        for task in tasks:
            task.cancel()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(outcome, Exception):
                raise outcome
        return runs

    async def _client(self, key: str, run: KeyRun) -> None:
        target, is_retry = Target(self._url, f"sk-{key}"), False
        while True:
            refused_s = await self._ask(target, key, run, is_retry=is_retry)
            if is_retry:
                run.num_retries += 1
                run.num_admitted_retries += refused_s is None
            is_retry = refused_s is not None
            if refused_s is not None:
                await asyncio.sleep(refused_s)

    async def _ask(self, target: Target, key: str, run: KeyRun, *, is_retry: bool) -> float | None:
        """One request to its end; the seconds to wait if it was refused."""
        prompt = f"Story number {next(self._numbers)} for {key}:"
        body = completion_body(self._model, prompt, self._num_tokens, ignore_eos=True)
        sent = time.perf_counter()
        async with exchange(target, "POST", "/v1/completions", body) as answer:
            now = time.perf_counter()
            if answer.status == 429:
                run.statuses[REFUSED] += 1
                await answer.content()
                run.num_waiting += not is_retry
                retry_s = float(answer.headers["retry-after"])
                run.refusals.append(Refusal(now, retry_s, run.num_waiting))
                return retry_s
            run.statuses[ADMITTED if answer.status == 200 else f"HTTP {answer.status}"] += 1
            if answer.status != 200:
                await answer.content()
                return 1.0
            run.admitted.append(sent)  # it got its place in the queue when it was sent
            run.num_waiting -= is_retry
            before = None
            async for data in events(answer.pieces()):
                if data == b"[DONE]":
                    break
                if any(choice.get("text") for choice in json.loads(data).get("choices") or ()):
                    now = time.perf_counter()
                    run.num_tokens += 1
                    run.gaps_s += [] if before is None else [now - before]
                    before = now
        return None


async def until_idle(target: Target) -> None:
    """Wait for what was cut off: while it is there, it counts as its key's."""
    while True:
        models = (await call(target, "GET", "/v1/scheduler"))["models"]
        cores = [core for model in models for core in model["cores"]]
        if not any(core["waiting"] or any(slot["state"] != "idle" for slot in core["slots"]) for core in cores):
            return
        await asyncio.sleep(SAMPLE_S / 10)


async def watch_memory(pid: int, found: list[tuple[float, float]]) -> None:
    """Note the resident memory of a process, in MiB, every `SAMPLE_S`."""
    while True:
        status = Path(f"/proc/{pid}/status").read_text()
        found.append((time.perf_counter(), int(status.partition("VmRSS:")[2].split()[0]) / 1024))
        await asyncio.sleep(SAMPLE_S)


# -- figures ----------------------------------------------------------------------------------------------------------


def jain(values: Sequence[float]) -> float:
    return sum(values) ** 2 / (len(values) * sum(value * value for value in values)) if any(values) else 0.0


def retry_ratios(run: KeyRun) -> list[float]:
    """What each `Retry-After` said, by the true value; those whose time had not come at the end are left out."""
    admitted, ratios = sorted(run.admitted), []
    for refusal in run.refusals:
        place = bisect_right(admitted, refusal.at) + refusal.num_waiting - 1
        if place < len(admitted):
            ratios.append(refusal.retry_s / max(admitted[place] - refusal.at, 1e-3))
    return ratios


def slope_per_minute(samples: Sequence[tuple[float, float]]) -> float:
    """Growth after the beginning, by least squares."""
    later = np.array(samples[int(SETTLE * len(samples)) :])
    return float(60 * np.polyfit(later[:, 0] - later[0, 0], later[:, 1], 1)[0]) if len(later) > 2 else 0.0


def p99_ms(runs: dict[str, KeyRun]) -> float:
    gaps = [gap for run in runs.values() for gap in run.gaps_s]
    return 1000 * float(np.percentile(gaps, 99)) if gaps else float("nan")


def report(control: dict[str, KeyRun], overload: dict[str, KeyRun], memory: Sequence[tuple[float, float]]) -> list[Row]:
    """Each figure beside its bar."""
    good = [overload[key] for key in GOOD]
    hostile = overload[HOSTILE]
    num_refused = sum(run.statuses.total() - run.statuses[ADMITTED] for run in good)
    num_admitted = sum(run.statuses[ADMITTED] for run in good)
    fairness = jain([run.num_tokens for run in good])
    before, during = p99_ms(control), p99_ms({key: overload[key] for key in GOOD})
    with_hostile = p99_ms(overload)
    ratios = retry_ratios(hostile)
    near = sum(1 / RETRY_FACTOR <= ratio <= RETRY_FACTOR for ratio in ratios)
    share = near / len(ratios) if ratios else float("nan")
    slope = slope_per_minute(memory)
    counts = f"{hostile.statuses[ADMITTED]} admitted, {hostile.statuses[REFUSED]} refused"
    returned = hostile.num_admitted_retries / max(1, hostile.num_retries)
    return [
        Row("good keys: requests refused", f"{num_refused} of {num_refused + num_admitted}", "0", num_refused == 0),
        Row("hostile key", counts, "some refused", hostile.statuses[REFUSED] > 0),
        Row("Jain's index of the good keys' tokens", f"{fairness:.3f}", f">= {JAIN}", fairness >= JAIN),
        Row(
            "p99 ITL, good keys / control",
            f"{during:.1f} / {before:.1f} ms = {during / before:.2f}",
            f"<= {ITL_RATIO}",
            during <= ITL_RATIO * before,
        ),
        Row(
            "p99 ITL, all admitted / control",
            f"{with_hostile:.1f} / {before:.1f} ms = {with_hostile / before:.2f}",
            f"<= {ITL_RATIO}",
            with_hostile <= ITL_RATIO * before,
        ),
        Row(
            f"Retry-After within a factor of {RETRY_FACTOR:g}",
            f"{share:.0%} of {len(ratios)}; {returned:.0%} of retries admitted",
            f">= {RETRY_SHARE:.0%}",
            share >= RETRY_SHARE,
        ),
        Row("memory growth", f"{slope:+.1f} MiB/min", f"<= {RSS_MIB_PER_MIN:g}", slope <= RSS_MIB_PER_MIN),
    ]


def table(rows: Sequence[Row]) -> str:
    lines = ["| figure | measured | bar | |", "| --- | ---: | ---: | --- |"]
    lines += [f"| {row.what} | {row.value} | {row.bar} | {'met' if row.is_met else 'MISSED'} |" for row in rows]
    return "\n".join(lines)


# -- the run ----------------------------------------------------------------------------------------------------------


async def measure(
    url: str, pid: int, options: argparse.Namespace
) -> tuple[dict[str, KeyRun], dict[str, KeyRun], list[tuple[float, float]]]:
    model = await first_model(Target(url, f"sk-{GOOD[0]}"))
    load = Load(url, model, options.tokens)
    await load.run(_spread(options.rows), min(3.0, options.seconds))  # warm-up
    control = await load.run(_spread(options.rows), options.control_seconds)
    await until_idle(Target(url, f"sk-{GOOD[0]}"))
    num_clients = CLIENTS_PER_PLACE * (options.rows + options.queue)
    clients = dict.fromkeys(GOOD, -(-options.rows // (len(GOOD) + 1)))  # equal, and no less than their share of rows
    clients[HOSTILE] = num_clients - sum(clients.values())
    memory: list[tuple[float, float]] = []
    watching = asyncio.ensure_future(watch_memory(pid, memory))
    overload = await load.run(clients, options.seconds)
    watching.cancel()
    return control, overload, memory


def _spread(count: int) -> dict[str, int]:
    """So many clients, divided between the good keys."""
    return {key: (count + len(GOOD) - 1 - place) // len(GOOD) for place, key in enumerate(GOOD)}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = bench_parser("python -m benchmarks.overload", (__doc__ or "").partition("\n\n")[0])
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL, help="name or path of the model")
    parser.add_argument("--seconds", type=float, default=60.0, help="duration of the overload, in seconds")
    parser.add_argument("--control-seconds", type=float, default=15.0, help="duration of the control, in seconds")
    parser.add_argument("--rows", type=int, default=8, help="running requests")
    parser.add_argument("--queue", type=int, default=8, help="queued requests")
    parser.add_argument("--tokens", type=int, default=16, help="tokens of an answer")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--serve", nargs=argparse.REMAINDER, default=[], help="arguments for `tokenmill serve`")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys.json"
        tables = [{"name": name, "sha256": hash_key(f"sk-{name}").hex()} for name in (*GOOD, HOSTILE)]
        keys.write_text(json.dumps({"key": tables}))
        # Little KV: all of it has been touched, and so is resident, when memory is first looked at.
        num_cells = KV_TOKENS_PER_ROW * options.rows
        limits = ["--max-num-seqs", str(options.rows), "--max-queue", str(options.queue)]
        limits += ["--kv-cache-tokens", str(num_cells), "--context", str(KV_TOKENS_PER_ROW)]
        more = [*limits, "--keys-file", str(keys), "--log-level", "warning", *options.serve]
        with serving(options.model, more) as server:
            control, overload, memory = asyncio.run(measure(server.base_url, server.pid, options))
    rows = report(control, overload, memory)
    if options.json:
        counts: dict[str, Any] = {key: dict(run.statuses) for key, run in overload.items()}
        print(json.dumps({"rows": [asdict(row) for row in rows], "statuses": counts}, indent=2))
    else:
        print(f"{options.seconds:g} s, {CLIENTS_PER_PLACE} clients for each of {options.rows} rows and "
              f"{options.queue} queue slots\n")  # fmt: skip
        print(table(rows))
    return 0 if all(row.is_met for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
