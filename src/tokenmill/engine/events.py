"""What the engine tells about itself: snapshots, and events of steps, of requests and of parked KV.

Metrics, timelines, live views and logs are subscribers; the engine knows none of them. A subscriber is called on the
engine's thread and must return at once; one that raises is dropped. Nothing is made that nobody hears. Together the
events are all that happens: `view.py` keeps a copy of a core's state with nothing else.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Literal

from tokenmill.contract import KVStats
from tokenmill.engine.plan import StepShape
from tokenmill.engine.request import NO_ROW, Request
from tokenmill.outputs import CacheVerdict, FinishReason

log = logging.getLogger(__name__)

SlotState = Literal["idle", "prefilling", "generating"]

# -- snapshots --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CoreStats:
    tick: int
    num_running: int
    num_waiting: int
    num_waiting_tokens: int
    num_parked: int
    num_parked_tokens: int
    """Those that several parked sequences share count once."""
    num_evicted: int
    """Parked sequences given up to make room, since the start."""
    num_failed_steps: int
    """Steps that were undone and whose requests were run alone, since the start."""
    kv: KVStats


@dataclass(frozen=True)
class SlotView:
    """One row: idle, or a request that is prefilling or generating."""

    row: int
    state: SlotState
    request_id: str | None = None
    num_tokens: int = 0
    num_computed: int = 0
    """Of those, in steps that have been collected."""
    key: str = ""
    owner: str | None = None


@dataclass(frozen=True)
class WaitingView:
    """A request without a row: a new one, or one that lost its own."""

    request_id: str
    num_tokens: int
    is_preempted: bool
    key: str = ""
    owner: str | None = None


@dataclass(frozen=True)
class ParkedView:
    """Parked KV: kept while no request runs on it."""

    seq: int
    num_tokens: int
    owner: str | None
    key: str = ""


@dataclass(frozen=True)
class ParkedTokens:
    """Tokens of all parked KV; those that several sequences share count once."""

    total: int = 0
    plain: int = 0
    """Of these, the ones that no session has parked."""


@dataclass(frozen=True)
class CoreSnapshot:
    """All that a core's events tell of, at one moment between two of its steps."""

    tick: int
    """Of the step that was collected last."""
    slots: tuple[SlotView, ...]
    waiting: tuple[WaitingView, ...]
    """In the order in which they came or lost their row."""
    parked: tuple[ParkedView, ...]
    """By sequence."""
    parked_tokens: ParkedTokens
    free_cells: int
    num_cells: int


# -- events -----------------------------------------------------------------------------------------------------------


class Phase(Enum):
    """What a request is doing, as its caller would put it."""

    QUEUED = "queued"
    PREFILL = "prefill"
    DECODE = "decode"
    PREEMPTED = "preempted"
    ENDED = "ended"


class ParkedChange(Enum):
    """What became of parked KV."""

    PARKED = "parked"
    SHORTENED = "shortened"
    """Its end was given up to make room."""
    TAKEN = "taken"
    """A request goes on with it."""
    RELEASED = "released"
    """Its session has ended."""
    REPLACED = "replaced"
    """Newer KV of its session or its prompt, or longer KV that begins with it, took its place."""
    EVICTED = "evicted"
    """It was given up to make room, or because it no longer held what it said."""


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
    num_prompt: int = 0
    num_computed: int = 0
    """In prefill: tokens whose KV was there when it got its row. Preempted or ended: how far it had come in it."""
    row: int = NO_ROW
    """The one that it has from now on."""
    key: str = ""
    owner: str | None = None
    """Its session."""
    verdict: CacheVerdict | None = None
    """Once it has started: why so much of its prompt is computed."""
    num_proposed: int = 0
    """Tokens that speculation has proposed for it and a step has verified..."""
    num_agreed: int = 0
    """...and those of them that were drawn as proposed."""


@dataclass(frozen=True)
class ProposalEvent:
    """Requests in these rows have got tokens that were not drawn: their grammars leave no choice about them."""

    at: float
    rows: tuple[int, ...]
    counts: tuple[int, ...]


