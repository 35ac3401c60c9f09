"""Who waits, how long, and who goes first: `KeyUsage`, `WaitingQueue`, `Deadlines`, `FairShare`, `Order`.

Small objects with narrow methods, so that the scheduler's loop has no special cases.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from tokenmill.engine.events import WaitingView
from tokenmill.engine.request import NO_ROW, Request, RequestState
from tokenmill.engine.rows import RunningRows

SHARE_ROWS_TICKS = 8
"""Ticks between two looks at how rows are divided between keys, and those that a request waits at least for a row of
another one's."""


class KeyUsage:
    """Rows and queue slots that each key has on all cores of an engine. Everything in it is used under its lock."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.rows: Counter[str] = Counter()
        self.slots: Counter[str] = Counter()
        self.waiting: dict[str, set[Callable[[], None]]] = {}
        """What to call when a key gives a row back: it wakes a core that was refused one."""


class CoreUsage:
    """One core's part of what keys use, so that a key's limits hold for all cores together.

    For the core's thread; `close` is for any.
    """

    def __init__(self, all_cores: KeyUsage, wake: Callable[[], None]) -> None:
        """`wake`, on any thread, makes the core look at its queue again."""
        self._all = all_cores
        self._wake = wake
        self._own = KeyUsage()
        """Under the lock of all cores'."""
        self._is_closed = False

    def num_rows(self, key: str) -> int:
        """Rows of the key on all cores."""
        return self._all.rows[key]

    def num_slots(self, key: str) -> int:
        """Queued requests of the key on all cores."""
        return self._all.slots[key]

    def take_row(self, key: str, most: int | None) -> bool:
        """Another row for the key, unless it has `most` on all cores: then this one is woken when it has fewer."""
        with self._all.lock:
            if self._is_closed or (most is not None and self._all.rows[key] >= most):
                self._all.waiting.setdefault(key, set()).add(self._wake)
                return False
            self._all.rows[key] += 1
            self._own.rows[key] += 1
            return True

    def take_slot(self, key: str, most: int | None = None) -> bool:
        """Another queue slot for the key, unless it has `most` on all cores."""
        with self._all.lock:
            if self._is_closed or (most is not None and self._all.slots[key] >= most):
                return False
            self._all.slots[key] += 1
            self._own.slots[key] += 1
            return True

    def give_row(self, key: str) -> None:
        with self._all.lock:
            if self._is_closed:
                return
            _subtract(Counter({key: 1}), self._own.rows, self._all.rows)
            waiting = self._all.waiting.pop(key, ())
        for wake in waiting:
            wake()

    def give_slot(self, key: str) -> None:
        with self._all.lock:
            if not self._is_closed:
                _subtract(Counter({key: 1}), self._own.slots, self._all.slots)

    def close(self) -> None:
        """The core is gone: nothing counts as used by it any more."""
        with self._all.lock:
            self._is_closed = True
            waiting = {wake for key in self._own.rows for wake in self._all.waiting.pop(key, ())}
            _subtract(self._own.rows, self._all.rows)
            _subtract(self._own.slots, self._all.slots)
            self._own = KeyUsage()
        for wake in waiting:
            wake()


def _subtract(less: Counter[str], *counts: Counter[str]) -> None:
    """Keys with nothing are forgotten: there may be many."""
    for one in counts:
        for key, number in less.items():
            one[key] -= number
            if one[key] <= 0:
                del one[key]


