"""Failures: a step that fails leaves no trace."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tests.conformance.story import SMALL, fresh, prefill, proves, refused, rows_of, same
from tests.conformance.subjects import Subject
from tokenmill.backends.fake import Fault, FaultKind
from tokenmill.contract import BAD_ROW, BatchBuilder, Output, last_sampled
from tokenmill.errors import (
    ForwardFailed,
    InvalidBatch,
)


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
        if backend.capabilities.depth == 0:
            return
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
def an_import_into_cells_of_a_step_in_flight_outlives_that_step(subject: Subject) -> None:
    """A step's sequence is removed, an import reuses its cells, and then the step turns out to have failed."""
    with subject.make(replace(SMALL, depth=1)) as backend:
        if backend.capabilities.depth == 0 or not backend.capabilities.state_bytes:
            return
        prefill(backend, [1, 2, 3])
        state = backend.kv.export(0)
        others = BatchBuilder().add_run(list(range(backend.kv.free())), 0, 1).build()
        backend.faults.add(Fault(FaultKind.LATE_FAIL))  # type: ignore[attr-defined]
        step = backend.forward(others)
        backend.kv.seq_rm(1)
        backend.kv.import_(2, state)
        with refused(ForwardFailed):
            backend.collect(step)
        assert [backend.kv.seq_pos_max(seq) for seq in range(3)] == [2, -1, 2]
        assert same(subject, prefill(backend, [7], seq=2, start=3), fresh(subject, [1, 2, 3, 7]))


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
        # Whoever gets its cells next sees nothing of it, however much of a block it fills.
        backend.kv.seq_rm(0)
        for seq in (2, 3, 4):
            assert same(subject, prefill(backend, [7, 8, 9], seq), fresh(subject, [7, 8, 9]))
