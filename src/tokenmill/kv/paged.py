"""`PagedKV`: the contract's KV rules on block tables, fast enough for every step.

Blocks are shared by reference count and copied when a sequence is about to write into one that others hold too. This
class keeps the bookkeeping and is pure numpy; the keys and values themselves live in a `KVStorage` (tokens in the fake
backend, tensors in the torch backend). `CellTable` says what it must do; the conformance suite checks that it does.

A token may belong to several sequences. While they stay together one block table serves them all; when one of them
goes on alone, the block they share must be copied, and only after the shared token was computed. So `cut_into_segments`
cuts the batch there. A batch whose tokens belong to one sequence each, the common case, is a single segment.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tokenmill.contract.batch import Batch, IntArray
from tokenmill.contract.kv import ANY, Capabilities, KVStats, check_size
from tokenmill.errors import IntegrityError, InvalidBatch, InvalidOperation, OutOfKV, Unsupported
from tokenmill.kv.tables import BlockPool, BlockTables


@dataclass(frozen=True)
class Segment:
    """A run of a batch's tokens. A group of sequences is named by its smallest member, the lead."""

    tokens: slice
    token_lead: IntArray
    token_pos: IntArray
    token_rank: IntArray
    """How many tokens of the same group stand before this one in the segment."""
    lead: IntArray
    """Each group once, in order of its first token; the next two arrays go along with it."""
    count: IntArray
    """Tokens of the group in this segment."""
    holders: IntArray
    """Sequences in the group."""
    groups: tuple[tuple[int, ...], ...]
    """The groups of more than one sequence, lead first."""

    @property
    def is_one_each(self) -> bool:
        """One token of each group, in the same order: a decode step."""
        return self.token_lead is self.lead


def cut_into_segments(batch: Batch) -> list[Segment]:
    """The batch's segments, in order."""
    if batch.seq_ids.shape[1] == 1:
        leads = batch.seq_ids[:, 0]
        counts = np.bincount(leads)
        if counts.max() == 1:
            return [_one_token_each(batch, leads)]
        first = np.concatenate([[0], (leads[1:] != leads[:-1]).nonzero()[0] + 1])
        if len(first) == np.count_nonzero(counts):
            return [_run_each(batch, leads, first)]
        return [_segment(batch, slice(0, len(batch)), leads, {})]
    segments: list[Segment] = []
    companions: dict[int, tuple[int, ...]] = {}
    group_leads: list[int] = []
    begin = 0
    for i in range(len(batch)):
        group = tuple(sorted(batch.sequences_of(i)))
        if any(companions.get(seq, group) != group for seq in group):
            segments.append(_segment(batch, slice(begin, i), np.array(group_leads, dtype=np.int32), companions))
            begin, companions, group_leads = i, {}, []
        companions.update(dict.fromkeys(group, group))
        group_leads.append(group[0])
    segments.append(_segment(batch, slice(begin, len(batch)), np.array(group_leads, dtype=np.int32), companions))
    return segments


def _one_token_each(batch: Batch, leads: IntArray) -> Segment:
    """A decode step: every sequence once, alone. The same as `_segment` would give, without its sorting."""
    ones = np.ones(len(leads), dtype=np.int32)
    return Segment(
        tokens=slice(0, len(leads)),
        token_lead=leads,
        token_pos=batch.pos,
        token_rank=np.zeros(len(leads), dtype=np.int32),
        lead=leads,
        count=ones,
        holders=ones,
        groups=(),
    )


def _run_each(batch: Batch, leads: IntArray, first: NDArray[np.intp]) -> Segment:
    """Every sequence once, alone, with one token or several in a row; `first`: where each begins."""
    count = np.diff(first, append=len(leads)).astype(np.int32)
    return Segment(
        tokens=slice(0, len(leads)),
        token_lead=leads,
        token_pos=batch.pos,
        token_rank=(np.arange(len(leads)) - np.repeat(first, count)).astype(np.int32),
        lead=leads[first],
        count=count,
        holders=np.ones(len(first), dtype=np.int32),
        groups=(),
    )


