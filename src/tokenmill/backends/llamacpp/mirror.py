"""`LlamaMemory`: llama.cpp's cells, unified or in streams, behind the contract's rules.

llama.cpp can't say how many cells are free and refuses little: it would shift cells that others share, leave holes, and
keep half a batch. So every operation is first done on a mirror (`PagedKV` with blocks of one cell, which is exactly
what unified cells are) that checks it and counts; llama.cpp then does the same. After a failure llama.cpp's sequences
are cut back to what the mirror says.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from tokenmill.backends.llamacpp.streams import AnyContext
from tokenmill.contract import ANY, Capabilities, IntArray
from tokenmill.errors import ForwardFailed, InvalidOperation, OutOfKV
from tokenmill.kv.paged import Demand, PagedKV

NO_CELLS = "failed to find available cells"
"""What llama.cpp says when it has no room for a sequence that comes back from bytes."""

WORTH_MOVING = 1024
"""Cells that must be saved if sequences are to be moved: they travel through host memory."""


class SequenceStorage:
    """Where the mirror believes its cells to be. Only whole sequences are moved, and llama.cpp does it."""

    def __init__(self, context: AnyContext) -> None:
        self._context = context
        self.seq = 0
        """The sequence that is on its way to or from bytes."""

    def hand_out(self, blocks: IntArray) -> None:
        """llama.cpp finds its own cells."""

    def copy_blocks(self, src: IntArray, dst: IntArray) -> None:
        """Blocks of one cell are never copied."""

    def shift(self, slots: IntArray, delta: int) -> None:
        """llama.cpp does that before it computes again."""

    def read(self, slots: IntArray) -> bytes:
        return self._context.read_state(self.seq) if len(slots) else b""

    def write(self, slots: IntArray, data: memoryview) -> None:
        refusal = self._context.write_state(self.seq, data)
        held = self._context.seq_pos_max(self.seq) - self._context.seq_pos_min(self.seq) + 1
        if refusal or held > len(slots):
            self._context.seq_rm(self.seq, ANY, ANY)
            if NO_CELLS in refusal:  # enough are free, but not side by side
                raise OutOfKV(len(slots), 0)
            raise InvalidOperation(f"llama.cpp rejected the sequence: {refusal or 'its cells differ'}")


class LlamaMemory(PagedKV):
    """See the module's docstring. One thread owns it: its backend's."""

    def __init__(self, context: AnyContext, num_cells: int, max_context: int, capabilities: Capabilities) -> None:
        self._sequences = SequenceStorage(context)
        super().__init__(num_cells, max_context, 1, capabilities, self._sequences)
        self._context = context
        self._scratch = capabilities.max_seqs
        """A sequence of the context that the contract does not see."""
        self._has_shifts = False
        self._most_held = 0
        """Cells in use at the most since they were last moved down: none lies higher, unless llama.cpp left gaps."""
        self.is_lost = False
        """llama.cpp's memory could not be brought back to what the mirror says."""

    # -- sequence operations ------------------------------------------------------------------------------------------

    def seq_rm(self, seq: int, p0: int = ANY, p1: int = ANY) -> bool:
        held = self.tables.active() if seq == ANY else [seq]
        if not super().seq_rm(seq, p0, p1):
            return False
        self._cut_back(held)
        return True

    def seq_cp(self, src: int, dst: int, p0: int = ANY, p1: int = ANY) -> None:
        super().seq_cp(src, dst, p0, p1)
        if src != dst and self.tables.num_blocks[dst]:
            self._context.seq_cp(src, dst, int(self.tables.start[dst]), int(self.tables.end[dst]))

    def seq_keep(self, seq: int) -> None:
        super().seq_keep(seq)
        self._context.seq_keep(seq)

    def seq_add(self, seq: int, p0: int, p1: int, delta: int) -> None:
        before = self.seq_pos_min(seq)
        super().seq_add(seq, p0, p1, delta)
        if self.seq_pos_min(seq) != before:
            self._context.seq_add(seq, ANY, ANY, delta)
            self._has_shifts = True

    def clear(self) -> None:
        super().clear()
        self._context.clear()

    # -- running a batch ----------------------------------------------------------------------------------------------

    def update(self) -> None:
        super().update()
        if self.capabilities.parked_cells is not None:
            self._move_down()

    def _move_down(self) -> None:
        """After much was removed, pack what is left: llama.cpp reads all cells up to the highest one in use.

        Sequences that share cells stay where they are.
        """
        held = self._num_held()
        if self._most_held - held < WORTH_MOVING or 2 * held > self._most_held:
            return
        self._most_held = held
        self._shift_now()
        movable = [seq for seq in self.tables.active() if not self.tables.shares_cells(seq)]
        states = {seq: self._context.read_state(seq) for seq in movable}
        for seq in movable:
            self._context.seq_rm(seq, ANY, ANY)
        for seq, state in states.items():
            refusal = self._context.write_state(seq, memoryview(state))
            if refusal:
                self.is_lost = True
                raise ForwardFailed(f"llama.cpp rejected a sequence that it had exported: {refusal}", fatal=True)

    def _num_held(self) -> int:
        return len(self._step_of_slot) - self.free()

    def commit(self) -> None:
        super().commit()
        self._most_held = max(self._most_held, self._num_held())
        self._has_shifts = False  # llama.cpp has carried them out before it computed

    def rollback(self) -> None:
        touched = [_sequences_of(undo.demand) for undo in self._applied]
        super().rollback()
        self._cut_back(seq for seqs in touched for seq in seqs)

    def forget(self, step: int) -> None:
        held = self.tables.active()
        super().forget(step)
        self._cut_back(held)

    def _cut_back(self, seqs: Iterable[int]) -> None:
        """Let llama.cpp's sequences hold no more than the mirror's."""
        for seq in seqs:
            start, end = int(self.tables.start[seq]), int(self.tables.end[seq])
            if start == end:
                self._context.seq_rm(seq, ANY, ANY)
                continue
            done = self._context.seq_pos_max(seq) < end or self._context.seq_rm(seq, end, ANY)
            if start > 0:
                done &= self._context.seq_rm(seq, ANY, start)
            if not done or self._context.seq_pos_max(seq) != end - 1:
                self.is_lost = True

    # -- state bytes --------------------------------------------------------------------------------------------------

    def export(self, seq: int) -> bytes:
        self._sequences.seq = seq
        self._shift_now()
        return super().export(seq)

    def import_(self, seq: int, state: bytes) -> None:
        self._sequences.seq = seq
        self._shift_now()
        super().import_(seq, state)
        self._most_held = max(self._most_held, self._num_held())

    def _shift_now(self) -> None:
        """llama.cpp shifts before it computes, never before it writes bytes: let it compute something."""
        if self._has_shifts:
            zero, wanted = np.zeros(1, dtype=np.int32), np.ones(1, dtype=np.uint8)
            self._context.decode(zero, zero, np.full((1, 1), self._scratch, dtype=np.int32), wanted)
            self._context.seq_rm(self._scratch, ANY, ANY)
            self._has_shifts = False


def _sequences_of(demand: Demand) -> list[int]:
    """All sequences that a segment writes to."""
    alone: list[int] = demand.segment.lead.tolist()
    return [*alone, *(seq for group in demand.segment.groups for seq in group)]
