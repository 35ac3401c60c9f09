"""`python -m benchmarks.workers`: one worker against several on the same weights and threads, for each CPU backend.

Requests run as in a server: concurrent streams of an `AsyncLLM`. A round measures one worker, several, and one again:
the ratio of the two runs of one worker (A/A) says how much of a difference is noise. Wall time needs a quiet machine;
CPU time does not.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tokenmill import AsyncLLM, SamplingParams, open_model
from tokenmill.bench import bench_parser
from tokenmill.bench.contenders import prompt
from tokenmill.config import DEFAULT_MODEL


@dataclass(frozen=True)
class Work:
    """So many streams at the same time; their prompts have nothing in common."""

    streams: int
    prompt_tokens: int
    new_tokens: int

    @property
    def name(self) -> str:
        return f"{self.streams} streams, {self.prompt_tokens} + {self.new_tokens} tokens"


@dataclass(frozen=True)
class Figures:
    """Of one run."""

    tokens_per_s: float
    tokens_per_cpu_s: float
    """By the processor time of all threads of this process."""
    ttft_p50_ms: float
    itl_p99_ms: float


@dataclass
class Row:
    """A backend and some work: the figures of each round."""

    backend: str
    work: str
    workers: int
    one: list[Figures] = field(default_factory=list)
    several: list[Figures] = field(default_factory=list)
    again: list[Figures] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        """Throughput of several workers over that of one: the median of the rounds."""
        return _ratio(self.several, self.one)

    @property
    def noise(self) -> float:
        return _ratio(self.again, self.one)

    @property
    def cpu_ratio(self) -> float:
        return _ratio(self.several, self.one, "tokens_per_cpu_s")

    @property
    def cpu_noise(self) -> float:
        return _ratio(self.again, self.one, "tokens_per_cpu_s")


def _ratio(these: Sequence[Figures], those: Sequence[Figures], name: str = "tokens_per_s") -> float:
    return float(statistics.median(getattr(a, name) / getattr(b, name) for a, b in zip(these, those, strict=True)))


class Streams:
    """An engine, and work for it that nothing is cached of."""

    def __init__(self, llm: AsyncLLM, numbers: itertools.count[int]) -> None:
        self._llm = llm
        self._numbers = numbers
        self._vocab_size = llm.get_tokenizer().vocab_size

    async def run(self, work: Work) -> Figures:
        began, cpu_s = time.perf_counter(), time.process_time()
        times = await asyncio.gather(*[self._stream(work) for _ in range(work.streams)])
        elapsed_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu_s
        gaps = [b - a for one in times for a, b in itertools.pairwise(one)]
        return Figures(
            tokens_per_s=work.streams * work.new_tokens / elapsed_s,
            tokens_per_cpu_s=work.streams * work.new_tokens / cpu_s,
            ttft_p50_ms=1000 * statistics.median(one[0] - began for one in times),
            itl_p99_ms=1000 * (statistics.quantiles(gaps, n=100)[-1] if len(gaps) > 1 else 0.0),
        )

    async def _stream(self, work: Work) -> list[float]:
        """When each token came."""
        ids = [one % self._vocab_size for one in prompt(next(self._numbers), work.prompt_tokens, self._vocab_size)]
        params = SamplingParams(temperature=0, max_tokens=work.new_tokens, ignore_eos=True)
        return [time.perf_counter() async for _ in self._llm.generate(ids, params)]


async def measure(backend: str, options: Any) -> list[Row]:
    """All work on one backend, round after round; the first round warms up and does not count."""
    kind: dict[str, str] = {} if backend == "fake" else {"device": "cpu", "dtype": options.dtype}
    handle = open_model(options.model, backend=backend, **kind)
    works = [Work(options.streams, length, options.new_tokens) for length in options.prompt_tokens]
    rows = [Row(backend, work.name, options.workers) for work in works]
    shared: Any = {
        "max_num_seqs": options.streams,
        "num_threads": options.threads,
        "max_model_len": max(options.prompt_tokens) + options.new_tokens,
    }
    numbers = itertools.count(1)
    try:
        async with AsyncLLM(handle, **shared) as one, AsyncLLM(handle, workers=options.workers, **shared) as several:
            alone, together = Streams(one, numbers), Streams(several, numbers)
            for number in range(options.rounds + 1):
                for work, row in zip(works, rows, strict=True):
                    found = [await each.run(work) for each in (alone, together, alone)]
                    if number:
                        for figures, into in zip(found, (row.one, row.several, row.again), strict=True):
                            into.append(figures)
                        said = ", ".join(f"{each.tokens_per_s:.0f}" for each in found)
                        print(f"{backend}, round {number}, {work.name}: {said} tok/s", file=sys.stderr, flush=True)
    finally:
        handle.close()
    return rows


def table(rows: Sequence[Row]) -> str:
    """As markdown: medians of one worker and of several."""

    def both(row: Row, name: str) -> str:
        medians = (statistics.median(getattr(each, name) for each in runs) for runs in (row.one, row.several))
        return " | ".join(f"{median:.0f}" for median in medians)

    n = rows[0].workers
    heads = ["backend", "work", "tok/s, 1", f"{n}", "ratio", "A/A", "tok/CPU s, 1", f"{n}", "ratio", "A/A"]
    heads += ["TTFT p50 ms, 1", f"{n}", "ITL p99 ms, 1", f"{n}"]
    lines = [f"| {' | '.join(heads)} |", f"| --- | --- |{' ---: |' * (len(heads) - 2)}"]
    for row in rows:
        latencies = f"{both(row, 'ttft_p50_ms')} | {both(row, 'itl_p99_ms')}"
        wall = f"{both(row, 'tokens_per_s')} | {row.ratio:.2f} | {row.noise:.2f}"
        cpu = f"{both(row, 'tokens_per_cpu_s')} | {row.cpu_ratio:.2f} | {row.cpu_noise:.2f}"
        lines.append(f"| {row.backend} | {row.work} | {wall} | {cpu} | {latencies} |")
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    parser = bench_parser("python -m benchmarks.workers", __doc__)
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL, help="name or path of the model")
    parser.add_argument("--backends", nargs="+", default=["cpu", "llamacpp"], help="backends")
    parser.add_argument("--dtype", default="auto", help="data type of the weights")
    parser.add_argument("--workers", type=int, default=2, help="workers to compare with one")
    parser.add_argument("--threads", type=int, help="CPU threads of all workers together (default: all cores)")
    parser.add_argument("--streams", type=int, default=16, help="concurrent streams")
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=[32, 512], help="tokens per prompt")
    parser.add_argument("--new-tokens", type=int, default=64, help="generated tokens per request")
    parser.add_argument("--rounds", type=int, default=7, help="rounds; the median counts")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    rows = [row for backend in options.backends for row in asyncio.run(measure(backend, options))]
    if options.json:
        print(json.dumps([{**asdict(row), "ratio": row.ratio, "noise": row.noise} for row in rows], indent=2))
    else:
        print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
