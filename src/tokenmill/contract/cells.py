"""`CellTable`: the contract's KV rules as an executable specification, written for clarity, not for speed.

Every cell has a position and a column of flags: the sequences that hold it. There is no other state; what a
sequence sees follows from the flags. Real memories use block tables and reference counts instead and must agree
with this one: the conformance suite compares them operation by operation.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tokenmill.contract.batch import Batch, IntArray
from tokenmill.contract.kv import ANY, Capabilities, KVStats, check_size
from tokenmill.errors import InvalidBatch, InvalidOperation, OutOfKV, Unsupported

UNUSED = -1


class CellCopy(NamedTuple):
    """Copy-on-write: the data of `source` must be in `copy` before token number `token` of the batch is computed."""

    token: int
    source: int
    copy: int


@dataclass(frozen=True)
class CellPlan:
    """Placement of a batch: `cells[i]` for token i, copies to make, and the number of free cells it takes."""

    batch: Batch
    cells: IntArray
    copies: tuple[CellCopy, ...]
    needed: int


@dataclass(frozen=True)
class _Undo:
    cell: int
    pos: int
    step: int
    holders: NDArray[np.bool_]


class CellTable:
    """KV bookkeeping with llama.cpp's semantics, plus copy-on-write blocks of `block_size` cells."""

    def __init__(
        self, num_cells: int, max_context: int, block_size: int = 1, capabilities: Capabilities = Capabilities()
    ) -> None:
        check_size(num_cells, block_size)
        self.num_blocks = num_cells // block_size
        self.block_size = block_size
        self.max_context = max_context
        self.capabilities = capabilities
        self.pos: IntArray = np.full(self.num_blocks * block_size, UNUSED, dtype=np.int32)
        self.held: NDArray[np.bool_] = np.zeros((capabilities.max_seqs, len(self.pos)), dtype=bool)
        self.pending_shift: IntArray = np.zeros(len(self.pos), dtype=np.int32)
        self.step_of_cell: NDArray[np.int64] = np.zeros(len(self.pos), dtype=np.int64)
        self.step = 0
        self._undo: list[_Undo] = []
        self._copies: list[CellCopy] = []
        self._held_before = self.held
        self._free_before = self._free_blocks()
        self._num_taken = 0

    # -- contents of a sequence ---------------------------------------------------------------------------------------

    def cells_of(self, seq: int) -> NDArray[np.intp]:
        """The cells of a sequence, by position."""
        cells = np.flatnonzero(self.held[seq])
        return cells[np.argsort(self.pos[cells])]

    def visible(self, seqs: list[int], pos: int, window: int | None = None) -> NDArray[np.intp]:
        """Cells visible to a token of these sequences at `pos`: sets intersect, causal, and inside the window."""
        seen = self.held[seqs].any(axis=0) & (self.pos <= pos)
        if window is not None:
            seen &= self.pos > pos - window
        return np.flatnonzero(seen)

    def seq_pos_min(self, seq: int) -> int:
        held = self.pos[self.held[self._checked(seq)]]
        return int(held.min(initial=self.max_context)) if len(held) else -1

    def seq_pos_max(self, seq: int) -> int:
        return int(self.pos[self.held[self._checked(seq)]].max(initial=-1))

    def free(self) -> int:
        return int(self._free_blocks().sum()) * self.block_size

    def exclusive(self, seqs: Collection[int]) -> int:
        others = np.ones(len(self.held), dtype=bool)
        others[[self._checked(seq) for seq in seqs]] = False
        needed = self.held[others].any(axis=0).reshape(self.num_blocks, self.block_size).any(axis=1)
        return int((~self._free_blocks() & ~needed).sum()) * self.block_size

    def stats(self) -> KVStats:
        return KVStats(
            num_cells=len(self.pos),
            free_cells=self.free(),
            held_cells=int(self.held.any(axis=0).sum()),
            referenced_cells=int(self.held.sum()),
            num_seqs=int(self.held.any(axis=1).sum()),
        )

    # -- sequence operations ------------------------------------------------------------------------------------------

    def seq_rm(self, seq: int, p0: int = ANY, p1: int = ANY) -> bool:
        seqs = range(self.capabilities.max_seqs) if seq == ANY else [self._checked(seq)]
        doomed = {s: self._in_range(s, p0, p1) for s in seqs}
        for s, cells in doomed.items():
            kept = np.sort(self.pos[self.held[s] & ~cells])
            if len(kept) and (np.diff(kept) != 1).any():
                raise InvalidOperation(f"removing [{p0}, {p1}) leaves a hole in sequence {s}; remove a head or a tail")
        if not self.capabilities.partial_rm and any(c.any() and (self.held[s] & ~c).any() for s, c in doomed.items()):
            return False
        for s, cells in doomed.items():
            self.held[s, cells] = False
        self._release()
        return True

    def seq_cp(self, src: int, dst: int, p0: int = ANY, p1: int = ANY) -> None:
        if self._checked(src) == self._checked(dst):
            return
        cells = self._in_range(src, p0, p1)
        if self.held[dst].any():
            raise InvalidOperation(f"sequence {dst} is not empty; remove it before copying sequence {src} to it")
        if not self.capabilities.partial_cp and cells.any() and (self.held[src] & ~cells).any():
            raise Unsupported("this memory can only copy whole sequences")
        self.held[dst, cells] = True

    def seq_keep(self, seq: int) -> None:
        others = np.arange(self.capabilities.max_seqs) != self._checked(seq)
        self.held[others] = False
        self._release()

    def seq_add(self, seq: int, p0: int, p1: int, delta: int) -> None:
        cells = self._in_range(self._checked(seq), p0, p1)
        if not cells.any() or delta == 0:
            return
        if not self.capabilities.shift:
            raise Unsupported("this memory cannot shift positions")
        if (self.held[seq] & ~cells).any():
            raise InvalidOperation(f"shifting [{p0}, {p1}) splits sequence {seq}; shift the whole sequence")
        if (self.held[:, cells].sum(axis=0) > 1).any():
            raise InvalidOperation(f"sequence {seq} shares cells; shared cells cannot be shifted")
        if self.seq_pos_min(seq) + delta < 0 or self.seq_pos_max(seq) + delta >= self.max_context:
            raise InvalidOperation(f"shifting sequence {seq} by {delta} exceeds positions 0 to {self.max_context - 1}")
        self.pos[cells] += delta
        self.pending_shift[cells] += delta

    def clear(self) -> None:
        self.held[:] = False
        self._release()

    # -- running a batch: prepare -> apply -> rollback if it fails ----------------------------------------------------

    def needed(self, batch: Batch) -> int:
        """Cells the batch would allocate, even if there are not enough: planned on a memory with enough room."""
        spare = 2 * len(batch) * self.block_size
        roomy = CellTable(len(self.pos) + spare, self.max_context, self.block_size, self.capabilities)
        roomy.pos[: len(self.pos)] = self.pos
        roomy.held[:, : len(self.pos)] = self.held
        return roomy.prepare(batch).needed

    def prepare(self, batch: Batch) -> CellPlan:
        """Find a cell for every token, or raise; changes nothing."""
        try:
            cells = self._place_all(batch)
        except OutOfKV:
            raise OutOfKV(self.needed(batch), self.free()) from None
        plan = CellPlan(batch, cells, tuple(self._copies), self._num_taken * self.block_size)
        self.rollback()
        return plan

    def apply(self, plan: CellPlan) -> int:
        """Apply a plan; returns the number of the step, for `forget`."""
        self.step += 1
        placed = self._place_all(plan.batch)
        self.step_of_cell[placed] = self.step
        return self.step

    def rollback(self) -> None:
        """Undo the last apply exactly: cells, positions, copied blocks."""
        for undo in reversed(self._undo):
            self.pos[undo.cell], self.step_of_cell[undo.cell] = undo.pos, undo.step
            self.held[:, undo.cell] = undo.holders
        self._undo.clear()

    def update(self) -> dict[int, int]:
        """The pending shift of each cell's data, cell -> delta; the caller applies it before the next forward."""
        cells = np.flatnonzero(self.pending_shift)
        shifts = {int(cell): int(self.pending_shift[cell]) for cell in cells}
        self.pending_shift[:] = 0
        return shifts

    def forget(self, step: int) -> None:
        """A step failed after later ones were applied: drop the cells that it and they wrote from all sequences."""
        self.held[:, self.step_of_cell >= step] = False
        self._release()

    def _place_all(self, batch: Batch) -> IntArray:
        self._undo.clear()
        self._copies.clear()
        # A failed batch must be undone, so cells held when it began are not overwritten before it ends.
        self._held_before, self._free_before = self.held.copy(), self._free_blocks()
        self._num_taken = 0
        cells = np.empty(len(batch), dtype=np.int32)
        try:
            for i in range(len(batch)):
                cells[i] = self._place(i, batch.sequences_of(i), int(batch.pos[i]))
        except (InvalidBatch, OutOfKV):
            self.rollback()
            raise
        return cells

    def _place(self, index: int, seqs: list[int], pos: int) -> int:
        self._check_token(seqs, pos)
        cell = self._next_cell(index, seqs)
        holders = np.zeros(len(self.held), dtype=bool)
        holders[seqs] = True
        self._set(cell, pos, self.step, holders)
        return cell

    def _check_token(self, seqs: list[int], pos: int) -> None:
        first = seqs[0]
        if max(seqs) >= self.capabilities.max_seqs:
            raise InvalidBatch(f"sequence {max(seqs)} must be below max_seqs {self.capabilities.max_seqs}")
        if any((self.held[seq] != self.held[first]).any() for seq in seqs):
            raise InvalidBatch(f"a token belongs to sequences {seqs}, which do not hold the same cells")
        if pos != self.seq_pos_max(first) + 1:
            raise InvalidBatch(f"sequence {first} must continue at position {self.seq_pos_max(first) + 1}, not {pos}")
        if pos >= self.max_context:
            raise InvalidBatch(f"position {pos} is outside the context of {self.max_context} tokens")

    def _next_cell(self, index: int, seqs: list[int]) -> int:
        """The cell after the sequence's last one, in a block that can be written without affecting other sequences.

        Copies the block if another sequence has cells in it, or had some from here on when the batch began.
        """
        held = self.cells_of(seqs[0])
        if len(held) == 0 or (held[-1] + 1) % self.block_size == 0:
            return self._take_block() * self.block_size
        block, offset = divmod(int(held[-1]) + 1, self.block_size)
        outsiders = np.ones(len(self.held), dtype=bool)
        outsiders[seqs] = False
        cells = self._cells_in(block)
        from_here = slice(cells.start + offset, cells.stop)
        if self.held[outsiders, cells].any() or self._held_before[outsiders, from_here].any():
            block = self._copy_block(index, block, seqs)
        return block * self.block_size + offset

    def _copy_block(self, index: int, block: int, seqs: list[int]) -> int:
        """Copy-on-write: the writers move to a copy of their cells, the other holders keep the old block."""
        copy_block = self._take_block()
        for offset in np.flatnonzero(self.held[seqs[0], self._cells_in(block)]).tolist():
            old, copy = block * self.block_size + offset, copy_block * self.block_size + offset
            pos, step, others = int(self.pos[old]), int(self.step_of_cell[old]), self.held[:, old].copy()
            others[seqs] = False
            self._set(copy, pos, step, self.held[:, old] & ~others)
            self._set(old, pos if others.any() else UNUSED, step, others)
            self._copies.append(CellCopy(index, old, copy))
        return copy_block

    def _take_block(self) -> int:
        free = np.flatnonzero(self._free_blocks() & self._free_before)
        if len(free) == 0:
            raise OutOfKV(self.block_size, 0)
        self._num_taken += 1
        return int(free[0])

    # -- helpers ------------------------------------------------------------------------------------------------------

    def _set(self, cell: int, pos: int, step: int, holders: NDArray[np.bool_]) -> None:
        old_holders = self.held[:, cell].copy()
        self._undo.append(_Undo(cell, int(self.pos[cell]), int(self.step_of_cell[cell]), old_holders))
        self.pos[cell], self.step_of_cell[cell] = pos, step
        self.held[:, cell] = holders

    def _checked(self, seq: int) -> int:
        if not 0 <= seq < self.capabilities.max_seqs:
            raise InvalidOperation(f"sequence {seq} is outside 0 to {self.capabilities.max_seqs - 1}")
        return seq

    def _in_range(self, seq: int, p0: int, p1: int) -> NDArray[np.bool_]:
        end = self.max_context if p1 < 0 else p1
        inside: NDArray[np.bool_] = self.held[seq] & (self.pos >= max(p0, 0)) & (self.pos < end)
        return inside

    def _cells_in(self, block: int) -> slice:
        return slice(block * self.block_size, (block + 1) * self.block_size)

    def _free_blocks(self) -> NDArray[np.bool_]:
        used = np.asarray(self.held.any(axis=0))
        return ~np.asarray(used.reshape(self.num_blocks, self.block_size).any(axis=1))

    def _release(self) -> None:
        unheld = ~self.held.any(axis=0)
        self.pos[unheld] = UNUSED
        self.pending_shift[unheld] = 0
