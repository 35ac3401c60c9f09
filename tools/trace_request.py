"""Count the project's functions on the way of a streamed chat request, from its socket to its last event.

    python tools/trace_request.py [--session] [--tokens 256] [--list] [--json]

A server over the fake backend runs in this process and answers on a real socket; every thread has a `sys.setprofile`
hook from its start. After a warm-up request, one request is recorded. The report has these figures:

- distinct functions of the package that ran on any thread, outside the engine and the backend contract. Lambdas and
  comprehensions belong to the function around them. Of these, those that ran on the event loop's thread: the others are
  the sampler and the telemetry of each step, on the engine's.
- distinct code objects: the same, with each lambda and comprehension counted by itself, as `sys.setprofile` sees them.
- calls per token on the event loop's thread: calls of any of the package's functions, resumed coroutines and
  generators included, as the difference between a request of N and one of 2 N tokens: per-request work cancels out.

The engine is paced, so that each token is an event of its own. With `--session` the request is a turn of a session.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import tokenmill
from tokenmill import AsyncLLM
from tokenmill.backends.fake import FakeConfig, FakeModel
from tokenmill.config import EngineConfig
from tokenmill.engine.events import TickEvent
from tokenmill.server.app import Server
from tokenmill.server.config import ServerConfig
from tokenmill.server.models import ModelSpec
from tokenmill.server.served import Served

PACKAGE = Path(tokenmill.__file__).parent
EXCLUDED = ("engine", "contract", "kv", "backends")
"""Packages that do not count: the engine, and what is behind the backend contract."""
STEP_S = 0.005
WAIT_S = 60.0
VOCAB_SIZE = 128
"""Ids of the byte tokenizer that are whole characters: each token of an answer has a text, and so an event."""


@dataclass
class Trace:
    """Calls by function, on every thread and on the event loop's."""

    calls: Counter[CodeType] = field(default_factory=Counter)
    on_loop: Counter[CodeType] = field(default_factory=Counter)

    @property
    def code_objects(self) -> list[CodeType]:
        """Those outside the excluded packages."""
        return [code for code in self.calls if where(code).parts[0] not in EXCLUDED]

    @property
    def num_functions_on_loop(self) -> int:
        return len({(where(code), function_name(code)) for code in self.code_objects if self.on_loop[code]})

    @property
    def functions(self) -> dict[str, int]:
        """Their functions by name, with the number of calls."""
        found: Counter[str] = Counter()
        for code in self.code_objects:
            found[f"{where(code).as_posix()}:{function_name(code)}"] += self.calls[code]
        return dict(sorted(found.items()))

    @property
    def num_on_loop(self) -> int:
        return sum(self.on_loop.values())


def where(code: CodeType) -> Path:
    return Path(code.co_filename).relative_to(PACKAGE)


def function_name(code: CodeType) -> str:
    """The function that a piece of code belongs to: a lambda's or a comprehension's is the one around it."""
    parts = code.co_qualname.split(".")
    while len(parts) > 2 and parts[-1].startswith("<") and parts[-2] == "<locals>":
        parts = parts[:-2]
    return ".".join(part for part in parts if part != "<locals>")


class Recorder:
    """A profile hook for all threads that are started after it; it counts while it is switched on."""

    def __init__(self) -> None:
        self.trace: Trace | None = None
        self.loop_thread: int | None = None
        self._is_ours: dict[CodeType, bool] = {}

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        trace = self.trace
        if trace is None or event != "call":
            return
        code = frame.f_code
        is_ours = self._is_ours.get(code)
        if is_ours is None:
            is_ours = self._is_ours[code] = code.co_filename.startswith(f"{PACKAGE}/")
        if is_ours:
            trace.calls[code] += 1
            if threading.get_ident() == self.loop_thread:
                trace.on_loop[code] += 1

    @contextmanager
    def recording(self) -> Iterator[Trace]:
        self.trace = made = Trace()
        try:
            yield made
        finally:
            self.trace = None


@contextmanager
def serving(recorder: Recorder) -> Iterator[tuple[int, Server]]:
    """A server on a thread of its own, and its port."""
    threading.setprofile(recorder)
    model = FakeModel(FakeConfig(vocab_size=VOCAB_SIZE, max_context=4096, depth=1))
    llm = AsyncLLM(model, config=EngineConfig(max_num_seqs=4, max_queue=8), kv_cache_tokens=32_768)
    listener = socket.create_server(("127.0.0.1", 0))
    server = Server(Served(ServerConfig(), [ModelSpec(name="fake", load=lambda: llm)]))
    llm.subscribe(0, lambda _: pace)

    async def serve() -> None:
        recorder.loop_thread = threading.get_ident()
        await server.load_and_serve(listener)

    thread = threading.Thread(target=lambda: asyncio.run(serve()), name="server")
    thread.start()
    while not server.is_ready:
        time.sleep(0.01)
    try:
        yield listener.getsockname()[1], server
    finally:
        server.should_exit = True
        thread.join(WAIT_S)
        listener.close()
        threading.setprofile(None)


