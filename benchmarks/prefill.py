"""`python -m benchmarks.prefill`: what `max_step_ms` costs and what it gives.

Cost: prompt throughput with the bound relative to the same engine without it, in interleaved rounds; the engine without
it runs twice per round, and its ratio to itself (A/A) says how much of a difference is noise. Wall time needs a quiet
machine; CPU time does not. Gain: the time from
cancelling a long prompt until the engine has dropped it, on a model whose steps take ten times as long.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tokenmill import LLM, AsyncLLM, SamplingParams, open_model
from tokenmill.bench import bench_parser
from tokenmill.config import DEFAULT_MODEL

LIMIT_S = 0.6
"""A cancel with a bound of 500 ms."""
LEAST_RATIO = 0.95


class Slowed:
    """A model, or one of its backends, whose steps take `factor` times as long."""

    def __init__(self, inner: Any, factor: float) -> None:
        self._inner = inner
        self._factor = factor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def new_backend(self, limits: Any) -> Slowed:
        return Slowed(self._inner.new_backend(limits), self._factor)

    def forward(self, batch: Any) -> Any:
        began = time.perf_counter()
        step = self._inner.forward(batch)
        time.sleep((self._factor - 1) * (time.perf_counter() - began))
        return step

    def collect(self, handle: Any) -> Any:
        began = time.perf_counter()
        result = self._inner.collect(handle)
        time.sleep((self._factor - 1) * (time.perf_counter() - began))
        return result


@dataclass(frozen=True)
class Prefill:
    """Prompt tokens per second of wall time, or of CPU time, by round."""

    bounded: list[float]
    unbounded: list[float]
    again: list[float]
    """The engine without a bound once more."""

    @property
    def ratios(self) -> list[float]:
        return [2 * a / (b + c) for a, b, c in zip(self.bounded, self.unbounded, self.again, strict=True)]

    @property
    def noise(self) -> list[float]:
        return [c / b for b, c in zip(self.unbounded, self.again, strict=True)]


def random_prompts(draw: random.Random, count: int, num_tokens: int, vocab_size: int) -> list[list[int]]:
    return [[draw.randrange(vocab_size) for _ in range(num_tokens)] for _ in range(count)]


CLOCKS: Mapping[str, Callable[[], float]] = {"wall time": time.perf_counter, "CPU time": time.process_time}


def measure_prefill(model: Any, max_step_ms: float, num_rounds: int, count: int, num_tokens: int) -> dict[str, Prefill]:
    """By clock."""
    draw = random.Random(0)
    kv_tokens = 2 * count * (num_tokens + 16)
    with (
        LLM(model, max_step_ms=max_step_ms, kv_cache_tokens=kv_tokens) as bounded,
        LLM(model, kv_cache_tokens=kv_tokens) as unbounded,
    ):

        def rates(llm: LLM) -> dict[str, float]:
            prompts = random_prompts(draw, count, num_tokens, model.info.vocab_size)
            began = {name: clock() for name, clock in CLOCKS.items()}
            llm.generate(prompts, SamplingParams(max_tokens=1, temperature=0), use_tqdm=False)
            return {name: count * num_tokens / (clock() - began[name]) for name, clock in CLOCKS.items()}

        for llm in (bounded, unbounded):  # its cost model learns how fast the machine is
            rates(llm)
        rounds = []
        for number in range(num_rounds):
            first = rates(bounded) if number % 2 else None  # half of the rounds begin with it
            before = rates(unbounded)
            rounds.append((first or rates(bounded), before, rates(unbounded)))
            print(f"round {number + 1} of {num_rounds}", file=sys.stderr)
    columns = list(zip(*rounds, strict=True))
    return {name: Prefill(*([one[name] for one in column] for column in columns)) for name in CLOCKS}


async def measure_cancels(model: Any, max_step_ms: float, num_cancels: int, num_tokens: int) -> list[float]:
    """Seconds from each cancel until the engine, asked between two steps, no longer has the request."""
    draw = random.Random(1)
    took = []
    async with AsyncLLM(model, max_step_ms=max_step_ms, kv_cache_tokens=2 * num_tokens + 64, engine="thread") as llm:

        async def is_idle() -> bool:
            (core,) = await llm.snapshot()
            return core is not None and not core.waiting and all(slot.request_id is None for slot in core.slots)

        async def run(prompt: list[int]) -> None:
            async for _ in llm.generate(prompt, SamplingParams(max_tokens=1)):
                pass

        await run(random_prompts(draw, 1, min(256, num_tokens), model.info.vocab_size)[0])  # the cost model learns
        for _ in range(num_cancels):
            (prompt,) = random_prompts(draw, 1, num_tokens, model.info.vocab_size)
            running = asyncio.ensure_future(run(prompt))
            while await is_idle() and not running.done():
                await asyncio.sleep(0.001)
            await asyncio.sleep(max_step_ms / 1000 * (1 + 3 * draw.random()))
            if running.done():
                raise RuntimeError(f"a prompt of {num_tokens} tokens was computed before it could be cancelled")
            began = time.perf_counter()
            running.cancel()
            while not await is_idle():
                pass
            took.append(time.perf_counter() - began)
    return took


def main(arguments: Sequence[str] | None = None) -> int:
    parser = bench_parser("python -m benchmarks.prefill", (__doc__ or "").partition("\n\n")[0])
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL, help="name or path of the model")
    parser.add_argument("--max-step-ms", type=float, default=500.0, help="bound of steps that compute prompts (500)")
    parser.add_argument("--rounds", type=int, default=7, help="rounds of the throughput (7)")
    parser.add_argument("--prompts", type=int, default=4, help="prompts of a round (4)")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of a prompt (1024)")
    parser.add_argument("--cancels", type=int, default=10, help="long prompts to cancel (10)")
    parser.add_argument("--long", type=int, default=8000, help="tokens of a prompt that is cancelled (8000)")
    parser.add_argument("--slowdown", type=float, default=10.0, help="factor of the slowed model (10)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    model = open_model(options.model)
    took = asyncio.run(
        measure_cancels(Slowed(model, options.slowdown), options.max_step_ms, options.cancels, options.long)
    )
    found = measure_prefill(model, options.max_step_ms, options.rounds, options.prompts, options.tokens)
    if options.json:
        print(json.dumps({"cancels_s": took, **{name: asdict(one) for name, one in found.items()}}, indent=2))
        return 0
    print(f"| {options.model}, max_step_ms {options.max_step_ms:g} | median | range | limit |")
    print("| --- | ---: | ---: | ---: |")
    print(
        f"| cancel of {options.long} tokens, {options.slowdown:g}x slower (ms) | {1000 * statistics.median(took):.0f} "
        f"| {1000 * min(took):.0f} to {1000 * max(took):.0f} | {1000 * LIMIT_S:.0f} |"
    )
    for name, one in found.items():
        for label, values in (("bounded / unbounded", one.ratios), ("A/A", one.noise)):
            spread = f"{min(values):.3f} to {max(values):.3f}"
            limit = LEAST_RATIO if values == one.ratios else ""
            print(f"| prefill in {name}, {label} | {statistics.median(values):.3f} | {spread} | {limit} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
