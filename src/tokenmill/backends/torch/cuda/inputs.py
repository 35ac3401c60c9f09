"""`StepInputs`: what the kernels of a step are told, made from a batch with vectorised numpy and sent in one piece.

Nothing waits: what is uploaded lies in pinned memory, and downloads are only launched.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tokenmill.backends.torch.attention import Runs, runs_of
from tokenmill.contract import IntArray
from tokenmill.errors import IntegrityError
from tokenmill.kv.tables import BlockTables

ALIGNED = 4
NUM_BUFFERS = 3
"""Host buffers that take turns: a step's own may still be on its way when the next step is written."""


def download(tensor: Tensor) -> Tensor:
    """A copy on the host that is there once everything launched so far is done."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


class InputBuffer:
    """A step's numbers, in one piece: written on the host, sent with one copy."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        self.card = torch.zeros(capacity, dtype=torch.int32, device=device)
        self._hosts = [torch.zeros(capacity, dtype=torch.int32, pin_memory=True) for _ in range(NUM_BUFFERS)]
        self._arrays = [host.numpy() for host in self._hosts]
        self._sent = [torch.cuda.Event() for _ in range(NUM_BUFFERS)]  # type: ignore[no-untyped-call]
        self._stream = torch.cuda.current_stream(device)
        self._turn = 0
        self._ends: list[tuple[int, Tensor, Tensor] | None] = [None] * NUM_BUFFERS
        """What was last sent from each buffer, as parts of it and of the card's: mostly it is as much again."""

    def begin(self) -> NDArray[np.int32]:
        """What a step is to be written to: a host buffer that has been sent."""
        self._turn = (self._turn + 1) % NUM_BUFFERS
        self._sent[self._turn].synchronize()
        return self._arrays[self._turn]

    def send(self, count: int) -> None:
        """Upload the first `count` values of this step to the same offsets in device memory."""
        parts = self._ends[self._turn]
        if parts is None or parts[0] != count:
            parts = self._ends[self._turn] = (count, self.card[:count], self._hosts[self._turn][:count])
        parts[1].copy_(parts[2], non_blocking=True)
        self._sent[self._turn].record(self._stream)


class Sections:
    """Parts of a step's numbers, one after the other."""

    def __init__(self, buffer: InputBuffer) -> None:
        self._buffer = buffer
        self._there = buffer.begin()
        self._used = 0

    def room(self, size: int) -> tuple[NDArray[np.int32], Tensor]:
        """Room for so many numbers: where to write them, and where they will be on the card."""
        begin, end = self._used, self._used + size
        if end > len(self._there):
            raise IntegrityError(f"{end} numbers for a step, but there is room for {len(self._there)}")
        self._used = aligned(end)
        return self._there[begin:end], self._buffer.card[begin:end]

    def put(self, numbers: NDArray[Any]) -> Tensor:
        """These numbers, as they will be on the card."""
        there, on_card = self.room(len(numbers))
        there[:] = numbers
        return on_card

    def send(self) -> None:
        self._buffer.send(min(self._used, len(self._there)))


