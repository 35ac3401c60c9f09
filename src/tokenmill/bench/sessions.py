"""`tokenmill bench sessions`: what a session saves, and what a reader that stops costs the others.

First token: the last of many turns, in its session and as a stateless request with the same history and nothing cached,
in turn. Stalled reader: the time between tokens of all readers but one, with that one reading and not reading, in turn;
the ratio of two runs in which it reads (A/A) says how much of a difference is noise. By turn: every turn's first token
in three ways, with the whole history sent as exact ids where there is no session. Restore: from which length on reading
KV bytes from disk beats computing them again; the bytes have just been written, so the page cache is warm.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

from tokenmill.bench import bench_parser
from tokenmill.config import DEFAULT_MODEL
from tokenmill.engine.request import Hints
from tokenmill.outputs import OutputDelta
from tokenmill.params import SamplingParams
from tokenmill.session import persistence
from tokenmill.session.answer import Answer
from tokenmill.session.manager import SessionLimits
from tokenmill.session.service import SessionService
from tokenmill.session.session import KVSource
from tokenmill.session.store import SessionStore

ANSWER = SamplingParams(temperature=0, ignore_eos=True)
WAYS = ("session", "stateless, prefix reuse", "stateless, no reuse")


@dataclass
class ByTurn:
    """Seconds to the first token of each turn, each list of one conversation."""

    tokens_a_turn: int
    history: list[int] = field(default_factory=list)
    """Tokens of the prompt, by turn."""
    seconds: dict[str, list[list[float]]] = field(default_factory=lambda: {way: [] for way in WAYS})


async def first_token_by_turn(
    service: SessionService, num_turns: int, tokens: int, num_rounds: int, say: Callable[[str], None]
) -> ByTurn:
    found = ByTurn(tokens)
    numbers = itertools.count(1)
    vocabulary = service._model().opened.model.info.vocab_size
    for number in range(num_rounds):
        taken: dict[str, list[float]] = {way: [] for way in WAYS}
        name = await service.create_session(sampling_params=ANSWER, seed=0)
        history = []
        for turn in range(num_turns):
            given = [(7919 * next(numbers)) % (vocabulary - 300) + 200 for _ in range(tokens)]
            began = time.monotonic()
            await service.append_input(name, given)
            stream = await service.generate_stream(name, tokens)
            await anext(stream)
            taken["session"].append(time.monotonic() - began)
            async for _ in stream:
                pass
            log = service._model().queue.find(name).log.tokens.tolist()
            prompt = log[: len(log) - tokens]
            history.append(len(prompt))
            reused = await stateless(service, prompt, tokens, ("reuse", name))
            taken["stateless, prefix reuse"].append(reused)
            taken["stateless, no reuse"].append(await stateless(service, prompt, 1, ("none", name, turn)))
            seconds = ", ".join(f"{values[-1]:.3f} s {way}" for way, values in taken.items())
            say(f"round {number + 1}, turn {turn + 1}, {len(prompt)} tokens: {seconds}")
        await service.end_session(name)
        found.history = history
        for way, values in taken.items():
            found.seconds[way].append(values)
    return found


async def stateless(
    service: SessionService, prompt: list[int], num_tokens: int, namespace: tuple[object, ...]
) -> float:
    """Seconds to the first token of a prompt as a request of its own; it finds KV of its namespace only."""
    loaded = service._model()
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=num_tokens)
    began = time.monotonic()
    generation = loaded.intake.generation(prompt, params, None, Hints(namespace=namespace))
    live = Answer(generation, lambda _: None, None, 1 << 30)
    live.start(loaded.bridge)
    first: float | None = None
    async for _ in live.read():
        first = time.monotonic() - began if first is None else first
    assert first is not None, "an answer ends with a chunk"
    return first


@dataclass(frozen=True)
class Restored:
    """Seconds to the first token of a session with so many tokens."""

    num_tokens: int
    kv_bytes: int
    export_s: float
    """What the engine is held up for, when it has nothing else to do."""
    from_bytes_s: list[float]
    replayed_s: list[float]

    @property
    def ratio(self) -> float:
        """The median of the pairs' ratios."""
        return statistics.median(a / b for a, b in zip(self.from_bytes_s, self.replayed_s, strict=True))


