"""`BlockPool`: which blocks of cells are free, and how many sequences hold each of the others."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tokenmill.core.batch import IntArray
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
