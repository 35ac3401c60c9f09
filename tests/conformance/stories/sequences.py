"""Sequences: sharing, rewinding, moving, windows."""

from __future__ import annotations

from dataclasses import replace

from tests.conformance.story import SMALL, fresh, prefill, proves, refused, same
from tests.conformance.subjects import Subject
from tokenmill.contract import BatchBuilder, Output
from tokenmill.errors import (
    InvalidBatch,
    InvalidOperation,
    Unsupported,
)


@proves("R23")
def a_token_in_two_sequences_is_computed_once_and_seen_by_both(subject: Subject) -> None:
    with subject.make(SMALL) as backend:
        prefill(backend, [1, 2, 3, 4, 5], seq=(2, 6))
        assert backend.kv.stats().held_cells == 5
        batch = BatchBuilder().add(7, 5, 2, Output.LOGITS).add(8, 5, 6, Output.LOGITS).build()
        output = backend.decode(batch)
    assert same(subject, output.logits[0], fresh(subject, [1, 2, 3, 4, 5, 7]))
    assert same(subject, output.logits[1], fresh(subject, [1, 2, 3, 4, 5, 8]))


@proves("R23")
def sequences_may_part_inside_one_batch(subject: Subject) -> None:
    builder = BatchBuilder().add_run([1, 2, 3], 0, (0, 1))
    builder.add(7, 3, 0, Output.LOGITS).add(8, 3, 1, Output.LOGITS)
    with subject.make(SMALL) as backend:
        output = backend.decode(builder.build())
    assert same(subject, output.logits[1], fresh(subject, [1, 2, 3, 7]))
    assert same(subject, output.logits[2], fresh(subject, [1, 2, 3, 8]))


@proves("R22")
def seq_cp_shares_a_prefix_and_copies_nothing(subject: Subject) -> None:
    with subject.make(SMALL) as backend:
        prefill(backend, [1, 2, 3, 4, 5, 6], seq=0)
        free = backend.kv.free()
        backend.kv.seq_cp(0, 1, 0, 5)
        assert backend.kv.free() == free
        assert (backend.kv.seq_pos_min(1), backend.kv.seq_pos_max(1)) == (0, 4)
        forked = prefill(backend, [9], seq=1, start=5)
        original = prefill(backend, [7], seq=0, start=6)
    assert same(subject, forked, fresh(subject, [1, 2, 3, 4, 5, 9]))
    assert same(subject, original, fresh(subject, [1, 2, 3, 4, 5, 6, 7]))


@proves("R22", "R25")
def seq_cp_wants_an_empty_target(subject: Subject) -> None:
    with subject.make(SMALL) as backend:
        prefill(backend, [1, 2], seq=0)
        prefill(backend, [3, 4], seq=1)
        with refused(InvalidOperation, "not empty"):
            backend.kv.seq_cp(0, 1)
        with refused(InvalidOperation, "outside 0 to 7"):
            backend.kv.seq_cp(0, 8)
        backend.kv.seq_cp(0, 0)


@proves("R22")
def seq_rm_rewinds_and_frees(subject: Subject) -> None:
    with subject.make(SMALL) as backend:
        prefill(backend, list(range(1, 13)))
        free = backend.kv.free()
        assert backend.kv.seq_rm(0, 5)
        assert backend.kv.seq_pos_max(0) == 4
        assert backend.kv.free() > free
        again = prefill(backend, [40, 41], start=5)
        assert backend.kv.seq_rm(0)
        assert backend.kv.free() == backend.kv.stats().num_cells
    assert same(subject, again, fresh(subject, [1, 2, 3, 4, 5, 40, 41]))


@proves("R22")
def a_hole_is_refused(subject: Subject) -> None:
    with subject.make(SMALL) as backend:
        prefill(backend, list(range(1, 11)))
        with refused(InvalidOperation, "hole"):
            backend.kv.seq_rm(0, 3, 6)
        with refused(InvalidOperation, "hole"):
            backend.kv.seq_rm(-1, 3, 6)
        assert backend.kv.seq_pos_max(0) == 9