async def restoring(
    model: str, lengths: Sequence[int], num_pairs: int, say: Callable[[str], None], **options: int
) -> list[Restored]:
    """Sessions of these lengths, each brought back in both ways, in turn."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        store = SessionStore(folder)
        async with SessionService(model, store=store, **options) as service:  # type: ignore[arg-type]
            numbers = itertools.count(1)
            for length in lengths:
                one = await _one_length(service, store, length, num_pairs, numbers)
                found.append(one)
                say(f"{length} tokens, {one.kv_bytes / 1e6:.1f} MB: {statistics.median(one.from_bytes_s):.3f} s from "
                    f"bytes, {statistics.median(one.replayed_s):.3f} s replayed, ratio {one.ratio:.2f}")  # fmt: skip
        store.close()
    return found


async def _one_length(
    service: SessionService, store: SessionStore, length: int, num_pairs: int, numbers: itertools.count[int]
) -> Restored:
    loaded = service._model()
    assert loaded.persistence is not None
    loaded.persistence.min_kv_tokens = 1  # it is what is to be found out
    vocabulary = loaded.opened.model.info.vocab_size
    name = await service.create_session(sampling_params=ANSWER, seed=0)
    given = [(7919 * next(numbers)) % (vocabulary - 300) + 200 for _ in range(length)]
    await service.append_input(name, given)
    await _first_token(service, name)
    session = loaded.queue.find(name)
    began = time.monotonic()
    kept = await persistence.export_kv(loaded.client, loaded.opened.model, session)
    export_s = time.monotonic() - began
    assert kept is not None, "nobody else is there to evict it"
    tokens, state = kept
    store.kv.write(name, loaded.fingerprint.form, tokens, state, session.used_at)
    from_bytes: list[float] = []
    replayed: list[float] = []
    for _ in range(num_pairs):
        for has_bytes, taken in ((True, from_bytes), (False, replayed)):
            await service.rewind(name, at_token=length)
            loaded.client.release(name)
            session.kv_source = KVSource(partial(store.kv.read, name)) if has_bytes else None
            taken.append(await _first_token(service, name))
    await service.end_session(name)
    return Restored(length, len(state), export_s, from_bytes, replayed)


async def _first_token(service: SessionService, name: str) -> float:
    began = time.monotonic()
    stream = await service.generate_stream(name, 1)
    await anext(stream)
    seconds = time.monotonic() - began
    async for _ in stream:
        pass
    return seconds


def pays_from(found: Sequence[Restored]) -> int | None:
    """The smallest length from which on bytes are faster at every length that was measured."""
    pays: int | None = None
    for one in reversed(found):
        if one.ratio >= 1:
            return pays
        pays = one.num_tokens
    return pays


WIDTH, HEIGHT = 720, 400
LEFT, RIGHT, TOP, BOTTOM = 64, 200, 40, 48
COLOURS = ("#2563eb", "#16a34a", "#dc2626", "#9333ea", "#ea580c", "#0891b2")
NUM_LINES = 5


def line_chart(
    title: str,
    x: Sequence[float],
    series: Mapping[str, Sequence[float]],
    *,
    x_label: str,
    y_label: str,
    is_log: bool = False,
) -> str:
    """An SVG with one line for each series over the same x. The y axis begins at zero, unless both are logarithmic."""
    across = _axis(x, LEFT, WIDTH - RIGHT, is_log)
    values = [value for one in series.values() for value in one]
    up = _axis(values if is_log else [0.0, *values], HEIGHT - BOTTOM, TOP, is_log)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        f'font-size="12"><rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="22" font-size="15">{escape(title)}</text>',
        f'<text x="{LEFT}" y="{HEIGHT - 10}">{escape(x_label)}</text>',
        f'<text x="14" y="{HEIGHT // 2}" transform="rotate(-90 14 {HEIGHT // 2})">{escape(y_label)}</text>',
    ]
    for value in _ticks(values, is_log=is_log):
        y = up(value)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        shown = f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{shown}</text>')
    for one in x:
        place = f'<text x="{across(one):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">'
        parts.append(f"{place}{f'{one:g}' if one < 1e5 else f'{one:.0e}'}</text>")
    for number, (name, line) in enumerate(series.items()):
        colour = COLOURS[number % len(COLOURS)]
        points = " ".join(f"{across(one):.1f},{up(value):.1f}" for one, value in zip(x, line, strict=True))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        y = TOP + 20 * number
        parts.append(f'<rect x="{WIDTH - RIGHT + 14}" y="{y}" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{WIDTH - RIGHT + 32}" y="{y + 10}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>\n"])


def _axis(values: Sequence[float], begin: float, end: float, is_log: bool) -> Callable[[float], float]:
    """From a value to its place between two points of the picture."""
    scale = math.log10 if is_log else float
    low, high = scale(min(values, default=0.0)), scale(max(values, default=1.0))
    span = (high - low) or 1.0
    return lambda value: begin + (scale(value) - low) / span * (end - begin)


def _ticks(values: Sequence[float], *, is_log: bool) -> list[float]:
    most, least = max(values, default=1.0) or 1.0, min(values, default=1.0)
    if not is_log:
        return [most * i / NUM_LINES for i in range(NUM_LINES + 1)]
    steps = range(math.ceil(math.log10(least)), math.floor(math.log10(most)) + 1)
    return [10.0**step for step in steps] or [least, most]


PARTS = ("first-token", "stalled-reader", "by-turn", "restore")
FREE = SamplingParams(temperature=0, ignore_eos=True, max_tokens=None)


@dataclass(frozen=True)
class FirstToken:
    """Seconds to the first token of the last turn."""

    num_turns: int
    tokens_a_turn: int
    history: int
    session_s: list[float]
    stateless_s: list[float]

    @property
    def ratio(self) -> float:
        """The median of the pairs' ratios."""
        return statistics.median(a / b for a, b in zip(self.session_s, self.stateless_s, strict=True))


