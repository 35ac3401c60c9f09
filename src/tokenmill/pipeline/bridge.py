"""From engine threads to an event loop: each step result crosses once, with one wakeup for all its requests.

`StepBridge.submit` runs on an event loop; a request's rows are passed to its consumer on that loop, for stateless
requests and for answers of sessions alike. The engine may run on threads or in its own process.

Deadlines and cancels take effect here, on the event loop: the consumer gets its end at once, and the engine is told.
An engine inside a long or hung step catches up later; rows of requests that have ended here are discarded.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

from tokenmill.engine.client import EngineClient
from tokenmill.engine.core import check_cancel
from tokenmill.engine.policies import Deadlines
from tokenmill.engine.request import Request
from tokenmill.errors import EngineDead, InvalidRequest
from tokenmill.outputs import FinishReason, OutputDelta, StepResult, joined
from tokenmill.pipeline.output import Consumer, Generation, deliver


class _LoopEnd:
    """The bridge's state for one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, client: EngineClient, queue_timeout_s: float | None) -> None:
        self.consumers: dict[str, Consumer] = {}
        self._loop = loop
        self._client = client
        self._queue_timeout_s = queue_timeout_s
        self._deadlines = Deadlines(lambda request: request.request_id not in self.consumers)
        self._alarm: asyncio.TimerHandle | None = None
        """One timer for the earliest deadline of all requests."""
        self._results: deque[StepResult] = deque()
        self._is_scheduled = False
        """Whether `_deliver` has been scheduled on the loop."""

    def put(self, result: StepResult) -> None:
        """Called on engine threads."""
        self._results.append(result)
        if not self._is_scheduled:
            self._is_scheduled = True
            with suppress(RuntimeError):  # the loop is closed: there are no readers left
                self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._is_scheduled = False  # first, so that results that arrive from now on schedule another call
        for _ in range(len(self._results)):  # later arrivals wait for the next call, so that the loop is not blocked
            deliver(self._results.popleft(), self.consumers)

    # -- endings that do not wait for the engine ----------------------------------------------------------------------

    def watch(self, request: Request | None = None) -> None:
        """Add the deadlines of a request, which count from now, and set the timer for the earliest one."""
        if request is not None:
            self._deadlines.watch(request, self._loop.time(), self._queue_timeout_s)
        at = self._deadlines.next_at
        if at is None or (self._alarm is not None and self._alarm.when() <= at):
            return
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm = self._loop.call_at(at, self._expire)

    def _expire(self) -> None:
        self._alarm = None
        for request, error in self._deadlines.expired(self._loop.time(), self._queue_timeout_s):
            self._end(request.request_id, FinishReason.TIMEOUT, error)
            with suppress(EngineDead):  # the engine has no requests left
                self._client.cancel(request.request_id, FinishReason.TIMEOUT)
        self.watch()

    def end_soon(self, request_id: str, reason: FinishReason, error: str | None = None) -> None:
        """Thread-safe: end a request after the results already delivered, but not inside its own consumer."""
        with suppress(RuntimeError):  # the loop is closed: there are no readers left
            self._loop.call_soon_threadsafe(self._end, request_id, reason, error)

    def _end(self, request_id: str, reason: FinishReason, error: str | None) -> None:
        deliver(StepResult.of_end(request_id, reason, error), self.consumers)


class StepBridge:
    """Connects an engine's requests to any number of event loops."""

    def __init__(self, client: EngineClient, queue_timeout_s: float | None = None) -> None:
        self._client = client
        self._queue_timeout_s = queue_timeout_s
        self._ends: dict[asyncio.AbstractEventLoop, _LoopEnd] = {}

    def submit(self, request: Request, consumer: Consumer, core: int | None = None) -> None:
        """Start a request; its consumer is called on the running loop."""
        loop = asyncio.get_running_loop()
        end = self._ends.get(loop)
        if end is None:
            self._ends = {one: its for one, its in self._ends.items() if not one.is_closed()}
            end = self._ends[loop] = _LoopEnd(loop, self._client, self._queue_timeout_s)
        if request.request_id in end.consumers:
            raise InvalidRequest(f"request {request.request_id} is already running")
        end.consumers[request.request_id] = consumer
        try:
            self._client.submit(request, end.put, core)
        except BaseException:
            del end.consumers[request.request_id]
            raise
        end.watch(request)

    def cancel(self, request_id: str, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """End a request for its consumer, and notify the engine."""
        check_cancel(reason)
        for end in list(self._ends.values()):
            if request_id in end.consumers:
                end.end_soon(request_id, reason)
        self._client.cancel(request_id, reason)

    def end_all(self) -> None:
        """End all requests without waiting for the step in flight: the engine is being closed."""
        for end in list(self._ends.values()):
            for request_id in list(end.consumers):
                end.end_soon(request_id, FinishReason.SHUTDOWN, "the engine was closed")

    def finish(self, request_id: str, keep_tokens: int) -> None:
        self._client.finish(request_id, keep_tokens)


class EngineStream:
    """Generations read together by one reader; started by its first read. For one event loop."""

    def __init__(self, bridge: StepBridge, generations: Sequence[Generation]) -> None:
        self.generations = generations
        self._bridge = bridge
        self._deltas: list[OutputDelta] = []
        """Not yet taken by the reader."""
        self._waiter: asyncio.Future[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        """The reader's loop. Cached, since `get_running_loop` is a system call on Python 3.11."""
        self._num_left = sum(len(generation.choices) for generation in generations)

    async def take(self) -> list[OutputDelta]:
        """New deltas, at most one per choice; empty once all choices have ended."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            for generation in self.generations:
                generation.start(self._bridge, self._put)
        if not self._num_left:
            return []
        while not self._deltas:
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        deltas, self._deltas = self._deltas, []
        if len(deltas) > 1:
            deltas = _merged(deltas)
        for delta in deltas:
            self._num_left -= delta.finish_reason is not None
        return deltas

    def _put(self, delta: OutputDelta) -> None:
        self._deltas.append(delta)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def cancel(self) -> None:
        for generation in self.generations:
            generation.cancel()


def _merged(deltas: Sequence[OutputDelta]) -> list[OutputDelta]:
    """One delta per choice."""
    by_choice: dict[int, list[OutputDelta]] = {}
    for delta in deltas:
        by_choice.setdefault(delta.index, []).append(delta)
    return [joined(own) for own in by_choice.values()]