@dataclass(frozen=True)
class VerifiedEvent:
    """Proposed tokens in these rows were verified; the rows have got the tokens drawn behind those that agreed."""

    at: float
    proposers: tuple[str, ...]
    """Of each row's..."""
    rows: tuple[int, ...]
    num_proposed: tuple[int, ...]
    num_agreed: tuple[int, ...]
    """...first proposed tokens that were drawn as proposed. The others are computed no more."""
    num_drawn: tuple[int, ...]
    """Tokens beyond the one that a step gives in any case."""


@dataclass(frozen=True)
class Share:
    """What one request had of a step."""

    row: int
    request_id: str
    num_tokens: int
    is_decode: bool
    is_drawn: bool
    """It got a token."""


@dataclass(frozen=True)
class TickEvent:
    """A step was collected. What its tokens mean for their requests is told after it."""

    plan: StepShape
    """Batch composition: rows, tokens a row, decode and prefill."""
    requests: tuple[str | None, ...]
    """Whose each of the plan's rows is; None where the request has left it since the step was submitted."""
    at: float
    schedule_s: float
    """Host time to plan it."""
    step_s: float
    """From its handing over to the backend, or the end of the step before it if that was later, to its result."""
    num_running: int
    num_waiting: int
    free_cells: int
    num_parked: int
    prefill_s: float = 0.0
    """What of `step_s` its prefill tokens took: without them, its decodes alone would have been done sooner."""
    mask_s: float = 0.0
    """Host time to compute the masks of its constrained draws, while its forward pass ran."""

    @cached_property
    def is_whole(self) -> bool:
        """Is every request of it still there?"""
        return None not in self.requests

    @cached_property
    def num_generated(self) -> int:
        """Tokens that were drawn for requests that are still there."""
        if self.is_whole:
            return len(self.plan.sampled_rows)
        return sum(share.is_drawn for share in self.shares)

    @cached_property
    def shares(self) -> tuple[Share, ...]:
        """What each request had of it that is still there."""
        drawn = frozenset(self.plan.sampled_rows.tolist())
        rows = zip(self.plan.rows.tolist(), self.requests, self.plan.counts.tolist(), strict=True)
        return tuple(
            Share(row, name, count, place < self.plan.num_decode, row in drawn)
            for place, (row, name, count) in enumerate(rows)
            if name is not None
        )


@dataclass(frozen=True)
class ParkedEvent:
    """Parked KV has changed."""

    at: float
    change: ParkedChange
    seq: int
    num_tokens: int
    """What it holds; once it is gone, what it held."""
    parked_tokens: ParkedTokens
    """Of the whole core, after the change."""
    owner: str | None
    """The session it is kept for."""
    key: str = ""
    by: str | None = None
    """The request that room was made for, and..."""
    by_key: str = ""
    """...whose that is."""


@dataclass(frozen=True)
class CellsEvent:
    """The number of free cells is another than was last told."""

    at: float
    free_cells: int


@dataclass(frozen=True)
class FailedStepEvent:
    """A step failed and was undone; its requests are run alone."""

    at: float
    tick: int
    num_tokens: int


@dataclass(frozen=True)
class StartEvent:
    """A new core has taken the place of one that died. All of it is empty."""

    at: float
    num_rows: int
    num_cells: int


Event = (
    RequestEvent | TickEvent | ProposalEvent | VerifiedEvent | ParkedEvent | CellsEvent | FailedStepEvent | StartEvent
)
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
                with suppress(ValueError):  # another thread has closed the bus, or ended the subscription
                    self._subscribers.remove(subscriber)

    def close(self) -> None:
        """End all subscriptions."""
        self._subscribers = []

    def phase(
        self, request: Request, phase: Phase, tick: int, num_computed: int = 0, reason: FinishReason | None = None
    ) -> None:
        """A request entered a phase; `reason` is given where it ends without its core's doing."""
        if self._subscribers:
            self.emit(
                RequestEvent(
                    request.request_id,
                    self.clock(),
                    tick,
                    phase,
                    len(request.tokens),
                    request.num_cached,
                    reason or request.finish_reason,
                    request.num_prompt,
                    num_computed,
                    request.row,
                    request.hints.key,
                    request.hints.owner,
                    request.verdict,
                    request.num_proposed,
                    request.num_agreed,
                )
            )