class WaitingQueue:
    """Waiting and preempted requests. New ones are limited in number and tokens, preempted ones always fit."""

    def __init__(self, max_requests: int, max_tokens: int | None, usage: CoreUsage) -> None:
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._usage = usage
        self._requests: dict[int, Request] = {}
        self._lengths: dict[int, int] = {}
        """As they came: a stop string may shorten a preempted one's log while it waits."""
        self.num_tokens = 0

    def take_slot(self, request: Request, num_free_rows: int) -> str | None:
        """Take a slot of the request's key for it; or say why there is none.

        `num_free_rows` are those that the key may take: requests for which a row is free do not really wait.
        """
        most, share = request.hints.quota.max_queued, share_of(request)
        if self._usage.take_slot(share, None if most is None else most + num_free_rows):
            return None
        return f"{self._usage.num_slots(share)} requests of this API key are queued, its limit is {most}"

    def give_slot(self, request: Request) -> None:
        """Give back the slot of a request that is not queued after all."""
        self._usage.give_slot(share_of(request))

    def why_full(self, request: Request, num_free_rows: int) -> str | None:
        """Why this request can't wait here; None if it can. Those for whom a row is free do not really wait.

        Preempted requests take no place from new ones: else a key that yields its rows would fill the queue.
        """
        most = self._max_requests + num_free_rows
        if len(self._requests) >= most and (num_new := len(self._new())) >= most:
            return f"{num_new} requests are queued, the limit is {self._max_requests}"
        tokens = self.num_tokens + len(request.tokens)
        if self._max_tokens is not None and self._requests and tokens > self._max_tokens:
            return f"{tokens} prompt tokens would be queued, the limit is {self._max_tokens}"
        return None

    def crowding(self, request: Request, running: Iterable[Request]) -> Request | None:
        """Who gives way to this request in a full queue: the newest of the key that has most requests, here or running.

        A background request gives way to all others. Otherwise only if that key has at least two more than the
        request's own, so that keys end up with equal shares, and none can fill the queue for the others. One that has
        started keeps its place, which counts as its key's.
        """
        counts = Counter(one.hints.key for one in (*running, *self._requests.values()))
        new = self._new()
        newest = max(new, key=lambda one: (counts[one.hints.key], one.arrival), default=None)
        if not request.hints.is_background and (behind := [one for one in new if one.hints.is_background]):
            newest = behind[-1]
        elif newest is None or counts[newest.hints.key] < counts[request.hints.key] + 2:
            return None
        tokens = self.num_tokens - self._lengths[newest.arrival] + len(request.tokens)
        return newest if self._max_tokens is None or tokens <= self._max_tokens else None

    def _new(self) -> list[Request]:
        """Those that have not started."""
        return [one for one in self._requests.values() if one.state is RequestState.WAITING]

    def add_preempted(self, request: Request) -> None:
        """It has lost its row; a slot of its key's is not asked for."""
        self._usage.take_slot(share_of(request))
        self.add(request)

    def add(self, request: Request) -> None:
        """Queue a request that has its slot."""
        self._requests[request.arrival] = request
        self._lengths[request.arrival] = len(request.tokens)
        self.num_tokens += len(request.tokens)

    def remove(self, request: Request) -> None:
        del self._requests[request.arrival]
        self.num_tokens -= self._lengths.pop(request.arrival)
        self._usage.give_slot(share_of(request))

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

    @property
    def has_background(self) -> bool:
        return any(one.hints.is_background for one in self._requests.values())

    @property
    def num_startable(self) -> int:
        """Those that are not background and could start if there were rows: of each key, as many as it may have."""
        counts: Counter[str] = Counter()
        for one in self._requests.values():
            share, most = share_of(one), one.hints.quota.max_rows
            may_start = most is None or self._usage.num_rows(share) + counts[share] < most
            if may_start and not one.hints.is_background:
                counts[share] += 1
        return counts.total()

    def __contains__(self, request: Request) -> bool:
        return request.arrival in self._requests

    def __iter__(self) -> Iterator[Request]:
        return iter(list(self._requests.values()))

    def __len__(self) -> int:
        return len(self._requests)


