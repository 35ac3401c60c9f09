"""Snapshots and events of an engine core as JSON, and back. Compact: a step names rows, not requests.

`LiveCore` reads what the others write: it is the same `CoreView`, at the other end of a connection. Nothing here needs
a server's packages, so that whoever follows one does not need them either.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tokenmill.engine.events import (
    CellsEvent,
    Event,
    FailedStepEvent,
    ParkedChange,
    ParkedEvent,
    Phase,
    RequestEvent,
    StartEvent,
    TickEvent,
)
from tokenmill.engine.request import NO_ROW
from tokenmill.engine.stats import CoreSnapshot, ParkedTokens, ParkedView, SlotView, WaitingView
from tokenmill.engine.view import CoreView
from tokenmill.outputs import FinishReason
from tokenmill.server.telemetry.rates import Rates, RateView

Json = dict[str, Any]
ShowName = Callable[[str | None, str], str | None]
"""A name that belongs to a key, as it may be shown."""


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


# -- at the other end -------------------------------------------------------------------------------------------------


class LiveCore:
    """A core that is followed from afar: its view and its rates, from a snapshot and the events after it."""

    def __init__(self, snapshot: Json) -> None:
        self.view = CoreView(snapshot_from(snapshot))
        self.rates = Rates()

    def take(self, kind: str, data: Json) -> None:
        """What the connection brought after the snapshot."""
        if kind == "tick":
            self.view.step(data["tick"], data["slots"], data["tokens"], data["drawn"], data["free"])
            self.rates.note_tick(data["at"], len(data["drawn"]), sum(data["tokens"]) - data["decode"])
        elif kind == "request":
            if data["phase"] == Phase.PREFILL.value:
                self.rates.note_start(data["at"], data["prompt"], data["cached"])
            self.view(_request_event(data))
        elif kind == "parked":
            change, parked_tokens = ParkedChange(data["change"]), _parked_tokens_from(data["parked_tokens"])
            self.view(ParkedEvent(data["at"], change, data["seq"], data["tokens"], parked_tokens, data["session"]))
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
