"""Who goes first. Small objects with one narrow method each, so that the scheduler's loop has no special cases."""

from __future__ import annotations

from collections.abc import Iterable

from tokenmill.engine.request import NO_ROW, Request
from tokenmill.engine.rows import RunningRows


class FairShare:
    """Tokens served per key. The key that has had least goes first; absence earns no credit."""

    def __init__(self) -> None:
        self._served: dict[str, int] = {}
        self._live: dict[str, int] = {}
        """Key -> requests that have not ended."""

    def enter(self, key: str) -> None:
        """A request of this key arrived."""
        if key not in self._live:
            floor = self._floor()
            self._served[key] = max(self._served.get(key, floor), floor)
            self._live[key] = 0
        self._live[key] += 1

    def leave(self, key: str) -> None:
        """A request of this key ended. A key without requests is remembered only while it is ahead of the others."""
        self._live[key] -= 1
        if self._live[key]:
            return
        del self._live[key]
        floor = self._floor() if self._live else None
        self._served = {
            key: served
            for key, served in self._served.items()
            if key in self._live or (floor is not None and served > floor)
        }

    def charge(self, key: str, num_tokens: int) -> None:
        self._served[key] += num_tokens

    def served(self, key: str) -> int:
        return self._served[key]

    @property
    def num_keys(self) -> int:
        return len(self._live)

    def _floor(self) -> int:
        return min((self._served[key] for key in self._live), default=0)


class Order:
    """Aged first, then priority, then the key that has had least, then arrival. Victims come from the other end."""

    def __init__(self, rows: RunningRows, max_wait_ticks: int) -> None:
        self.fair = FairShare()
        self._rows = rows
        self._max_wait_ticks = max_wait_ticks

    def sort(self, requests: Iterable[Request], tick: int) -> list[Request]:
        """The requests, first ones first."""
        self._charge()

        def rank(request: Request) -> tuple[bool, int, int, int]:
            hints = request.hints
            return (not self.is_aged(request, tick), hints.priority, self.fair.served(hints.key), request.arrival)

        return sorted(requests, key=rank)

    def sort_by_turn(self, requests: Iterable[Request], tick: int) -> list[Request]:
        """Running requests in turn: after age and priority, the one that has waited longest for its next token."""

        def rank(request: Request) -> tuple[bool, int, int, int]:
            progress = int(self._rows.last_progress[request.row])
            return (not self.is_aged(request, tick), request.hints.priority, progress, request.arrival)

        return sorted(requests, key=rank)

    def is_aged(self, request: Request, tick: int) -> bool:
        """Has it made no progress for longer than it should have to?"""
        progress = request.last_progress if request.row == NO_ROW else self._rows.last_progress[request.row]
        return bool(tick - progress > self._max_wait_ticks)

    def leave(self, request: Request, row: int) -> None:
        """The request ended; `row` is the one it had, if any."""
        if row != NO_ROW:
            self.settle(request, row)
        self.fair.leave(request.hints.key)

    def settle(self, request: Request, row: int) -> None:
        """Charge what a row was given to its request's key."""
        self.fair.charge(request.hints.key, int(self._rows.uncharged[row]))
        self._rows.uncharged[row] = 0

    def _charge(self) -> None:
        """Bring the keys up to date; with one key alone there is nothing to compare."""
        if self.fair.num_keys > 1:
            for request in self._rows.running():
                self.settle(request, request.row)
