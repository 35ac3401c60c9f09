"""`tokenmill bench throughput`: tokens a second by the number of requests that run together, offline.

Each round takes all numbers in turn. The last line of the table is what batching is for: so many requests together,
and the same ones one after the other, in the same run.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

from tokenmill.bench import bench_parser
from tokenmill.bench.contenders import prompt
from tokenmill.config import DEFAULT_MODEL
from tokenmill.entrypoints.llm import LLM
from tokenmill.params import SamplingParams


class Offline:
    """A model, and requests that nothing is cached of."""

    def __init__(self, llm: LLM, prompt_tokens: int, new_tokens: int) -> None:
        self._llm = llm
        self._length = prompt_tokens
        self._params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
        self._numbers = itertools.count(1)
        self._vocab_size = llm.get_tokenizer().vocab_size

    def together(self, count: int) -> float:
        """New tokens a second."""
        prompts = [prompt(next(self._numbers), self._length, self._vocab_size) for _ in range(count)]
        began = time.perf_counter()
        outputs = self._llm.generate(list(prompts), self._params, use_tqdm=False)
        return sum(len(one.outputs[0].token_ids) for one in outputs) / (time.perf_counter() - began)

    def one_by_one(self, count: int) -> float:
        return statistics.harmonic_mean([self.together(1) for _ in range(count)])


def measure(offline: Offline, counts: Sequence[int], num_rounds: int) -> dict[str, Any]:
    offline.together(max(counts))  # warm
    speeds: dict[int, list[float]] = {count: [] for count in counts}
    alone: list[float] = []
    for number in range(num_rounds):
        for count in counts:
            speeds[count].append(offline.together(count))
        alone.append(offline.one_by_one(max(counts)))
        said = ", ".join(f"{count}: {speeds[count][-1]:.0f}" for count in counts)
        print(f"round {number + 1}: {said} tok/s; one by one {alone[-1]:.0f}", file=sys.stderr, flush=True)
    most = max(counts)
    ratio = statistics.median(a / b for a, b in zip(speeds[most], alone, strict=True))
    return {"together": speeds, "one_by_one": alone, "ratio": ratio, "most": most}


def main(arguments: Sequence[str]) -> int:
    parser = bench_parser("tokenmill bench throughput", __doc__)
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL, help="name or path of the model")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 2, 4, 8, 16], help="concurrent requests")
    parser.add_argument("--prompt-tokens", type=int, default=32, help="tokens per prompt")
    parser.add_argument("--new-tokens", type=int, default=128, help="generated tokens per request")
    parser.add_argument("--rounds", type=int, default=7, help="rounds; the median counts")
    parser.add_argument("--backend", default="auto", choices=["auto", "cpu", "torch", "llamacpp"], help="backend")
    parser.add_argument("--dtype", default="auto", help="data type of the weights")
    parser.add_argument("--load-format", default="auto", help="auto, or dummy for random weights")
    parser.add_argument("--threads", type=int, help="CPU threads (default: all cores)")
    parser.add_argument("--workers", type=int, default=1, help="engine cores on one set of weights")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    with LLM(
        options.model,
        max_num_seqs=max(options.requests),
        backend=options.backend,
        dtype=options.dtype,
        load_format=options.load_format,
        num_threads=options.threads,
        workers=options.workers,
    ) as llm:
        offline = Offline(llm, options.prompt_tokens, options.new_tokens)
        report = measure(offline, sorted(options.requests), options.rounds)
    if options.json:
        print(json.dumps(report, indent=2))
        return 0
    alone = statistics.median(report["together"][min(options.requests)])
    print("| requests | tok/s | x one |\n| ---: | ---: | ---: |")
    for count, speeds in report["together"].items():
        speed = statistics.median(speeds)
        print(f"| {count} | {speed:.0f} | {speed / alone:.2f} |")
    print(f"\n{report['most']} together against one after the other: {report['ratio']:.2f}")
    return 0
