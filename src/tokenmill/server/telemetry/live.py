"""`Reader`: a connection that follows the engines.

What it has not read yet is bounded: too much of it is thrown away, and it begins again from fresh snapshots. So a slow
reader costs little, and what it sees is always right.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import Any

from tokenmill.engine.events import Event
from tokenmill.engine.stats import CoreSnapshot
from tokenmill.entrypoints.async_llm import Bell

MAX_UNREAD = 1024
"""Events that may wait for a reader."""
PACE_S, SLOWEST_S = 0.05, 5.0
"""Between two looks of a reader: an engine is not to wake the loop at every step for somebody who only watches."""


@dataclass(frozen=True, slots=True)
class Told:
    """Something that a core of a model told."""

    model: str
    core: int
    at: float
    what: Event | CoreSnapshot | dict[str, Any] | None
    """A step as it is shown; None: the model is served no more."""


class Reader:
    """One connection. Cores' threads put things in, the event loop takes them out."""

    def __init__(self, bell: Bell, pace_s: float = PACE_S, max_unread: int = MAX_UNREAD) -> None:
        self._bell = bell
        self._pace_s = pace_s
        self._max_unread = max_unread
        self._told: deque[Told] = deque()
        self._filled = asyncio.Event()
        self._is_rung = False
        self._took_at = 0.0
        self.is_behind = False
        """Something was not put in: what is there is of no use any more."""
        self.ending: str | None = None
        """Why it is over, if it is."""

    def put(self, told: Told) -> None:
        """On a core's thread, or the loop's."""
        if self.is_behind:
            return
        if len(self._told) >= self._max_unread and not isinstance(told.what, CoreSnapshot):
            self.is_behind = True
        else:
            self._told.append(told)
        if not self._is_rung:
            self._is_rung = True
            self._bell.ring(self._filled)

    def end(self, why: str) -> None:
        """On the loop: nothing more will come."""
        self.ending = why
        self._filled.set()

    def clear(self) -> None:
        """On the loop, while nobody puts anything in: begin again."""
        self._told.clear()
        self.is_behind = False

    async def take(self) -> list[Told]:
        """On the loop: all there is; nothing only if it is over, or has fallen behind."""
        loop = asyncio.get_running_loop()
        if self.ending is None:
            await asyncio.sleep(self._took_at + self._pace_s - loop.time())
        while self._is_waiting:
            self._filled.clear()
            self._is_rung = False  # before looking again: what comes now rings
            if self._is_waiting:
                await self._filled.wait()
        self._took_at = loop.time()
        return [] if self.is_behind else [self._told.popleft() for _ in range(len(self._told))]

    @property
    def _is_waiting(self) -> bool:
        """Is there nothing to take?"""
        return not self._told and not self.is_behind and self.ending is None
