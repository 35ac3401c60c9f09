"""Batches: what runs, and what is refused."""

from __future__ import annotations

from dataclasses import replace

from tests.conformance.story import SMALL, fresh, prefill, proves, refused, same
from tests.conformance.subjects import Subject
from tokenmill.backends.fake import Fault, FaultKind
from tokenmill.contract import BatchBuilder, Output, last_sampled
from tokenmill.errors import (
    ForwardFailed,
    InvalidBatch,
)


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
            "must continue at position 3, not 4": BatchBuilder().add(1, 4, 0),
            "must continue at position 3, not 2": BatchBuilder().add(1, 2, 0),
            "must continue at position 0, not 1": BatchBuilder().add(1, 1, 1),
            "must continue at position 4, not 3": BatchBuilder().add(1, 3, 0).add(1, 3, 0),
            "must be below max_seqs 8": BatchBuilder().add(1, 0, 8),
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
