"""`python -m benchmarks.streams`: what streaming costs a server, in CPU time, on the fake model.

Without options: tokens for each second of the server process's CPU time, engine included, while it streams chats to
many clients as fast as it can. With `--against`, another checkout's server takes turns with it.

With `--paced`: CPU time of the event loop's thread for each streamed token. The engine paces its steps (default: 50 a
second) so that each token is an event of its own. A bare ASGI application takes turns with the server: the same uvicorn
settings, the same bytes in each event, all streams woken together as often as the engine would. The third row shows
what merging saves: the same server with an event loop that stands still for 80 ms at a time, so that tokens pile up.

Two runs of the same server (A/A) say how much of a difference is noise. Wall-clock time plays no part: it may run on a
busy machine.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenmill.bench import bench_parser
from tokenmill.bench.load_clients import HttpReply, ServerProcess, Target, chat_body, exchange, server_process

LETTERS = list(range(ord("a"), ord("z") + 1))
"""Tokens of the fake model that are whole characters: each one is an event."""
REPOSITORY = Path(__file__).parent.parent
OWN_SOURCE = REPOSITORY / "src"
CHAT = "/v1/chat/completions"
CONTENT = re.compile(rb'"content":"([a-z]+)"')
EDGE_TOKENS = 10
"""Tokens of each stream before and after those that are measured: requests begin and end meanwhile."""
STALL_S = 0.08
"""How long the event loop stands still where merging is measured."""


@dataclass(frozen=True)
class Work:
    """What one round does."""

    num_clients: int
    new_tokens: int

    @property
    def body(self) -> dict[str, Any]:
        more = {"ignore_eos": True, "temperature": 0, "allowed_token_ids": LETTERS, "stream_options": None}
        return chat_body("fake", [{"role": "user", "content": "hi"}], self.new_tokens, **more)


async def stream_all(port: int, work: Work, body: Any, read: Callable[[HttpReply], Awaitable[None]]) -> None:
    """All clients at once."""

    async def one() -> None:
        async with exchange(Target(f"http://127.0.0.1:{port}"), "POST", CHAT, body) as answer:
            if answer.status != 200:
                raise await answer.failure()
            await read(answer)

    await asyncio.gather(*(one() for _ in range(work.num_clients)))


async def discard(answer: HttpReply) -> None:
    await answer.content()


# -- the whole process, as fast as it can -----------------------------------------------------------------------------


def tokens_per_cpu_s(server: ServerProcess, work: Work) -> float:
    """Tokens for each second of the server's CPU time."""
    before = _cpu_s(server.pid)
    asyncio.run(stream_all(server.port, work, work.body, discard))
    return work.num_clients * work.new_tokens / (_cpu_s(server.pid) - before)


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def serving_from(source: Path, work: Work) -> Iterator[ServerProcess]:
    """A server of the checkout whose packages are in this folder."""
    command = [sys.executable, "-m", "tokenmill", "serve", "fake", "--port", "0", "--log-level", "warning"]
    options = ["--max-num-seqs", str(work.num_clients), "--kv-cache-tokens", str(_kv_cache_tokens(work))]
    with server_process([*command, *options], {"PYTHONPATH": str(source)}) as server:
        warm = Work(work.num_clients, 8)
        asyncio.run(stream_all(server.port, warm, warm.body, discard))
        yield server


def _kv_cache_tokens(work: Work) -> int:
    return work.num_clients * (work.new_tokens + 128)


def compare(work: Work, num_pairs: int, against: Path | None) -> dict[str, Any]:
    found: dict[str, list[float]] = {"own": [], "other": [], "own again": []}
    with serving_from(OWN_SOURCE, work) as own, serving_from(against or OWN_SOURCE, work) as other:
        for _ in range(num_pairs):
            for name, server in (("own", own), ("other", other), ("own again", own)):
                found[name].append(tokens_per_cpu_s(server, work))
            _say("  ".join(f"{name} {rates[-1]:.0f}" for name, rates in found.items()))
    return {**found, "ratio": _ratio(found, "own", "other"), "noise": _ratio(found, "own again", "own")}


# -- the event loop's thread, one event per token ---------------------------------------------------------------------


