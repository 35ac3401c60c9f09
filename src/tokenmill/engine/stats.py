"""Snapshots of an engine core: numbers, and what each row, each waiting request and all parked KV are doing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from tokenmill.contract import KVStats
from tokenmill.engine.plan import StepPlan
from tokenmill.engine.rows import RunningRows

SlotState = Literal["idle", "prefilling", "generating"]


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
    """KV that is kept while nobody runs it."""

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


def slot_views(rows: RunningRows, in_flight: Iterable[StepPlan] = ()) -> list[SlotView]:
    views = []
    computed = rows.num_collected(in_flight)
    for row, request in enumerate(rows.requests):
        if request is None:
            views.append(SlotView(row, "idle"))
            continue
        state: SlotState = "prefilling" if rows.awaits_token[row] else "generating"
        hints = request.hints
        lengths = int(rows.num_tokens[row]), int(computed[row])
        views.append(SlotView(row, state, request.request_id, *lengths, hints.key, hints.owner))
    return views
