"""What `tokenmill top` knows of a server: the same views as the server's own, fed by its events."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tokenmill.engine.events import CoreSnapshot
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
