"""`BlockPool`: which blocks are free. `BlockTables`: which ones each sequence holds, and which positions of them.

Data structures without rules. A sequence is a row of blocks: the cell of position p lies in block
`table[seq, (p - base) // block_size]`. Everything is an array over sequences, so that questions about a whole batch
are one numpy expression.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tokenmill.contract.batch import IntArray
from tokenmill.errors import IntegrityError


class BlockPool:
    """A stack of free blocks and a reference count per block; taking and giving back are O(1) a block."""

    def __init__(self, num_blocks: int) -> None:
        self.refs: IntArray = np.zeros(num_blocks, dtype=np.int32)
        self._stack: IntArray = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)
        self.num_free = num_blocks

    def take(self, count: int) -> IntArray:
        """Take `count` blocks; the caller has checked that they are there and sets their `refs`."""
        if count > self.num_free:
            raise IntegrityError(f"{count} blocks taken, {self.num_free} free: the plan was not checked")
        taken = self._stack[self.num_free - count : self.num_free][::-1].copy()
        self.num_free -= count
        return taken

    def untake(self, blocks: IntArray) -> None:
        """Undo the latest `take` exactly, so that the free blocks come in the same order again."""
        self.refs[blocks] = 0
        self.num_free += len(blocks)

    def share(self, blocks: IntArray) -> None:
        """One more sequence holds these blocks."""
        self.refs[blocks] += 1

    def release(self, blocks: IntArray) -> None:
        """One sequence less holds these blocks; the ones nobody holds become free."""
        self.refs[blocks] -= 1
        self.give_back(blocks[self.refs[blocks] == 0][::-1])

    def give_back(self, blocks: IntArray) -> None:
        """These blocks are held by nobody any more."""
        self._stack[self.num_free : self.num_free + len(blocks)] = blocks
        self.num_free += len(blocks)

    def copy_with_spare(self, spare: int) -> BlockPool:
        """The same pool with `spare` more blocks that are taken last, to try out what might not fit."""
        copy = BlockPool(len(self.refs) + spare)
        copy.refs[: len(self.refs)] = self.refs
        spares = np.arange(len(self.refs), len(self.refs) + spare, dtype=np.int32)
        copy.num_free = spare + self.num_free
        copy._stack[: copy.num_free] = np.concatenate([spares, self._stack[: self.num_free]])
        return copy

    def check_integrity(self, expected_refs: NDArray[np.int64]) -> None:
        """Compare the counts with those found by walking all tables."""
        wrong = np.flatnonzero(self.refs != expected_refs)
        if len(wrong):
            block = int(wrong[0])
            raise IntegrityError(f"block {block} has {self.refs[block]} references, tables say {expected_refs[block]}")
        free = self._stack[: self.num_free]
        if len(np.unique(free)) != self.num_free or self.num_free != int((self.refs == 0).sum()):
            raise IntegrityError("the free list does not hold each unreferenced block once")


class BlockTables:
    """The rows of all sequences over one pool of blocks. An empty sequence has 0 in every array but `table`."""

    def __init__(self, pool: BlockPool, block_size: int, max_seqs: int, max_context: int) -> None:
        self.pool = pool
        self.block_size = block_size
        # One block more than the context needs: after a shift, a sequence may begin in the middle of its first block.
        self.table: IntArray = np.zeros((max_seqs, -(-max_context // block_size) + 1), dtype=np.int32)
        self.num_blocks: IntArray = np.zeros(max_seqs, dtype=np.int32)
        self.base: IntArray = np.zeros(max_seqs, dtype=np.int32)
        """Position that the first cell of the first block stands for."""
        self.start: IntArray = np.zeros(max_seqs, dtype=np.int32)
        self.end: IntArray = np.zeros(max_seqs, dtype=np.int32)
        """A sequence holds the positions [start, end)."""

    def active(self) -> list[int]:
        """The sequences that hold anything."""
        active: list[int] = np.flatnonzero(self.num_blocks).tolist()
        return active

    def blocks_of(self, seq: int) -> IntArray:
        """The blocks of a sequence, in order of position."""
        return self.table[seq, : self.num_blocks[seq]]

    def length(self, seq: int) -> int:
        return int(self.end[seq] - self.start[seq])

    # -- slots: the numbers of cells, block * block_size + offset -----------------------------------------------------

    def slots_at(self, seqs: IntArray, pos: IntArray) -> IntArray:
        """The slot of each (sequence, position)."""
        index = pos - self.base[seqs]
        slots: IntArray = self.table[seqs, index // self.block_size] * self.block_size + index % self.block_size
        return slots

    def slots(self, seqs: IntArray, p0: IntArray, p1: IntArray) -> IntArray:
        """The slots of positions [p0, p1) of each sequence, one sequence after the other."""
        lengths = p1 - p0
        ends = np.cumsum(lengths)
        pos = np.arange(ends[-1] if len(ends) else 0) + np.repeat(p1 - ends, lengths)
        return self.slots_at(np.repeat(seqs, lengths), pos)

    def slots_of(self, seq: int) -> IntArray:
        """All slots a sequence holds."""
        one = np.array([seq], dtype=np.int32)
        return self.slots(one, self.start[one], self.end[one])

    def same_cells(self, a: int, b: int) -> bool:
        bounds_agree = all(array[a] == array[b] for array in (self.num_blocks, self.base, self.start, self.end))
        return bounds_agree and bool((self.blocks_of(a) == self.blocks_of(b)).all())

    def shares_cells(self, seq: int) -> bool:
        """Does another sequence hold a cell of this one? (A block may be shared without any cell being so.)"""
        if (self.pool.refs[self.blocks_of(seq)] == 1).all():
            return False
        own = self.slots_of(seq)
        return any(np.isin(own, self.slots_of(other)).any() for other in self.active() if other != seq)

    # -- changes ------------------------------------------------------------------------------------------------------

    def share(self, src: int, dst: int, p0: int, p1: int) -> None:
        """Let the empty `dst` hold src's cells at [p0, p1) too."""
        first = (p0 - int(self.base[src])) // self.block_size
        last = -(-(p1 - int(self.base[src])) // self.block_size)
        shared = self.table[src, first:last]
        self.pool.share(shared)
        self.table[dst, : last - first] = shared
        self.num_blocks[dst] = last - first
        self.base[dst] = self.base[src] + first * self.block_size
        self.start[dst], self.end[dst] = p0, p1

    def fill(self, seq: int, blocks: IntArray, start: int, end: int) -> None:
        """Let the empty sequence hold [start, end) in fresh blocks."""
        self.pool.refs[blocks] = 1
        self.table[seq, : len(blocks)] = blocks
        self.num_blocks[seq] = len(blocks)
        self.base[seq], self.start[seq], self.end[seq] = start, start, end

    def shift(self, seq: int, delta: int) -> None:
        for bound in (self.base, self.start, self.end):
            bound[seq] += delta

    def cut_tail(self, seq: int, end: int) -> None:
        """Keep the positions below `end`."""
        if end <= self.start[seq]:
            self.drop(seq)
            return
        keep = -(-(end - int(self.base[seq])) // self.block_size)
        self.pool.release(self.table[seq, keep : self.num_blocks[seq]])
        self.num_blocks[seq], self.end[seq] = keep, end

    def cut_head(self, seq: int, start: int) -> None:
        """Keep the positions from `start` on."""
        gone = (start - int(self.base[seq])) // self.block_size
        self.pool.release(self.table[seq, :gone])
        kept = self.blocks_of(seq)[gone:].copy()
        self.table[seq, : len(kept)] = kept
        self.num_blocks[seq], self.start[seq] = len(kept), start
        self.base[seq] += gone * self.block_size

    def drop(self, seq: int) -> None:
        """Empty the sequence."""
        self.pool.release(self.blocks_of(seq))
        for array in (self.num_blocks, self.base, self.start, self.end):
            array[seq] = 0

    def follow(self, lead: int, others: list[int]) -> None:
        """Give `others` the row of `lead`; the pool's counts are the caller's business."""
        for array in (self.table, self.num_blocks, self.base, self.start, self.end):
            array[others] = array[lead]

    def copy_with_spare(self, spare_blocks: int) -> BlockTables:
        """The same tables over a pool with more blocks, to try out what might not fit."""
        copy = BlockTables(self.pool.copy_with_spare(spare_blocks), self.block_size, 0, 0)
        copy.table, copy.num_blocks, copy.base = self.table.copy(), self.num_blocks.copy(), self.base.copy()
        copy.start, copy.end = self.start.copy(), self.end.copy()
        return copy

    def check_integrity(self) -> None:
        """Raise `IntegrityError` if tables, counts and free list contradict each other: a bug, no user's fault."""
        refs = np.zeros(len(self.pool.refs), dtype=np.int64)
        for seq in self.active():
            row = self.blocks_of(seq)
            np.add.at(refs, row, 1)
            covered = -(-int(self.end[seq] - self.base[seq]) // self.block_size)
            if covered != len(row) or not 0 <= self.start[seq] - self.base[seq] < self.block_size:
                raise IntegrityError(f"sequence {seq} has {len(row)} blocks for [{self.start[seq]}, {self.end[seq]})")
        self.pool.check_integrity(refs)
