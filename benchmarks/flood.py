"""`python -m benchmarks.flood`: running streams while other clients misbehave.

By default, they post prompts that are too long. A server, in a process of its own, streams one answer. Meanwhile
clients in another process post prompts, each the next one as soon as the last one is answered: at 95 % of the largest
size that is not refused by its length alone (so all of it may have to be tokenized), as one message, as 500 messages
and as one run without a place to cut; and far above it. Measured are the stream's inter-token latency, the server's
event loop lag (its own histogram) and `/health`, next to control runs without a flood before and after.

With `--connections`: 32 streams, and connections that cost the server something without a request. Each round runs a
control, the attack and a control again; the ratio of the controls (A/A) says how much of a difference is noise. `slow`:
200 sockets send a request byte by byte, and one of the 32 streams is not read; measured are the other 31. `idle`: 1,000
keep-alive connections; measured are all streams, and memory and descriptors of the server.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import multiprocessing
import os
import re
import resource
import socket
import statistics
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from multiprocessing.synchronize import Event
from typing import Any

import numpy as np

from tokenmill.bench import bench_parser
from tokenmill.bench.load_clients import (
    HttpFailure,
    ServerProcess,
    Stream,
    Target,
    call,
    completion_body,
    exchange,
    first_model,
    serving,
)
from tokenmill.config import DEFAULT_MODEL

SHARE = 0.95
"""Of the largest prompt that is not refused outright."""
FAR_ABOVE_BYTES = 7 << 20
"""A body may have 8 MiB."""
WORDS = "The quick brown fox jumps over the lazy dog, and 42 others don't see why. "
PROBE_S = 0.05
MARGIN_TOKENS = 64
LIMIT_MS = 100.0
CHAT = "/v1/chat/completions"
LAG = "tokenmill_event_loop_lag_seconds_bucket"
SHAPES = {"one message": 1, "500 messages": 500, "one run": 1, "far above": 1}
"""How many messages each kind of prompt has."""


@dataclass(frozen=True)
class Phase:
    """What was measured while one kind of prompt was posted; milliseconds."""

    name: str
    num_tokens: int
    """Of the stream."""
    itl_p50: float
    itl_p99: float
    itl_max: float
    lag_p99: float
    """An upper bound: that of a bucket."""
    health_p99: float
    statuses: Mapping[str, int]
    """How many prompts were answered how."""
    answer_p50: float
    """Until a prompt was answered."""


# -- prompts ----------------------------------------------------------------------------------------------------------


def flood_body(model: str, shape: str, num_bytes: int) -> bytes:
    """A chat whose texts have this size in all."""
    size = FAR_ABOVE_BYTES if shape == "far above" else num_bytes
    text = "-" * size if shape == "one run" else (WORDS * (size // len(WORDS) + 1))[:size]
    count = SHAPES[shape]
    roles = ["user", "assistant"] * (count // 2) + ["user"]
    parts = [text[size * i // count : size * (i + 1) // count] for i in range(count)]
    messages = [{"role": role, "content": part} for role, part in zip(roles, parts, strict=False)]
    return json.dumps({"model": model, "messages": messages, "max_tokens": 1}).encode()


async def largest_prompt(target: Target, model: str) -> int:
    """Bytes of the largest prompt that is not refused by its length alone, by what the server says of a larger one."""
    try:
        await call(target, "POST", CHAT, json.loads(flood_body(model, "far above", 0)))
    except HttpFailure as error:
        context = re.search(r"maximum context length is (\d+)", error.detail)
        least = re.search(r"at least (\d+) of the prompt", error.detail)
        if context is None or least is None:
            raise
        return int(context[1]) * FAR_ABOVE_BYTES // int(least[1])
    raise RuntimeError(f"a prompt of {FAR_ABOVE_BYTES} bytes fits this model: nothing is refused by its length")


# -- the flood --------------------------------------------------------------------------------------------------------


def run_flood(url: str, body: bytes, num_clients: int, stop: Event, results: Any) -> None:
    """In a process of its own: post until told to stop; then tell how the prompts were answered, and when."""
    found = asyncio.run(_flood(Target(url), body, num_clients, stop))
    results.put(found)


async def _flood(target: Target, body: bytes, num_clients: int, stop: Event) -> list[tuple[str, float]]:
    answered: list[tuple[str, float]] = []

    async def post() -> None:
        while not stop.is_set():
            began = time.perf_counter()
            with suppress(OSError, EOFError):
                async with exchange(target, "POST", CHAT, body) as answer:
                    await answer.content()
                    answered.append((str(answer.status), time.perf_counter() - began))

    await asyncio.gather(*(post() for _ in range(num_clients)))
    return answered


# -- measuring --------------------------------------------------------------------------------------------------------


async def measure(target: Target, model: str, name: str, seconds: float) -> tuple[list[float], list[float], float]:
    """Gaps between the tokens of a stream, times of `/health`, and the p99 of the event loop's lag; seconds."""
    context = (await call(target, "GET", "/v1/models"))["data"][0]["max_model_len"]
    body = completion_body(model, f"{name}:", context - MARGIN_TOKENS, ignore_eos=True)
    stream = Stream(target, "/v1/completions", body, 600.0)
    reading = asyncio.ensure_future(stream.run())
    try:
        await stream.wait_for_chunks(5)  # its prompt is no part of it
        first, before = stream.num_chunks, await _lag_buckets(target)
        health = await _probe(target, seconds)
        after = await _lag_buckets(target)
        times = stream.sample().chunk_times_s[first:]
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
    gaps = [b - a for a, b in itertools.pairwise(times)]
    return gaps, health, percentile_of({bound: after[bound] - before[bound] for bound in after}, 0.99)


