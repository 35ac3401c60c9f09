"""`python -m benchmarks.llamacpp`: what the engine adds to llama.cpp's own time, and what parked KV costs.

`steps`: the share of a step's wall time that is spent neither in llama.cpp (`llama_decode`, and waiting for its logits)
nor in sampling, from the same steps: scheduling, KV bookkeeping, filling arrays, text. `parked`: how fast sequences
decode beside KV of ended requests: none, as much of it as the backend lets stay, and all of it; by how much of it there
is, that is the curve from which the limit was chosen.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from tokenmill.bench import bench_parser
from tokenmill.bench.contenders import Tokenmill
from tokenmill.config import DEFAULT_MODEL
from tokenmill.engine.core import EngineCore
from tokenmill.engine.request import Hints

CONTEXT, STEPS = 64, 32
PIECE = 500
"""Tokens of each parked sequence."""


@dataclass
class Share:
    """Of steps with so many sequences: seconds, and how many of them went to computing and to sampling."""

    num_seqs: int
    total_s: list[float] = field(default_factory=list)
    decode_s: list[float] = field(default_factory=list)
    sample_s: list[float] = field(default_factory=list)

    @property
    def outside(self) -> float:
        """The median round's share that went to neither."""
        return statistics.median(
            1 - (decode + sample) / total
            for total, decode, sample in zip(self.total_s, self.decode_s, self.sample_s, strict=True)
        )


class Stopwatch:
    """Adds up the time that calls take."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*arguments)
            finally:
                self.seconds += time.perf_counter() - began

        return run


class Decoding(Tokenmill):
    """The engine on llama.cpp, as `bench compare` runs it, with a look inside."""

    def __init__(self, model: str, num_threads: int, num_streams: int = 0) -> None:
        """With streams, so many sequences have memories of their own."""
        super().__init__(model, num_threads, backend="llamacpp", slots=str(num_streams) if num_streams else "")
        self.decoding, self.sampling = Stopwatch(), Stopwatch()
        self.decode_s = self.sample_s = 0.0
        """What they said when the clock was stopped."""
        executor: Any = self.engine._executor
        context: Any = executor.backend._context
        context = getattr(context, "_native", context)  # the one in which streams are
        context._decode, context.logits = self.decoding.timed(context._decode), self.decoding.timed(context.logits)
        executor._sampler = self.sampling.timed(executor._sampler)
        executor.backend.sample = self.sampling.timed(executor.backend.sample)

    @property
    def engine(self) -> EngineCore:
        return self._llm.engine

    def started(self) -> None:
        self.decoding.seconds = self.sampling.seconds = 0.0

    def ended(self) -> None:
        self.decode_s, self.sample_s = self.decoding.seconds, self.sampling.seconds

    def park(self, num_tokens: int) -> None:
        """As if requests with so many tokens had ended: one is computed, the others get a copy of its KV."""
        kv = self.engine.kv
        kv.evict_all()
        if num_tokens == 0:
            return
        self.prefill(PIECE + 1)
        state = kv.kv.export(next(iter(kv.parked_views())).seq)
        kv.evict_all()
        for number in range(num_tokens // PIECE):
            kv.import_(np.array([number, *range(1, PIECE)], dtype=np.int32), state, Hints())

    def let_stay(self, num_cells: int | None) -> None:
        """How many parked cells stay when others start."""
        self.engine.kv._capabilities = replace(self.engine.kv._capabilities, parked_cells=num_cells)


def measure_steps(ours: Decoding, counts: Sequence[int], num_rounds: int) -> list[Share]:
    shares = [Share(count) for count in counts]
    for number in range(num_rounds + 1):
        for share in shares:
            ours.engine.kv.evict_all()
            took = ours.decode(share.num_seqs, CONTEXT, STEPS)
            if number == 0:  # warms up
                continue
            share.total_s.append(took)
            share.decode_s.append(ours.decode_s)
            share.sample_s.append(ours.sample_s)
            _say(f"round {number}, {share.num_seqs} sequences: {1000 * took / STEPS:.2f} ms a step")
    return shares


@dataclass
class Parked:
    """Tokens a second of sequences that decode beside parked KV, by how much of it stays."""

    num_seqs: int
    num_parked: int
    limit: int | None
    none: list[float] = field(default_factory=list)
    limited: list[float] = field(default_factory=list)
    all_kept: list[float] = field(default_factory=list)

    def ratio(self, speeds: Sequence[float]) -> float:
        """Of none parked: the median of the rounds'."""
        return statistics.median(a / b for a, b in zip(speeds, self.none, strict=True))


def measure_parked(ours: Decoding, num_seqs: int, num_parked: int, num_rounds: int) -> Parked:
    limit = ours.engine.kv._capabilities.parked_cells
    found = Parked(num_seqs, num_parked, limit)
    for number in range(num_rounds):
        for speeds, amount, stays in (
            (found.none, 0, limit),
            (found.limited, num_parked, limit),
            (found.all_kept, num_parked, None),
        ):
            ours.let_stay(None)
            ours.park(amount)
            ours.let_stay(stays)
            speeds.append(num_seqs * STEPS / ours.decode(num_seqs, CONTEXT, STEPS))
        last = ", ".join(f"{speeds[-1]:.0f}" for speeds in (found.none, found.limited, found.all_kept))
        _say(f"round {number + 1}, {num_seqs} sequences beside {num_parked}: none, limited, all kept: {last} tok/s")
    ours.let_stay(limit)
    return found


def _say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = bench_parser("python -m benchmarks.llamacpp", __doc__)
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL, help="name or path of the model")
    parser.add_argument("--parts", nargs="+", default=["steps", "parked"], help="measurements")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 4, 16], help="batch sizes")
    parser.add_argument("--parked", type=int, nargs="+", default=[2000, 4000, 8000, 12_000], help="parked tokens")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="CPU threads")
    parser.add_argument("--streams", action="store_true", help="give each sequence a KV cache of its own")
    parser.add_argument("--rounds", type=int, default=5, help="rounds; the median counts")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    if options.streams and "parked" in options.parts:
        parser.error("--streams is for --parts steps: what is parked then has no part in a step")
    ours = Decoding(options.model, options.threads, max(options.sequences) if options.streams else 0)
    shares, parked = [], []
    if "steps" in options.parts:
        shares = measure_steps(ours, options.sequences, options.rounds)
    if "parked" in options.parts:
        ends = sorted({min(options.sequences), max(options.sequences)})
        parked = [measure_parked(ours, n, amount, options.rounds) for n in ends for amount in options.parked]
    if options.json:
        results = {
            "steps": [{**asdict(one), "outside": one.outside} for one in shares],
            "parked": [
                {**asdict(one), "limited_ratio": one.ratio(one.limited), "all_kept_ratio": one.ratio(one.all_kept)}
                for one in parked
            ],
        }
        print(json.dumps(results, indent=2))
        return 0
    for share in shares:
        step_ms = 1000 * statistics.median(share.total_s) / STEPS
        print(
            f"{share.num_seqs} sequences: {step_ms:.2f} ms a step, {share.outside:.1%} outside computing and sampling"
        )
    for one in parked:
        kept = f"limited to {one.limit}: {one.ratio(one.limited):.2f}, all kept: {one.ratio(one.all_kept):.2f}"
        print(f"{one.num_seqs} sequences beside {one.num_parked} parked tokens, of the speed beside none: {kept}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
