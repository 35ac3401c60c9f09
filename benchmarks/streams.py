"""`python -m benchmarks.streams`: what streaming costs a server: tokens for each second of its CPU time.

A server with the fake model streams chats to many clients at once; its CPU time is that of the whole process, engine
included. With `--against`, another checkout's server takes turns with it, and two runs of the same one (A/A) say how
much of a difference is noise. Wall-clock time plays no part: it may run on a busy machine.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tokenmill.bench import bench_parser
from tokenmill.bench.load_clients import ServerProcess, Target, chat_body, exchange, server_process

LETTERS = list(range(ord("a"), ord("z") + 1))
"""Tokens of the fake model that are whole characters: each one is an event."""
OWN_SOURCE = Path(__file__).parent.parent / "src"


@dataclass(frozen=True)
class Work:
    """What one round does."""

    num_clients: int
    new_tokens: int


async def stream_all(port: int, work: Work) -> int:
    """All clients at once; events with text that came."""
    return sum(
        await asyncio.gather(*(_stream(Target(f"http://127.0.0.1:{port}"), work) for _ in range(work.num_clients)))
    )


async def _stream(target: Target, work: Work) -> int:
    more = {"ignore_eos": True, "temperature": 0, "allowed_token_ids": LETTERS, "stream_options": None}
    body = chat_body("fake", [{"role": "user", "content": "hi"}], work.new_tokens, **more)
    async with exchange(target, "POST", "/v1/chat/completions", body) as answer:
        if answer.status != 200:
            raise await answer.failure()
        return (await answer.content()).count(b'"content":"') - 1  # the first one has the role


def tokens_per_cpu_s(server: ServerProcess, work: Work) -> float:
    """Tokens for each second of the server's CPU time."""
    before = _cpu_s(server.pid)
    asyncio.run(stream_all(server.port, work))
    return work.num_clients * work.new_tokens / (_cpu_s(server.pid) - before)


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def serving_from(source: Path, work: Work) -> Iterator[ServerProcess]:
    """A server of the checkout whose packages are in this folder."""
    command = [sys.executable, "-m", "tokenmill", "serve", "fake", "--port", "0", "--log-level", "warning"]
    options = [
        "--max-num-seqs",
        str(work.num_clients),
        "--kv-cache-tokens",
        str(work.num_clients * (work.new_tokens + 128)),
    ]
    with server_process([*command, *options], {"PYTHONPATH": str(source)}) as server:
        asyncio.run(stream_all(server.port, Work(work.num_clients, 8)))  # warm
        yield server


def main(arguments: Sequence[str] | None = None) -> int:
    parser = bench_parser("python -m benchmarks.streams", __doc__)
    parser.add_argument("--clients", type=int, default=64, help="concurrent clients")
    parser.add_argument("--new-tokens", type=int, default=200, help="generated tokens per request")
    parser.add_argument("--pairs", type=int, default=7, help="rounds")
    parser.add_argument("--against", type=Path, help="src folder of another checkout (default: none)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    work = Work(options.clients, options.new_tokens)
    found: dict[str, list[float]] = {"own": [], "other": [], "own again": []}
    with serving_from(OWN_SOURCE, work) as own, serving_from(options.against or OWN_SOURCE, work) as other:
        for _ in range(options.pairs):
            for name, server in (("own", own), ("other", other), ("own again", own)):
                found[name].append(tokens_per_cpu_s(server, work))
            print("  ".join(f"{name} {rates[-1]:.0f}" for name, rates in found.items()), file=sys.stderr, flush=True)
    ratio = statistics.median(a / b for a, b in zip(found["own"], found["other"], strict=True))
    noise = statistics.median(a / b for a, b in zip(found["own again"], found["own"], strict=True))
    if options.json:
        print(json.dumps({**found, "ratio": ratio, "noise": noise}, indent=2))
        return 0
    print(f"{work.num_clients} streams of {work.new_tokens} tokens, fake model")
    print(f"  {statistics.median(found['own']):.0f} tokens per CPU second")
    if options.against is not None:
        print(f"  {ratio:.2f} x the other checkout's (A/A {noise:.2f})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
