"""From the engine's threads to an event loop: each step result crosses once, with one wakeup for all its requests.

`StepBridge.submit` is for an event loop; a request's rows are handed to its consumer on that loop, for stateless
requests and for the answers of sessions alike. The client behind it may have its engine on threads or in a process.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

from tokenmill.engine.client import EngineClient
from tokenmill.engine.request import Request
from tokenmill.errors import InvalidRequest
from tokenmill.outputs import FinishReason, OutputDelta, StepResult, joined
from tokenmill.pipeline.output import Consumer, Generation, deliver


class _LoopEnd:
    """The bridge's end on one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.consumers: dict[str, Consumer] = {}
        self._loop = loop
        self._results: deque[StepResult] = deque()
        self._is_scheduled = False
        """Is the loop going to deliver what is there?"""

    def put(self, result: StepResult) -> None:
        """On a thread of the engine."""
        self._results.append(result)
        if not self._is_scheduled:
            self._is_scheduled = True
            with suppress(RuntimeError):  # the loop is closed: nobody reads any more
                self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._is_scheduled = False  # first: what comes from now on is scheduled again
        for _ in range(len(self._results)):  # what comes meanwhile has its own turn: the loop has more to do
            deliver(self._results.popleft(), self.consumers)


class StepBridge:
    """An engine's requests, for any number of event loops."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._ends: dict[asyncio.AbstractEventLoop, _LoopEnd] = {}

    def submit(self, request: Request, consumer: Consumer, core: int | None = None) -> None:
        """Start a request; its consumer is called on the running loop."""
        loop = asyncio.get_running_loop()
        end = self._ends.get(loop)
        if end is None:
            self._ends = {one: its for one, its in self._ends.items() if not one.is_closed()}
            end = self._ends[loop] = _LoopEnd(loop)
        if request.request_id in end.consumers:
            raise InvalidRequest(f"request {request.request_id} is already running")
        end.consumers[request.request_id] = consumer
        try:
            self._client.submit(request, end.put, core)
        except BaseException:
            del end.consumers[request.request_id]
            raise

    def cancel(self, request_id: str, reason: FinishReason = FinishReason.CANCELLED) -> None:
        self._client.cancel(request_id, reason)

    def finish(self, request_id: str, keep_tokens: int) -> None:
        self._client.finish(request_id, keep_tokens)


class EngineStream:
    """Generations that one reader follows together; they start when it reads. For one event loop."""

    def __init__(self, bridge: StepBridge, generations: Sequence[Generation]) -> None:
        self.generations = generations
        self._bridge = bridge
        self._deltas: list[OutputDelta] = []
        """Those that the reader has not taken yet."""
        self._waiter: asyncio.Future[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        """The reader's, once it reads. Kept, as asking for the running one is a system call on Python 3.11."""
        self._num_left = sum(len(generation.choices) for generation in generations)

    async def take(self) -> list[OutputDelta]:
        """What is new, at most one delta for each choice; nothing once all of them have ended."""
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
    """One delta for each choice."""
    by_choice: dict[int, list[OutputDelta]] = {}
    for delta in deltas:
        by_choice.setdefault(delta.index, []).append(delta)
    return [joined(own) for own in by_choice.values()]