@dataclass(frozen=True)
class StalledReader:
    """99th percentile of the seconds between tokens, of all readers but one."""

    num_readers: int
    all_read_s: list[float]
    again_s: list[float]
    one_stopped_s: list[float]

    @property
    def ratio(self) -> float:
        return statistics.median(a / b for a, b in zip(self.one_stopped_s, self.all_read_s, strict=True))

    @property
    def noise(self) -> float:
        """The median of the A/A ratios."""
        return statistics.median(a / b for a, b in zip(self.again_s, self.all_read_s, strict=True))


def say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


async def first_token(service: SessionService, num_turns: int, tokens: int, num_pairs: int) -> FirstToken:
    """Build a history turn by turn, then take its last turn again and again, in both ways."""
    name = await service.create_session(sampling_params=FREE, seed=0)
    vocabulary = service._model().opened.model.info.vocab_size
    numbers = itertools.count(1)

    def new_input() -> list[int]:
        return [(7919 * next(numbers)) % (vocabulary - 1000) + 500 for _ in range(tokens)]

    for turn in range(num_turns - 1):
        await service.append_input(name, new_input())
        async for _ in await service.generate_stream(name, tokens):
            pass
        say(f"history: turn {turn + 1} of {num_turns - 1}")
    history = service.get(name).num_tokens
    in_session, cold = [], []
    for pair in range(num_pairs):
        given = new_input()
        await service.rewind(name, at_token=history)
        began = time.monotonic()
        await service.append_input(name, given)
        stream = await service.generate_stream(name, 1)
        await anext(stream)
        in_session.append(time.monotonic() - began)
        async for _ in stream:
            pass
        log = service._model().queue.find(name).log.tokens.tolist()[: history + tokens]
        cold.append(await stateless(service, log, 1, ("cold", pair)))
        say(f"pair {pair + 1}: {in_session[-1]:.3f} s in its session, {cold[-1]:.3f} s without")
    await service.end_session(name)
    return FirstToken(num_turns, tokens, history + tokens, in_session, cold)


async def inter_token_p99(service: SessionService, num_readers: int, tokens: int, *, one_stops: bool) -> float:
    """All readers but the first, between their chunks."""
    gaps: list[float] = []

    async def read(stream: AsyncIterator[OutputDelta]) -> None:
        last: float | None = None
        async for _ in stream:
            now = time.monotonic()
            if last is not None:
                gaps.append(now - last)
            last = now

    names = [await service.create_session(sampling_params=FREE, seed=i) for i in range(num_readers)]
    for i, name in enumerate(names):
        await service.append_input(name, [1000 + 37 * i + j for j in range(16)])
    streams = [await service.generate_stream(name, tokens) for name in names]
    first = asyncio.create_task(_read_nothing() if one_stops else _drain(streams[0]))
    await asyncio.gather(*(read(stream) for stream in streams[1:]), first)
    for name in names:
        await service.end_session(name)
    return statistics.quantiles(gaps, n=100)[98]


async def _drain(stream: AsyncIterator[OutputDelta]) -> None:
    async for _ in stream:
        pass


async def _read_nothing() -> None:
    """A reader that has stopped."""