def _segment(batch: Batch, tokens: slice, token_lead: IntArray, companions: dict[int, tuple[int, ...]]) -> Segment:
    lead, first, inverse, count = np.unique(token_lead, return_index=True, return_inverse=True, return_counts=True)
    # Sort the tokens by group, keeping their order inside it: a token's rank is its distance from the group's first.
    by_group = np.argsort(inverse, kind="stable")
    token_rank = np.empty(len(token_lead), dtype=np.int32)
    token_rank[by_group] = np.arange(len(token_lead)) - np.repeat(np.cumsum(count) - count, count)
    by_first = np.argsort(first)
    groups = sorted({group for group in companions.values() if len(group) > 1})
    holders = np.array([len(companions.get(int(seq), (seq,))) for seq in lead]) if groups else np.ones(len(lead))
    return Segment(
        tokens=tokens,
        token_lead=token_lead,
        token_pos=batch.pos[tokens],
        token_rank=token_rank,
        lead=lead[by_first],
        count=count[by_first].astype(np.int32),
        holders=holders[by_first].astype(np.int32),
        groups=tuple(groups),
    )


BoolArray = NDArray[np.bool_]

STATE_MAGIC = b"TMKV0001"
STATE_HEADER = struct.Struct("<8siiI")
"""Before the data of an exported sequence: magic, first position, end, checksum of the data."""


class KVStorage(Protocol):
    """Where the data of the cells lives. A slot is a cell's number: block * block_size + offset."""

    def hand_out(self, blocks: IntArray) -> None:
        """These blocks have a new owner, who will fill them from the beginning."""

    def copy_blocks(self, src: IntArray, dst: IntArray) -> None: ...
    def shift(self, slots: IntArray, delta: int) -> None: ...
    def read(self, slots: IntArray) -> bytes: ...
    def write(self, slots: IntArray, data: memoryview) -> None:
        """Raises `InvalidOperation` if the bytes do not fit the slots."""


@dataclass(frozen=True)
class Demand:
    """The blocks one segment takes: `grow` new ones per group, and a copy of its last one where `copy` is set."""

    segment: Segment
    end: IntArray
    """Where each group ends before the segment; the next three arrays go along with it."""
    held: IntArray
    """Blocks that it holds then."""
    grow: IntArray
    copy: BoolArray
    num_copies: int
    num_blocks: int
    """New blocks and copies together."""


@dataclass(frozen=True)
class PagedPlan:
    """How a batch is run: segment by segment. `step` names it for `forget`."""

    demands: tuple[Demand, ...]
    step: int

    @property
    def num_blocks(self) -> int:
        return sum(demand.num_blocks for demand in self.demands)


@dataclass(frozen=True)
class _Placed:
    demand: Demand
    taken: IntArray
    copied: IntArray


