"""`StepInputs`: what the kernels of a step are told, made from a batch with vectorised numpy and sent in one piece."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tokenmill.backends.torch.attention import Runs, runs_of
from tokenmill.backends.torch.cuda.transfer import ALIGNED, InputBuffer
from tokenmill.core import IntArray
from tokenmill.core.tables import BlockTables


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


def capacity(num_tokens: int, tables: BlockTables) -> int:
    """Numbers that the largest step sends."""
    sections = 20
    most_runs = min(num_tokens, len(tables.table))
    return 12 * (num_tokens + most_runs) + most_runs * int(tables.table.shape[1]) + sections * ALIGNED


def decode_inputs(
    buffer: InputBuffer, tables: BlockTables, token: IntArray, pos: IntArray, slot: IntArray, lead: IntArray, size: int
) -> StepInputs:
    """One token each of some sequences, filled up to `size` with tokens that read and leave nothing."""
    buffer.begin()
    widest = int(tables.num_blocks[lead].max())
    width = buffer.put(np.array([widest]))
    base = tables.base[lead]
    inputs = StepInputs(
        token=buffer.put(token, size),
        pos=buffer.put(pos, size),
        slot=buffer.put(slot, size, filler=-1),
        width=width,
        singles=SingleRuns(
            row=buffer.put(np.arange(size)),
            last=buffer.put(pos - base, size, filler=-1),
            first=buffer.put(tables.start[lead] - base, size),
            tables=_put_tables(buffer, tables, lead, widest),
        ),
        longs=None,
    )
    buffer.send()
    return inputs


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
    buffer.begin()
    runs = runs_of(lead, pos)
    is_single = runs.count == 1
    singles, longs = runs.take(np.flatnonzero(is_single)), runs.take(np.flatnonzero(~is_single))
    widest = int(tables.num_blocks[runs.seq].max())
    inputs = StepInputs(
        width=buffer.put(np.array([widest])),
        token=buffer.put(token),
        pos=buffer.put(pos),
        slot=buffer.put(slot),
        singles=_single_runs(buffer, tables, singles, pos, widest) if len(singles.seq) else None,
        longs=_long_runs(buffer, tables, longs, pos, widest, tile) if len(longs.seq) else None,
    )
    buffer.send()
    return inputs


def _single_runs(buffer: InputBuffer, tables: BlockTables, runs: Runs, pos: IntArray, widest: int) -> SingleRuns:
    row = runs.tokens[runs.begin]
    base = tables.base[runs.seq]
    return SingleRuns(
        row=buffer.put(row),
        last=buffer.put(pos[row] - base),
        first=buffer.put(tables.start[runs.seq] - base),
        tables=_put_tables(buffer, tables, runs.seq, widest),
    )


def _long_runs(buffer: InputBuffer, tables: BlockTables, runs: Runs, pos: IntArray, widest: int, tile: int) -> LongRuns:
    base = tables.base[runs.seq]
    index = pos[runs.tokens[runs.begin]] - base
    tile_run, tile_offset = _tiles(runs.count, index, tile)
    return LongRuns(
        order=buffer.put(runs.tokens),
        begin=buffer.put(runs.begin),
        count=buffer.put(runs.count),
        index=buffer.put(index),
        first=buffer.put(tables.start[runs.seq] - base),
        tile_run=buffer.put(tile_run),
        tile_offset=buffer.put(tile_offset),
        tables=_put_tables(buffer, tables, runs.seq, widest),
    )


def _tiles(count: NDArray[np.int64], index: NDArray[np.int64], tile: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Every tile of every run, those that read most first: so none is left over when the card runs dry."""
    num_tiles = -(-count // tile)
    run = np.repeat(np.arange(len(count)), num_tiles)
    offset = (np.arange(len(run)) - np.repeat(np.cumsum(num_tiles) - num_tiles, num_tiles)) * tile
    longest_first = np.argsort(-(index[run] + offset), kind="stable")
    return run[longest_first], offset[longest_first]


def _put_tables(buffer: InputBuffer, tables: BlockTables, seqs: IntArray, widest: int) -> Tensor:
    there, on_card = buffer.section(len(seqs) * widest)
    there.reshape(len(seqs), widest)[:] = tables.table[seqs, :widest]
    return on_card
