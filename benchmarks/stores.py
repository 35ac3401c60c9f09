"""What a store costs: `python -m benchmarks.stores --postgres postgresql://...` compares a database with a directory.
With `--moves TOKENS...`: what a session costs that moves to another server, its KV transferred or computed again.

Turns of the fake model, so that the store is most of what is measured: latency of one conversation at a time, turns a
second of 63 at once, and the start of a service with many stored sessions, with the memory that it takes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from tokenmill import SessionService
from tokenmill.backends.fake import FakeConfig, FakeModel
from tokenmill.bench.load_clients import serving
from tokenmill.config import DEFAULT_MODEL
from tokenmill.params import SamplingParams
from tokenmill.session.log import Turn
from tokenmill.session.manager import SessionLimits
from tokenmill.session.postgres import PostgresStore
from tokenmill.session.records import SessionRecord, record_of
from tokenmill.session.store import DATABASE, SessionStore, Store

PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
WRITERS = 63
TURN_TOKENS = 200
"""Of a turn that is written to a store alone."""


def service(store: Store) -> SessionService:
    limits = SessionLimits(max_log_bytes=1 << 40)
    model = FakeModel(FakeConfig(vocab_size=258, max_context=4096))
    return SessionService(model, store=store, kv_cache_tokens=1 << 16, limits=limits)


async def turn(one: SessionService, name: str) -> None:
    live = await one.answer(name, given="a short question")
    async for delta in live.read():
        last = delta
    if last.durable is not True:
        raise RuntimeError(f"not durable: {last}")


async def latency_ms(one: SessionService, num_turns: int) -> float:
    """The median of a turn, one after the other."""
    seconds = []
    name = await one.create_session(sampling_params=PARAMS)
    for _ in range(num_turns):
        began = time.perf_counter()
        await turn(one, name)
        seconds.append(time.perf_counter() - began)
    await one.end_session(name)
    return 1000 * statistics.median(seconds)


async def turns_per_s(one: SessionService, seconds: float) -> float:
    names = [await one.create_session(sampling_params=PARAMS) for _ in range(WRITERS)]
    ends_at, count = time.perf_counter() + seconds, 0

    async def talk(name: str) -> None:
        nonlocal count
        number = 0
        while time.perf_counter() < ends_at:
            await turn(one, name)
            count += 1
            number += 1
            if number % 50 == 0:
                await one.rewind(name, at_turn=0)

    began = time.perf_counter()
    await asyncio.gather(*map(talk, names))
    rate = count / (time.perf_counter() - began)
    for name in names:
        await one.end_session(name)
    return rate


def written_per_s(store: Store, record: SessionRecord, fingerprint: str, seconds: float) -> float:
    """Turns of 200 tokens that the store acknowledges to as many threads as there are writers, without an engine."""
    ends_at = time.perf_counter() + seconds
    counts = [0] * WRITERS

    def write(number: int) -> None:
        name, ids = f"{record.session_id}-{number}", list(range(TURN_TOKENS // 2))
        tokens, turns, count = record.tokens, record.turns, 0
        while time.perf_counter() < ends_at:
            middle, end = len(tokens) + len(ids), len(tokens) + 2 * len(ids)
            asked = Turn("input", ({"role": "user", "content": "a short question"},), middle)
            answered = Turn("answer", ({"role": "assistant", "content": "a short answer"},), end)
            tokens, turns = tokens.extended(ids).extended(ids), turns.extended([asked, answered])
            if store.is_shared and count:  # the session is there
                store.begin_answer(name, 1, {"id": f"answer-{count}", "given": "a short question"})
            now = replace(record, session_id=name, tokens=tokens, turns=turns)
            store.save(now, fingerprint, 1, is_new=count == 0).result()
            count += 1
        counts[number] = count
        store.delete(name, 1).result()

    threads = [threading.Thread(target=write, args=(number,)) for number in range(WRITERS)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts) / (time.perf_counter() - began)


async def compare(url: str, pairs: int, num_turns: int, seconds: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        stores: dict[str, Store] = {"sqlite": SessionStore(folder), "postgresql": PostgresStore(url)}
        found: dict[str, list[float]] = {"sqlite": [], "postgresql": []}
        rates: dict[str, float] = {}
        services = {name: service(store) for name, store in stores.items()}
        for _ in range(pairs):
            for name, one in services.items():
                found[name].append(await latency_ms(one, num_turns))
        written: dict[str, list[float]] = {"sqlite": [], "postgresql": []}
        for name, one in services.items():
            rates[name] = await turns_per_s(one, seconds)
        model = services["sqlite"]._model()
        empty = model.queue.find(await services["sqlite"].create_session(sampling_params=PARAMS))
        record, fingerprint = record_of(empty), model.fingerprint.of_log
        for _ in range(3):
            for name, store in stores.items():
                written[name].append(await asyncio.to_thread(written_per_s, store, record, fingerprint, seconds / 2))
        for name, one in services.items():
            await one.close()
            await asyncio.to_thread(stores[name].close)
    ratios = [ours / theirs for theirs, ours in zip(found["sqlite"], found["postgresql"], strict=True)]
    return {
        "turn_p50_ms": {name: round(statistics.median(values), 2) for name, values in found.items()},
        "ratio_median_of_pairs": round(statistics.median(ratios), 2),
        "ratios": [round(one, 2) for one in ratios],
        f"turns_per_s_{WRITERS}_writers": {name: round(rate) for name, rate in rates.items()},
        f"written_per_s_{WRITERS}_writers": {name: round(statistics.median(all_)) for name, all_ in written.items()},
    }


# -- many stored sessions ----------------------------------------------------------------------------------------------


def fill(store: Path | str, count: int) -> None:
    """So many copies of one session."""

    async def one_session() -> None:
        opened: Store = PostgresStore(store) if isinstance(store, str) else SessionStore(store)
        async with service(opened) as one:
            name = await one.create_session(sampling_params=PARAMS)
            await turn(one, name)
        opened.close()

    asyncio.run(one_session())
    columns = {"sessions": "fingerprint, head, used_at, key, created_at, num_bytes", "tokens": "begin, ids"}
    columns |= {"turns": "number, turn"}
    if isinstance(store, str):
        import psycopg

        with psycopg.connect(store, autocommit=True) as database:
            for table, names in columns.items():
                key, extra = ("id", ", epoch") if table == "sessions" else ("session", "")
                database.execute(
                    f"INSERT INTO {table} ({key}, {names}{extra}) SELECT 'copy-' || n, {names}{extra} "
                    f"FROM (SELECT * FROM {table} LIMIT 2) one, generate_series(1, {count}) n ON CONFLICT DO NOTHING"
                )
            database.execute("ANALYZE")
        return
    import sqlite3

    with sqlite3.connect(store / DATABASE) as connection:
        numbers = f"(WITH RECURSIVE n(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM n WHERE n < {count}) SELECT n FROM n)"
        for table, names in columns.items():
            key = "id" if table == "sessions" else "session"
            connection.execute(
                f"INSERT OR IGNORE INTO {table} ({key}, {names}) SELECT 'copy-' || n, {names} "
                f"FROM (SELECT * FROM {table} LIMIT 2), {numbers}"
            )


START = """
import asyncio, json, resource, sys, time
from pathlib import Path
from benchmarks.stores import PARAMS, service, turn
from tokenmill.session.postgres import PostgresStore
from tokenmill.session.store import SessionStore
where = sys.argv[1]
async def run():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.perf_counter()
    store = PostgresStore(where) if "://" in where else SessionStore(Path(where))
    async with service(store) as one:
        started = time.perf_counter() - began
        count = len(one)
        if count > 1:
            await turn(one, f"copy-{count // 2}")
        more = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    store.close()
    print(json.dumps({"sessions": count, "start_s": round(started, 3), "more_mib": round(more / 1024, 1)}))
