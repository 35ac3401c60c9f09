"""`Machine`: runs every operation on a backend and on the specification, and compares all that can be seen."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tests.conformance.subjects import Cells, Oracle, Subject
from tokenmill.backends.fake import FakeConfig, Fault, FaultKind
from tokenmill.contract import Batch, BatchBuilder, CellTable, Forward, Output, SampleRows, Sampling, last_sampled
from tokenmill.errors import BackendError, ForwardFailed, InvalidBatch, OutOfKV

FROM_ROW = -1
"""As a token: the one last sampled for the token's first sequence."""


class Token(NamedTuple):
    token: int
    pos: int
    seqs: tuple[int, ...]
    output: int = Output.NONE


@dataclass
class InFlight:
    """A step that the backend has not been asked about yet, with what it must answer."""

    forward: Forward
    sampling: Sampling
    rows: list[int]
    expected: list[NDArray[np.float32] | None]
    sampled: list[int]
    """The logits rows that were sampled: the last one of each sequence."""
    hidden: list[NDArray[np.float32] | None]
    step: int
    fails: bool


class Machine:
    """A backend, the specification beside it, and the log of what was done to both."""

    def __init__(self, subject: Subject, config: FakeConfig) -> None:
        self.subject = subject
        self.config = config = subject.adapt(config)
        self.backend = subject.make(config)
        self.kv = self.backend.kv
        self.spec = CellTable(config.num_cells, config.max_context, config.block_size, config.capabilities)
        self.token_of_cell = np.zeros(len(self.spec.pos), dtype=np.int32)
        self.last_token: dict[int, int] = {}
        """Row -> the token last sampled in it."""
        self.in_flight: deque[InFlight] = deque()
        self.log: list[str] = []

    # -- operations ---------------------------------------------------------------------------------------------------

    def seq_rm(self, seq: int, p0: int, p1: int) -> None:
        self.both(f"seq_rm({seq}, {p0}, {p1})", lambda kv: kv.seq_rm(seq, p0, p1))

    def seq_cp(self, src: int, dst: int, p0: int, p1: int) -> None:
        self.both(f"seq_cp({src}, {dst}, {p0}, {p1})", lambda kv: kv.seq_cp(src, dst, p0, p1))

    def seq_keep(self, seq: int) -> None:
        self.both(f"seq_keep({seq})", lambda kv: kv.seq_keep(seq))

    def seq_add(self, seq: int, p0: int, p1: int, delta: int) -> None:
        self.both(f"seq_add({seq}, {p0}, {p1}, {delta})", lambda kv: kv.seq_add(seq, p0, p1, delta))

    def clear(self) -> None:
        self.both("clear()", lambda kv: kv.clear())

    def move_through_bytes(self, seq: int) -> None:
        """Export a sequence that shares no cell, remove it, import it again: nothing changes but where blocks begin."""
        while self.in_flight:
            self.collect()
        start, cells = self.spec.seq_pos_min(seq), self.spec.cells_of(seq)
        if start < 0 or (self.spec.held[:, cells].sum(axis=0) > 1).any():
            return
        self.log.append(f"move_through_bytes({seq})")
        state = self.kv.export(seq)
        tokens = self.token_of_cell[cells].tolist()
        self.kv.seq_rm(seq)
        self.spec.seq_rm(seq)
        expected = outcome(lambda spec: self.refill(spec, seq, tokens, start), self.spec)
        assert outcome(lambda kv: kv.import_(seq, state), self.kv) == expected
        self.check()

    def run(self, tokens: list[Token], fault: FaultKind | None = None) -> None:
        """Submit a batch; collects the oldest step first if the depth asks for it."""
        self.log.append(f"run({tokens}, fault={fault and fault.name})")
        while len(self.in_flight) > self.config.depth:
            self.collect()
        builder = BatchBuilder()
        for token, pos, seqs, output in tokens:
            builder.add(last_sampled(seqs[0]) if token == FROM_ROW else token, pos, seqs, output)
        batch = builder.build()
        expected = self.expect(batch)
        self.check_planning(batch, expected)
        armed = fault is not None and not isinstance(expected, BackendError)
        striking = Fault(fault) if fault and armed else None
        if striking is not None:
            self.backend.faults.add(striking)  # type: ignore[attr-defined]
        try:
            forward: Forward | BackendError = self.backend.forward(batch)
        except BackendError as error:
            forward = error
        if striking is not None and fault in (FaultKind.FAIL, FaultKind.OUT_OF_KV):
            wanted = ForwardFailed if fault is FaultKind.FAIL else OutOfKV
            assert isinstance(forward, wanted), f"the planned fault gave {forward!r}"
        elif isinstance(expected, BackendError) or isinstance(forward, BackendError):
            assert type(forward) is type(expected), f"expected {expected!r}, got {forward!r}"
        else:
            self.accept(batch, forward, fails=fault is FaultKind.LATE_FAIL)
        self.check()

    def collect(self) -> None:
        """Collect the oldest step and compare its logits and ids with what was owed."""
        if not self.in_flight:
            return
        self.log.append("collect()")
        step = self.in_flight.popleft()
        if step.fails:
            self.collect_failure(step)
            return
        sampled = self.backend.collect(step.sampling)
        output = self.backend.collect(step.forward)
        for k, expected in enumerate(step.expected):
            if expected is None:
                continue
            worst = float(np.abs(output.logits[k] - expected).max())
            assert worst <= self.subject.tolerance, f"logits row {k} (row {step.rows[k]}) is off by {worst}"
            if k in step.sampled and self.is_clear(expected):
                assert sampled.ids[step.sampled.index(k)] == expected.argmax()
        for row, hidden in zip(output.hidden, step.hidden, strict=True):
            assert hidden is None or np.abs(row - hidden).max() <= self.subject.tolerance
        self.check()

    def collect_failure(self, step: InFlight) -> None:
        """The step fails at collect, and takes the later ones with it: as if none of them had been submitted."""
        for failed in [step, *self.in_flight]:
            try:
                self.backend.collect(failed.sampling)
            except ForwardFailed:
                pass
            else:
                raise AssertionError("a failed step was collected")
            for row in failed.rows:
                self.last_token.pop(row, None)
        self.spec.forget(step.step)
        self.in_flight.clear()
        self.check()

    def finish(self) -> None:
        """Collect what is in flight, look at every sequence through one more token, then free everything."""
        while self.in_flight:
            self.collect()
        for seq in range(self.config.max_seqs):
            pos = self.spec.seq_pos_max(seq) + 1
            if 0 < pos < self.config.max_context:
                self.run([Token(1, pos, (seq,), Output.LOGITS)])
        while self.in_flight:
            self.collect()
        self.clear()
        stats = self.kv.stats()
        assert stats.free_cells == stats.num_cells, f"cells leaked: {stats}"
        assert (stats.held_cells, stats.referenced_cells, stats.num_seqs) == (0, 0, 0)
        self.backend.close()

    # -- the specification's side -------------------------------------------------------------------------------------

    def expect(self, batch: Batch) -> BackendError | None:
        """The error the contract wants for this batch, if any."""
        pending = [-1 - int(token) for token in batch.token if token < 0]
        if any(row not in self.last_token for row in pending) or batch.token.max() >= self.config.vocab_size:
            return InvalidBatch("unknown row or token")
        try:
            self.spec.prepare(batch)
        except BackendError as error:
            return error
        return None

    def check_planning(self, batch: Batch, expected: BackendError | None) -> None:
        """`needed` is exact, and enough: needed <= free means no OutOfKV."""
        if isinstance(expected, InvalidBatch):
            return
        needed = self.kv.needed(batch)
        assert needed == self.spec.needed(batch), f"needed {needed}, specification says {self.spec.needed(batch)}"
        assert (needed <= self.kv.free()) == (expected is None)

    def accept(self, batch: Batch, forward: Forward, fails: bool) -> None:
        """The step was submitted: apply it to the specification and note what it must give when collected."""
        plan = self.spec.prepare(batch)
        step = self.spec.apply(plan)
        for i, cell in enumerate(plan.cells):
            for copy in plan.copies:
                if copy.token == i:
                    self.token_of_cell[copy.copy] = self.token_of_cell[copy.source]
            token = int(batch.token[i])
            self.token_of_cell[cell] = token if token >= 0 else self.last_token[-1 - token]
        rows = [batch.sequences_of(int(index))[0] for index in batch.rows(Output.LOGITS)]
        owed = [self.owed(batch, int(index), self.subject.oracle) for index in batch.rows(Output.LOGITS)]
        hidden = [self.owed(batch, int(index), self.subject.hidden_oracle) for index in batch.rows(Output.HIDDEN)]
        sampled = sorted({row: k for k, row in enumerate(rows)}.values())
        sampling = self.backend.sample(
            forward, SampleRows(np.array(sampled, dtype=np.int32), np.array([rows[k] for k in sampled], dtype=np.int32))
        )
        for k in sampled:
            expected = owed[k]
            self.last_token.pop(rows[k], None)
            if expected is not None and self.is_clear(expected):
                self.last_token[rows[k]] = int(expected.argmax())
        self.in_flight.append(InFlight(forward, sampling, rows, owed, sampled, hidden, step, fails))

    def is_clear(self, expected: NDArray[np.float32]) -> bool:
        """Is the largest logit so by more than the subject's tolerance?"""
        second, first = np.partition(expected, -2)[-2:]
        return bool(first - second > 2 * self.subject.tolerance)

    def owed(self, batch: Batch, index: int, oracle: Oracle) -> NDArray[np.float32] | None:
        # A token's sequences held the same cells when it was computed; later in the batch they may have parted.
        return oracle(self.config, self.visible(batch.sequences_of(index)[:1], int(batch.pos[index])))

    def visible(self, seqs: list[int], pos: int) -> list[Cells]:
        layers = []
        for window in self.config.windows:
            cells = self.spec.visible(seqs, pos, window)
            layers.append([(int(self.token_of_cell[cell]), int(self.spec.pos[cell])) for cell in cells])
        return layers

    def refill(self, spec: CellTable, seq: int, tokens: list[int], start: int) -> None:
        """Put tokens into an empty sequence of the specification, the first one at position `start`."""
        plan = spec.prepare(BatchBuilder().add_run(tokens, 0, seq).build())
        spec.apply(plan)
        self.token_of_cell[plan.cells] = tokens
        spec.pos[plan.cells] += start

    # -- comparing ----------------------------------------------------------------------------------------------------

    def both(self, what: str, operation: Callable[[Any], Any]) -> None:
        """Do the same to the backend's memory and to the specification; results and error types must agree."""
        self.log.append(what)
        expected, got = outcome(operation, self.spec), outcome(operation, self.kv)
        assert got == expected, f"{what}: expected {expected}, got {got}"
        self.check()

    def check_cells(self, seq: int, stored: Cells) -> None:
        cells = self.spec.cells_of(seq)
        expected = list(zip(self.token_of_cell[cells].tolist(), self.spec.pos[cells].tolist(), strict=True))
        assert stored == expected, f"sequence {seq} has {stored} stored, specification says {expected}"

    def check(self) -> None:
        for seq in range(self.config.max_seqs):
            got = (self.kv.seq_pos_min(seq), self.kv.seq_pos_max(seq))
            expected = (self.spec.seq_pos_min(seq), self.spec.seq_pos_max(seq))
            assert got == expected, f"sequence {seq} holds {got}, specification says {expected}"
            if self.subject.peek is not None:
                self.check_cells(seq, self.subject.peek(self.backend, seq))
        assert self.kv.free() == self.spec.free(), f"{self.kv.free()} cells free, specification: {self.spec.free()}"
        assert self.kv.stats() == self.spec.stats()
        seqs = range(self.config.max_seqs)
        for some in [(), seqs, seqs[::2], seqs[1::2], *((seq,) for seq in seqs)]:
            got, expected = self.kv.exclusive(some), self.spec.exclusive(some)
            assert got == expected, f"sequences {[*some]} alone hold {got} cells, specification says {expected}"
        check_integrity = getattr(self.kv, "check_integrity", None)
        if check_integrity is not None:
            check_integrity()


def outcome(operation: Callable[[Any], Any], kv: Any) -> object:
    """What a call gave, in a form that can be compared: its value, or the class of its error."""
    try:
        return operation(kv)
    except BackendError as error:
        return type(error).__name__
