"""`StepInputs`: what the kernels of a step are told, made from a batch with vectorised numpy and sent in one piece."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tokenmill.backends.torch.attention import Runs, runs_of
from tokenmill.backends.torch.cuda.transfer import ALIGNED, InputBuffer, Sections, aligned
from tokenmill.contract import IntArray
from tokenmill.kv.tables import BlockTables

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