class LoopCost:
    """CPU time of a server's event loop, its main thread, while all streams are under way; as its clients count."""

    def __init__(self, server: ServerProcess, work: Work) -> None:
        self._server = server
        self._work = work
        self._num_waiting = work.num_clients
        """Streams that have not had their first tokens yet."""
        self._num_tokens = self._num_events = 0
        self._marks: list[tuple[int, int, int]] = []
        """CPU nanoseconds, tokens and events, at the beginning and at the end."""

    async def read(self, answer: HttpReply) -> None:
        own, last = 0, self._work.new_tokens - EDGE_TOKENS
        async for piece in answer.pieces():
            found = CONTENT.findall(piece)
            count = sum(map(len, found))
            self._num_tokens += count
            self._num_events += len(found)
            before, own = own, own + count
            if before < EDGE_TOKENS <= own:
                self._num_waiting -= 1
                if not self._num_waiting:
                    self._mark()
            if before < last <= own and len(self._marks) == 1:
                self._mark()

    def _mark(self) -> None:
        schedstat = Path(f"/proc/{self._server.pid}/task/{self._server.pid}/schedstat").read_text()
        self._marks.append((int(schedstat.split()[0]), self._num_tokens, self._num_events))

    @property
    def us_per_event(self) -> float:
        (began, _, first), (ended, _, last) = self._marks
        return (ended - began) / 1000 / (last - first)

    @property
    def tokens_per_event(self) -> float:
        (_, first, num_before), (_, last, num_after) = self._marks
        return (last - first) / (num_after - num_before)

    @property
    def us_per_token(self) -> float:
        return self.us_per_event / self.tokens_per_event


def loop_cost(server: ServerProcess, work: Work, body: Any) -> LoopCost:
    cost = LoopCost(server, work)
    asyncio.run(stream_all(server.port, work, body, cost.read))
    return cost


@contextmanager
def serving_here(what: str, work: Work, rate: float) -> Iterator[ServerProcess]:
    """One of this module's servers, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.streams", "--run", what, "--rate", str(rate)]
    sizes = ["--clients", str(work.num_clients), "--new-tokens", str(work.new_tokens)]
    with server_process([*command, *sizes], {"PYTHONPATH": f"{OWN_SOURCE}:{REPOSITORY}"}) as server:
        yield server


def compare_paced(work: Work, num_pairs: int, rate: float) -> dict[str, Any]:
    """The server and the bare application in turn, and the server that merges.

    Costs are those of an event, except for the server that merges: on a busy machine, the loop may fall behind at any
    rate, and the other two are to be compared by what they send.
    """
    found: dict[str, list[float]] = {"own": [], "bare": [], "own again": [], "merged": []}
    tokens_per_event: dict[str, list[float]] = {name: [] for name in found}
    with ExitStack() as stack:
        own, bare, stalled = (
            stack.enter_context(serving_here(what, work, rate)) for what in ("own", "bare", "stalled")
        )
        replayed = {"event": asyncio.run(_one_event(own)).decode(), "tokens": work.new_tokens}
        turns = (("own", own, work.body), ("bare", bare, replayed), ("own again", own, work.body),
                 ("merged", stalled, work.body))  # fmt: skip
        for _ in range(num_pairs):
            for name, server, body in turns:
                cost = loop_cost(server, work, body)
                found[name].append(cost.us_per_token if name == "merged" else cost.us_per_event)
                tokens_per_event[name].append(cost.tokens_per_event)
            _say("  ".join(f"{name} {costs[-1]:.1f} us" for name, costs in found.items()))
    return {
        **found,
        "tokens_per_event": tokens_per_event,
        "ratio": _ratio(found, "own", "bare"),
        "noise": _ratio(found, "own again", "own"),
        "event": replayed["event"],
    }


async def _one_event(server: ServerProcess) -> bytes:
    """An event with one token."""
    async with exchange(Target(server.base_url), "POST", CHAT, Work(1, 4).body) as answer:
        events = (await answer.content()).split(b"\n\n")
    return next(event for event in events if CONTENT.search(event)) + b"\n\n"


def _ratio(found: dict[str, list[float]], first: str, second: str) -> float:
    """The median of the rounds' ratios."""
    return statistics.median(a / b for a, b in zip(found[first], found[second], strict=True))


def _say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


# -- the servers ------------------------------------------------------------------------------------------------------


