"""The live view of an engine core: its snapshots and events as JSON, and back, and the connections that follow it.

`CoreWatch` is the server's one subscriber on a core: it keeps a `CoreView`, figures and timelines, and passes events to
each `Reader`, a connection with bounded memory. `LiveCore` is the client's end: the same `CoreView`, fed from the JSON.
Nothing here needs the extra `server`, so clients don't either.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from tokenmill.engine.events import (
    CellsEvent,
    CoreSnapshot,
    Event,
    FailedStepEvent,
    ParkedChange,
    ParkedEvent,
    ParkedTokens,
    ParkedView,
    Phase,
    ProposalEvent,
    RequestEvent,
    SlotView,
    StartEvent,
    TickEvent,
    VerifiedEvent,
    WaitingView,
)
from tokenmill.engine.request import NO_ROW
from tokenmill.engine.timeline import Timeline, Timelines
from tokenmill.engine.view import CoreView
from tokenmill.outputs import FinishReason
from tokenmill.server.telemetry.figures import CoreFigures, Rates, RateView

Json = dict[str, Any]
ShowName = Callable[[str | None, str], str | None]
"""A name and the key it belongs to, as one viewer may see it."""
DIGITS = 8


class Names:
    """Which names a viewer may see: those of its own key as they are, others as a short hash.

    The hash is salted per process: it tells two requests apart, and nothing else.
    """

    def __init__(self) -> None:
        self._salt = secrets.token_bytes(16)

    def shown(self, name: str, key: str, viewer: str) -> str:
        return name if key == viewer else hashlib.sha256(self._salt + name.encode()).hexdigest()[:DIGITS]

    def seen_by(self, viewer: str) -> ShowName:
        return lambda name, key: None if name is None else self.shown(name, key, viewer)


# -- snapshots --------------------------------------------------------------------------------------------------------


def snapshot_json(snapshot: CoreSnapshot, name: ShowName) -> Json:
    """What a core is doing."""
    used = snapshot.num_cells - snapshot.free_cells
    return {
        "tick": snapshot.tick,
        "slots": [_slot(slot, name) for slot in snapshot.slots],
        "waiting": [
            {
                "request": name(one.request_id, one.key),
                "session": name(one.owner, one.key),
                "tokens": one.num_tokens,
                "preempted": one.is_preempted,
            }
            for one in snapshot.waiting
        ],
        "parked": [
            {"seq": one.seq, "session": name(one.owner, one.key), "tokens": one.num_tokens} for one in snapshot.parked
        ],
        "parked_tokens": _parked_tokens(snapshot.parked_tokens),
        "cells": {"all": snapshot.num_cells, "free": snapshot.free_cells, "used": used},
    }


def _slot(slot: SlotView, name: ShowName) -> Json:
    if slot.request_id is None:
        return {"slot": slot.row, "state": slot.state}
    return {
        "slot": slot.row,
        "state": slot.state,
        "request": name(slot.request_id, slot.key),
        "session": name(slot.owner, slot.key),
        "tokens": slot.num_tokens,
        "computed": slot.num_computed,
    }


def snapshot_from(data: Json) -> CoreSnapshot:
    """The snapshot that was told. Whose a name is, is not."""
    return CoreSnapshot(
        tick=data["tick"],
        slots=tuple(
            SlotView(
                one["slot"],
                one["state"],
                one.get("request"),
                one.get("tokens", 0),
                one.get("computed", 0),
                owner=one.get("session"),
            )
            for one in data["slots"]
        ),
        waiting=tuple(
            WaitingView(one["request"], one["tokens"], one["preempted"], owner=one["session"])
            for one in data["waiting"]
        ),
        parked=tuple(ParkedView(one["seq"], one["tokens"], one["session"]) for one in data["parked"]),
        parked_tokens=_parked_tokens_from(data["parked_tokens"]),
        free_cells=data["cells"]["free"],
        num_cells=data["cells"]["all"],
    )


def _parked_tokens(parked: ParkedTokens) -> Json:
    return {"all": parked.total, "plain": parked.plain}


def _parked_tokens_from(data: Json) -> ParkedTokens:
    return ParkedTokens(data["all"], data["plain"])


def rates_json(rates: RateView) -> Json:
    return {
        "ticks": round(rates.ticks, 2),
        "generated_tokens": round(rates.generated_tokens, 2),
        "prefill_tokens": round(rates.prefill_tokens, 2),
        "hit_rate": None if rates.hit_rate is None else round(rates.hit_rate, 4),
    }


# -- events -----------------------------------------------------------------------------------------------------------


def tick_json(event: TickEvent) -> Json:
    """A step: its rows, the tokens of each; the first `decode` of them had one because they decode."""
    plan = event.plan
    if event.is_whole:
        rows, counts, drawn, decode = plan.rows, plan.counts, plan.sampled_rows.tolist(), plan.num_decode
        parts = {"slots": rows.tolist(), "tokens": counts.tolist(), "decode": decode, "drawn": drawn}
    else:
        shares = event.shares
        parts = {
            "slots": [share.row for share in shares],
            "tokens": [share.num_tokens for share in shares],
            "decode": sum(share.is_decode for share in shares),
            "drawn": [share.row for share in shares if share.is_drawn],
        }
    return {
        "tick": plan.tick,
        **parts,
        "lost": plan.num_tokens - sum(parts["tokens"]),
        "step_ms": round(1000 * event.step_s, 3),
        "schedule_ms": round(1000 * event.schedule_s, 3),
        "free": event.free_cells,
    }


def event_json(event: Event, name: ShowName) -> tuple[str, Json]:
    """An event's kind, and what it tells."""
    if isinstance(event, RequestEvent):
        return "request", _request(event, name)
    if isinstance(event, ParkedEvent):
        session = name(event.owner, event.key)
        return "parked", {
            "change": event.change.value,
            "seq": event.seq,
            "session": session,
            "tokens": event.num_tokens,
            "parked_tokens": _parked_tokens(event.parked_tokens),
            "for": name(event.by, event.by_key),
        }
    if isinstance(event, ProposalEvent):
        return "forced", {"slots": list(event.rows), "tokens": list(event.counts)}
    if isinstance(event, VerifiedEvent):
        return "verified", {
            "slots": list(event.rows),
            "proposers": list(event.proposers),
            "proposed": list(event.num_proposed),
            "accepted": list(event.num_agreed),
            "drawn": list(event.num_drawn),
        }
    if isinstance(event, CellsEvent):
        return "cells", {"free": event.free_cells}
    if isinstance(event, FailedStepEvent):
        return "failed_step", {"tick": event.tick, "tokens": event.num_tokens}
    if isinstance(event, StartEvent):
        return "start", {"slots": event.num_rows, "cells": event.num_cells}
    return "tick", tick_json(event)