asyncio.run(run())
"""


def start(store: Path | str) -> dict[str, Any]:
    """The start of a service in a process of its own."""
    done = subprocess.run([sys.executable, "-c", START, str(store)], capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout))


# -- sessions that move ------------------------------------------------------------------------------------------------


def moves(url: str, model: str, lengths: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    """Time to the first token of turns that are asked on two servers alternately, in interleaved pairs."""
    sides: dict[str, list[str]] = {"transferred": [], "computed": []}
    with ExitStack() as stack:
        for name, addresses in sides.items():
            switch = [] if name == "transferred" else ["--no-kv-transfer"]
            for _ in range(2):
                arguments = ["--store", url, "--log-level", "warning", *switch]
                addresses.append(stack.enter_context(serving(model, arguments)).base_url)
        return [_moved(sides, length, rounds) for length in lengths]


def _moved(sides: dict[str, list[str]], length: int, rounds: int) -> dict[str, Any]:
    choose, names = random.Random(length), dict[str, str]()
    for name, addresses in sides.items():
        names[name] = _call(f"{addresses[0]}/v1/sessions", {"temperature": 0})["id"]
        _turn_ms(addresses[0], names[name], [choose.randrange(1000, 40000) for _ in range(length)])
    found: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds):
        for name, addresses in sides.items():
            given = [choose.randrange(1000, 40000) for _ in range(8)]
            found[name].append(_turn_ms(addresses[(number + 1) % 2], names[name], given))
    for name, addresses in sides.items():
        urllib.request.urlopen(urllib.request.Request(f"{addresses[0]}/v1/sessions/{names[name]}", method="DELETE"))
    ratios = [ours / theirs for ours, theirs in zip(found["transferred"], found["computed"], strict=True)]
    medians = {f"{name}_ms": round(statistics.median(values), 1) for name, values in found.items()}
    return {"tokens": length, **medians, "ratio": round(statistics.median(ratios), 3)}


def _call(address: str, body: dict[str, Any]) -> Any:
    headers = {"Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(address, json.dumps(body).encode(), headers)) as response:
        return json.load(response)


def _turn_ms(address: str, name: str, given: list[int]) -> float:
    """Of a turn with one token, which is its first."""
    began = time.perf_counter()
    body = {"input": given, "max_tokens": 1, "ignore_eos": True, "stream": False}
    _call(f"{address}/v1/sessions/{name}/generate", body)
    return 1000 * (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--postgres", required=True, metavar="URL", help="an empty database")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--turns", type=int, default=60, help="of each conversation")
    parser.add_argument("--seconds", type=float, default=5.0, help="of many writers")
    parser.add_argument("--sessions", type=int, default=100_000, help="stored, for the start; 0: not measured")
    parser.add_argument("--moves", type=int, nargs="+", metavar="TOKENS", help="lengths of sessions that move")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="of the servers that they move between")
    given = parser.parse_args()
    if given.moves:
        print(json.dumps(moves(given.postgres, given.model, given.moves, 2 * given.pairs), indent=1))
        return
    result = asyncio.run(compare(given.postgres, given.pairs, given.turns, given.seconds))
    if given.sessions:
        with tempfile.TemporaryDirectory() as folder:
            for name, store in (("sqlite", Path(folder)), ("postgresql", given.postgres)):
                fill(store, 1)
                few = start(store)
                fill(store, given.sessions)
                result[f"start_{name}"] = {"few": few, "many": start(store)}
    result["max_rss_mib"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
