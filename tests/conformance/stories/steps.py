"""Steps and sampling: order, depth, rows, masks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from tests.conformance.story import SMALL, fresh, prefill, proves, refused, rows_of, same
from tests.conformance.subjects import Subject
from tokenmill.contract import BAD_ROW, BatchBuilder, Output, Sampled, SampleRows, last_sampled, pack_mask
from tokenmill.errors import (
    BackendClosed,
    InvalidOperation,
)


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


def second_best(logits: Any, mask: Any | None, threads: Any | None = None) -> Sampled:
    on_host = logits.cpu().numpy() if hasattr(logits, "cpu") else logits
    ids = np.asarray(on_host).argsort(axis=1)[:, -2]
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


@proves("R33")
def proposed_tokens_give_logits_of_their_own_and_are_removed_again(subject: Subject) -> None:
    """A verification: several tokens of one sequence with logits at each, draws that no row remembers, a rollback."""
    with subject.make(SMALL) as backend:
        prefill(backend, [1, 2], 0)
        batch = BatchBuilder().add_run([4, 5], 0, 1)
        for offset, token in enumerate([3, 9, 8]):
            batch.add(token, 2 + offset, 0, Output.LOGITS)
        step = backend.forward(batch.build())
        rows = SampleRows(np.array([1, 0, 2, 3], dtype=np.int32), np.array([4, 6], dtype=np.int32))
        ids = backend.collect(backend.sample(step, rows)).ids
        logs = [[1, 2, 3], [4, 5], [1, 2, 3, 9], [1, 2, 3, 9, 8]]
        assert ids.tolist() == [int(fresh(subject, log).argmax()) for log in logs]
        assert backend.kv.seq_rm(0, 3)
        assert backend.kv.seq_pos_max(0) == 2
        follow = BatchBuilder().add(last_sampled(4), 3, 0, Output.LOGITS).add(last_sampled(6), 2, 1, Output.LOGITS)
        logits = backend.decode(follow.build()).logits
        assert same(subject, logits[0], fresh(subject, [1, 2, 3, int(ids[0])])), "KV of a rejected token is left"
        assert same(subject, logits[1], fresh(subject, [4, 5, int(ids[1])]))
        with refused(InvalidOperation, "rows of the token table"):
            last = backend.forward(BatchBuilder().add(7, 4, 0, Output.LOGITS).build())
            backend.sample(last, SampleRows(np.zeros(1, dtype=np.int32), np.array([1, 2], dtype=np.int32)))


@proves("R33")
def a_verification_in_a_copy_leaves_its_source_alone(subject: Subject) -> None:
    """Proposed tokens are written behind a prefix that another sequence holds, too; both go on after the rollback."""
    with subject.make(SMALL) as backend:
        prefill(backend, [1, 2, 3, 4, 5], 0)
        backend.kv.seq_cp(0, 1)
        batch = BatchBuilder()
        for offset, token in enumerate([6, 9, 8]):
            batch.add(token, 5 + offset, 1, Output.LOGITS)
        logits = backend.decode(batch.build()).logits
        assert same(subject, logits[2], fresh(subject, [1, 2, 3, 4, 5, 6, 9, 8]))
        assert backend.kv.seq_rm(1, 6)
        follow = BatchBuilder().add(7, 5, 0, Output.LOGITS).add(10, 6, 1, Output.LOGITS).build()
        logits = backend.decode(follow).logits
        assert same(subject, logits[0], fresh(subject, [1, 2, 3, 4, 5, 7]))
        assert same(subject, logits[1], fresh(subject, [1, 2, 3, 4, 5, 6, 10]))


@proves("R33")
def ids_in_another_token_table_can_be_named(subject: Subject) -> None:
    """What a draft model has drawn is given to another one before the host knows it."""
    for depth in (0, 1):
        config = replace(SMALL, depth=depth)
        with subject.make(config) as backend, subject.make(config) as drafter:
            if backend.capabilities.depth != depth:
                continue
            prefill(backend, [1, 2], 0)
            prompts = BatchBuilder().add_run([4, 5], 0, 0).add(6, 2, 0, Output.LOGITS).add(7, 0, 1, Output.LOGITS)
            step = drafter.forward(prompts.build())
            sampling = drafter.sample(step, rows_of((0, 3), (1, 4)))
            with refused(InvalidOperation, "nothing was sampled in a row of the other"):
                backend.take_sampled(drafter, np.array([5], dtype=np.int32), np.array([6], dtype=np.int32))
            assert backend.take_sampled(drafter, np.array([4, 3], dtype=np.int32), np.array([5, 6], dtype=np.int32))
            follow = BatchBuilder().add(last_sampled(6), 2, 0, Output.LOGITS).add(last_sampled(5), 3, 0, Output.LOGITS)
            logits = backend.decode(follow.build()).logits
            ids = drafter.collect(sampling).ids.tolist()
            assert same(subject, logits[0], fresh(subject, [1, 2, ids[0]]))
            assert same(subject, logits[1], fresh(subject, [1, 2, ids[0], ids[1]]))