class PagedKV:
    """KV memory in blocks of `block_size` cells, shared between sequences by reference count."""

    def __init__(
        self, num_cells: int, max_context: int, block_size: int, capabilities: Capabilities, storage: KVStorage
    ) -> None:
        check_size(num_cells, block_size)
        self.max_context = max_context
        self.capabilities = capabilities
        self.tables = BlockTables(BlockPool(num_cells // block_size), block_size, capabilities.max_seqs, max_context)
        self._storage = storage
        self._step_of_slot: NDArray[np.int64] = np.zeros(num_cells // block_size * block_size, dtype=np.int64)
        self._shifts: list[tuple[IntArray, int]] = []
        self._applied: list[_Placed] = []
        self._vacated: list[IntArray] = []
        """Blocks that the batch in progress has copied for their last holders: free once it is committed."""
        self._steps = 0

    # -- questions ----------------------------------------------------------------------------------------------------

    @property
    def block_size(self) -> int:
        return self.tables.block_size

    def seq_pos_min(self, seq: int) -> int:
        return int(self.tables.start[seq]) if self.tables.num_blocks[self._checked(seq)] else -1

    def seq_pos_max(self, seq: int) -> int:
        return int(self.tables.end[self._checked(seq)]) - 1

    def free(self) -> int:
        return self.tables.pool.num_free * self.block_size

    def exclusive(self, seqs: Collection[int]) -> int:
        rows = np.unique([self._checked(seq) for seq in seqs]).astype(np.int32)
        num_blocks = self.tables.num_blocks[rows]
        width = int(num_blocks.max(initial=0))
        held = self.tables.table[rows, :width][np.arange(width) < num_blocks[:, None]]
        refs = self.tables.pool.refs
        num_holders = np.bincount(held, minlength=len(refs))
        return int(np.count_nonzero((num_holders > 0) & (num_holders == refs))) * self.block_size

    def stats(self) -> KVStats:
        active = self.tables.active()
        held = np.zeros(len(self._step_of_slot), dtype=bool)
        for seq in active:
            held[self.tables.slots_of(seq)] = True
        return KVStats(
            num_cells=len(held),
            free_cells=self.free(),
            held_cells=int(held.sum()),
            referenced_cells=int((self.tables.end - self.tables.start).sum()),
            num_seqs=len(active),
        )

    def check_integrity(self) -> None:
        """Raise `IntegrityError` if tables, counts and free list contradict each other."""
        self.tables.check_integrity()

    # -- sequence operations ------------------------------------------------------------------------------------------

    def seq_rm(self, seq: int, p0: int = ANY, p1: int = ANY) -> bool:
        seqs = self.tables.active() if seq == ANY else [self._checked(seq)]
        doomed = {s: (lo, hi) for s in seqs for lo, hi in [self._clip(s, p0, p1)] if lo < hi}
        for s, (lo, hi) in doomed.items():
            if lo > self.tables.start[s] and hi < self.tables.end[s]:
                raise InvalidOperation(f"removing [{p0}, {p1}) leaves a hole in sequence {s}; remove a head or a tail")
        if not self.capabilities.partial_rm and any(hi - lo < self.tables.length(s) for s, (lo, hi) in doomed.items()):
            return False
        for s, (lo, hi) in doomed.items():
            if hi == self.tables.end[s]:
                self.tables.cut_tail(s, lo)
            else:
                self.tables.cut_head(s, hi)
        return True

    def seq_cp(self, src: int, dst: int, p0: int = ANY, p1: int = ANY) -> None:
        if self._checked(src) == self._checked(dst):
            return
        lo, hi = self._clip(src, p0, p1)
        if self.tables.num_blocks[dst]:
            raise InvalidOperation(f"sequence {dst} is not empty; remove it before copying sequence {src} to it")
        if lo >= hi:
            return
        if not self.capabilities.partial_cp and hi - lo < self.tables.length(src):
            raise Unsupported("this memory can only copy whole sequences")
        self.tables.share(src, dst, lo, hi)

    def seq_keep(self, seq: int) -> None:
        self._checked(seq)
        for other in self.tables.active():
            if other != seq:
                self.tables.drop(other)

    def seq_add(self, seq: int, p0: int, p1: int, delta: int) -> None:
        lo, hi = self._clip(self._checked(seq), p0, p1)
        if lo >= hi or delta == 0:
            return
        if not self.capabilities.shift:
            raise Unsupported("this memory cannot shift positions")
        if hi - lo < self.tables.length(seq):
            raise InvalidOperation(f"shifting [{p0}, {p1}) splits sequence {seq}; shift the whole sequence")
        if self.tables.shares_cells(seq):
            raise InvalidOperation(f"sequence {seq} shares cells; shared cells cannot be shifted")
        if lo + delta < 0 or hi + delta > self.max_context:
            raise InvalidOperation(f"shifting sequence {seq} by {delta} exceeds positions 0 to {self.max_context - 1}")
        self._shifts.append((self.tables.slots_of(seq), delta))
        self.tables.shift(seq, delta)

    def clear(self) -> None:
        for seq in self.tables.active():
            self.tables.drop(seq)

    # -- running a batch: update, prepare, apply segment by segment, then commit; or rollback if one of them fails -----

    def update(self) -> None:
        while self._shifts:
            slots, delta = self._shifts[0]
            self._storage.shift(slots, delta)
            del self._shifts[0]

    def needed(self, batch: Batch) -> int:
        return self._plan(batch).num_blocks * self.block_size

    def prepare(self, batch: Batch) -> PagedPlan:
        """Plan the whole batch, or raise; memory does not change."""
        if self._applied:
            raise IntegrityError("the batch before was neither committed nor rolled back")
        plan = self._plan(batch)
        if plan.num_blocks > self.tables.pool.num_free:
            raise OutOfKV(plan.num_blocks * self.block_size, self.free())
        self._steps = plan.step
        return plan

    def apply(self, demand: Demand) -> IntArray:
        """Take the cells of the plan's next segment and copy what must not be shared; gives each token's slot."""
        taken = self.tables.pool.take(demand.num_blocks)
        copies = taken[: demand.num_copies]
        if len(taken) > len(copies):
            self._storage.hand_out(taken[len(copies) :])
        copied = _place(self.tables, demand, taken)
        self._applied.append(_Placed(demand, taken, copied))
        if len(copies):
            self._vacated.append(np.unique(copied[self.tables.pool.refs[copied] == 0]))
            self._storage.copy_blocks(copied, copies)
            steps = self._step_of_slot.reshape(-1, self.block_size)
            steps[copies] = steps[copied]
        slots = self.tables.slots_at(demand.segment.token_lead, demand.segment.token_pos)
        self._step_of_slot[slots] = self._steps
        return slots

    def commit(self) -> None:
        """The batch was launched: what it has left behind is free."""
        for blocks in self._vacated:
            self.tables.pool.give_back(blocks)
        self._vacated.clear()
        self._applied.clear()

    def rollback(self) -> None:
        """Undo what was applied since prepare: tables, counts and the order of the free list are as they were."""
        for undo in reversed(self._applied):
            segment, held, copy = undo.demand.segment, undo.demand.held, undo.demand.copy
            self.tables.end[segment.lead], self.tables.num_blocks[segment.lead] = undo.demand.end, held
            self.tables.table[segment.lead[copy], held[copy] - 1] = undo.copied
            np.add.at(self.tables.pool.refs, undo.copied, segment.holders[copy])
            for first, *others in segment.groups:
                self.tables.follow(first, others)
            self.tables.pool.untake(undo.taken)
        self._vacated.clear()
        self._applied.clear()

    def forget(self, step: int) -> None:
        """A step failed after others were submitted: drop the cells that it and later ones wrote, wherever held."""
        for seq in self.tables.active():
            failed = self._step_of_slot[self.tables.slots_of(seq)] >= step
            if failed.any():
                self.tables.cut_tail(seq, int(self.tables.start[seq]) + int(failed.argmax()))

    # -- planning -----------------------------------------------------------------------------------------------------

    def _plan(self, batch: Batch) -> PagedPlan:
        if batch.seq_ids.max() >= self.capabilities.max_seqs:
            raise InvalidBatch(f"sequence {batch.seq_ids.max()} must be below max_seqs {self.capabilities.max_seqs}")
        segments = cut_into_segments(batch)
        left: Mapping[int, int] = {}
        if len(segments) == 1:
            demand, _ = self._demand(self.tables, segments[0], left)
            return PagedPlan((demand,), self._steps + 1)
        # A later segment depends on what the earlier ones do, so they are tried on a copy with room for all.
        trial = self.tables.copy_with_spare(2 * len(batch))
        demands = []
        for segment in segments:
            demand, left = self._demand(trial, segment, left)
            blocks = trial.pool.take(demand.num_blocks)
            _place(trial, demand, blocks)
            demands.append(demand)
        return PagedPlan(tuple(demands), self._steps + 1)

    def _demand(
        self, tables: BlockTables, segment: Segment, left: Mapping[int, int]
    ) -> tuple[Demand, Mapping[int, int]]:
        """The blocks a segment takes, and the blocks that the batch has left for copies once it is placed."""
        end, held = tables.end[segment.lead], tables.num_blocks[segment.lead]
        self._check(tables, segment, end)
        length = end - tables.base[segment.lead]
        grow = -(-(length + segment.count) // tables.block_size) - held
        copy, left = _must_copy(tables, segment, length % tables.block_size, held, left)
        num_copies = int(np.count_nonzero(copy))
        return Demand(segment, end, held, grow, copy, num_copies, int(grow.sum()) + num_copies), left

    def _check(self, tables: BlockTables, segment: Segment, end: IntArray) -> None:
        expected = end if segment.is_one_each else tables.end[segment.token_lead] + segment.token_rank
        is_wrong = segment.token_pos != expected
        if is_wrong.any():
            i = int(is_wrong.argmax())
            seq, pos = segment.token_lead[i], segment.token_pos[i]
            raise InvalidBatch(f"sequence {seq} must continue at position {expected[i]}, not {pos}")
        if segment.token_pos.max() >= self.max_context:
            pos = segment.token_pos.max()
            raise InvalidBatch(f"position {pos} is outside the context of {self.max_context} tokens")
        for lead, *others in segment.groups:
            if not all(tables.same_cells(lead, other) for other in others):
                raise InvalidBatch(f"a token belongs to sequences {[lead, *others]}, which do not hold the same cells")

    # -- state bytes --------------------------------------------------------------------------------------------------

    def export(self, seq: int) -> bytes:
        self._need_state_bytes()
        self.update()
        start, end = int(self.tables.start[self._checked(seq)]), int(self.tables.end[seq])
        data = self._storage.read(self.tables.slots_of(seq))
        return STATE_HEADER.pack(STATE_MAGIC, start, end, zlib.crc32(data)) + data

    def import_(self, seq: int, state: bytes) -> None:
        self._need_state_bytes()
        if self.tables.num_blocks[self._checked(seq)]:
            raise InvalidOperation(f"sequence {seq} is not empty; remove it before importing into it")
        start, end, data = _read_state(state)
        if not 0 <= start < end <= self.max_context:
            raise InvalidOperation(f"positions {start} to {end} are outside the context of {self.max_context} tokens")
        count = -(-(end - start) // self.block_size)
        if count > self.tables.pool.num_free:
            raise OutOfKV(count * self.block_size, self.free())
        self.update()
        blocks = self.tables.pool.take(count)
        self._storage.hand_out(blocks)
        index = np.arange(end - start, dtype=np.int32)
        slots: IntArray = blocks[index // self.block_size] * self.block_size + index % self.block_size
        try:
            self._storage.write(slots, data)
        except BaseException:
            self.tables.pool.untake(blocks)
            raise
        self.tables.fill(seq, blocks, start, end)
        self._step_of_slot[slots] = 0

    def _need_state_bytes(self) -> None:
        if not self.capabilities.state_bytes:
            raise Unsupported("this memory cannot export or import sequences")

    # -- arguments ----------------------------------------------------------------------------------------------------

    def _clip(self, seq: int, p0: int, p1: int) -> tuple[int, int]:
        """The part of [p0, p1) that the sequence holds; empty if the first is not below the second."""
        start, end = int(self.tables.start[seq]), int(self.tables.end[seq])
        return max(p0, start), end if p1 < 0 else min(p1, end)

    def _checked(self, seq: int) -> int:
        if not 0 <= seq < self.capabilities.max_seqs:
            raise InvalidOperation(f"sequence {seq} is outside 0 to {self.capabilities.max_seqs - 1}")
        return seq


def _read_state(state: bytes) -> tuple[int, int, memoryview]:
    """Positions and data of exported bytes; `InvalidOperation` if they are not what `export` gave."""
    if len(state) < STATE_HEADER.size:
        raise InvalidOperation("the data is too short for an exported sequence")
    magic, start, end, checksum = STATE_HEADER.unpack_from(state)
    data = memoryview(state)[STATE_HEADER.size :]
    if magic != STATE_MAGIC or zlib.crc32(data) != checksum:
        raise InvalidOperation("the data is corrupt, or was exported from a different kind of memory")
    return start, end, data


def _must_copy(
    tables: BlockTables, segment: Segment, offset: IntArray, held: IntArray, left_before: Mapping[int, int]
) -> tuple[BoolArray, Mapping[int, int]]:
    """Which groups have to copy the block they write into: because others hold it, or because others left it.

    `offset` is where in its last block each group ends (0: with it), `held` the number of its blocks. `left_before`
    says, for each block that a group of this batch has left for a copy, how far that group's cells reach in it. If the
    batch fails the group returns, so nobody may have written over them. Returned, too: those left after this segment.
    """
    if tables.block_size == 1:  # a cell is written once
        return np.zeros(len(segment.lead), dtype=bool), left_before
    last_block = tables.table[segment.lead, held - 1]
    copy: BoolArray = (offset != 0) & (tables.pool.refs[last_block] > segment.holders)
    if left_before:
        copy |= (offset != 0) & np.isin(last_block, list(left_before))
    left, refs_left = dict(left_before), dict[int, int]()
    for i in copy.nonzero()[0]:
        block, holders, reach = int(last_block[i]), int(segment.holders[i]), int(offset[i])
        refs = refs_left.get(block, int(tables.pool.refs[block]))
        copy[i] = refs > holders or reach < left.get(block, 0)
        if copy[i]:
            refs_left[block] = refs - holders
            left[block] = max(reach, left.get(block, 0))
    return copy, left


def _place(tables: BlockTables, demand: Demand, blocks: IntArray) -> IntArray:
    """Put the blocks a segment asked for into its rows, copies first; returns the blocks that they are copies of."""
    segment, grow = demand.segment, demand.grow
    copies, grown = blocks[: demand.num_copies], blocks[demand.num_copies :]
    copied = copies
    if len(copies):
        writers, holders = segment.lead[demand.copy], segment.holders[demand.copy]
        last = tables.num_blocks[writers] - 1
        copied = tables.table[writers, last]
        tables.table[writers, last] = copies
        tables.pool.refs[copies] = holders
        np.subtract.at(tables.pool.refs, copied, holders)
    if len(grown) == len(segment.lead) and segment.is_one_each:  # each in a block of its own
        tables.table[segment.lead, demand.held] = grown
        tables.pool.refs[grown] = segment.holders
        tables.num_blocks[segment.lead] = demand.held + 1
    elif len(grown):
        ordinal = np.arange(len(grown)) - np.repeat(np.cumsum(grow) - grow, grow)
        columns = np.repeat(demand.held, grow) + ordinal
        tables.table[np.repeat(segment.lead, grow), columns] = grown
        tables.pool.refs[grown] = np.repeat(segment.holders, grow)
        tables.num_blocks[segment.lead] = demand.held + grow
    tables.end[segment.lead] = demand.end + segment.count
    for lead, *others in segment.groups:
        tables.follow(lead, others)
    return copied
