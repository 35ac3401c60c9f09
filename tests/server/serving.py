"""Servers for tests, and ways to talk to them: in this process over a fake model, or `tokenmill serve` as a child."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import openai

from tokenmill import AsyncLLM
from tokenmill.backends.fake import Fault, FaultKind
from tokenmill.server.app import Server
from tokenmill.server.config import ServerConfig
from tokenmill.server.models import ModelSpec
from tokenmill.server.served import Served

T = TypeVar("T")
KEY = "sk-test"
WAIT_S = 30.0
START_S = 120.0
"""For a process that imports all and loads a model while others work."""
MOST_IDLE_S = 3.0
"""Some tests read until the server hangs up."""
TOKENMILL = str(Path(sys.executable).with_name("tokenmill"))
HI: list[Any] = [{"role": "user", "content": "hi"}]


@dataclass
class Reply:
    """An answer to a request."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        error = self.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return dict(error)

    def events(self) -> list[Any]:
        """The data of a stream's events, as strict clients read them; the last one is [DONE]."""
        assert self.headers["content-type"].startswith("text/event-stream")
        pieces = self.body.decode().split("\n\n")
        assert pieces.pop() == ""
        data = [line for piece in pieces for line in piece.split("\n") if not line.startswith((":", "event:"))]
        assert all(line.startswith("data: ") for line in data)
        assert data[-1] == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in data[:-1]]


def request(
    port: int, method: str, path: str, body: Any = None, key: str | None = KEY, headers: Mapping[str, str] | None = None
) -> Reply:
    """One request on a connection of its own. A body that is neither text nor bytes is sent as JSON."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)
    sent = {"Content-Type": "application/json"} if body is not None else {}
    sent |= {} if key is None else {"Authorization": f"Bearer {key}"}
    content = body if body is None or isinstance(body, (str, bytes)) else json.dumps(body)
    try:
        connection.request(method, path, content, {**sent, **(headers or {})})
        answer = connection.getresponse()
        return Reply(answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read())
    finally:
        connection.close()


def raw_request(path: str, body: Any, key: str | None = KEY, method: str = "POST", headers: str = "") -> bytes:
    """A request as it goes over the wire."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
    lines += [f"Content-Length: {len(content)}"] + ([f"Authorization: Bearer {key}"] if key else [])
    return ("\r\n".join(lines) + "\r\n" + headers + "\r\n").encode() + content


@dataclass
class Running:
    """A server in this process, and what tests may want to look at behind it."""

    port: int
    llm: AsyncLLM
    served: Served
    client: openai.OpenAI
    loop: asyncio.AbstractEventLoop | None = None
    """What it runs on."""

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        """Something on the server's own thread."""
        assert self.loop is not None
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(WAIT_S)

    @property
    def core(self) -> Any:
        return self.llm._client.pool.cores[0]  # type: ignore[attr-defined]

    def post(self, path: str, body: Any, **options: Any) -> Reply:
        return request(self.port, "POST", path, body, **options)

    def get(self, path: str, **options: Any) -> Reply:
        return request(self.port, "GET", path, **options)

    def chat(self, **changes: Any) -> Reply:
        """A short chat, with these fields changed."""
        return self.post("/v1/chat/completions", {"model": "fake", "messages": HI, "max_tokens": 8, **changes})

    def connect(self) -> socket.socket:
        """For those who speak HTTP by themselves."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=WAIT_S)

    def inject(self, kind: FaultKind, **options: Any) -> Fault:
        """What the model does wrong next."""
        fault = Fault(kind, **options)
        self.core.call(lambda core: core._executor.backend.faults.add(fault)).result(WAIT_S)
        return fault

    def tick(self) -> int:
        """Steps that the engine has taken."""
        return int(self.core.call(lambda core: core.scheduler.tick).result(WAIT_S))

    def wait_until_idle(self) -> None:
        """All requests are gone, from the engine and from the server; whatever stays would keep this from returning."""
        deadline = time.monotonic() + WAIT_S
        gate, calls = self.served.gate, self.served.calls
        while self.core.call(lambda core: core.has_work).result(WAIT_S) or gate.num_inside or calls:
            assert time.monotonic() < deadline, "something still runs"
        stats = self.core.call(lambda core: core.stats()).result(WAIT_S)
        assert stats.num_running == stats.num_waiting == 0


@contextmanager
def running(
    llm: AsyncLLM,
    config: ServerConfig,
    *names: str,
    others: Sequence[ModelSpec] = (),
    send_buffer: int | None = None,
    most_idle_s: float = MOST_IDLE_S,
) -> Iterator[Running]:
    """A server on a thread of its own, with real sockets; the engine is closed with it."""
    listener = socket.create_server(("127.0.0.1", 0))
    if send_buffer is not None:  # of each connection: what a slow client has not taken
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    spec = ModelSpec(name=next(iter(names), "fake"), load=lambda: llm, aliases=frozenset(names[1:]))
    config = replace(config, idle_s=min(config.idle_s, most_idle_s))
    served = Served(config, [spec, *others])
    server = Server(served)
    loops: list[asyncio.AbstractEventLoop] = []

    async def serve() -> None:
        loops.append(asyncio.get_running_loop())
        await server.load_and_serve(listener)

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    while not server.is_ready:
        assert thread.is_alive()
        time.sleep(0.001)  # it needs the interpreter meanwhile
    port = listener.getsockname()[1]
    with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=KEY, max_retries=0, timeout=WAIT_S) as client:
        yield Running(port, llm, served, client, loops[0])
    server.should_exit = True
    thread.join(WAIT_S)
    assert not thread.is_alive()
    listener.close()


@dataclass
class Child:
    """`tokenmill serve` as a process of its own. What it says is in a file."""

    process: subprocess.Popen[bytes]
    log: Path
    port: int

    def said(self) -> str:
        return self.log.read_text()

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(WAIT_S)


@contextmanager
def child(
    log: Path,
    *arguments: str,
    port: int = 0,
    until: str = r" on https?://[^:]+:(\d+)/v1",
    max_files: int | None = None,
) -> Iterator[Child]:
    """Start it and wait until it has said that it is ready (or something else). `max_files`: open ones."""
    limit = None if max_files is None else partial(resource.setrlimit, resource.RLIMIT_NOFILE, (max_files, max_files))
    with log.open("wb") as file:
        command = [TOKENMILL, "serve", *arguments, "--port", str(port)]
        process = subprocess.Popen(command, stdout=file, stderr=file, preexec_fn=limit)
    try:
        deadline = time.monotonic() + START_S
        while (found := re.search(until, log.read_text())) is None:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.01)
        yield Child(process, log, int(found.group(1)))
    finally:
        process.kill()
        process.wait()
