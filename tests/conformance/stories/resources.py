"""Room: running out of it, giving it back, state bytes."""

from __future__ import annotations

from dataclasses import replace

from tests.conformance.story import SMALL, fresh, prefill, proves, refused, same
from tests.conformance.subjects import Subject
from tokenmill.contract import BatchBuilder, Output
from tokenmill.errors import (
    InvalidOperation,
    OutOfKV,
    Unsupported,
)


@proves("R25", "R26")
def out_of_kv_is_an_error_and_changes_nothing(subject: Subject) -> None:
    with subject.make(SMALL) as backend:
        prefill(backend, list(range(1, 61)), seq=0)
        batch = BatchBuilder().add(9, 60, 0, Output.LOGITS).add_run([1, 2, 3, 4, 5], 0, 1).build()
        assert backend.kv.needed(batch) > backend.kv.free()
        before = backend.kv.stats()
        saying = f"{backend.kv.needed(batch)} cells needed, {backend.kv.free()} free"
        with refused(OutOfKV, saying):
            backend.decode(batch)
        assert backend.kv.stats() == before
        one = BatchBuilder().add(9, 60, 0, Output.LOGITS).build()
        assert backend.kv.needed(one) <= backend.kv.free()
        backend.decode(one)


@proves("R26")
def nothing_leaks(subject: Subject) -> None:
    with subject.make(SMALL) as backend:
        for round_ in range(30):
            prefill(backend, [1, 2, 3, 4, 5, 6, round_], seq=0)
            backend.kv.seq_cp(0, 1, 0, 6)
            prefill(backend, [9, 9, 9], seq=1, start=6)
            backend.kv.seq_rm(1, 7)
            backend.kv.seq_rm(0)
            backend.kv.seq_rm(1)
        stats = backend.kv.stats()
        assert (stats.free_cells, stats.held_cells, stats.num_seqs) == (stats.num_cells, 0, 0)


@proves("R26")
def statistics_count_shared_cells_once(subject: Subject) -> None:
    with subject.make(SMALL) as backend:
        prefill(backend, [1, 2, 3, 4, 5])
        backend.kv.seq_cp(0, 1)
        backend.kv.seq_cp(0, 2, 0, 3)
        stats = backend.kv.stats()
        assert (stats.held_cells, stats.referenced_cells, stats.num_seqs) == (5, 13, 3)


@proves("R22")
def a_sequence_survives_a_trip_through_bytes(subject: Subject) -> None:
    with subject.make(SMALL) as backend, subject.make(SMALL) as other:
        if not backend.capabilities.state_bytes:
            with refused(Unsupported):
                backend.kv.export(0)
            return
        prefill(backend, [1, 2, 3, 4, 5, 6, 7])
        state = backend.kv.export(0)
        prefill(other, [60, 61])
        other.kv.import_(3, state)
        assert same(subject, prefill(other, [8], seq=3, start=7), fresh(subject, [1, 2, 3, 4, 5, 6, 7, 8]))
        with refused(InvalidOperation, "not empty"):
            other.kv.import_(3, state)
        before = other.kv.stats()
        flipped = bytearray(state)
        flipped[-3] ^= 4
        for damaged in (b"", state[:-1], state[:5], b"\xff" * len(state), bytes(flipped), other.kv.export(5)):
            with refused(InvalidOperation):
                other.kv.import_(4, damaged)
        assert other.kv.stats() == before
        prefill(other, [1] * 48, seq=5)
        with refused(OutOfKV):
            other.kv.import_(4, state)


@proves("R22", needs_shift=True)
def a_trip_through_bytes_takes_pending_shifts_along(subject: Subject) -> None:
    with subject.make(SMALL) as backend:
        if not backend.capabilities.state_bytes or not backend.capabilities.shift:
            return
        prefill(backend, list(range(1, 8)))
        backend.kv.seq_rm(0, -1, 2)
        backend.kv.seq_add(0, -1, -1, -2)
        state = backend.kv.export(0)
        backend.kv.import_(1, state)
        moved = prefill(backend, [9], seq=1, start=5)
        backend.kv.seq_rm(0, -1, 1)
        backend.kv.seq_add(0, -1, -1, -1)
        backend.kv.seq_rm(0)
        backend.kv.import_(0, state)
        again = prefill(backend, [9], start=5)
    assert same(subject, moved, again)
    if subject.tolerance == 0:
        assert same(subject, moved, fresh(subject, [3, 4, 5, 6, 7, 9]))


@proves("R22")
def state_bytes_are_refused_where_there_are_none(subject: Subject) -> None:
    with subject.make(replace(SMALL, state_bytes=False)) as backend:
        if backend.capabilities.state_bytes:
            return
        prefill(backend, [1, 2])
        with refused(Unsupported):
            backend.kv.export(0)
        with refused(Unsupported):
            backend.kv.import_(1, b"")