class Deadlines:
    """Alarms by time. One whose request has ended is dropped when it rings, or when they make up half of all."""

    def __init__(self, has_ended: Callable[[Request], bool] = lambda request: request.is_finished) -> None:
        self._has_ended = has_ended
        self._alarms: list[tuple[float, int, bool, Request]] = []
        self._numbers = itertools.count()
        self._prune_at = 64

    def watch(self, request: Request, arrived_at: float, queue_timeout_s: float | None) -> None:
        """Set the alarms of a request: its own timeout, and the time it may wait for its start."""
        if request.limits.timeout_s is not None:
            self.set(arrived_at + request.limits.timeout_s, request, until_started=False)
        if queue_timeout_s is not None:
            self.set(arrived_at + queue_timeout_s, request, until_started=True)

    def set(self, at: float, request: Request, *, until_started: bool) -> None:
        if len(self._alarms) >= self._prune_at:
            self._alarms = [alarm for alarm in self._alarms if not self._has_ended(alarm[3])]
            heapq.heapify(self._alarms)
            self._prune_at = max(64, 2 * len(self._alarms))
        heapq.heappush(self._alarms, (at, next(self._numbers), until_started, request))

    @property
    def next_at(self) -> float | None:
        """When the next alarm rings."""
        return self._alarms[0][0] if self._alarms else None

    def expired(self, now: float, queue_timeout_s: float | None) -> Iterator[tuple[Request, str]]:
        """The requests to end with `timeout`, each with the reason."""
        for request, until_started in self.ringing(now):
            if not until_started:
                yield request, f"not done after {request.limits.timeout_s} s"
            elif request.state is RequestState.WAITING:
                yield request, f"not started after {queue_timeout_s} s"

    def ringing(self, now: float) -> Iterator[tuple[Request, bool]]:
        """The requests whose time is up, each with "does it matter only if it has not started?"."""
        while self._alarms and self._alarms[0][0] <= now:
            _, _, until_started, request = heapq.heappop(self._alarms)
            if not self._has_ended(request):
                yield request, until_started

    def __len__(self) -> int:
        return len(self._alarms)


class FairShare:
    """Tokens served per key. The key that has had least goes first; absence earns no credit.

    What a key has had while no other was there is not held against it: others start level with those that are present,
    or with the last one that was.
    """

    def __init__(self) -> None:
        self._served: dict[str, int] = {}
        self._live: dict[str, int] = {}
        """Key -> requests that have not ended."""
        self._last_level = 0
        """What the key had been served that left last."""

    def enter(self, key: str) -> None:
        """A request of this key arrived; all others must have been charged for what they had."""
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
        self._last_level = self._served[key]
        if len(self._served) > 2 * len(self._live) + 16:
            self._forget()

    def _forget(self) -> None:
        """Drop the keys without requests that are not ahead of the others."""
        floor = self._floor()
        self._served = {key: served for key, served in self._served.items() if key in self._live or served > floor}

    def charge(self, key: str, num_tokens: int) -> None:
        self._served[key] += num_tokens

    def served(self, key: str) -> int:
        return self._served[key]

    @property
    def num_keys(self) -> int:
        return len(self._live)

    def _floor(self) -> int:
        return min((self._served[key] for key in self._live), default=self._last_level)


