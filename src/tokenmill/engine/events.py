"""What the engine tells about itself: one event a tick, one a change in a request's life.

Metrics, timelines, live views and logs are subscribers; the engine knows none of them. A subscriber is called on the
engine's thread and must return at once; one that raises is dropped.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from tokenmill.engine.plan import StepPlan
from tokenmill.engine.request import Request
from tokenmill.outputs import FinishReason

log = logging.getLogger(__name__)


class Phase(Enum):
    """What a request is doing, as its caller would put it."""

    QUEUED = "queued"
    PREFILL = "prefill"
    DECODE = "decode"
    PREEMPTED = "preempted"
    ENDED = "ended"


@dataclass(frozen=True)
class RequestEvent:
    """A request entered a phase."""

    request_id: str
    at: float
    tick: int
    phase: Phase
    num_tokens: int
    num_cached: int = 0
    finish_reason: FinishReason | None = None


@dataclass(frozen=True)
class TickEvent:
    """A step was collected."""

    plan: StepPlan
    """Batch composition: rows, tokens a row, decode and prefill."""
    at: float
    schedule_s: float
    """Host time to plan and submit it."""
    step_s: float
    """From its submission, or the end of the step before it if that was later, to its result."""
    num_running: int
    num_waiting: int
    free_cells: int
    num_parked: int


Event = RequestEvent | TickEvent
Subscriber = Callable[[Event], None]


class EventBus:
    """Hands events to subscribers, in order."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self._subscribers: list[Subscriber] = []

    def subscribe(self, subscriber: Subscriber) -> Callable[[], None]:
        """Returns the call that ends the subscription."""
        self._subscribers.append(subscriber)

        def unsubscribe() -> None:
            if subscriber in self._subscribers:
                self._subscribers.remove(subscriber)

        return unsubscribe

    @property
    def is_heard(self) -> bool:
        return bool(self._subscribers)

    def emit(self, event: Event) -> None:
        for subscriber in list(self._subscribers):
            try:
                subscriber(event)
            except Exception:
                log.exception("a subscriber failed and is dropped: %r", subscriber)
                self._subscribers.remove(subscriber)

    def phase(self, request: Request, phase: Phase, tick: int) -> None:
        if self._subscribers:
            self.emit(
                RequestEvent(
                    request.request_id,
                    self.clock(),
                    tick,
                    phase,
                    len(request.tokens),
                    request.num_cached,
                    request.finish_reason,
                )
            )