@proves("R22")
def seq_rm_of_any_sequence_and_seq_keep(subject: Subject) -> None:
    with subject.make(SMALL) as backend:
        for seq in range(3):
            prefill(backend, [seq + 1] * (4 + seq), seq=seq)
        assert backend.kv.seq_rm(-1, 5)
        assert [backend.kv.seq_pos_max(seq) for seq in range(4)] == [3, 4, 4, -1]
        backend.kv.seq_keep(1)
        assert [backend.kv.seq_pos_max(seq) for seq in range(4)] == [-1, 4, -1, -1]
        backend.kv.clear()
        assert backend.kv.stats().num_seqs == 0


@proves("R22", needs_shift=True)
def a_head_is_removed_and_the_rest_moves_down(subject: Subject) -> None:
    """What sliding a conversation does; the model sees the kept tokens at their new positions."""
    with subject.make(SMALL) as backend:
        prefill(backend, list(range(1, 11)))
        assert backend.kv.seq_rm(0, -1, 3)
        assert (backend.kv.seq_pos_min(0), backend.kv.seq_pos_max(0)) == (3, 9)
        backend.kv.seq_add(0, 3, -1, -3)
        assert (backend.kv.seq_pos_min(0), backend.kv.seq_pos_max(0)) == (0, 6)
        moved = prefill(backend, [50], start=7)
    if subject.tolerance == 0:  # a real model's later keys remember the removed tokens
        assert same(subject, moved, fresh(subject, [*range(4, 11), 50]))


@proves("R22", needs_shift=True)
def a_moved_sequence_can_be_shared_and_filled_to_the_last_position(subject: Subject) -> None:
    """After a head cut inside a block its cells and its positions no longer begin together."""
    with subject.make(replace(SMALL, max_context=16)) as backend:
        prefill(backend, list(range(1, 11)))
        backend.kv.seq_rm(0, -1, 3)
        backend.kv.seq_add(0, -1, -1, -3)
        backend.kv.seq_cp(0, 1)
        both = BatchBuilder().add(30, 7, 0, Output.LOGITS).add(31, 7, 1, Output.LOGITS).build()
        output = backend.decode(both)
        last = prefill(backend, list(range(40, 48)), start=8)
        assert backend.kv.seq_pos_max(0) == 15
        backend.kv.seq_rm(1)
        with refused(InvalidOperation, "exceeds positions"):
            backend.kv.seq_add(0, -1, -1, 2**31)
    if subject.tolerance == 0:
        assert same(subject, output.logits[0], fresh(subject, [*range(4, 11), 30]))
        assert same(subject, output.logits[1], fresh(subject, [*range(4, 11), 31]))
        assert same(subject, last, fresh(subject, [*range(4, 11), 30, *range(40, 48)]))


@proves("R22", needs_shift=True)
def several_sequences_may_be_moved_before_the_next_forward(subject: Subject) -> None:
    with subject.make(SMALL) as backend:
        for seq in (0, 1, 0):
            start = backend.kv.seq_pos_max(seq) + 1
            prefill(backend, [10 * seq + pos for pos in range(start, start + 6)], seq=seq, start=start)
        for seq, cut in ((0, 1), (1, 2), (0, 3)):
            backend.kv.seq_rm(seq, -1, cut)
            backend.kv.seq_add(seq, -1, -1, -cut)
        output = backend.decode(BatchBuilder().add(50, 8, 0, Output.LOGITS).add(51, 4, 1, Output.LOGITS).build())
    if subject.tolerance == 0:
        assert same(subject, output.logits[0], fresh(subject, [*range(4, 12), 50]))
        assert same(subject, output.logits[1], fresh(subject, [*range(12, 16), 51]))


@proves("R22", needs_shift=True)
def a_sequence_may_be_moved_up_to_the_last_position(subject: Subject) -> None:
    with subject.make(SMALL) as backend:
        prefill(backend, [1, 2, 3])
        backend.kv.seq_rm(0, -1, 1)
        backend.kv.seq_add(0, -1, -1, 61)
        assert (backend.kv.seq_pos_min(0), backend.kv.seq_pos_max(0)) == (62, 63)


