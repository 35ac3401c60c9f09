"""`TextWorkers`: the few threads on which long texts are parsed, rendered and tokenized, off an event loop.

Tokenization releases the interpreter lock, but it takes a core; the rest of the work does hold the lock. So there are
few threads, and a bound on the bytes that wait for them. Short texts don't queue behind long ones: one thread is theirs
alone, and the next job is chosen by size as well as by arrival.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tokenmill.errors import ConfigError, EngineDead, Overloaded

T = TypeVar("T")
KIB, MIB = 1 << 10, 1 << 20
INLINE_BYTES = 4 * KIB
"""Work on shorter texts takes a millisecond or two: it is done right away, on the event loop."""
SHORT_BYTES = 64 * KIB
"""Longer texts leave a thread to shorter ones."""
REST = 1.0
"""After a long text, none is begun in its place for as long as it took. So a flood of them takes half of the time, of a
core and of the interpreter lock, and leaves the other half to requests that run."""
ASSUMED_BYTES_PER_S = MIB
"""A job is due when it would be done at this rate, and the earliest goes first: a long one waits, but not forever."""


@dataclass(order=True)
class _Job:
    due: float
    number: int
    num_bytes: int = field(compare=False)
    work: Callable[[], Any] = field(compare=False)
    done: asyncio.Future[Any] = field(compare=False)
    has_begun: bool = field(default=False, compare=False)
    began: float = field(default=0.0, compare=False)
    """When a thread took it, by the loop's clock."""

    @property
    def is_long(self) -> bool:
        return self.num_bytes > SHORT_BYTES


class TextWorkers:
    """For the coroutines of one event loop."""

    inline_bytes = INLINE_BYTES
    """Work on fewer bytes is done right away: it is not worth another thread."""

    def __init__(self, num_threads: int = 2, max_bytes: int = 64 * MIB) -> None:
        """`max_bytes`: of all long texts that are worked on or wait."""
        if num_threads < 2:
            raise ConfigError(
                f"tokenizer threads must be at least 2 (one is reserved for short texts), not {num_threads}"
            )
        self._num_threads = num_threads
        self._max_bytes = max_bytes
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="tokenmill-text")
        self._numbers = itertools.count()
        self._short: list[_Job] = []
        self._long: list[_Job] = []
        self._num_running = 0
        self._num_long = 0
        """Long jobs that run, or whose rest is not over."""
        self._long_bytes = 0
        self._is_closed = False

    async def run(self, num_bytes: int, work: Callable[[], T]) -> T:
        """Do some work on a text of this size; it must be safe on any thread. `Overloaded` if too much waits already.

        A job that is cancelled leaves the queue. Once it has begun it goes on to its end, and its result is dropped.
        """
        if num_bytes < self.inline_bytes:
            return work()
        if self._is_closed:
            raise EngineDead("the tokenizer threads were closed")
        loop = asyncio.get_running_loop()
        due = loop.time() + num_bytes / ASSUMED_BYTES_PER_S
        job = _Job(due, next(self._numbers), num_bytes, work, loop.create_future())
        if job.is_long:
            if self._long_bytes and self._long_bytes + num_bytes > self._max_bytes:
                raise Overloaded(
                    f"{self._long_bytes} bytes of long prompts are queued for tokenization; try again later"
                )
            self._long_bytes += num_bytes
        heapq.heappush(self._queue_of(job), job)
        self._begin_jobs()
        try:
            return await job.done  # type: ignore[no-any-return]
        except asyncio.CancelledError:
            self._forget(job)
            raise

    def close(self) -> None:
        """Jobs that wait fail with `EngineDead`; those that run go on to their end."""
        self._is_closed = True
        for job in [*self._short, *self._long]:
            if not job.done.done():
                job.done.set_exception(EngineDead("the tokenizer threads were closed"))
        self._short, self._long = [], []
        self._threads.shutdown(wait=False)

    def _queue_of(self, job: _Job) -> list[_Job]:
        return self._long if job.is_long else self._short

    def _begin_jobs(self) -> None:
        while self._num_running < self._num_threads and (job := self._next_job()) is not None:
            job.has_begun = True
            job.began = job.done.get_loop().time()
            self._num_running += 1
            self._num_long += job.is_long
            self._threads.submit(job.work).add_done_callback(self._when_done(job))

    def _next_job(self) -> _Job | None:
        has_room = self._num_long < self._num_threads - 1
        heads = [*self._short[:1], *(self._long[:1] if has_room else [])]
        return heapq.heappop(self._queue_of(min(heads))) if heads else None

    def _when_done(self, job: _Job) -> Callable[[Future[Any]], None]:
        loop = job.done.get_loop()

        def tell(future: Future[Any]) -> None:  # on the worker's thread
            with suppress(RuntimeError):  # the loop is closed: nobody waits
                loop.call_soon_threadsafe(self._finish, job, future)

        return tell

    def _finish(self, job: _Job, future: Future[Any]) -> None:
        self._num_running -= 1
        if job.is_long:
            self._long_bytes -= job.num_bytes
            loop = job.done.get_loop()
            loop.call_later(REST * (loop.time() - job.began), self._end_rest)
        if not job.done.done():
            error = future.exception()
            if error is None:
                job.done.set_result(future.result())
            else:
                job.done.set_exception(error)
        self._begin_jobs()

    def _end_rest(self) -> None:
        self._num_long -= 1
        self._begin_jobs()

    def _forget(self, job: _Job) -> None:
        queue = self._queue_of(job)
        if not job.has_begun and job in queue:
            queue.remove(job)
            heapq.heapify(queue)
            self._long_bytes -= job.num_bytes if job.is_long else 0
