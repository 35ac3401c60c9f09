"""`CoreView`: a copy of an engine core's state that its events keep up to date, on whatever side of a wire they arrive.

It starts from a snapshot and is equal to a fresh one after every step. Steps are only remembered, and added up when
somebody looks or a row changes hands: so following costs an engine next to nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from tokenmill.contract import IntArray
from tokenmill.engine.events import (
    CellsEvent,
    CoreSnapshot,
    Event,
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

Rows = IntArray | Sequence[int]
MOST_STEPS = 64
"""That are remembered at most."""


class CoreView:
    """What a core is doing, by its events. One thread at a time; a subscriber as it is."""

    def __init__(self, snapshot: CoreSnapshot) -> None:
        self._reset(len(snapshot.slots), snapshot.num_cells)
        self.tick, self.free_cells = snapshot.tick, snapshot.free_cells
        self._waiting.update((one.request_id, one) for one in snapshot.waiting)
        for slot in snapshot.slots:
            if slot.request_id is not None:
                self._take_row(slot.request_id, slot)
        self._parked.update((one.seq, one) for one in snapshot.parked)
        self._parked_tokens = snapshot.parked_tokens

    def _reset(self, num_rows: int, num_cells: int) -> None:
        self.tick = 0
        self.num_cells = self.free_cells = num_cells
        self._slots = [SlotView(row, "idle") for row in range(num_rows)]
        self._row_of: dict[str, int] = {}
        self._num_tokens: IntArray = np.zeros(num_rows, dtype=np.int32)
        self._num_computed: IntArray = np.zeros(num_rows, dtype=np.int32)
        self._steps: list[tuple[Rows, Rows, Rows]] = []
        """That have not been added up: rows, tokens of each, rows that got a token."""
        self._waiting: dict[str, WaitingView] = {}
        self._parked: dict[int, ParkedView] = {}
        self._parked_tokens = ParkedTokens()

    # -- what happens -------------------------------------------------------------------------------------------------

    def __call__(self, event: Event) -> None:
        if isinstance(event, TickEvent):
            self._tick(event)
        elif isinstance(event, RequestEvent):
            self._change(event)
        elif isinstance(event, ParkedEvent):
            self._change_parked(event)
        elif isinstance(event, ProposalEvent):
            self._add_up()
            self._num_tokens[list(event.rows)] += np.array(event.counts, dtype=np.int32)
        elif isinstance(event, VerifiedEvent):
            self._add_up()
            rows = list(event.rows)
            self._num_tokens[rows] += np.array(event.num_drawn, dtype=np.int32)
            self._num_computed[rows] -= np.array(event.num_proposed, dtype=np.int32) - np.array(event.num_agreed)
        elif isinstance(event, CellsEvent):
            self.free_cells = event.free_cells
        elif isinstance(event, StartEvent):
            self._reset(event.num_rows, event.num_cells)

    def step(self, tick: int, rows: Rows, counts: Rows, drawn: Rows, free_cells: int) -> None:
        """A step gave each of these rows so many tokens, and the last ones a new one each."""
        self.tick, self.free_cells = tick, free_cells
        self._steps.append((rows, counts, drawn))
        if len(self._steps) >= MOST_STEPS:
            self._add_up()

    def _add_up(self) -> None:
        if self._steps:
            rows, counts, drawn = map(_joined, zip(*self._steps, strict=True))
            np.add.at(self._num_computed, rows, counts)
            np.add.at(self._num_tokens, drawn, 1)
            self._steps.clear()

    def _tick(self, event: TickEvent) -> None:
        plan = event.plan
        if event.is_whole:
            self.step(plan.tick, plan.rows, plan.counts, plan.sampled_rows, event.free_cells)
            return
        rows = [share.row for share in event.shares]
        counts = [share.num_tokens for share in event.shares]
        drawn = [share.row for share in event.shares if share.is_drawn]
        self.step(plan.tick, rows, counts, drawn, event.free_cells)

    def _change(self, event: RequestEvent) -> None:
        name = event.request_id
        if event.phase is Phase.QUEUED:
            self._waiting[name] = _waiting(event)
        elif event.phase is Phase.PREFILL:
            del self._waiting[name]
            lengths = event.num_tokens, event.num_computed
            self._take_row(name, SlotView(event.row, "prefilling", name, *lengths, event.key, event.owner))
        elif event.phase is Phase.DECODE:
            row = self._row_of[name]
            self._slots[row] = replace(self._slots[row], state="generating")
        else:
            self._leave(name)
            if event.phase is Phase.PREEMPTED:
                self._waiting[name] = _waiting(event)

    def _take_row(self, name: str, slot: SlotView) -> None:
        self._add_up()  # those of whoever had the row before
        self._row_of[name] = slot.row
        self._slots[slot.row] = slot
        self._num_tokens[slot.row], self._num_computed[slot.row] = slot.num_tokens, slot.num_computed

    def _leave(self, name: str) -> None:
        """It loses its row, or its place in the queue."""
        row = self._row_of.pop(name, None)
        if row is None:
            del self._waiting[name]
        else:
            self._slots[row] = SlotView(row, "idle")

    def _change_parked(self, event: ParkedEvent) -> None:
        self._parked.pop(event.seq, None)
        self._parked_tokens = event.parked_tokens
        if event.change in (ParkedChange.PARKED, ParkedChange.SHORTENED):
            self._parked[event.seq] = ParkedView(event.seq, event.num_tokens, event.owner, event.key)

    # -- what there is ------------------------------------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        return len(self._row_of)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens that are still to be computed. What of a waiting prompt is cached counts, too."""
        self._add_up()
        rows = [slot.row for slot in self._slots if slot.state == "prefilling"]
        left = int((self._num_tokens[rows] - self._num_computed[rows]).sum())
        return left + sum(one.num_tokens for one in self._waiting.values())

    @property
    def num_parked(self) -> int:
        return len(self._parked)

    @property
    def num_parked_tokens(self) -> int:
        """Those that several parked sequences share count once."""
        return self._parked_tokens.total

    def snapshot(self) -> CoreSnapshot:
        """What the core would say of itself."""
        self._add_up()
        lengths = zip(self._num_tokens.tolist(), self._num_computed.tolist(), strict=True)
        slots = (
            slot if slot.request_id is None else replace(slot, num_tokens=num_tokens, num_computed=num_computed)
            for slot, (num_tokens, num_computed) in zip(self._slots, lengths, strict=True)
        )
        parked = tuple(self._parked[seq] for seq in sorted(self._parked))
        return CoreSnapshot(
            tick=self.tick,
            slots=tuple(slots),
            waiting=tuple(self._waiting.values()),
            parked=parked,
            parked_tokens=self._parked_tokens,
            free_cells=self.free_cells,
            num_cells=self.num_cells,
        )


def _joined(parts: Iterable[Rows]) -> IntArray:
    """Lists may be among them, and numpy takes an empty one for numbers with fractions."""
    return np.concatenate([np.asarray(part, dtype=np.int32) for part in parts])


def _waiting(event: RequestEvent) -> WaitingView:
    is_preempted = event.phase is Phase.PREEMPTED
    return WaitingView(event.request_id, event.num_tokens, is_preempted, event.key, event.owner)