def _request(event: RequestEvent, name: ShowName) -> Json:
    return {
        "tick": event.tick,
        "phase": event.phase.value,
        "request": name(event.request_id, event.key),
        "session": name(event.owner, event.key),
        "slot": None if event.row == NO_ROW else event.row,
        "prompt": event.num_prompt,
        "cached": event.num_cached,
        "tokens": event.num_tokens,
        "computed": event.num_computed,
        "finish_reason": None if event.finish_reason is None else event.finish_reason.value,
    }


# -- the client's end -------------------------------------------------------------------------------------------------


class LiveCore:
    """A core that is followed from afar: its view and its rates, from a snapshot and the events after it."""

    def __init__(self, snapshot: Json) -> None:
        self.view = CoreView(snapshot_from(snapshot))
        self.rates = Rates()

    def take(self, kind: str, data: Json) -> None:
        """What the connection brought after the snapshot."""
        if kind == "tick":
            self.view.step(data["tick"], data["slots"], data["tokens"], data["drawn"], data["free"])
            num_prefill = sum(data["tokens"][data["decode"] :])  # those before may have proposed tokens, too
            self.rates.note(data["at"], num_ticks=1, num_generated=len(data["drawn"]), num_prefill=num_prefill)
        elif kind == "request":
            if data["phase"] == Phase.PREFILL.value:
                self.rates.note(data["at"], num_prompt=data["prompt"], num_cached=data["cached"])
            self.view(_request_event(data))
        elif kind == "parked":
            change, parked_tokens = ParkedChange(data["change"]), _parked_tokens_from(data["parked_tokens"])
            self.view(ParkedEvent(data["at"], change, data["seq"], data["tokens"], parked_tokens, data["session"]))
        elif kind == "forced":
            self.rates.note(data["at"], num_generated=sum(data["tokens"]))
            self.view(ProposalEvent(data["at"], tuple(data["slots"]), tuple(data["tokens"])))
        elif kind == "verified":
            self.rates.note(data["at"], num_generated=sum(data["drawn"]))
            names = ("proposers", "slots", "proposed", "accepted", "drawn")
            self.view(VerifiedEvent(data["at"], *(tuple(data[name]) for name in names)))
        elif kind == "cells":
            self.view(CellsEvent(data["at"], data["free"]))
        elif kind == "start":
            self.view(StartEvent(data["at"], data["slots"], data["cells"]))


def _request_event(data: Json) -> RequestEvent:
    reason = data["finish_reason"]
    return RequestEvent(
        data["request"],
        data["at"],
        data["tick"],
        Phase(data["phase"]),
        data["tokens"],
        data["cached"],
        None if reason is None else FinishReason(reason),
        data["prompt"],
        data["computed"],
        NO_ROW if data["slot"] is None else data["slot"],
        owner=data["session"],
    )


