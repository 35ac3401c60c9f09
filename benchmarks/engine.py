"""`python -m benchmarks.engine`: what a step costs the host, for 1 to 1,024 running requests, on the fake backend.

The fake model's own arithmetic stands for the device and is timed apart; everything else is what the engine adds to
every step of any model: scheduling, the batch, KV bookkeeping, sampling greedily, handing out tokens. CPU time of the
one thread is measured, not wall time, and set against the cost of one dict set + get in the same run, so that the
figures mean the same on a fast machine and on a busy one.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
import timeit
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tokenmill.backends.fake import FakeBackend, FakeConfig, FakeModel
from tokenmill.bench import bench_parser
from tokenmill.config import EngineConfig
from tokenmill.engine.core import EngineCore
from tokenmill.engine.request import Limits, Request

SIZES = (1, 4, 16, 64, 256, 1024)
PROMPT = 16


@dataclass(frozen=True)
class Row:
    """Medians over the rounds, for one number of running requests."""

    num_running: int
    depth: int
    host_us_per_step: float
    host_us_per_row: float
    model_us_per_row: float
    dict_ratio: float
    """Host time a row over the time of one dict set + get."""


@dataclass(frozen=True)
class Report:
    dict_ns: float
    rows: list[Row]
    exponents: dict[int, float]
    """Depth -> e in cost ~ n^e, from 256 running requests (or the last but one size) to the largest number."""


class TimedModel(FakeBackend):
    """A fake backend that adds up the CPU time of its "model"."""

    def __init__(self, config: FakeConfig) -> None:
        super().__init__(config)
        self.model_s = 0.0

    def _run(self, *args: Any) -> None:
        begin = time.thread_time()
        super()._run(*args)
        self.model_s += time.thread_time() - begin


def core_of(config: FakeConfig, **scheduling: Any) -> tuple[EngineCore, TimedModel]:
    """An engine core on a backend whose time is taken apart."""
    backend = TimedModel(config)
    return EngineCore(backend, FakeModel(config).info, EngineConfig(**scheduling)), backend


def decoding_engine(num_running: int, depth: int, num_steps: int) -> tuple[EngineCore, TimedModel]:
    """An engine in which `num_running` requests decode and will go on decoding for `num_steps`."""
    context = PROMPT + num_steps + 64
    engine, backend = core_of(
        FakeConfig(
            vocab_size=32,
            max_context=context,
            num_cells=num_running * (context + 32),
            max_seqs=num_running + 1,
            depth=depth,
        ),
        max_num_seqs=num_running,
        max_num_batched_tokens=max(2048, num_running * PROMPT),
        max_queue=num_running,
    )
    for i in range(num_running):
        prompt = [(i * 7 + j * j) % 32 for j in range(PROMPT)]
        engine.add(Request(f"r{i}", prompt, Limits(max_new_tokens=num_steps + 32)))
    while any(slot.state != "generating" for slot in engine.slots()):
        engine.step()
    return engine, backend


def measure(num_running: int, depth: int, num_steps: int) -> tuple[float, float]:
    """CPU seconds a step: (host, model)."""
    engine, backend = decoding_engine(num_running, depth, num_steps)
    backend.model_s = 0.0
    begin = time.thread_time()
    for _ in range(num_steps):
        engine.step()
    total = time.thread_time() - begin
    engine.close()
    return (total - backend.model_s) / num_steps, backend.model_s / num_steps


def dict_set_get_s() -> float:
    """Seconds for one dict set + get: the yardstick."""
    return statistics.median(timeit.repeat("d[k] = k; d[k]", "d = {}; k = 12345", number=200_000, repeat=3)) / 200_000


def run(sizes: Sequence[int], depths: Sequence[int], num_rounds: int, num_steps: int, *, quiet: bool = False) -> Report:
    """Measure all sizes in turn, round by round, so that a change of the machine's mood hits all of them."""
    host: dict[tuple[int, int], list[float]] = {}
    model: dict[tuple[int, int], list[float]] = {}
    yardsticks = []
    for round_ in range(num_rounds):
        yardsticks.append(dict_set_get_s())
        for depth in depths:
            for size in sizes:
                if not quiet:
                    print(
                        f"\rround {round_ + 1}/{num_rounds}, depth {depth}, {size} running   ", end="", file=sys.stderr
                    )
                host_s, model_s = measure(size, depth, num_steps)
                host.setdefault((depth, size), []).append(host_s)
                model.setdefault((depth, size), []).append(model_s)
    if not quiet:
        print("\r" + " " * 50 + "\r", end="", file=sys.stderr)
    dict_s = statistics.median(yardsticks)
    rows = [
        Row(
            num_running=size,
            depth=depth,
            host_us_per_step=(step := statistics.median(host[depth, size])) * 1e6,
            host_us_per_row=step / size * 1e6,
            model_us_per_row=statistics.median(model[depth, size]) / size * 1e6,
            dict_ratio=step / size / dict_s,
        )
        for depth in depths
        for size in sizes
    ]
    return Report(dict_s * 1e9, rows, {depth: _exponent(host, depth, sizes) for depth in depths})


def _exponent(host: dict[tuple[int, int], list[float]], depth: int, sizes: Sequence[int]) -> float:
    if len(sizes) < 2:
        return math.nan
    low = 256 if 256 in sizes[:-1] else sizes[-2]
    ratios = [high / lower for high, lower in zip(host[depth, sizes[-1]], host[depth, low], strict=True)]
    return math.log(statistics.median(ratios)) / math.log(sizes[-1] / low)


def table(report: Report) -> str:
    """The report as a Markdown table."""
    lines = [
        "| running | depth | host us/step | host us/row | x dict set+get | model us/row |",
        "| ---: | ---: | ---: | ---: | ---: | ---: |",
        *(
            f"| {row.num_running} | {row.depth} | {row.host_us_per_step:.0f} | {row.host_us_per_row:.2f} "
            f"| {row.dict_ratio:.0f} | {row.model_us_per_row:.2f} |"
            for row in report.rows
        ),
        "",
        f"one dict set + get: {report.dict_ns:.0f} ns",
        *(f"growth at depth {depth}: n^{exponent:.2f}" for depth, exponent in report.exponents.items()),
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = bench_parser("python -m benchmarks.engine", (__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), help="numbers of running requests")
    parser.add_argument("--depths", type=int, nargs="+", default=[0, 1], choices=[0, 1], help="steps submitted ahead")
    parser.add_argument("--rounds", type=int, default=7, help="rounds over all sizes")
    parser.add_argument("--steps", type=int, default=100, help="steps per round")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args(arguments)
    if min(*options.sizes, options.rounds, options.steps) < 1:
        parser.error("sizes, rounds and steps must be at least 1")
    report = run(sorted(options.sizes), options.depths, options.rounds, options.steps, quiet=options.json)
    print(json.dumps(asdict(report), indent=2) if options.json else table(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