async def _probe(target: Target, seconds: float) -> list[float]:
    """Ask for `/health` at fixed times; what each took since its own."""
    begin = time.perf_counter()
    found: list[float] = []

    async def ask(due: float) -> None:
        await call(target, "GET", "/health")
        found.append(time.perf_counter() - due)

    asking = []
    for number in range(int(seconds / PROBE_S)):
        due = begin + number * PROBE_S
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        asking.append(asyncio.ensure_future(ask(due)))
    await asyncio.gather(*asking)
    return found


async def _lag_buckets(target: Target) -> dict[float, int]:
    """The server's histogram: bound -> how many were no more than that."""
    async with exchange(target, "GET", "/metrics") as answer:
        text = (await answer.content()).decode()
    return {float(bound): int(float(count)) for bound, count in re.findall(rf'{LAG}{{le="([^"]+)"}} (\S+)', text)}


def percentile_of(cumulative: Mapping[float, int], share: float) -> float:
    """The bound of the bucket that this share of the values lies below."""
    total = max(cumulative.values(), default=0)
    return min((bound for bound, count in cumulative.items() if count >= share * total), default=float("inf"))


def run_phase(target: Target, model: str, name: str, body: bytes | None, num_clients: int, seconds: float) -> Phase:
    processes = multiprocessing.get_context("spawn")
    stop, results = processes.Event(), processes.Queue()
    flood = None
    if body is not None:
        arguments = (target.base_url, body, num_clients, stop, results)
        flood = processes.Process(target=run_flood, args=arguments, daemon=True)
        flood.start()
    try:
        gaps, health, lag = asyncio.run(measure(target, model, name, seconds))
    finally:
        stop.set()
    answered: list[tuple[str, float]] = [] if flood is None else results.get(timeout=600)
    if flood is not None:
        flood.join()
    p50, p99, most = (1000 * float(np.percentile(gaps, one)) for one in (50, 99, 100))
    times = [took for _, took in answered]
    return Phase(
        name,
        len(gaps),
        p50,
        p99,
        most,
        1000 * lag,
        1000 * float(np.percentile(health, 99)),
        Counter(status for status, _ in answered),
        1000 * float(np.median(times)) if times else 0.0,
    )


def table(phases: Sequence[Phase]) -> str:
    lines = [
        "| flood | tokens | ITL p50 ms | p99 | max | loop lag p99 ms | /health p99 ms | answers | after ms |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | --- | ---: |",
    ]
    for one in phases:
        answers = ", ".join(f"{count} x {status}" for status, count in sorted(one.statuses.items()))
        lines.append(
            f"| {one.name} | {one.num_tokens} | {one.itl_p50:.1f} | {one.itl_p99:.1f} | {one.itl_max:.1f} "
            f"| <= {one.lag_p99:.0f} | {one.health_p99:.1f} | {answers or '-'} | {one.answer_p50:.0f} |"
        )
    return "\n".join(lines)


# -- connections ------------------------------------------------------------------------------------------------------

ATTACKS = {"slow": 200, "idle": 1000}
"""Connections by kind."""
NUM_STREAMS = 32
MOST_RATIO = 1.2
SLOW_BYTE_S = 1.0
STUCK_BUFFER_BYTES = 4096


@dataclass(frozen=True)
class Footprint:
    """What the server process holds."""

    rss_kib: int
    num_fds: int