def by_session(snapshot: CoreSnapshot) -> dict[str | None, int]:
    """Parked tokens of each session, most first; None stands for those that no session has parked."""
    tokens: dict[str | None, int] = {one.owner: one.num_tokens for one in snapshot.parked if one.owner is not None}
    if snapshot.parked_tokens.plain:
        tokens[None] = snapshot.parked_tokens.plain
    return dict(sorted(tokens.items(), key=lambda item: -item[1]))


# -- connections that follow ------------------------------------------------------------------------------------------


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
    """One connection. Core threads put things in, the event loop takes them out.

    Unread events are bounded: a reader that falls behind loses all of them and starts over from fresh snapshots. A slow
    reader costs little, and what it sees is always right.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, pace_s: float = PACE_S, max_unread: int = MAX_UNREAD) -> None:
        self._pace_s = pace_s
        self._max_unread = max_unread
        self._told: deque[Told] = deque()
        self._filled = asyncio.Event()
        self._loop = loop
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
            with suppress(RuntimeError):  # the loop is closed: nobody reads any more
                self._loop.call_soon_threadsafe(self._filled.set)

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


# -- the subscriber on a core -----------------------------------------------------------------------------------------


EndListener = Callable[[str, Timeline], None]
"""Hears of each request that has ended: its model, and where its time went. On a core's thread."""


class CoreWatch:
    """What a server knows of one core.

    The core's thread calls it; the event loop reads it between two events, under a lock that is held for microseconds.
    """

    def __init__(
        self, model: str, core: int, figures: CoreFigures, on_end: EndListener | None, snapshot: CoreSnapshot
    ) -> None:
        self.model = model
        self.core = core
        self.view = CoreView(snapshot)
        self._figures = figures
        self._on_end = on_end
        self._rates = Rates()
        self._timelines = Timelines()
        self._readers: list[Reader] = []
        self._lock = threading.Lock()

    # -- on the core's thread -----------------------------------------------------------------------------------------

    def __call__(self, event: Event) -> None:
        with self._lock:
            if isinstance(event, TickEvent):
                plan = event.plan
                self._figures.note_tick(event)
                self._timelines.note_tick(event)
                self._rates.note(event.at, num_ticks=1, num_generated=event.num_generated, num_prefill=plan.num_prefill)
            elif isinstance(event, RequestEvent):
                timeline = self._timelines.enter(event)
                if event.phase is Phase.QUEUED:
                    timeline.num_running, timeline.num_ahead = self.view.num_running, self.view.num_waiting
                self._figures.note_request(event, timeline)
                if event.phase is Phase.PREFILL and timeline.num_preemptions == 0:
                    self._rates.note(event.at, num_prompt=event.num_prompt, num_cached=event.num_cached)
                elif event.phase is Phase.ENDED and self._on_end is not None:
                    self._on_end(self.model, timeline)
            else:
                self._figures.note_other(event)
                if isinstance(event, ProposalEvent):
                    self._rates.note(event.at, num_generated=sum(event.counts))
                elif isinstance(event, VerifiedEvent):
                    self._rates.note(event.at, num_generated=sum(event.num_drawn))
            self.view(event)
            if self._readers:
                # A step's arrays are not kept for readers: what it tells is a fraction of what it computed.
                what = tick_json(event) if isinstance(event, TickEvent) else event
                told = Told(self.model, self.core, event.at, what)
                for reader in self._readers:
                    reader.put(told)

    # -- on the event loop --------------------------------------------------------------------------------------------

    def join(self, reader: Reader) -> None:
        """Let a reader have a snapshot, and every event after it."""
        with self._lock:
            reader.put(Told(self.model, self.core, time.monotonic(), self.view.snapshot()))
            self._readers.append(reader)

    def leave(self, reader: Reader) -> None:
        with self._lock:
            if reader in self._readers:
                self._readers.remove(reader)

    def snapshot(self) -> tuple[CoreSnapshot, RateView]:
        """What the core is doing, and what it did in the last seconds."""
        with self._lock:
            return self.view.snapshot(), self._rates.now(time.monotonic())

    def prefill_queue_s(self) -> float:
        """How long the prompt tokens that wait for computation will take, by what such tokens took so far."""
        with self._lock:
            each_s = self._figures.prefill_s / max(1, self._figures.num_prefill)
            return each_s * self.view.num_queued_tokens

    def timelines(self, is_wanted: Callable[[Timeline], bool]) -> list[Timeline]:
        """As they are now."""
        with self._lock:
            return [
                replace(one, spans=[*one.spans], neighbours_s={**one.neighbours_s})
                for one in self._timelines.find(is_wanted)
            ]
