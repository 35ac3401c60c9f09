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

    def put(self, numbers: NDArray[Any], size: int, filler: int = 0) -> Tensor:
        """These numbers, filled up to `size`, as they will be on the card."""
        there, on_card = self.room(size)
        count = len(numbers)
        there[:count] = numbers
        if count < size:
            there[count:] = filler
        return on_card

    def send(self) -> None:
        self._buffer.send(min(self._used, len(self._there)))


def aligned(count: int) -> int:
    """Sections begin at multiples of 16 bytes."""
    return -(-count // ALIGNED) * ALIGNED


NUM_FIELDS = 6
TOKEN, POS, SLOT, ROW, LAST, FIRST = range(NUM_FIELDS)
"""Of a decode step."""


SHORT_RUN = 8
"""Consecutive tokens of a sequence that attend one by one, as decodes do: a token and those proposed behind it."""
MOST_SINGLES = 512
"""Tokens of short runs in a step, unless more sequences than that run: each has a row of blocks of its own."""


@dataclass(frozen=True)
class SingleRuns:
    """Tokens that attend on their own: decodes, and proposed tokens behind them. Entry r of every tensor speaks of
    run r. All keys of a step are stored before any are read, so a token sees those before it in the same step.
    """

    row: Tensor
    """Which token it is; -1 is none."""
    last: Tensor
    """Its own cell, as an index into its row of blocks; -1 reads nothing."""
    first: Tensor
    """The first cell that its sequence holds."""
    tables: Tensor
    width: Tensor
    """Of the tables' rows: it differs from step to step, even for one graph."""


@dataclass(frozen=True)
class FarPart:
    """Cells far behind a run, which all its tokens see: they are read apart, see `add_far_attention`."""

    tokens: slice
    blocks: Tensor


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
    width: Tensor
    """As that of `SingleRuns`."""
    far: tuple[FarPart, ...] = ()


@dataclass(frozen=True)
class StepInputs:
    """On the card, once it was sent."""

    token: Tensor
    """Ids, or names of rows of the token table."""
    pos: Tensor
    slot: Tensor
    """Where keys and values go; -1 is nowhere."""
    singles: SingleRuns | None
    longs: LongRuns | None


FAR_ROWS = 1024
"""cuDNN plans each shape anew, in 60 ms: it computes multiples of so many tokens."""
FAR_CELLS = (8192, 4096)
"""And pieces of so many cells. What is left over is read like the rest."""
MOST_LONG_RUNS = 16
"""Prompts, or chunks of them, in a step that is run as a graph."""


@dataclass(frozen=True)
class PromptShape:
    """The shape of a graph for steps with prompt tokens: what a step may have at most. Lengths and tables are data."""

    num_tokens: int
    num_singles: int


@dataclass(frozen=True)
class _Sizes:
    """Entries that each part of a step's inputs takes."""

    tokens: int
    singles: int
    longs: int
    tiles: int
    long_width: int
    """Of the rows in the table of long runs. What follows that table would move with it."""

    @staticmethod
    def of_shape(shape: PromptShape, tile: int, widest: int) -> _Sizes:
        """All that fits into a graph; one more run, of no tokens, is what unused tiles compute."""
        num_tiles = shape.num_tokens // tile + MOST_LONG_RUNS
        return _Sizes(shape.num_tokens, shape.num_singles, MOST_LONG_RUNS + 1, num_tiles, widest)

    @property
    def total(self) -> int:
        """Numbers in all, but for the table of single runs."""
        sections = 16
        per_token, per_single, per_long, per_tile = 4, 3, 4 + self.long_width, 2
        return (
            per_token * self.tokens + per_single * self.singles + per_long * self.longs + per_tile * self.tiles
            + 2 + sections * ALIGNED
        )  # fmt: skip


def capacity(num_tokens: int, tables: BlockTables, num_running: int | None, tile: int, graph_tokens: int) -> int:
    """Numbers that the largest step sends; graphs hold up to `graph_tokens`."""
    sections, max_width = 20, int(tables.table.shape[1])
    most_runs = most_singles(num_tokens, num_running or len(tables.table))
    most_parts = most_runs + num_tokens // FAR_ROWS  # of runs that are cut in two
    eager = 12 * (num_tokens + most_parts) + most_parts * max_width + sections * ALIGNED
    graph = _Sizes.of_shape(PromptShape(graph_tokens, most_runs), tile, max_width).total + most_runs * max_width
    return max(eager, graph)


def most_singles(num_tokens: int, num_running: int) -> int:
    """Tokens of a step that may be read for one by one."""
    return min(num_tokens, max(num_running, MOST_SINGLES))


def _widest(tables: BlockTables, seqs: IntArray) -> int:
    """Blocks of the longest of these sequences."""
    return int(tables.num_blocks[seqs].max(initial=1))


class DecodeInputs:
    """The inputs of steps of at most so many tokens, each of which is read for on its own.

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
        tables, width = buffer.card[self._tables :], buffer.card[:1]
        singles = SingleRuns(row=row, last=last, first=first, tables=tables, width=width)
        self.on_card = StepInputs(token=token, pos=pos, slot=slot, singles=singles, longs=None)

    def send(self, tables: BlockTables, token: IntArray, pos: IntArray, slot: IntArray, lead: IntArray) -> None:
        """Write and send a step. It is filled up with tokens that read and leave nothing."""
        count, widest = len(token), _widest(tables, lead)
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


@dataclass(frozen=True)
class StepRuns:
    """The runs of a step: tokens that are read for one by one, and runs of prompts."""

    singles: Runs
    longs: Runs

    @staticmethod
    def of(lead: IntArray, pos: IntArray, most_singles: int = MOST_SINGLES) -> StepRuns:
        """Short runs are taken apart, as long as that makes at most `most_singles` tokens."""
        runs = runs_of(lead, pos)
        is_short = runs.count <= SHORT_RUN
        if runs.count[is_short].sum() > most_singles:
            is_short = runs.count == 1
        return StepRuns(_one_by_one(runs.take(np.flatnonzero(is_short))), runs.take(np.flatnonzero(~is_short)))

    @property
    def num_singles(self) -> int:
        return len(self.singles.seq)

    @property
    def num_longs(self) -> int:
        return len(self.longs.seq)


def _one_by_one(runs: Runs) -> Runs:
    """A run for each token."""
    if (runs.count == 1).all():
        return runs
    offset = np.arange(runs.count.sum()) - np.repeat(np.cumsum(runs.count) - runs.count, runs.count)
    begin = np.repeat(runs.begin, runs.count) + offset
    return Runs(np.repeat(runs.seq, runs.count), runs.tokens, begin, np.ones_like(begin))


def mixed_inputs(
    buffer: InputBuffer,
    tables: BlockTables,
    token: IntArray,
    pos: IntArray,
    slot: IntArray,
    runs: StepRuns,
    tile: int,
    shape: PromptShape | None = None,
    *,
    reads_far: bool = False,
) -> StepInputs:
    """Any tokens in any order; `tile` tokens of a long run are computed together.

    With `reads_far`, what lies far behind long runs is left out of them: it is to be read apart.

    With a shape, everything lies where any step of that shape has it. It is filled up with tokens that leave nothing
    and with runs that read nothing.
    """
    sections = Sections(buffer)
    longs = cut_far(runs.longs, pos, tables) if reads_far else CutRuns(runs.longs, np.zeros_like(runs.longs.begin))
    tiles = _tiles(longs.runs, pos, tables, tile)
    if shape is not None:
        sizes = _Sizes.of_shape(shape, tile, int(tables.table.shape[1]))
    else:
        sizes = _Sizes(
            len(token), runs.num_singles, len(longs.runs.seq), len(tiles.run), _widest(tables, runs.longs.seq)
        )  # fmt: skip
    widths = _widest(tables, runs.singles.seq), sizes.long_width
    single_width, long_width = (sections.put(np.array([width]), 1) for width in widths)
    inputs = StepInputs(
        token=sections.put(token, sizes.tokens),
        pos=sections.put(pos, sizes.tokens),
        slot=sections.put(slot, sizes.tokens, filler=-1),
        longs=_long_runs(sections, tables, longs, tiles, sizes, long_width) if sizes.longs else None,
        singles=_single_runs(sections, tables, runs.singles, pos, sizes, single_width) if sizes.singles else None,
    )
    sections.send()
    return inputs


def _single_runs(
    sections: Sections, tables: BlockTables, runs: Runs, pos: IntArray, sizes: _Sizes, width: Tensor
) -> SingleRuns:
    row = runs.tokens[runs.begin]
    base, size = tables.base[runs.seq], sizes.singles
    return SingleRuns(
        row=sections.put(row, size, filler=-1),
        last=sections.put(pos[row] - base, size, filler=-1),
        first=sections.put(tables.start[runs.seq] - base, size),
        # A graph keeps the address of the table: an empty tensor would have none.
        tables=_put_tables(sections, tables, runs.seq, _widest(tables, runs.seq), max(1, len(runs.seq))),
        width=width,
    )


@dataclass(frozen=True)
class CutRuns:
    """Runs, and how many cells far behind each are read apart."""

    runs: Runs
    far: NDArray[np.int64]


def cut_far(runs: Runs, pos: IntArray, tables: BlockTables) -> CutRuns:
    """Cut runs with much behind them in two, so that the first part is of a size whose far cells can be read apart."""
    parts: list[tuple[int, int, int, int]] = []
    first_pos = pos[runs.tokens[runs.begin]]
    for seq, begin, count, before in zip(runs.seq, runs.begin, runs.count, first_pos, strict=True):
        tokens = runs.tokens[begin : begin + count]
        is_plain = tables.start[seq] == tables.base[seq] == 0 and tokens[-1] - tokens[0] == count - 1
        num_far = before // FAR_CELLS[-1] * FAR_CELLS[-1] if is_plain and count >= FAR_ROWS else 0
        head = count // FAR_ROWS * FAR_ROWS if num_far else count
        parts.append((seq, begin, head, num_far))
        if head < count:
            parts.append((seq, begin + head, count - head, 0))
    seqs, begins, counts, far = np.array(parts, dtype=np.int64).reshape(-1, 4).T
    return CutRuns(Runs(seqs.astype(np.int32), runs.tokens, begins, counts), far)


def _long_runs(
    sections: Sections, tables: BlockTables, cut: CutRuns, tiles: _Tiles, sizes: _Sizes, width: Tensor
) -> LongRuns:
    """An unused tile is one of the last run, which has no tokens then."""
    size, runs = sizes.longs, cut.runs
    on_card = _put_tables(sections, tables, runs.seq, sizes.long_width, size)
    far = []
    for run in np.flatnonzero(cut.far):
        row = int(runs.tokens[runs.begin[run]])
        begin = int(run) * sizes.long_width
        blocks = on_card[begin : begin + int(cut.far[run]) // tables.block_size]
        far.append(FarPart(slice(row, row + int(runs.count[run])), blocks))
    return LongRuns(
        order=sections.put(runs.tokens, sizes.tokens),
        begin=sections.put(runs.begin, size),
        count=sections.put(runs.count, size),
        index=sections.put(tiles.index, size),
        first=sections.put(np.maximum(tables.start[runs.seq] - tables.base[runs.seq], cut.far), size),
        tile_run=sections.put(tiles.run, sizes.tiles, filler=size - 1),
        tile_offset=sections.put(tiles.offset, sizes.tiles),
        tables=on_card,
        width=width,
        far=tuple(far),
    )


@dataclass(frozen=True)
class _Tiles:
    index: NDArray[np.int64]
    """The cell of each run's first token, as an index into its row of blocks."""
    run: NDArray[np.intp]
    offset: NDArray[np.intp]


def _tiles(runs: Runs, pos: IntArray, tables: BlockTables, tile: int) -> _Tiles:
    """Every tile of every run, those that read most first: so none is left over when the card runs dry."""
    index = pos[runs.tokens[runs.begin]] - tables.base[runs.seq]
    num_tiles = -(-runs.count // tile)
    run = np.repeat(np.arange(len(runs.count)), num_tiles)
    offset = (np.arange(len(run)) - np.repeat(np.cumsum(num_tiles) - num_tiles, num_tiles)) * tile
    longest_first = np.argsort(-(index[run] + offset), kind="stable")
    return _Tiles(index, run[longest_first], offset[longest_first])


def _put_tables(sections: Sections, tables: BlockTables, seqs: IntArray, width: int, num_rows: int) -> Tensor:
    """Rows of the block tables, with room for `num_rows` of them."""
    there, on_card = sections.room(num_rows * width)
    there[: len(seqs) * width].reshape(len(seqs), width)[:] = tables.table[seqs, :width]
    return on_card