@dataclass(frozen=True)
class Attacked:
    """One round: p99 inter-token latencies in ms of the same streams, and the server before and during the attack."""

    before_ms: float
    attacked_ms: float
    after_ms: float
    idle: Footprint
    held: Footprint

    @property
    def ratio(self) -> float:
        return 2 * self.attacked_ms / (self.before_ms + self.after_ms)

    @property
    def noise(self) -> float:
        return self.after_ms / self.before_ms


def footprint(pid: int) -> Footprint:
    with open(f"/proc/{pid}/status") as file:
        rss = next(int(line.split()[1]) for line in file if line.startswith("VmRSS"))
    return Footprint(rss, len(os.listdir(f"/proc/{pid}/fd")))


def run_connections(url: str, kind: str, ready: Event, stop: Event) -> None:
    """In a process of its own: hold connections, and open those again that the server closes."""
    asyncio.run(_hold(Target(url), kind, ready, stop))


async def _hold(target: Target, kind: str, ready: Event, stop: Event) -> None:
    num_open = 0

    async def hold() -> None:
        nonlocal num_open
        while not stop.is_set():
            with suppress(OSError, EOFError):
                reader, writer = await target.connect()
                try:
                    request = target.request("GET", "/health").replace(b"Connection: close", b"Connection: keep-alive")
                    if kind == "idle":
                        writer.write(request)
                        await reader.readuntil(b"}")
                    num_open += 1
                    if num_open >= ATTACKS[kind]:
                        ready.set()
                    await (_drip(writer, request, stop) if kind == "slow" else _wait_for_close(reader, stop))
                finally:
                    writer.close()

    await asyncio.gather(*(hold() for _ in range(ATTACKS[kind])))


async def _drip(writer: asyncio.StreamWriter, request: bytes, stop: Event) -> None:
    for byte in request[:-1]:
        if stop.is_set() or writer.is_closing():
            return
        writer.write(bytes([byte]))
        await asyncio.sleep(SLOW_BYTE_S)


async def _wait_for_close(reader: asyncio.StreamReader, stop: Event) -> None:
    while not stop.is_set() and not reader.at_eof():
        with suppress(TimeoutError):
            await asyncio.wait_for(reader.read(1), SLOW_BYTE_S)


async def stream_p99_ms(target: Target, model: str, seconds: float, *, is_stuck: bool, num_measured: int) -> float:
    """p99 over the gaps of the first streams, while the last one is read like the others or not at all."""
    bodies = [completion_body(model, f"{number}:", 2048, ignore_eos=True) for number in range(NUM_STREAMS)]
    streams = [Stream(target, "/v1/completions", body, 600.0) for body in bodies[: NUM_STREAMS - is_stuck]]
    reading = [asyncio.ensure_future(stream.run()) for stream in streams]
    stuck = _stuck_stream(target, bodies[-1]) if is_stuck else None
    try:
        for stream in streams:
            await stream.wait_for_chunks(5)
        first = [stream.num_chunks for stream in streams]
        await asyncio.sleep(seconds)
        samples = [stream.sample() for stream in streams]
    finally:
        for one in reading:
            one.cancel()
        await asyncio.gather(*reading, return_exceptions=True)
        if stuck is not None:
            stuck.close()
    times = [sample.chunk_times_s[begin:] for sample, begin in zip(samples, first, strict=True)]
    gaps = [b - a for one in times[:num_measured] for a, b in itertools.pairwise(one)]
    return 1000 * float(np.percentile(gaps, 99))


def _stuck_stream(target: Target, body: Mapping[str, Any]) -> socket.socket:
    """A request whose answer is never read."""
    host, _, port = target.base_url.removeprefix("http://").partition(":")
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, STUCK_BUFFER_BYTES)
    client.connect((host, int(port)))
    client.sendall(target.request("POST", "/v1/completions", body))
    return client


def attack(server: ServerProcess, model: str, kind: str, seconds: float) -> Attacked:
    """One round."""
    target = Target(server.base_url)
    num_measured = NUM_STREAMS - (kind == "slow")

    def p99_ms(*, is_stuck: bool = False) -> float:
        return asyncio.run(stream_p99_ms(target, model, seconds, is_stuck=is_stuck, num_measured=num_measured))

    before_ms, idle = p99_ms(), footprint(server.pid)
    processes = multiprocessing.get_context("spawn")
    ready, stop = processes.Event(), processes.Event()
    attacker = processes.Process(target=run_connections, args=(server.base_url, kind, ready, stop), daemon=True)
    attacker.start()
    try:
        if not ready.wait(120):
            raise RuntimeError(f"the server does not hold {ATTACKS[kind]} connections")
        attacked_ms = p99_ms(is_stuck=kind == "slow")
        held = footprint(server.pid)  # by now the server has accepted them all
    finally:
        stop.set()
        attacker.join()
    return Attacked(before_ms, attacked_ms, p99_ms(), idle, held)