async def stalled_reader(service: SessionService, num_readers: int, tokens: int, num_pairs: int) -> StalledReader:
    await inter_token_p99(service, num_readers, 4, one_stops=False)  # warm
    reading, again, stopped = [], [], []
    for pair in range(num_pairs):
        reading.append(await inter_token_p99(service, num_readers, tokens, one_stops=False))
        stopped.append(await inter_token_p99(service, num_readers, tokens, one_stops=True))
        again.append(await inter_token_p99(service, num_readers, tokens, one_stops=False))
        say(f"round {pair + 1}: p99 {reading[-1]:.3f} s, one stopped {stopped[-1]:.3f} s, again {again[-1]:.3f} s")
    return StalledReader(num_readers, reading, again, stopped)


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    limits = SessionLimits(stall_timeout_s=None)
    report: dict[str, Any] = {}
    async with SessionService(
        options.model, limits=limits, backend=options.backend, max_num_seqs=options.readers
    ) as service:
        if "first-token" in options.parts:
            found = await first_token(service, options.turns, options.tokens, options.pairs)
            report["first_token"] = {**asdict(found), "ratio": found.ratio}
        if "stalled-reader" in options.parts:
            stalled = await stalled_reader(service, options.readers, options.stalled_tokens, options.pairs)
            report["stalled_reader"] = {**asdict(stalled), "ratio": stalled.ratio, "noise": stalled.noise}
        if "by-turn" in options.parts:
            turns = await first_token_by_turn(service, options.turns, options.tokens, options.pairs, say)
            report["by_turn"] = asdict(turns)
    if "restore" in options.parts:
        restored = await restoring(options.model, options.lengths, options.pairs, say)
        each = [{**asdict(one), "ratio": one.ratio} for one in restored]
        report["restore"] = {"lengths": each, "pays_from": pays_from(restored)}
    return report


def by_turn_medians(report: dict[str, Any]) -> dict[str, list[float]]:
    """Of each way, the median of its rounds, by turn."""
    rounds = report["seconds"]
    return {way: [statistics.median(turn) for turn in zip(*some, strict=True)] for way, some in rounds.items()}


def plot_by_turn(path: Path, report: dict[str, Any]) -> None:
    medians = by_turn_medians(report)
    turns = list(range(1, len(report["history"]) + 1))
    path.write_text(line_chart("Time to the first token", turns, medians, x_label="turn", y_label="seconds"))


def main(arguments: Sequence[str]) -> int:
    parser = bench_parser("tokenmill bench sessions", __doc__)
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL, help="name or path of the model")
    parser.add_argument(
        "--parts", nargs="+", default=["first-token", "stalled-reader"], choices=PARTS, help="measurements"
    )
    parser.add_argument("--backend", default="auto", choices=["auto", "cpu", "torch", "llamacpp"], help="backend")
    parser.add_argument("--turns", type=int, default=12, help="turns per session")
    parser.add_argument("--tokens", type=int, default=100, help="input tokens, and output tokens, per turn")
    parser.add_argument("--readers", type=int, default=32, help="concurrent readers")
    parser.add_argument("--stalled-tokens", type=int, default=24, help="tokens per answer while one reader stalls")
    parser.add_argument("--pairs", type=int, default=7, help="pairs of measurements")
    parser.add_argument(
        "--lengths",
        type=int,
        nargs="+",
        default=[32, 64, 128, 256, 512, 1024],
        help="session lengths (tokens) of restore",
    )
    parser.add_argument("--plot", type=Path, help="write the chart of by-turn to this SVG file (default: no chart)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    report = asyncio.run(measure(options))
    if "by_turn" in report and options.plot is not None:
        plot_by_turn(options.plot, report["by_turn"])
    if options.json:
        print(json.dumps(report, indent=2))
        return 0
    if "first_token" in report:
        one = report["first_token"]
        print(f"first token of turn {one['num_turns']}, {one['history']} tokens of history and input:")
        print(f"  in its session  {statistics.median(one['session_s']):.3f} s")
        print(f"  stateless, cold {statistics.median(one['stateless_s']):.3f} s")
        print(f"  ratio           {one['ratio']:.3f}")
    if "stalled_reader" in report:
        two = report["stalled_reader"]
        print(f"time between tokens of {two['num_readers'] - 1} readers, 99th percentile:")
        print(f"  all read        {statistics.median(two['all_read_s']):.3f} s")
        print(f"  one has stopped {statistics.median(two['one_stopped_s']):.3f} s")
        print(f"  ratio           {two['ratio']:.3f} (A/A {two['noise']:.3f})")
    if "by_turn" in report:
        medians = by_turn_medians(report["by_turn"])
        print("first token by turn, seconds:\n  turn  tokens  " + "  ".join(medians))
        for turn, tokens in enumerate(report["by_turn"]["history"]):
            row = "  ".join(f"{values[turn]:>{len(way)}.3f}" for way, values in medians.items())
            print(f"  {turn + 1:>4}  {tokens:>6}  {row}")
    if "restore" in report:
        print("first token of a session that comes back, from KV bytes and by replay:")
        for one in report["restore"]["lengths"]:
            bytes_s, replay_s = (statistics.median(one[way]) for way in ("from_bytes_s", "replayed_s"))
            print(f"  {one['num_tokens']:>6} tokens  {bytes_s:.3f} s  {replay_s:.3f} s  ratio {one['ratio']:.2f}")
        print(f"  bytes pay from {report['restore']['pays_from']} tokens on")
    return 0
