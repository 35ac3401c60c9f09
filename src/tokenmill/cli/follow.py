"""Reads a server's live view: once, or as a stream that is taken up again whenever it breaks off."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import IO, Any
from urllib.parse import urlsplit

from tokenmill.engine.events import CoreSnapshot
from tokenmill.errors import ConfigError, EngineDead
from tokenmill.server.telemetry.figures import RateView
from tokenmill.server.telemetry.live import LiveCore

MAX_TICKS = 512
MAX_EVICTIONS = 4


@dataclass(frozen=True)
class Tick:
    """A step, as the strip of recent ones shows it."""

    num_decode: int
    num_prefill: int


@dataclass(frozen=True)
class Eviction:
    """KV of a session that was given up for a request."""

    at: float
    session: str
    num_tokens: int
    by: str | None


@dataclass
class Core:
    """One engine core."""

    live: LiveCore
    ticks: deque[Tick] = field(default_factory=lambda: deque(maxlen=MAX_TICKS))
    evictions: deque[Eviction] = field(default_factory=lambda: deque(maxlen=MAX_EVICTIONS))
    """The latest."""
    told_rates: RateView | None = None
    """As the server said; else they follow from its events."""

    @property
    def snapshot(self) -> CoreSnapshot:
        return self.live.view.snapshot()

    def rates(self, now: float) -> RateView:
        return self.live.rates.now(now) if self.told_rates is None else self.told_rates


class LiveState:
    """All cores of a server, and what is wrong with the connection. One thread feeds it, another one draws it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.cores: dict[tuple[str, int], Core] = {}
        self.problem: str | None = None
        self._ahead_s = 0.0
        """The server's clock against ours."""
        self._lock = threading.Lock()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """While it is drawn nothing changes."""
        with self._lock:
            yield

    @property
    def now(self) -> float:
        """By the server's clock."""
        return time.monotonic() + self._ahead_s

    def take(self, kind: str, data: dict[str, Any]) -> None:
        """An event of the server's stream."""
        with self._lock:
            if kind == "end":
                self.problem = str(data["reason"])
                return
            name = (data["model"], data["core"])
            if kind == "snapshot":
                self._ahead_s = data["at"] - time.monotonic()
                before = self.cores.get(name)
                self.cores[name] = Core(LiveCore(data))
                if before is not None:
                    self.cores[name].ticks, self.cores[name].evictions = before.ticks, before.evictions
            elif kind == "gone":
                self.cores.pop(name, None)
            elif name in self.cores:
                core = self.cores[name]
                core.live.take(kind, data)
                if kind == "parked" and data["change"] == "evicted" and data["session"] is not None:
                    lost = Eviction(data["at"], data["session"], data["tokens"], data.get("for"))
                    core.evictions.append(lost)
                if kind == "tick":
                    core.ticks.append(Tick(data["decode"], sum(data["tokens"]) - data["decode"]))

    def take_all(self, scheduler: dict[str, Any]) -> None:
        """The answer of /v1/scheduler: all cores at one moment."""
        with self._lock:
            for model in scheduler["models"]:
                for told in model["cores"]:
                    core = Core(LiveCore(told), told_rates=RateView(**told["rates"]))
                    self.cores[model["model"], told["core"]] = core

    def lose(self, problem: str) -> None:
        """The connection is gone: nothing is known any more."""
        with self._lock:
            self.problem = problem
            self.cores.clear()

    def begin(self) -> None:
        """There is a connection."""
        with self._lock:
            self.problem = None
            self.cores.clear()


AGAIN_S = 1.0
"""Between two attempts to reach a server."""
SILENT_S = 60.0
"""A server that sends nothing for so long, not even a comment, is gone."""


class Address:
    """Where a server is, and the key that it wants."""

    def __init__(self, url: str, api_key: str | None) -> None:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        try:
            self._host, self._port = parts.hostname or "", parts.port
        except ValueError:
            self._host, self._port = "", None
        if parts.scheme not in ("http", "https") or not self._host:
            raise ConfigError(f"{url!r} is no address of a server; it looks like http://127.0.0.1:8000")
        self._is_secure = parts.scheme == "https"
        self._folder = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self.url = f"{parts.scheme}://{parts.netloc}{self._folder}"

    def get(self, path: str) -> http.client.HTTPResponse:
        """An answer that is a success; `EngineDead` where there is none, `ConfigError` where the key is wrong."""
        kind = http.client.HTTPSConnection if self._is_secure else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=SILENT_S)
        try:
            connection.request("GET", self._folder + path, headers=self._headers)
            answer = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise EngineDead(f"no server at {self.url}: {error}") from None
        if answer.status == 200:
            return answer
        connection.close()
        if answer.status in (401, 403):
            raise ConfigError(f"{self.url} wants an API key: give --api-key, or set TOKENMILL_API_KEY")
        if answer.status == 404:
            raise ConfigError(f"{self.url} has no {path}: it is no tokenmill server, or an older one")
        raise EngineDead(f"{self.url} answers {answer.status}: not ready")


def read_once(address: Address, state: LiveState) -> None:
    """What the server is doing right now."""
    with address.get("/v1/scheduler") as answer:
        state.take_all(json.load(answer))


class Follower:
    """A thread that keeps a state up to date."""

    def __init__(self, address: Address, state: LiveState) -> None:
        self._address = address
        self._state = state
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tokenmill-follow", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Does not wait for the connection: nobody needs it any more."""
        self._is_over.set()

    def _run(self) -> None:
        while not self._is_over.is_set():
            try:
                with self._address.get("/v1/scheduler/events") as answer:
                    self._state.begin()
                    self._read(answer)
                problem = self._state.problem or "the server has closed the connection"
            except (EngineDead, ConfigError, OSError, http.client.HTTPException) as error:
                problem = str(error) or type(error).__name__
            except (KeyError, TypeError, ValueError) as error:
                problem = f"the server says what can't be understood: {type(error).__name__} {error}"
            self._state.lose(f"{problem}; trying again")
            self._is_over.wait(AGAIN_S)

    def _read(self, answer: IO[bytes]) -> None:
        kind = ""
        for line in answer:
            if self._is_over.is_set():
                return
            field, _, value = line.decode().rstrip("\n").partition(": ")
            if field == "event":
                kind = value
            elif field == "data":
                data: dict[str, Any] = json.loads(value)
                self._state.take(kind, data)