def until_idle(server: Server) -> None:
    """A request is counted when it has left, which is after its client has its last byte."""
    while any(server.served.telemetry.traffic.running.values()):
        time.sleep(0.01)


def pace(event: object) -> None:
    """On the engine's thread: leave the event loop time to send each token by itself."""
    if isinstance(event, TickEvent):
        time.sleep(STEP_S)


SAMPLING = {"temperature": 0, "stream": True}


def stream_chat(port: int, num_tokens: int) -> int:
    """Stream one chat; the number of events that had a text."""
    messages = [{"role": "user", "content": "Name the planets."}]
    lines = post(
        port, "/v1/chat/completions", {"model": "fake", "messages": messages, "max_tokens": num_tokens, **SAMPLING}
    )
    return sum("content" in json.loads(line[6:])["choices"][0]["delta"] for line in lines) - 1  # one is the role's


def stream_turn(port: int, session: str, num_tokens: int) -> int:
    """Stream one turn of a session; the number of events that had a text."""
    lines = post(port, f"/v1/sessions/{session}/generate", {"input": "Hi.", "max_tokens": num_tokens, **SAMPLING})
    return sum(bool(json.loads(line[6:])["text"]) for line in lines)


def new_session(port: int) -> str:
    (line,) = post(port, "/v1/sessions", {"system": "Answer briefly."})
    return str(json.loads(line)["id"])


def post(port: int, path: str, body: dict[str, Any]) -> list[bytes]:
    """The answer's JSON: one line, or those of a stream's events."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        content = answer.read()
    finally:
        connection.close()
    if answer.status >= 400:
        raise SystemExit(f"the server answered {answer.status}: {content!r:.200}")
    is_stream = answer.headers["content-type"].startswith("text/event-stream")
    return [line for line in content.split(b"\n") if line.startswith(b"data: {")] if is_stream else [content]


def measure(num_tokens: int, *, in_session: bool = False) -> dict[str, Any]:
    recorder = Recorder()
    with serving(recorder) as (port, server):
        stream = partial(stream_turn, port, new_session(port)) if in_session else partial(stream_chat, port)
        stream(num_tokens)
        until_idle(server)
        traces, events = [], []
        for count in (num_tokens, 2 * num_tokens):
            with recorder.recording() as trace:
                events.append(stream(count))
                time.sleep(0.1)  # what follows the last byte: the log, the count, the end of the call
            traces.append(trace)
    short, long = traces
    per_token = {
        f"{where(code).as_posix()}:{code.co_qualname}": per
        for code, count in long.on_loop.items()
        if (per := (count - short.on_loop[code]) / num_tokens) >= 0.1
    }
    return {
        "tokens": num_tokens,
        "events": events,
        "distinct_functions": len(short.functions),
        "functions_on_loop": short.num_functions_on_loop,
        "distinct_code_objects": len(short.code_objects),
        "calls_per_token_on_loop": round((long.num_on_loop - short.num_on_loop) / num_tokens, 1),
        "functions": short.functions,
        "called": sorted({function_name(code) for code in short.calls}),
        "per_token": dict(sorted(per_token.items(), key=lambda item: -item[1])),
    }


def show(report: dict[str, Any], *, is_listed: bool) -> None:
    by_package: Counter[str] = Counter(name.rpartition("/")[0] or "." for name in report["functions"])
    print(f"{'package':24}{'functions':>10}")
    for package, count in sorted(by_package.items()):
        print(f"{package:24}{count:10}")
    print(f"{'all':24}{report['distinct_functions']:10}")
    print(f"{'on the event loop':24}{report['functions_on_loop']:10}")
    print(f"{'code objects':24}{report['distinct_code_objects']:10}\n")
    print(f"calls per token on the event loop: {report['calls_per_token_on_loop']}")
    print(f"events for {report['tokens']} and {2 * report['tokens']} tokens: {report['events']}")
    if is_listed:
        print("\ncalls per token, by function")
        for name, per in report["per_token"].items():
            print(f"{per:8.2f}  {name}")
        print("\ncalls in one request, by function")
        for name, count in report["functions"].items():
            print(f"{count:8}  {name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=256, help="tokens in the recorded answer (default: 256)")
    parser.add_argument("--session", action="store_true", help="trace a turn of a session instead of a chat")
    parser.add_argument("--list", action="store_true", help="list the functions")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    arguments = parser.parse_args()
    report = measure(arguments.tokens, in_session=arguments.session)
    if arguments.json:
        json.dump(report, sys.stdout, indent=1)
    else:
        show(report, is_listed=arguments.list)


if __name__ == "__main__":
    main()