class Order:
    """Aged first, then priority, then the key that has had least, then arrival. Victims come from the other end.

    What ages is a class of requests, those of one key and priority: it is aged when none of them has started for
    `max_wait_ticks`. Aged ones go in the order of their last turn, whatever their priority. So no class starves, and a
    key that sends too much ages no faster than the others.
    """

    def __init__(self, rows: RunningRows, max_wait_ticks: int, usage: CoreUsage) -> None:
        self.fair = FairShare()
        self._rows = rows
        self._usage = usage
        self._max_wait_ticks = max_wait_ticks
        self._live: Counter[tuple[str, int]] = Counter()
        self._last_start: dict[tuple[str, int], int] = {}

    def sort(self, requests: Iterable[Request], tick: int) -> list[Request]:
        """The requests, first ones first."""
        if self.fair.num_keys > 1:
            self._charge()

        def rank(request: Request) -> tuple[bool, int, int, int]:
            last_turn = self._last_turn(request)
            if tick - last_turn > self._max_wait_ticks:
                return (False, last_turn, 0, request.arrival)
            return (True, request.hints.priority, self.fair.served(share_of(request)), request.arrival)

        return sorted(requests, key=rank)

    def _last_turn(self, request: Request) -> int:
        """The tick in which a running request last got tokens, or one of a waiting request's class last started."""
        if request.row != NO_ROW:
            return int(self._rows.last_progress[request.row])
        return max(request.last_progress, self._last_start.get(_class_of(request), 0))

    def enter(self, request: Request) -> None:
        """The request arrived."""
        self._charge()
        self.fair.enter(share_of(request))
        self._live[_class_of(request)] += 1

    def started(self, request: Request, tick: int) -> None:
        """The request got a row: its class had its turn."""
        self._last_start[_class_of(request)] = tick

    def leave(self, request: Request, row: int) -> None:
        """The request ended; `row` is the one it had, if any."""
        if row != NO_ROW:
            self.settle(request, row)
        self.fair.leave(share_of(request))
        cls = _class_of(request)
        self._live[cls] -= 1
        if not self._live[cls]:
            del self._live[cls]
            self._last_start.pop(cls, None)

    def settle(self, request: Request, row: int) -> None:
        """Charge what a row was given to its request's key."""
        self.fair.charge(share_of(request), int(self._rows.uncharged[row]))
        self._rows.uncharged[row] = 0

    # -- rows of each key ---------------------------------------------------------------------------------------------

    def rows_by_key(self) -> Counter[str]:
        """How many rows each key has on this core; those of its background requests are counted apart."""
        return Counter(share_of(request) for request in self._rows.running())

    def num_free_rows(self, request: Request) -> int:
        """How many more rows the request's key may take now."""
        most = request.hints.quota.max_rows
        free = self._rows.num_free
        return free if most is None else max(0, min(free, most - self._usage.num_rows(share_of(request))))

    def gives_way(self, waiting: WaitingQueue, tick: int) -> Request | None:
        """All rows are taken: the running request that yields its row to the first waiting one, if any does.

        It is the newest of the key with most rows: two more than the other, so that keys end up with equal shares. And
        that key has been served more, so that the row is not given straight back. One that waits for
        `SHARE_ROWS_TICKS` only: where requests are short, a row is free before that, and no stream is interrupted.
        """
        held = self.rows_by_key()
        fewest = min((held[share_of(one)] for one in waiting), default=0)
        if self.fair.num_keys < 2 or max(held.values(), default=0) < fewest + 2:
            return None
        first = next((one for one in self.sort(waiting, tick) if self._may_run(one)), None)
        if first is None or tick - first.last_progress < SHARE_ROWS_TICKS:
            return None
        own, served = held[share_of(first)], self.fair.served(share_of(first))
        victims = [
            one
            for one in self._rows.running()
            if one.hints.quota.yields_rows
            and held[share_of(one)] >= own + 2
            and one.hints.priority >= first.hints.priority
            and self.fair.served(share_of(one)) > served
        ]
        return max(victims, key=lambda one: (held[share_of(one)], one.arrival), default=None)

    def _may_run(self, request: Request) -> bool:
        """May its key have another row?"""
        most = request.hints.quota.max_rows
        return most is None or self._usage.num_rows(share_of(request)) < most

    def _charge(self) -> None:
        """Bring the keys up to date."""
        for request in self._rows.running():
            self.settle(request, request.row)


def share_of(request: Request) -> str:
    """Whose share of the tokens a request uses: what a key's background requests use is not held against its others."""
    key = request.hints.key
    return f"{key} background" if request.hints.is_background else key


def _class_of(request: Request) -> tuple[str, int]:
    return request.hints.key, request.hints.priority
