"""`python -m benchmarks.sampling`: what sampling takes of a decode step, by parameters.

All rows of a step have the same parameters. Kinds take turns round by round, greedy among them, whose draw is the
yardstick. CPU time of all threads is measured, not wall time, so that the shares mean the same on a busy machine. They
count everything from the forward pass on: the draws' arrays, the sampler, the token table.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tokenmill.bench import bench_parser
from tokenmill.config import DEFAULT_MODEL
from tokenmill.engine.core import EngineCore
from tokenmill.engine.request import Draw, Limits, Request
from tokenmill.entrypoints.options import open_for_engine
from tokenmill.params import SamplingParams

PROMPT = "Tell me about the number {} and why it is"
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "temperature 0.7": {"temperature": 0.7},
    "temperature 0.7, top_p 0.9": {"temperature": 0.7, "top_p": 0.9},
    "top_k 40": {"top_k": 40},
    "min_p 0.05": {"min_p": 0.05},
    "typical_p 0.7": {"typical_p": 0.7},
    "XTC 0.5": {"xtc_probability": 0.5},
    "top_p 0.9, penalties": {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.1, "frequency_penalty": 0.1},
    "top_p 0.9, 5 logprobs": {"temperature": 0.7, "top_p": 0.9, "logprobs": 5},
}


@dataclass
class Share:
    """CPU milliseconds a step and of its draw, by rounds."""

    kind: str
    step_ms: list[float] = field(default_factory=list)
    draw_ms: list[float] = field(default_factory=list)

    @property
    def percent(self) -> float:
        return 100 * statistics.median(draw / step for draw, step in zip(self.draw_ms, self.step_ms, strict=True))


class Decoding:
    """An engine in which all rows decode, and a clock around the draws."""

    def __init__(self, model: str, num_rows: int, num_threads: int | None) -> None:
        self.num_rows = num_rows
        options = {"max_num_seqs": num_rows, "kv_cache_tokens": num_rows * 1024, "num_threads": num_threads}
        opened, handle = open_for_engine(model, options)
        self._tokenizer = opened.text.tokenizer
        self.core = EngineCore(handle.new_backend(opened.limits), handle.info, opened.config)
        self._draw_s = 0.0
        executor: Any = self.core._executor
        draw = executor.draw

        def timed(*arguments: Any) -> Any:
            began = time.process_time()
            try:
                return draw(*arguments)
            finally:
                self._draw_s += time.process_time() - began

        executor.draw = timed

    def run(self, params: SamplingParams, num_steps: int) -> tuple[float, float]:
        """CPU seconds of a step and of its draw, while all rows decode."""
        for i in range(self.num_rows):
            ids = self._tokenizer.encode(PROMPT.format(i))
            limits = Limits(max_new_tokens=num_steps + self.num_rows + 8)
            self.core.add(Request(f"r{i}", ids, limits, draw=Draw(params=params, seed=i)))
        while sum(slot.state == "generating" for slot in self.core.slots()) < self.num_rows:
            self.core.step()
        self._draw_s, began = 0.0, time.process_time()
        for _ in range(num_steps):
            self.core.step()
        took, draws = time.process_time() - began, self._draw_s
        for i in range(self.num_rows):
            self.core.cancel(f"r{i}")
        while self.core.has_work:
            self.core.step()
        return took / num_steps, draws / num_steps


def measure(decoding: Decoding, kinds: Sequence[str], num_rounds: int, num_steps: int) -> list[Share]:
    shares = [Share(kind) for kind in kinds]
    for number in range(num_rounds + 1):
        for share in shares:
            step_s, draw_s = decoding.run(SamplingParams(**KINDS[share.kind]), num_steps)
            if number:  # the first one warms up
                share.step_ms.append(1000 * step_s)
                share.draw_ms.append(1000 * draw_s)
    return shares


def table(shares: Sequence[Share], num_rows: int) -> str:
    lines = [f"| {num_rows} rows | CPU ms a step | of it sampling | share |", "| --- | --- | --- | --- |"]
    for share in shares:
        step, draw = statistics.median(share.step_ms), statistics.median(share.draw_ms)
        lines.append(f"| {share.kind} | {step:.2f} | {draw:.3f} | {share.percent:.1f} % |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = bench_parser("python -m benchmarks.sampling", (__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--model", default=DEFAULT_MODEL, help="model")
    parser.add_argument("--rows", type=int, default=16, help="rows of a step")
    parser.add_argument("--threads", type=int, help="processor threads of the backend")
    parser.add_argument("--rounds", type=int, default=5, help="rounds over all kinds")
    parser.add_argument("--steps", type=int, default=24, help="steps per round")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS), help="sampling parameters")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args(arguments)
    decoding = Decoding(options.model, options.rows, options.threads)
    shares = measure(decoding, options.kinds, options.rounds, options.steps)
    print(json.dumps([asdict(share) for share in shares]) if options.json else table(shares, options.rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
