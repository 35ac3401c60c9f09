"""Real servers on a real database, and clients that talk to whichever is there."""

from __future__ import annotations

import http.client
import json
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.cluster.database import Database
from tests.server.serving import START_S, TOKENMILL, Reply, request

LEASE_S = 2.0
LONG = 1500
"""Tokens of an answer that takes its time."""
READY = re.compile(r" on https?://[^:]+:(\d+)/v1")


class Node:
    """`tokenmill serve` on a port of its own, which is started again and again."""

    def __init__(self, folder: Path, name: str, url: str, *options: str) -> None:
        self.log = folder / f"{name}.log"
        self._url, self._options = url, options
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port: int = probe.getsockname()[1]
        self.process: subprocess.Popen[bytes] | None = None
        self.streams: list[http.client.HTTPConnection | http.client.HTTPResponse] = []
        """Connections of streams, to be closed in the end."""

    def start(self, *, wait: bool = True) -> None:
        lease = ("--lease", str(LEASE_S))
        command = [TOKENMILL, "serve", "fake", "--store", self._url, *lease, "--port", str(self.port), *self._options]
        with self.log.open("wb") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=file)
        if wait:
            self.wait()

    def wait(self) -> None:
        assert self.process is not None
        deadline = time.monotonic() + START_S
        while READY.search(self.log.read_text()) is None:
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.02)

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def request(self, method: str, path: str, body: Any = None, **headers: str) -> Reply:
        return request(self.port, method, path, body, None, headers)

    def create(self, **options: Any) -> str:
        reply = self.request("POST", "/v1/sessions", {"temperature": 0, **options})
        assert reply.status == 201, reply.body
        assert reply.headers["x-session-id"] == reply.json()["id"]
        return str(reply.json()["id"])

    def ask(self, session: str, text: str, **options: Any) -> Reply:
        body = {"input": text, "max_tokens": 6, "ignore_eos": True, "stream": False, **options}
        return self.request("POST", f"/v1/sessions/{session}/generate", body)

    def turns(self, session: str) -> list[dict[str, Any]]:
        return list(self.request("GET", f"/v1/sessions/{session}/turns").json()["data"])

    def tokens(self, session: str, text: str, **options: Any) -> list[int]:
        reply = self.ask(session, text, **options)
        assert reply.status == 200, reply.body
        assert reply.json()["durable"] is True
        return list(reply.json()["token_ids"])


@contextmanager
def nodes(db: Database, folder: Path, count: int = 2, *options: str, url: str | None = None) -> Iterator[list[Node]]:
    made = [Node(folder, f"node{i}", url or db.url, *options) for i in range(count)]
    try:
        for one in made:
            one.start(wait=False)
        for one in made:
            one.wait()
        yield made
    finally:
        for one in made:
            for connection in one.streams:
                connection.close()
            if one.process is not None:
                with suppress(ProcessLookupError):
                    one.process.kill()
                one.process.wait()


@dataclass
class Heard:
    """What a client has got of a stream."""

    token_ids: list[int] = field(default_factory=list)
    last_id: str | None = None
    finish_reason: str | None = None
    restarts: int = 0
    durable: bool | None = None

    def take(self, line: bytes) -> None:
        text = line.decode().rstrip("\n")
        if text.startswith("id: "):
            self.last_id = text.removeprefix("id: ")
        elif text.startswith("data: {"):
            data = json.loads(text.removeprefix("data: "))
            if data["object"] == "session.restarted":
                self.restarts += 1
                self.token_ids = self.token_ids[: data["offset"]]
                return
            assert data["offset"] == len(self.token_ids), "no gap, nothing twice"
            self.token_ids += data["token_ids"]
            self.finish_reason, self.durable = data["finish_reason"], data["durable"]


class Stream:
    """A stream that is read line by line."""

    def __init__(self, node: Node, method: str, path: str, body: Any = None, **headers: str) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", node.port, timeout=60)
        node.streams.append(self.connection)
        content = None if body is None else json.dumps(body)
        sent = {"Content-Type": "application/json"} if body is not None else {}
        self.connection.request(method, path, content, {**sent, **headers})
        self.response = self.connection.getresponse()
        node.streams.append(self.response)
        assert self.response.status == 200, self.response.read()

    def read(self, heard: Heard, at_least: int | None = None) -> Heard:
        """Until there are so many tokens more, or to the end."""
        until = None if at_least is None else len(heard.token_ids) + at_least
        with suppress(http.client.HTTPException, OSError):
            while until is None or len(heard.token_ids) < until:
                line = self.response.readline()
                if not line:
                    break
                heard.take(line)
        return heard


def begin(node: Node, session: str, text: str, **options: Any) -> Stream:
    body = {"input": text, "max_tokens": LONG, "ignore_eos": True, **options}
    return Stream(node, "POST", f"/v1/sessions/{session}/generate", body)


def resume(node: Node, session: str, heard: Heard) -> Heard:
    assert heard.last_id is not None
    return Stream(node, "GET", f"/v1/sessions/{session}/stream", **{"Last-Event-ID": heard.last_id}).read(heard)
