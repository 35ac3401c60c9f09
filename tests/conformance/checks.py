"""What a backend must do, one small story each; `@proves` names the requirements.

They need no test framework: `python -m tests.conformance` runs them where there is none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.conformance.subjects import Subject
from tokenmill.core import (
    BAD_ROW,
    Backend,
    BatchBuilder,
    FakeConfig,
    Fault,
    FaultKind,
    Output,
    Sampled,
    Sampler,
    SampleRows,
    last_sampled,
    pack_mask,
)
from tokenmill.errors import (
    BackendClosed,
    ForwardFailed,
    InvalidBatch,
    InvalidOperation,
    OutOfKV,
    Unsupported,
)

SMALL = FakeConfig(vocab_size=64, max_context=64, num_cells=64, block_size=4, max_seqs=8)


@dataclass(frozen=True)
class Check:
    name: str
    requirements: tuple[str, ...]
    needs_faults: bool
    run: Callable[[Subject], None]


CHECKS: list[Check] = []


def proves(*requirements: str, needs_faults: bool = False) -> Callable[[Callable[[Subject], None]], Check]:
    def register(run: Callable[[Subject], None]) -> Check:
        check = Check(run.__name__, requirements, needs_faults, run)
        CHECKS.append(check)
        return check

    return register


@contextmanager
def refused(error: type[Exception], saying: str = "") -> Iterator[None]:
    try:
        yield
    except error as refusal:
        assert saying in str(refusal), f"{refusal} does not say {saying!r}"
    else:
        raise AssertionError(f"no {error.__name__}")


def prefill(backend: Backend, tokens: list[int], seq: int | tuple[int, ...] = 0, start: int = 0) -> NDArray[np.float32]:
    """Run the tokens and give the logits of the last one."""
    return backend.decode(BatchBuilder().add_run(tokens, start, seq).build()).logits[0]


def fresh(subject: Subject, tokens: list[int], config: FakeConfig = SMALL) -> NDArray[np.float32]:
    """The logits these tokens give on a backend that has never run anything else."""
    with subject.make(config) as backend:
        return prefill(backend, tokens)


def same(subject: Subject, a: NDArray[np.float32], b: NDArray[np.float32]) -> bool:
    return bool(np.abs(a - b).max() <= subject.tolerance)


# -- batches ----------------------------------------------------------------------------------------------------------


@proves("R11", "R23")
def prefill_and_decode_of_many_sequences_are_one_pass(subject: Subject) -> None:
    with subject.make(SMALL) as backend:
        prefill(backend, [1, 2, 3], seq=0)
        mixed = BatchBuilder().add(4, 3, 0, Output.LOGITS).add_run([5, 6, 7], 0, 1).build()
        output = backend.decode(mixed)
    assert output.output_ids.tolist() == [0, 3]
    assert same(subject, output.logits[0], fresh(subject, [1, 2, 3, 4]))
    assert same(subject, output.logits[1], fresh(subject, [5, 6, 7]))


@proves("R22")
def chunked_prefill_equals_whole_prefill(subject: Subject) -> None:
    tokens = list(range(1, 24))
    with subject.make(SMALL) as backend:
        for start in range(0, len(tokens), 5):
            logits = prefill(backend, tokens[start : start + 5], start=start)
    assert same(subject, logits, fresh(subject, tokens))


@proves("R23")
def order_of_a_batch_does_not_matter_between_sequences(subject: Subject) -> None:
    interleaved = BatchBuilder().add(1, 0, 0).add(7, 0, 1).add(2, 1, 0, Output.LOGITS).add(8, 1, 1, Output.LOGITS)
    with subject.make(SMALL) as backend:
        output = backend.decode(interleaved.build())
    assert same(subject, output.logits[0], fresh(subject, [1, 2]))
    assert same(subject, output.logits[1], fresh(subject, [7, 8]))


@proves("R20")
def outputs_come_for_flagged_tokens_only(subject: Subject) -> None:
    flags = [Output.NONE, Output.HIDDEN, Output.LOGITS, Output.LOGITS | Output.HIDDEN]
    builder = BatchBuilder()
    for pos, flag in enumerate(flags):
        builder.add(pos + 1, pos, 0, flag)
    with subject.make(SMALL) as backend:
        output = backend.decode(builder.build())
    assert output.output_ids.tolist() == [2, 3]
    assert output.hidden_ids.tolist() == [1, 3]
    assert len(output.logits) == len(output.hidden) == 2
    assert same(subject, output.logits[1], fresh(subject, [1, 2, 3, 4]))


@proves("R46")
def ubatches_give_the_same_result(subject: Subject) -> None:
    builder = BatchBuilder().add_run(list(range(1, 18)), 0, 0).add_run(list(range(20, 31)), 0, 1)
    batch = builder.build()
    whole = replace(SMALL, windows=(None, 5))
    cut = replace(whole, ubatch_size=3)
    with subject.make(whole) as one, subject.make(cut) as many:
        assert same(subject, one.decode(batch).logits, many.decode(batch).logits)


@proves("R46", "R24", needs_faults=True)
def a_failure_in_ubatches_is_still_all_or_nothing(subject: Subject) -> None:
    with subject.make(replace(SMALL, ubatch_size=3)) as backend:
        prefill(backend, [1, 2])
        backend.faults.add(Fault(FaultKind.FAIL))  # type: ignore[attr-defined]
        with refused(ForwardFailed):
            prefill(backend, list(range(3, 13)), start=2)
        assert backend.kv.seq_pos_max(0) == 1
        assert same(subject, prefill(backend, [9], start=2), fresh(subject, [1, 2, 9]))


@proves("R20", "R23")
def bad_batches_are_refused_and_change_nothing(subject: Subject) -> None:
    with subject.make(SMALL) as backend:
        prefill(backend, [1, 2, 3])
        before = backend.kv.stats()
        refusals = {
            "goes on at position 3, not 4": BatchBuilder().add(1, 4, 0),
            "goes on at position 3, not 2": BatchBuilder().add(1, 2, 0),
            "goes on at position 0, not 1": BatchBuilder().add(1, 1, 1),
            "goes on at position 4, not 3": BatchBuilder().add(1, 3, 0).add(1, 3, 0),
            "not below max_seqs 8": BatchBuilder().add(1, 0, 8),
            "outside the context of 64": BatchBuilder().add_run([1] * 62, 3, 0),
            "outside the vocabulary of 64": BatchBuilder().add(64, 3, 0),
            "row in which nothing was sampled": BatchBuilder().add(last_sampled(5), 3, 0),
            "do not hold the same cells": BatchBuilder().add(1, 3, (0, 1)),
        }
        for saying, builder in refusals.items():
            with refused(InvalidBatch, saying):
                backend.decode(builder.build())
            assert backend.kv.stats() == before
        assert same(subject, prefill(backend, [4], start=3), fresh(subject, [1, 2, 3, 4]))


# -- sequences --------------------------------------------------------------------------------------------------------


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


@proves("R22")
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


@proves("R22")
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
        with refused(InvalidOperation, "leaves positions"):
            backend.kv.seq_add(0, -1, -1, 2**31)
    if subject.tolerance == 0:
        assert same(subject, output.logits[0], fresh(subject, [*range(4, 11), 30]))
        assert same(subject, output.logits[1], fresh(subject, [*range(4, 11), 31]))
        assert same(subject, last, fresh(subject, [*range(4, 11), 30, *range(40, 48)]))


@proves("R22")
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


@proves("R22")
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


@proves("R22", "R25")
def seq_add_is_guarded(subject: Subject) -> None:
    with subject.make(SMALL) as backend:
        prefill(backend, list(range(1, 11)))
        with refused(InvalidOperation, "tears sequence 0 apart"):
            backend.kv.seq_add(0, 5, -1, 1)
        with refused(InvalidOperation, "leaves positions 0 to 63"):
            backend.kv.seq_add(0, -1, -1, -1)
        with refused(InvalidOperation, "leaves positions 0 to 63"):
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


# -- resources --------------------------------------------------------------------------------------------------------


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


@proves("R22")
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


# -- failures ---------------------------------------------------------------------------------------------------------


@proves("R24", needs_faults=True)
def a_failed_forward_leaves_no_trace(subject: Subject) -> None:
    for depth in (0, 1):
        with subject.make(replace(SMALL, depth=depth)) as backend:
            prefill(backend, [1, 2, 3, 4, 5])
            backend.kv.seq_cp(0, 1)
            before = backend.kv.stats()
            backend.faults.add(Fault(FaultKind.FAIL))  # type: ignore[attr-defined]
            with refused(ForwardFailed):
                backend.decode(BatchBuilder().add(6, 5, 0, Output.LOGITS).add(7, 5, 1, Output.LOGITS).build())
            assert backend.kv.stats() == before
            after = prefill(backend, [8], seq=1, start=5)
        assert same(subject, after, fresh(subject, [1, 2, 3, 4, 5, 8]))


@proves("R24", needs_faults=True)
def a_failed_forward_has_not_written_over_what_it_must_give_back(subject: Subject) -> None:
    """The short fork writes where the long sequence still has cells, which has just moved to a copy of its own."""
    with subject.make(SMALL) as backend:
        prefill(backend, [1, 2, 3])
        backend.kv.seq_cp(0, 1, 0, 1)
        backend.faults.add(Fault(FaultKind.FAIL))  # type: ignore[attr-defined]
        with refused(ForwardFailed):
            backend.decode(BatchBuilder().add(4, 3, 0, Output.LOGITS).add(50, 1, 1, Output.LOGITS).build())
        assert same(subject, prefill(backend, [4], start=3), fresh(subject, [1, 2, 3, 4]))
        assert same(subject, prefill(backend, [50], seq=1, start=1), fresh(subject, [1, 50]))


@proves("R24", needs_faults=True)
def blocks_left_by_a_failed_forward_are_as_they_were(subject: Subject) -> None:
    """Three forks of different length write into one block; across segments, too; and nothing is freed twice."""
    parting = BatchBuilder().add(7, 3, 0, Output.LOGITS).add(9, 0, (4, 5)).add(9, 1, 4).add(63, 1, 1).add(62, 2, 2)
    together = BatchBuilder().add(7, 3, 0, Output.LOGITS).add(63, 1, 1).add(62, 2, 2)
    for batch in (together.build(), parting.build()):
        with subject.make(SMALL) as backend:
            prefill(backend, [1, 2, 3])
            backend.kv.seq_cp(0, 1, 0, 1)
            backend.kv.seq_cp(0, 2, 0, 2)
            before = backend.kv.stats()
            for _ in range(2):
                backend.faults.add(Fault(FaultKind.FAIL))  # type: ignore[attr-defined]
                with refused(ForwardFailed):
                    backend.decode(batch)
                assert backend.kv.stats() == before
            assert same(subject, backend.decode(batch).logits[0], fresh(subject, [1, 2, 3, 7]))
            assert same(subject, prefill(backend, [5], seq=1, start=2), fresh(subject, [1, 63, 5]))
            assert same(subject, prefill(backend, [5], seq=2, start=3), fresh(subject, [1, 2, 62, 5]))
            backend.kv.clear()
            assert backend.kv.free() == backend.kv.stats().num_cells


@proves("R24", needs_faults=True)
def a_failure_found_late_takes_later_steps_along(subject: Subject) -> None:
    with subject.make(replace(SMALL, depth=1)) as backend:
        prefill(backend, [1, 2, 3])
        backend.faults.add(Fault(FaultKind.LATE_FAIL))  # type: ignore[attr-defined]
        first = backend.forward(BatchBuilder().add(4, 3, 0, Output.LOGITS).build())
        backend.sample(first, rows_of((0, 0)))
        second = backend.forward(BatchBuilder().add(5, 4, 0, Output.LOGITS).add(6, 0, 2).build())
        backend.sample(second, rows_of((0, 1)))
        backend.kv.seq_cp(0, 1)
        for step in (first, second):
            with refused(ForwardFailed):
                backend.collect(step)
        assert [backend.kv.seq_pos_max(seq) for seq in range(3)] == [2, 2, -1]
        for row in (0, 1):
            with refused(InvalidBatch, "nothing was sampled"):
                backend.forward(BatchBuilder().add(last_sampled(row), 3, 0).build())
        assert same(subject, prefill(backend, [7], seq=1, start=3), fresh(subject, [1, 2, 3, 7]))


@proves("R24", needs_faults=True)
def a_fatal_failure_ends_the_backend(subject: Subject) -> None:
    for kind in (FaultKind.FATAL, FaultKind.LATE_FATAL):
        with subject.make(SMALL) as backend:
            prefill(backend, [1, 2, 3])
            backend.faults.add(Fault(kind))  # type: ignore[attr-defined]
            for _ in range(2):
                try:
                    prefill(backend, [4], start=3)
                except ForwardFailed as failure:
                    assert failure.fatal
                else:
                    raise AssertionError("a lost backend went on")


@proves("R24", needs_faults=True)
def not_a_number_fails_its_own_rows_only(subject: Subject) -> None:
    with subject.make(SMALL) as backend:
        backend.faults.add(Fault(FaultKind.NAN, token=13))  # type: ignore[attr-defined]
        step = backend.forward(BatchBuilder().add_run([1, 13, 3], 0, 0).add_run([4, 5], 0, 1).build())
        ids = backend.collect(backend.sample(step, rows_of((0, 0), (1, 1)))).ids
        assert ids[0] == BAD_ROW
        assert ids[1] == fresh(subject, [4, 5]).argmax()
        assert np.isnan(backend.collect(step).logits[0]).all()
        # At depth 1 the bad row's next token may be in flight already: its id must be some valid one.
        backend.decode(BatchBuilder().add(last_sampled(0), 3, 0, Output.LOGITS).build())


@proves("R48")
def steps_run_on_one_stream_in_order(subject: Subject) -> None:
    for depth in (0, 1):
        with subject.make(replace(SMALL, depth=depth)) as backend:
            if backend.capabilities.depth != depth:
                continue
            steps = [backend.forward(BatchBuilder().add(1 + p, p, 0, Output.LOGITS).build()) for p in range(depth + 1)]
            with refused(InvalidOperation, "collect one first"):
                backend.forward(BatchBuilder().add(9, depth + 1, 0).build())
            assert backend.kv.seq_pos_max(0) == depth
            if depth:
                with refused(InvalidOperation, "in the order"):
                    backend.collect(steps[1])
            for p, step in enumerate(steps):
                assert same(subject, backend.collect(step).logits[0], fresh(subject, list(range(1, 2 + p))))
                backend.collect(step)


@proves("R48")
def a_step_can_name_the_token_of_the_one_before(subject: Subject) -> None:
    with subject.make(replace(SMALL, depth=1)) as backend:
        if backend.capabilities.depth == 0:
            return
        prompt = backend.forward(BatchBuilder().add_run([1, 2, 3], 0, 5).build())
        first = backend.sample(prompt, rows_of((0, 4)))
        follow = backend.forward(BatchBuilder().add(last_sampled(4), 3, 5, Output.LOGITS).build())
        token = int(backend.collect(first).ids[0])
        assert token == fresh(subject, [1, 2, 3]).argmax()
        assert same(subject, backend.collect(follow).logits[0], fresh(subject, [1, 2, 3, token]))


def rows_of(*pairs: tuple[int, int], sampler: Sampler | None = None) -> SampleRows:
    """(logits row, table row) pairs."""
    logits, table = np.array(pairs, dtype=np.int32).T
    return SampleRows(logits, table, sampler)


def second_best(logits: Any, mask: Any | None) -> Sampled:
    ids = np.asarray(logits).argsort(axis=1)[:, -2]
    return Sampled(ids.astype(np.int32), {"asked": np.arange(len(ids))})


@proves("R20")
def sampling_takes_masks_and_samplers_row_by_row(subject: Subject) -> None:
    prompts = {0: [1, 2, 3], 1: [4, 5], 2: [6]}
    expected = [fresh(subject, tokens) for tokens in prompts.values()]
    builder = BatchBuilder()
    for seq, tokens in prompts.items():
        builder.add_run(tokens, 0, seq)
    allowed = np.zeros((2, SMALL.vocab_size), dtype=bool)
    allowed[0, [7, 33]] = True
    allowed[1, [8, 20]] = True
    with subject.make(SMALL) as backend:
        step = backend.forward(builder.build())
        masked = backend.sample(step, rows_of((2, 4), (0, 5)), pack_mask(allowed))
        own = backend.sample(step, rows_of((1, 0), sampler=second_best))
        ids = backend.collect(masked).ids
        assert ids[0] == max((7, 33), key=lambda token: expected[2][token])
        assert ids[1] == max((8, 20), key=lambda token: expected[0][token])
        sampled = backend.collect(own)
        assert sampled.ids[0] == expected[1].argsort()[-2]
        assert sampled.extras["asked"].tolist() == [0]
        follow = BatchBuilder().add(last_sampled(4), 1, 2, Output.LOGITS).build()
        assert same(subject, backend.decode(follow).logits[0], fresh(subject, [6, int(ids[0])]))


@proves("R20")
def wrong_rows_and_masks_are_refused(subject: Subject) -> None:
    with subject.make(SMALL) as backend, subject.make(SMALL) as stranger:
        step = backend.forward(BatchBuilder().add_run([1, 2, 3], 0, 0).build())
        one = np.ones((1, SMALL.vocab_size), dtype=bool)
        for rows in (rows_of((1, 0)), rows_of((-1, 0)), rows_of((0, 8)), rows_of((0, -1)), rows_of((0, 3), (0, 3))):
            with refused(InvalidOperation):
                backend.sample(step, rows)
        with refused(InvalidOperation, "token table"):
            backend.sample(step, SampleRows(np.zeros(1, dtype=np.int32), np.zeros(3, dtype=np.int32)))
        with refused(InvalidOperation, "mask"):
            backend.sample(step, rows_of((0, 0), (0, 1)), pack_mask(one))
        with refused(InvalidOperation, "no handle of this backend"):
            stranger.sample(step, rows_of((0, 0)))
        none_allowed = backend.sample(step, rows_of((0, 0)), pack_mask(~one))
        assert backend.collect(none_allowed).ids[0] == BAD_ROW
        with refused(InvalidOperation, "no handle of this backend"):
            stranger.collect(step)
        with refused(InvalidOperation, "before it is collected"):
            backend.sample(step, rows_of((0, 0)))


@proves("R48")
def a_step_is_sampled_before_the_next_forward(subject: Subject) -> None:
    with subject.make(replace(SMALL, depth=1)) as backend:
        if backend.capabilities.depth == 0:
            return
        first = backend.forward(BatchBuilder().add(1, 0, 0, Output.LOGITS).build())
        second = backend.forward(BatchBuilder().add(2, 1, 0, Output.LOGITS).build())
        with refused(InvalidOperation, "before the next forward"):
            backend.sample(first, rows_of((0, 0)))
        backend.collect(first)
        backend.collect(second)


@proves("R20")
def closing_is_final_and_can_be_repeated(subject: Subject) -> None:
    backend = subject.make(SMALL)
    prefill(backend, [1])
    backend.close()
    backend.close()
    batch = BatchBuilder().add(2, 1, 0).build()
    with refused(BackendClosed):
        backend.forward(batch)
