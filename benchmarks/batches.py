"""`python -m benchmarks.batches`: a batch of 1,000 lines beside 8 live streams.

One server, in a process of its own. First the batch alone, which is what the machine can do; then the streams alone
(the control), the streams beside the batch until all lines are done, and the streams alone once more: the ratio of the
two controls (A/A) says how much of a difference is noise. Throughput is in tokens of prompts and answers, without
cached ones and without those that speculation proposed in vain. What the streams leave is the throughput of the batch
alone, less that of the streams alone. Inter-token latency is counted per token: those that arrive in one event have
gaps of 0.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import sys
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from tokenmill.bench import bench_parser
from tokenmill.bench.load_clients import Target, call, completion_body, events, exchange, first_model, serving
from tokenmill.config import DEFAULT_MODEL

ITL_RATIO, SHARE = 1.5, 0.5
"""The bars."""
LOOK_S = 0.25
OVER = ("completed", "failed", "expired", "cancelled")


@dataclass
class Phase:
    """What was seen in one phase."""

    name: str
    seconds: float = 0.0
    streamed: int = 0
    """Those of the streams, without their short prompts."""
    gaps_s: list[float] = field(default_factory=list)
    lines: int = 0
    """Lines that were done..."""
    line_tokens: int = 0
    """...and their tokens, without cached ones."""

    @property
    def p99_ms(self) -> float:
        return 1000 * float(np.percentile(self.gaps_s, 99)) if self.gaps_s else float("nan")

    @property
    def median_ms(self) -> float:
        return 1000 * float(np.median(self.gaps_s)) if self.gaps_s else float("nan")

    @property
    def tokens_per_s(self) -> float:
        return (self.line_tokens + self.streamed) / self.seconds

    @property
    def streamed_per_s(self) -> float:
        return self.streamed / self.seconds


class Streams:
    """Clients that stream, each the next answer when it has one."""

    def __init__(self, target: Target, model: str, num_tokens: int) -> None:
        self._target, self._model, self._num_tokens = target, model, num_tokens
        self._numbers = itertools.count()
        self.phase: Phase | None = None
        """What is seen is noted here, if anywhere."""

    async def run(self) -> None:
        while True:
            prompt = f"Story number {next(self._numbers)}:"  # drawn: greedily, small models repeat themselves
            more = {"ignore_eos": True, "temperature": 0.8, "return_token_ids": True}
            body = completion_body(self._model, prompt, self._num_tokens, **more)
            before: float | None = None
            async with exchange(self._target, "POST", "/v1/completions", body) as answer:
                async for data in events(answer.pieces()):
                    if data == b"[DONE]":
                        break
                    now = time.perf_counter()
                    count = sum(len(choice["token_ids"]) for choice in json.loads(data)["choices"])
                    if self.phase is not None and count:
                        self.phase.streamed += count
                        self.phase.gaps_s += [*([] if before is None else [now - before]), *[0.0] * (count - 1)]
                    before = now if count else before


def line_tokens(batch: dict[str, Any]) -> int:
    used = batch["usage"]
    return int(used["total_tokens"] - used["input_tokens_details"]["cached_tokens"])


def upload(url: str, lines: Sequence[dict[str, Any]]) -> str:
    """The id of a new file."""
    text = "".join(json.dumps(line) + "\n" for line in lines)
    head = (
        '--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b\r\nContent-Disposition: form-data; '
    )
    body = f'{head}name="file"; filename="lines.jsonl"\r\n\r\n{text}\r\n--b--\r\n'.encode()
    request = urllib.request.Request(f"{url}/v1/files", body, {"Content-Type": "multipart/form-data; boundary=b"})
    with urllib.request.urlopen(request) as answer:
        return str(json.load(answer)["id"])


async def begin_batch(target: Target, model: str, name: str, options: argparse.Namespace) -> str:
    """A new batch; the name begins its prompts, so that none is in KV from another batch."""
    usual = {"model": model, "max_tokens": options.line_tokens, "ignore_eos": True, "temperature": 0}
    lines = [
        {
            "custom_id": f"line-{number}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {**usual, "prompt": f"{name}, report {number}. " + "The weather was fine. " * 6},
        }
        for number in range(options.lines)
    ]
    file = await asyncio.to_thread(upload, target.base_url, lines)
    body = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
    return str((await call(target, "POST", "/v1/batches", body))["id"])


async def measure(
    target: Target, phase: Phase, streams: Streams, seconds: float, settle_s: float, batch: str | None = None
) -> Phase:
    """So many seconds after it has settled, or until the batch is over."""
    await asyncio.sleep(settle_s)
    before = await call(target, "GET", f"/v1/batches/{batch}") if batch else None
    began = time.perf_counter()
    streams.phase = phase
    after = before
    while time.perf_counter() - began < seconds:
        await asyncio.sleep(LOOK_S)
        if batch:
            after = await call(target, "GET", f"/v1/batches/{batch}")
            if after["status"] in OVER:
                break
    streams.phase = None
    phase.seconds = time.perf_counter() - began
    if before and after:
        if after["request_counts"]["failed"]:
            raise SystemExit(f"lines of the batch failed: {after}")
        phase.lines = after["request_counts"]["completed"] - before["request_counts"]["completed"]
        phase.line_tokens = line_tokens(after) - line_tokens(before)
    return phase


async def run(url: str, options: argparse.Namespace) -> list[Phase]:
    target = Target(url)
    model = await first_model(target)
    streams = Streams(target, model, options.tokens)
    clients: list[asyncio.Task[None]] = []
    settle_s = options.settle_seconds

    async def end_clients() -> None:
        for client in clients:
            client.cancel()
        for result in await asyncio.gather(*clients, return_exceptions=True):
            if not isinstance(result, asyncio.CancelledError):
                raise SystemExit(f"a stream failed: {result!r}")
        clients.clear()

    def begin_clients() -> None:
        clients.extend(asyncio.ensure_future(streams.run()) for _ in range(options.streams))

    async def end_batch(batch: str) -> None:
        if (await call(target, "GET", f"/v1/batches/{batch}"))["status"] not in OVER:
            await call(target, "POST", f"/v1/batches/{batch}/cancel", {})
        while (await call(target, "GET", f"/v1/batches/{batch}"))["status"] not in OVER:
            await asyncio.sleep(LOOK_S)

    batch = await begin_batch(target, model, "Alone", options)
    alone = await measure(target, Phase("batch alone"), streams, options.seconds, settle_s, batch)
    await end_batch(batch)
    begin_clients()
    control = await measure(target, Phase("streams alone"), streams, options.seconds, settle_s)
    batch = await begin_batch(target, model, "Beside streams", options)
    both = await measure(target, Phase("streams beside the batch"), streams, options.most_seconds, settle_s, batch)
    await end_batch(batch)
    again = await measure(target, Phase("streams alone again"), streams, options.seconds, settle_s)
    await end_clients()
    return [alone, control, both, again]


@dataclass(frozen=True)
class Report:
    phases: list[Phase]
    left: float
    """Tokens a second that the streams leave."""
    batch: float
    """Tokens a second of the batch beside them."""
    itl_ratio: float
    a_a: float

    @property
    def is_met(self) -> bool:
        return self.batch >= SHARE * self.left and self.itl_ratio <= ITL_RATIO


def report(phases: Sequence[Phase]) -> Report:
    alone, control, both, again = phases
    left = alone.tokens_per_s - (control.tokens_per_s + again.tokens_per_s) / 2
    before = float(np.percentile(control.gaps_s + again.gaps_s, 99)) * 1000
    batch = both.line_tokens / both.seconds
    return Report(list(phases), left, batch, both.p99_ms / before, again.p99_ms / control.p99_ms)


def table(found: Report) -> str:
    lines = [
        "| phase | tokens/s | of streams | p50 ITL | p99 ITL | lines |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for one in found.phases:
        gaps = f"{one.median_ms:.1f} ms | {one.p99_ms:.1f} ms" if one.gaps_s else "- | -"
        lines.append(f"| {one.name} | {one.tokens_per_s:.0f} | {one.streamed_per_s:.0f} | {gaps} | {one.lines} |")
    share = found.batch / found.left if found.left > 0 else float("inf")
    return "\n".join(
        [
            *lines,
            "",
            f"the batch beside the streams: {found.batch:.0f} tokens/s of {found.left:.0f} that they leave: "
            f"{share:.2f} (bar: {SHARE})",
            f"p99 ITL beside the batch / alone: {found.itl_ratio:.2f} (bar: {ITL_RATIO}); A/A {found.a_a:.2f}",
        ]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = bench_parser("python -m benchmarks.batches", (__doc__ or "").partition("\n\n")[0])
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL, help="name or path of the model")
    parser.add_argument("--streams", type=int, default=8, help="live streams")
    parser.add_argument("--tokens", type=int, default=400, help="tokens of a stream")
    parser.add_argument("--lines", type=int, default=1000, help="lines of the batch")
    parser.add_argument("--line-tokens", type=int, default=16, help="tokens of a line's answer")
    parser.add_argument("--seconds", type=float, default=30.0, help="duration of the phases without end, in seconds")
    parser.add_argument("--most-seconds", type=float, default=180.0, help="the most that both together run, in seconds")
    parser.add_argument("--settle-seconds", type=float, default=2.0, help="not measured, before each phase, in seconds")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--serve", nargs=argparse.REMAINDER, default=[], help="arguments for `tokenmill serve`")
    options = parser.parse_args(arguments)
    with serving(options.model, ["--log-level", "warning", *options.serve]) as server:
        found = report(asyncio.run(run(server.base_url, options)))
    if options.json:
        phases = [{**asdict(one), "gaps_s": [], "p99_ms": one.p99_ms} for one in found.phases]
        print(json.dumps({**asdict(found), "phases": phases, "is_met": found.is_met}, indent=2))
    else:
        print(table(found))
    return 0 if found.is_met else 1


if __name__ == "__main__":
    sys.exit(main())