def run_own(work: Work, rate: float, stall_s: float) -> None:
    """As `tokenmill serve fake`, with an engine that waits after each step, and perhaps a loop that stands still."""
    from tokenmill import AsyncLLM
    from tokenmill.config import EngineConfig
    from tokenmill.engine.events import TickEvent
    from tokenmill.server.app import SWITCH_S, Server
    from tokenmill.server.config import ServerConfig
    from tokenmill.server.models import ModelSpec
    from tokenmill.server.served import Served

    due = time.monotonic()

    def pace(event: object) -> None:
        nonlocal due
        if isinstance(event, TickEvent):
            now = time.monotonic()
            due = max(due + 1 / rate, now)
            time.sleep(due - now)

    def load() -> AsyncLLM:
        config = EngineConfig(max_num_seqs=work.num_clients)
        llm = AsyncLLM("fake", config=config, kv_cache_tokens=_kv_cache_tokens(work))
        llm.subscribe(0, lambda _: pace)
        return llm

    async def run() -> None:
        stalling = asyncio.ensure_future(stall())
        await server.load_and_serve(listener)
        stalling.cancel()

    async def stall() -> None:
        while stall_s:
            await asyncio.sleep(stall_s / 4)
            if len(server.served.calls) == work.num_clients:  # once all streams have begun
                time.sleep(stall_s)

    sys.setswitchinterval(SWITCH_S)
    server = Server(Served(ServerConfig(), [ModelSpec(name="fake", load=load)]))
    server.served.models.after_change = server.settle
    listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
    with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
        runner.run(run())


def run_bare(rate: float) -> None:
    """The least that an ASGI application can do: wait for the step, send an event."""
    import uvicorn

    waiting: list[asyncio.Future[None]] = []

    async def beat() -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            due = max(due + 1 / rate, loop.time())
            await asyncio.sleep(due - loop.time())
            for waiter in waiting:
                waiter.set_result(None)
            waiting.clear()

    async def application(_: Any, receive: Any, send: Any) -> None:
        message = await receive()
        body = message["body"]
        while message.get("more_body"):
            message = await receive()
            body += message["body"]
        wanted = json.loads(body)
        event = wanted["event"].encode()
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        loop = asyncio.get_running_loop()
        for _ in range(wanted["tokens"]):
            waiter = loop.create_future()
            waiting.append(waiter)
            await waiter
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def run() -> None:
        settings = uvicorn.Config(
            application, ws="none", lifespan="off", log_config=None, access_log=False, server_header=False
        )
        beating = asyncio.ensure_future(beat())
        print(f"bare ASGI on http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
        await uvicorn.Server(settings).serve([listener])
        beating.cancel()

    listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
    with asyncio.Runner(loop_factory=uvicorn.Config(application).get_loop_factory()) as runner:
        runner.run(run())


# -- the command ------------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    parser = bench_parser("python -m benchmarks.streams", __doc__)
    parser.add_argument("--clients", type=int, default=64, help="concurrent clients")
    parser.add_argument("--new-tokens", type=int, default=200, help="generated tokens per request")
    parser.add_argument("--pairs", type=int, default=7, help="rounds")
    parser.add_argument("--against", type=Path, help="src folder of another checkout (default: none)")
    parser.add_argument("--paced", action="store_true", help="measure the event loop next to a bare ASGI application")
    parser.add_argument("--rate", type=float, default=50.0, help="tokens per second and stream with --paced")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--run", choices=["own", "stalled", "bare"], help="run one of the servers of --paced")
    options = parser.parse_args(arguments)
    work = Work(options.clients, options.new_tokens)
    if options.run == "bare":
        run_bare(options.rate)
        return 0
    if options.run is not None:
        run_own(work, options.rate, STALL_S if options.run == "stalled" else 0.0)
        return 0
    if options.paced:
        found = compare_paced(work, options.pairs, options.rate)
    else:
        found = compare(work, options.pairs, options.against)
    if options.json:
        print(json.dumps(found, indent=2))
    elif options.paced:
        print(f"{work.num_clients} streams at {options.rate:g} tok/s, CPU us of the event loop")
        for name in ("own", "bare", "merged"):
            merging, unit = statistics.median(found["tokens_per_event"][name]), "token" if name == "merged" else "event"
            print(f"  {name:8}{statistics.median(found[name]):6.1f} per {unit}  ({merging:.2f} tokens per event)")
        print(f"  {found['ratio']:.2f} x a bare ASGI application (A/A {found['noise']:.2f})")
    else:
        print(f"{work.num_clients} streams of {work.new_tokens} tokens, fake model")
        print(f"  {statistics.median(found['own']):.0f} tokens per CPU second")
        if options.against is not None:
            print(f"  {found['ratio']:.2f} x the other checkout's (A/A {found['noise']:.2f})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