def attack_table(kind: str, rounds: Sequence[Attacked]) -> str:
    ratios, noise = [one.ratio for one in rounds], [one.noise for one in rounds]
    last = rounds[-1]
    return "\n".join(
        [
            f"| {ATTACKS[kind]} {kind} connections | median | range |",
            "| --- | ---: | ---: |",
            f"| ITL p99 in control runs (ms) | {statistics.median(one.before_ms for one in rounds):.1f} | |",
            f"| ratio to the control runs (limit {MOST_RATIO}) | {statistics.median(ratios):.2f} "
            f"| {min(ratios):.2f} to {max(ratios):.2f} |",
            f"| A/A | {statistics.median(noise):.2f} | {min(noise):.2f} to {max(noise):.2f} |",
            f"| server without and with them: descriptors | {last.idle.num_fds} | {last.held.num_fds} |",
            f"| RSS (KiB) | {last.idle.rss_kib:,} | {last.held.rss_kib:,} |",
        ]
    )


def run_attacks(server: ServerProcess, kinds: Sequence[str], num_rounds: int, seconds: float, *, as_json: bool) -> int:
    model = asyncio.run(first_model(Target(server.base_url)))
    found = {}
    for kind in kinds:
        attack(server, model, kind, min(1.0, seconds))  # warm up
        found[kind] = [attack(server, model, kind, seconds) for _ in range(num_rounds)]
    if as_json:
        print(json.dumps({kind: [asdict(one) for one in rounds] for kind, rounds in found.items()}, indent=2))
    else:
        print("\n\n".join(attack_table(kind, rounds) for kind, rounds in found.items()))
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = bench_parser("python -m benchmarks.flood", (__doc__ or "").partition("\n\n")[0])
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL, help="name or path of the model")
    parser.add_argument("--backend", default="auto", choices=["auto", "cpu", "torch", "llamacpp"], help="backend")
    parser.add_argument("--clients", type=int, default=8, help="concurrent clients that post prompts")
    parser.add_argument("--seconds", type=float, default=15.0, help="duration of each phase, in seconds")
    parser.add_argument("--bytes", type=int, help="size of a prompt (default: 95 %% of the largest one accepted)")
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES), help="kinds of prompts")
    parser.add_argument("--connections", nargs="+", choices=list(ATTACKS), help="hold connections (default: post)")
    parser.add_argument("--rounds", type=int, default=7, help="rounds with --connections (7)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--serve", nargs=argparse.REMAINDER, default=[], help="arguments for `tokenmill serve`")
    options = parser.parse_args(arguments)
    more = ["--backend", options.backend, "--log-level", "warning", *options.serve]
    if options.connections:
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 8192), most))
    with serving(options.model, more) as server:
        if options.connections:
            return run_attacks(server, options.connections, options.rounds, options.seconds, as_json=options.json)
        target = Target(server.base_url)
        model = asyncio.run(first_model(target))
        num_bytes = options.bytes or int(SHARE * asyncio.run(largest_prompt(target, model)))
        asyncio.run(measure(target, model, "warm-up", 1.0))
        names: list[str | None] = [None, *options.shapes, None]
        phases = []
        for shape in names:
            body = None if shape is None else flood_body(model, shape, num_bytes)
            phases.append(run_phase(target, model, shape or "none", body, options.clients, options.seconds))
            print(table(phases[-1:]).splitlines()[-1], file=sys.stderr, flush=True)
    if options.json:
        print(json.dumps({"num_bytes": num_bytes, "phases": [asdict(one) for one in phases]}, indent=2))
        return 0
    print(f"{options.clients} clients, prompts of {num_bytes} bytes ({FAR_ABOVE_BYTES} far above)\n")
    print(table(phases))
    worst = max(max(one.itl_p99, one.lag_p99) for one in phases if one.statuses)
    control = max(max(one.itl_p99, one.lag_p99) for one in phases if not one.statuses)
    print(f"\nworst p99 {worst:.0f} ms, in control runs {control:.0f} ms; the limit is {LIMIT_MS:.0f} ms")
    return 0


if __name__ == "__main__":
    sys.exit(main())
