"""`python -m benchmarks.scaling`: how cost grows with the workload, on the fake backend, with fitted exponents.

idle      host CPU of a turn beside 10 to 1,000 idle sessions (100,000 with --full), and memory of an idle session
active    host CPU of a step per number of sessions that are answered at the same time, 10 to 300 (1,000)
context   host CPU of a decode step by tokens of context, to 32,768 (131,072)
running   host CPU of a decode step by running requests, to 1,024
turns     host CPU of a session's turn, from turn 10 to turn 300 (1,000), interleaved with a young session
prefix    time of a lookup in a prefix index of 10,000 to 1 million tokens (10 million), with a shared beginning
store     time to save a turn into a store of 100 to 3,000 sessions (1 million)

A cost ~ size^e: e is the slope of the logarithms, fitted by least squares. The bars are those of `BARS`.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import platform
import sqlite3
import statistics
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import engine, turns
from tokenmill.backends.fake import FakeConfig
from tokenmill.bench import bench_parser
from tokenmill.bench.sessions import line_chart
from tokenmill.engine.prefix import Entry, PrefixIndex
from tokenmill.engine.request import Limits, Request
from tokenmill.params import SamplingParams
from tokenmill.session.log import SharedList, Tokens, Turn
from tokenmill.session.manager import SessionLimits
from tokenmill.session.records import SessionRecord
from tokenmill.session.service import SessionService
from tokenmill.session.store import SessionStore

BARS = {"idle": 0.1, "running": 1.05, "prefix": 0.1, "turns": 0.04}
"""Largest exponent; that of turns is 20 % from turn 10 to turn 1,000."""
IDLE_BYTES, TOKEN_BYTES = 4096, 8
"""Most memory of an idle session, and of each of its tokens."""
WEIGHED = 8192
"""Idle sessions whose memory is taken together, from none on: tables that hold all of them grow in leaps."""
TOGETHER, ANSWERED = 128, 8
"""Idle sessions that are begun at the same time, and of how many one is answered."""


@dataclass
class Curve:
    name: str
    what: str
    unit: str
    sizes: list[int]
    values: list[float]
    notes: dict[str, float] = field(default_factory=dict)

    @property
    def exponent(self) -> float:
        return float(np.polyfit(np.log(self.sizes), np.log(self.values), 1)[0])

    @property
    def bar(self) -> float | None:
        return BARS.get(self.name)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "exponent": self.exponent, "bar": self.bar}


def sizes_to(first: int, last: int) -> list[int]:
    """About two in each power of ten, the last one included."""
    steps = max(1, round(2 * np.log10(last / first)))
    return [round(first * (last / first) ** (i / steps)) for i in range(steps + 1)]


# -- curves -----------------------------------------------------------------------------------------------------------


def idle(most: int, rounds: int) -> Curve:
    """One service that fills up with idle sessions; at each size, turns of one session that is not."""
    found = Curve("idle", "turn beside idle sessions", "host us", sizes_to(10, most), [])
    tokens, prompt = 16, [1 + i % 200 for i in range(64)]

    limits = SessionLimits(stall_timeout_s=None)

    async def begin(service: SessionService, *, is_answered: bool) -> None:
        name = await service.create_session(sampling_params=_ANSWER, seed=0)
        await service.append_input(name, prompt)
        if is_answered:
            async for _ in await service.generate_stream(name, 1):
                pass

    async def add(service: SessionService, count: int, answered: int = ANSWERED) -> None:
        """Of `answered` sessions, one is answered: only so many have KV in any case."""
        for first in range(0, count, TOGETHER):
            some = range(first, min(first + TOGETHER, count))
            await asyncio.gather(*(begin(service, is_answered=number % answered == 0) for number in some))

    async def run() -> None:
        async with _service(limits=limits) as service:
            talk = await turns.Talk.begin(service, tokens)
            await talk.turns(3)
            count = 0
            for size in found.sizes:
                await add(service, size - count)
                count = size
                await talk.turns(rounds)
                found.values.append(1e6 * statistics.median(talk.costs.host_s[-rounds:]))

    async def weigh() -> None:
        async with _service(limits=limits) as service:
            await add(service, TOGETHER, answered=1)
            tracemalloc.start()
            gc.collect()
            before = tracemalloc.get_traced_memory()[0]
            await add(service, WEIGHED - TOGETHER, answered=1)
            gc.collect()
            each = (tracemalloc.get_traced_memory()[0] - before) / (WEIGHED - TOGETHER)
            tracemalloc.stop()
            found.notes["bytes_per_idle_session"] = each
            found.notes["most_bytes_per_idle_session"] = IDLE_BYTES + TOKEN_BYTES * (len(prompt) + 1)

    asyncio.run(run())
    asyncio.run(weigh())
    return found


def active(most: int, rounds: int) -> Curve:
    """Answers of 16 tokens in all sessions together."""
    found = Curve("active", "step of active sessions", "host us", sizes_to(10, most), [])

    async def run() -> None:
        limits = SessionLimits(stall_timeout_s=None)
        async with _service(limits=limits, max_num_seqs=most, max_num_batched_tokens=max(2048, most)) as service:
            names = [await service.create_session(sampling_params=_ANSWER, seed=0) for _ in range(most)]

            async def answer(name: str) -> None:
                await service.append_input(name, [1, 2, 3, 4])
                async for _ in await service.generate_stream(name, 16):
                    pass

            for size in found.sizes:
                taken = []
                for _ in range(rounds):
                    host, backend = time.process_time(), turns.TimedBackend.spent_s
                    await asyncio.gather(*(answer(name) for name in names[:size]))
                    spent = turns.TimedBackend.spent_s - backend
                    taken.append((time.process_time() - host - spent) / 16)
                found.values.append(1e6 * statistics.median(taken))

    asyncio.run(run())
    return found


def context(most: int, rounds: int) -> Curve:
    found = Curve("context", "decode step by context", "host us", sizes_to(512, most), [])
    for size in found.sizes:
        config = FakeConfig(
            vocab_size=32, max_context=size + 256, num_cells=2 * (size + 512), max_seqs=8, windows=(256,)
        )
        core, backend = engine.core_of(config, max_num_seqs=4, max_num_batched_tokens=2048)
        request = Request("r", [i * i % 32 for i in range(size)], Limits(max_new_tokens=200))
        core.add(request)
        while not request.output:
            core.step()
        taken = [_host_step_s(core.step, backend) for _ in range(20 * rounds)]
        core.close()
        found.values.append(1e6 * statistics.median(taken))
    return found


def running(most: int, rounds: int) -> Curve:
    sizes = [size for size in (64, 128, 256, 512, 1024) if size <= most]
    report = engine.run(sizes, [0], rounds, 50, quiet=True)
    return Curve("running", "decode step by running requests", "host us", sizes, [
        row.host_us_per_step for row in report.rows
    ])  # fmt: skip


def session_turns(most: int, rounds: int) -> Curve:
    """A session at each age; its last turns alternate with those of one at turn 10, by which they are scaled."""
    sizes = [size for size in (10, 30, 100, 300, 1000) if size <= most]
    found = Curve("turns", "turn by its number", "host us", sizes, [])
    base: list[float] = []
    for size in sizes:
        options = argparse.Namespace(turns=max(size, 20), tokens=20, early=10, window=2 * rounds)
        young, old = asyncio.run(turns.run(options, turns.CHATML, None))
        latest = slice(-options.window, None)
        base.append(1000 * young.median_ms(latest))
        found.values.append(1.0 if size == 10 else old.median_ms(latest) / young.median_ms(latest))
    found.values = [ratio * statistics.median(base) for ratio in found.values]
    found.notes["last_to_first"] = found.values[-1] / found.values[0]
    return found


def prefix(most: int, rounds: int) -> Curve:
    """Entries of 1,000 tokens, 200 of them the same in all; the slowest of: a whole one, a new one, a new end."""
    found = Curve("prefix", "prefix lookup by tokens in the index", "us", sizes_to(10_000, most), [])
    index, numbers, length, shared = PrefixIndex(), np.random.default_rng(0), 1000, 200
    beginning = numbers.integers(0, 50_000, shared, dtype=np.int32)

    def tokens() -> Any:
        return np.concatenate([beginning, numbers.integers(0, 50_000, length - shared, dtype=np.int32)])

    count, some = 0, tokens()
    for size in found.sizes:
        while count * length < size:
            some = tokens()
            index.insert(Entry(count, some, None, lambda: length, parked=True))
            count += 1
        asked = [some, tokens(), np.concatenate([some[:600], some[:400]])]
        taken: list[list[float]] = [[] for _ in asked]
        for _ in range(100 * rounds):
            for one, times in zip(asked, taken, strict=True):
                began = time.perf_counter()
                index.match(one)
                index.divergence(one, None, 8)
                times.append(time.perf_counter() - began)
        found.values.append(1e6 * max(statistics.median(times) for times in taken))
    return found


def store(most: int, rounds: int) -> Curve:
    found = Curve("store", "turn saved by sessions in the store", "us", sizes_to(100, most), [])

    def record(number: int, num_turns: int) -> SessionRecord:
        made = [Turn("input", ({"role": "user", "content": "hello"},), 8 * (i + 1)) for i in range(num_turns)]
        head = {**_head(), "created_at": float(number), "used_at": float(number)}
        return SessionRecord(f"s{number}", head, Tokens(range(8 * num_turns)), SharedList(made))

    with tempfile.TemporaryDirectory() as folder:
        count = 1
        for size in found.sizes:
            with closing(SessionStore(Path(folder))) as saved:
                saved.save(record(0, 1), "fingerprint").result()
            _copy_sessions(Path(folder) / "sessions.sqlite", range(count, size))
            saved, count, taken = SessionStore(Path(folder)), size, []
            for i in range(20 * rounds):
                began = time.perf_counter()
                saved.save(record(i * 7919 % size, 2 + i), "fingerprint").result()
                taken.append(time.perf_counter() - began)
            found.values.append(1e6 * statistics.median(taken))
            saved.close()
    return found


def _copy_sessions(database: Path, numbers: range) -> None:
    """Copy the first session under other names, in the database itself: a million saved one by one take an hour."""
    names = "WITH RECURSIVE names(n) AS (SELECT ? UNION ALL SELECT n + 1 FROM names WHERE n + 1 < ?)"
    with closing(sqlite3.connect(database)) as connection, connection:
        for table, key in (("sessions", "id"), ("tokens", "session"), ("turns", "session")):
            columns = [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]
            copied = ", ".join("'s' || n" if one == key else one for one in columns)
            rows = f"SELECT {copied} FROM names, {table} WHERE {key} = 's0'"
            connection.execute(
                f"{names} INSERT INTO {table} ({', '.join(columns)}) {rows}", (numbers.start, numbers.stop)
            )


CURVES: dict[str, tuple[Callable[[int, int], Curve], int, int]] = {
    "idle": (idle, 1000, 100_000),
    "active": (active, 300, 1000),
    "context": (context, 32_768, 131_072),
    "running": (running, 1024, 1024),
    "turns": (session_turns, 300, 1000),
    "prefix": (prefix, 1_000_000, 10_000_000),
    "store": (store, 3000, 1_000_000),
}
"""What measures it, and the largest size: by default, and with --full."""

_ANSWER = SamplingParams(temperature=0, ignore_eos=True)


def _head() -> dict[str, Any]:
    """Of a session that was made with defaults."""
    values: dict[str, Any] = {"sampling": _ANSWER, "overflow": "error", "overflow_keep": 0.5, "template_options": {}}
    numbers = {"priority": 0, "attempt": 0, "num_forks": 0}
    nothing = dict.fromkeys(("system", "namespace", "last_answer", "title"))
    return {**values, **numbers, **nothing, "key": "", "inbox": (), "metadata": {}}


def _service(**options: Any) -> SessionService:
    """On the fake backend, whose steps are timed apart and whose attention is bounded."""
    folder = Path(tempfile.mkdtemp(prefix="tokenmill-scaling-"))
    vocabulary = turns.write_text_files(folder, turns.CHATML)
    config = FakeConfig(vocab_size=vocabulary, max_context=4096, windows=(turns.ATTENTION_WINDOW,))
    return SessionService(turns.TimedModel(config, folder), kv_cache_tokens=1 << 17, **options)


def _host_step_s(step: Callable[[], object], backend: engine.TimedModel) -> float:
    backend.model_s, began = 0.0, time.thread_time()
    step()
    return time.thread_time() - began - backend.model_s


def table(curves: Sequence[dict[str, Any]]) -> str:
    """As markdown."""
    lines = [
        "| cost | from | to | first | last | exponent | bar |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for one in curves:
        sizes, values, bar = one["sizes"], one["values"], "" if one["bar"] is None else f"{one['bar']:g}"
        ends = f"{sizes[0]:,} | {sizes[-1]:,} | {values[0]:,.0f} {one['unit']} | {values[-1]:,.0f} {one['unit']}"
        lines.append(f"| {one['what']} | {ends} | {one['exponent']:.2f} | {bar} |")
    return "\n".join(lines)


def charts(curves: Sequence[dict[str, Any]], folder: Path) -> None:
    """An SVG for each curve, on logarithmic axes."""
    for one in curves:
        title = f"{one['what']}: size^{one['exponent']:.2f}"
        lines = {one["unit"]: one["values"]}
        drawn = line_chart(title, one["sizes"], lines, x_label="size", y_label=one["unit"], is_log=True)
        (folder / f"scaling-{one['name']}.svg").write_text(drawn)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = bench_parser("python -m benchmarks.scaling", __doc__)
    parser.add_argument("curves", nargs="*", default=list(CURVES), metavar="CURVE", help="curves")
    parser.add_argument("--full", action="store_true", help="up to the largest sizes: about an hour")
    parser.add_argument("--rounds", type=int, default=5, help="repetitions; medians count")
    parser.add_argument("--json", type=Path, help="write or update this JSON file (default: none)")
    parser.add_argument("--plots", type=Path, help="write an SVG for each curve to this folder (default: none)")
    options = parser.parse_args(arguments)
    if unknown := set(options.curves) - set(CURVES):
        parser.error(f"no curve {', '.join(sorted(unknown))}; there are {', '.join(CURVES)}")
    found: dict[str, dict[str, Any]] = {}
    if options.json is not None and options.json.exists():
        found = {one["name"]: one for one in json.loads(options.json.read_text())["curves"]}
    for name in options.curves:
        measure, quick, full = CURVES[name]
        began = time.monotonic()
        found[name] = measure(full if options.full else quick, options.rounds).to_json()
        print(f"{name}: {json.dumps(found[name])} in {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        if options.json is not None:
            where = {"date": datetime.now(UTC).strftime("%Y-%m-%d"), "python": platform.python_version()}
            curves = [found[one] for one in CURVES if one in found]
            options.json.write_text(json.dumps({**where, "curves": curves}, indent=1) + "\n")
    shown = [found[one] for one in CURVES if one in found]
    print(table(shown))
    if options.plots is not None:
        charts(shown, options.plots)
    over = [one["name"] for one in shown if one["bar"] is not None and one["exponent"] > one["bar"]]
    if over:
        print(f"over their bars: {', '.join(over)}")
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
