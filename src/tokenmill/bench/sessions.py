"""`tokenmill bench sessions`: what a session saves, and what a reader that stops costs the others.

First token: the last of many turns, in its session and as a stateless request with the same history and nothing cached,
in turn. Stalled reader: the time between tokens of all readers but one, with that one reading and not reading, in turn;
the ratio of two runs in which it reads (A/A) says how much of a difference is noise. By turn: every turn's first token
in three ways (`session_turns.py`). Restore: KV bytes from the disk beside a replay (`session_restore.py`).
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tokenmill.backends.library import DEFAULT_MODEL
from tokenmill.bench import bench_parser
from tokenmill.bench.plot import line_chart
from tokenmill.bench.session_restore import pays_from, restoring
from tokenmill.bench.session_turns import first_token_by_turn
from tokenmill.engine.request import Hints
from tokenmill.params import SamplingParams
from tokenmill.session.info import SessionLimits
from tokenmill.session.live import Chunk, LiveTurn
from tokenmill.session.service import SessionService

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
    in_session, stateless = [], []
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
        log = service._model().master.find(name).log.tokens[: history + tokens].tolist()
        stateless.append(await _stateless(service, log, pair))
        say(f"pair {pair + 1}: {in_session[-1]:.3f} s in its session, {stateless[-1]:.3f} s without")
    await service.end_session(name)
    return FirstToken(num_turns, tokens, history + tokens, in_session, stateless)


async def _stateless(service: SessionService, prompt: list[int], number: int) -> float:
    """The same prompt as a request of its own; its namespace makes sure that nothing of it is cached."""
    loaded, params = service._model(), SamplingParams(temperature=0, max_tokens=1)
    began = time.monotonic()
    hints = Hints(namespace=("cold", number))
    generation = loaded.intake.generation(prompt, params, None, hints)
    live = LiveTurn(generation, loaded.client, lambda _: None, None, 1 << 30)
    loaded.client.submit(generation.choices[0].request, live.hear)
    async for _ in live.read():
        return time.monotonic() - began
    raise AssertionError("an answer ends with a chunk")


async def inter_token_p99(service: SessionService, num_readers: int, tokens: int, *, one_stops: bool) -> float:
    """All readers but the first, between their chunks."""
    gaps: list[float] = []

    async def read(stream: AsyncIterator[Chunk]) -> None:
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


async def _drain(stream: AsyncIterator[Chunk]) -> None:
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
    line_chart(path, "Time to the first token", turns, medians, x_label="turn", y_label="seconds")


def main(arguments: Sequence[str]) -> int:
    parser = bench_parser("tokenmill bench sessions", __doc__)
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL, help="name or path of the model")
    parser.add_argument(
        "--parts", nargs="+", default=["first-token", "stalled-reader"], choices=PARTS, help="measurements"
    )
    parser.add_argument("--backend", default="auto", choices=["auto", "torch", "llamacpp"], help="backend")
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
