"""`StreamedContext`: sequences that compute in memory of their own, so that none pays for the others' cells.

In unified memory llama.cpp's attention goes over the cells of all sequences for each token, and skips those of others
one by one. Where there is room for the whole context of every sequence that runs, each gets a stream instead. llama.cpp
ties a sequence to its stream and copies between streams only as a whole; here, sequences are numbered as the contract
likes, and lie

- in a stream, if they have computed of late, or
- as bytes, if they were copied and did not go on yet, or had to leave their stream to another.

llama.cpp computes sequences together only if their streams lie side by side, so those that run are moved together when
they have been apart for some steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tokenmill.backends.llamacpp.native import NO_ROWS, NativeContext
from tokenmill.contract import ANY, IntArray
from tokenmill.contract.backend import FloatArray
from tokenmill.errors import ForwardFailed

PATIENCE = 8
"""Steps that sequences compute apart before they are moved together: it costs about as much as it saves in these."""
CELLS_STEP = 256
"""llama.cpp makes streams of a multiple of this many cells."""


def stream_cells(max_context: int) -> int:
    """Cells of a stream: enough for the longest sequence."""
    return -(-max_context // CELLS_STEP) * CELLS_STEP


@dataclass(frozen=True)
class Kept:
    """A sequence as bytes: of those that a stream held, positions `begin` to `end`."""

    state: bytes
    begin: int
    end: int
    is_whole: bool = True
    """Are these all positions that the bytes have?"""

    def cut(self, begin: int, end: int) -> Kept:
        is_whole = self.is_whole and begin <= self.begin and end >= self.end
        return Kept(self.state, max(begin, self.begin), min(end, self.end), is_whole)


@dataclass(frozen=True)
class Crowd:
    """Sequences whose streams lie side by side, one token each: what a decode step finds as the one before left it."""

    num_moves: int
    """Sequences had been moved so often when it was made."""
    seqs: IntArray
    streams: list[int]
    order: IntArray
    """The tokens by stream, which is how llama.cpp takes them."""
    named: IntArray
    """[tokens, 1]: their streams, in that order."""
    back: IntArray | None
    """The rows that llama.cpp gives by token; None where they are in order."""


class StreamedContext:
    """A context with one stream for each of its own sequences, behind the interface of `NativeContext`."""

    def __init__(self, native: NativeContext, num_streams: int, patience: int = PATIENCE) -> None:
        self._native = native
        self._owner: list[int | None] = [None] * num_streams
        self._last_used = [0] * num_streams
        self._stream_of: dict[int, int] = {}
        self._kept: dict[int, Kept] = {}
        self._has_shifts = False
        """Are there shifts that llama.cpp will carry out when it computes next?"""
        self._patience = patience
        self._num_steps = 0
        self._num_apart = 0
        """Steps in a row whose sequences did not lie side by side."""
        self._num_moves = 0
        self._crowd: Crowd | None = None
        self._rows: FloatArray | None = None
        self._row_buffer = NO_ROWS
        self._hidden: FloatArray = NO_ROWS
        self._gives_hidden = False
        self.n_batch = native.n_batch

    @property
    def num_calls(self) -> int:
        return self._native.num_calls

    # -- computing ----------------------------------------------------------------------------------------------------

    def decode(self, token: IntArray, pos: IntArray, seq_ids: IntArray, wanted: NDArray[np.uint8]) -> None:
        """As `NativeContext.decode`. A token of several sequences is computed once for each of them."""
        crowd = self._same_crowd(seq_ids, wanted)
        if crowd is not None:
            self._decode_crowd(crowd, token, pos, wanted)
            return
        index, rank = (seq_ids >= 0).nonzero()
        seqs = seq_ids[index, rank]
        gives_row = np.where(rank == 0, wanted[index], 0).astype(np.uint8)
        calls = list(self._calls(seqs))
        self._rows, rows, hidden = None, [], []
        for places in calls:
            streams = self._place(seqs[places])
            order = places[np.argsort(streams, kind="stable")]
            source = index[order]
            named = np.sort(streams, kind="stable")[:, None]
            given = np.ones(len(order), dtype=np.uint8) if self._gives_hidden else gives_row[order]
            self._native.decode(token[source], pos[source], named, given)
            self._has_shifts = False
            if len(calls) == 1 and seq_ids.shape[1] == 1:
                self._note_crowd(seqs, streams)
            if len(calls) == 1 and len(seqs) == len(seq_ids) and (order[1:] > order[:-1]).all():
                return  # rows are where llama.cpp has them
            ranked, is_ours = order[given > 0], gives_row[order][given > 0] > 0
            rows.append((ranked[is_ours], self._native.logits(len(ranked))[is_ours]))
            if self._gives_hidden:
                hidden.append((ranked[is_ours], self._native.hidden(len(ranked))[is_ours]))
        self._rows = _in_order(rows)
        self._hidden = _in_order(hidden) if hidden else NO_ROWS

    def _same_crowd(self, seq_ids: IntArray, wanted: NDArray[np.uint8]) -> Crowd | None:
        """The last step's, if these are its sequences, where they were, and a row is wanted of each."""
        crowd = self._crowd
        if crowd is None or crowd.num_moves != self._num_moves or self._gives_hidden:
            return None
        is_same = seq_ids.shape == crowd.named.shape and bool((seq_ids[:, 0] == crowd.seqs).all())
        return crowd if is_same and bool(wanted.all()) else None

    def _note_crowd(self, seqs: IntArray, streams: IntArray) -> None:
        self._crowd, all_streams = None, streams.tolist()
        if self._num_apart or len(set(all_streams)) < len(all_streams):
            return
        order = np.argsort(streams).astype(np.int32)
        back = None if (order[1:] > order[:-1]).all() else np.argsort(order).astype(np.int32)
        self._crowd = Crowd(self._num_moves, seqs.copy(), all_streams, order, streams[order][:, None], back)

    def _decode_crowd(self, crowd: Crowd, token: IntArray, pos: IntArray, wanted: NDArray[np.uint8]) -> None:
        self._num_steps += 1
        for stream in crowd.streams:
            self._last_used[stream] = self._num_steps
        self._rows = None
        if crowd.back is None:
            self._native.decode(token, pos, crowd.named, wanted)
        else:
            self._native.decode(token[crowd.order], pos[crowd.order], crowd.named, wanted)
            rows = self._native.logits(len(token))
            if self._row_buffer.shape != rows.shape:
                self._row_buffer = np.empty_like(rows)
            self._rows = rows.take(crowd.back, axis=0, out=self._row_buffer, mode="clip")
        self._has_shifts = False

    def _calls(self, seqs: IntArray) -> Iterator[IntArray]:
        """Which tokens go into one call: not more than it takes, and of no more sequences than there are streams."""
        if len(seqs) <= min(len(self._owner), self._native.n_batch):
            yield np.arange(len(seqs), dtype=np.int32)
            return
        _, first, which = np.unique(seqs, return_index=True, return_inverse=True)
        group = np.argsort(np.argsort(first))[which] // len(self._owner)  # sequences in the order in which they come
        for number in range(int(group.max()) + 1):
            places = (group == number).nonzero()[0]
            for begin in range(0, len(places), self._native.n_batch):
                yield places[begin : begin + self._native.n_batch]

    def give_hidden(self, gives: bool) -> None:
        self._gives_hidden = gives
        self._native.give_hidden(gives)

    def logits(self, num_rows: int) -> FloatArray:
        return self._native.logits(num_rows) if self._rows is None else self._rows

    def hidden(self, num_rows: int) -> FloatArray:
        return self._native.hidden(num_rows) if self._rows is None else self._hidden

    # -- where sequences are ------------------------------------------------------------------------------------------

    def _place(self, seqs: IntArray) -> IntArray:
        """Bring sequences into streams; each token's stream."""
        self._num_steps += 1
        running = list(dict.fromkeys(seqs.tolist()))
        for seq in running:
            if seq in self._stream_of:
                self._last_used[self._stream_of[seq]] = self._num_steps
        for seq in running:
            self._bring_in(seq)
        self._bring_together(running)
        return np.array([self._stream_of[seq] for seq in seqs.tolist()], dtype=np.int32)

    def _bring_in(self, seq: int) -> int:
        """The stream of a sequence; it gets one if it has none."""
        stream = self._stream_of.get(seq)
        if stream is None:
            stream = self._vacant()
            kept = self._kept.pop(seq, None)
            if kept is not None:
                self._fill(stream, kept)
            self._settle_in(seq, stream)
        return stream

    def _vacant(self) -> int:
        """A stream that nobody has: the first free one, or that of the sequence that has not computed for longest."""
        if None in self._owner:
            return self._owner.index(None)
        stream = min(range(len(self._owner)), key=self._last_used.__getitem__)
        seq = self._owner[stream]
        assert seq is not None, "no stream is free"
        self._kept[seq] = self._read(stream)
        self._leave(seq)
        return stream

    def cleanse(self) -> None:
        """Let no stream have anything of those that were in it before."""
        for seq, stream in list(self._stream_of.items()):
            self._kept[seq] = self._read(stream)
            self._leave(seq)
        self._native.clear(data=True)

    def _settle_in(self, seq: int, stream: int) -> None:
        self._num_moves += 1
        self._stream_of[seq], self._owner[stream] = stream, seq
        self._last_used[stream] = self._num_steps

    def _leave(self, seq: int) -> None:
        self._num_moves += 1
        stream = self._stream_of.pop(seq)
        self._native.seq_rm(stream, ANY, ANY)
        self._owner[stream] = None

    def _read(self, stream: int) -> Kept:
        if self._has_shifts:
            self._shift_now(stream)
        begin, end = self._native.seq_pos_min(stream), self._native.seq_pos_max(stream) + 1
        return Kept(self._native.read_state(stream) if end else b"", begin, end)

    def _shift_now(self, stream: int) -> None:
        """llama.cpp shifts before it computes, never before it writes bytes: let it compute something."""
        at = self._native.seq_pos_max(stream) + 1
        zero, wanted = np.zeros(1, dtype=np.int32), np.ones(1, dtype=np.uint8)
        self._native.decode(zero, zero + at, np.full((1, 1), stream, dtype=np.int32), wanted)
        self._native.seq_rm(stream, at, ANY)
        self._has_shifts = False

    def _fill(self, stream: int, kept: Kept) -> None:
        if kept.end == 0:
            return
        refusal = self._native.write_state(stream, memoryview(kept.state))
        if refusal:
            raise ForwardFailed(f"llama.cpp rejected a sequence that it had exported: {refusal}", fatal=True)
        self._native.seq_rm(stream, kept.end, ANY)
        self._native.seq_rm(stream, ANY, kept.begin)

    def _bring_together(self, running: list[int]) -> None:
        """Move sequences that run side by side, if they have not been for some steps."""
        streams = sorted(self._stream_of[seq] for seq in running)
        first, width = streams[0], len(streams)
        self._num_apart = 0 if streams[-1] - first + 1 == width else self._num_apart + 1
        if self._num_apart <= self._patience:
            return
        self._num_apart = 0
        starts = range(len(self._owner) - width + 1)
        start = max(starts, key=lambda at: sum(at <= stream < at + width for stream in streams))
        there = [stream for stream in range(start, start + width) if stream not in streams]
        away = [stream for stream in streams if not start <= stream < start + width]
        for one, other in zip(away, there, strict=True):
            self._exchange(one, other)

    def _exchange(self, one: int, other: int) -> None:
        held = [(self._owner[stream], stream) for stream in (one, other)]
        states = {seq: self._read(stream) for seq, stream in held if seq is not None}
        for seq in states:
            self._leave(seq)
        for (owner, _), stream in zip(held, (other, one), strict=True):
            if owner is not None:
                self._fill(stream, states[owner])
                self._settle_in(owner, stream)

    # -- sequences ----------------------------------------------------------------------------------------------------

    @property
    def can_shift(self) -> bool:
        return self._native.can_shift

    def seq_rm(self, seq: int, p0: int, p1: int) -> bool:
        """Of a sequence's head or tail, or all of it."""
        kept = self._kept.get(seq)
        if kept is not None:
            is_head = p0 <= kept.begin
            left = kept.cut(kept.end if p1 < 0 else p1, kept.end) if is_head else kept.cut(kept.begin, p0)
            self._kept[seq] = left
            if left.begin >= left.end:
                del self._kept[seq]
        elif seq in self._stream_of:
            stream = self._stream_of[seq]
            if not self._native.seq_rm(stream, p0, p1):
                return False
            if self._native.seq_pos_max(stream) < 0:
                self._leave(seq)
        return True

    def seq_cp(self, src: int, dst: int, p0: int, p1: int) -> None:
        kept = self._kept[src] if src in self._kept else self._read(self._stream_of[src])
        self._kept[dst] = kept.cut(p0, kept.end if p1 < 0 else p1)

    def seq_add(self, seq: int, p0: int, p1: int, delta: int) -> None:
        self._native.seq_add(self._bring_in(seq), p0, p1, delta)
        self._has_shifts = True

    def seq_keep(self, seq: int) -> None:
        for other in [other for other in (*self._stream_of, *self._kept) if other != seq]:
            self.seq_rm(other, ANY, ANY)

    def seq_pos_min(self, seq: int) -> int:
        if seq in self._kept:
            return self._kept[seq].begin
        return self._native.seq_pos_min(self._stream_of[seq]) if seq in self._stream_of else -1

    def seq_pos_max(self, seq: int) -> int:
        if seq in self._kept:
            return self._kept[seq].end - 1
        return self._native.seq_pos_max(self._stream_of[seq]) if seq in self._stream_of else -1

    def clear(self) -> None:
        self._num_moves += 1
        self._native.clear()
        self._owner = [None] * len(self._owner)
        self._stream_of.clear()
        self._kept.clear()

    def read_state(self, seq: int) -> bytes:
        kept = self._kept.get(seq)
        return kept.state if kept is not None and kept.is_whole else self._read(self._bring_in(seq)).state

    def write_state(self, seq: int, state: memoryview) -> str:
        refusal = self._native.write_state(self._bring_in(seq), state)
        if refusal:
            self._leave(seq)
        return refusal

    def close(self) -> None:
        self._native.close()


AnyContext = NativeContext | StreamedContext


def _in_order(parts: list[tuple[IntArray, FloatArray]]) -> FloatArray:
    """Rows of several calls, by the place of their tokens in the batch."""
    places = np.concatenate([place for place, _ in parts])
    rows: FloatArray = np.concatenate([row for _, row in parts])[np.argsort(places)]
    return rows
