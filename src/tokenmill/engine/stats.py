"""Snapshots of an engine core: numbers, and what each row is doing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tokenmill.core import KVStats
from tokenmill.engine.rows import RunningRows


@dataclass(frozen=True)
class CoreStats:
    tick: int
    num_running: int
    num_waiting: int
    num_waiting_tokens: int
    num_parked: int
    num_parked_tokens: int
    num_evicted: int
    """Parked sequences given up to make room, since the start."""
    num_failed_steps: int
    """Steps that were undone and whose requests were run alone, since the start."""
    kv: KVStats


@dataclass(frozen=True)
class SlotView:
    """One row: idle, or a request that is prefilling or generating."""

    row: int
    state: Literal["idle", "prefilling", "generating"]
    request_id: str | None = None
    num_tokens: int = 0
    num_computed: int = 0


def slot_views(rows: RunningRows) -> list[SlotView]:
    views = []
    for row, request in enumerate(rows.requests):
        if request is None:
            views.append(SlotView(row, "idle"))
            continue
        num_tokens, num_computed = int(rows.num_tokens[row]), int(rows.num_computed[row])
        state: Literal["prefilling", "generating"] = "prefilling" if rows.awaits_token[row] else "generating"
        views.append(SlotView(row, state, request.request_id, num_tokens, num_computed))
    return views
