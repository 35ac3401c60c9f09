"""`WaitingQueue`: requests that have no row yet, or lost it; and `Deadlines`, the alarms set for them."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from tokenmill.engine.lifecycle import RequestState
from tokenmill.engine.request import Request
from tokenmill.engine.stats import WaitingView


class WaitingQueue:
    """Waiting and preempted requests. New ones are limited in number and tokens, preempted ones always fit."""

    def __init__(self, max_requests: int, max_tokens: int | None) -> None:
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._requests: dict[int, Request] = {}
        self._lengths: dict[int, int] = {}
        """As they came: a stop string may shorten a preempted one's log while it waits."""
        self.num_tokens = 0

    def why_full(self, request: Request, num_free_rows: int) -> str | None:
        """Why this request can't wait here; None if it can. Those for whom a row is free do not really wait."""
        if len(self._requests) >= self._max_requests + num_free_rows:
            return f"{len(self._requests)} requests are waiting, the limit is {self._max_requests}"
        tokens = self.num_tokens + len(request.tokens)
        if self._max_tokens is not None and self._requests and tokens > self._max_tokens:
            return f"{tokens} prompt tokens would be waiting, the limit is {self._max_tokens}"
        return None

    def add(self, request: Request) -> None:
        self._requests[request.arrival] = request
        self._lengths[request.arrival] = len(request.tokens)
        self.num_tokens += len(request.tokens)

    def remove(self, request: Request) -> None:
        del self._requests[request.arrival]
        self.num_tokens -= self._lengths.pop(request.arrival)

    def views(self) -> tuple[WaitingView, ...]:
        """Who waits, in the order in which they came or lost their row."""
        return tuple(
            WaitingView(
                one.request_id,
                len(one.tokens),
                one.state is RequestState.PREEMPTED,
                one.hints.key,
                one.hints.owner,
            )
            for one in self._requests.values()
        )

    def __contains__(self, request: Request) -> bool:
        return request.arrival in self._requests

    def __iter__(self) -> Iterator[Request]:
        return iter(list(self._requests.values()))

    def __len__(self) -> int:
        return len(self._requests)


class Deadlines:
    """Alarms by time. One whose request has ended is dropped when it rings, or when they make up half of all."""

    def __init__(self) -> None:
        self._alarms: list[tuple[float, int, bool, Request]] = []
        self._prune_at = 64

    def set(self, at: float, request: Request, *, until_started: bool) -> None:
        if len(self._alarms) >= self._prune_at:
            self._alarms = [alarm for alarm in self._alarms if not alarm[3].is_finished]
            heapq.heapify(self._alarms)
            self._prune_at = max(64, 2 * len(self._alarms))
        heapq.heappush(self._alarms, (at, request.arrival, until_started, request))

    def ringing(self, now: float) -> Iterator[tuple[Request, bool]]:
        """The requests whose time is up, each with "does it matter only if it has not started?"."""
        while self._alarms and self._alarms[0][0] <= now:
            _, _, until_started, request = heapq.heappop(self._alarms)
            if not request.is_finished:
                yield request, until_started

    def __len__(self) -> int:
        return len(self._alarms)