@proves("R23")
def only_sequences_with_the_same_cells_may_share_a_token(subject: Subject) -> None:
    with subject.make(SMALL) as backend:
        prefill(backend, [1, 2, 3, 4, 5], seq=0)
        backend.kv.seq_cp(0, 1, 0, 4)
        prefill(backend, [6], seq=1, start=4)
        backend.kv.seq_cp(0, 2)
        backend.kv.seq_rm(2, -1, 1)
        backend.kv.seq_cp(0, 3, 0, 4)
        for companions in ((0, 1), (0, 2), (0, 3)):
            with refused(InvalidBatch, "do not hold the same cells"):
                backend.decode(BatchBuilder().add(9, 5, companions).build())
        with refused(InvalidBatch, "max_seqs"):
            backend.decode(BatchBuilder().add(9, 5, (0, 8)).build())


@proves("R22", "R25", needs_shift=True)
def seq_add_is_guarded(subject: Subject) -> None:
    with subject.make(SMALL) as backend:
        prefill(backend, list(range(1, 11)))
        with refused(InvalidOperation, "splits sequence 0"):
            backend.kv.seq_add(0, 5, -1, 1)
        with refused(InvalidOperation, "exceeds positions 0 to 63"):
            backend.kv.seq_add(0, -1, -1, -1)
        with refused(InvalidOperation, "exceeds positions 0 to 63"):
            backend.kv.seq_add(0, -1, -1, 55)
        backend.kv.seq_cp(0, 1, 0, 4)
        with refused(InvalidOperation, "shares cells"):
            backend.kv.seq_add(0, -1, -1, 2)
        backend.kv.seq_add(2, -1, -1, 7)
        assert backend.kv.seq_pos_max(0) == 9


@proves("R22")
def capabilities_are_kept(subject: Subject) -> None:
    config = replace(SMALL, partial_rm=False, partial_cp=False, shift=False)
    with subject.make(config) as backend:
        if backend.capabilities.partial_rm or backend.capabilities.partial_cp or backend.capabilities.shift:
            return
        prefill(backend, [1, 2, 3, 4])
        assert backend.kv.seq_rm(0, 2) is False
        assert backend.kv.seq_pos_max(0) == 3
        with refused(Unsupported, "whole sequences"):
            backend.kv.seq_cp(0, 1, 0, 2)
        with refused(Unsupported, "shift"):
            backend.kv.seq_add(0, -1, -1, 1)
        backend.kv.seq_cp(0, 1)
        assert backend.kv.seq_rm(0)
        assert same(subject, prefill(backend, [5], seq=1, start=4), fresh(subject, [1, 2, 3, 4, 5]))


@proves("R22")
def sequence_ids_are_limited(subject: Subject) -> None:
    with subject.make(SMALL) as backend:
        limit = backend.capabilities.max_seqs
        for seq in range(limit):
            prefill(backend, [seq + 1], seq=seq)
        for call in (backend.kv.seq_pos_max, backend.kv.seq_pos_min, backend.kv.seq_rm, backend.kv.seq_keep):
            with refused(InvalidOperation, f"outside 0 to {limit - 1}"):
                call(limit)
            with refused(InvalidOperation):
                call(-2)
        assert backend.kv.stats().num_seqs == limit


@proves("R47")
def a_window_masks_and_changes_no_position(subject: Subject) -> None:
    config = replace(SMALL, windows=(4,))
    with subject.make(config) as backend:
        prefill(backend, list(range(1, 11)))
        assert (backend.kv.seq_pos_min(0), backend.kv.seq_pos_max(0)) == (0, 9)
        logits = prefill(backend, [11], start=10)
        others = {1: [60, 61, 62, 63, 59, 58, 57, 8, 9, 10], 2: [1, 2, 3, 4, 5, 6, 7, 56, 9, 10]}
        for seq, tokens in others.items():
            prefill(backend, tokens, seq=seq)
        outside_differs, edge_differs = (prefill(backend, [11], seq=seq, start=10) for seq in others)
    if subject.tolerance == 0:  # one layer: only the window's own tokens, positions 7 to 10, matter
        assert same(subject, logits, outside_differs)
        assert not same(subject, logits, edge_differs)
