"""`python -m benchmarks.http`: what HTTP costs: many clients that stream, beside the same work offline.

One process has the model and generates for all prompts together; a server, a process of its own, does the same for as
many clients, each of which streams. They take turns; two offline runs beside each other (A/A) say how much of a
difference is noise. The clients run here, and on a machine with few cores their work counts, too.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import re
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from tokenmill.bench import bench_parser
from tokenmill.bench.load_clients import serving
from tokenmill.config import DEFAULT_MODEL
from tokenmill.entrypoints.llm import LLM
from tokenmill.params import SamplingParams


@dataclass(frozen=True)
class Work:
    """What one round does."""

    num_clients: int
    prompt_tokens: int
    new_tokens: int
    vocab_size: int

    def prompts(self, number: int) -> list[list[int]]:
        """Prompts that no other round has, so nothing of them is cached."""
        numbers = itertools.count(1 + number * self.num_clients * self.prompt_tokens)
        first = min(500, self.vocab_size // 2)  # special tokens come first
        span = self.vocab_size - first
        return [
            [7919 * next(numbers) % span + first for _ in range(self.prompt_tokens)] for _ in range(self.num_clients)
        ]


@dataclass(frozen=True)
class Report:
    """Tokens a second of each round."""

    work: Work
    offline: list[float]
    http: list[float]
    offline_again: list[float]

    @property
    def ratio(self) -> float:
        """The median of the pairs' ratios; more is better."""
        return statistics.median(a / b for a, b in zip(self.http, self.offline, strict=True))

    @property
    def noise(self) -> float:
        """The same of two offline runs."""
        return statistics.median(a / b for a, b in zip(self.offline_again, self.offline, strict=True))


def offline(llm: LLM, work: Work, number: int) -> float:
    """Tokens a second without a server."""
    params = SamplingParams(temperature=0, max_tokens=work.new_tokens, ignore_eos=True)
    began = time.monotonic()
    outputs = llm.generate(list(work.prompts(number)), params, use_tqdm=False)
    return sum(len(one.outputs[0].token_ids) for one in outputs) / (time.monotonic() - began)


async def over_http(port: int, model: str, work: Work, number: int) -> float:
    """Tokens a second of all clients together."""
    began = time.monotonic()
    counts = await asyncio.gather(*(_client(port, model, work, prompt) for prompt in work.prompts(number)))
    return sum(counts) / (time.monotonic() - began)


async def _client(port: int, model: str, work: Work, prompt: list[int]) -> int:
    """Stream one completion; how many tokens its usage says it had."""
    body = {"model": model, "prompt": prompt, "max_tokens": work.new_tokens, "temperature": 0, "ignore_eos": True,
            "stream": True, "stream_options": {"include_usage": True}}  # fmt: skip
    content = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    head = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nConnection: close\r\n"
    writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
    answer = await reader.read(-1)
    writer.close()
    if not answer.startswith(b"HTTP/1.1 200") or b"data: [DONE]" not in answer:
        raise RuntimeError(f"the server answered {answer[:200]!r}")
    return int(re.findall(rb'"completion_tokens":(\d+)', answer)[-1])


def measure(model: str, work: Work, num_pairs: int, llm: LLM, port: int) -> Report:
    """In turn: offline, over HTTP, offline."""
    numbers = itertools.count()
    offline(llm, work, next(numbers))  # warm
    asyncio.run(over_http(port, model, work, next(numbers)))
    first, served, again = [], [], []
    for pair in range(num_pairs):
        first.append(offline(llm, work, next(numbers)))
        served.append(asyncio.run(over_http(port, model, work, next(numbers))))
        again.append(offline(llm, work, next(numbers)))
        said = f"{first[-1]:.1f} tok/s offline, {served[-1]:.1f} over HTTP, {again[-1]:.1f} offline"
        print(f"round {pair + 1}: {said}", file=sys.stderr, flush=True)
    return Report(work, first, served, again)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = bench_parser("python -m benchmarks.http", __doc__)
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL, help="name or path of the model")
    parser.add_argument("--backend", default="auto", choices=["auto", "cpu", "torch", "llamacpp"], help="backend")
    parser.add_argument("--clients", type=int, default=16, help="concurrent clients")
    parser.add_argument("--prompt-tokens", type=int, default=64, help="tokens per prompt")
    parser.add_argument("--new-tokens", type=int, default=32, help="generated tokens per request")
    parser.add_argument("--pairs", type=int, default=7, help="pairs of measurements")
    parser.add_argument(
        "--serve", nargs=argparse.REMAINDER, default=[], help="all further arguments are for `tokenmill serve`"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    with LLM(options.model, backend=options.backend, max_num_seqs=options.clients) as llm:
        vocab_size = llm.get_tokenizer().vocab_size
        work = Work(options.clients, options.prompt_tokens, options.new_tokens, vocab_size)
        more = ["--max-num-seqs", str(options.clients), "--log-level", "warning", "--backend", options.backend]
        with serving(options.model, [*more, *options.serve]) as server:
            report = measure(options.model, work, options.pairs, llm, server.port)
    if options.json:
        print(json.dumps({**asdict(report), "ratio": report.ratio, "noise": report.noise}, indent=2))
        return 0
    print(f"{work.num_clients} clients, {work.prompt_tokens} tokens in, {work.new_tokens} out:")
    print(f"  offline   {statistics.median(report.offline):.1f} tok/s")
    print(f"  over HTTP {statistics.median(report.http):.1f} tok/s")
    print(f"  ratio     {report.ratio:.3f} (A/A {report.noise:.3f})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