def aligned(count: int) -> int:
    """Sections begin at multiples of 16 bytes."""
    return -(-count // ALIGNED) * ALIGNED


NUM_FIELDS = 6
TOKEN, POS, SLOT, ROW, LAST, FIRST = range(NUM_FIELDS)
"""Of a decode step."""


@dataclass(frozen=True)
class SingleRuns:
    """Runs of one token: decodes. Entry r of every tensor speaks of run r."""

    row: Tensor
    """Which token it is."""
    last: Tensor
    """Its own cell, as an index into its row of blocks; -1 reads nothing."""
    first: Tensor
    """The first cell that its sequence holds."""
    tables: Tensor


@dataclass(frozen=True)
class LongRuns:
    """Runs of several tokens: prompts and chunks of them."""

    order: Tensor
    """All their tokens, run after run."""
    begin: Tensor
    """Where in `order` each run begins; the next three go along with it."""
    count: Tensor
    index: Tensor
    """The cell of its first token, as an index into its row of blocks."""
    first: Tensor
    tile_run: Tensor
    tile_offset: Tensor
    """The tiles that are computed together: a run, and an offset in it."""
    tables: Tensor


@dataclass(frozen=True)
class StepInputs:
    """On the card, once it was sent."""

    token: Tensor
    """Ids, or names of rows of the token table."""
    pos: Tensor
    slot: Tensor
    """Where keys and values go; -1 is nowhere."""
    width: Tensor
    """Of the tables' rows: it differs from step to step, even for one graph."""
    singles: SingleRuns | None
    longs: LongRuns | None


def capacity(num_tokens: int, tables: BlockTables, num_running: int | None) -> int:
    """Numbers that the largest step sends."""
    sections = 20
    most_runs = min(num_tokens, num_running or len(tables.table))
    return 12 * (num_tokens + most_runs) + most_runs * int(tables.table.shape[1]) + sections * ALIGNED


class DecodeInputs:
    """The inputs of decode steps of one size: one token each of at most so many sequences.

    They lie at the same addresses in every step, which graphs rely on, so what is on the card is named once.
    """

    def __init__(self, buffer: InputBuffer, size: int) -> None:
        self._buffer = buffer
        self._size = size
        self._pitch = aligned(size)
        self._fillers = np.zeros((NUM_FIELDS, self._pitch), dtype=np.int32)
        self._fillers[ROW], self._fillers[SLOT], self._fillers[LAST] = np.arange(self._pitch), -1, -1
        self._tables = ALIGNED + NUM_FIELDS * self._pitch
        fields = buffer.card[ALIGNED : self._tables].view(NUM_FIELDS, self._pitch)[:, :size]
        token, pos, slot, row, last, first = fields
        singles = SingleRuns(row=row, last=last, first=first, tables=buffer.card[self._tables :])
        self.on_card = StepInputs(token=token, pos=pos, slot=slot, width=buffer.card[:1], singles=singles, longs=None)

    def send(self, tables: BlockTables, token: IntArray, pos: IntArray, slot: IntArray, lead: IntArray) -> None:
        """Write and send a step. It is filled up with tokens that read and leave nothing."""
        count, widest = len(token), int(tables.num_blocks[lead].max())
        there = self._buffer.begin()
        there[0] = widest
        fields = there[ALIGNED : self._tables].reshape(NUM_FIELDS, self._pitch)
        fields[TOKEN, :count], fields[POS, :count], fields[SLOT, :count] = token, pos, slot
        base = tables.base[lead]
        last = pos - base
        longest_first = np.argsort(-last)  # so that none is left over when the card runs dry
        fields[ROW, :count], fields[LAST, :count] = longest_first, last[longest_first]
        fields[FIRST, :count] = (tables.start[lead] - base)[longest_first]
        if count < self._size:
            fields[:, count:] = self._fillers[:, count:]
        end = self._tables + count * widest
        there[self._tables : end].reshape(count, widest)[:] = tables.table[lead[longest_first], :widest]
        self._buffer.send(end)


def mixed_inputs(
    buffer: InputBuffer,
    tables: BlockTables,
    token: IntArray,
    pos: IntArray,
    slot: IntArray,
    lead: IntArray,
    tile: int,
) -> StepInputs:
    """Any tokens in any order; `tile` tokens of a long run are computed together."""
    sections = Sections(buffer)
    runs = runs_of(lead, pos)
    is_single = runs.count == 1
    singles, longs = runs.take(np.flatnonzero(is_single)), runs.take(np.flatnonzero(~is_single))
    widest = int(tables.num_blocks[runs.seq].max())
    inputs = StepInputs(
        width=sections.put(np.array([widest])),
        token=sections.put(token),
        pos=sections.put(pos),
        slot=sections.put(slot),
        singles=_single_runs(sections, tables, singles, pos, widest) if len(singles.seq) else None,
        longs=_long_runs(sections, tables, longs, pos, widest, tile) if len(longs.seq) else None,
    )
    sections.send()
    return inputs


def _single_runs(sections: Sections, tables: BlockTables, runs: Runs, pos: IntArray, widest: int) -> SingleRuns:
    row = runs.tokens[runs.begin]
    base = tables.base[runs.seq]
    return SingleRuns(
        row=sections.put(row),
        last=sections.put(pos[row] - base),
        first=sections.put(tables.start[runs.seq] - base),
        tables=_put_tables(sections, tables, runs.seq, widest),
    )


def _long_runs(sections: Sections, tables: BlockTables, runs: Runs, pos: IntArray, widest: int, tile: int) -> LongRuns:
    base = tables.base[runs.seq]
    index = pos[runs.tokens[runs.begin]] - base
    tile_run, tile_offset = _tiles(runs.count, index, tile)
    return LongRuns(
        order=sections.put(runs.tokens),
        begin=sections.put(runs.begin),
        count=sections.put(runs.count),
        index=sections.put(index),
        first=sections.put(tables.start[runs.seq] - base),
        tile_run=sections.put(tile_run),
        tile_offset=sections.put(tile_offset),
        tables=_put_tables(sections, tables, runs.seq, widest),
    )


def _tiles(count: NDArray[np.int64], index: NDArray[np.int64], tile: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Every tile of every run, those that read most first: so none is left over when the card runs dry."""
    num_tiles = -(-count // tile)
    run = np.repeat(np.arange(len(count)), num_tiles)
    offset = (np.arange(len(run)) - np.repeat(np.cumsum(num_tiles) - num_tiles, num_tiles)) * tile
    longest_first = np.argsort(-(index[run] + offset), kind="stable")
    return run[longest_first], offset[longest_first]


def _put_tables(sections: Sections, tables: BlockTables, seqs: IntArray, widest: int) -> Tensor:
    there, on_card = sections.room(len(seqs) * widest)
    there.reshape(len(seqs), widest)[:] = tables.table[seqs, :widest]
    return on_card
