"""`python -m benchmarks.events`: what it costs an engine that the server listens to it.

First on a model: CPU time of the engine's thread a step, with the server's subscriber and without it, in turn. Then the
hardest case, a model that takes no time: what the subscriber adds to a step of 1, 16 and 64 rows, alone and while
somebody follows the engine's events.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from benchmarks.engine import decoding_engine
from tokenmill.bench import bench_parser
from tokenmill.config import DEFAULT_MODEL
from tokenmill.engine.core import EngineCore
from tokenmill.engine.request import Limits, Request
from tokenmill.entrypoints.llm import LLM
from tokenmill.server.sse import event
from tokenmill.server.telemetry.figures import CoreFigures
from tokenmill.server.telemetry.live import CoreWatch, Reader

ROWS = (1, 16, 64)
PROMPT = 32
BLOCK = 8
"""Steps with, then as many without."""
Listen = Callable[[EngineCore], Callable[[], None]]
"""Begins to listen; returns the call that ends it."""


@dataclass(frozen=True)
class Cost:
    """CPU microseconds of the engine's thread, medians over the pairs of blocks."""

    what: str
    num_rows: int
    without_us: float
    with_us: float
    added_us: float
    """The median of the pairs' differences."""
    noise_us: float
    """The same of pairs in which nobody listens."""

    @property
    def share(self) -> float:
        return self.added_us / self.without_us


def listen(engine: EngineCore) -> Callable[[], None]:
    """As a server does that nobody follows."""
    return engine.events.subscribe(CoreWatch("model", 0, CoreFigures(), None, engine.snapshot()))


def listen_and_follow(engine: EngineCore) -> Callable[[], None]:
    """As a server does while one connection follows: an event loop on another thread reads what is told."""
    loop = asyncio.new_event_loop()
    reader = Reader(loop)
    thread = threading.Thread(target=loop.run_until_complete, args=(_read(reader),))
    thread.start()
    watch = CoreWatch("model", 0, CoreFigures(), None, engine.snapshot())
    watch.join(reader)
    end = engine.events.subscribe(watch)

    def stop() -> None:
        end()
        loop.call_soon_threadsafe(reader.end, "that was all")
        thread.join()
        loop.close()

    return stop


async def _read(reader: Reader) -> None:
    while reader.ending is None:
        for told in await reader.take():
            if isinstance(told.what, dict):
                event(told.what, "tick")


def keep_quiet(engine: EngineCore) -> Callable[[], None]:  # noqa: ARG001
    return lambda: None


def measure(engine: EngineCore, what: str, num_rows: int, num_pairs: int, begin: Listen) -> Cost:
    """Blocks of steps in turn: nobody listens, somebody does, nobody does."""
    blocks: dict[str, list[float]] = {"without": [], "with": [], "again": []}
    for _ in range(num_pairs):
        for name, how in (("without", keep_quiet), ("with", begin), ("again", keep_quiet)):
            end = how(engine)
            blocks[name].append(_block(engine))
            end()
    pairs = [1e6 * (heard - quiet) for heard, quiet in zip(blocks["with"], blocks["without"], strict=True)]
    noise = [1e6 * (again - quiet) for again, quiet in zip(blocks["again"], blocks["without"], strict=True)]
    without_us, with_us = (1e6 * statistics.median(blocks[name]) for name in ("without", "with"))
    return Cost(what, num_rows, without_us, with_us, statistics.median(pairs), statistics.median(noise))


def _block(engine: EngineCore) -> float:
    """CPU seconds of this thread for a step, the median of a few."""
    steps = []
    for _ in range(BLOCK):
        began = time.thread_time()
        engine.step()
        steps.append(time.thread_time() - began)
    return statistics.median(steps)


def on_model(model: str, num_rows: int, num_pairs: int) -> Cost:
    """On a real model: so many requests that all decode."""
    num_steps = 3 * BLOCK * num_pairs + 32
    with LLM(model, max_num_seqs=num_rows, max_model_len=PROMPT + num_steps + 32) as llm:
        engine = llm.engine
        vocab_size = engine.model.vocab_size
        first = min(500, vocab_size // 2)  # special tokens come first
        for i in range(num_rows):
            prompt = [(7919 * (i * PROMPT + j + 1)) % (vocab_size - first) + first for j in range(PROMPT)]
            engine.add(Request(f"r{i}", prompt, Limits(max_new_tokens=num_steps)))
        while any(slot.state != "generating" for slot in engine.slots()):
            engine.step()
        return measure(engine, model, num_rows, num_pairs, listen)


def on_fake(num_rows: int, num_pairs: int) -> list[Cost]:
    """On a model that takes no time."""
    costs = []
    for what, begin in (("the server listens", listen), ("and somebody follows", listen_and_follow)):
        engine, _ = decoding_engine(num_rows, depth=1, num_steps=3 * BLOCK * num_pairs + 32)
        costs.append(measure(engine, what, num_rows, num_pairs, begin))
        engine.close()
    return costs


def table(costs: Sequence[Cost]) -> str:
    lines = [
        "| | rows | CPU us a step | with | added us | A/A us | share |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
        *(
            f"| {cost.what} | {cost.num_rows} | {cost.without_us:,.0f} | {cost.with_us:,.0f} "
            f"| {cost.added_us:.1f} | {cost.noise_us:+.1f} | {100 * cost.share:.2f} % |"
            for cost in costs
        ),
    ]
    return "\n".join(lines)


def summary(costs: Sequence[Cost]) -> str:
    """On a model the difference is lost in the noise of its steps: what was measured without one, as a share of it."""
    model, *others = costs
    nearest = min(others, key=lambda cost: abs(cost.num_rows - model.num_rows))
    share = 100 * nearest.added_us / model.without_us
    return f"\n{nearest.added_us:.1f} us at {nearest.num_rows} rows are {share:.3f} % of a step of {model.what}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = bench_parser("python -m benchmarks.events", (__doc__ or "").partition("\n\n")[0])
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL, help="model of the realistic case; none skips it")
    parser.add_argument("--sequences", type=int, default=16, help="concurrent sequences on the model")
    parser.add_argument("--pairs", type=int, default=12, help="pairs of measurements on the model")
    parser.add_argument(
        "--rows", type=int, nargs="+", default=list(ROWS), help="batch sizes of the worst case, on the fake backend"
    )
    parser.add_argument("--fake-pairs", type=int, default=100, help="pairs of measurements on the fake backend")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args(arguments)
    if min(options.sequences, options.pairs, options.fake_pairs, *options.rows) < 1:
        parser.error("all numbers must be at least 1")
    costs = [cost for rows in options.rows for cost in on_fake(rows, options.fake_pairs)]
    if options.model != "none":
        costs.insert(0, on_model(options.model, options.sequences, options.pairs))
    if options.json:
        print(json.dumps([{**asdict(one), "share": one.share} for one in costs], indent=2))
        return 0
    print(table(costs))
    if options.model != "none":
        print(summary(costs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
