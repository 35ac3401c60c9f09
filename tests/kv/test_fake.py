"""What is the fake backend's own: its hash, its faults, its cost."""

import gc
import threading
import weakref

import numpy as np
import pytest

from tests.conformance.subjects import naive_fake_rows
from tests.counting import calls_during
from tokenmill.backends.fake import FakeBackend, FakeConfig, Fault, FaultKind
from tokenmill.contract import BatchBuilder, Output
from tokenmill.errors import ForwardFailed, OutOfKV


def test_logits_and_hidden_rows_are_the_hash_of_what_is_visible() -> None:
    config = FakeConfig(vocab_size=17, hidden_size=5, windows=(None, 2))
    cells = [(9, 0), (4, 1), (4, 2)]
    with FakeBackend(config) as backend:
        batch = BatchBuilder().add_run([9, 4, 4], 0, 3, Output.LOGITS | Output.HIDDEN).build()
        output = backend.decode(batch)
    layers = [cells, cells[1:]]
    assert (output.logits[0] == naive_fake_rows(config, layers, 17, salt=1)).all()
    assert (output.hidden[0] == naive_fake_rows(config, layers, 5, salt=2)).all()


def test_logits_are_spread_out() -> None:
    """Any change of context moves the greedy choice somewhere else, so that a wrong KV shows in the ids."""
    with FakeBackend(FakeConfig(vocab_size=256, num_cells=65536)) as backend:
        batch = BatchBuilder()
        for seq in range(200):
            batch.add_run([seq % 256, 1], 0, seq)
        logits = backend.decode(batch.build()).logits
    assert -8 <= logits.min() < -7.9
    assert 7.9 < logits.max() < 8
    assert abs(logits.mean()) < 0.1
    assert len(set(logits.argmax(axis=1).tolist())) > 100


def decode_one(backend: FakeBackend, token: int, seq: int = 0) -> None:
    backend.decode(BatchBuilder().add(token, backend.kv.seq_pos_max(seq) + 1, seq, Output.LOGITS).build())


def test_a_fault_strikes_as_often_and_as_late_as_told() -> None:
    with FakeBackend() as backend:
        backend.faults.add(Fault(FaultKind.FAIL, times=2, after=1))
        outcomes = []
        for _ in range(5):
            try:
                decode_one(backend, 1)
            except ForwardFailed:
                outcomes.append("failed")
            else:
                outcomes.append("ok")
    assert outcomes == ["ok", "failed", "failed", "ok", "ok"]


def test_a_fault_can_follow_a_token_or_a_sequence() -> None:
    with FakeBackend() as backend:
        poison, victim = Fault(FaultKind.FAIL, token=13, times=None), Fault(FaultKind.OUT_OF_KV, seq=4, times=None)
        backend.faults.add(poison)
        backend.faults.add(victim)
        decode_one(backend, 1)
        for _ in range(2):
            with pytest.raises(ForwardFailed):
                decode_one(backend, 13)
            with pytest.raises(OutOfKV):
                decode_one(backend, 1, seq=4)
        backend.faults.remove(poison)
        decode_one(backend, 13)


def test_a_stalled_step_waits_for_its_release() -> None:
    with FakeBackend() as backend:
        fault = Fault(FaultKind.STALL)
        backend.faults.add(fault)
        owner = threading.Thread(target=decode_one, args=(backend, 1))
        owner.start()
        assert fault.stalled.wait(timeout=30)
        assert owner.is_alive()
        fault.release.set()
        owner.join(timeout=30)
        assert not owner.is_alive()
        decode_one(backend, 2)


def test_the_bookkeeping_of_a_decode_step_has_no_loop_over_sequences() -> None:
    """Counted, not timed: the number of Python calls a step makes does not grow with its sequences."""

    def calls_of_one_step(num_seqs: int) -> int:
        config = FakeConfig(max_seqs=num_seqs, num_cells=num_seqs * 32)
        with FakeBackend(config) as backend:
            prompts = BatchBuilder()
            for seq in range(num_seqs):
                prompts.add_run([1, 2, 3], 0, seq)
            backend.decode(prompts.build())
            step = BatchBuilder()
            for seq in range(num_seqs):
                step.add(4, 3, seq, Output.LOGITS)
            batch = step.build()
            return calls_during(lambda: backend.decode(batch))

    assert calls_of_one_step(256) == calls_of_one_step(4)


def test_rows_with_no_sampling_are_fine() -> None:
    with FakeBackend() as backend:
        output = backend.decode(BatchBuilder().add(1, 0, 0).build())
        assert output.logits.shape == (0, 256)
        assert output.hidden.dtype == np.float32


def test_a_closed_backend_is_gone_with_its_last_user() -> None:
    """Without anybody looking for things that know only each other: it may hold most of a card's memory."""
    backend = FakeBackend()
    backend.decode(BatchBuilder().add(1, 0, 0, Output.LOGITS).build())
    gone = weakref.ref(backend)
    gc.disable()
    try:
        backend.close()
        del backend
        assert gone() is None
    finally:
        gc.enable()


def test_a_sequence_imported_into_cells_of_a_step_in_flight_outlives_its_failure() -> None:
    """The cells of a step that is found to have failed are dropped, but not where they have been filled anew since."""
    with FakeBackend(FakeConfig(num_cells=8, block_size=4, depth=1)) as backend:
        backend.decode(BatchBuilder().add_run([1, 2, 3], 0, 0).build())
        state = backend.kv.export(0)
        backend.kv.seq_rm(0)
        backend.faults.add(Fault(FaultKind.LATE_FAIL))
        step = backend.forward(BatchBuilder().add_run([4, 5, 6, 7, 8], 0, 1).build())
        backend.kv.seq_rm(1)
        backend.kv.import_(2, state)
        with pytest.raises(ForwardFailed):
            backend.collect(step)
        assert (backend.kv.seq_pos_min(2), backend.kv.seq_pos_max(2)) == (0, 2)
        got = backend.decode(BatchBuilder().add(9, 3, 2, Output.LOGITS).build()).logits
    with FakeBackend() as fresh:
        assert (got == fresh.decode(BatchBuilder().add_run([1, 2, 3, 9], 0, 0).build()).logits).all()
