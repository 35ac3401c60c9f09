"""`EngineClient`: one interface for an engine on the caller's thread and on threads of its own."""

from __future__ import annotations

import queue
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from types import FrameType
from typing import Protocol, TypeVar

from tokenmill.config import EngineConfig
from tokenmill.contract import BackendLimits, IntArray, ModelHandle
from tokenmill.engine.core import DraftModel, EngineCore
from tokenmill.engine.events import CoreSnapshot, CoreStats
from tokenmill.engine.pool import EnginePool, MakeSubscriber, Sink, Sinks
from tokenmill.engine.request import Hints, Request
from tokenmill.errors import InvalidRequest
from tokenmill.outputs import FinishReason, StepResult

T = TypeVar("T")

INTERRUPT_S = 0.1
"""How long a waiting caller may take to notice Ctrl-C."""


class RequestClient(Protocol):
    """Operations on requests. Step results, including each request's one ending, go to its sink."""

    def submit(self, request: Request, sink: Sink, core: int | None = None) -> None:
        """Start a request, on the least loaded core by default; `InvalidRequest` if it can never run."""
        ...

    def cancel(self, request_id: str, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """End a request; its sink receives the ending."""
        ...

    def finish(self, request_id: str, keep_tokens: int) -> None:
        """A stop string matched: end the request, keeping this many of its generated tokens."""
        ...


class EngineClient(RequestClient, Protocol):
    """The engine interface that entry points use."""

    @property
    def max_model_len(self) -> int: ...

    @property
    def num_cores(self) -> int: ...

    @property
    def cores_alive(self) -> list[int]:
        """The cores that accept requests."""
        ...

    @property
    def seconds_silent(self) -> float:
        """How long all accepting cores have been inside one step; 0 if one is idle. Grows if all of them hang."""
        ...

    @property
    def is_hung(self) -> bool:
        """Whether a core was abandoned that cannot be replaced here. Its step may still use the model: keep it open."""
        ...

    @property
    def is_lost(self) -> bool:
        """Whether all cores are gone for good: hung, or given up after too many failures."""
        ...

    def release(self, owner: str) -> None:
        """A session has ended: free the KV parked for it."""
        ...

    def replay_s(self, core: int, num_tokens: int) -> Future[float | None]:
        """Predicted seconds to compute the KV of so many tokens; None before enough prompts were seen."""
        ...

    def export_kv(self, core: int, owner: str, *, at_once: bool = False) -> Future[tuple[IntArray, bytes] | None]:
        """Tokens and KV bytes parked for a session; unless `at_once`, exported when the core is idle."""
        ...

    def import_kv(self, core: int, tokens: IntArray, state: bytes, hints: Hints) -> Future[bool]:
        """Park exported bytes as the KV of these tokens; False if they do not fit."""
        ...

    def stats(self) -> list[CoreStats | None]: ...

    def snapshots(self) -> list[CoreSnapshot | None]:
        """What each core is doing now; None for a core that is gone."""
        ...

    def subscribe(self, core: int, make: MakeSubscriber) -> Callable[[], None]:
        """Subscribe to a core's events, on the client's thread, from a snapshot on; returns the call to unsubscribe."""
        ...

    def close(self, timeout_s: float | None = None) -> bool:
        """Stop; requests that were not done end with `shutdown`. False if a step has not returned in time."""
        ...


def done(result: T) -> Future[T]:
    """A completed future."""
    future: Future[T] = Future()
    future.set_result(result)
    return future


class InlineClient:
    """An engine on the caller's thread: it advances only inside `run`."""

    def __init__(
        self, model: ModelHandle, config: EngineConfig, limits: BackendLimits, draft: DraftModel | None = None
    ) -> None:
        self.core = EngineCore(model.new_backend(limits), model.info, config, draft=draft)
        self._sinks = Sinks()

    @property
    def max_model_len(self) -> int:
        return self.core.max_model_len

    @property
    def num_cores(self) -> int:
        return 1

    @property
    def cores_alive(self) -> list[int]:
        return [] if self.core.closed or self.core.failure is not None else [0]

    @property
    def seconds_silent(self) -> float:
        return 0.0  # it is the caller's own thread

    @property
    def is_hung(self) -> bool:
        return False

    @property
    def is_lost(self) -> bool:
        return self.core.failure is not None

    def release(self, owner: str) -> None:
        with deferred_interrupts():
            self.core.release(owner)

    def replay_s(self, core: int, num_tokens: int) -> Future[float | None]:  # noqa: ARG002
        return done(self.core.replay_s(num_tokens))

    def export_kv(
        self,
        core: int,  # noqa: ARG002
        owner: str,
        *,
        at_once: bool = False,  # noqa: ARG002
    ) -> Future[tuple[IntArray, bytes] | None]:
        with deferred_interrupts():
            return done(self.core.export_kv(owner))

    def import_kv(self, core: int, tokens: IntArray, state: bytes, hints: Hints) -> Future[bool]:  # noqa: ARG002
        with deferred_interrupts():
            return done(self.core.import_kv(tokens, state, hints))

    def submit(self, request: Request, sink: Sink, core: int | None = None) -> None:  # noqa: ARG002 (there is one)
        with deferred_interrupts():
            self.core.add(request)
            self._sinks.add(request.request_id, sink)

    def cancel(self, request_id: str, reason: FinishReason = FinishReason.CANCELLED) -> None:
        with deferred_interrupts():
            self.core.cancel(request_id, reason)

    def finish(self, request_id: str, keep_tokens: int) -> None:
        self.core.finish(request_id, keep_tokens)

    def stats(self) -> list[CoreStats | None]:
        return [self.core.stats()]

    def snapshots(self) -> list[CoreSnapshot | None]:
        return [self.core.snapshot()]

    def subscribe(self, core: int, make: MakeSubscriber) -> Callable[[], None]:  # noqa: ARG002 (there is one)
        with deferred_interrupts():
            return self.core.events.subscribe(make(self.core.snapshot()))

    def is_open(self, request_id: str) -> bool:
        """Whether the request's ending has not been delivered yet."""
        return request_id in self._sinks

    def run(self, is_done: Callable[[], bool]) -> None:
        """Step until `is_done` or idle. Ctrl-C takes effect between two steps."""
        with deferred_interrupts() as interrupts:
            while not interrupts.is_pending and not is_done() and self.core.has_work:
                self._dispatch(self.core.step())

    def close(self, timeout_s: float | None = None) -> bool:  # noqa: ARG002 (no step is running)
        with deferred_interrupts():
            self._dispatch(self.core.close())
        return True

    def _dispatch(self, result: StepResult) -> None:
        for sink, part in self._sinks.route(result):
            sink(part)


class QueuedClient:
    """An engine that runs elsewhere, with results delivered on the caller's thread while it calls `run`."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._sinks = Sinks()
        self._results: queue.SimpleQueue[StepResult] = queue.SimpleQueue()

    @property
    def max_model_len(self) -> int:
        return self._client.max_model_len

    @property
    def is_hung(self) -> bool:
        return self._client.is_hung

    def submit(self, request: Request, sink: Sink, core: int | None = None) -> None:
        with deferred_interrupts():
            self._client.submit(request, self._results.put, core)
            self._sinks.add(request.request_id, sink)

    def cancel(self, request_id: str, reason: FinishReason = FinishReason.CANCELLED) -> None:
        self._client.cancel(request_id, reason)

    def finish(self, request_id: str, keep_tokens: int) -> None:
        self._client.finish(request_id, keep_tokens)

    def is_open(self, request_id: str) -> bool:
        """Whether the request's ending has not been delivered yet."""
        return request_id in self._sinks

    def run(self, is_done: Callable[[], bool]) -> None:
        """Deliver results until `is_done` or idle. Ctrl-C takes effect between two of them."""
        with deferred_interrupts() as interrupts:
            while not interrupts.is_pending and not is_done() and len(self._sinks):
                with suppress(queue.Empty):
                    for sink, part in self._sinks.route(self._results.get(timeout=INTERRUPT_S)):
                        sink(part)

    def close(self) -> None:
        self._client.close()
        with deferred_interrupts():
            while not self._results.empty():
                for sink, part in self._sinks.route(self._results.get()):
                    sink(part)


class ThreadClient:
    """An engine on threads of its own, one per core. Sinks are called there and must not block."""

    def __init__(
        self,
        model: ModelHandle,
        config: EngineConfig,
        limits: BackendLimits,
        draft: DraftModel | None = None,
        *,
        num_cores: int = 1,
    ) -> None:
        self._core_of: dict[str, int] = {}
        """The core of each request. Read on any thread; the core's own thread removes entries."""
        self.pool = EnginePool(model, config, limits, num_cores=num_cores, draft=draft, on_end=self._forget)

    @property
    def max_model_len(self) -> int:
        return self.pool.cores[0].core.max_model_len

    @property
    def num_cores(self) -> int:
        return len(self.pool.cores)

    @property
    def cores_alive(self) -> list[int]:
        return [i for i, core in enumerate(self.pool.cores) if core.is_alive]

    @property
    def seconds_silent(self) -> float:
        return min((core.seconds_since_heartbeat() for core in self.pool.cores if core.is_alive), default=0.0)

    @property
    def is_hung(self) -> bool:
        return any(core.is_hung for core in self.pool.cores)

    @property
    def is_lost(self) -> bool:
        return not self.pool.is_closed and not self.cores_alive

    def release(self, owner: str) -> None:
        self.pool.release(owner)

    def replay_s(self, core: int, num_tokens: int) -> Future[float | None]:
        return self.pool.replay_s(core, num_tokens)

    def export_kv(self, core: int, owner: str, *, at_once: bool = False) -> Future[tuple[IntArray, bytes] | None]:
        return self.pool.export_kv(core, owner, at_once=at_once)

    def import_kv(self, core: int, tokens: IntArray, state: bytes, hints: Hints) -> Future[bool]:
        return self.pool.import_kv(core, tokens, state, hints)

    def submit(self, request: Request, sink: Sink, core: int | None = None) -> None:
        if request.request_id in self._core_of:
            raise InvalidRequest(f"request {request.request_id} is already running")
        try:
            self.pool.submit(request, sink, core, partial(self._core_of.__setitem__, request.request_id))
        except BaseException:
            self._forget(request.request_id)
            raise

    def cancel(self, request_id: str, reason: FinishReason = FinishReason.CANCELLED) -> None:
        core = self._core_of.get(request_id)
        if core is not None:
            self.pool.cancel(core, request_id, reason)

    def finish(self, request_id: str, keep_tokens: int) -> None:
        core = self._core_of.get(request_id)
        if core is not None:
            self.pool.finish(core, request_id, keep_tokens)

    def _forget(self, request_id: str) -> None:
        self._core_of.pop(request_id, None)

    def stats(self) -> list[CoreStats | None]:
        return self.pool.stats()

    def snapshots(self) -> list[CoreSnapshot | None]:
        return self.pool.snapshots()

    def subscribe(self, core: int, make: MakeSubscriber) -> Callable[[], None]:
        return self.pool.follow(core, make)

    def close(self, timeout_s: float | None = None) -> bool:
        return self.pool.close(timeout_s)


# -- Ctrl-C between steps, never inside one: an interrupted step would leave inconsistent bookkeeping -----------------


class Interrupts:
    """Interrupts received while they are deferred."""

    def __init__(self) -> None:
        self.is_pending = False

    def note(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 (a signal handler's signature)
        self.is_pending = True


@contextmanager
def deferred_interrupts() -> Iterator[Interrupts]:
    """Defers Ctrl-C until the end of the block. The caller polls `is_pending` where it may stop.

    Only where Ctrl-C would raise: on the main thread, with Python's own handler.
    """
    interrupts = Interrupts()
    raises = threading.current_thread() is threading.main_thread()
    if not raises or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield interrupts
        return
    signal.signal(signal.SIGINT, interrupts.note)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if interrupts.is_pending:
        raise KeyboardInterrupt
